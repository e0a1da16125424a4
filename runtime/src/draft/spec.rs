//! The shape of a draft and the switches of its forward pass.

use serde::{Deserialize, Serialize};

use super::error::DraftError;
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

impl DraftSpec {
    /// Whether the sizes and switches fit together.
    ///
    /// # Errors
    /// The first contradiction, in words.
    pub fn check(&self) -> Result<(), DraftError> {
        let wrong = |text: String| Err(DraftError::Spec(text));
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("vocab_size", self.vocab_size),
            ("draft_vocab_size", self.draft_vocab_size),
            ("number of aux layers", self.aux_layers),
        ];
        for (name, size) in sizes {
            if size == 0 || size > u32::MAX as usize {
                return wrong(format!("{name} is {size}; it must be between 1 and 2^32"));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return wrong(format!(
                "{} query heads cannot share {} key heads evenly",
                self.heads, self.kv_heads
            ));
        }
        if self.draft_vocab_size > self.vocab_size {
            let (draft, all) = (self.draft_vocab_size, self.vocab_size);
            return wrong(format!(
                "draft_vocab_size {draft} is larger than vocab_size {all}"
            ));
        }
        if self.rope.dim == 0 || !self.rope.dim.is_multiple_of(2) || self.rope.dim > self.head_dim {
            let (dim, head) = (self.rope.dim, self.head_dim);
            return wrong(format!(
                "rope turns {dim} dimensions of a head of {head}; it must be an even part of them"
            ));
        }
        if self.norm_before_fc && self.fc_norm {
            return wrong("norm_before_fc and fc_norm exclude each other; switch one off".to_owned());
        }
        if self.sliding_window == Some(0) {
            return wrong(
                "sliding_window is 0; it must be at least 1, or absent for full attention".to_owned(),
            );
        }
        Ok(())
    }
}
