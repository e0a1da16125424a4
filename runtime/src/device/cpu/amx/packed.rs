//! Packed operands, and what they are packed from.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::bf16;
use rayon::prelude::*;

use super::cache::PackedFile;
use super::pack::{self, Side};
use super::tiles::{Line, PANEL_LANES, STEP_DEPTH, STEP_LINES};
use crate::device::cpu::scratch::with_scratch;
use crate::device::{HostMatrix, StoredMatrix};

/// Panels that one task packs together at most: a line of memory then gives it 1 KiB of f32.
const GROUP_PANELS: usize = 8;

/// An operand before it is packed, `[lanes, depth]`.
#[derive(Clone, Copy)]
pub(super) enum Source<'a> {
    F32(HostMatrix<'a>),
    Bf16(HostMatrix<'a, bf16>),
    /// Unpacked to f32 panel by panel.
    Stored(&'a dyn StoredMatrix),
}

impl<'a> From<HostMatrix<'a>> for Source<'a> {
    fn from(matrix: HostMatrix<'a>) -> Self {
        Self::F32(matrix)
    }
}

impl<'a> From<HostMatrix<'a, bf16>> for Source<'a> {
    fn from(matrix: HostMatrix<'a, bf16>) -> Self {
        Self::Bf16(matrix)
    }
}

impl<'a> From<&'a dyn StoredMatrix> for Source<'a> {
    fn from(matrix: &'a dyn StoredMatrix) -> Self {
        Self::Stored(matrix)
    }
}

impl<'a> Source<'a> {
    /// Weights that lie in memory as plain floats.
    pub(super) fn in_place(weights: &'a dyn StoredMatrix) -> Option<Self> {
        let narrow = weights.in_place_bf16().map(Self::from);
        narrow.or_else(|| weights.in_place().map(Self::from))
    }
}

impl Source<'_> {
    pub(super) fn lanes(&self) -> usize {
        match self {
            Self::F32(matrix) => matrix.rows,
            Self::Bf16(matrix) => matrix.rows,
            Self::Stored(matrix) => matrix.rows(),
        }
    }

    pub(super) fn depth(&self) -> usize {
        match self {
            Self::F32(matrix) => matrix.cols,
            Self::Bf16(matrix) => matrix.cols,
            Self::Stored(matrix) => matrix.cols(),
        }
    }

    /// Packs the lanes from `first` on into `out`, whole panels, over the threads of the current pool.
    pub(super) fn pack<'p>(&self, side: Side, first: usize, lanes: usize, out: &'p mut [Line]) -> Panels<'p> {
        let steps = self.depth().div_ceil(STEP_DEPTH);
        let panel_lines = steps * STEP_LINES;
        let panels = lanes.div_ceil(PANEL_LANES);
        let out = &mut out[..panels * panel_lines];
        if out.is_empty() {
            return Panels {
                lines: out,
                steps,
                lanes,
            };
        }
        let group = (panels / (2 * rayon::current_num_threads())).clamp(1, GROUP_PANELS);
        let one = |(index, out): (usize, &mut [Line])| {
            self.pack_group(side, first + index * group * PANEL_LANES, steps, out);
        };
        if panels <= group {
            one((0, &mut *out));
        } else {
            out.par_chunks_mut(group * panel_lines).enumerate().for_each(one);
        }
        Panels {
            lines: out,
            steps,
            lanes,
        }
    }

    /// Packs all of it for the right side.
    pub(super) fn pack_right(&self, out: &mut [Line]) {
        self.pack(Side::Right, 0, self.lanes(), out);
    }

    fn pack_group(&self, side: Side, first: usize, steps: usize, out: &mut [Line]) {
        match *self {
            Self::F32(matrix) => pack::panels(side, matrix, first, steps, out),
            Self::Bf16(matrix) => pack::panels(side, matrix, first, steps, out),
            Self::Stored(matrix) => {
                let (depth, all) = (matrix.cols(), matrix.rows());
                with_scratch([PANEL_LANES * depth], |[wide]| {
                    for (index, out) in out.chunks_mut(steps * STEP_LINES).enumerate() {
                        let first = first + index * PANEL_LANES;
                        let lanes = PANEL_LANES.min(all - first);
                        let wide = &mut wide[..lanes * depth];
                        matrix.unpack(first..first + lanes, wide);
                        pack::panels(side, HostMatrix::new(&*wide, lanes, depth), 0, steps, out);
                    }
                });
            }
        }
    }
}

/// Packed panels of an operand.
#[derive(Clone, Copy)]
pub(super) struct Panels<'a> {
    lines: &'a [Line],
    steps: usize,
    lanes: usize,
}

impl<'a> Panels<'a> {
    /// Rows of the left operand, or columns of the right one.
    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// Steps of 32 along k.
    pub(super) fn steps(&self) -> usize {
        self.steps
    }

    /// The panels of some lanes; they begin with a panel.
    pub(super) fn part(&self, first: usize, lanes: usize) -> Self {
        assert!(first.is_multiple_of(PANEL_LANES) && first + lanes <= self.lanes);
        let panel_lines = self.steps * STEP_LINES;
        let panels = first / PANEL_LANES..(first + lanes).div_ceil(PANEL_LANES);
        Self {
            lines: &self.lines[panels.start * panel_lines..panels.end * panel_lines],
            lanes,
            ..*self
        }
    }

    /// Some steps of a panel.
    pub(super) fn panel(&self, panel: usize, first: usize, steps: usize) -> &'a [Line] {
        &self.lines[(panel * self.steps + first) * STEP_LINES..][..steps * STEP_LINES]
    }
}

/// Lines of a packed right operand `[rows, cols]`.
pub(super) fn lines_of(rows: usize, cols: usize) -> usize {
    cols.div_ceil(PANEL_LANES) * rows.div_ceil(STEP_DEPTH) * STEP_LINES
}

/// Where packed lines are.
enum Lines {
    Own(Vec<Line>),
    Mapped(MappedLines),
}

/// A matrix of a mapped file.
struct MappedLines {
    file: Arc<PackedFile>,
    /// Which one.
    entry: usize,
    range: Range<usize>,
    /// Set once the file was checked; with lines of this process if it was not whole.
    instead: OnceLock<Option<Vec<Line>>>,
}

/// The right operand of products, `[k, n]` in bf16, packed once and used by many.
///
/// It takes as many bytes as the matrix in bf16, both sides rounded up to 32.
pub struct PackedMatrix {
    lines: Lines,
    rows: usize,
    cols: usize,
}

impl fmt::Debug for PackedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedMatrix [{}, {}]", self.rows, self.cols)
    }
}

impl PackedMatrix {
    /// Packs the transpose of a right operand.
    pub(super) fn new(source: Source<'_>) -> Self {
        let (cols, rows) = (source.lanes(), source.depth());
        let mut lines = vec![Line::ZERO; lines_of(rows, cols)];
        source.pack_right(&mut lines);
        Self {
            lines: Lines::Own(lines),
            rows,
            cols,
        }
    }

    /// A matrix `[rows, cols]` of a file. [`Self::check`] it before the first product.
    pub(super) fn mapped(
        file: Arc<PackedFile>,
        entry: usize,
        range: Range<usize>,
        (rows, cols): (usize, usize),
    ) -> Self {
        let instead = OnceLock::new();
        Self {
            lines: Lines::Mapped(MappedLines {
                file,
                entry,
                range,
                instead,
            }),
            rows,
            cols,
        }
    }

    /// Makes sure, once, that it is what was packed of `source`: else that is packed again, in this process's memory.
    pub(super) fn check(&self, source: Source<'_>) {
        let Lines::Mapped(mapped) = &self.lines else {
            return;
        };
        // Not inside `get_or_init`: a task that a waiting thread steals meanwhile could come here again.
        if mapped.instead.get().is_none() {
            let instead = (!mapped.file.is_whole(mapped.entry, &mapped.range)).then(|| {
                mapped.file.drop_damaged();
                let mut lines = vec![Line::ZERO; mapped.range.len()];
                source.pack_right(&mut lines);
                lines
            });
            let _ = mapped.instead.set(instead);
        }
    }

    /// Takes the values of another right operand `[k, n]` of its shape.
    pub(in crate::device::cpu) fn refill(&mut self, b: HostMatrix<'_>) {
        let source = Source::from(b.transposed());
        assert_eq!(
            (source.lanes(), source.depth()),
            (self.cols, self.rows),
            "shapes of a packed matrix"
        );
        match &mut self.lines {
            Lines::Own(lines) => source.pack_right(lines),
            Lines::Mapped(_) => *self = Self::new(source),
        }
    }

    /// Its rows k.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Its columns n.
    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(super) fn panels(&self) -> Panels<'_> {
        let lines = match &self.lines {
            Lines::Own(lines) => lines,
            Lines::Mapped(mapped) => match mapped.instead.get() {
                Some(Some(instead)) => instead,
                _ => mapped.file.lines(&mapped.range),
            },
        };
        Panels {
            lines,
            steps: self.rows.div_ceil(STEP_DEPTH),
            lanes: self.cols,
        }
    }
}
