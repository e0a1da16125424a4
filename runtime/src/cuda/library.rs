//! Finding and opening NVIDIA's libraries at run time.
//!
//! The binary is linked to none of them: it starts on a machine that has no driver, and says what it looked for when a
//! GPU is asked for. `cudarc` gives the types and constants of the C interfaces, but not the loading: its own loader
//! never asks for `libnccl.so.2`, knows one major version of the others, cannot be told a folder, and panics when a
//! library or a symbol is missing. So libraries are opened here with `libloading`, and each function that eaglet calls
//! is looked up once, when its library is opened.
//!
//! LIBRARY-1: a missing library or function is an error that names the library, its names and the places looked at;
//! nothing panics.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The variable that names folders to look in first, separated by colons.
pub const PATH_VARIABLE: &str = "EAGLET_CUDA_PATH";

/// Folders in which toolkits and distributions put the libraries.
const KNOWN_FOLDERS: &[&str] = &[
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/opt/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/nvidia/lib64",
    "/run/opengl-driver/lib",
];

/// A library of NVIDIA's that eaglet calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LibraryKind {
    /// The driver: memory, streams, kernels.
    Driver,
    /// The run-time compiler of kernels.
    Nvrtc,
    /// Matrix products.
    CublasLt,
    /// Collectives.
    Nccl,
}

impl LibraryKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Driver, Self::Nvrtc, Self::CublasLt, Self::Nccl];

    /// What people call it.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Driver => "the CUDA driver",
            Self::Nvrtc => "NVRTC",
            Self::CublasLt => "cuBLASLt",
            Self::Nccl => "NCCL",
        }
    }

    /// The file names under which the CUDA 12 and 13 wheels, Debian and the toolkit install it, best first.
    pub const fn names(self) -> &'static [&'static str] {
        match self {
            Self::Driver => &["libcuda.so.1", "libcuda.so"],
            Self::Nvrtc => &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"],
            Self::CublasLt => &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"],
            Self::Nccl => &["libnccl.so.2", "libnccl.so"],
        }
    }

    /// What brings it to a machine.
    const fn remedy(self) -> &'static str {
        match self {
            Self::Driver => "install NVIDIA's driver",
            Self::Nvrtc => "install the CUDA toolkit or the wheel nvidia-cuda-nvrtc",
            Self::CublasLt => "install the CUDA toolkit or the wheel nvidia-cublas",
            Self::Nccl => "install the package libnccl2 or the wheel nvidia-nccl-cu13",
        }
    }
}

/// A library or one of its functions is missing.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LibraryError {
    /// No file of any of its names could be opened.
    #[error(
        "{} was not found: looked for {} in {places}{failures}; {}, or name its folder in {PATH_VARIABLE}",
        .kind.title(), .kind.names().join(", "), .kind.remedy()
    )]
    Missing {
        /// Which one.
        kind: LibraryKind,
        /// Where it was looked for.
        places: Places,
        /// Files that are there and could not be opened, with the loader's words.
        failures: Failures,
    },
    /// The library is there and too old, too new or another one.
    #[error("{} has no function {symbol}; it is not a version of {} that eaglet can use", .path.display(), .kind.title())]
    Symbol {
        /// Which one.
        kind: LibraryKind,
        /// The opened file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
    },
}

/// Folders that were searched, in order.
#[derive(Debug, Clone, Default)]
pub struct Places(Vec<PathBuf>);

impl fmt::Display for Places {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the loader's own path")?;
        for place in &self.0 {
            write!(f, ", {}", place.display())?;
        }
        Ok(())
    }
}

/// Files that could not be opened.
#[derive(Debug, Clone, Default)]
pub struct Failures(Vec<(PathBuf, String)>);

impl fmt::Display for Failures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (path, reason) in &self.0 {
            write!(f, "; {} cannot be opened: {reason}", path.display())?;
        }
        Ok(())
    }
}

/// Where libraries are looked for: named folders, the loader's own path, known folders, in this order.
#[derive(Debug, Clone)]
pub struct SearchPath {
    named: Vec<PathBuf>,
    known: Vec<PathBuf>,
}

impl SearchPath {
    /// The path of this process: [`PATH_VARIABLE`], the loader's, the toolkit's, the distribution's, and the wheels of an
    /// active Python environment.
    pub fn here() -> Self {
        let named = std::env::var_os(PATH_VARIABLE).unwrap_or_default();
        let mut known: Vec<PathBuf> = KNOWN_FOLDERS.iter().map(PathBuf::from).collect();
        for variable in ["CUDA_HOME", "CUDA_PATH"] {
            if let Some(root) = std::env::var_os(variable) {
                known.insert(0, Path::new(&root).join("lib64"));
            }
        }
        for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(root) = std::env::var_os(variable) {
                for python in folders(&Path::new(&root).join("lib")) {
                    known.extend(spread(&python.join("site-packages/nvidia")));
                }
                known.push(Path::new(&root).join("lib"));
            }
        }
        Self::new(&named, known)
    }

    /// These folders, separated by colons, then the loader's path, then `known`.
    ///
    /// Below a named folder its `lib`, `lib64` and `*/lib` are searched too: a toolkit's root and the `nvidia` folder of
    /// Python's `site-packages` can be given as they are.
    pub fn new(named: &OsString, known: Vec<PathBuf>) -> Self {
        let named = std::env::split_paths(named)
            .filter(|folder| !folder.as_os_str().is_empty())
            .flat_map(|folder| spread(&folder))
            .collect();
        Self { named, known }
    }

    fn places(&self) -> Places {
        Places(self.named.iter().chain(&self.known).cloned().collect())
    }
}

/// Sub-folders, in order of their names.
fn folders(of: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(of).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir())
        .collect();
    found.sort();
    found
}

/// The folder, and those below it in which libraries usually are.
fn spread(folder: &Path) -> Vec<PathBuf> {
    let below = folders(folder).into_iter().map(|inner| inner.join("lib"));
    [folder.to_owned(), folder.join("lib"), folder.join("lib64")]
        .into_iter()
        .chain(below)
        .filter(|path| path.is_dir())
        .collect()
}

/// An open library. It stays open until the process ends: its threads and exit handlers outlive every handle of ours.
#[derive(Debug, Clone)]
pub struct Library {
    kind: LibraryKind,
    path: PathBuf,
    open: Arc<std::mem::ManuallyDrop<libloading::Library>>,
}

impl Library {
    /// Opens the first file of one of the library's names.
    ///
    /// # Errors
    /// [`LibraryError::Missing`], which says where it was looked for.
    pub fn open(kind: LibraryKind, search: &SearchPath) -> Result<Self, LibraryError> {
        let mut failures = Failures::default();
        let in_folders = |folders: &[PathBuf], failures: &mut Failures| {
            let candidates = folders
                .iter()
                .flat_map(|folder| kind.names().iter().map(move |name| folder.join(name)));
            for path in candidates.filter(|path| path.exists()) {
                match load(&path) {
                    Ok(open) => return Some((path, open)),
                    Err(error) => failures.0.push((path, error.to_string())),
                }
            }
            None
        };
        let by_loader = || {
            let mut names = kind.names().iter().map(PathBuf::from);
            names.find_map(|name| Some((name.clone(), load(&name).ok()?)))
        };
        let found = in_folders(&search.named, &mut failures)
            .or_else(by_loader)
            .or_else(|| in_folders(&search.known, &mut failures));
        let Some((path, open)) = found else {
            return Err(LibraryError::Missing {
                kind,
                places: search.places(),
                failures,
            });
        };
        tracing::debug!(library = kind.title(), path = %path.display(), "opened");
        Ok(Self {
            kind,
            path,
            open: Arc::new(std::mem::ManuallyDrop::new(open)),
        })
    }

    /// Which library it is.
    pub fn kind(&self) -> LibraryKind {
        self.kind
    }

    /// The file, or the bare name if the loader found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A function of the library.
    ///
    /// # Errors
    /// If the library does not have it.
    ///
    /// # Safety
    /// `F` must be the type of the function `symbol`, an `extern "C"` function pointer.
    #[allow(unsafe_code)]
    pub(super) unsafe fn function<F: Copy>(&self, symbol: &'static str) -> Result<F, LibraryError> {
        // SAFETY: the caller states the type; the library is never closed, so the pointer stays valid.
        let found = unsafe { self.open.get::<F>(symbol) };
        found.map(|function| *function).map_err(|_| LibraryError::Symbol {
            kind: self.kind,
            path: self.path.clone(),
            symbol,
        })
    }
}

#[allow(unsafe_code)]
fn load(path: &Path) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: NVIDIA's libraries may be opened from any thread, and their initialisers do not touch our state.
    unsafe { libloading::Library::new(path) }
}

/// Declares the functions of a library that eaglet calls, and a table of them that is filled when the library is opened.
///
/// Return codes are plain integers: a library may be newer than any list of codes, and a Rust enumeration with a value
/// that it does not know would be undefined behaviour.
macro_rules! functions {
    ($(#[$doc:meta])* $table:ident of $kind:ident { $(fn $name:ident as $symbol:literal ($($argument:ident: $type:ty),* $(,)?);)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        #[allow(dead_code)]
        pub(super) struct $table {
            pub(super) library: $crate::cuda::library::Library,
            $(pub(super) $name: unsafe extern "C" fn($($argument: $type),*) -> i32,)*
        }

        impl $table {
            /// Opens the library and looks up all its functions.
            #[allow(unsafe_code)]
            pub(super) fn open(search: &$crate::cuda::library::SearchPath) -> Result<Self, $crate::cuda::library::LibraryError> {
                let library = $crate::cuda::library::Library::open($crate::cuda::library::LibraryKind::$kind, search)?;
                $(
                    // SAFETY: the signature is that of NVIDIA's header.
                    let $name = unsafe {
                        library.function::<unsafe extern "C" fn($($argument: $type),*) -> i32>($symbol)?
                    };
                )*
                Ok(Self { library, $($name),* })
            }
        }
    };
}
pub(super) use functions;

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> SearchPath {
        SearchPath::new(&OsString::from("/does/not/exist:"), vec![])
    }

    /// LIBRARY-1
    #[test]
    fn a_missing_library_is_named_with_the_places_looked_at() {
        let folder = tempfile::tempdir().expect("a folder");
        let lib = folder.path().join("nccl/lib");
        std::fs::create_dir_all(&lib).expect("a folder");
        std::fs::write(lib.join("libnccl.so.2"), "no library").expect("a file");
        let search = SearchPath::new(&folder.path().into(), vec![]);
        match Library::open(LibraryKind::Nccl, &search) {
            // The machine has NCCL where its loader finds it.
            Ok(library) => assert!(library.path().parent() == Some(Path::new("")), "{library:?}"),
            Err(error) => {
                let text = error.to_string();
                for part in [
                    "NCCL",
                    "libnccl.so.2, libnccl.so",
                    PATH_VARIABLE,
                    &lib.display().to_string(),
                    "cannot be opened",
                    "install",
                ] {
                    assert!(text.contains(part), "{part} is not in: {text}");
                }
            }
        }
    }

    #[test]
    fn folders_of_wheels_and_toolkits_are_searched_below_the_named_one() {
        let folder = tempfile::tempdir().expect("a folder");
        for inner in ["cu13/lib", "nccl/lib", "lib64", "nccl/include"] {
            std::fs::create_dir_all(folder.path().join(inner)).expect("a folder");
        }
        let search = SearchPath::new(&folder.path().into(), vec![]);
        let below: Vec<&Path> = search
            .named
            .iter()
            .filter_map(|place| place.strip_prefix(folder.path()).ok())
            .collect();
        let expected = ["", "lib64", "cu13/lib", "nccl/lib"].map(Path::new);
        assert_eq!(below, expected);
        assert!(nowhere().named.is_empty());
    }

    /// LIBRARY-1
    #[test]
    fn a_library_without_a_function_is_refused() {
        // Any library that every Linux has stands for one of another version.
        let path = PathBuf::from("libc.so.6");
        let Ok(open) = load(&path) else {
            return;
        };
        let library = Library {
            kind: LibraryKind::Driver,
            path,
            open: Arc::new(std::mem::ManuallyDrop::new(open)),
        };
        #[allow(unsafe_code)]
        // SAFETY: the function does not exist, so nothing is called.
        let error = unsafe { library.function::<unsafe extern "C" fn() -> i32>("cuNoSuchFunction") }
            .expect_err("no such function");
        assert!(
            error
                .to_string()
                .contains("libc.so.6 has no function cuNoSuchFunction"),
            "{error}"
        );
    }
}
