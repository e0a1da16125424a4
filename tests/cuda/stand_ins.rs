//! Builds the stand-ins for NVIDIA's libraries, once for all tests of a build. A module of each test that needs them.
#![allow(clippy::print_stdout, reason = "says what was skipped")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use eaglet_runtime::digest::Digest;

/// Both this package and those beside it lie one folder below the repository.
const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/cuda");

/// The folder of the stand-in libraries; none if they cannot be built here.
pub(crate) fn stand_ins() -> Option<&'static Path> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    FOLDER.get_or_init(build).as_deref()
}

/// A folder that test binaries of all kinds share: `tmp` of the target folder, two above the one of this binary.
pub(crate) fn scratch() -> PathBuf {
    let binary = std::env::current_exe().expect("this binary");
    let target = binary
        .ancestors()
        .nth(3)
        .expect("a binary is in target/PROFILE/deps");
    let folder = target.join("tmp");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

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
