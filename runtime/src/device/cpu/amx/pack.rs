//! From matrices to panels of tiles.
//!
//! An operand is seen as `[lanes, depth]`: lanes are the rows of the left operand or the columns of the right one, depth
//! goes along k. Whichever of the two is contiguous in memory, a tile is read along it, and turned in registers if the
//! panel wants the other order. What lies beyond the operand is zero.
//!
//! The code is one text, compiled for several instruction sets; all of them give the same bits. (The conversion
//! instructions of AVX-512 are no use for that: they take subnormal numbers for zero.)
#![allow(unsafe_code)]

use half::bf16;

use super::tiles::{Line, PANEL_LANES, STEP_DEPTH, STEP_LINES, TILE_ROWS};
use crate::device::HostMatrix;

/// A tile while it is made: 16 lanes by 16 pairs, or the other way round.
type Block = [[u32; 16]; 16];

/// Which operand a panel is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// Lines are lanes.
    Left,
    /// Lines are pairs along k.
    Right,
}

/// What operands are made of.
pub(super) trait Element: Copy + Send + Sync {
    /// Its bits as bf16.
    fn bits(self) -> u16;
}

impl Element for f32 {
    /// AMX-1: to the nearest, ties to even; NaN stays NaN.
    #[inline(always)]
    fn bits(self) -> u16 {
        let bits = self.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        // Dropping the low half of a NaN's mantissa could leave an infinity.
        let quiet = bits >> 16 | 0x40;
        (if bits & 0x7fff_ffff > 0x7f80_0000 {
            quiet
        } else {
            rounded
        }) as u16
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn bits(self) -> u16 {
        self.to_bits()
    }
}

/// Packs consecutive panels, the first one from lane `first` on; `source` `[lanes, depth]`, `out` panels of `steps`
/// steps each.
pub(super) fn panels<T: Element>(
    side: Side,
    source: HostMatrix<'_, T>,
    first: usize,
    steps: usize,
    out: &mut [Line],
) {
    Level::best().panels(side, source, first, steps, out);
}

/// Instruction sets that the packers are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Plain,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

impl Level {
    pub(super) const ALL: &[Self] = &[
        #[cfg(target_arch = "x86_64")]
        Self::Avx512,
        #[cfg(target_arch = "x86_64")]
        Self::Avx2,
        Self::Plain,
    ];

    pub(super) fn is_here(self) -> bool {
        match self {
            Self::Plain => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    fn best() -> Self {
        let best = Self::ALL.iter().find(|level| level.is_here());
        best.copied().unwrap_or(Self::Plain)
    }

    pub(super) fn panels<T: Element>(
        self,
        side: Side,
        source: HostMatrix<'_, T>,
        first: usize,
        steps: usize,
        out: &mut [Line],
    ) {
        match self {
            Self::Plain => fill(side, source, first, steps, out, transpose),
            // SAFETY: levels are used only where they are there.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { x86_64::fill_avx2(side, source, first, steps, out) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { x86_64::fill_avx512(side, source, first, steps, out) },
        }
    }
}

// Functions and not closures from here on: a closure that is not inlined would be compiled for the least instruction set.
#[inline(always)]
fn fill<T: Element>(
    side: Side,
    source: HostMatrix<'_, T>,
    first: usize,
    steps: usize,
    out: &mut [Line],
    transpose: impl Fn(&mut Block) + Copy,
) {
    let panel_lines = steps * STEP_LINES;
    let panels = out.len() / panel_lines.max(1);
    // Where lanes are adjacent, what lies in one row of memory is taken together, or every panel would touch all pages.
    let by_panel = source.col_stride == 1;
    for index in 0..panels * steps {
        let (panel, step) = if by_panel {
            (index / steps, index % steps)
        } else {
            (index % panels, index / panels)
        };
        let lines = &mut out[panel * panel_lines + step * STEP_LINES..][..STEP_LINES];
        for (half, lines) in lines.chunks_exact_mut(TILE_ROWS).enumerate() {
            let lane = first + panel * PANEL_LANES + half * TILE_ROWS;
            tile(side, source, lane, step * STEP_DEPTH, lines, transpose);
        }
    }
}

/// The tile of 16 lanes from `lane` on and 32 terms from `depth` on.
#[inline(always)]
fn tile<T: Element>(
    side: Side,
    source: HostMatrix<'_, T>,
    lane: usize,
    depth: usize,
    lines: &mut [Line],
    transpose: impl Fn(&mut Block),
) {
    let lanes = source.rows.saturating_sub(lane).min(TILE_ROWS);
    let terms = source.cols.saturating_sub(depth).min(STEP_DEPTH);
    let mut block: Block = [[0; 16]; 16];
    let is_whole = lanes == TILE_ROWS && terms == STEP_DEPTH;
    let start = lane * source.row_stride + depth * source.col_stride;
    let values = source.data.get(start..).unwrap_or_default();
    // How the block lies: a row of it per lane, as in a left panel, or per pair, as in a right one.
    let read_as = if is_whole && source.col_stride == 1 {
        for (row, pairs) in block.iter_mut().enumerate() {
            *pairs = adjacent_pairs(run(values, row * source.row_stride));
        }
        Side::Left
    } else if is_whole && source.row_stride == 1 {
        for (pair, places) in block.iter_mut().enumerate() {
            let low = run::<_, TILE_ROWS>(values, 2 * pair * source.col_stride);
            let high = run::<_, TILE_ROWS>(values, (2 * pair + 1) * source.col_stride);
            for place in 0..TILE_ROWS {
                places[place] = u32::from(low[place].bits()) | u32::from(high[place].bits()) << 16;
            }
        }
        Side::Right
    } else {
        for (row, pairs) in block.iter_mut().enumerate().take(lanes) {
            for term in 0..terms {
                let value = values[row * source.row_stride + term * source.col_stride];
                pairs[term / 2] |= u32::from(value.bits()) << (term % 2 * 16);
            }
        }
        Side::Left
    };
    if read_as != side {
        transpose(&mut block);
    }
    for (line, values) in lines.iter_mut().zip(block) {
        line.0 = values;
    }
}

/// `N` adjacent elements.
#[inline(always)]
fn run<T, const N: usize>(values: &[T], start: usize) -> &[T; N] {
    &values[start..].as_chunks().0[0]
}

/// Adjacent elements two by two.
#[inline(always)]
fn adjacent_pairs<T: Element>(values: &[T; STEP_DEPTH]) -> [u32; 16] {
    let mut bits = [0u16; STEP_DEPTH];
    for place in 0..STEP_DEPTH {
        bits[place] = values[place].bits();
    }
    if cfg!(target_endian = "little") {
        // Pairs as they lie in memory: narrowing is all that is left to do in registers.
        return bytemuck::cast(bits);
    }
    let mut pairs = [0; 16];
    for (pair, bits) in pairs.iter_mut().zip(bits.as_chunks::<2>().0) {
        *pair = u32::from(bits[0]) | u32::from(bits[1]) << 16;
    }
    pairs
}

#[inline(always)]
fn transpose(block: &mut Block) {
    *block = std::array::from_fn(|row| std::array::from_fn(|col| block[col][row]));
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use std::arch::x86_64::{
        __m256i, _mm256_permute2x128_si256, _mm256_unpackhi_epi32, _mm256_unpackhi_epi64,
        _mm256_unpacklo_epi32, _mm256_unpacklo_epi64,
    };

    use super::{Block, Element, HostMatrix, Line, Side, fill};

    #[target_feature(enable = "avx2")]
    pub(super) fn fill_avx2<T: Element>(
        side: Side,
        source: HostMatrix<'_, T>,
        first: usize,
        steps: usize,
        out: &mut [Line],
    ) {
        fill(side, source, first, steps, out, |block| transpose(block));
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2")]
    pub(super) fn fill_avx512<T: Element>(
        side: Side,
        source: HostMatrix<'_, T>,
        first: usize,
        steps: usize,
        out: &mut [Line],
    ) {
        fill(side, source, first, steps, out, |block| transpose(block));
    }

    /// A square of four squares of 8 x 8, of which two change places.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn transpose(block: &mut Block) {
        let square = |block: &Block, top: usize, edge: usize| -> [__m256i; 8] {
            std::array::from_fn(|row| {
                let half: [u32; 8] = std::array::from_fn(|col| block[top + row][edge + col]);
                bytemuck::cast(half)
            })
        };
        let mut turned: Block = [[0; 16]; 16];
        for (top, edge) in [(0, 0), (0, 8), (8, 0), (8, 8)] {
            let square = transpose_square(square(block, top, edge));
            for (row, values) in square.into_iter().enumerate() {
                let values: [u32; 8] = bytemuck::cast(values);
                turned[edge + row][top..top + 8].copy_from_slice(&values);
            }
        }
        *block = turned;
    }

    #[target_feature(enable = "avx2")]
    #[inline]
    fn transpose_square(rows: [__m256i; 8]) -> [__m256i; 8] {
        // Rows two by two, then four by four, within each half of a register; then halves.
        let [a, b, c, d, e, f, g, h] = rows;
        let quads = |a, b, c, d| {
            let (low, high) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (low2, high2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(low, low2),
                _mm256_unpackhi_epi64(low, low2),
                _mm256_unpacklo_epi64(high, high2),
                _mm256_unpackhi_epi64(high, high2),
            ]
        };
        let (upper, lower) = (quads(a, b, c, d), quads(e, f, g, h));
        std::array::from_fn(|row| {
            let (upper, lower) = (upper[row % 4], lower[row % 4]);
            if row < 4 {
                _mm256_permute2x128_si256::<0x20>(upper, lower)
            } else {
                _mm256_permute2x128_si256::<0x31>(upper, lower)
            }
        })
    }
}
