//! Making a CPU device, and what its products go through.

use std::sync::Once;

use half::bf16;

use super::amx::{self, NoAmx, PackedCache, PackedMatrix};
use crate::device::{Device, HostMatrix, Matrix, MatrixMut, ProductKernel, Products};

/// The CPU, with a number of threads.
#[derive(Debug)]
pub struct Cpu {
    pub(super) pool: rayon::ThreadPool,
    /// What products go through, if not through `gemm-f32`.
    pub(super) amx: Option<amx::Engine>,
    /// Where the weights that the unit multiplies with are shared with other processes.
    pub(super) packed: Option<PackedCache>,
}

/// The operating system refused threads.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {threads} compute threads: {source}")]
pub struct ThreadsError {
    threads: usize,
    source: rayon::ThreadPoolBuildError,
}

impl Cpu {
    /// A device with `threads` threads of its own, 0 means one per core, whose products are [`Products::F32`].
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn new(threads: usize) -> Result<Self, ThreadsError> {
        Self::with_engine(threads, None, None)
    }

    /// [`Self::new`] with a choice of products. Without AMX, [`Products::Bf16`] is a warning, once in a process, and
    /// products in f32; [`Self::kernel`] tells. With it, packed weights are shared with the other processes of the machine
    /// through the folder in `EAGLET_PACKED_CACHE`, or `eaglet/packed` in the user's cache folder.
    ///
    /// # Errors
    /// If the threads cannot be started.
    pub fn with_products(threads: usize, products: Products) -> Result<Self, ThreadsError> {
        let engine = match products {
            Products::F32 => None,
            Products::Bf16 => amx::Engine::new().map_err(|reason| warn_once(&reason)).ok(),
        };
        let packed = engine.as_ref().and_then(|_| PackedCache::here());
        Self::with_engine(threads, engine, packed)
    }

    /// A device whose products go through the AMX unit, or through a double of it in software.
    #[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
    pub(crate) fn with_amx(threads: usize) -> Self {
        Self::with_engine(threads, Some(amx::tests::engine()), None).expect("threads")
    }

    /// [`Self::with_amx`] with packed weights in a folder.
    #[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
    pub(crate) fn with_packed_cache(threads: usize, folder: &std::path::Path) -> Self {
        let packed = PackedCache::at(folder.to_owned());
        Self::with_engine(threads, Some(amx::tests::engine()), Some(packed)).expect("threads")
    }

    fn with_engine(
        threads: usize,
        amx: Option<amx::Engine>,
        packed: Option<PackedCache>,
    ) -> Result<Self, ThreadsError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|index| format!("compute-{index}"))
            .build()
            .map_err(|source| ThreadsError { threads, source })?;
        Ok(Self { pool, amx, packed })
    }

    /// What products of a kind go through on this machine.
    ///
    /// # Errors
    /// For [`Products::Bf16`]: why it is not a unit for bf16.
    pub fn kernel_for(products: Products) -> Result<ProductKernel, NoAmx> {
        match products {
            Products::F32 => Ok(ProductKernel::F32),
            Products::Bf16 => amx::Engine::new().map(|_| ProductKernel::AmxBf16),
        }
    }

    /// What [`Device::gemm`] and [`Device::gemm_stored`] go through. Products within an attention are always f32.
    pub fn kernel(&self) -> ProductKernel {
        match self.amx {
            Some(_) => ProductKernel::AmxBf16,
            None => ProductKernel::F32,
        }
    }

    /// Packs the right operand `b` `[k, n]` of products, in any order (a transposed view, too), for
    /// [`Self::gemm_packed`]; `None` where products are f32, which take `b` as it is.
    pub fn pack(&self, b: Matrix<'_>) -> Option<PackedMatrix> {
        let engine = self.amx.as_ref()?;
        Some(self.install(|| engine.pack(b.host())))
    }

    /// [`Self::pack`] of bf16, without a detour through f32.
    pub fn pack_bf16(&self, b: HostMatrix<'_, bf16>) -> Option<PackedMatrix> {
        let engine = self.amx.as_ref()?;
        Some(self.install(|| engine.pack_bf16(b)))
    }

    /// Packs other values `b` `[k, n]` into the memory of a packed matrix of that shape.
    pub fn repack(&self, packed: &mut PackedMatrix, b: Matrix<'_>) {
        self.install(|| packed.refill(b.host()));
    }

    /// [`Device::gemm`] with a packed right operand: the same bits.
    ///
    /// # Panics
    /// If shapes do not fit, or products of this device are f32.
    pub fn gemm_packed(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: &PackedMatrix,
        alpha: f32,
        accumulate: bool,
    ) {
        let engine = self.amx.as_ref().expect("a device that packs has AMX");
        self.install(|| engine.gemm_packed(c.host(), a.host(), b, alpha, accumulate));
    }

    /// Runs `work` once on every thread, all at the same time.
    pub(in crate::device) fn on_every_thread<R: Send>(&self, work: impl Fn() -> R + Sync) -> Vec<R> {
        self.pool.broadcast(|_| work())
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }
}

/// Once in a process: devices come and go, the machine stays.
fn warn_once(reason: &NoAmx) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| {
        tracing::warn!(
            %reason,
            "products = \"bf16\" needs AMX; products are computed in f32, which gives other bits and takes longer"
        );
    });
}
