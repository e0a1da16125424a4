//! Root-mean-square norms.
#![allow(unsafe_code)]

use super::{Kernels, THREADS, count};
use crate::cuda::driver::CudaError;
use crate::cuda::matrix::{MatrixView, MatrixViewMut};
use crate::cuda::memory::{View, ViewMut};
use crate::cuda::module::Shape;
use crate::cuda::programs::Program;
use crate::cuda::stream::Stream;

/// Rows whose weight gradients one block sums: a fixed number, so the order of the sum depends on the rows only.
const ROWS_PER_PART: usize = 64;

impl Kernels {
    /// `y = x / rms(x) · weight` per row, and `rstd[row] = 1 / rms(x)`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn rms_norm(
        &self,
        stream: &Stream,
        x: MatrixView<'_>,
        weight: View<'_, f32>,
        epsilon: f32,
        y: MatrixViewMut<'_>,
        rstd: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        assert_eq!((x.rows, x.cols), (y.rows, y.cols), "shapes of a norm");
        assert_eq!(
            (weight.len(), rstd.len()),
            (y.cols as usize, y.rows as usize),
            "shapes of a norm"
        );
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Norm, "rms_norm"),
                Self::by_row(y.rows),
                &[
                    &x.data,
                    &x.row_stride,
                    &weight,
                    &epsilon,
                    &y.data,
                    &y.row_stride,
                    &rstd,
                    &y.cols,
                ],
            )
        }
    }

    /// Adds the input gradient of [`Kernels::rms_norm`] to `dx`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn rms_norm_backward(
        &self,
        stream: &Stream,
        x: MatrixView<'_>,
        weight: View<'_, f32>,
        rstd: View<'_, f32>,
        dy: MatrixView<'_>,
        dx: MatrixViewMut<'_>,
    ) -> Result<(), CudaError> {
        let shape = (dx.rows, dx.cols);
        assert_eq!(
            ((x.rows, x.cols), (dy.rows, dy.cols)),
            (shape, shape),
            "shapes of a norm's gradient"
        );
        assert_eq!(
            (weight.len(), rstd.len()),
            (dx.cols as usize, dx.rows as usize),
            "shapes of a norm's gradient"
        );
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Norm, "rms_norm_backward"),
                Self::by_row(dx.rows),
                &[
                    &x.data,
                    &x.row_stride,
                    &weight,
                    &rstd,
                    &dy.data,
                    &dy.row_stride,
                    &dx.data,
                    &dx.row_stride,
                    &dx.cols,
                ],
            )
        }
    }

    /// Elements of the scratch that [`Kernels::rms_norm_weight_gradient`] needs.
    pub fn norm_parts(rows: usize, cols: usize) -> usize {
        rows.div_ceil(ROWS_PER_PART) * cols
    }

    /// Adds the weight gradient of [`Kernels::rms_norm`] to `dweight`; `parts` is scratch of [`Kernels::norm_parts`].
    ///
    /// # Errors
    /// If a launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn rms_norm_weight_gradient(
        &self,
        stream: &Stream,
        x: MatrixView<'_>,
        rstd: View<'_, f32>,
        dy: MatrixView<'_>,
        parts: ViewMut<'_, f32>,
        dweight: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let (rows, cols) = (x.rows, x.cols);
        assert_eq!(
            (rows, cols, rstd.len(), dweight.len()),
            (dy.rows, dy.cols, rows as usize, cols as usize),
            "shapes of a norm's weight gradient"
        );
        let blocks = count((rows as usize).div_ceil(ROWS_PER_PART));
        assert!(
            parts.len() >= Self::norm_parts(rows as usize, cols as usize),
            "scratch of a norm's weight gradient"
        );
        let rows_per_part = count(ROWS_PER_PART);
        // SAFETY: checked above; each part is one row of the scratch.
        unsafe {
            self.launch(
                stream,
                (Program::Norm, "rms_norm_weight_parts"),
                Self::spread(blocks, cols),
                &[
                    &x.data,
                    &x.row_stride,
                    &rstd,
                    &dy.data,
                    &dy.row_stride,
                    &parts,
                    &rows,
                    &rows_per_part,
                    &cols,
                ],
            )?;
            self.launch(
                stream,
                (Program::Norm, "add_parts"),
                Shape {
                    grid: [cols.div_ceil(THREADS), 1, 1],
                    threads: THREADS,
                    shared_bytes: 0,
                },
                &[&parts, &blocks, &dweight, &cols],
            )
        }
    }
}
