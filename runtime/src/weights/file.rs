//! One safetensors file in memory.
//!
//! The only place of this crate that maps files.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;
use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, SafeTensorError};

use super::{TensorView, WeightsError};

/// Bytes of the length that precedes a header.
const LENGTH_BYTES: usize = 8;

/// A mapped safetensors file and its parsed header.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// Where the data begin, in bytes from the file's start.
    data_start: usize,
}

impl MappedFile {
    /// Maps a file and checks its header: all tensors lie inside the file, without holes, sized by shape and dtype.
    pub(super) fn open(path: &Path) -> Result<Self, WeightsError> {
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
        let (header_bytes, header) =
            SafeTensors::read_metadata(&map).map_err(|error| header_error(path, &map, &error))?;
        Ok(Self {
            path: path.to_owned(),
            map,
            header,
            data_start: LENGTH_BYTES + header_bytes,
        })
    }

    /// Path of the file.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the whole file.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// All tensors with their names, in no particular order.
    pub(super) fn tensors(self: &Arc<Self>) -> impl Iterator<Item = (String, TensorView)> {
        self.header.tensors().into_iter().map(|(name, info)| {
            let range = self.data_start + info.data_offsets.0..self.data_start + info.data_offsets.1;
            let view = TensorView::new(
                Arc::clone(self),
                name.clone(),
                info.dtype,
                info.shape.clone(),
                range,
            );
            (name, view)
        })
    }
}

/// Tells a cut file from a foreign or damaged one.
fn header_error(path: &Path, bytes: &[u8], error: &SafeTensorError) -> WeightsError {
    let file = path.to_owned();
    let truncated = |reason| WeightsError::Truncated {
        file: path.to_owned(),
        reason,
    };
    let length = bytes
        .first_chunk::<LENGTH_BYTES>()
        .map(|bytes| u64::from_le_bytes(*bytes));
    let Some(length) = length else {
        return truncated(format!("it has {} bytes, not even a header length", bytes.len()));
    };
    match error {
        // A safetensors header starts with a brace: anything else was never one.
        SafeTensorError::InvalidHeaderLength if bytes.get(LENGTH_BYTES).is_none_or(|&byte| byte == b'{') => {
            truncated(format!(
                "its header should take {length} bytes but the file has {}",
                bytes.len()
            ))
        }
        SafeTensorError::MetadataIncompleteBuffer => {
            let data_start = LENGTH_BYTES + length as usize;
            let header = bytes.get(LENGTH_BYTES..data_start).unwrap_or_default();
            let present = bytes.len().saturating_sub(data_start);
            match serde_json::from_slice::<Metadata>(header).map(|header| header.data_len()) {
                Ok(needed) if needed > present => truncated(format!(
                    "its tensors take {needed} bytes but only {present} are there"
                )),
                _ => WeightsError::NotSafetensors {
                    file,
                    reason: "it has bytes that no tensor covers".to_owned(),
                },
            }
        }
        error => WeightsError::NotSafetensors {
            file,
            reason: error.to_string().to_lowercase(),
        },
    }
}
