//! Weight matrices in whatever form they are stored.

use std::fmt;
use std::ops::Range;

use half::bf16;

use super::{Encoded, HostMatrix, Keep};
use crate::digest::Digest;

/// What weights are read for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightUse {
    /// For products, and perhaps rows of it, too.
    Products,
    /// For single rows only.
    Rows,
}

/// Shows all matrices of a model, one after the other, in the same order each time.
pub type EachMatrix<'a> = dyn FnMut(&mut dyn FnMut(&dyn StoredMatrix, WeightUse)) + 'a;

/// A read-only matrix that may be packed.
pub trait StoredMatrix: Send + Sync + fmt::Debug {
    /// Number of rows: outputs of a product.
    fn rows(&self) -> usize;

    /// Number of columns: inputs of a product.
    fn cols(&self) -> usize;

    /// The matrix where it lies, if it is stored as aligned f32.
    fn in_place(&self) -> Option<HostMatrix<'_>>;

    /// The matrix where it lies, if it is stored as aligned bf16.
    fn in_place_bf16(&self) -> Option<HostMatrix<'_, bf16>> {
        None
    }

    /// What the matrix is stored as, if that is one of the forms that devices know.
    fn encoded(&self) -> Option<Encoded<'_>> {
        None
    }

    /// A place where a device may keep the matrix: a GPU in the form that it is stored in; the AMX unit what is stored as
    /// plain floats, in the form that it multiplies fastest, which takes as much memory as the matrix in bf16.
    fn kept(&self) -> Option<&Keep> {
        None
    }

    /// A digest of everything that decides its values, without a look at them: the files that they come from, as those were
    /// when they were mapped, and the part. `None` if they come from elsewhere.
    fn identity(&self) -> Option<Digest> {
        None
    }

    /// Writes some rows, `out` `[rows, cols]`. Each element has one value, however many rows are asked for together.
    fn unpack(&self, rows: Range<usize>, out: &mut [f32]);
}
