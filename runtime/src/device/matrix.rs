//! Views of row-major buffers as matrices.
//!
//! A view never owns and never copies. Invariant: every element it can reach lies inside its buffer, checked once when
//! the view is made.

use super::floats::{Floats, FloatsMut};

/// A matrix to read, with any strides, over elements of kind `S`.
#[derive(Clone, Copy, Debug)]
pub struct MatrixOf<S> {
    pub(crate) data: S,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

/// A matrix to write, over elements of kind `S`; elements of a row are adjacent.
#[derive(Debug)]
pub struct MatrixMutOf<S> {
    pub(crate) data: S,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
}

/// A matrix to read, wherever it lies.
pub type Matrix<'a> = MatrixOf<Floats<'a>>;
/// A matrix to write, wherever it lies.
pub type MatrixMut<'a> = MatrixMutOf<FloatsMut<'a>>;
/// A matrix to read in the host's memory.
pub type HostMatrix<'a, T = f32> = MatrixOf<&'a [T]>;
/// A matrix to write in the host's memory.
pub type HostMatrixMut<'a> = MatrixMutOf<&'a mut [f32]>;

/// Adjacent elements that a matrix can be a view of.
pub trait Elements {
    /// How many there are.
    fn count(&self) -> usize;
}

impl<T> Elements for &[T] {
    fn count(&self) -> usize {
        self.len()
    }
}

impl<T> Elements for &mut [T] {
    fn count(&self) -> usize {
        self.len()
    }
}

impl Elements for Floats<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

impl Elements for FloatsMut<'_> {
    fn count(&self) -> usize {
        self.len()
    }
}

/// Elements of a matrix from its first to its last.
pub(crate) fn reach(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + (cols - 1) * col_stride + 1
    }
}

#[track_caller]
fn check_whole(len: usize, rows: usize, cols: usize) {
    assert_eq!(len, rows * cols, "a matrix of {rows} x {cols}");
}

#[track_caller]
fn check_strided(len: usize, rows: usize, cols: usize, row_stride: usize) {
    assert!(
        row_stride >= cols,
        "rows of {cols} overlap at stride {row_stride}"
    );
    assert!(
        len >= reach(rows, cols, row_stride, 1),
        "a matrix of {rows} x {cols} is out of reach"
    );
}

impl<S: Elements> MatrixOf<S> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If `data` is not exactly `rows · cols` long.
    #[track_caller]
    pub fn new(data: impl Into<S>, rows: usize, cols: usize) -> Self {
        let data = data.into();
        check_whole(data.count(), rows, cols);
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
            col_stride: 1,
        }
    }

    /// `[rows, cols]` whose rows lie `row_stride` apart; `data` starts at the first element.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn strided(data: impl Into<S>, rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = data.into();
        check_strided(data.count(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }
}

impl<S> MatrixOf<S> {
    /// The transpose, a view of the same elements.
    #[must_use]
    pub fn transposed(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The same shape over other elements.
    fn over<U>(self, data: impl FnOnce(S) -> U) -> MatrixOf<U> {
        MatrixOf {
            data: data(self.data),
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
            col_stride: self.col_stride,
        }
    }
}

impl<'a> Matrix<'a> {
    /// The matrix for a device that computes on the host.
    ///
    /// # Panics
    /// If it lies on a GPU.
    #[track_caller]
    pub(crate) fn host(self) -> HostMatrix<'a> {
        self.over(Floats::host)
    }
}

impl<'a> From<HostMatrix<'a>> for Matrix<'a> {
    fn from(matrix: HostMatrix<'a>) -> Self {
        matrix.over(Floats::from)
    }
}

impl<'a, T: Copy> HostMatrix<'a, T> {
    /// One row as a slice.
    ///
    /// # Panics
    /// If the row is out of range or the view is a transpose.
    #[track_caller]
    pub fn row(&self, row: usize) -> &'a [T] {
        assert!(
            row < self.rows && self.col_stride == 1,
            "row {row} of {}",
            self.rows
        );
        &self.data[row * self.row_stride..][..self.cols]
    }

    /// The sub-matrix of `cols` columns from `col` on and of `count` rows: `first`, `first + step`, …
    #[track_caller]
    pub(crate) fn part(&self, (first, step, count): (usize, usize, usize), col: usize, cols: usize) -> Self {
        let span = if count == 0 { 0 } else { (count - 1) * step + 1 };
        let block = self.block(first, span, col, cols);
        Self {
            rows: count,
            row_stride: block.row_stride * step,
            ..block
        }
    }

    /// The sub-matrix of `rows` rows and `cols` columns at (`row`, `col`).
    #[track_caller]
    pub(crate) fn block(&self, row: usize, rows: usize, col: usize, cols: usize) -> Self {
        assert!(row + rows <= self.rows && col + cols <= self.cols);
        let start = if rows == 0 || cols == 0 {
            0
        } else {
            row * self.row_stride + col * self.col_stride
        };
        Self {
            data: &self.data[start..],
            rows,
            cols,
            ..*self
        }
    }
}

impl<S: Elements> MatrixMutOf<S> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If `data` is not exactly `rows · cols` long.
    #[track_caller]
    pub fn new(data: impl Into<S>, rows: usize, cols: usize) -> Self {
        let data = data.into();
        check_whole(data.count(), rows, cols);
        Self {
            data,
            rows,
            cols,
            row_stride: cols,
        }
    }

    /// `[rows, cols]` whose rows lie `row_stride` apart; `data` starts at the first element.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn strided(data: impl Into<S>, rows: usize, cols: usize, row_stride: usize) -> Self {
        let data = data.into();
        check_strided(data.count(), rows, cols, row_stride);
        Self {
            data,
            rows,
            cols,
            row_stride,
        }
    }
}

impl<'a> MatrixMut<'a> {
    /// The matrix for a device that computes on the host.
    ///
    /// # Panics
    /// If it lies on a GPU.
    #[track_caller]
    pub(crate) fn host(self) -> HostMatrixMut<'a> {
        MatrixMutOf {
            data: self.data.host(),
            rows: self.rows,
            cols: self.cols,
            row_stride: self.row_stride,
        }
    }
}
