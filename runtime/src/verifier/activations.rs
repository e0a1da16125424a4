//! Buffers of a forward pass.

use crate::device::{Buffer, Device, FloatsMut};

/// Activations of one forward pass. They grow to the longest pass and stay allocated.
#[derive(Default)]
pub(super) struct Activations {
    /// `[tokens, H]`.
    pub(super) residual: Buffer,
    /// What enters attention or MLP, `[tokens, H]`.
    pub(super) normed: Buffer,
    /// Scratch of norms.
    pub(super) rstd: Buffer,
    /// Rotated queries.
    pub(super) q: Buffer,
    /// Rotated keys.
    pub(super) k: Buffer,
    /// Values.
    pub(super) v: Buffer,
    /// What a projection gives before it is normed.
    pub(super) raw: Buffer,
    /// A normed latent.
    pub(super) latent: Buffer,
    /// Result of the attention.
    pub(super) attended: Buffer,
    /// Scratch of the attention.
    pub(super) lse: Buffer,
    /// Inner products of an MLP, and what they come to.
    pub(super) mlp: MlpBuffers,
    /// What attention or MLP adds to the residual stream, where it is not added at once.
    pub(super) update: Buffer,
    /// Residual stream of the tokens whose logits are wanted.
    pub(super) head_input: Buffer,
}

/// Buffers of an MLP.
#[derive(Default)]
pub(super) struct MlpBuffers {
    pub(super) gate: Buffer,
    pub(super) up: Buffer,
    pub(super) gated: Buffer,
    /// Router's logits, `[tokens, experts]`.
    pub(super) scores: Buffer,
    /// Experts of each token, `[tokens, top]`.
    pub(super) chosen: Vec<u32>,
    /// Their weights.
    pub(super) weights: Vec<f32>,
    /// Tokens of one expert, and what it makes of them.
    pub(super) input: Buffer,
    pub(super) output: Buffer,
}

/// The first `len` elements of a buffer that grows as needed.
pub(super) fn take<'a>(
    device: &impl Device,
    buffer: &'a mut Buffer,
    name: &'static str,
    len: usize,
) -> FloatsMut<'a> {
    if buffer.len() < len {
        device.fit(buffer, name, len);
    }
    buffer.part_mut(0..len)
}

/// The first `len` elements of a vector that grows as needed.
pub(super) fn take_host<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
