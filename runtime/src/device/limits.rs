//! What a machine could do at best: the lines that a measured rate is held against.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::cpu::multiply_add_rounds;
use super::{Buffer, Cpu, Device, Matrix, MatrixMut, ThreadsError};

/// Bytes of a copy: far more than caches hold.
const COPIED_BYTES: usize = 256 << 20;
/// Rounds of multiply-adds between two looks at the clock.
const ROUNDS: usize = 200_000;
/// Time for each of the two.
const BUDGET: Duration = Duration::from_millis(400);
/// The longest product that is tried on a device.
const LONGEST: Duration = Duration::from_millis(200);

/// Best rates of some threads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineLimits {
    /// Threads that were busy.
    pub threads: usize,
    /// f32 multiply-adds on registers, two operations each.
    pub f32_flops_per_s: f64,
    /// Bytes that a copy between buffers larger than the caches reads and writes.
    pub memory_bytes_per_s: f64,
}

impl MachineLimits {
    /// Measures for about a second on `threads` threads, 0 for one per core. The best of several looks counts.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn measure(threads: usize) -> Result<Self, ThreadsError> {
        let device = Cpu::new(threads)?;
        let threads = device.threads();
        let f32_flops_per_s = best(BUDGET, || {
            let flops: Vec<f64> = device.on_every_thread(|| {
                let (flops, value) = multiply_add_rounds(ROUNDS);
                black_box(value);
                flops
            });
            flops.iter().sum()
        });
        let elements = COPIED_BYTES / size_of::<f32>();
        let (source, mut target) = (vec![1.0_f32; elements], vec![0.0_f32; elements]);
        let width = 1 << 14;
        let memory_bytes_per_s = best(BUDGET, || {
            let rows = elements / width;
            device.copy(
                Matrix::new(&source, rows, width),
                MatrixMut::new(&mut target, rows, width),
            );
            2.0 * COPIED_BYTES as f64
        });
        Ok(Self {
            threads,
            f32_flops_per_s,
            memory_bytes_per_s,
        })
    }
}

/// Best rates of a device with a memory of its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceLimits {
    /// A square product of its usual factors, two operations for a multiply-add.
    pub product_flops_per_s: f64,
    /// Bytes that a copy within its memory reads and writes.
    pub memory_bytes_per_s: f64,
}

impl DeviceLimits {
    /// Measures for about a second. The best of several looks counts.
    pub fn measure(device: &impl Device) -> Self {
        let buffer = |elements| {
            let mut buffer = Buffer::default();
            device.fit(&mut buffer, "measuring limits", elements);
            device.fill(buffer.floats_mut(), 0.5);
            buffer
        };
        let product = |side: usize| {
            let (a, b, mut c) = (buffer(side * side), buffer(side * side), buffer(side * side));
            best(BUDGET, || {
                let c = MatrixMut::new(&mut c, side, side);
                let (a, b) = (Matrix::new(&a, side, side), Matrix::new(&b, side, side));
                device.gemm(c, a, b.transposed(), 1.0, false);
                device.finish();
                2.0 * (side as f64).powi(3)
            })
        };
        // A slow device must not be given a product that takes minutes.
        let mut product_flops_per_s = 0.0_f64;
        for side in [256, 1024, 4096, 8192] {
            product_flops_per_s = product_flops_per_s.max(product(side));
            if 2.0 * (4.0 * side as f64).powi(3) / product_flops_per_s > LONGEST.as_secs_f64() {
                break;
            }
        }
        let elements = COPIED_BYTES / size_of::<f32>();
        let (source, mut target) = (buffer(elements), buffer(elements));
        let memory_bytes_per_s = best(BUDGET, || {
            device.assign(target.floats_mut(), source.floats());
            device.finish();
            2.0 * COPIED_BYTES as f64
        });
        Self {
            product_flops_per_s,
            memory_bytes_per_s,
        }
    }
}

/// The best rate of what `run` says it did, over a budget of time and at least three runs.
fn best(budget: Duration, mut run: impl FnMut() -> f64) -> f64 {
    let begun = Instant::now();
    let (mut runs, mut best) = (0, 0.0_f64);
    while runs < 3 || begun.elapsed() < budget {
        let started = Instant::now();
        let done = run();
        // A clock that stands still must not make a machine infinitely fast.
        best = best.max(done / started.elapsed().as_secs_f64().max(1e-9));
        runs += 1;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_device_is_not_given_a_large_product() {
        let limits = DeviceLimits::measure(&Cpu::new(1).expect("a thread"));
        assert!(
            limits.product_flops_per_s > 0.0 && limits.memory_bytes_per_s > 0.0,
            "{limits:?}"
        );
    }

    #[test]
    fn the_best_of_several_runs_counts() {
        let mut runs = 0;
        let rate = best(Duration::ZERO, || {
            runs += 1;
            f64::from(runs)
        });
        assert_eq!(runs, 3);
        assert!(rate > 0.0 && rate.is_finite());
    }
}
