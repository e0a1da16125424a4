//! The GPUs of this machine as far as ranks are placed on them: which they are, what a rank must be started with to see
//! one of them and no other, and which CPUs are near it.

use std::path::Path;
use std::sync::Arc;

use eaglet_runtime::cuda::{CudaError, Driver, Gpu, Library, LibraryKind, SearchPath};

/// The variable with which a process sees some GPUs only.
pub const VISIBLE_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// Where the kernel shows devices and NUMA nodes.
const SYSTEM: &str = "/sys";

/// Libraries without which no rank computes on a GPU.
const NEEDED: [LibraryKind; 3] = [LibraryKind::Driver, LibraryKind::Nvrtc, LibraryKind::CublasLt];

/// How a rank is started on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// What `CUDA_VISIBLE_DEVICES` must say.
    pub visible: String,
    /// CPUs of the GPU's NUMA node; empty if it has none, or nobody knows.
    pub cpus: Vec<usize>,
}

/// A GPU that ranks can be placed on.
#[derive(Clone, Debug)]
pub struct PlacedGpu {
    /// How a rank is started on it.
    pub place: Place,
    /// Its NUMA node.
    pub numa_node: Option<u32>,
    /// The driver's device. A part of a GPU that `CUDA_VISIBLE_DEVICES` names behind another part has none in this process:
    /// the driver shows a process one part only.
    pub gpu: Option<Gpu>,
}

impl PlacedGpu {
    /// What the driver calls it, or what the environment does.
    pub fn name(&self) -> String {
        let name = self.gpu.as_ref().and_then(|gpu| gpu.name().ok());
        name.unwrap_or_else(|| self.place.visible.clone())
    }

    /// Free bytes and all bytes. Asks for a context on it, which is given back.
    pub fn memory(&self) -> Option<(u64, u64)> {
        let (free, total) = self.gpu.as_ref()?.context().ok()?.memory().ok()?;
        Some((free as u64, total as u64))
    }

    /// Whether it can read another one's memory, as far as the driver says.
    pub fn reads(&self, other: &Self) -> Option<bool> {
        let (gpu, other) = (self.gpu.as_ref()?, other.gpu.as_ref()?);
        gpu.can_access(other).ok()
    }
}

/// The driver with what this process may see of the machine's GPUs.
pub struct GpuMachine {
    driver: Arc<Driver>,
    outer: Vec<String>,
}

impl GpuMachine {
    /// Opens all libraries that ranks on GPUs need.
    ///
    /// # Errors
    /// If one is missing: its names, where it was looked for, and what else is missing.
    pub fn open(search: &SearchPath) -> Result<Self, String> {
        let missing: Vec<_> = NEEDED
            .into_iter()
            .filter_map(|kind| Some((kind, Library::open(kind, search).err()?)))
            .collect();
        if let [(_, first), others @ ..] = missing.as_slice() {
            let mut text = first.to_string();
            if !others.is_empty() {
                let titles: Vec<&str> = others.iter().map(|(kind, _)| kind.title()).collect();
                text.push_str(&format!(
                    "; missing as well: {} (see `eaglet devices`)",
                    titles.join(", ")
                ));
            }
            return Err(text);
        }
        let outer = std::env::var(VISIBLE_VARIABLE).unwrap_or_default();
        Ok(Self {
            driver: Driver::open(search).map_err(|error| error.to_string())?,
            outer: entries(&outer),
        })
    }

    /// The N-th GPU that this process may see.
    ///
    /// # Errors
    /// If there is none; how many there are.
    pub fn gpu(&self, number: u16) -> Result<PlacedGpu, CudaError> {
        let index = usize::from(number);
        let entry = self.outer.get(index).map(String::as_str);
        let gpu = match self.driver.device(index) {
            Ok(gpu) => Some(gpu),
            Err(CudaError::NoDevice { .. }) if entry.is_some_and(is_part) => None,
            Err(error) => return Err(error),
        };
        let uuid = gpu.as_ref().and_then(|gpu| gpu.uuid().ok());
        let numa_node = gpu.as_ref().and_then(|gpu| node_of(gpu, Path::new(SYSTEM)));
        Ok(PlacedGpu {
            place: Place {
                visible: visible(number, entry, uuid),
                cpus: numa_node
                    .map(|node| cpus_of(node, Path::new(SYSTEM)))
                    .unwrap_or_default(),
            },
            numa_node,
            gpu,
        })
    }
}

/// What a value of `CUDA_VISIBLE_DEVICES` names; what follows a number below zero is not seen.
fn entries(value: &str) -> Vec<String> {
    let entries = value.split(',').map(str::trim);
    let seen = entries.take_while(|entry| !entry.is_empty() && !entry.starts_with('-'));
    seen.map(str::to_owned).collect()
}

fn is_part(entry: &str) -> bool {
    entry.starts_with("MIG-")
}

/// What a process must be told so that it sees only one GPU: the name that the environment has for it already, else what
/// tells it from all others, else its number.
fn visible(number: u16, entry: Option<&str>, uuid: Option<String>) -> String {
    match entry {
        Some(entry) if entry.parse::<u32>().is_err() => entry.to_owned(),
        entry => uuid
            .or_else(|| entry.map(str::to_owned))
            .unwrap_or_else(|| number.to_string()),
    }
}

fn node_of(gpu: &Gpu, system: &Path) -> Option<u32> {
    let address = gpu.pci_address().ok()?;
    let node = node_at(&address, system);
    if node.is_none() {
        tracing::debug!(
            gpu = gpu.ordinal(),
            address,
            "the NUMA node is unknown; ranks are not bound"
        );
    }
    node
}

/// The NUMA node of a PCI device. The kernel says -1 where there is one node only.
fn node_at(address: &str, system: &Path) -> Option<u32> {
    let file = system.join("bus/pci/devices").join(address).join("numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

fn cpus_of(node: u32, system: &Path) -> Vec<usize> {
    let file = system.join(format!("devices/system/node/node{node}/cpulist"));
    std::fs::read_to_string(file)
        .map(|text| cpu_list(&text))
        .unwrap_or_default()
}

/// Numbers of a list such as `0-3,8,10-11` (cpuset(7)); nothing if it is none.
fn cpu_list(text: &str) -> Vec<usize> {
    /// More CPUs than an affinity can name.
    const MOST: usize = 1024;
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        (last < MOST).then_some(first..=last)
    };
    let ranges: Option<Vec<_>> = text.trim().split(',').map(range).collect();
    ranges.unwrap_or_default().into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_sees_its_gpu_by_the_name_that_tells_most() {
        let uuid = || Some("GPU-1".to_owned());
        assert_eq!(visible(2, None, uuid()), "GPU-1");
        assert_eq!(visible(2, None, None), "2");
        // The second of the outer list is another one than the machine's second.
        assert_eq!(visible(1, Some("5"), uuid()), "GPU-1");
        assert_eq!(visible(1, Some("5"), None), "5");
        assert_eq!(visible(1, Some("MIG-ab"), uuid()), "MIG-ab");
        assert_eq!(visible(1, Some("GPU-ab"), None), "GPU-ab");
    }

    #[test]
    fn what_the_environment_hides_is_not_counted() {
        assert_eq!(entries(""), Vec::<String>::new());
        assert_eq!(entries("3, GPU-a,-1,2"), ["3", "GPU-a"]);
        assert!(is_part(&entries("MIG-a,MIG-b")[1]));
    }

    #[test]
    fn nodes_and_their_cpus_are_read_from_the_kernels_files() {
        let system = tempfile::tempdir().expect("a folder");
        let device = system.path().join("bus/pci/devices/0000:65:00.0");
        std::fs::create_dir_all(&device).expect("a folder");
        let node = system.path().join("devices/system/node/node1");
        std::fs::create_dir_all(&node).expect("a folder");
        std::fs::write(node.join("cpulist"), "2-4,8\n").expect("a file");
        let at = || node_at("0000:65:00.0", system.path());
        assert_eq!(at(), None);
        for (text, found) in [("-1\n", None), ("1\n", Some(1)), ("x", None)] {
            std::fs::write(device.join("numa_node"), text).expect("a file");
            assert_eq!(at(), found, "{text}");
        }
        assert_eq!(cpus_of(1, system.path()), [2, 3, 4, 8]);
        assert_eq!(cpus_of(2, system.path()), Vec::<usize>::new());
        for nonsense in ["", "a", "1-", "0-4294967296", "3-1,x"] {
            assert_eq!(cpu_list(nonsense), Vec::<usize>::new(), "{nonsense}");
        }
    }
}
