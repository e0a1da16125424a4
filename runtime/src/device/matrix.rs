//! Views of row-major buffers as matrices.
//!
//! A view never owns and never copies. Invariant: every element it can reach lies inside its slice, checked once when
//! the view is made.

/// A read-only matrix with any strides.
#[derive(Clone, Copy, Debug)]
pub struct Matrix<'a, T = f32> {
    pub(crate) data: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

fn reach(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + (cols - 1) * col_stride + 1
    }
}

impl<'a, T: Copy> Matrix<'a, T> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If `data` is not exactly `rows · cols` long.
    #[track_caller]
    pub fn new(data: &'a [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} x {cols}");
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
    pub fn strided(data: &'a [T], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            row_stride >= cols,
            "rows of {cols} overlap at stride {row_stride}"
        );
        assert!(
            data.len() >= reach(rows, cols, row_stride, 1),
            "a matrix of {rows} x {cols} is out of reach"
        );
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

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

/// A writable matrix; elements of a row are adjacent.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    pub(crate) data: &'a mut [f32],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: usize,
}

impl<'a> MatrixMut<'a> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If `data` is not exactly `rows · cols` long.
    #[track_caller]
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a matrix of {rows} x {cols}");
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
    pub fn strided(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        assert!(
            row_stride >= cols,
            "rows of {cols} overlap at stride {row_stride}"
        );
        assert!(
            data.len() >= reach(rows, cols, row_stride, 1),
            "a matrix of {rows} x {cols} is out of reach"
        );
        Self {
            data,
            rows,
            cols,
            row_stride,
        }
    }
}
