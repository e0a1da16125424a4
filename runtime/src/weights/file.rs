//! A file in memory.
//!
//! The only place of this crate that maps files.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

/// A mapped file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a file.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        // SAFETY: the map is read-only and private to this process. Weights are written beside and renamed in, never
        // changed in place, as the module docs demand; who truncates one under a running rank kills that rank (SIGBUS),
        // which the supervisor treats like any other death.
        let map = unsafe { Mmap::map(&file) }?;
        Ok(Self {
            path: path.to_owned(),
            map,
        })
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the whole file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}
