//! How fast this machine multiplies, measured in a moment.
//!
//! Nothing is decided by it that a run depends on: it is for telling people, before anything is loaded, how long
//! something will take.

use std::ops::Range;
use std::time::{Duration, Instant};

use half::bf16;

use super::{
    Cpu, Device, HostMatrix, Keep, Matrix, MatrixMut, Products, StoredMatrix, ThreadsError, widen_bf16,
};

/// Larger sides are measured as if they had this length: products of that size have reached their rate.
const LONGEST_SIDE: usize = 1024;
/// More rows change nothing.
const MOST_ROWS: usize = 256;

/// Floating-point operations per second of one thread, a multiply-add counted as two.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ProductRates {
    /// With f32 weights that change, as a draft computes.
    pub draft_flops_per_s: f64,
    /// With bf16 weights that stay, as a verifier computes. Other packed forms take longer.
    pub verifier_flops_per_s: f64,
}

impl ProductRates {
    /// Measures products `[rows, inputs] · [inputs, outputs]` of a draft and of a verifier on one thread each for about
    /// `budget` together.
    ///
    /// # Errors
    /// If a thread cannot be started.
    pub fn measure(
        (rows, inputs, outputs): (usize, usize, usize),
        (draft, verifier): (Products, Products),
        budget: Duration,
    ) -> Result<Self, ThreadsError> {
        let rows = rows.clamp(1, MOST_ROWS);
        let (inputs, outputs) = (inputs.clamp(1, LONGEST_SIDE), outputs.clamp(1, LONGEST_SIDE));
        let x = values(rows * inputs);
        let wide = values(inputs * outputs);
        let packed = Packed {
            values: wide.iter().copied().map(bf16::from_f32).collect(),
            cols: inputs,
            kept: Keep::new(),
        };
        let mut y = vec![0.0; rows * outputs];
        let flops = 2.0 * rows as f64 * inputs as f64 * outputs as f64;
        type Product<'p> = &'p (dyn Fn(&Cpu, MatrixMut<'_>, Matrix<'_>) + Sync);
        let mut rate = |products: Products, product: Product<'_>| -> Result<f64, ThreadsError> {
            let device = Cpu::with_products(1, products)?;
            let shortest = device.install(|| {
                shortest(budget / 2, || {
                    product(
                        &device,
                        MatrixMut::new(&mut y, rows, outputs),
                        Matrix::new(&x, rows, inputs),
                    );
                })
            });
            Ok(flops / shortest.as_secs_f64())
        };
        let weights = Matrix::new(&wide, outputs, inputs).transposed();
        Ok(Self {
            draft_flops_per_s: rate(draft, &|device, y, x| device.gemm(y, x, weights, 1.0, false))?,
            verifier_flops_per_s: rate(verifier, &|device, y, x| device.gemm_stored(y, x, &packed, false))?,
        })
    }
}

/// A bf16 matrix, row-major.
#[derive(Debug)]
struct Packed {
    values: Vec<bf16>,
    cols: usize,
    kept: Keep,
}

impl StoredMatrix for Packed {
    fn rows(&self) -> usize {
        self.values.len() / self.cols
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn in_place(&self) -> Option<HostMatrix<'_>> {
        None
    }

    fn in_place_bf16(&self) -> Option<HostMatrix<'_, bf16>> {
        Some(HostMatrix::new(&self.values[..], self.rows(), self.cols))
    }

    fn kept(&self) -> Option<&Keep> {
        Some(&self.kept)
    }

    fn unpack(&self, rows: Range<usize>, out: &mut [f32]) {
        widen_bf16(&self.values[rows.start * self.cols..rows.end * self.cols], out);
    }
}

/// Values between -1 and 1 with nothing special about them.
fn values(count: usize) -> Vec<f32> {
    (0..count)
        .map(|index| ((index * 37 + 11) % 127) as f32 / 64.0 - 1.0)
        .collect()
}

/// The shortest of the runs that fit into a budget; at least two, because the first one pages things in.
fn shortest(budget: Duration, mut run: impl FnMut()) -> Duration {
    let begun = Instant::now();
    let (mut runs, mut shortest) = (0, Duration::MAX);
    while runs < 2 || begun.elapsed() < budget {
        let started = Instant::now();
        run();
        // A clock that stands still must not make a machine infinitely fast.
        shortest = shortest.min(started.elapsed().max(Duration::from_nanos(1)));
        runs += 1;
    }
    shortest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_measured_for_any_size() {
        for shape in [(0, 1, 1), (3, 70, 5), (64, 4096, 96)] {
            let products = (Products::F32, Products::Bf16);
            let rates =
                ProductRates::measure(shape, products, Duration::from_millis(2)).expect("a thread is left");
            for rate in [rates.draft_flops_per_s, rates.verifier_flops_per_s] {
                assert!(rate.is_finite() && rate > 0.0, "{rates:?}");
            }
        }
    }

    #[test]
    fn the_shortest_run_counts_and_two_are_made_at_least() {
        let mut runs = 0;
        let time = shortest(Duration::ZERO, || runs += 1);
        assert_eq!(runs, 2);
        assert!(time >= Duration::from_nanos(1) && time < Duration::from_secs(1));
    }
}
