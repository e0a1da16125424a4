//! A CUDA stack to test with: the stand-ins, built once, or the machine's own.
#![allow(clippy::print_stdout, reason = "says what was skipped")]

use std::ffi::OsString;
use std::process::Command;
use std::sync::{Arc, Mutex, Once, PoisonError};

use bytemuck::Pod;
use eaglet_runtime::cuda::{
    Buffer, Context, CudaError, Driver, KernelCache, Kernels, Nvrtc, Program, SearchPath, Stream,
};

#[path = "../../../tests/cuda/stand_ins.rs"]
mod stand_ins;
pub(crate) use stand_ins::stand_ins;

/// Widths of heads that tests use: small ones, ones that need much shared memory, ones that take the wide form.
const HEADS: [(u32, u32); 4] = [(16, 16), (24, 20), (128, 128), (136, 136)];
const CHILD: &str = "EAGLET_TEST_CHILD";

/// A device with its kernels.
pub(crate) struct Stack {
    pub(crate) context: Arc<Context>,
    pub(crate) stream: Stream,
    pub(crate) kernels: Kernels,
    real: bool,
}

fn wants_real() -> bool {
    std::env::var_os("EAGLET_TEST_GPU").is_some_and(|value| value == "1")
}

/// Where the stack's libraries are looked for.
pub(crate) fn search() -> Option<SearchPath> {
    // Operations panic with the error itself, which the usual hook cannot show.
    static SHOWING: Once = Once::new();
    SHOWING.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            match panic.payload().downcast_ref::<CudaError>() {
                Some(error) => println!("the gpu failed: {error}"),
                None => usual(panic),
            }
        }));
    });
    if wants_real() {
        return Some(SearchPath::here());
    }
    Some(SearchPath::new(&OsString::from(stand_ins()?), Vec::new()))
}

/// Compiled kernels of all test processes; compiling them takes longer than running them.
pub(crate) fn cache() -> Option<KernelCache> {
    // The stand-in's code depends on its header, which NVRTC's version does not say.
    let folder = match wants_real() {
        true => stand_ins::scratch(),
        false => stand_ins()?.to_owned(),
    };
    Some(KernelCache::at(folder.join("kernels")))
}

impl Stack {
    /// A stack, or none where it cannot be built.
    pub(crate) fn open() -> Option<Self> {
        // One test after the other: the first compiles what the others then find in the cache.
        static COMPILING: Mutex<()> = Mutex::new(());
        let _compiling = COMPILING.lock().unwrap_or_else(PoisonError::into_inner);
        let search = search()?;
        let stack = Self::try_open(&search).unwrap_or_else(|error| panic!("{error}"));
        for (head_dim, value_dim) in HEADS {
            let program = Program::Attention { head_dim, value_dim };
            stack
                .kernels
                .prepare(program)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        Some(stack)
    }

    fn try_open(search: &SearchPath) -> Result<Self, CudaError> {
        let context = Driver::open(search)?.device(0)?.context()?;
        let stream = Stream::new(&context)?;
        let cache = cache().expect("the stack is there");
        let kernels = Kernels::new(&context, Nvrtc::open(search)?, cache)?;
        Ok(Self {
            context,
            stream,
            kernels,
            real: wants_real(),
        })
    }

    /// Whether it is the machine's own GPU.
    pub(crate) fn is_real(&self) -> bool {
        self.real
    }

    pub(crate) fn upload<T: Pod>(&self, values: &[T]) -> Buffer<T> {
        let mut buffer = Buffer::new(&self.context, values.len()).expect("room");
        self.stream.upload(values, buffer.view_mut()).expect("sent");
        buffer
    }

    pub(crate) fn download<T: Pod + Default>(&self, buffer: &Buffer<T>) -> Vec<T> {
        let mut values = vec![T::default(); buffer.len()];
        self.stream
            .download(buffer.view(), &mut values)
            .expect("received");
        values
    }
}

/// Whether this process was started by a test.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs one test of this binary in a process of its own with other variables; what it prints.
pub(crate) fn child(test: &str, variables: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .expect("a child");
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.status.success(), "{text}");
    text
}
