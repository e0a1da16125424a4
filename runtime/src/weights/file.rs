//! A file in memory.
//!
//! The only place of this crate that maps files.
#![allow(unsafe_code)]

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::digest::{Digest, Digester};

/// A mapped file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
    /// As the file was when it was mapped.
    metadata: Metadata,
}

impl MappedFile {
    /// Maps a file.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        Self::of(&File::open(path)?, path)
    }

    /// Maps an open file; `path` is where it was opened.
    pub(crate) fn of(file: &File, path: &Path) -> io::Result<Self> {
        let metadata = file.metadata()?;
        // SAFETY: the map is read-only and private to this process. Weights are written beside and renamed in, never
        // changed in place, as the module docs demand; who truncates one under a running rank kills that rank (SIGBUS),
        // which the supervisor treats like any other death.
        let map = unsafe { Mmap::map(file) }?;
        Ok(Self {
            path: path.to_owned(),
            map,
            metadata,
        })
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What tells it from every other file, and from itself after a change: its name, number, size and times.
    pub(crate) fn identity(&self) -> Digest {
        let name = self.path.file_name().unwrap_or_default();
        let of = &self.metadata;
        let facts = [
            of.ino(),
            of.size(),
            of.mtime() as u64,
            of.mtime_nsec() as u64,
            of.ctime() as u64,
            of.ctime_nsec() as u64,
        ];
        let mut digest = Digester::new();
        digest.part(name.as_encoded_bytes());
        digest.part(bytemuck::cast_slice(&facts));
        digest.finish()
    }

    /// Bytes of the whole file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}
