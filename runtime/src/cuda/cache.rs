//! Compiled kernels on disk, so that a rank that starts again does not compile them again.
//!
//! A file is named after its program and a digest of everything that decides the machine code: text, options,
//! architecture, compiler version. It says so inside once more, with the length and a digest of the code.
//!
//! CACHE-1: a file that is torn, or was made from something else, is refused and made again; it is never loaded.
//! CACHE-2: files are written under another name first, so a reader sees all of one or nothing. A cache that cannot be
//! written to is no error: kernels are compiled at every start then.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::driver::CudaError;
use super::nvrtc::Nvrtc;
use crate::cache_files::{self, refused};
use crate::digest::Digest;

/// The variable that names the folder of compiled kernels.
pub const CACHE_VARIABLE: &str = "EAGLET_KERNEL_CACHE";

/// First bytes of a file: name and version of its layout.
const MAGIC: &[u8; 16] = b"eaglet kernels 1";
/// Magic, digest of the key, length of the code, digest of the code.
const HEADER: usize = 16 + 32 + 8 + 32;
/// No program of ours is nearly as large.
const MAX_CODE_BYTES: u64 = 64 << 20;

/// A program to compile.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its name, for files and errors.
    pub program: &'a str,
    /// Its text.
    pub text: &'a str,
    /// Options of the compiler but the architecture.
    pub options: &'a [String],
    /// Such as `sm_90`.
    pub architecture: &'a str,
}

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub struct KernelCache {
    folder: Option<PathBuf>,
}

/// Where a program's machine code came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// It was on disk.
    Cache,
    /// It was compiled now.
    Compiler,
}

impl KernelCache {
    /// The folder in [`CACHE_VARIABLE`], or `eaglet/kernels` in the user's cache folder; none if the user has none.
    pub fn here() -> Self {
        Self {
            folder: cache_files::folder(CACHE_VARIABLE, "kernels"),
        }
    }

    /// This folder; it is made when something is written.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: Some(folder.into()),
        }
    }

    /// The machine code of a program, from disk or from the compiler.
    ///
    /// # Errors
    /// [`CudaError::Compile`].
    pub fn code(&self, nvrtc: &Nvrtc, source: &Source<'_>) -> Result<(Vec<u8>, Origin), CudaError> {
        let key = key(source, nvrtc.version());
        let file = self
            .folder
            .as_ref()
            .map(|folder| folder.join(format!("{}-{}-{key}.cubin", source.program, source.architecture)));
        if let Some(file) = &file {
            match read(file, key) {
                Ok(code) => return Ok((code, Origin::Cache)),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(file = %file.display(), %error, "compiled kernels are made again");
                }
            }
        }
        let code = nvrtc.compile(source.program, source.text, source.architecture, source.options)?;
        if let Some(file) = &file
            && let Err(error) = write(file, key, &code)
        {
            tracing::warn!(file = %file.display(), %error, "compiled kernels cannot be kept");
        }
        Ok((code, Origin::Compiler))
    }
}

/// Everything that decides the machine code; lengths keep one part from running into the next.
fn key(source: &Source<'_>, (major, minor): (u32, u32)) -> Digest {
    let mut bytes = Vec::with_capacity(source.text.len() + 256);
    let version = format!("{major}.{minor}");
    let parts = [source.program, source.text, source.architecture, &version];
    for part in parts.into_iter().chain(source.options.iter().map(String::as_str)) {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    Digest::of(&bytes)
}

fn read(file: &Path, key: Digest) -> io::Result<Vec<u8>> {
    let file = std::fs::File::open(file)?;
    let len = file.metadata()?.len();
    if len < HEADER as u64 || len > HEADER as u64 + MAX_CODE_BYTES {
        return Err(refused("the file has a length that no kernels have"));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(HEADER as u64 + MAX_CODE_BYTES)
        .read_to_end(&mut bytes)?;
    let code = bytes.get(HEADER..).unwrap_or_default();
    if bytes.get(..HEADER) != Some(header(key, code).as_slice()) {
        return Err(refused(
            "the file is torn, or was made from another text or by another compiler",
        ));
    }
    Ok(bytes.split_off(HEADER))
}

fn header(key: Digest, code: &[u8]) -> Vec<u8> {
    let mut header = Vec::with_capacity(HEADER);
    header.extend_from_slice(MAGIC);
    header.extend_from_slice(key.to_string().as_bytes());
    header.extend_from_slice(&(code.len() as u64).to_le_bytes());
    header.extend_from_slice(Digest::of(code).to_string().as_bytes());
    header
}

fn write(file: &Path, key: Digest, code: &[u8]) -> io::Result<()> {
    let written = cache_files::write_beside(file, |out| {
        out.write_all(&header(key, code))?;
        out.write_all(code)
    });
    written.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source<'a>(text: &'a str, architecture: &'a str) -> Source<'a> {
        Source {
            program: "norm",
            text,
            options: &[],
            architecture,
        }
    }

    #[test]
    fn whatever_decides_the_code_changes_the_name() {
        let base = key(&source("text", "sm_90"), (13, 2));
        let with_option = Source {
            options: &["-DA=1".to_owned()],
            ..source("text", "sm_90")
        };
        for other in [
            key(&source("texts", "sm_90"), (13, 2)),
            key(&source("text", "sm_80"), (13, 2)),
            key(&source("text", "sm_90"), (12, 2)),
            key(&with_option, (13, 2)),
        ] {
            assert_ne!(base, other);
        }
    }

    /// CACHE-1
    #[test]
    fn torn_and_foreign_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("inner/norm.cubin");
        let key = key(&source("text", "sm_90"), (13, 2));
        let code: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        write(&file, key, &code).expect("written");
        assert_eq!(read(&file, key).expect("whole"), code);
        let whole = std::fs::read(&file).expect("bytes");
        for cut in [0, 1, HEADER - 1, HEADER, HEADER + 999] {
            std::fs::write(&file, &whole[..cut]).expect("written");
            assert!(read(&file, key).is_err(), "cut to {cut} bytes");
        }
        for place in [0, 20, HEADER - 40, HEADER - 1, HEADER + 500] {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            std::fs::write(&file, &damaged).expect("written");
            assert!(read(&file, key).is_err(), "byte {place} changed");
        }
        std::fs::write(&file, [whole.as_slice(), b"x"].concat()).expect("written");
        assert!(read(&file, key).is_err(), "a byte too many");
        std::fs::write(&file, &whole).expect("written");
        let foreign = super::key(&source("another text", "sm_90"), (13, 2));
        assert!(read(&file, foreign).is_err(), "made from another text");
    }

    /// CACHE-2
    #[test]
    fn nothing_partial_is_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = key(&source("text", "sm_90"), (13, 2));
        write(&folder.path().join("norm.cubin"), key, b"code").expect("written");
        // A folder in the way of the file: it cannot be written.
        let blocked = folder.path().join("blocked.cubin");
        std::fs::create_dir(&blocked).expect("a folder");
        std::fs::write(blocked.join("inner"), "").expect("a file");
        assert!(write(&blocked, key, b"code").is_err());
        let names: Vec<String> = std::fs::read_dir(folder.path())
            .expect("listed")
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        assert!(names.iter().all(|name| !name.contains("partial")), "{names:?}");
    }
}
