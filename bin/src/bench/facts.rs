//! Percentiles, and what must be known of the machine to read them.

use serde::Serialize;

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
    }
}
