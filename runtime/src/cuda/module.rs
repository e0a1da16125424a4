//! Compiled kernels on a device, and their launch.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUfunction_attribute, CUmodule};

use super::driver::{Context, CudaError};
use super::memory::{View, ViewMut};
use super::stream::Stream;

/// Dynamic shared memory of a block that needs no permission, in bytes.
const SHARED_BYTES: u32 = 48 * 1024;

/// Machine code on a device.
#[derive(Debug)]
pub struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

#[allow(unsafe_code)]
// SAFETY: a module may be used by any thread that makes its context current.
unsafe impl Send for Module {}
#[allow(unsafe_code)]
// SAFETY: as above; nothing changes it after loading.
unsafe impl Sync for Module {}

impl Module {
    /// Loads machine code that NVRTC made.
    ///
    /// # Errors
    /// If it is not for this device.
    #[allow(unsafe_code)]
    pub fn load(context: &Arc<Context>, code: &[u8]) -> Result<Arc<Self>, CudaError> {
        let table = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the driver reads the image by the sizes in its header; it comes from NVRTC or the checked cache.
        context.check("cuModuleLoadData", unsafe {
            (table.module_load)(&raw mut raw, code.as_ptr().cast())
        })?;
        Ok(Arc::new(Self {
            context: context.clone(),
            raw,
        }))
    }

    /// A kernel by its name.
    ///
    /// # Errors
    /// If the module does not have it.
    #[allow(unsafe_code)]
    pub fn function(self: &Arc<Self>, name: &'static str) -> Result<Function, CudaError> {
        let table = self.context.bind()?;
        let text = CString::new(name).unwrap_or_default();
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the text ends with a zero.
        self.context.check("cuModuleGetFunction", unsafe {
            (table.module_function)(&raw mut raw, self.raw, text.as_ptr())
        })?;
        Ok(Function {
            module: self.clone(),
            raw,
            name,
        })
    }
}

impl Drop for Module {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(table) = self.context.bind() {
            // SAFETY: loaded once, unloaded once; functions hold the module.
            unsafe { (table.module_unload)(self.raw) };
        }
    }
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Function {
    module: Arc<Module>,
    raw: CUfunction,
    name: &'static str,
}

#[allow(unsafe_code)]
// SAFETY: a handle into a module that it holds.
unsafe impl Send for Function {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Function {}

/// What a kernel costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionCost {
    /// Registers of a thread.
    pub registers: u32,
    /// Static shared memory of a block.
    pub shared_bytes: u32,
    /// Memory of a thread for what does not fit into registers.
    pub local_bytes: u32,
}

/// One argument of a kernel, as eight bytes.
pub(super) trait Argument {
    fn word(&self) -> u64;
}

impl Argument for u32 {
    fn word(&self) -> u64 {
        u64::from(*self)
    }
}

impl Argument for u64 {
    fn word(&self) -> u64 {
        *self
    }
}

impl Argument for usize {
    fn word(&self) -> u64 {
        *self as u64
    }
}

impl Argument for f32 {
    fn word(&self) -> u64 {
        u64::from(self.to_bits())
    }
}

// Kernels take a null pointer for what is not there.
impl<T> Argument for View<'_, T> {
    fn word(&self) -> u64 {
        if self.is_empty() { 0 } else { self.address() }
    }
}

impl<T> Argument for ViewMut<'_, T> {
    fn word(&self) -> u64 {
        if self.is_empty() { 0 } else { self.address() }
    }
}

/// Blocks, threads and shared memory of a launch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub(super) grid: [u32; 3],
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
}

impl Function {
    /// Its name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// What it costs, by the driver.
    ///
    /// # Errors
    /// If the driver does not say.
    #[allow(unsafe_code)]
    pub fn cost(&self) -> Result<FunctionCost, CudaError> {
        let table = self.module.context.bind()?;
        let ask = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            let code = unsafe { (table.function_attribute)(&raw mut value, attribute, self.raw) };
            self.module.context.check("cuFuncGetAttribute", code)?;
            Ok::<u32, CudaError>(value.unsigned_abs())
        };
        Ok(FunctionCost {
            registers: ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_NUM_REGS)?,
            shared_bytes: ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)?,
            local_bytes: ask(CUfunction_attribute::CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)?,
        })
    }

    /// Launches the kernel; a launch without blocks does nothing.
    ///
    /// # Errors
    /// If the driver refuses. What goes wrong inside shows when the stream is synchronised.
    ///
    /// # Safety
    /// The arguments must be those of the kernel's text, in order, and every address that the kernel reaches with them
    /// must lie in the views they come from.
    #[allow(unsafe_code)]
    pub(super) unsafe fn launch(
        &self,
        stream: &Stream,
        shape: Shape,
        arguments: &[&dyn Argument],
    ) -> Result<(), CudaError> {
        if shape.grid.contains(&0) {
            return Ok(());
        }
        let context = &self.module.context;
        let table = context.bind()?;
        if shape.shared_bytes > SHARED_BYTES {
            let attribute = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function is alive.
            context.check("cuFuncSetAttribute", unsafe {
                (table.function_set)(self.raw, attribute, shape.shared_bytes.cast_signed())
            })?;
        }
        // The driver reads as many bytes of each word as the kernel declares; numbers lie at the low end.
        let mut words: Vec<u64> = arguments.iter().map(|argument| argument.word()).collect();
        let mut pointers: Vec<*mut c_void> = words
            .iter_mut()
            .map(|word| std::ptr::from_mut(word).cast())
            .collect();
        let [grid_x, grid_y, grid_z] = shape.grid;
        // SAFETY: the caller vouches for the arguments; the driver copies them before it returns.
        context.check("cuLaunchKernel", unsafe {
            (table.launch)(
                self.raw,
                grid_x,
                grid_y,
                grid_z,
                shape.threads,
                1,
                1,
                shape.shared_bytes,
                stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        })
    }
}
