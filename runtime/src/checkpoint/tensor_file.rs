//! Writing and reading one safetensors file, piece by piece.
//!
//! The `safetensors` crate owns the format (header, order, checks). The bytes are streamed here instead of through its own
//! writer and reader because a training state is as large as memory allows: nothing is held twice, floats are rounded
//! while they are written, files get ordinary permissions (its writer makes them readable by their owner alone), and
//! errors name the file and the tensor.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::CheckpointError;

// Values are copied between memory and the file as they are; the format is little-endian.
const _: () = assert!(
    cfg!(target_endian = "little"),
    "checkpoints are written on little-endian machines only"
);

/// Bytes of the header's length at the start of a file.
const LENGTH_BYTES: usize = 8;
/// A longer header is refused, as the `safetensors` crate does.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Floats rounded at a time.
const ROUNDED_AT_A_TIME: usize = 64 * 1024;

/// Values of a tensor on their way into a file.
#[derive(Clone, Copy)]
pub(super) enum Values<'a> {
    /// Written as they are.
    F32(&'a [f32]),
    /// Written as bf16, rounded to nearest, ties to even; values that do not stay finite are refused.
    RoundedToBf16(&'a [f32]),
    /// 64-bit integers.
    I64(&'a [i64]),
    /// One byte each, 0 or 1.
    Bool(&'a [bool]),
}

impl Values<'_> {
    fn dtype(self) -> Dtype {
        match self {
            Self::F32(_) => Dtype::F32,
            Self::RoundedToBf16(_) => Dtype::BF16,
            Self::I64(_) => Dtype::I64,
            Self::Bool(_) => Dtype::BOOL,
        }
    }

    fn len(self) -> usize {
        match self {
            Self::F32(values) | Self::RoundedToBf16(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::Bool(values) => values.len(),
        }
    }

    fn bytes(self) -> usize {
        self.len() * self.dtype().bitsize() / 8
    }
}

/// A tensor on its way into a file.
pub(super) struct Entry<'a> {
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    pub(super) values: Values<'a>,
}

/// Writes and syncs a file. `metadata` is one pair, because the crate writes more than one in random order.
///
/// # Errors
/// The file cannot be written; a float does not stay finite; shapes and values disagree.
pub(super) fn write(
    path: &Path,
    mut entries: Vec<Entry<'_>>,
    metadata: (&str, &str),
) -> Result<(), CheckpointError> {
    // The order of the `safetensors` crate, so that files of the same content have the same bytes.
    entries.sort_by(|a, b| {
        b.values
            .dtype()
            .cmp(&a.values.dtype())
            .then_with(|| a.name.cmp(&b.name))
    });
    let mut start = 0;
    let mut infos = Vec::with_capacity(entries.len());
    for entry in &entries {
        if entry.shape.iter().product::<usize>() != entry.values.len() {
            let problem = format!(
                "has {} values where its shape {:?} asks for others",
                entry.values.len(),
                entry.shape
            );
            return Err(CheckpointError::tensor(path, &entry.name, problem));
        }
        let end = start + entry.values.bytes();
        let info = TensorInfo {
            dtype: entry.values.dtype(),
            shape: entry.shape.clone(),
            data_offsets: (start, end),
        };
        infos.push((entry.name.clone(), info));
        start = end;
    }
    let pair = HashMap::from([(metadata.0.to_owned(), metadata.1.to_owned())]);
    let invalid = |problem: String| CheckpointError::write(path, io::Error::other(problem));
    let header = Metadata::new(Some(pair), infos).map_err(|error| invalid(error.to_string()))?;
    let mut header = serde_json::to_vec(&header).map_err(|error| invalid(error.to_string()))?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');

    let failed = |cause| CheckpointError::write(path, cause);
    let file = File::create(path).map_err(failed)?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    out.write_all(&(header.len() as u64).to_le_bytes())
        .map_err(failed)?;
    out.write_all(&header).map_err(failed)?;
    for entry in &entries {
        match entry.values {
            Values::F32(values) => out.write_all(bytemuck::cast_slice(values)).map_err(failed)?,
            Values::I64(values) => out.write_all(bytemuck::cast_slice(values)).map_err(failed)?,
            Values::Bool(values) => out.write_all(bytemuck::cast_slice(values)).map_err(failed)?,
            Values::RoundedToBf16(values) => write_rounded(&mut out, values, path, &entry.name)?,
        }
    }
    let file = out.into_inner().map_err(|error| failed(error.into_error()))?;
    file.sync_all().map_err(failed)
}

fn write_rounded(
    out: &mut impl Write,
    values: &[f32],
    path: &Path,
    name: &str,
) -> Result<(), CheckpointError> {
    let mut rounded = vec![bf16::ZERO; ROUNDED_AT_A_TIME.min(values.len())];
    for (index, block) in values.chunks(ROUNDED_AT_A_TIME).enumerate() {
        let rounded = &mut rounded[..block.len()];
        rounded.convert_from_f32_slice(block);
        if let Some(offset) = rounded.iter().position(|value| !value.is_finite()) {
            let (value, place) = (block[offset], index * ROUNDED_AT_A_TIME + offset);
            let problem = format!(
                "holds {value:e} at index {place}: training diverged; resume from an earlier checkpoint"
            );
            return Err(CheckpointError::tensor(path, name, problem));
        }
        out.write_all(bytemuck::cast_slice(rounded))
            .map_err(|cause| CheckpointError::write(path, cause))?;
    }
    Ok(())
}

/// An open file whose header has been checked against its length.
#[derive(Debug)]
pub(super) struct TensorFile {
    path: PathBuf,
    file: File,
    data_start: u64,
    header: Metadata,
}

impl TensorFile {
    /// Opens a file and checks that it is as long as its header says, to the byte.
    ///
    /// # Errors
    /// The file cannot be read, is cut short, has something appended, or is no safetensors file.
    pub(super) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let failed = |cause| CheckpointError::read(path, cause);
        let damaged = |problem: String| CheckpointError::damaged(path, problem);
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut prefix = [0; LENGTH_BYTES];
        if length < LENGTH_BYTES as u64 {
            return Err(damaged(format!(
                "it ends after {length} bytes, inside the length of its header"
            )));
        }
        file.read_exact_at(&mut prefix, 0).map_err(failed)?;
        let header_bytes = u64::from_le_bytes(prefix);
        if header_bytes > MAX_HEADER_BYTES {
            return Err(damaged(format!(
                "its first bytes promise a header of {header_bytes} bytes"
            )));
        }
        let data_start = LENGTH_BYTES as u64 + header_bytes;
        if data_start > length {
            return Err(damaged(format!(
                "it ends after {length} bytes, inside its header of {header_bytes} bytes"
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        file.read_exact_at(&mut header, LENGTH_BYTES as u64)
            .map_err(failed)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|error| damaged(format!("its header is not readable: {error}")))?;
        let promised = data_start + header.data_len() as u64;
        if promised != length {
            return Err(damaged(format!(
                "it has {length} bytes where its header promises {promised}"
            )));
        }
        Ok(Self {
            path: path.into(),
            file,
            data_start,
            header,
        })
    }

    /// Names of the tensors, in the order of the file.
    pub(super) fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// A value of the free-form metadata.
    pub(super) fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Whether there is such a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        self.header.info(name).is_some()
    }

    /// Length of a tensor of one dimension.
    pub(super) fn length(&self, name: &str) -> Result<usize, CheckpointError> {
        match self.header.info(name).map(|info| info.shape.as_slice()) {
            Some(&[length]) => Ok(length),
            Some(shape) => {
                let problem = format!("has shape {shape:?} where one dimension is needed");
                Err(CheckpointError::tensor(&self.path, name, problem))
            }
            None => Err(CheckpointError::tensor(&self.path, name, "is missing")),
        }
    }

    /// A tensor of floats, f32, bf16 or f16 in the file, of exactly this shape.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let info = self.info(name, shape)?;
        let count = shape.iter().product();
        let mut values = vec![0.0f32; count];
        match info.dtype {
            Dtype::F32 => self.fill(info, bytemuck::cast_slice_mut(&mut values))?,
            Dtype::BF16 => {
                let mut halves = vec![bf16::ZERO; count];
                self.fill(info, bytemuck::cast_slice_mut(&mut halves))?;
                halves.convert_to_f32_slice(&mut values);
            }
            Dtype::F16 => {
                let mut halves = vec![f16::ZERO; count];
                self.fill(info, bytemuck::cast_slice_mut(&mut halves))?;
                halves.convert_to_f32_slice(&mut values);
            }
            other => return Err(self.wrong_dtype(name, other, "BF16, F16 or F32")),
        }
        Ok(values)
    }

    /// A tensor of 64-bit integers of exactly this shape.
    pub(super) fn integers(&self, name: &str, shape: &[usize]) -> Result<Vec<i64>, CheckpointError> {
        let info = self.info(name, shape)?;
        if info.dtype != Dtype::I64 {
            return Err(self.wrong_dtype(name, info.dtype, "I64"));
        }
        let mut values = vec![0i64; shape.iter().product()];
        self.fill(info, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }

    /// A tensor of booleans of exactly this shape.
    pub(super) fn booleans(&self, name: &str, shape: &[usize]) -> Result<Vec<bool>, CheckpointError> {
        let info = self.info(name, shape)?;
        if info.dtype != Dtype::BOOL {
            return Err(self.wrong_dtype(name, info.dtype, "BOOL"));
        }
        let mut bytes = vec![0u8; shape.iter().product()];
        self.fill(info, &mut bytes)?;
        match bytes.iter().position(|&byte| byte > 1) {
            None => Ok(bytes.into_iter().map(|byte| byte == 1).collect()),
            Some(index) => {
                let problem = format!(
                    "of booleans holds {} at index {index}: only 0 and 1 are allowed",
                    bytes[index]
                );
                Err(CheckpointError::tensor(&self.path, name, problem))
            }
        }
    }

    fn info(&self, name: &str, shape: &[usize]) -> Result<&TensorInfo, CheckpointError> {
        let Some(info) = self.header.info(name) else {
            return Err(CheckpointError::tensor(&self.path, name, "is missing"));
        };
        if info.shape != shape {
            let problem = format!("has shape {:?} where {shape:?} is needed", info.shape);
            return Err(CheckpointError::tensor(&self.path, name, problem));
        }
        Ok(info)
    }

    fn wrong_dtype(&self, name: &str, dtype: Dtype, needed: &str) -> CheckpointError {
        CheckpointError::tensor(&self.path, name, format!("is {dtype:?} where {needed} is needed"))
    }

    /// Reads a tensor's bytes; `into` has the length of its shape and dtype, which the header's check ties to its offsets.
    fn fill(&self, info: &TensorInfo, into: &mut [u8]) -> Result<(), CheckpointError> {
        let start = self.data_start + info.data_offsets.0 as u64;
        self.file
            .read_exact_at(into, start)
            .map_err(|cause| CheckpointError::read(&self.path, cause))
    }
}
