//! NVRTC: from kernel text to machine code of one architecture.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::Path;

use super::driver::CudaError;
use super::library::{LibraryError, SearchPath, functions};

functions! {
    /// NVRTC's functions.
    NvrtcTable of Nvrtc {
        fn version as "nvrtcVersion" (major: *mut c_int, minor: *mut c_int);
        fn architecture_count as "nvrtcGetNumSupportedArchs" (count: *mut c_int);
        fn architectures as "nvrtcGetSupportedArchs" (numbers: *mut c_int);
        fn create as "nvrtcCreateProgram" (
            program: *mut *mut c_void, source: *const c_char, name: *const c_char,
            headers: c_int, header_sources: *const *const c_char, header_names: *const *const c_char,
        );
        fn compile as "nvrtcCompileProgram" (program: *mut c_void, count: c_int, options: *const *const c_char);
        fn log_size as "nvrtcGetProgramLogSize" (program: *mut c_void, bytes: *mut usize);
        fn log as "nvrtcGetProgramLog" (program: *mut c_void, log: *mut c_char);
        fn code_size as "nvrtcGetCUBINSize" (program: *mut c_void, bytes: *mut usize);
        fn code as "nvrtcGetCUBIN" (program: *mut c_void, code: *mut c_char);
        fn destroy as "nvrtcDestroyProgram" (program: *mut *mut c_void);
    }
}

/// The run-time compiler.
#[derive(Debug, Clone)]
pub struct Nvrtc {
    table: NvrtcTable,
    version: (u32, u32),
}

/// A program inside NVRTC, destroyed in the end.
struct Program<'a> {
    table: &'a NvrtcTable,
    raw: *mut c_void,
}

impl Drop for Program<'_> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made by `create`, destroyed once.
        unsafe { (self.table.destroy)(&raw mut self.raw) };
    }
}

impl Nvrtc {
    /// Opens NVRTC.
    ///
    /// # Errors
    /// If it is missing.
    #[allow(unsafe_code)]
    pub fn open(search: &SearchPath) -> Result<Self, LibraryError> {
        let table = NvrtcTable::open(search)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: writes two integers.
        unsafe { (table.version)(&raw mut major, &raw mut minor) };
        Ok(Self {
            table,
            version: (major.unsigned_abs(), minor.unsigned_abs()),
        })
    }

    /// Its version, `(major, minor)`.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The file it was opened from.
    pub fn path(&self) -> &Path {
        self.table.library.path()
    }

    /// The architecture to compile for: that of a device of compute capability `(major, minor)`, or the newest older one
    /// of the same generation, whose machine code the device runs too.
    ///
    /// # Errors
    /// If NVRTC is too old, or too new, for the device.
    #[allow(unsafe_code)]
    pub fn architecture(&self, (major, minor): (u32, u32)) -> Result<String, CudaError> {
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { (self.table.architecture_count)(&raw mut count) };
        let mut numbers: Vec<c_int> = vec![0; usize::try_from(count).unwrap_or(0)];
        // SAFETY: writes as many integers as it said.
        unsafe { (self.table.architectures)(numbers.as_mut_ptr()) };
        let wanted = (major * 10 + minor).cast_signed();
        let best = numbers
            .iter()
            .filter(|&&number| number <= wanted && number / 10 == wanted / 10)
            .max();
        best.map(|number| format!("sm_{number}"))
            .ok_or_else(|| CudaError::Compile {
                program: "all".to_owned(),
                architecture: format!("sm_{wanted}"),
                version: format!("{}.{}", self.version.0, self.version.1),
                log: "it does not know the device's generation; install the NVRTC of another CUDA version"
                    .to_owned(),
            })
    }

    /// Compiles `source` for `architecture` (such as `sm_90`) to machine code.
    ///
    /// # Errors
    /// [`CudaError::Compile`] with the compiler's log.
    #[allow(unsafe_code)]
    pub fn compile(
        &self,
        program: &str,
        source: &str,
        architecture: &str,
        options: &[String],
    ) -> Result<Vec<u8>, CudaError> {
        let refused = |log: String| CudaError::Compile {
            program: program.to_owned(),
            architecture: architecture.to_owned(),
            version: format!("{}.{}", self.version.0, self.version.1),
            log,
        };
        let text = |text: &str| {
            CString::new(text).map_err(|_| refused("a zero byte in the source or in an option".to_owned()))
        };
        let (source, name) = (text(source)?, text(&format!("{program}.cu"))?);
        let options = options
            .iter()
            .map(|option| text(option))
            .chain([text(&format!("--gpu-architecture={architecture}"))])
            .collect::<Result<Vec<CString>, _>>()?;
        let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut raw = std::ptr::null_mut();
        // SAFETY: the texts end with a zero and outlive the call; there are no headers.
        let code = unsafe {
            (self.table.create)(
                &raw mut raw,
                source.as_ptr(),
                name.as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        if code != 0 {
            return Err(refused(format!("nvrtcCreateProgram answers {code}")));
        }
        let made = Program {
            table: &self.table,
            raw,
        };
        // SAFETY: the program is alive, and the options outlive the call.
        let code = unsafe { (self.table.compile)(made.raw, pointers.len() as c_int, pointers.as_ptr()) };
        if code != 0 {
            let log = self
                .read(&made, self.table.log_size, self.table.log)
                .unwrap_or_default();
            let log = String::from_utf8_lossy(&log);
            return Err(refused(format!(
                "code {code}: {}",
                log.trim_end_matches('\0').trim()
            )));
        }
        self.read(&made, self.table.code_size, self.table.code)
            .filter(|code| !code.is_empty())
            .ok_or_else(|| refused("it gives no machine code".to_owned()))
    }

    #[allow(unsafe_code)]
    fn read(
        &self,
        program: &Program<'_>,
        size: unsafe extern "C" fn(*mut c_void, *mut usize) -> i32,
        read: unsafe extern "C" fn(*mut c_void, *mut c_char) -> i32,
    ) -> Option<Vec<u8>> {
        let mut bytes = 0usize;
        // SAFETY: the program is alive; the buffer has the size that NVRTC states for it.
        unsafe {
            if size(program.raw, &raw mut bytes) != 0 {
                return None;
            }
            let mut buffer = vec![0u8; bytes];
            (read(program.raw, buffer.as_mut_ptr().cast()) == 0).then_some(buffer)
        }
    }
}
