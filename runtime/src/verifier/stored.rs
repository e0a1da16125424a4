//! A weight matrix in the form its files hold.
//!
//! STORED-1: weights stay packed in memory; they become f32 tile by tile, inside a product, and each element has the
//! value that the form defines for it, bit for bit.

use std::ops::Range;

use half::bf16;

use crate::device::{HostMatrix, widen_bf16};
use crate::weights::TensorView;

/// Values of the 4-bit floats of OCP's microscaling formats (E2M1), by their code.
const FP4: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// Values that share a scale in MXFP4.
pub(super) const MXFP4_GROUP: usize = 32;

/// A whole matrix `[rows, cols]` as it is stored.
#[derive(Debug)]
pub(super) enum Form {
    /// Floats, or ggml's blocks.
    Plain(TensorView),
    /// Floats `[cols, rows]`.
    Transposed(TensorView),
    /// Integers of `bits` bits with an offset of half their range, packed into 32 bits from the low end on, `[rows, ..]`,
    /// and a scale per group of columns (compressed-tensors' pack-quantized).
    Packed {
        packed: TensorView,
        /// `[rows, groups]`.
        scales: TensorView,
        bits: usize,
        group: usize,
    },
    /// E4M3 floats with a scale per block (DeepSeek), or per row or matrix.
    Fp8 {
        bytes: TensorView,
        /// `[rows / block, cols / block]`, rounded up.
        scales: Vec<f32>,
        scale_cols: usize,
        block: [usize; 2],
    },
    /// 4-bit floats, low half of a byte first, with a power of two per 32 columns (gpt-oss).
    Mxfp4 {
        /// `[rows, groups, 16]`.
        blocks: TensorView,
        /// `[rows, groups]`, exponents with an offset of 127.
        scales: TensorView,
    },
    /// Nothing: the problem is noted, and nobody computes with it.
    Missing,
}

impl Form {
    /// The matrix `[rows, cols]` where it lies, if it is aligned f32.
    pub(super) fn in_place(&self, rows: usize, cols: usize) -> Option<HostMatrix<'_>> {
        match self {
            Self::Plain(view) => Some(HostMatrix::new(view.as_f32()?, rows, cols)),
            Self::Transposed(view) => Some(HostMatrix::new(view.as_f32()?, cols, rows).transposed()),
            _ => None,
        }
    }

    /// The matrix `[rows, cols]` where it lies, if it is aligned bf16.
    pub(super) fn in_place_bf16(&self, rows: usize, cols: usize) -> Option<HostMatrix<'_, bf16>> {
        match self {
            Self::Plain(view) => Some(HostMatrix::new(view.as_bf16()?, rows, cols)),
            Self::Transposed(view) => Some(HostMatrix::new(view.as_bf16()?, cols, rows).transposed()),
            _ => None,
        }
    }

    /// Unpacks columns `cols` of the rows `first`, `first + step`, …; `out` `[any, cols]`. The matrix is `width` wide.
    pub(super) fn unpack(
        &self,
        (first, step): (usize, usize),
        cols: Range<usize>,
        width: usize,
        out: &mut [f32],
    ) {
        let len = cols.len();
        if len == 0 {
            return;
        }
        let count = out.len() / len;
        match self {
            Self::Plain(view) if step == 1 && len == width && view.as_bf16().is_none() => {
                view.unpack_rows(first..first + count, out);
            }
            Self::Transposed(view) => unpack_transposed(view, (first, step), cols, out),
            _ => {
                let mut row = Row::default();
                for (index, out) in out.chunks_exact_mut(len).enumerate() {
                    self.unpack_row(first + index * step, cols.clone(), width, &mut row, out);
                }
            }
        }
    }

    fn unpack_row(&self, row: usize, cols: Range<usize>, width: usize, scratch: &mut Row, out: &mut [f32]) {
        match self {
            Self::Plain(view) => match view.as_bf16() {
                Some(values) => widen_bf16(&values[row * width..][cols], out),
                None => {
                    let whole = scratch.values(width);
                    view.unpack_rows(row..row + 1, whole);
                    out.copy_from_slice(&whole[cols]);
                }
            },
            Self::Packed {
                packed,
                scales,
                bits,
                group,
            } => {
                let groups = scales.row_len();
                let scales = {
                    let read = scratch.values(groups);
                    scales.unpack_rows(row..row + 1, read);
                    read
                };
                let words_per_row = packed.row_len();
                let (words, _) = packed.bytes().as_chunks::<4>();
                let words = &words[row * words_per_row..][..words_per_row];
                let (per_word, mask, zero) = (32 / bits, (1u32 << bits) - 1, 1i32 << (bits - 1));
                for (out, col) in out.iter_mut().zip(cols) {
                    let word = u32::from_le_bytes(words[col / per_word]);
                    let code = (word >> (col % per_word * bits)) & mask;
                    *out = (code as i32 - zero) as f32 * scales[col / group];
                }
            }
            Self::Fp8 {
                bytes,
                scales,
                scale_cols,
                block,
            } => {
                let scales = &scales[row / block[0] * scale_cols..][..*scale_cols];
                let codes = &bytes.bytes()[row * width..][cols.clone()];
                for ((out, &code), col) in out.iter_mut().zip(codes).zip(cols) {
                    *out = E4M3[usize::from(code)] * scales[col / block[1]];
                }
            }
            Self::Mxfp4 { blocks, scales } => {
                let groups = width / MXFP4_GROUP;
                let scales = &scales.bytes()[row * groups..][..groups];
                let codes = &blocks.bytes()[row * width / 2..][..width / 2];
                for (out, col) in out.iter_mut().zip(cols) {
                    let code = codes[col / 2] >> (col % 2 * 4) & 15;
                    *out = FP4[usize::from(code)] * power_of_two(scales[col / MXFP4_GROUP]);
                }
            }
            Self::Transposed(_) | Self::Missing => unreachable!("unpacked elsewhere, or never computed with"),
        }
    }
}

/// A row that is unpacked whole though only a part of it is wanted.
#[derive(Default)]
struct Row(Vec<f32>);

impl Row {
    fn values(&mut self, len: usize) -> &mut [f32] {
        self.0.resize(len, 0.0);
        &mut self.0
    }
}

/// Rows of the transpose of `view` `[cols, rows]`.
fn unpack_transposed(view: &TensorView, (first, step): (usize, usize), cols: Range<usize>, out: &mut [f32]) {
    let (len, stored_len) = (cols.len(), view.row_len());
    let mut line = vec![0.0; stored_len];
    for (place, col) in cols.enumerate() {
        view.unpack_rows(col..col + 1, &mut line);
        for (row, out) in out.chunks_exact_mut(len).enumerate() {
            out[place] = line[first + row * step];
        }
    }
}

/// 2^(exponent - 127); the smallest one is subnormal.
fn power_of_two(exponent: u8) -> f32 {
    match exponent {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Values of 8-bit floats with 4 bits of exponent, 3 of mantissa, no infinities (OCP's E4M3), by their code.
static E4M3: [f32; 256] = e4m3();

const fn e4m3() -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3 & 15) as u32, (code & 7) as u32);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 / 512.0
        } else {
            f32::from_bits((exponent + 120) << 23 | mantissa << 20)
        };
        values[code] = if code >= 128 { -magnitude } else { magnitude };
        code += 1;
    }
    values
}

#[cfg(test)]
mod tests {
    use super::{E4M3, power_of_two};

    #[test]
    fn eight_bit_floats_have_the_values_of_their_specification() {
        let spot = [
            (0x00, 0.0),
            (0x01, 1.0 / 512.0),
            (0x07, 7.0 / 512.0),
            (0x08, 1.0 / 64.0),
            (0x38, 1.0),
        ];
        for (code, value) in spot
            .into_iter()
            .chain([(0x7e, 448.0), (0xb8, -1.0), (0xfe, -448.0)])
        {
            assert_eq!(E4M3[code], value, "{code:#x}");
        }
        assert!(E4M3[0x7f].is_nan() && E4M3[0xff].is_nan());
        assert!(
            E4M3[..0x7f].windows(2).all(|pair| pair[0] < pair[1]),
            "positive codes ascend"
        );
    }

    #[test]
    fn scales_are_powers_of_two() {
        for exponent in 0..255u8 {
            let expected = 2f64.powi(i32::from(exponent) - 127);
            assert_eq!(f64::from(power_of_two(exponent)), expected, "{exponent}");
        }
        assert!(power_of_two(255).is_nan());
    }
}
