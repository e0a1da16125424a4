//! The memory that a rank has taken of its device: a pool of the driver's, which gives in the order of a stream.
//!
//! ARENA-1: memory is taken and given back in the order of the rank's stream, and nobody waits for either. Work on another stream
//! begins behind a mark that comes after the taking, and is waited for before the giving back.
//! ARENA-2: what the pool has got from the device it keeps as long as the rank lives: after the largest step the device is
//! asked for nothing more, and memory of one size serves another.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUdevice_attribute, CUmemPool_attribute_enum, CUmemoryPool};

use super::driver::{CudaError, OUT_OF_MEMORY};
use super::stream::Stream;

/// `CUmemPoolProps`: a pool of plain memory of one device, for this process only. Its tail has other fields in other versions,
/// all of which are zero by default.
#[repr(C)]
pub(super) struct PoolProperties {
    /// `CU_MEM_ALLOCATION_TYPE_PINNED`: memory that stays where it is.
    allocation: u32,
    /// No handles for other processes.
    handles: u32,
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    location: u32,
    device: i32,
    security: *mut c_void,
    rest: [u8; 64],
}

/// Bytes of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaUse {
    /// Got from the device.
    pub reserved: u64,
    /// Taken now.
    pub used: u64,
    /// Taken at most, so far.
    pub most_used: u64,
}

/// Where a rank takes its device's memory from.
#[derive(Debug)]
pub(super) struct Arena {
    stream: Arc<Stream>,
    /// None where the device has no pools: then every piece is the driver's own.
    pool: Option<CUmemoryPool>,
}

#[allow(unsafe_code)]
// SAFETY: a pool may be used by any thread that makes its context current, which every call does (`bind`).
unsafe impl Send for Arena {}
#[allow(unsafe_code)]
// SAFETY: the driver locks a pool itself.
unsafe impl Sync for Arena {}

#[allow(unsafe_code)]
impl Arena {
    /// An arena that has nothing yet.
    ///
    /// # Errors
    /// If the driver makes no pool although the device has them.
    pub(super) fn new(stream: &Arc<Stream>) -> Result<Self, CudaError> {
        let context = stream.context();
        let gpu = context.gpu();
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
        let pool = if gpu.attribute(supported)? == 0 {
            tracing::info!(
                gpu = gpu.ordinal(),
                "no memory pools: every buffer is taken and freed by itself"
            );
            None
        } else {
            let table = context.bind()?;
            let properties = PoolProperties {
                allocation: 1,
                handles: 0,
                location: 1,
                device: gpu.device,
                security: std::ptr::null_mut(),
                rest: [0; 64],
            };
            let mut pool = std::ptr::null_mut();
            // SAFETY: reads the properties and writes one handle.
            context.check("cuMemPoolCreate", unsafe {
                (table.pool_create)(&raw mut pool, &raw const properties)
            })?;
            Some(pool)
        };
        let arena = Self {
            stream: stream.clone(),
            pool,
        };
        if let Some(pool) = arena.pool {
            // ARENA-2
            let mut keep = u64::MAX;
            let attribute = CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            let table = context.bind()?;
            // SAFETY: the attribute is a 64-bit number.
            context.check("cuMemPoolSetAttribute", unsafe {
                (table.pool_set)(pool, attribute, (&raw mut keep).cast())
            })?;
        }
        Ok(arena)
    }

    /// Takes `bytes`, of which there is at least one; `None` if there is no room.
    pub(super) fn take(&self, bytes: usize) -> Result<Option<u64>, CudaError> {
        let context = self.stream.context();
        let table = context.bind()?;
        let mut pointer = 0;
        // SAFETY: writes one address; pool and stream are alive.
        let (call, code) = unsafe {
            match self.pool {
                Some(pool) => (
                    "cuMemAllocFromPoolAsync",
                    (table.pool_alloc)(&raw mut pointer, bytes, pool, self.stream.raw()),
                ),
                None => ("cuMemAlloc_v2", (table.alloc)(&raw mut pointer, bytes)),
            }
        };
        if code == OUT_OF_MEMORY {
            return Ok(None);
        }
        context.check(call, code)?;
        Ok(Some(pointer))
    }

    /// Gives back what was taken.
    pub(super) fn give_back(&self, pointer: u64) {
        let Ok(table) = self.stream.context().bind() else {
            return; // a device that has failed keeps nothing for anybody
        };
        // SAFETY: taken here once, given back once, behind all work of the rank's stream that uses it (ARENA-1); the plain
        // call waits for all work.
        unsafe {
            match self.pool {
                Some(_) => (table.free_async)(pointer, self.stream.raw()),
                None => (table.free)(pointer),
            }
        };
    }

    /// What it has; nothing is known where there are no pools.
    ///
    /// # Errors
    /// If the driver does not say.
    pub(super) fn usage(&self) -> Result<Option<ArenaUse>, CudaError> {
        let Some(pool) = self.pool else { return Ok(None) };
        let context = self.stream.context();
        let table = context.bind()?;
        let ask = |attribute| {
            let mut bytes = 0_u64;
            // SAFETY: these attributes are 64-bit numbers.
            let code = unsafe { (table.pool_get)(pool, attribute, (&raw mut bytes).cast()) };
            context.check("cuMemPoolGetAttribute", code).map(|()| bytes)
        };
        Ok(Some(ArenaUse {
            reserved: ask(CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            used: ask(CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            most_used: ask(CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
        }))
    }

    /// Free bytes of the device with those that the arena has and does not use, and all bytes.
    pub(super) fn room(&self) -> (usize, usize) {
        let (free, total) = self.stream.context().memory().unwrap_or_default();
        let unused = self
            .usage()
            .ok()
            .flatten()
            .map_or(0, |usage| usage.reserved - usage.used);
        (free + unused as usize, total)
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Arena {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let (Some(pool), Ok(table)) = (self.pool, self.stream.context().bind()) {
            // SAFETY: made once, destroyed once; every buffer holds the arena, so all have been given back.
            unsafe { (table.pool_destroy)(pool) };
        }
    }
}
