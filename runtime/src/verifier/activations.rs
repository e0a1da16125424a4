//! Buffers of a forward pass.

/// Activations of one forward pass. They grow to the longest pass and stay allocated.
#[derive(Default)]
pub(super) struct Activations {
    /// `[tokens, H]`.
    pub(super) residual: Vec<f32>,
    /// What enters attention or MLP, `[tokens, H]`.
    pub(super) normed: Vec<f32>,
    /// Scratch of norms.
    pub(super) rstd: Vec<f32>,
    /// Rotated queries.
    pub(super) q: Vec<f32>,
    /// Rotated keys.
    pub(super) k: Vec<f32>,
    /// Values.
    pub(super) v: Vec<f32>,
    /// What a projection gives before it is normed.
    pub(super) raw: Vec<f32>,
    /// A normed latent.
    pub(super) latent: Vec<f32>,
    /// Result of the attention.
    pub(super) attended: Vec<f32>,
    /// Scratch of the attention.
    pub(super) lse: Vec<f32>,
    /// Inner products of an MLP, and what they come to.
    pub(super) mlp: MlpBuffers,
    /// What attention or MLP adds to the residual stream, where it is not added at once.
    pub(super) update: Vec<f32>,
    /// Residual stream of the tokens whose logits are wanted.
    pub(super) head_input: Vec<f32>,
}

/// Buffers of an MLP.
#[derive(Default)]
pub(super) struct MlpBuffers {
    pub(super) gate: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) gated: Vec<f32>,
    /// Router's logits, `[tokens, experts]`.
    pub(super) scores: Vec<f32>,
    /// Experts of each token, `[tokens, top]`.
    pub(super) chosen: Vec<u32>,
    /// Their weights.
    pub(super) weights: Vec<f32>,
    /// Tokens of one expert, and what it makes of them.
    pub(super) input: Vec<f32>,
    pub(super) output: Vec<f32>,
}

/// The first `len` elements of a buffer that grows as needed.
pub(super) fn take<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
