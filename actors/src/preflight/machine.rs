//! What the machine that ranks run on has to offer.

use std::fs;
use std::path::{Path, PathBuf};

/// Cores and memory of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory of the machine, or of the container that this process runs in.
    pub memory_bytes: u64,
    /// Memory that is free now, caches included.
    pub available_bytes: u64,
}

impl Machine {
    /// The machine that this process runs on. What cannot be found out counts as boundless.
    pub fn here() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let field = |name| field_of(&info, name).map_or(u64::MAX, |kib| kib.saturating_mul(1024));
        let (mut memory_bytes, mut available_bytes) = (field("MemTotal:"), field("MemAvailable:"));
        for (limit, used) in container_limits() {
            memory_bytes = memory_bytes.min(limit);
            available_bytes = available_bytes.min(limit.saturating_sub(used));
        }
        Self {
            cores,
            memory_bytes,
            available_bytes,
        }
    }

    /// A machine with another memory, all of it free.
    #[must_use]
    pub fn with_memory(self, bytes: u64) -> Self {
        Self {
            memory_bytes: bytes,
            available_bytes: bytes,
            ..self
        }
    }
}

/// A number of a file of lines such as `MemTotal:  24577 kB`.
fn field_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Limits of the control groups (version 2) that this process is in, each with what is used of it and cannot be dropped.
fn container_limits() -> Vec<(u64, u64)> {
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(group) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Vec::new();
    };
    let root = Path::new("/sys/fs/cgroup");
    root.join(group)
        .ancestors()
        .take_while(|folder| folder.starts_with(root))
        .filter_map(limit_of)
        .collect()
}

fn limit_of(folder: &Path) -> Option<(u64, u64)> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(folder.join(name)).ok()?;
        // "max" stands for no limit.
        text.trim().parse().ok()
    };
    let limit = number("memory.max")?;
    let statistics = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let caches = field_of(&statistics, "inactive_file ").unwrap_or(0);
    Some((
        limit,
        number("memory.current").unwrap_or(0).saturating_sub(caches),
    ))
}

/// The nearest folder above a path, or the path itself, that is there.
pub(super) fn nearest_existing(path: &Path) -> Option<PathBuf> {
    path.ancestors().find(|folder| folder.exists()).map(|folder| {
        if folder.as_os_str().is_empty() {
            PathBuf::from(".")
        } else {
            folder.to_owned()
        }
    })
}

/// Bytes that this user may still write where a path is, or will be; `None` if the system does not say.
pub(super) fn free_disk_bytes(path: &Path) -> Option<u64> {
    let statistics = rustix::fs::statvfs(nearest_existing(path)?).ok()?;
    Some(statistics.f_bavail.saturating_mul(statistics.f_frsize))
}

/// Bytes of all files under a folder; what cannot be read counts nothing.
pub(super) fn used_disk_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let kind = entry.file_type().ok()?;
            Some(if kind.is_dir() {
                used_disk_bytes(&entry.path())
            } else if kind.is_file() {
                entry.metadata().ok()?.len()
            } else {
                0
            })
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_cores_and_memory() {
        let machine = Machine::here();
        assert!(machine.cores >= 1);
        assert!(machine.memory_bytes > 64 << 20, "{machine:?}");
        assert!(
            machine.available_bytes <= machine.memory_bytes,
            "free memory is part of the memory: {machine:?}"
        );
        let larger = machine.with_memory(1 << 40);
        assert_eq!((larger.cores, larger.available_bytes), (machine.cores, 1 << 40));
    }

    #[test]
    fn fields_are_found_by_name() {
        let text = "MemTotal:       24577 kB\nMemAvailable:   123 kB\n";
        assert_eq!(field_of(text, "MemAvailable:"), Some(123));
        assert_eq!(field_of(text, "MemFree:"), None);
        assert_eq!(field_of("anon 1\ninactive_file 7\n", "inactive_file "), Some(7));
    }

    #[test]
    fn a_folder_that_will_be_made_has_the_room_of_the_one_above() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let deep = folder.path().join("runs/a");
        assert_eq!(nearest_existing(&deep).as_deref(), Some(folder.path()));
        assert!(free_disk_bytes(&deep).is_some());
        fs::create_dir_all(&deep).expect("writable");
        fs::write(deep.join("x"), [0; 300]).expect("writable");
        fs::write(folder.path().join("y"), [0; 7]).expect("writable");
        assert_eq!(used_disk_bytes(folder.path()), 307);
        assert_eq!(used_disk_bytes(&folder.path().join("none")), 0);
    }
}
