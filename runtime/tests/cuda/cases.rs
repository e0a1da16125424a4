//! Results of kernels beside those of the CPU.
#![allow(clippy::print_stdout, reason = "shows how close the numbers are")]

use eaglet_runtime::device::Cpu;
use eaglet_runtime::digest::Digest;

use crate::stack::Stack;

/// Every result so far.
pub(crate) struct Cases<'a> {
    pub(crate) stack: &'a Stack,
    pub(crate) cpu: Cpu,
    done: Vec<Case>,
}

struct Case {
    name: String,
    /// Largest difference over the largest magnitude of the exact result.
    error: f64,
    tolerance: f64,
    digest: Digest,
}

/// A smooth row of numbers without short periods.
pub(crate) fn wave(n: usize, seed: f64) -> Vec<f32> {
    (0..n).map(|i| (1.3 * i as f64 + seed).sin() as f32).collect()
}

impl<'a> Cases<'a> {
    pub(crate) fn new(stack: &'a Stack) -> Self {
        Self {
            stack,
            cpu: Cpu::new(2).expect("threads"),
            done: Vec::new(),
        }
    }

    /// Notes a result beside that of the CPU.
    #[track_caller]
    pub(crate) fn close(&mut self, name: impl Into<String>, ours: &[f32], exact: &[f32], tolerance: f64) {
        let name = name.into();
        assert_eq!(ours.len(), exact.len(), "{name}");
        let top = exact
            .iter()
            .fold(1e-30_f64, |top, &x| top.max(f64::from(x).abs()));
        let worst = ours
            .iter()
            .zip(exact)
            .map(|(&ours, &exact)| match ours.to_bits() == exact.to_bits() {
                true => 0.0,
                false => (f64::from(ours) - f64::from(exact)).abs(),
            })
            // What is no number is infinitely wrong.
            .fold(0.0_f64, |worst, error| {
                if error <= worst {
                    worst
                } else if error.is_nan() {
                    f64::INFINITY
                } else {
                    error
                }
            });
        self.done.push(Case {
            name,
            error: worst / top,
            tolerance,
            digest: Digest::of_f32(ours),
        });
    }

    /// Notes a result that must be that of the CPU bit for bit.
    #[track_caller]
    pub(crate) fn same<T: PartialEq + std::fmt::Debug + bytemuck::Pod>(
        &mut self,
        name: impl Into<String>,
        ours: &[T],
        exact: &[T],
    ) {
        let name = name.into();
        assert_eq!(ours.len(), exact.len(), "{name}");
        let differ = ours.iter().zip(exact).position(|(ours, exact)| ours != exact);
        if let Some(place) = differ {
            println!(
                "{name}: element {place} is {:?} for {:?}",
                ours[place], exact[place]
            );
        }
        self.done.push(Case {
            name,
            error: if differ.is_some() { f64::INFINITY } else { 0.0 },
            tolerance: 0.0,
            digest: Digest::of(bytemuck::cast_slice(ours)),
        });
    }

    /// A table of the errors.
    pub(crate) fn print(&self) {
        for case in &self.done {
            println!(
                "{:<52} {:>9.1e} of {:>7.0e}",
                case.name, case.error, case.tolerance
            );
        }
    }

    /// # Panics
    /// If a result is too far off.
    pub(crate) fn check(&self) {
        let wrong: Vec<String> = self
            .done
            .iter()
            .filter(|case| case.error > case.tolerance)
            .map(|case| format!("{}: {:e} of {:e}", case.name, case.error, case.tolerance))
            .collect();
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    /// A line per result that tells its bits.
    pub(crate) fn digests(&self) -> Vec<String> {
        let line = |case: &Case| format!("bits {} {}", case.digest, case.name);
        self.done.iter().map(line).collect()
    }
}
