//! A weight matrix in the form its files hold.
//!
//! STORED-1: weights stay packed in memory, on the host and on a device; they become floats tile by tile, inside a product,
//! and each element has the value that the form defines for it, bit for bit.

use std::ops::Range;

use half::bf16;

use crate::device::{Encoded, EncodedForm, FloatKind, HostMatrix, Plane, RowSteps, widen_bf16};
use crate::digest::{Digest, Digester};
use crate::weights::{BlockFormat, Dtype, Encoding, RowOrder, TensorView};

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

    /// A digest of what decides its values, if it is plain floats.
    pub(super) fn identity(&self) -> Option<Digest> {
        let (view, form) = match self {
            Self::Plain(view) => (view, b"plain".as_slice()),
            Self::Transposed(view) => (view, b"transposed".as_slice()),
            _ => return None,
        };
        let mut digest = Digester::new();
        digest.part(form);
        digest.part(view.identity().to_string().as_bytes());
        Some(digest.finish())
    }

    /// What some rows and columns of the matrix `[any, width]` are stored as, if it is a form that devices know.
    pub(super) fn encoded(&self, rows: RowSteps, cols: Range<usize>, width: usize) -> Option<Encoded<'_>> {
        match self {
            Self::Plain(view) => match view.encoding() {
                Encoding::Block(format) => encoded_blocks(view, format, rows, cols, width),
                _ => {
                    let kind = float_kind(view)?;
                    let bytes = kind.bytes();
                    let values = view.plane(rows, (cols.start * bytes, cols.len() * bytes))?;
                    Some(whole_rows(
                        EncodedForm::Floats { values, kind },
                        cols.clone(),
                        cols.start,
                    ))
                }
            },
            Self::Packed {
                packed,
                scales,
                bits,
                group,
            } => encoded_integers((packed, scales), (*bits, *group), rows, cols, width),
            Self::Fp8 {
                bytes,
                scales,
                scale_cols,
                block,
            } => encoded_fp8(bytes, (scales, *scale_cols), *block, rows, cols),
            Self::Mxfp4 { blocks, scales } => {
                let start = cols.start / MXFP4_GROUP * MXFP4_GROUP;
                let taken = start..cols.end.next_multiple_of(MXFP4_GROUP);
                let form = EncodedForm::Mxfp4 {
                    blocks: blocks.plane(rows, (start / 2, taken.len() / 2))?,
                    scales: scales.plane(rows, (start / MXFP4_GROUP, taken.len() / MXFP4_GROUP))?,
                };
                Some(whole_rows(form, taken, cols.start))
            }
            Self::Transposed(_) | Self::Missing => None,
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

/// The columns `taken` of the part's own rows; the part begins at column `start`.
fn whole_rows(form: EncodedForm<'_>, taken: Range<usize>, start: usize) -> Encoded<'_> {
    Encoded {
        form,
        width: taken.len(),
        first_row: 0,
        step: 1,
        first_col: start - taken.start,
    }
}

fn float_kind(view: &TensorView) -> Option<FloatKind> {
    match view.dtype()? {
        Dtype::F32 => Some(FloatKind::F32),
        Dtype::BF16 => Some(FloatKind::Bf16),
        Dtype::F16 => Some(FloatKind::F16),
        _ => None,
    }
}

fn encoded_blocks(
    view: &TensorView,
    format: BlockFormat,
    rows: RowSteps,
    cols: Range<usize>,
    width: usize,
) -> Option<Encoded<'_>> {
    let elements = format.elements();
    // Else blocks span rows.
    if !width.is_multiple_of(elements) {
        return None;
    }
    let taken = cols.start / elements * elements..cols.end.next_multiple_of(elements);
    let bytes = |cols: usize| cols / elements * format.bytes();
    let blocks = view.plane(rows, (bytes(taken.start), bytes(taken.len())))?;
    Some(whole_rows(
        EncodedForm::Blocks { blocks, format },
        taken,
        cols.start,
    ))
}

fn encoded_integers<'a>(
    (words, scales): (&'a TensorView, &'a TensorView),
    (bits, group): (usize, usize),
    rows: RowSteps,
    cols: Range<usize>,
    width: usize,
) -> Option<Encoded<'a>> {
    if bits != 4 && bits != 8 {
        return None;
    }
    let per_word = 32 / bits;
    // With one scale for all columns only words have to stay whole.
    let unit = if group >= width {
        per_word
    } else {
        least_common_multiple(group, per_word)
    };
    let taken = cols.start / unit * unit..cols.end;
    let (first_word, first_group) = (taken.start / per_word, taken.start / group);
    let (word_bytes, scale_kind) = (size_of::<u32>(), float_kind(scales)?);
    let groups = taken.end.div_ceil(group) - first_group;
    let word_count = taken.end.div_ceil(per_word) - first_word;
    let form = EncodedForm::Integers {
        words: words.plane(rows, (first_word * word_bytes, word_count * word_bytes))?,
        scales: scales.plane(
            rows,
            (first_group * scale_kind.bytes(), groups * scale_kind.bytes()),
        )?,
        scale_kind,
        bits,
        group,
    };
    Some(whole_rows(form, taken, cols.start))
}

fn encoded_fp8<'a>(
    codes: &'a TensorView,
    (scales, scale_cols): (&'a [f32], usize),
    [block_rows, block_cols]: [usize; 2],
    rows: RowSteps,
    cols: Range<usize>,
) -> Option<Encoded<'a>> {
    let scale_cols = scale_cols.max(1);
    let unit = if scale_cols == 1 { 1 } else { block_cols };
    let taken = cols.start / unit * unit..cols.end;
    let scale_start = if scale_cols == 1 {
        0
    } else {
        taken.start / block_cols
    };
    let scale_end = if scale_cols == 1 {
        1
    } else {
        taken.end.div_ceil(block_cols)
    };
    let end = rows.first + rows.count.saturating_sub(1) * rows.step + usize::from(rows.count > 0);
    // Rows of codes, rows of scales, and where the part is in them.
    let (code_rows, scale_rows, first_row, step) = if scales.len() == scale_cols {
        let all = RowSteps {
            first: 0,
            step: 1,
            count: 1,
        };
        (rows, all, 0, 1)
    } else if block_rows == 1 {
        (rows, rows, 0, 1)
    } else {
        let first_block = rows.first / block_rows;
        let first = first_block * block_rows;
        let between = |first, end: usize| RowSteps {
            first,
            step: 1,
            count: end.max(first) - first,
        };
        (
            between(first, end),
            between(first_block, end.div_ceil(block_rows)),
            rows.first - first,
            rows.step,
        )
    };
    let bytes = size_of::<f32>();
    let form = EncodedForm::Fp8 {
        codes: codes.plane(code_rows, (taken.start, taken.len()))?,
        scales: Plane::new(
            bytemuck::cast_slice(scales),
            scale_cols * bytes,
            RowOrder::Straight,
            scale_rows,
            (scale_start * bytes, (scale_end - scale_start) * bytes),
        ),
        block: [block_rows, block_cols],
    };
    Some(Encoded {
        first_row,
        step,
        ..whole_rows(form, taken, cols.start)
    })
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
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
