//! One tensor of a mapped file.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use safetensors::Dtype;

use super::file::MappedFile;
use super::{Encoding, WeightsError};
use crate::device::{Plane, RowSteps};
use crate::digest::{Digest, Digester};

/// In which order a file holds the rows of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As they are counted.
    Straight,
    /// Per head of so many rows, even, the two halves interleaved: row `j` of the first half is at `2j`, of the second
    /// at `2j + 1`. So llama.cpp stores queries and keys whose rotary embedding it turns in neighbouring pairs.
    Interleaved {
        /// Rows of a head.
        head_dim: usize,
    },
}

impl RowOrder {
    /// Where the file has a row.
    pub(crate) fn stored(self, row: usize) -> usize {
        match self {
            Self::Straight => row,
            Self::Interleaved { head_dim } => {
                let (head, row, half) = (row / head_dim, row % head_dim, head_dim / 2);
                head * head_dim + row % half * 2 + row / half
            }
        }
    }
}

/// A tensor inside a mapped file, row-major. Cloning is cheap; the map lives as long as its last view.
#[derive(Clone)]
pub struct TensorView {
    file: Arc<MappedFile>,
    name: String,
    encoding: Encoding,
    shape: Vec<usize>,
    range: Range<usize>,
    order: RowOrder,
    /// Added to every element.
    offset: f32,
}

impl fmt::Debug for TensorView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.encoding, self.shape)
    }
}

impl TensorView {
    /// A tensor whose bytes, `range` of `file`, are as many as shape and encoding say.
    pub(crate) fn new(
        file: Arc<MappedFile>,
        name: String,
        encoding: Encoding,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Self {
        Self {
            file,
            name,
            encoding,
            shape,
            range,
            order: RowOrder::Straight,
            offset: 0.0,
        }
    }

    /// The same under another name.
    pub(crate) fn named(self, name: String) -> Self {
        Self { name, ..self }
    }

    /// The same whose file holds the rows in this order; heads must fill the rows.
    pub(crate) fn in_order(self, order: RowOrder) -> Self {
        if let RowOrder::Interleaved { head_dim } = order {
            assert!(
                head_dim.is_multiple_of(2) && head_dim > 0 && self.rows().is_multiple_of(head_dim),
                "{self:?} has no heads of {head_dim} rows"
            );
        }
        Self { order, ..self }
    }

    /// The same with `offset` added to every element.
    pub(crate) fn shifted(self, offset: f32) -> Self {
        Self { offset, ..self }
    }

    /// The parts of the outermost dimension, each as a tensor with one dimension less; in the file's order.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Self> {
        let bytes = self.range.len() / self.rows().max(1);
        (0..self.rows()).map(move |index| {
            let start = self.range.start + index * bytes;
            Self {
                shape: self.shape[1..].to_vec(),
                range: start..start + bytes,
                ..self.clone()
            }
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// A digest of what decides its values: the file, the bytes in it, and how they are read.
    pub(crate) fn identity(&self) -> Digest {
        let read_as = format!(
            "{} {:?} {:?} {:?}",
            self.encoding, self.shape, self.range, self.order
        );
        let mut digest = Digester::new();
        digest.part(self.file.identity().to_string().as_bytes());
        digest.part(read_as.as_bytes());
        digest.part(&self.offset.to_bits().to_le_bytes());
        digest.finish()
    }

    /// The file that holds it.
    pub fn file(&self) -> &Path {
        self.file.path()
    }

    /// How its elements are stored.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Its element type, unless it is stored in blocks.
    pub fn dtype(&self) -> Option<Dtype> {
        match self.encoding {
            Encoding::Plain(dtype) => Some(dtype),
            Encoding::Block(_) | Encoding::Other(_) => None,
        }
    }

    /// Its shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// What the file holds of it: little-endian elements or blocks. Their rows can be in another order than the tensor's.
    pub fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.range.clone()]
    }

    /// Size of the outermost dimension; 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of one row: the product of all dimensions but the outermost.
    pub fn row_len(&self) -> usize {
        self.shape.get(1..).unwrap_or_default().iter().product()
    }

    /// Itself, if it has this shape.
    ///
    /// # Errors
    /// [`WeightsError::WrongShape`].
    pub fn expect_shape(self, expected: &[usize]) -> Result<Self, WeightsError> {
        if self.shape == expected {
            return Ok(self);
        }
        Err(WeightsError::WrongShape {
            file: self.file().to_owned(),
            tensor: self.name,
            expected: expected.to_vec(),
            actual: self.shape,
        })
    }

    /// Itself, if its elements can be unpacked to f32: floats, or blocks of a known format.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedEncoding`].
    pub fn expect_unpackable(self) -> Result<Self, WeightsError> {
        self.check_unpackable()?;
        Ok(self)
    }

    fn check_unpackable(&self) -> Result<(), WeightsError> {
        if self.encoding.is_unpackable() {
            return Ok(());
        }
        Err(WeightsError::UnsupportedEncoding {
            file: self.file().to_owned(),
            tensor: self.name.clone(),
            encoding: self.encoding,
        })
    }

    /// The bytes `start..start + len` of some rows, in the tensor's order; none if its elements are not those of the file.
    pub(crate) fn plane(&self, rows: RowSteps, start_and_len: (usize, usize)) -> Option<Plane<'_>> {
        let stride = self.range.len() / self.rows().max(1);
        (self.offset == 0.0).then(|| Plane::new(self.bytes(), stride, self.order, rows, start_and_len))
    }

    /// The elements, if they are f32 and can be used where they lie.
    pub fn as_f32(&self) -> Option<&[f32]> {
        self.in_place(Dtype::F32)
    }

    /// The elements, if they are bf16 and can be used where they lie.
    pub fn as_bf16(&self) -> Option<&[bf16]> {
        self.in_place(Dtype::BF16)
    }

    /// Files are little-endian and need not be aligned, so a cast can be impossible.
    fn in_place<T: bytemuck::Pod>(&self, dtype: Dtype) -> Option<&[T]> {
        let unchanged = self.order == RowOrder::Straight && self.offset == 0.0;
        if self.dtype() != Some(dtype) || !unchanged || cfg!(target_endian = "big") {
            return None;
        }
        bytemuck::try_cast_slice(self.bytes()).ok()
    }

    /// All elements in f32: borrowed where that is how they are stored.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedEncoding`].
    pub fn to_f32(&self) -> Result<Cow<'_, [f32]>, WeightsError> {
        match self.as_f32() {
            Some(values) => Ok(Cow::Borrowed(values)),
            None => self.rows_f32(0..self.rows()).map(Cow::Owned),
        }
    }

    /// Some consecutive rows in f32, `[rows, row_len]`.
    ///
    /// # Errors
    /// [`WeightsError::RowOutOfRange`] and [`WeightsError::UnsupportedEncoding`].
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>, WeightsError> {
        self.check_unpackable()?;
        if let Some(row) = rows.clone().last() {
            self.check_row(row)?;
        }
        let mut out = vec![0.0; rows.len() * self.row_len()];
        self.unpack_rows(rows, &mut out);
        Ok(out)
    }

    /// Some rows in any order, in f32, `[ids, row_len]`; only their bytes are read.
    ///
    /// # Errors
    /// [`WeightsError::RowOutOfRange`] and [`WeightsError::UnsupportedEncoding`].
    pub fn gather_f32(&self, ids: &[u32]) -> Result<Vec<f32>, WeightsError> {
        self.check_unpackable()?;
        let mut out = vec![0.0; ids.len() * self.row_len()];
        for (out, &id) in out.chunks_exact_mut(self.row_len().max(1)).zip(ids) {
            let row = id as usize;
            self.check_row(row)?;
            self.unpack_rows(row..row + 1, out);
        }
        Ok(out)
    }

    fn check_row(&self, row: usize) -> Result<(), WeightsError> {
        if row < self.rows() {
            return Ok(());
        }
        Err(WeightsError::RowOutOfRange {
            file: self.file().to_owned(),
            tensor: self.name.clone(),
            row,
            rows: self.rows(),
        })
    }

    /// Unpacks some consecutive rows to f32; `out` `[rows, row_len]`.
    ///
    /// Rows come in the order of Hugging Face's files, whatever the order in this file.
    ///
    /// # Panics
    /// If the tensor did not pass [`Self::expect_unpackable`], has no such rows, or `out` has another length.
    pub fn unpack_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        let len = self.row_len();
        assert!(
            rows.end <= self.rows() && out.len() == rows.len() * len,
            "rows {rows:?} of {self:?} into {} values",
            out.len()
        );
        match self.order {
            RowOrder::Straight => self.unpack(rows.start * len, out),
            RowOrder::Interleaved { .. } => {
                for (row, out) in rows.zip(out.chunks_exact_mut(len.max(1))) {
                    self.unpack(self.order.stored(row) * len, out);
                }
            }
        }
        if self.offset != 0.0 {
            out.iter_mut().for_each(|value| *value += self.offset);
        }
    }

    /// Unpacks the stored elements from `start` on until `out` is full.
    fn unpack(&self, start: usize, out: &mut [f32]) {
        match self.encoding {
            Encoding::Plain(Dtype::F32) => widen(self.bytes(), start, out, f32::from_le_bytes),
            Encoding::Plain(Dtype::BF16) => widen(self.bytes(), start, out, |bytes| {
                bf16::from_le_bytes(bytes).to_f32()
            }),
            Encoding::Plain(Dtype::F16) => self.unpack_f16(start, out),
            Encoding::Block(format) => format.unpack(self.bytes(), start, out),
            encoding => panic!("`{}` is stored as {encoding}, which was to be checked", self.name),
        }
    }

    /// Half precision is converted by the processor, several at a time, if it can and the elements are aligned.
    fn unpack_f16(&self, start: usize, out: &mut [f32]) {
        let bytes = &self.bytes()[start * 2..][..out.len() * 2];
        match bytemuck::try_cast_slice::<u8, f16>(bytes) {
            Ok(values) if cfg!(target_endian = "little") => values.convert_to_f32_slice(out),
            _ => widen(bytes, 0, out, |bytes| f16::from_le_bytes(bytes).to_f32()),
        }
    }
}

/// Widens elements of `N` bytes, from element `start` on.
fn widen<const N: usize>(bytes: &[u8], start: usize, out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, &element) in out.iter_mut().zip(&elements[start..]) {
        *out = to_f32(element);
    }
}
