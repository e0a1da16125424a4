//! Weight matrices in whatever form they are stored.

use std::fmt;
use std::ops::Range;

use super::Matrix;

/// A read-only matrix that may be packed.
pub trait StoredMatrix: Send + Sync + fmt::Debug {
    /// Number of rows: outputs of a product.
    fn rows(&self) -> usize;

    /// Number of columns: inputs of a product.
    fn cols(&self) -> usize;

    /// The matrix where it lies, if it is stored as aligned f32.
    fn in_place(&self) -> Option<Matrix<'_>>;

    /// Writes some rows, `out` `[rows, cols]`. Each element has one value, however many rows are asked for together.
    fn unpack(&self, rows: Range<usize>, out: &mut [f32]);
}
