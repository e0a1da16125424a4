//! Weights that are stored in blocks of a few bits per element, as llama.cpp defines them.
//!
//! A block holds the integers of 32 or 256 consecutive elements of a row and the scales that turn them into floats. The
//! arithmetic follows `ggml-quants.c` of ggml operation by operation, so the f32 values have the same bits.

use half::f16;

/// Elements of the longest block.
const MAX_BLOCK: usize = 256;

/// How the elements of a block are stored; the names are ggml's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "the names of the formats")]
pub enum BlockFormat {
    /// 4 bits around 8, one scale per 32.
    Q4_0,
    /// 4 bits, scale and minimum per 32.
    Q4_1,
    /// 5 bits around 16, one scale per 32.
    Q5_0,
    /// 5 bits, scale and minimum per 32.
    Q5_1,
    /// 8 bits, one scale per 32.
    Q8_0,
    /// 2 bits, scales and minima of 4 bits per 16.
    Q2_K,
    /// 3 bits around 4, scales of 6 bits per 16.
    Q3_K,
    /// 4 bits, scales and minima of 6 bits per 32.
    Q4_K,
    /// 5 bits, scales and minima of 6 bits per 32.
    Q5_K,
    /// 6 bits around 32, scales of 8 bits per 16.
    Q6_K,
}

impl BlockFormat {
    /// Elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K => MAX_BLOCK,
        }
    }

    /// Bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// Unpacks the elements from `start` on until `out` is full; `blocks` are those of a whole tensor.
    ///
    /// # Panics
    /// If the blocks hold fewer elements.
    pub(super) fn unpack(self, blocks: &[u8], start: usize, out: &mut [f32]) {
        let unpack = self.unpacker();
        let (elements, bytes) = (self.elements(), self.bytes());
        let mut blocks = blocks[start / elements * bytes..].chunks_exact(bytes);
        let mut next = || {
            blocks
                .next()
                .expect("the tensor has as many blocks as its shape says")
        };
        let mut rest = out;
        let skipped = start % elements;
        if skipped > 0 && !rest.is_empty() {
            let mut whole = [0.0; MAX_BLOCK];
            unpack(next(), &mut whole[..elements]);
            let (head, tail) = rest.split_at_mut(rest.len().min(elements - skipped));
            head.copy_from_slice(&whole[skipped..skipped + head.len()]);
            rest = tail;
        }
        let mut outs = rest.chunks_exact_mut(elements);
        for out in &mut outs {
            unpack(next(), out);
        }
        let tail = outs.into_remainder();
        if !tail.is_empty() {
            let mut whole = [0.0; MAX_BLOCK];
            unpack(next(), &mut whole[..elements]);
            tail.copy_from_slice(&whole[..tail.len()]);
        }
    }

    /// The function that unpacks one block.
    fn unpacker(self) -> fn(&[u8], &mut [f32]) {
        match self {
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q5_0 => q5_0,
            Self::Q5_1 => q5_1,
            Self::Q8_0 => q8_0,
            Self::Q2_K => q2_k,
            Self::Q3_K => q3_k,
            Self::Q4_K => q4_k,
            Self::Q5_K => q5_k,
            Self::Q6_K => q6_k,
        }
    }
}

/// The half-precision float at `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low and the high four bits of 16 bytes are elements 0 to 15 and 16 to 31.
fn nibbles(packed: &[u8], out: &mut [f32], to_f32: impl Fn(usize, u8) -> f32) {
    let (low, high) = out.split_at_mut(16);
    for (index, ((low, high), byte)) in low.iter_mut().zip(high).zip(packed).enumerate() {
        *low = to_f32(index, byte & 0xf);
        *high = to_f32(index + 16, byte >> 4);
    }
}

fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    nibbles(&block[2..18], out, |_, q| f32::from(q as i8 - 8) * scale);
}

fn q4_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    nibbles(&block[4..20], out, |_, q| f32::from(q) * scale + minimum);
}

/// Bit `index` of four bytes, as the fifth bit of an element.
fn fifth(bits: u32, index: usize) -> u8 {
    ((bits >> index & 1) << 4) as u8
}

fn q5_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    let bits = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    nibbles(&block[6..22], out, |index, q| {
        f32::from((q | fifth(bits, index)) as i8 - 16) * scale
    });
}

fn q5_1(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    let bits = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    nibbles(&block[8..24], out, |index, q| {
        f32::from(q | fifth(bits, index)) * scale + minimum
    });
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..34]) {
        *out = f32::from(q as i8) * scale;
    }
}

fn q2_k(block: &[u8], out: &mut [f32]) {
    let (scales, packed) = (&block[..16], &block[16..80]);
    let (scale, minimum) = (half(block, 80), half(block, 82));
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let factor = scale * f32::from(scales[group] & 0xf);
        let offset = minimum * f32::from(scales[group] >> 4);
        let (bytes, shift) = two_bits(packed, group);
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = factor * f32::from(byte >> shift & 3) - offset;
        }
    }
}

/// Bytes and shift of the two low bits of a group of 16 elements: 32 bytes hold four runs of 32 elements.
fn two_bits(packed: &[u8], group: usize) -> (&[u8], usize) {
    let start = group / 8 * 32 + group % 2 * 16;
    (&packed[start..start + 16], group % 8 / 2 * 2)
}

fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, packed, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let scale = half(block, 108);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        // Four low bits of 16 scales in 8 bytes, then their two high bits in 4 bytes.
        let low = scales[group % 8] >> (group / 8 * 4) & 0xf;
        let top = scales[8 + group % 4] >> (group / 4 * 2) & 3;
        let factor = scale * f32::from((low | top << 4) as i8 - 32);
        let (bytes, shift) = two_bits(packed, group);
        let high = &high[group % 2 * 16..][..16];
        for ((out, byte), high) in out.iter_mut().zip(bytes).zip(high) {
            let third = high >> (group / 2) & 1;
            *out = factor * f32::from((byte >> shift & 3 | third << 2) as i8 - 4);
        }
    }
}

/// Scale and minimum of one of eight groups of 32 elements, 6 bits each in 12 bytes.
fn scale_and_minimum(packed: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (packed[group] & 63, packed[group + 4] & 63)
    } else {
        (
            packed[group + 4] & 0xf | packed[group - 4] >> 6 << 4,
            packed[group + 4] >> 4 | packed[group] >> 6 << 4,
        )
    };
    (f32::from(scale), f32::from(minimum))
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    let (scales, packed) = (&block[4..16], &block[16..144]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (factor, offset) = scale_and_minimum(scales, group);
        let (factor, offset) = (scale * factor, minimum * offset);
        let (bytes, shift) = (&packed[group / 2 * 32..][..32], group % 2 * 4);
        for (out, byte) in out.iter_mut().zip(bytes) {
            *out = factor * f32::from(byte >> shift & 0xf) - offset;
        }
    }
}

fn q5_k(block: &[u8], out: &mut [f32]) {
    let (scale, minimum) = (half(block, 0), half(block, 2));
    let (scales, high, packed) = (&block[4..16], &block[16..48], &block[48..176]);
    for (group, out) in out.chunks_exact_mut(32).enumerate() {
        let (factor, offset) = scale_and_minimum(scales, group);
        let (factor, offset) = (scale * factor, minimum * offset);
        let (bytes, shift) = (&packed[group / 2 * 32..][..32], group % 2 * 4);
        for ((out, byte), high) in out.iter_mut().zip(bytes).zip(high) {
            let fifth = high >> group & 1;
            *out = factor * f32::from(byte >> shift & 0xf | fifth << 4) - offset;
        }
    }
}

fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let scale = half(block, 208);
    for (group, out) in out.chunks_exact_mut(16).enumerate() {
        let factor = scale * f32::from(scales[group] as i8);
        // Halves of 128 elements; in each, 64 bytes of low bits are two runs of 64 and 32 bytes of high bits four of 32.
        let (half, run, side) = (group / 8, group % 8 / 2, group % 2);
        let low = &low[half * 64 + run % 2 * 32 + side * 16..][..16];
        let high = &high[half * 32 + side * 16..][..16];
        for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
            let q = low >> (run / 2 * 4) & 0xf | (high >> (run * 2) & 3) << 4;
            *out = factor * f32::from(q as i8 - 32);
        }
    }
}
