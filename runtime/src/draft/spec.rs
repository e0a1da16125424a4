//! The shape of a draft and the switches of its forward pass.

use serde::{Deserialize, Serialize};

use crate::rope::Rope;

/// The decoder layer a draft is built from; vLLM loads these two.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LayerKind {
    /// Plain Llama attention.
    Llama,
    /// Attention with RMS-normalised queries and keys.
    Qwen3,
}

/// Everything that decides a draft's tensors and its forward pass (reference: speculators 0.9, `eagle3`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DraftSpec {
    /// Decoder layer.
    pub layer: LayerKind,
    /// Width H of the residual stream; equal to the verifier's.
    pub hidden_size: usize,
    /// Width I of the MLP.
    pub intermediate_size: usize,
    /// Query heads A.
    pub heads: usize,
    /// Key and value heads K.
    pub kv_heads: usize,
    /// Width D of a head.
    pub head_dim: usize,
    /// Vocabulary V of the verifier; rows of the embedding.
    pub vocab_size: usize,
    /// Vocabulary Vd of the draft; rows of `lm_head`.
    pub draft_vocab_size: usize,
    /// Captured aux layers k; `fc` takes k·H inputs.
    pub aux_layers: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// Keys farther back than this are hidden; `None` is full attention.
    pub sliding_window: Option<usize>,
    /// The residual is the *normalised* hidden state.
    pub norm_before_residual: bool,
    /// One RMS norm of width k·H before `fc`.
    pub norm_before_fc: bool,
    /// k RMS norms of width H before `fc`; excludes `norm_before_fc`.
    pub fc_norm: bool,
    /// The state fed to the next TTT step is the post-norm one.
    pub norm_output: bool,
}
