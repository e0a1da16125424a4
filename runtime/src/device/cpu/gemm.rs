//! Products on the CPU, by the `gemm-f32` crate.
//!
//! The crate chooses its blocking by shape, and small shapes take other code paths. Both would let the bits of a row
//! depend on the rows beside it. So a product is cut here: along k into blocks of [`K_BLOCK`] (the crate never splits
//! those again), and over the output into tiles, each a serial call; tiny tiles are padded past the special paths.
#![allow(unsafe_code)]

use gemm_common::Parallelism;
use rayon::prelude::*;

use super::scratch::with_scratch;
use crate::device::{HostMatrix, HostMatrixMut, StoredMatrix};

/// Terms summed in one go, at most; `gemm-common` keeps at least 512 together.
const K_BLOCK: usize = 512;
/// Blocks of k are a multiple of this long, but for the last one.
const K_UNIT: usize = 8;
/// Up to this many output elements the crate may use dot products instead of its micro-kernel.
const SPECIAL_ELEMENTS: usize = 16 * 16;
/// A side of a padded tile: its square is past [`SPECIAL_ELEMENTS`].
const PADDED_SIDE: usize = 17;
/// Largest tile of the output, in rows.
const TILE_ROWS: usize = 1024;
/// Largest tile of the output, in columns.
const TILE_COLS: usize = 512;
/// Smallest side of a tile that is cut for the sake of more tasks.
const TILE_SIDE: usize = 96;
/// Weights that are unpacked together, in rows, at most and at least: the crate packs the other operand again for each.
const UNPACKED_ROWS: (usize, usize) = (512, 32);
/// Weights that are unpacked together, in elements: what stays in a shared cache.
const UNPACKED_ELEMENTS: usize = 512 * 1024;

/// A rectangle of an output. Products make them of what they write; two that tasks write to at once are disjoint.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    pub(super) start: *mut f32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) row_stride: usize,
}

// SAFETY: a tile is the only way to its elements while tasks run; see `Tile::cut`.
unsafe impl Send for Tile {}
// SAFETY: as above.
unsafe impl Sync for Tile {}

impl Tile {
    pub(super) fn of(c: &mut HostMatrixMut<'_>) -> Self {
        Self {
            start: c.data.as_mut_ptr(),
            rows: c.rows,
            cols: c.cols,
            row_stride: c.row_stride,
        }
    }

    /// The `index`-th of the disjoint sub-tiles of at most `rows` x `cols`, column of tiles by column, and its origin.
    pub(super) fn cut(&self, index: usize, rows: usize, cols: usize) -> (Self, usize, usize) {
        let down = self.rows.div_ceil(rows);
        let (row, col) = (index % down * rows, index / down * cols);
        assert!(row < self.rows && col < self.cols);
        let tile = self.part(row, col, rows.min(self.rows - row), cols.min(self.cols - col));
        (tile, row, col)
    }

    /// The sub-tile of `rows` x `cols`, at least one of each, at (`row`, `col`).
    pub(super) fn part(&self, row: usize, col: usize, rows: usize, cols: usize) -> Self {
        assert!(rows > 0 && cols > 0 && row + rows <= self.rows && col + cols <= self.cols);
        // SAFETY: (row, col) lies inside this tile, whose elements are all in one allocation.
        let start = unsafe { self.start.add(row * self.row_stride + col) };
        Self {
            start,
            rows,
            cols,
            ..*self
        }
    }

    pub(super) fn pieces(&self, rows: usize, cols: usize) -> usize {
        self.rows.div_ceil(rows) * self.cols.div_ceil(cols)
    }
}

/// Sizes of tiles: large, for each tile packs its operands anew, but enough of them to keep the threads busy. They do
/// not change any bit of the result.
fn tile_sizes(rows: usize, cols: usize, threads: usize) -> (usize, usize) {
    let (mut tile_rows, mut tile_cols) = (TILE_ROWS, TILE_COLS);
    let wanted = if threads == 1 { 1 } else { 4 * threads };
    while rows.div_ceil(tile_rows) * cols.div_ceil(tile_cols) < wanted && tile_rows.max(tile_cols) > TILE_SIDE
    {
        // Halve the side that has more to give; a side longer than the output gives nothing.
        let (height, width) = (tile_rows.min(rows), tile_cols.min(cols));
        if tile_rows > TILE_SIDE && (height > 2 * width || tile_cols <= TILE_SIDE) {
            tile_rows = (tile_rows / 2).max(TILE_SIDE);
        } else {
            tile_cols = (tile_cols / 2).max(TILE_SIDE);
        }
    }
    (tile_rows, tile_cols)
}

/// `c = alpha · a·b` or `c += alpha · a·b` over the threads of the current pool.
pub(super) fn gemm(
    mut c: HostMatrixMut<'_>,
    a: HostMatrix<'_>,
    b: HostMatrix<'_>,
    alpha: f32,
    accumulate: bool,
) {
    assert_eq!(
        (c.rows, c.cols, a.cols),
        (a.rows, b.cols, b.rows),
        "shapes of a product"
    );
    let whole = Tile::of(&mut c);
    let (rows, cols) = tile_sizes(c.rows, c.cols, rayon::current_num_threads());
    let one = |index: usize| {
        let (tile, row, col) = whole.cut(index, rows, cols);
        let (a, b) = (
            a.block(row, tile.rows, 0, a.cols),
            b.block(0, b.rows, col, tile.cols),
        );
        gemm_tile(tile, a, b, alpha, accumulate);
    };
    match whole.pieces(rows, cols) {
        pieces @ 0..=1 => (0..pieces).for_each(one),
        pieces => (0..pieces).into_par_iter().for_each(one),
    }
}

/// [`gemm`] on the calling thread.
pub(super) fn gemm_serial(
    mut c: HostMatrixMut<'_>,
    a: HostMatrix<'_>,
    b: HostMatrix<'_>,
    alpha: f32,
    accumulate: bool,
) {
    assert_eq!(
        (c.rows, c.cols, a.cols),
        (a.rows, b.cols, b.rows),
        "shapes of a product"
    );
    gemm_tile(Tile::of(&mut c), a, b, alpha, accumulate);
}

/// Weights `[n, k]` that are unpacked together, in rows: stripes of nearly the same size, two for each thread if they are
/// not too small.
fn unpacked_rows(n: usize, k: usize, threads: usize) -> usize {
    let (most, least) = UNPACKED_ROWS;
    let most = (UNPACKED_ELEMENTS / k.max(1)).clamp(least, most);
    let wanted = if threads == 1 { 1 } else { 2 * threads };
    let stripes = n.div_ceil(most).max(wanted.min(n.div_ceil(least)));
    n.div_ceil(stripes.next_multiple_of(wanted).min(n.div_ceil(least)).max(1))
}

/// `c = a·wᵀ` or `c += a·wᵀ`, `weights` `[n, k]` in any form.
pub(super) fn gemm_stored(
    mut c: HostMatrixMut<'_>,
    a: HostMatrix<'_>,
    weights: &dyn StoredMatrix,
    accumulate: bool,
) {
    let k = a.cols;
    assert_eq!(
        (c.rows, weights.rows(), weights.cols()),
        (a.rows, c.cols, k),
        "shapes of a product"
    );
    if let Some(weights) = weights.in_place() {
        return gemm(c, a, weights.transposed(), 1.0, accumulate);
    }
    let whole = Tile::of(&mut c);
    let rows = unpacked_rows(whole.cols, k, rayon::current_num_threads());
    let columns = whole.cols.div_ceil(rows.max(1));
    // All rows of `a` meet a tile of weights while it is unpacked.
    let one = |index: usize| {
        let (stripe, _, col) = whole.cut(index, whole.rows, rows);
        with_scratch([stripe.cols * k], |[wide]| {
            weights.unpack(col..col + stripe.cols, wide);
            let b = HostMatrix::new(&*wide, stripe.cols, k).transposed();
            for index in 0..stripe.pieces(TILE_ROWS, stripe.cols) {
                let (tile, row, _) = stripe.cut(index, TILE_ROWS, stripe.cols);
                gemm_tile(tile, a.block(row, tile.rows, 0, k), b, 1.0, accumulate);
            }
        });
    };
    match if whole.rows == 0 { 0 } else { columns } {
        pieces @ 0..=1 => (0..pieces).for_each(one),
        pieces => (0..pieces).into_par_iter().for_each(one),
    }
}

/// Terms summed in one go: blocks of nearly the same length, for a short one costs nearly what a long one does.
fn k_block(k: usize) -> usize {
    k.div_ceil(k.div_ceil(K_BLOCK).max(1)).next_multiple_of(K_UNIT)
}

/// One tile: blocks of k in order, each added to what the ones before left.
fn gemm_tile(c: Tile, a: HostMatrix<'_>, b: HostMatrix<'_>, alpha: f32, accumulate: bool) {
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if c.rows == 1 || c.cols == 1 || c.rows * c.cols <= SPECIAL_ELEMENTS {
        return gemm_padded(c, a, b, alpha, accumulate);
    }
    let k = a.cols;
    if k == 0 {
        if !accumulate {
            for row in 0..c.rows {
                // SAFETY: `row` is a row of the tile.
                unsafe { std::ptr::write_bytes(c.start.add(row * c.row_stride), 0, c.cols) };
            }
        }
        return;
    }
    let product = gemm_f32::gemm::f32::get_gemm_fn();
    let block = k_block(k);
    for start in (0..k).step_by(block) {
        let terms = block.min(k - start);
        let (a, b) = (a.block(0, a.rows, start, terms), b.block(start, terms, 0, b.cols));
        // The crate wants the output's fast dimension first, so it gets the transposed product: cᵀ = bᵀ·aᵀ.
        // SAFETY: the views reach no further than their slices (`Matrix`'s invariant), the tile lies inside its
        // allocation and no other tile overlaps it (`Tile`'s invariant); operands cannot alias a mutable output.
        unsafe {
            product(
                c.cols,
                c.rows,
                terms,
                c.start,
                c.row_stride as isize,
                1,
                accumulate || start > 0,
                b.data.as_ptr(),
                b.row_stride as isize,
                b.col_stride as isize,
                a.data.as_ptr(),
                a.row_stride as isize,
                a.col_stride as isize,
                1.0,
                alpha,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    }
}

/// A tile too small for the crate's common path, by way of a larger copy of it.
#[cold]
fn gemm_padded(c: Tile, a: HostMatrix<'_>, b: HostMatrix<'_>, alpha: f32, accumulate: bool) {
    let (cols, k) = (c.cols.max(PADDED_SIDE), a.cols);
    let rows = c.rows.max(SPECIAL_ELEMENTS / cols + 1).max(2);
    // A few rows by many weights is what answering step by step is made of: the weights then stay where they are.
    let copied_b = if cols == c.cols { 0 } else { k * cols };
    with_scratch([rows * k, copied_b, rows * cols], |[wide_a, wide_b, wide_c]| {
        wide_a.fill(0.0);
        wide_b.fill(0.0);
        wide_c.fill(0.0);
        for row in 0..a.rows {
            for col in 0..k {
                wide_a[row * k + col] = a.data[row * a.row_stride + col * a.col_stride];
            }
        }
        if copied_b > 0 {
            for row in 0..k {
                for col in 0..b.cols {
                    wide_b[row * cols + col] = b.data[row * b.row_stride + col * b.col_stride];
                }
            }
        }
        for row in 0..c.rows {
            for col in 0..c.cols {
                // SAFETY: an element of the tile.
                wide_c[row * cols + col] = unsafe { *c.start.add(row * c.row_stride + col) };
            }
        }
        let view_a = HostMatrix::new(&*wide_a, rows, k);
        let view_b = if copied_b > 0 {
            HostMatrix::new(&*wide_b, k, cols)
        } else {
            b
        };
        let mut wide = HostMatrixMut::new(&mut *wide_c, rows, cols);
        gemm_tile(Tile::of(&mut wide), view_a, view_b, alpha, accumulate);
        for row in 0..c.rows {
            for col in 0..c.cols {
                // SAFETY: an element of the tile.
                unsafe { *c.start.add(row * c.row_stride + col) = wide_c[row * cols + col] };
            }
        }
    });
}
