//! A product of packed operands, cut into blocks for caches and threads.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use rayon::prelude::*;

use super::hardware::Amx;
use super::pack::Side;
use super::packed::{PackedMatrix, Panels, Source};
use super::tiles::{BLOCK_SUMS, Line, PANEL_LANES, STEP_DEPTH, STEP_LINES};
use crate::device::cpu::gemm::Tile;
use crate::device::cpu::scratch::with_scratch;
use crate::device::{HostMatrix, HostMatrixMut};

/// Bytes of an operand that are packed at a time; what the cores of a machine share of cache, roughly.
pub(super) const SLAB_BYTES: usize = 32 << 20;
/// Steps along k after which a block goes on to the next pair of panels: 128 KiB of each.
const CHUNK_STEPS: usize = 64;
/// Panels of the left operand in a block: its chunks fill half of a core's second-level cache of 2 MiB.
const LEFT_PANELS: usize = 8;
/// Panels of the right operand in a block. With those of the left one the sums take 512 KiB.
const RIGHT_PANELS: usize = 16;
/// f32 in a line.
const LINE_FLOATS: usize = 16;

/// Memory for packed operands, kept from product to product.
#[derive(Debug)]
pub(super) struct Workspace {
    /// Bytes of an operand that are packed at a time.
    slab_bytes: usize,
    free: Mutex<Vec<Vec<Line>>>,
}

impl Workspace {
    pub(super) fn new(slab_bytes: usize) -> Self {
        Self {
            slab_bytes,
            free: Mutex::default(),
        }
    }

    /// Panels of an operand that are packed at a time.
    fn slab_panels(&self, lanes: usize, panel_lines: usize) -> usize {
        let most = self.slab_bytes / size_of::<Line>() / panel_lines;
        lanes.div_ceil(PANEL_LANES).min(most.max(1))
    }

    /// Lends `count` lines to `work`; their contents are whatever was left in them.
    fn with<R>(&self, count: usize, work: impl FnOnce(&mut [Line]) -> R) -> R {
        let mut lines = self.take();
        if lines.len() < count {
            lines.resize(count, Line::ZERO);
        }
        let result = work(&mut lines[..count]);
        self.free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(lines);
        result
    }

    fn take(&self) -> Vec<Line> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.pop().unwrap_or_default()
    }
}

/// The right operand.
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    /// Its transpose, to be packed.
    Source(Source<'a>),
    Packed(&'a PackedMatrix),
}

impl Right<'_> {
    fn shape(&self) -> (usize, usize) {
        match self {
            Self::Source(source) => (source.depth(), source.lanes()),
            Self::Packed(packed) => (packed.rows(), packed.cols()),
        }
    }
}

/// `c = alpha · a·b` or `c += alpha · a·b`.
pub(super) fn product(
    amx: Amx,
    workspace: &Workspace,
    mut c: HostMatrixMut<'_>,
    a: HostMatrix<'_>,
    b: Right<'_>,
    alpha: f32,
    accumulate: bool,
) {
    let (k, n) = b.shape();
    assert_eq!((c.rows, c.cols, a.cols), (a.rows, n, k), "shapes of a product");
    if c.rows == 0 || c.cols == 0 {
        return;
    }
    if k == 0 {
        if !accumulate {
            let (stride, cols) = (c.row_stride.max(1), c.cols);
            let rows = c.data.chunks_mut(stride).take(c.rows);
            rows.for_each(|row| row[..cols].fill(0.0));
        }
        return;
    }
    let panel_lines = k.div_ceil(STEP_DEPTH) * STEP_LINES;
    let left_panels = workspace.slab_panels(c.rows, panel_lines);
    let right_panels = match b {
        Right::Source(_) => workspace.slab_panels(n, panel_lines),
        Right::Packed(_) => 0,
    };
    let whole = Tile::of(&mut c);
    workspace.with((left_panels + right_panels) * panel_lines, |lines| {
        let (left_lines, right_lines) = lines.split_at_mut(left_panels * panel_lines);
        for (row, rows) in slabs(a.rows, left_panels) {
            let left = Source::F32(a).pack(Side::Left, row, rows, left_lines);
            match b {
                Right::Packed(packed) => {
                    let target = whole.part(row, 0, rows, n);
                    multiply(amx, target, left, packed.panels(), alpha, accumulate);
                }
                Right::Source(source) => {
                    for (col, cols) in slabs(n, right_panels) {
                        let right = source.pack(Side::Right, col, cols, right_lines);
                        let target = whole.part(row, col, rows, cols);
                        multiply(amx, target, left, right, alpha, accumulate);
                    }
                }
            }
        }
    });
}

/// First lane and length of each slab.
fn slabs(lanes: usize, panels: usize) -> impl Iterator<Item = (usize, usize)> {
    let most = panels * PANEL_LANES;
    (0..lanes)
        .step_by(most)
        .map(move |first| (first, most.min(lanes - first)))
}

/// Blocks of panels: large, for a block reads each of its panels from memory once, but enough of them to keep the threads
/// busy. They change no bit of the result.
fn block_panels(left: usize, right: usize, threads: usize) -> (usize, usize) {
    let (mut down, mut across) = (LEFT_PANELS.min(left), RIGHT_PANELS.min(right));
    let wanted = if threads == 1 { 1 } else { 4 * threads };
    while left.div_ceil(down) * right.div_ceil(across) < wanted && down.max(across) > 1 {
        if across >= down {
            across = across.div_ceil(2);
        } else {
            down = down.div_ceil(2);
        }
    }
    (down, across)
}

/// All blocks of an output, over the threads of the current pool.
fn multiply(amx: Amx, c: Tile, left: Panels<'_>, right: Panels<'_>, alpha: f32, accumulate: bool) {
    let panels = |lanes: usize| lanes.div_ceil(PANEL_LANES);
    let (down, across) = block_panels(
        panels(left.lanes()),
        panels(right.lanes()),
        rayon::current_num_threads(),
    );
    let (rows, cols) = (down * PANEL_LANES, across * PANEL_LANES);
    let one = |index: usize| {
        let (target, row, col) = c.cut(index, rows, cols);
        let (left, right) = (left.part(row, target.rows), right.part(col, target.cols));
        block(amx, target, left, right, alpha, accumulate);
    };
    match c.pieces(rows, cols) {
        1 => one(0),
        pieces => (0..pieces).into_par_iter().for_each(one),
    }
}

/// One block of the output.
///
/// The micro-kernel writes its sums into a buffer of contiguous 4 KiB tiles and not into the output, for three reasons. A
/// row of a tile is a single line of cache, and where the rows of the output lie a multiple of 4 KiB apart, all 32 lines
/// of a tile compete for the few places of one set of the first-level cache, each on another page: with a short k that
/// halves the speed. From the buffer whole rows of the block are written, up to 2 KiB in one go, whatever their
/// distance. Then, edges of the output need no micro-kernel of their own, since the buffer is never cut. And sums stay
/// exact f32 until `alpha` and the old output meet them once, at the end (AMX-3).
fn block(amx: Amx, c: Tile, left: Panels<'_>, right: Panels<'_>, alpha: f32, accumulate: bool) {
    let [down, across] = [left.lanes(), right.lanes()].map(|lanes| lanes.div_ceil(PANEL_LANES));
    with_scratch([down * across * BLOCK_SUMS + LINE_FLOATS], |[space]| {
        // Rows of tiles that straddle lines of cache would cost two accesses each.
        let unaligned = space.as_ptr().align_offset(align_of::<Line>()).min(LINE_FLOATS);
        let (sums, _) = space[unaligned..].as_chunks_mut::<BLOCK_SUMS>();
        let mut tiles = amx.configure();
        // AMX-2: chunks of k in order; sums that wait in the buffer meanwhile are f32 as in the tiles.
        for first in (0..left.steps()).step_by(CHUNK_STEPS) {
            let steps = CHUNK_STEPS.min(left.steps() - first);
            for col in 0..across {
                let right = right.panel(col, first, steps);
                for row in 0..down {
                    let left = left.panel(row, first, steps);
                    tiles.multiply(left, right, &mut sums[row * across + col], first > 0);
                }
            }
        }
        drop(tiles);
        for row in 0..c.rows {
            let sums = &sums[row / PANEL_LANES * across..][..across];
            // SAFETY: a row of the tile, and this task is the only one that has the tile (`Tile`'s invariant).
            let out = unsafe { std::slice::from_raw_parts_mut(c.start.add(row * c.row_stride), c.cols) };
            for (out, sums) in out.chunks_mut(PANEL_LANES).zip(sums) {
                let sums = &sums[row % PANEL_LANES * PANEL_LANES..][..out.len()];
                write(sums, alpha, accumulate, out);
            }
        }
    });
}

/// AMX-3.
fn write(sums: &[f32], alpha: f32, accumulate: bool, out: &mut [f32]) {
    if accumulate {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out += alpha * sum;
        }
    } else if alpha == 1.0 {
        out.copy_from_slice(sums);
    } else {
        for (out, &sum) in out.iter_mut().zip(sums) {
            *out = alpha * sum;
        }
    }
}
