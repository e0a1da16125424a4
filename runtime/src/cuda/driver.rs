//! The driver: devices, contexts, and the codes that its calls answer.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUmemPool_attribute_enum, CUmemoryPool, CUmodule, CUstream, CUuuid,
};

use super::arena::PoolProperties;
use super::library::{LibraryError, SearchPath, functions};
use super::memory::Holders;

functions! {
    /// The driver's functions.
    DriverTable of Driver {
        fn init as "cuInit" (flags: c_uint);
        fn driver_version as "cuDriverGetVersion" (version: *mut c_int);
        fn error_name as "cuGetErrorName" (code: i32, text: *mut *const c_char);
        fn error_text as "cuGetErrorString" (code: i32, text: *mut *const c_char);
        fn device_count as "cuDeviceGetCount" (count: *mut c_int);
        fn device_get as "cuDeviceGet" (device: *mut CUdevice, ordinal: c_int);
        fn device_name as "cuDeviceGetName" (name: *mut c_char, len: c_int, device: CUdevice);
        fn device_uuid as "cuDeviceGetUuid_v2" (uuid: *mut CUuuid, device: CUdevice);
        fn device_memory as "cuDeviceTotalMem_v2" (bytes: *mut usize, device: CUdevice);
        fn device_attribute as "cuDeviceGetAttribute" (value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
        fn can_access_peer as "cuDeviceCanAccessPeer" (can: *mut c_int, device: CUdevice, peer: CUdevice);
        fn context_retain as "cuDevicePrimaryCtxRetain" (context: *mut CUcontext, device: CUdevice);
        fn context_release as "cuDevicePrimaryCtxRelease_v2" (device: CUdevice);
        fn context_set as "cuCtxSetCurrent" (context: CUcontext);
        fn memory_info as "cuMemGetInfo_v2" (free: *mut usize, total: *mut usize);
        fn alloc as "cuMemAlloc_v2" (pointer: *mut CUdeviceptr, bytes: usize);
        fn free as "cuMemFree_v2" (pointer: CUdeviceptr);
        fn pool_create as "cuMemPoolCreate" (pool: *mut CUmemoryPool, properties: *const PoolProperties);
        fn pool_destroy as "cuMemPoolDestroy" (pool: CUmemoryPool);
        fn pool_set as "cuMemPoolSetAttribute" (pool: CUmemoryPool, attribute: CUmemPool_attribute_enum, value: *mut c_void);
        fn pool_get as "cuMemPoolGetAttribute" (pool: CUmemoryPool, attribute: CUmemPool_attribute_enum, value: *mut c_void);
        fn pool_alloc as "cuMemAllocFromPoolAsync" (pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream);
        fn free_async as "cuMemFreeAsync" (pointer: CUdeviceptr, stream: CUstream);
        fn alloc_host as "cuMemHostAlloc" (pointer: *mut *mut c_void, bytes: usize, flags: c_uint);
        fn free_host as "cuMemFreeHost" (pointer: *mut c_void);
        fn copy_to_device as "cuMemcpyHtoDAsync_v2" (to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
        fn copy_to_host as "cuMemcpyDtoHAsync_v2" (to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn copy_on_device as "cuMemcpyDtoDAsync_v2" (to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
        fn set_bytes as "cuMemsetD8Async" (to: CUdeviceptr, value: u8, bytes: usize, stream: CUstream);
        fn stream_create as "cuStreamCreate" (stream: *mut CUstream, flags: c_uint);
        fn stream_destroy as "cuStreamDestroy_v2" (stream: CUstream);
        fn stream_synchronize as "cuStreamSynchronize" (stream: CUstream);
        fn stream_query as "cuStreamQuery" (stream: CUstream);
        fn stream_wait as "cuStreamWaitEvent" (stream: CUstream, event: CUevent, flags: c_uint);
        fn event_create as "cuEventCreate" (event: *mut CUevent, flags: c_uint);
        fn event_destroy as "cuEventDestroy_v2" (event: CUevent);
        fn event_record as "cuEventRecord" (event: CUevent, stream: CUstream);
        fn event_query as "cuEventQuery" (event: CUevent);
        fn event_synchronize as "cuEventSynchronize" (event: CUevent);
        fn module_load as "cuModuleLoadData" (module: *mut CUmodule, image: *const c_void);
        fn module_unload as "cuModuleUnload" (module: CUmodule);
        fn module_function as "cuModuleGetFunction" (function: *mut CUfunction, module: CUmodule, name: *const c_char);
        fn function_attribute as "cuFuncGetAttribute" (value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction);
        fn function_set as "cuFuncSetAttribute" (function: CUfunction, attribute: CUfunction_attribute, value: c_int);
        fn launch as "cuLaunchKernel" (
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: CUstream, arguments: *mut *mut c_void, extra: *mut *mut c_void,
        );
    }
}

/// Memory of a device is used up.
pub(super) const OUT_OF_MEMORY: i32 = 2;
/// The driver is there, and no device is.
const NO_DEVICE: i32 = 100;
/// Work is still going on.
const NOT_READY: i32 = 600;

/// Something that a GPU was asked for failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CudaError {
    /// A library is missing or does not fit.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// A call of the driver's failed.
    #[error("{call} failed: {name} ({code}), {text}")]
    Call {
        /// The driver's function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The answer's name.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// Memory of the device, or pinned memory of the host, is used up.
    #[error("no room for {bytes} bytes of {name} on {device}: {free} of {total} bytes are free; {holders}")]
    OutOfMemory {
        /// What it was for.
        name: &'static str,
        /// Size asked for.
        bytes: usize,
        /// Where.
        device: String,
        /// Free bytes of the device.
        free: usize,
        /// All bytes of the device.
        total: usize,
        /// What is held already.
        holders: Holders,
    },
    /// There is no such device.
    #[error("there is no cuda:{ordinal}: {reason}")]
    NoDevice {
        /// The number asked for.
        ordinal: usize,
        /// How many there are, and what hides others.
        reason: String,
    },
    /// A kernel does not compile: a mistake of ours or an NVRTC that is too old.
    #[error("kernels `{program}` do not compile for {architecture} with NVRTC {version}: {log}")]
    Compile {
        /// The program.
        program: String,
        /// Such as `sm_90`.
        architecture: String,
        /// Such as `13.2`.
        version: String,
        /// The compiler's words.
        log: String,
    },
}

impl CudaError {
    /// Whether the device, or the process's context on it, has failed: a new process may find it in order. Want of memory
    /// and all else is the same whenever it is tried again.
    pub fn is_passing(&self) -> bool {
        matches!(self, Self::Call { code, .. } if *code != OUT_OF_MEMORY)
    }
}

/// The driver, opened and initialised.
#[derive(Debug)]
pub struct Driver {
    pub(super) table: DriverTable,
}

impl Driver {
    /// Opens the driver's library and initialises it.
    ///
    /// # Errors
    /// If there is no driver or it does not start.
    pub fn open(search: &SearchPath) -> Result<Arc<Self>, CudaError> {
        let driver = Self {
            table: DriverTable::open(search)?,
        };
        #[allow(unsafe_code)]
        // SAFETY: any thread may initialise the driver, any number of times.
        let code = unsafe { (driver.table.init)(0) };
        // A driver without devices is one that counts none.
        if code != NO_DEVICE {
            driver.check("cuInit", code)?;
        }
        Ok(Arc::new(driver))
    }

    /// Turns the answer of `call` into an error, unless it is success.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        if code == 0 {
            return Ok(());
        }
        let (name, text) = (
            self.words(self.table.error_name, code),
            self.words(self.table.error_text, code),
        );
        Err(CudaError::Call {
            call,
            code,
            name,
            text,
        })
    }

    /// Like [`Driver::check`] for a question whose answer may be "not yet": whether it is done.
    pub(super) fn is_done(&self, call: &'static str, code: i32) -> Result<bool, CudaError> {
        if code == NOT_READY {
            return Ok(false);
        }
        self.check(call, code).map(|()| true)
    }

    #[allow(unsafe_code)]
    fn words(&self, of: unsafe extern "C" fn(i32, *mut *const c_char) -> i32, code: i32) -> String {
        let mut text = std::ptr::null();
        // SAFETY: the driver writes a pointer to a text of its own that is never freed, or null.
        unsafe {
            if of(code, &raw mut text) != 0 || text.is_null() {
                return "unknown".to_owned();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// The CUDA version that the driver supports, `(major, minor)`.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn version(&self) -> Result<(u32, u32), CudaError> {
        let mut version = 0;
        // SAFETY: writes one integer.
        self.check("cuDriverGetVersion", unsafe {
            (self.table.driver_version)(&raw mut version)
        })?;
        let version = version.unsigned_abs();
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Number of devices that this process may use.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn device_count(&self) -> Result<usize, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        let code = unsafe { (self.table.device_count)(&raw mut count) };
        // 3: a driver that was not initialised because it has no device.
        if code == NO_DEVICE || code == 3 {
            return Ok(0);
        }
        self.check("cuDeviceGetCount", code)?;
        Ok(usize::try_from(count).unwrap_or(0))
    }

    /// A device by its number.
    ///
    /// # Errors
    /// If there is no such device.
    #[allow(unsafe_code)]
    pub fn device(self: &Arc<Self>, ordinal: usize) -> Result<Gpu, CudaError> {
        let count = self.device_count()?;
        if ordinal >= count {
            let hidden = std::env::var("CUDA_VISIBLE_DEVICES")
                .map(|visible| format!("; CUDA_VISIBLE_DEVICES is `{visible}`"))
                .unwrap_or_default();
            let reason = match count {
                0 => format!("the driver has no device{hidden}"),
                1 => format!("the driver has one device, cuda:0{hidden}"),
                count => format!(
                    "the driver has {count} devices, cuda:0 to cuda:{}{hidden}",
                    count - 1
                ),
            };
            return Err(CudaError::NoDevice { ordinal, reason });
        }
        let mut device = 0;
        // SAFETY: writes one integer.
        self.check("cuDeviceGet", unsafe {
            (self.table.device_get)(&raw mut device, ordinal as c_int)
        })?;
        Ok(Gpu {
            driver: self.clone(),
            ordinal,
            device,
        })
    }
}

/// One device of the driver's.
#[derive(Debug, Clone)]
pub struct Gpu {
    pub(super) driver: Arc<Driver>,
    pub(super) ordinal: usize,
    pub(super) device: CUdevice,
}

impl Gpu {
    /// Its number, as in `cuda:0`.
    pub fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Its product name.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn name(&self) -> Result<String, CudaError> {
        let mut name = [0u8; 256];
        // SAFETY: writes a text with its end mark into the buffer of the stated length.
        self.driver.check("cuDeviceGetName", unsafe {
            (self.driver.table.device_name)(name.as_mut_ptr().cast(), name.len() as c_int, self.device)
        })?;
        let text = CStr::from_bytes_until_nul(&name).map(CStr::to_string_lossy);
        Ok(text.unwrap_or_default().into_owned())
    }

    /// Its memory in bytes.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn memory(&self) -> Result<u64, CudaError> {
        let mut bytes = 0usize;
        // SAFETY: writes one size.
        self.driver.check("cuDeviceTotalMem_v2", unsafe {
            (self.driver.table.device_memory)(&raw mut bytes, self.device)
        })?;
        Ok(bytes as u64)
    }

    /// What tells it from all others, as `CUDA_VISIBLE_DEVICES` takes it: `GPU-` or, of a part of a GPU, `MIG-` and 16 bytes
    /// in hexadecimal digits.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn uuid(&self) -> Result<String, CudaError> {
        let mut uuid = CUuuid { bytes: [0; 16] };
        // SAFETY: writes 16 bytes.
        self.driver.check("cuDeviceGetUuid_v2", unsafe {
            (self.driver.table.device_uuid)(&raw mut uuid, self.device)
        })?;
        let kind = if self.is_part()? { "MIG" } else { "GPU" };
        let mut text = kind.to_owned();
        for (index, byte) in uuid.bytes.iter().enumerate() {
            if matches!(index, 0 | 4 | 6 | 8 | 10) {
                text.push('-');
            }
            text.push_str(&format!("{:02x}", *byte as u8));
        }
        Ok(text)
    }

    /// Whether it is a part of a GPU (MIG).
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn is_part(&self) -> Result<bool, CudaError> {
        // The driver calls a part so: "NVIDIA H200 MIG 1g.18gb".
        Ok(self.name()?.contains(" MIG "))
    }

    /// Its place on the PCI bus, as the kernel names it: `0000:65:00.0`. Of a part, that of the whole.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn pci_address(&self) -> Result<String, CudaError> {
        let domain = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?;
        let bus = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?;
        let device = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?;
        Ok(format!("{domain:04x}:{bus:02x}:{device:02x}.0"))
    }

    /// One of its properties.
    ///
    /// # Errors
    /// If the driver does not know the property.
    #[allow(unsafe_code)]
    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: writes one integer.
        self.driver.check("cuDeviceGetAttribute", unsafe {
            (self.driver.table.device_attribute)(&raw mut value, attribute, self.device)
        })?;
        Ok(value)
    }

    /// Compute capability, `(major, minor)`.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn capability(&self) -> Result<(u32, u32), CudaError> {
        let major = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        Ok((major.unsigned_abs(), minor.unsigned_abs()))
    }

    /// The number of its multiprocessors.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn multiprocessors(&self) -> Result<u32, CudaError> {
        let count = self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        Ok(count.unsigned_abs())
    }

    /// Whether it can read the memory of another device.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn can_access(&self, peer: &Self) -> Result<bool, CudaError> {
        let mut can = 0;
        // SAFETY: writes one integer.
        self.driver.check("cuDeviceCanAccessPeer", unsafe {
            (self.driver.table.can_access_peer)(&raw mut can, self.device, peer.device)
        })?;
        Ok(can != 0)
    }

    /// The device's primary context, shared by all of the process.
    ///
    /// # Errors
    /// If the device cannot be used.
    #[allow(unsafe_code)]
    pub fn context(&self) -> Result<Arc<Context>, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (self.driver.table.context_retain)(&raw mut raw, self.device)
        })?;
        Ok(Arc::new(Context {
            gpu: self.clone(),
            raw,
        }))
    }
}

/// A device's primary context.
#[derive(Debug)]
pub struct Context {
    pub(super) gpu: Gpu,
    raw: CUcontext,
}

#[allow(unsafe_code)]
// SAFETY: a context may be used by any thread that makes it current, which every call does (`bind`).
unsafe impl Send for Context {}
#[allow(unsafe_code)]
// SAFETY: the driver locks a context itself.
unsafe impl Sync for Context {}

impl Context {
    /// The device.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Makes the context that of the calling thread, and gives the driver's functions.
    #[allow(unsafe_code)]
    pub(super) fn bind(&self) -> Result<&DriverTable, CudaError> {
        let driver = &self.gpu.driver;
        // SAFETY: the context is retained until this value is dropped.
        driver.check("cuCtxSetCurrent", unsafe { (driver.table.context_set)(self.raw) })?;
        Ok(&driver.table)
    }

    /// Turns the answer of `call` into an error, unless it is success.
    pub(super) fn check(&self, call: &'static str, code: i32) -> Result<(), CudaError> {
        self.gpu.driver.check(call, code)
    }

    /// Free bytes and all bytes of the device.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let table = self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two sizes.
        self.check("cuMemGetInfo_v2", unsafe {
            (table.memory_info)(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }
}

impl Drop for Context {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: retained once, released once; everything made in the context holds it.
        unsafe { (self.gpu.driver.table.context_release)(self.gpu.device) };
    }
}
