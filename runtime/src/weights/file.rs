//! A file in memory.
//!
//! The only place of this crate that maps files.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use super::WeightsError;

/// A mapped file.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a file that is not empty.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let read = |source| WeightsError::Read {
            file: path.to_owned(),
            source,
        };
        let file = File::open(path).map_err(read)?;
        if file.metadata().map_err(read)?.len() == 0 {
            return Err(WeightsError::Truncated {
                file: path.to_owned(),
                reason: "it is empty".to_owned(),
            });
        }
        // SAFETY: the map is read-only and private to this process. Weights are written beside and renamed in, never
        // changed in place, as the module docs demand; who truncates one under a running rank kills that rank (SIGBUS),
        // which the supervisor treats like any other death.
        let map = unsafe { Mmap::map(&file) }.map_err(read)?;
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
