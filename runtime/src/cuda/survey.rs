//! Which GPUs this machine has, or why none can be used.

use serde::Serialize;

use super::driver::{CudaError, Driver, Gpu};
use super::library::{Library, LibraryKind, SearchPath};
use super::nccl::Nccl;

/// Everything about GPUs that is known without using one.
#[derive(Debug, Clone, Serialize)]
pub struct GpuSurvey {
    /// CUDA version that the driver supports.
    pub driver_cuda: Option<String>,
    /// Version of the driver itself, by the kernel module.
    pub driver: Option<String>,
    /// NCCL's version.
    pub nccl: Option<String>,
    /// The GPUs.
    pub gpus: Vec<GpuFacts>,
    /// Whether device `row` can read the memory of device `column`.
    pub peer_access: Vec<Vec<bool>>,
    /// Libraries that are missing, and why there is no GPU.
    pub problems: Vec<String>,
    /// Where each library was found.
    pub libraries: Vec<FoundLibrary>,
}

/// A library and its file.
#[derive(Debug, Clone, Serialize)]
pub struct FoundLibrary {
    /// What people call it.
    pub library: &'static str,
    /// The file, or the bare name if the loader found it.
    pub path: String,
}

/// One GPU.
#[derive(Debug, Clone, Serialize)]
pub struct GpuFacts {
    /// Its name in cluster.toml.
    pub device: String,
    /// Product name.
    pub name: String,
    /// What tells it from all others, as `CUDA_VISIBLE_DEVICES` takes it.
    pub uuid: Option<String>,
    /// Its place on the PCI bus.
    pub pci_address: Option<String>,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Compute capability.
    pub capability: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Whether it is a part of a GPU (MIG).
    pub is_part: bool,
}

impl GpuSurvey {
    /// Looks at this machine. Whatever is missing is a problem in the answer, not an error.
    pub fn here(search: &SearchPath) -> Self {
        let mut survey = Self {
            driver_cuda: None,
            driver: driver_version(),
            nccl: None,
            gpus: Vec::new(),
            peer_access: Vec::new(),
            problems: Vec::new(),
            libraries: Vec::new(),
        };
        match Driver::open(search) {
            Ok(driver) => {
                survey.found(LibraryKind::Driver, &driver.table.library);
                survey.driver_cuda = driver
                    .version()
                    .ok()
                    .map(|(major, minor)| format!("{major}.{minor}"));
                if let Err(error) = survey.look(&driver) {
                    survey.problems.push(error.to_string());
                }
            }
            Err(error) => survey.problems.push(error.to_string()),
        }
        for kind in [LibraryKind::Nvrtc, LibraryKind::CublasLt] {
            match Library::open(kind, search) {
                Ok(library) => survey.found(kind, &library),
                Err(error) => survey.problems.push(error.to_string()),
            }
        }
        match Nccl::open(search) {
            Ok(nccl) => {
                let (major, minor, patch) = nccl.version();
                survey.found(LibraryKind::Nccl, nccl.library());
                survey.nccl = Some(format!("{major}.{minor}.{patch}"));
            }
            Err(error) => survey.problems.push(error.to_string()),
        }
        survey
    }

    fn found(&mut self, kind: LibraryKind, library: &Library) {
        self.libraries.push(FoundLibrary {
            library: kind.title(),
            path: library.path().display().to_string(),
        });
    }

    fn look(&mut self, driver: &std::sync::Arc<Driver>) -> Result<(), CudaError> {
        let gpus = (0..driver.device_count()?)
            .map(|ordinal| driver.device(ordinal))
            .collect::<Result<Vec<Gpu>, _>>()?;
        if gpus.is_empty() {
            let hidden = std::env::var("CUDA_VISIBLE_DEVICES");
            let hidden = hidden.map(|visible| format!("; CUDA_VISIBLE_DEVICES is `{visible}`"));
            self.problems
                .push(format!("the driver has no device{}", hidden.unwrap_or_default()));
        }
        for gpu in &gpus {
            let (major, minor) = gpu.capability()?;
            self.gpus.push(GpuFacts {
                device: format!("cuda:{}", gpu.ordinal()),
                name: gpu.name()?,
                uuid: gpu.uuid().ok(),
                pci_address: gpu.pci_address().ok(),
                is_part: gpu.is_part()?,
                memory_bytes: gpu.memory()?,
                capability: format!("{major}.{minor}"),
                multiprocessors: gpu.multiprocessors()?,
            });
        }
        for gpu in &gpus {
            let row = gpus
                .iter()
                .map(|peer| Ok(gpu.ordinal() == peer.ordinal() || gpu.can_access(peer)?));
            self.peer_access.push(row.collect::<Result<_, CudaError>>()?);
        }
        Ok(())
    }
}

/// The version in the kernel module's own words.
fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/sys/module/nvidia/version").ok()?;
    Some(text.trim().to_owned()).filter(|version| !version.is_empty())
}
