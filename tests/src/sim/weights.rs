//! Fake arithmetic with the one property that matters: weights tell exactly which rows are in them, and how often.
//!
//! A row is a number mixed from its step, its lane and its units. Its gradient is a few small whole numbers made of that
//! number, so sums are exact; weights are a hash chain over the reduced gradients and the learning rates.

use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Step, Unit};

use super::dice::mix;

/// Length of a fake gradient: more than there are ever members, so that each has a segment to sum.
pub const ELEMENTS: usize = 8;

/// Weights after some steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weights {
    /// Steps that are in them.
    pub step: Step,
    /// The chain.
    pub bits: u64,
}

impl Weights {
    /// Where every run starts.
    pub const INITIAL: Self = Self {
        step: Step(0),
        bits: 0x5eed,
    };

    /// What a replica holds that has no state, or a part of one.
    pub const VOID: Self = Self {
        step: Step(0),
        bits: 0xdead,
    };

    /// What a replica says about them.
    pub fn digest(self) -> Digest {
        Digest::of(&self.bits.to_le_bytes())
    }

    /// After one more step.
    pub fn after(self, gradient: &[f32], learning_rate: f64) -> Self {
        let mut bits = mix(self.bits ^ learning_rate.to_bits());
        for value in gradient {
            bits = mix(bits ^ u64::from(value.to_bits()));
        }
        Self {
            step: self.step.next(),
            bits,
        }
    }
}

/// What a row is made of, as one number.
pub fn row_content(step: Step, lane: u16, units: &[Unit]) -> u64 {
    let mut content = mix(1 << 62 | step.0 << 16 | u64::from(lane));
    for unit in units {
        content = mix(content ^ (unit.sample.0 << 8 | u64::from(unit.pass)));
    }
    content
}

/// The gradient of a row.
pub fn gradient_of(content: u64) -> [f32; ELEMENTS] {
    let mut bits = content;
    std::array::from_fn(|_| {
        bits = mix(bits);
        (bits & 0xfff) as f32
    })
}

/// The mean over the rows of a step, in the order of their lanes.
pub fn mean(contents: &[u64]) -> [f32; ELEMENTS] {
    let gradients: Vec<_> = contents.iter().map(|&content| gradient_of(content)).collect();
    sum(&gradients)
}

/// The mean of gradients, added in their order.
pub fn sum(gradients: &[[f32; ELEMENTS]]) -> [f32; ELEMENTS] {
    let mut sum = [0.0; ELEMENTS];
    for gradient in gradients {
        for (sum, value) in sum.iter_mut().zip(gradient) {
            *sum += value;
        }
    }
    let scale = 1.0 / gradients.len() as f32;
    sum.map(|value| value * scale)
}
