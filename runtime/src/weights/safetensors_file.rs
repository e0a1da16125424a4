//! The header of one safetensors file.

use std::path::Path;
use std::sync::Arc;

use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, SafeTensorError};

use super::file::MappedFile;
use super::{Encoding, TensorView, WeightsError};

/// Bytes of the length that precedes a header.
const LENGTH_BYTES: usize = 8;

/// Maps a file and checks its header: all tensors lie inside the file, without holes, sized by shape and dtype. Returns
/// them with their names, in no particular order.
pub(super) fn open(path: &Path) -> Result<Vec<(String, TensorView)>, WeightsError> {
    let file = MappedFile::open(path).map_err(|source| WeightsError::Read {
        file: path.to_owned(),
        source,
    })?;
    if file.bytes().is_empty() {
        return Err(WeightsError::Truncated {
            file: path.to_owned(),
            reason: "it is empty".to_owned(),
        });
    }
    let file = Arc::new(file);
    let (header_bytes, header) =
        SafeTensors::read_metadata(file.bytes()).map_err(|error| header_error(path, file.bytes(), &error))?;
    let data_start = LENGTH_BYTES + header_bytes;
    let tensors = header.tensors().into_iter().map(|(name, info)| {
        let range = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        let encoding = Encoding::Plain(info.dtype);
        let view = TensorView::new(
            Arc::clone(&file),
            name.clone(),
            encoding,
            info.shape.clone(),
            range,
        );
        (name, view)
    });
    Ok(tensors.collect())
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
