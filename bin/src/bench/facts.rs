//! Percentiles and spreads, and what must be known of machine and process to read them.

use std::time::Instant;

use anyhow::Result;
use clap::ValueEnum;
use eaglet_runtime::device::{Device, DeviceLimits, MachineLimits, Watch};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::stages::Stages;

/// The machine that a measurement was made on.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Machine {
    /// CPUs that this process may use.
    pub(super) cores: usize,
    /// Name of the CPU, if the system tells.
    pub(super) cpu: String,
    /// Processes that wanted to run, on average over the last minute: before and after.
    pub(super) load: [f64; 2],
}

impl Machine {
    /// What the machine is like now; `load` is what it was before.
    pub(super) fn look(load_before: f64) -> Self {
        let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpus
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown", |(_, name)| name);
        Self {
            cores: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            cpu: cpu.to_owned(),
            load: [load_before, load()],
        }
    }
}

/// Load of the machine over the last minute; 0 if the system does not tell.
pub(super) fn load() -> f64 {
    std::fs::read_to_string("/proc/loadavg")
        .ok()
        .and_then(|text| text.split(' ').next()?.parse().ok())
        .unwrap_or(0.0)
}

/// The value below which a share of some values lies, of those measured and without interpolation; `None` without any.
pub(super) fn percentile(values: &[u64], percent: u64) -> Option<u64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() as u64 * percent).div_ceil(100).max(1) as usize;
    sorted.get(rank - 1).copied()
}

/// As [`percentile`], of any numbers and for a part from 0 to 1; 0 without any.
pub(super) fn quantile(values: &[f64], part: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (sorted.len() as f64 * part).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied().unwrap_or_default()
}

/// Median and range of what was measured several times.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Spread {
    pub(super) median: f64,
    pub(super) min: f64,
    pub(super) max: f64,
}

impl Spread {
    /// Of some values; all zero without any.
    pub(super) fn of(values: &[f64]) -> Self {
        let mut sorted = values.to_vec();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
        let middle = sorted.len() / 2;
        let median = match sorted.len() {
            length if length % 2 == 0 && length > 0 => (at(middle - 1) + at(middle)) / 2.0,
            _ => at(middle),
        };
        Self {
            median,
            min: at(0),
            max: at(sorted.len().saturating_sub(1)),
        }
    }
}

/// What the machine could do at best, measured in the same run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Limits {
    /// What the limits are of: so many threads, or a GPU.
    pub(super) of: String,
    /// Of the CPU, f32 multiply-adds on registers; of a GPU, its best product.
    pub(super) gflops: f64,
    pub(super) memory_gb_per_s: f64,
}

impl Limits {
    /// Takes about a second.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub(super) fn of_cpu(threads: usize) -> Result<Self> {
        let limits = MachineLimits::measure(threads)?;
        Ok(Self {
            of: format!("{} threads", limits.threads),
            gflops: limits.f32_flops_per_s / 1e9,
            memory_gb_per_s: limits.memory_bytes_per_s / 1e9,
        })
    }

    /// Takes about a second.
    pub(super) fn of_device(device: &impl Device, name: String) -> Self {
        let limits = DeviceLimits::measure(device);
        Self {
            of: name,
            gflops: limits.product_flops_per_s / 1e9,
            memory_gb_per_s: limits.memory_bytes_per_s / 1e9,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

impl std::fmt::Display for Limits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            of,
            gflops,
            memory_gb_per_s,
        } = self;
        write!(
            f,
            "limit of {of}, measured in this run: {gflops:.0} GFLOP/s of multiply-adds, {memory_gb_per_s:.1} GB/s of copying"
        )
    }
}

impl std::fmt::Display for Machine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { cores, cpu, load } = self;
        let [before, after] = load;
        write!(
            f,
            "{cores} cores, {cpu}, load {before:.1} before and {after:.1} after"
        )
    }
}

/// What operands of products are rounded to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Dtype {
    #[default]
    F32,
    /// Where the machine has a unit for it; else the report says that products are f32.
    Bf16,
}

/// Wall and processor seconds of one run of something.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Took {
    pub(super) wall: f64,
    pub(super) cpu: f64,
}

/// Runs once and measures.
///
/// # Errors
/// Those of `run`.
pub(super) fn measured<R>(run: impl FnOnce() -> Result<R>) -> Result<(Took, R)> {
    let (begun, cpu_before) = (Instant::now(), process_seconds());
    let result = run()?;
    let took = Took {
        wall: begun.elapsed().as_secs_f64(),
        cpu: process_seconds() - cpu_before,
    };
    Ok((took, result))
}

/// Runs so often and measures; then, on a device that runs ahead of who asks, as often again to see where time goes, since it
/// must not while time is kept.
///
/// # Errors
/// Those of `run`.
pub(super) fn repeated(
    watch: &Watch,
    runs_ahead: bool,
    repeats: u32,
    mut run: impl FnMut() -> Result<()>,
) -> Result<(Vec<Took>, Stages)> {
    let (mut took, mut stages) = (Vec::new(), Stages::default());
    let mut rounds = |is_timed: bool, counts: bool| -> Result<()> {
        watch.keep_time(is_timed);
        watch.take();
        for _ in 0..repeats {
            let (this, ()) = measured(&mut run)?;
            if counts {
                took.push(this);
            }
            if is_timed {
                stages.push(watch.take());
            }
        }
        Ok(())
    };
    if runs_ahead {
        rounds(false, true)?;
        rounds(true, false)?;
    } else {
        rounds(true, true)?;
    }
    Ok((took, stages))
}

/// What a report says of a GPU's memory.
pub(super) fn on_device(bytes: Option<u64>) -> String {
    bytes.map_or_else(String::new, |bytes| {
        format!(", {:.0} MB on the GPU", bytes as f64 / 1e6)
    })
}

/// Processor time of all threads of this process so far.
fn process_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Most memory that this process ever had, in bytes; 0 if the system does not tell.
pub(super) fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    kib.and_then(|kib| kib.parse::<u64>().ok())
        .unwrap_or_default()
        .saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(percentile(&[7], 99), Some(7));
        let values: Vec<u64> = (1..=100).rev().collect();
        assert_eq!(
            [50, 99, 100].map(|percent| percentile(&values, percent)),
            [Some(50), Some(99), Some(100)]
        );
        assert_eq!(percentile(&[1, 2, 3, 4], 99), Some(4));
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(
            [0.5, 0.99, 1.0].map(|part| quantile(&values, part)),
            [100.0, 198.0, 200.0]
        );
        assert_eq!((quantile(&[7.0], 0.5), quantile(&[], 0.5)), (7.0, 0.0));
    }

    #[test]
    fn a_spread_has_the_middle_of_an_even_number() {
        let spread = |values: &[f64]| {
            let Spread { median, min, max } = Spread::of(values);
            [median, min, max]
        };
        assert_eq!(spread(&[]), [0.0; 3]);
        assert_eq!(spread(&[3.0, 1.0, 2.0]), [2.0, 1.0, 3.0]);
        assert_eq!(spread(&[4.0, 1.0]), [2.5, 1.0, 4.0]);
    }

    #[test]
    fn work_takes_processor_time_and_memory() {
        let (took, sum) = measured(|| Ok((0..3_000_000_u64).fold(0, |sum, x| sum ^ x.wrapping_mul(sum | 1))))
            .expect("nothing fails");
        assert!(took.wall > 0.0 && took.cpu > 0.0, "{took:?} for {sum}");
        assert!(peak_bytes() > 1 << 20);
    }
}
