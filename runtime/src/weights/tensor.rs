//! One tensor of a mapped file.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use half::{bf16, f16};
use safetensors::Dtype;

use super::WeightsError;
use super::file::MappedFile;

/// A tensor inside a mapped file, row-major. Cloning is cheap; the map lives as long as its last view.
#[derive(Clone)]
pub struct TensorView {
    file: Arc<MappedFile>,
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

impl fmt::Debug for TensorView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {:?}", self.name, self.dtype, self.shape)
    }
}

impl TensorView {
    pub(super) fn new(
        file: Arc<MappedFile>,
        name: String,
        dtype: Dtype,
        shape: Vec<usize>,
        range: Range<usize>,
    ) -> Self {
        Self {
            file,
            name,
            dtype,
            shape,
            range,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file that holds it.
    pub fn file(&self) -> &Path {
        self.file.path()
    }

    /// Its element type as stored.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its little-endian elements.
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

    /// Itself, if its elements are floats that can be widened to f32.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedDtype`].
    pub fn expect_float(self) -> Result<Self, WeightsError> {
        match self.dtype {
            Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(self),
            dtype => Err(WeightsError::UnsupportedDtype {
                file: self.file().to_owned(),
                tensor: self.name,
                dtype,
            }),
        }
    }

    /// The stored elements, if they are f32 and can be used where they lie.
    pub fn as_f32(&self) -> Option<&[f32]> {
        self.in_place(Dtype::F32)
    }

    /// The stored elements, if they are bf16 and can be used where they lie.
    pub fn as_bf16(&self) -> Option<&[bf16]> {
        self.in_place(Dtype::BF16)
    }

    /// Files are little-endian and need not be aligned, so a cast can be impossible.
    fn in_place<T: bytemuck::Pod>(&self, dtype: Dtype) -> Option<&[T]> {
        if self.dtype != dtype || cfg!(target_endian = "big") {
            return None;
        }
        bytemuck::try_cast_slice(self.bytes()).ok()
    }

    /// All elements in f32: borrowed where that is how they are stored.
    ///
    /// # Errors
    /// [`WeightsError::UnsupportedDtype`].
    pub fn to_f32(&self) -> Result<Cow<'_, [f32]>, WeightsError> {
        match self.as_f32() {
            Some(values) => Ok(Cow::Borrowed(values)),
            None => self.rows_f32(0..self.rows()).map(Cow::Owned),
        }
    }

    /// Some consecutive rows in f32, `[rows, row_len]`.
    ///
    /// # Errors
    /// [`WeightsError::RowOutOfRange`] and [`WeightsError::UnsupportedDtype`].
    pub fn rows_f32(&self, rows: Range<usize>) -> Result<Vec<f32>, WeightsError> {
        if let Some(row) = rows.clone().last() {
            self.check_row(row)?;
        }
        let mut out = vec![0.0; rows.len() * self.row_len()];
        self.decode(rows.start, &mut out)?;
        Ok(out)
    }

    /// Some rows in any order, in f32, `[ids, row_len]`; only their bytes are read.
    ///
    /// # Errors
    /// [`WeightsError::RowOutOfRange`] and [`WeightsError::UnsupportedDtype`].
    pub fn gather_f32(&self, ids: &[u32]) -> Result<Vec<f32>, WeightsError> {
        let mut out = vec![0.0; ids.len() * self.row_len()];
        for (out, &id) in out.chunks_exact_mut(self.row_len().max(1)).zip(ids) {
            self.check_row(id as usize)?;
            self.decode(id as usize, out)?;
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

    /// Widens the elements from the start of `row` on until `out` is full.
    fn decode(&self, row: usize, out: &mut [f32]) -> Result<(), WeightsError> {
        let start = row * self.row_len();
        match self.dtype {
            Dtype::F32 => widen(self.bytes(), start, out, f32::from_le_bytes),
            Dtype::BF16 => widen(self.bytes(), start, out, |bytes| {
                bf16::from_le_bytes(bytes).to_f32()
            }),
            Dtype::F16 => widen(self.bytes(), start, out, |bytes| {
                f16::from_le_bytes(bytes).to_f32()
            }),
            dtype => {
                return Err(WeightsError::UnsupportedDtype {
                    file: self.file().to_owned(),
                    tensor: self.name.clone(),
                    dtype,
                });
            }
        }
        Ok(())
    }
}

/// Widens elements of `N` bytes, from element `start` on.
fn widen<const N: usize>(bytes: &[u8], start: usize, out: &mut [f32], to_f32: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, &element) in out.iter_mut().zip(&elements[start..]) {
        *out = to_f32(element);
    }
}
