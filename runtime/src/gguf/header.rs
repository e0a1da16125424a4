//! The header of one GGUF file: metadata and places of the tensors.
//!
//! Layout (`docs/gguf.md` of ggml): magic, version, number of tensors, number of metadata entries; the entries; per
//! tensor its name, dimensions (innermost first), type and offset; then, from the next multiple of the alignment on, the
//! data.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use super::GgufError;
use super::tensor_type::TensorType;
use super::value::{Array, Value, ValueType, scalar};
use crate::weights::{MappedFile, TensorView};

const MAGIC: &[u8] = b"GGUF";
/// Alignment of the data where the metadata do not say.
const DEFAULT_ALIGNMENT: usize = 32;
/// Most dimensions of a tensor of ggml.
const MAX_DIMENSIONS: u32 = 4;

/// A mapped file whose header was checked: all values and tensors lie inside it, tensors do not overlap.
#[derive(Debug)]
pub(super) struct Header {
    /// The file.
    pub(super) file: Arc<MappedFile>,
    /// All metadata.
    pub(super) metadata: BTreeMap<String, Value>,
    /// The tensors in the file's order, shapes outermost first.
    pub(super) tensors: Vec<TensorView>,
}

/// What the file says about a tensor.
struct TensorInfo {
    name: String,
    shape: Vec<usize>,
    tensor_type: TensorType,
    offset: u64,
}

impl Header {
    /// Maps a file and reads its header.
    pub(super) fn open(path: &Path) -> Result<Self, GgufError> {
        let file = MappedFile::open(path).map_err(|source| GgufError::Read {
            file: path.to_owned(),
            source,
        })?;
        let file = Arc::new(file);
        let mut reader = Reader {
            path,
            bytes: file.bytes(),
            at: 0,
        };
        let (tensor_count, entry_count) = reader.preamble()?;
        let mut metadata = BTreeMap::new();
        for index in 0..entry_count {
            let key = reader.text(|| format!("the key of metadata entry {index}"))?;
            let key = reader
                .text_at(key, || format!("the key of metadata entry {index}"))?
                .to_owned();
            let value = reader.value(&key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(reader.damaged(format!("metadata key `{key}`"), "is there twice"));
            }
        }
        let mut infos = Vec::new();
        for index in 0..tensor_count {
            infos.push(reader.tensor_info(index)?);
        }
        let alignment = reader.alignment(&metadata)?;
        let tensors = reader.place(&file, infos, alignment)?;
        Ok(Self {
            tensors,
            metadata,
            file,
        })
    }
}

/// Reads a file from front to back and never past its end.
struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn damaged(&self, place: impl Into<String>, reason: impl Into<String>) -> GgufError {
        GgufError::Damaged {
            file: self.path.to_owned(),
            place: place.into(),
            reason: reason.into(),
        }
    }

    fn foreign(&self, reason: impl Into<String>) -> GgufError {
        GgufError::Foreign {
            file: self.path.to_owned(),
            reason: reason.into(),
        }
    }

    /// The next `len` bytes; a length that a file claims is compared with what is there before anything is done with it.
    fn take(&mut self, len: u64, place: impl Fn() -> String) -> Result<Range<usize>, GgufError> {
        let end = usize::try_from(len)
            .ok()
            .and_then(|len| self.at.checked_add(len))
            .filter(|&end| end <= self.bytes.len())
            .ok_or_else(|| GgufError::Truncated {
                file: self.path.to_owned(),
                place: place(),
            })?;
        let range = self.at..end;
        self.at = end;
        Ok(range)
    }

    fn fixed<const N: usize>(&mut self, place: impl Fn() -> String) -> Result<[u8; N], GgufError> {
        let range = self.take(N as u64, place)?;
        let mut fixed = [0; N];
        fixed.copy_from_slice(&self.bytes[range]);
        Ok(fixed)
    }

    fn u32(&mut self, place: impl Fn() -> String) -> Result<u32, GgufError> {
        self.fixed(place).map(u32::from_le_bytes)
    }

    fn u64(&mut self, place: impl Fn() -> String) -> Result<u64, GgufError> {
        self.fixed(place).map(u64::from_le_bytes)
    }

    /// Magic and version; returns the numbers of tensors and of metadata entries.
    fn preamble(&mut self) -> Result<(u64, u64), GgufError> {
        let magic = self.bytes.get(..MAGIC.len()).unwrap_or(self.bytes);
        if magic != MAGIC {
            if MAGIC.starts_with(magic) {
                return Err(GgufError::Truncated {
                    file: self.path.to_owned(),
                    place: "its magic".to_owned(),
                });
            }
            return Err(self.foreign("it does not begin with GGUF"));
        }
        self.at = MAGIC.len();
        match self.u32(|| "its version".to_owned())? {
            2 | 3 => {}
            version if version.swap_bytes() == 3 => {
                return Err(self.foreign("it is big-endian, for other processors"));
            }
            version => return Err(self.foreign(format!("it has version {version}"))),
        }
        let tensors = self.u64(|| "its number of tensors".to_owned())?;
        let entries = self.u64(|| "its number of metadata entries".to_owned())?;
        Ok((tensors, entries))
    }

    /// Where the next text is.
    fn text(&mut self, place: impl Fn() -> String) -> Result<Range<usize>, GgufError> {
        let len = self.u64(&place)?;
        self.take(len, place)
    }

    fn text_at(&self, range: Range<usize>, place: impl Fn() -> String) -> Result<&'a str, GgufError> {
        std::str::from_utf8(&self.bytes[range]).map_err(|_| self.damaged(place(), "is no UTF-8"))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, GgufError> {
        let place = || format!("the type of metadata key `{key}`");
        let number = self.u32(place)?;
        ValueType::of(number).ok_or_else(|| self.damaged(place(), format!("is {number}, which is none")))
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let place = || format!("the value of metadata key `{key}`");
        match self.value_type(key)? {
            ValueType::Text => Ok(Value::Text(self.text(place)?)),
            ValueType::Array => self.array(key).map(Value::Array),
            value_type => {
                let bytes = value_type.bytes().unwrap_or_default() as u64;
                let range = self.take(bytes, place)?;
                scalar(value_type, &self.bytes[range])
                    .ok_or_else(|| self.damaged(place(), "is neither true nor false"))
            }
        }
    }

    fn array(&mut self, key: &str) -> Result<Array, GgufError> {
        let place = || format!("the array of metadata key `{key}`");
        let element = self.value_type(key)?;
        let count = self.u64(place)?;
        let start = self.at;
        match element.bytes() {
            Some(bytes) => {
                // A product that overflows is longer than any file.
                self.take(count.saturating_mul(bytes as u64), place)?;
            }
            None if element == ValueType::Text => {
                for _ in 0..count {
                    self.text(place)?;
                }
            }
            None => return Err(self.damaged(place(), "has arrays as elements")),
        }
        // Every element takes at least a byte, so the count fits.
        let count = usize::try_from(count).map_err(|_| self.damaged(place(), "has too many elements"))?;
        Ok(Array {
            element,
            count,
            range: start..self.at,
        })
    }

    fn tensor_info(&mut self, index: u64) -> Result<TensorInfo, GgufError> {
        let place = || format!("the description of tensor {index}");
        let name = self.text(place)?;
        let name = self.text_at(name, place)?.to_owned();
        let place = || format!("the description of tensor `{name}`");
        let dimensions = self.u32(place)?;
        if dimensions > MAX_DIMENSIONS {
            return Err(self.damaged(place(), format!("has {dimensions} dimensions")));
        }
        let mut shape = Vec::new();
        for _ in 0..dimensions {
            let dimension = self.u64(place)?;
            let dimension = usize::try_from(dimension).ok().filter(|&dimension| dimension > 0);
            shape.push(dimension.ok_or_else(|| self.damaged(place(), "has an impossible dimension"))?);
        }
        shape.reverse();
        let number = self.u32(place)?;
        let tensor_type = TensorType::of(number)
            .ok_or_else(|| self.damaged(place(), format!("has type {number}, which is unknown")))?;
        let offset = self.u64(place)?;
        Ok(TensorInfo {
            shape,
            tensor_type,
            offset,
            name,
        })
    }

    fn alignment(&self, metadata: &BTreeMap<String, Value>) -> Result<usize, GgufError> {
        const KEY: &str = "general.alignment";
        match metadata.get(KEY) {
            None => Ok(DEFAULT_ALIGNMENT),
            Some(&Value::Whole(alignment)) => u32::try_from(alignment)
                .ok()
                .filter(|alignment| alignment.is_power_of_two())
                .map(|alignment| alignment as usize)
                .ok_or_else(|| {
                    self.damaged(
                        format!("metadata key `{KEY}`"),
                        format!("is {alignment}, no power of two"),
                    )
                }),
            Some(_) => Err(self.damaged(format!("metadata key `{KEY}`"), "is no number")),
        }
    }

    /// Where the tensors are; each inside the file, aligned, and none over another.
    fn place(
        &self,
        file: &Arc<MappedFile>,
        infos: Vec<TensorInfo>,
        alignment: usize,
    ) -> Result<Vec<TensorView>, GgufError> {
        let data_start = self.at.next_multiple_of(alignment);
        let mut names = HashSet::new();
        let mut ranges = Vec::new();
        let mut views = Vec::new();
        for info in infos {
            let place = format!("tensor `{}`", info.name);
            if !names.insert(info.name.clone()) {
                return Err(self.damaged(place, "is there twice"));
            }
            let TensorType { elements, bytes, .. } = info.tensor_type;
            if !info.shape.last().unwrap_or(&1).is_multiple_of(elements) {
                let reason =
                    format!("has rows that are no multiple of the {elements} elements of its type's blocks");
                return Err(self.damaged(place, reason));
            }
            if !info.offset.is_multiple_of(alignment as u64) {
                return Err(self.damaged(place, format!("is not aligned to {alignment} bytes")));
            }
            let range = info
                .shape
                .iter()
                .try_fold(1usize, |count, &dimension| count.checked_mul(dimension))
                .and_then(|count| (count / elements).checked_mul(bytes))
                .and_then(|len| {
                    let start = data_start.checked_add(usize::try_from(info.offset).ok()?)?;
                    Some(start..start.checked_add(len)?)
                })
                .filter(|range| range.end <= self.bytes.len())
                .ok_or_else(|| GgufError::Truncated {
                    file: self.path.to_owned(),
                    place: place.clone(),
                })?;
            ranges.push((range.start, range.end, views.len()));
            views.push(TensorView::new(
                Arc::clone(file),
                info.name,
                info.tensor_type.encoding,
                info.shape,
                range,
            ));
        }
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            let ((_, end, one), (start, _, other)) = (pair[0], pair[1]);
            if end > start {
                let reason = format!("overlaps tensor `{}`", views[other].name());
                return Err(self.damaged(format!("tensor `{}`", views[one].name()), reason));
            }
        }
        Ok(views)
    }
}
