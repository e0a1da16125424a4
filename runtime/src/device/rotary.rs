//! Tables of the cosines and sines of a rotary embedding.

use super::{Buffer, Device, Floats};
use crate::rope::Rope;

/// Which way a vector is turned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// By the position's angle: the forward pass.
    Forward,
    /// Back by it: the backward pass of a rotation.
    Backward,
}

/// Which dimensions of a head turn together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pairing {
    /// Dimension `i` with dimension `i + dim / 2`: most models.
    #[default]
    Halves,
    /// Dimension `2i` with dimension `2i + 1`: DeepSeek.
    Neighbours,
}

/// Cosines and sines of all angles of a rotary embedding, `[positions, dim / 2]` each.
#[derive(Debug)]
pub struct RotaryTable {
    half: usize,
    offset: usize,
    pairing: Pairing,
    cos: Buffer,
    sin: Buffer,
}

impl RotaryTable {
    /// The angles of positions `0..positions`, computed in f64, for the first `dim` dimensions of each head.
    pub fn new(rope: &Rope, positions: usize) -> Self {
        let frequencies = rope.inverse_frequencies();
        let (half, magnitude) = (frequencies.len(), rope.magnitude());
        let (mut cos, mut sin) = (
            Vec::with_capacity(positions * half),
            Vec::with_capacity(positions * half),
        );
        for position in 0..positions {
            for frequency in &frequencies {
                let (s, c) = (position as f64 * frequency).sin_cos();
                cos.push((c * magnitude) as f32);
                sin.push((s * magnitude) as f32);
            }
        }
        Self {
            half,
            offset: 0,
            pairing: Pairing::Halves,
            cos: cos.into(),
            sin: sin.into(),
        }
    }

    /// The same angles for the dimensions from `offset` on, paired so.
    pub fn placed(self, offset: usize, pairing: Pairing) -> Self {
        Self {
            offset,
            pairing,
            ..self
        }
    }

    /// The same table where `device` computes.
    #[must_use]
    pub fn on(self, device: &impl Device) -> Self {
        Self {
            cos: device.place(self.cos, "rotary tables"),
            sin: device.place(self.sin, "rotary tables"),
            ..self
        }
    }

    /// The first rotated dimension of a head.
    pub fn offset(&self) -> usize {
        self.offset
    }

    /// Which dimensions turn together.
    pub fn pairing(&self) -> Pairing {
        self.pairing
    }

    /// Number of positions in the table.
    pub fn positions(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(usize::MAX)
    }

    /// Rotated pairs of a head.
    pub fn half(&self) -> usize {
        self.half
    }

    /// All cosines and all sines, `[positions, dim / 2]` each.
    pub fn angles(&self) -> (Floats<'_>, Floats<'_>) {
        (self.cos.floats(), self.sin.floats())
    }

    /// Cosines and sines of one position, `[dim / 2]` each.
    ///
    /// # Panics
    /// If the table is shorter, or lies on a GPU.
    #[track_caller]
    pub(crate) fn at(&self, position: u32) -> (&[f32], &[f32]) {
        let start = position as usize * self.half;
        (
            &self.cos.floats().host()[start..start + self.half],
            &self.sin.floats().host()[start..start + self.half],
        )
    }
}
