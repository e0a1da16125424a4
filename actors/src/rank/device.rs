//! What a rank computes on: chosen once when it starts, and what is said when it fails.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use eaglet_runtime::cuda::{Cuda, CudaError, Gradient, KernelCache, Precision, SearchPath};
use eaglet_runtime::device::{Cpu, Device, Floats, Products, ThreadsError};

use super::RankFault;

/// A device that ranks can compute on.
pub(super) trait RankDevice: Device + Sized {
    /// Opens it: that of this process, where there are several.
    ///
    /// # Errors
    /// If it cannot be used.
    fn open(threads: usize, products: Products) -> Result<Self, DeviceError>;

    /// A gradient that it has computed, as a sum over NCCL takes it.
    fn gradient<'a>(&'a self, floats: Floats<'a>) -> Gradient<'a>;
}

impl RankDevice for Cpu {
    fn open(threads: usize, products: Products) -> Result<Self, DeviceError> {
        Ok(Self::with_products(threads, products)?)
    }

    fn gradient<'a>(&'a self, floats: Floats<'a>) -> Gradient<'a> {
        Gradient::Host(floats.as_host().unwrap_or_default())
    }
}

impl RankDevice for Cuda {
    /// The launcher lets a rank see one GPU.
    fn open(_: usize, products: Products) -> Result<Self, DeviceError> {
        let precision = match products {
            Products::F32 => Precision::F32,
            Products::Bf16 => Precision::Bf16,
        };
        Ok(Self::new(&SearchPath::here(), 0, KernelCache::here(), precision)?)
    }

    fn gradient<'a>(&'a self, floats: Floats<'a>) -> Gradient<'a> {
        match floats.as_gpu() {
            Some(view) => Gradient::Device(view, self.stream()),
            None => Gradient::Host(floats.as_host().unwrap_or_default()),
        }
    }
}

/// Why a rank has no device.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceError {
    /// Threads of the CPU.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    /// A GPU.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl From<DeviceError> for RankFault {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Threads(error) => Self::permanent(error),
            DeviceError::Cuda(error) => of_gpu(error),
        }
    }
}

/// A GPU that failed. Want of memory will be there again after a restart; a fault of the GPU may not.
fn of_gpu(error: CudaError) -> RankFault {
    let reason = match &error {
        CudaError::OutOfMemory { .. } => format!(
            "the gpu failed: {error}; lower training.tokens_per_row or give the rank a GPU of its own, `eaglet check` shows \
             what each rank needs"
        ),
        error => format!("the gpu failed: {error}"),
    };
    if error.is_passing() {
        RankFault::passing(reason)
    } else {
        RankFault::permanent(reason)
    }
}

/// Runs the compute thread's work; a panic in it becomes the rank's last word. Operations of a GPU panic with their
/// [`CudaError`], in which the GPU is called as this process sees it: `work` says what `cluster.toml` calls it.
pub(super) fn guarded(work: impl FnOnce(&mut String) -> Result<(), RankFault>) -> Result<(), RankFault> {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // Where in our code a GPU's fault came to light helps nobody.
        if !panic.payload().is::<CudaError>() {
            usual(panic);
        }
    }));
    let mut device = String::new();
    let mut fault = match catch_unwind(AssertUnwindSafe(|| work(&mut device))) {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(fault)) => fault,
        Err(panic) => of_panic(panic),
    };
    if !device.is_empty() {
        fault.reason = fault.reason.replace("on cuda:0", &format!("on {device}"));
    }
    Err(fault)
}

fn of_panic(panic: Box<dyn Any + Send>) -> RankFault {
    let panic = match panic.downcast::<CudaError>() {
        Ok(error) => return of_gpu(*error),
        Err(panic) => panic,
    };
    let text = panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no text");
    RankFault::passing(format!(
        "the compute thread panicked: {text}; this is a defect of eaglet"
    ))
}

#[cfg(test)]
mod tests {
    use eaglet_runtime::cuda::Holders;

    use super::*;

    fn out_of_memory() -> CudaError {
        CudaError::OutOfMemory {
            name: "logits",
            bytes: 7,
            device: "cuda:0".to_owned(),
            free: 3,
            total: 5,
            holders: Holders(vec![("weights", 2)]),
        }
    }

    /// RANK-4
    #[test]
    fn what_ends_the_compute_thread_is_a_fault_with_its_words() {
        let fault = guarded(|device| {
            *device = "cuda:3".to_owned();
            std::panic::panic_any(out_of_memory())
        })
        .expect_err("it panicked");
        assert!(fault.permanent, "{fault}");
        assert!(
            fault
                .reason
                .starts_with("the gpu failed: no room for 7 bytes of logits on cuda:3: 3 of 5 bytes are free; this rank holds 2 for weights; \
                 lower"),
            "{fault}"
        );

        let lost = CudaError::Call {
            call: "cuStreamSynchronize",
            code: 719,
            name: "CUDA_ERROR_LAUNCH_FAILED".to_owned(),
            text: "unspecified launch failure".to_owned(),
        };
        let fault = guarded(|_| std::panic::panic_any(lost)).expect_err("it panicked");
        assert!(!fault.permanent && fault.reason.contains("(719)"), "{fault}");

        let fault = guarded(|_| panic!("{} of nothing", 3)).expect_err("it panicked");
        assert!(
            !fault.permanent && fault.reason.contains("3 of nothing"),
            "{fault}"
        );
        assert!(guarded(|_| Ok(())).is_ok());
    }
}
