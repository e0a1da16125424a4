//! A part of a stored weight matrix, and its product.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;

use super::residents::Residence;
use super::stored::Form;
use crate::device::{
    Buffer, Device, Encoded, FloatsMut, HostMatrix, Keep, Matrix, MatrixMut, RowSteps, StoredMatrix,
    WeightUse,
};
use crate::digest::{Digest, Digester};

/// A stored matrix of which parts can be taken.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    form: Arc<Form>,
    rows: usize,
    cols: usize,
}

impl Stored {
    /// A form of `[rows, cols]`.
    pub(super) fn new(form: Form, rows: usize, cols: usize) -> Self {
        Self {
            form: Arc::new(form),
            rows,
            cols,
        }
    }

    /// All of it.
    pub(super) fn whole(&self) -> Linear {
        self.part(0..self.rows, 0..self.cols)
    }

    /// Some consecutive rows and columns.
    pub(super) fn part(&self, rows: Range<usize>, cols: Range<usize>) -> Linear {
        assert!(
            rows.end <= self.rows && cols.end <= self.cols,
            "rows {rows:?}, columns {cols:?} of {} x {}",
            self.rows,
            self.cols
        );
        Linear {
            stored: self.clone(),
            first: rows.start,
            step: 1,
            count: rows.len(),
            cols,
            bias: None,
            kept: Keep::new(),
        }
    }

    /// Every second row of some rows, from the first or second one on.
    pub(super) fn every_second(&self, rows: Range<usize>, from: usize) -> Linear {
        let mut part = self.part(rows, 0..self.cols);
        (part.first, part.step) = (part.first + from, 2);
        part.count = (part.count - from).div_ceil(2);
        part
    }
}

/// A weight matrix `[outputs, inputs]`, used where it lies in its file or as the device keeps it, and perhaps a bias
/// `[outputs]`.
#[derive(Debug)]
pub(super) struct Linear {
    stored: Stored,
    first: usize,
    step: usize,
    count: usize,
    cols: Range<usize>,
    bias: Option<Buffer>,
    kept: Keep,
}

impl Linear {
    /// The same with a bias.
    pub(super) fn with_bias(self, bias: Option<Vec<f32>>) -> Self {
        Self {
            bias: bias.map(Buffer::from),
            ..self
        }
    }

    /// Takes bias and weights to where they are to be.
    pub(super) fn place(&mut self, to: &mut impl Residence) {
        if let Some(bias) = &mut self.bias {
            to.vector(bias);
        }
        to.matrix(self, WeightUse::Products);
    }

    /// Number of outputs.
    pub(super) fn outputs(&self) -> usize {
        self.count
    }

    /// This part of the whole stored matrix.
    fn part_of<'m, T: Copy>(&self, whole: &HostMatrix<'m, T>) -> HostMatrix<'m, T> {
        whole.part(
            (self.first, self.step, self.count),
            self.cols.start,
            self.cols.len(),
        )
    }

    /// `y = x·wᵀ + bias`, or `y += x·wᵀ + bias` with `accumulate`; `x` `[rows, inputs]`, `y` `[rows, outputs]`.
    pub(super) fn apply(&self, device: &impl Device, x: Matrix<'_>, mut y: FloatsMut<'_>, accumulate: bool) {
        let (rows, outputs) = (x.rows(), self.count);
        device.gemm_stored(MatrixMut::new(&mut y, rows, outputs), x, self, accumulate);
        if let Some(bias) = &self.bias {
            device.add_bias(MatrixMut::new(&mut y, rows, outputs), bias.floats());
        }
    }

    /// `out[i] = w[rows[i]]`; `out` `[rows, inputs]`.
    pub(super) fn gather(&self, device: &impl Device, rows: &[u32], out: MatrixMut<'_>) {
        device.gather_stored(self, rows, out);
    }
}

impl StoredMatrix for Linear {
    fn rows(&self) -> usize {
        self.count
    }

    fn cols(&self) -> usize {
        self.cols.len()
    }

    fn in_place(&self) -> Option<HostMatrix<'_>> {
        let whole = self.stored.form.in_place(self.stored.rows, self.stored.cols)?;
        Some(self.part_of(&whole))
    }

    fn in_place_bf16(&self) -> Option<HostMatrix<'_, bf16>> {
        let whole = self
            .stored
            .form
            .in_place_bf16(self.stored.rows, self.stored.cols)?;
        Some(self.part_of(&whole))
    }

    fn encoded(&self) -> Option<Encoded<'_>> {
        let rows = RowSteps {
            first: self.first,
            step: self.step,
            count: self.count,
        };
        self.stored
            .form
            .encoded(rows, self.cols.clone(), self.stored.cols)
    }

    fn kept(&self) -> Option<&Keep> {
        Some(&self.kept)
    }

    fn identity(&self) -> Option<Digest> {
        let stored = self.stored.form.identity()?;
        let part = [
            self.stored.rows,
            self.stored.cols,
            self.first,
            self.step,
            self.count,
            self.cols.start,
            self.cols.end,
        ];
        let mut digest = Digester::new();
        digest.part(stored.to_string().as_bytes());
        digest.part(bytemuck::cast_slice(&part));
        Some(digest.finish())
    }

    fn unpack(&self, rows: Range<usize>, out: &mut [f32]) {
        assert!(
            rows.end <= self.count && out.len() == rows.len() * self.cols.len(),
            "rows {rows:?} of {self:?} into {} values",
            out.len()
        );
        let first = self.first + rows.start * self.step;
        let width = self.stored.cols;
        self.stored
            .form
            .unpack((first, self.step), self.cols.clone(), width, out);
    }
}
