//! Operands of an operation, on the device: where they lie already, or in memory that was lent for the operation.

use bytemuck::Pod;

use super::device::{Cuda, must};
use super::driver::CudaError;
use super::matrix::{MatrixView, MatrixViewMut};
use super::memory::{View, ViewMut};
use super::staging::{Lent, Staging};
use super::stream::Stream;
use crate::device::floats::{Place, PlaceMut};
use crate::device::matrix::reach;
use crate::device::{Floats, FloatsMut, Matrix, MatrixMut};

/// Floats to read.
pub(super) enum Input<'d, 'a> {
    There(View<'a, f32>),
    Sent(Lent<'d, f32>),
}

impl Input<'_, '_> {
    pub(super) fn view(&self) -> View<'_, f32> {
        match self {
            Self::There(view) => *view,
            Self::Sent(lent) => lent.view(),
        }
    }
}

/// Floats to write, or to read and write.
pub(super) enum Output<'d, 'a> {
    There(ViewMut<'a, f32>),
    /// A copy, and where it belongs.
    Lent(Lent<'d, f32>, &'a mut [f32]),
}

impl Output<'_, '_> {
    pub(super) fn view_mut(&mut self) -> ViewMut<'_, f32> {
        match self {
            Self::There(view) => view.reborrow(),
            Self::Lent(lent, _) => lent.view_mut(),
        }
    }

    /// Brings what was written to the host, if it belongs there.
    pub(super) fn settle(self, stream: &Stream) -> Result<(), CudaError> {
        match self {
            Self::There(_) => Ok(()),
            Self::Lent(lent, home) => stream.download(lent.view(), home),
        }
    }
}

/// Floats to read: sent to the device if they lie on the host.
pub(super) fn input<'d, 'a>(
    staging: &'d Staging,
    stream: &Stream,
    floats: Floats<'a>,
) -> Result<Input<'d, 'a>, CudaError> {
    match floats.0 {
        Place::Gpu(view) => Ok(Input::There(view)),
        Place::Host(floats) => {
            let mut lent = staging.lend(floats.len())?;
            stream.send(floats, lent.view_mut())?;
            Ok(Input::Sent(lent))
        }
    }
}

/// Floats to write. Those on the host are sent first if the operation leaves some of them, or adds to them.
pub(super) fn output<'d, 'a>(
    staging: &'d Staging,
    stream: &Stream,
    floats: FloatsMut<'a>,
    is_read: bool,
) -> Result<Output<'d, 'a>, CudaError> {
    match floats.0 {
        PlaceMut::Gpu(view) => Ok(Output::There(view)),
        PlaceMut::Host(floats) => {
            let mut lent = staging.lend(floats.len())?;
            if is_read {
                stream.send(floats, lent.view_mut())?;
            }
            Ok(Output::Lent(lent, floats))
        }
    }
}

/// A matrix to read, whose elements lie along rows.
pub(super) struct InputMatrix<'d, 'a> {
    pub(super) data: Input<'d, 'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

impl InputMatrix<'_, '_> {
    pub(super) fn view(&self) -> MatrixView<'_> {
        MatrixView::strided(self.data.view(), self.rows, self.cols, self.row_stride)
    }
}

/// A matrix to write, or to read and write.
pub(super) struct OutputMatrix<'d, 'a> {
    pub(super) data: Output<'d, 'a>,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

impl OutputMatrix<'_, '_> {
    pub(super) fn view_mut(&mut self) -> MatrixViewMut<'_> {
        MatrixViewMut::strided(self.data.view_mut(), self.rows, self.cols, self.row_stride)
    }

    /// `cols` columns from `first` on.
    pub(super) fn columns_mut(&mut self, first: usize, cols: usize) -> MatrixViewMut<'_> {
        let data = self.data.view_mut();
        let len = data.len();
        MatrixViewMut::strided(data.part(first..len), self.rows, cols, self.row_stride)
    }
}

impl Cuda {
    pub(super) fn room<T: Pod>(&self, len: usize) -> Lent<'_, T> {
        must(self.staging.lend(len))
    }

    pub(super) fn send<T: Pod>(&self, from: &[T]) -> Lent<'_, T> {
        let mut to = self.room(from.len());
        must(self.stream.send(from, to.view_mut()));
        to
    }

    pub(super) fn receive<T: Pod>(&self, from: &Lent<'_, T>, to: &mut [T]) {
        must(self.stream.download(from.view(), to));
    }

    /// Floats to read.
    pub(super) fn input<'a>(&self, floats: Floats<'a>) -> Input<'_, 'a> {
        must(input(&self.staging, &self.stream, floats))
    }

    /// Floats to write; some are left as they are, or added to.
    pub(super) fn target<'a>(&self, floats: FloatsMut<'a>) -> Output<'_, 'a> {
        must(output(&self.staging, &self.stream, floats, true))
    }

    /// Floats that are all written to.
    pub(super) fn output<'a>(&self, floats: FloatsMut<'a>) -> Output<'_, 'a> {
        must(output(&self.staging, &self.stream, floats, false))
    }

    pub(super) fn settle(&self, written: Output<'_, '_>) {
        must(written.settle(&self.stream));
    }

    /// A matrix as it lies; of a transpose, what it is the transpose of.
    pub(super) fn input_stored<'a>(&self, matrix: Matrix<'a>) -> (InputMatrix<'_, 'a>, bool) {
        let turned = matrix.col_stride != 1;
        assert!(
            !turned || matrix.row_stride == 1,
            "elements along one side of a matrix are adjacent"
        );
        let len = reach(matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride);
        let (rows, cols, row_stride) = match turned {
            true => (matrix.cols, matrix.rows, matrix.col_stride),
            false => (matrix.rows, matrix.cols, matrix.row_stride),
        };
        let sent = InputMatrix {
            data: self.input(matrix.data.part(0..len)),
            rows,
            cols,
            row_stride: row_stride.max(cols),
        };
        (sent, turned)
    }

    pub(super) fn input_matrix<'a>(&self, matrix: Matrix<'a>) -> InputMatrix<'_, 'a> {
        assert_eq!(matrix.col_stride, 1, "elements of a row are adjacent");
        self.input_stored(matrix).0
    }

    /// A matrix that is written to. What lies between its rows is carried along.
    pub(super) fn target_matrix<'a>(&self, matrix: MatrixMut<'a>) -> OutputMatrix<'_, 'a> {
        let len = reach(matrix.rows, matrix.cols, matrix.row_stride, 1);
        OutputMatrix {
            data: self.target(matrix.data.into_part(0..len)),
            rows: matrix.rows,
            cols: matrix.cols,
            row_stride: matrix.row_stride.max(matrix.cols),
        }
    }

    /// bf16 of a matrix, in rows without gaps.
    pub(super) fn narrow(&self, from: MatrixView<'_>, rows: usize, cols: usize) -> Lent<'_, u16> {
        let mut narrow = self.room(rows * cols);
        let to = MatrixViewMut::new(narrow.view_mut(), rows, cols);
        must(self.kernels.narrow(&self.stream, from, to));
        narrow
    }
}
