//! A CUDA stack to test with: the stand-ins, built once, or the machine's own.
#![allow(clippy::print_stdout, reason = "says what was skipped")]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytemuck::Pod;
use eaglet_runtime::cuda::{
    Buffer, Context, CudaError, Driver, KernelCache, Kernels, Nvrtc, Program, SearchPath, Stream,
};
use eaglet_runtime::digest::Digest;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cuda");
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

/// A folder that test binaries of all kinds share: `tmp` of the target folder, two above the one of this binary.
fn scratch() -> PathBuf {
    let binary = std::env::current_exe().expect("this binary");
    let target = binary
        .ancestors()
        .nth(3)
        .expect("a binary is in target/PROFILE/deps");
    let folder = target.join("tmp");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn wants_real() -> bool {
    std::env::var_os("EAGLET_TEST_GPU").is_some_and(|value| value == "1")
}

/// The folder of the stand-in libraries; none if they cannot be built here.
pub(crate) fn stand_ins() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(build).as_deref()
}

#[allow(clippy::print_stdout, reason = "says what was skipped")]
fn build() -> Option<PathBuf> {
    if Command::new("g++").arg("--version").output().is_err() {
        println!("skipped: there is no g++ to build the stand-in CUDA libraries with");
        return None;
    }
    let sources = Path::new(SOURCES).canonicalize().expect("the stand-ins' sources");
    let libraries = [
        ("driver.cpp", "libcuda.so.1"),
        ("nvrtc.cpp", "libnvrtc.so.12"),
        ("cublaslt.cpp", "libcublasLt.so.12"),
        ("nccl.cpp", "libnccl.so.2"),
    ];
    let texts: Vec<u8> = libraries
        .iter()
        .map(|(source, _)| *source)
        .chain(["cuda_host.h"])
        .flat_map(|name| std::fs::read(sources.join(name)).expect("a source"))
        .collect();
    let target = &scratch();
    let folder = target.join(format!("cuda-{}", Digest::of(&texts)));
    if folder.is_dir() {
        return Some(folder);
    }
    // Built under another name first: test processes may build at the same time.
    let partial = tempfile::tempdir_in(target).expect("a folder");
    let header = format!("-DSTANDIN_HEADER=\"{}\"", sources.join("cuda_host.h").display());
    for (source, library) in libraries {
        let built = Command::new("g++")
            .args([
                "-std=c++17",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-shared",
                "-fPIC",
                "-pthread",
            ])
            .arg(&header)
            .arg(format!("-Wl,-soname,{library}"))
            .arg(sources.join(source))
            .arg("-o")
            .arg(partial.path().join(library))
            .arg("-ldl")
            .output()
            .expect("g++ runs");
        assert!(
            built.status.success(),
            "{}",
            String::from_utf8_lossy(&built.stderr)
        );
    }
    let partial = partial.keep();
    if std::fs::rename(&partial, &folder).is_err() {
        assert!(folder.is_dir(), "another process built them meanwhile");
        std::fs::remove_dir_all(&partial).expect("removed");
    }
    Some(folder)
}

/// Where the stack's libraries are looked for.
pub(crate) fn search() -> Option<SearchPath> {
    if wants_real() {
        return Some(SearchPath::here());
    }
    Some(SearchPath::new(&OsString::from(stand_ins()?), Vec::new()))
}

/// Compiled kernels of all test processes; compiling them takes longer than running them.
pub(crate) fn cache() -> Option<KernelCache> {
    // The stand-in's code depends on its header, which NVRTC's version does not say.
    let folder = match wants_real() {
        true => scratch(),
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
