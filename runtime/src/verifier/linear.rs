//! A stored weight matrix and its product.

use crate::device::{Device, Matrix, MatrixMut};
use crate::weights::{TensorView, WeightsError};

/// A weight matrix `[outputs, inputs]` without bias, used where it lies in its file: f32 as it is, bf16 widened block by
/// block. What cannot be used in place (f16, unaligned files) is widened once.
#[derive(Debug)]
pub(super) struct Linear {
    stored: TensorView,
    widened: Option<Vec<f32>>,
}

impl Linear {
    /// Takes a tensor of two dimensions and a float dtype.
    pub(super) fn new(stored: TensorView) -> Result<Self, WeightsError> {
        let in_place = stored.as_f32().is_some() || stored.as_bf16().is_some();
        let widened = if in_place {
            None
        } else {
            Some(stored.to_f32()?.into_owned())
        };
        Ok(Self { stored, widened })
    }

    /// The tensor as it is stored.
    pub(super) fn stored(&self) -> &TensorView {
        &self.stored
    }

    fn f32_matrix(&self) -> Matrix<'_> {
        let values = self.widened.as_deref().or_else(|| self.stored.as_f32());
        let values = values.expect("a matrix that is not bf16 in place was widened or is f32 in place");
        Matrix::new(values, self.stored.rows(), self.stored.row_len())
    }

    /// `y = x·wᵀ`, or `y += x·wᵀ` with `accumulate`; `x` `[rows, inputs]`, `y` `[rows, outputs]`.
    pub(super) fn apply(&self, device: &impl Device, x: Matrix<'_>, y: MatrixMut<'_>, accumulate: bool) {
        match self.stored.as_bf16() {
            Some(weights) => device.gemm_bf16(y, x, weights, accumulate),
            None => device.gemm(y, x, self.f32_matrix().transposed(), 1.0, accumulate),
        }
    }

    /// `out[i] = w[rows[i]]`; `out` `[rows, inputs]`.
    pub(super) fn gather(&self, device: &impl Device, rows: &[u32], out: MatrixMut<'_>) {
        match self.stored.as_bf16() {
            Some(weights) => device.gather_bf16(weights, rows, out),
            None => device.gather(self.f32_matrix(), rows, out),
        }
    }
}
