//! Stores floats as llama.cpp does: rounds to the nearest integers under each format's scales.
//!
//! Its own quantisers search for better scales; the layouts are the same.

use half::{bf16, f16};

/// How a tensor is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(non_camel_case_types, reason = "the names of the formats")]
pub(crate) enum Storage {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4_K,
    Q6_K,
}

impl Storage {
    /// The type's number in the file.
    pub(crate) fn number(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 30,
            Self::Q4_0 => 2,
            Self::Q4_1 => 3,
            Self::Q8_0 => 8,
            Self::Q4_K => 12,
            Self::Q6_K => 14,
        }
    }

    /// Itself, or what llama.cpp falls back to where rows are no multiple of the block.
    pub(crate) fn for_rows_of(self, elements: usize) -> Self {
        match self {
            Self::Q4_K | Self::Q6_K if elements.is_multiple_of(256) => self,
            Self::F32 | Self::F16 | Self::Bf16 => self,
            Self::Q4_0 | Self::Q4_1 | Self::Q8_0 if elements.is_multiple_of(32) => self,
            _ if elements.is_multiple_of(32) => Self::Q8_0,
            _ => Self::F16,
        }
    }

    /// The stored bytes.
    pub(crate) fn store(self, values: &[f32]) -> Vec<u8> {
        let blocks = |elements: usize, block: fn(&[f32]) -> Vec<u8>| {
            values.chunks_exact(elements).flat_map(block).collect()
        };
        match self {
            Self::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            Self::F16 => values
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect(),
            Self::Bf16 => values
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
            Self::Q4_0 => blocks(32, q4_0),
            Self::Q4_1 => blocks(32, q4_1),
            Self::Q8_0 => blocks(32, q8_0),
            Self::Q4_K => blocks(256, q4_k),
            Self::Q6_K => blocks(256, q6_k),
        }
    }
}

/// A scale as it will be read back.
fn scale(value: f32) -> (f32, [u8; 2]) {
    let half = f16::from_f32(value);
    (half.to_f32(), half.to_le_bytes())
}

/// How many steps a value is, at least `low` and at most `high`.
fn steps(value: f32, step: f32, low: i32, high: i32) -> i32 {
    if step == 0.0 {
        return 0.clamp(low, high);
    }
    ((value / step).round() as i32).clamp(low, high)
}

fn extremes(values: &[f32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &value| {
            (low.min(value), high.max(value))
        })
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// Elements 0 to 15 in the low and 16 to 31 in the high halves of 16 bytes.
fn nibbles(values: &[i32]) -> impl Iterator<Item = u8> {
    (0..16).map(|i| (values[i] | values[i + 16] << 4) as u8)
}

fn q8_0(values: &[f32]) -> Vec<u8> {
    let (step, bytes) = scale(largest(values) / 127.0);
    let integers = values.iter().map(|&value| steps(value, step, -127, 127) as u8);
    bytes.into_iter().chain(integers).collect()
}

fn q4_0(values: &[f32]) -> Vec<u8> {
    // The value furthest from zero becomes the integer -8, which has no opposite.
    let furthest = values.iter().fold(
        0.0f32,
        |far, &value| if value.abs() > far.abs() { value } else { far },
    );
    let (step, bytes) = scale(furthest / -8.0);
    let integers: Vec<_> = values
        .iter()
        .map(|&value| steps(value, step, -8, 7) + 8)
        .collect();
    bytes.into_iter().chain(nibbles(&integers)).collect()
}

fn q4_1(values: &[f32]) -> Vec<u8> {
    let (low, high) = extremes(values);
    let (step, step_bytes) = scale((high - low) / 15.0);
    let (low, low_bytes) = scale(low);
    let integers: Vec<_> = values
        .iter()
        .map(|&value| steps(value - low, step, 0, 15))
        .collect();
    step_bytes
        .into_iter()
        .chain(low_bytes)
        .chain(nibbles(&integers))
        .collect()
}

fn q4_k(values: &[f32]) -> Vec<u8> {
    let groups: Vec<(f32, f32)> = values
        .chunks_exact(32)
        .map(|group| {
            let (low, high) = extremes(group);
            let offset = -low.min(0.0);
            ((high + offset) / 15.0, offset)
        })
        .collect();
    let most = |of: fn(&(f32, f32)) -> f32| groups.iter().map(of).fold(0.0, f32::max);
    let (step, step_bytes) = scale(most(|group| group.0) / 63.0);
    let (offset_step, offset_bytes) = scale(most(|group| group.1) / 63.0);
    let mut scales = [0u8; 12];
    let mut packed = [0u8; 128];
    for (index, &(group_step, group_offset)) in groups.iter().enumerate() {
        let factor = steps(group_step, step, 0, 63) as u8;
        let offset = steps(group_offset, offset_step, 0, 63) as u8;
        if index < 4 {
            scales[index] |= factor;
            scales[index + 4] |= offset;
        } else {
            scales[index + 4] = factor & 15 | (offset & 15) << 4;
            scales[index - 4] |= factor >> 4 << 6;
            scales[index] |= offset >> 4 << 6;
        }
        let (step, offset) = (step * f32::from(factor), offset_step * f32::from(offset));
        for (at, &value) in values[index * 32..][..32].iter().enumerate() {
            let integer = steps(value + offset, step, 0, 15) as u8;
            packed[index / 2 * 32 + at] |= integer << (index % 2 * 4);
        }
    }
    [&step_bytes[..], &offset_bytes, &scales, &packed].concat()
}

fn q6_k(values: &[f32]) -> Vec<u8> {
    let groups: Vec<f32> = values
        .chunks_exact(16)
        .map(|group| largest(group) / 31.0)
        .collect();
    let (step, step_bytes) = scale(largest(&groups) / 127.0);
    let scales: Vec<i32> = groups.iter().map(|&group| steps(group, step, 0, 127)).collect();
    let (mut low, mut high) = ([0u8; 128], [0u8; 64]);
    for (at, &value) in values.iter().enumerate() {
        let integer = (steps(value, step * scales[at / 16] as f32, -32, 31) + 32) as u8;
        // Halves of 128 elements, each four runs of 32.
        let (half, run, column) = (at / 128, at % 128 / 32, at % 32);
        low[half * 64 + run % 2 * 32 + column] |= (integer & 15) << (run / 2 * 4);
        high[half * 32 + column] |= integer >> 4 << (run * 2);
    }
    let scales: Vec<u8> = scales.into_iter().map(|scale| scale as u8).collect();
    [&low[..], &high, &scales, &step_bytes].concat()
}
