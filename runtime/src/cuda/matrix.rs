//! Views of a device's memory as matrices, and lists of row numbers that were checked on the host.

use bytemuck::Pod;

use super::driver::CudaError;
use super::memory::{View, ViewMut};
use super::stream::Stream;

/// A read-only matrix in a device's memory; elements of a row are adjacent.
#[derive(Debug)]
pub struct MatrixView<'a, T = f32> {
    pub(super) data: View<'a, T>,
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) row_stride: u64,
}

impl<T> Clone for MatrixView<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for MatrixView<'_, T> {}

/// A writable matrix in a device's memory; elements of a row are adjacent.
#[derive(Debug)]
pub struct MatrixViewMut<'a, T = f32> {
    pub(super) data: ViewMut<'a, T>,
    pub(super) rows: u32,
    pub(super) cols: u32,
    pub(super) row_stride: u64,
}

/// A count as kernels take it.
///
/// # Panics
/// If it has more than 32 bits: no buffer has so many rows or columns.
#[track_caller]
pub(super) fn count(value: usize) -> u32 {
    match u32::try_from(value) {
        Ok(value) => value,
        Err(_) => panic!("{value} rows or columns are more than a kernel can count"),
    }
}

#[track_caller]
fn check(len: usize, rows: usize, cols: usize, row_stride: usize) {
    let reach = if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + cols
    };
    assert!(
        row_stride >= cols && reach <= len,
        "a matrix of {rows} x {cols} with stride {row_stride} in {len} elements"
    );
}

impl<'a, T: Pod> MatrixView<'a, T> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn new(data: View<'a, T>, rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// `[rows, cols]` whose rows lie `row_stride` apart.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn strided(data: View<'a, T>, rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows: count(rows),
            cols: count(cols),
            row_stride: row_stride as u64,
        }
    }
}

impl<'a, T: Pod> MatrixViewMut<'a, T> {
    /// All of `data` as `[rows, cols]`.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn new(data: ViewMut<'a, T>, rows: usize, cols: usize) -> Self {
        Self::strided(data, rows, cols, cols)
    }

    /// `[rows, cols]` whose rows lie `row_stride` apart.
    ///
    /// # Panics
    /// If the matrix does not fit into `data`.
    #[track_caller]
    pub fn strided(data: ViewMut<'a, T>, rows: usize, cols: usize, row_stride: usize) -> Self {
        check(data.len(), rows, cols, row_stride);
        Self {
            data,
            rows: count(rows),
            cols: count(cols),
            row_stride: row_stride as u64,
        }
    }
}

/// Row numbers in a device's memory. All are below [`Indices::end`], so kernels need not look.
#[derive(Clone, Copy, Debug)]
pub struct Indices<'a> {
    pub(super) data: View<'a, u32>,
    end: u32,
}

impl<'a> Indices<'a> {
    /// Sends row numbers to a device.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn upload(stream: &Stream, rows: &[u32], mut to: ViewMut<'a, u32>) -> Result<Self, CudaError> {
        stream.send(rows, to.reborrow())?;
        Ok(Self {
            data: to.into_view(),
            end: rows.iter().max().map_or(0, |&row| row.saturating_add(1)),
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// One more than the largest.
    pub fn end(&self) -> u32 {
        self.end
    }
}
