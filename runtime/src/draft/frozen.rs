//! Tensors of the verifier that the draft reads and never trains.

use std::sync::Arc;

use super::error::DraftError;
use super::operands::Operand;
use super::spec::DraftSpec;
use crate::device::{Buffer, Device, Matrix};

/// The verifier's embedding, final norm and head rows, and the draft's own frozen head; all f32, row-major.
#[derive(Clone, Debug)]
pub struct FrozenWeights {
    /// Embedding, `[vocab_size, hidden]`.
    pub embed: Arc<[f32]>,
    /// Rows of the verifier's head that the draft's vocabulary takes, `[draft_vocab_size, hidden]`.
    pub verifier_head: Arc<[f32]>,
    /// Weight of the verifier's final RMS norm, `[hidden]`; already 1 + w for verifiers that scale that way.
    pub verifier_norm: Arc<[f32]>,
    /// Epsilon of that norm.
    pub verifier_norm_eps: f32,
    /// The draft's head, `[draft_vocab_size, hidden]`. The same allocation as `verifier_head` makes the loss cheaper.
    pub lm_head: Arc<[f32]>,
}

impl FrozenWeights {
    /// Whether one product gives the logits of targets and drafts.
    pub fn heads_are_shared(&self) -> bool {
        Arc::ptr_eq(&self.verifier_head, &self.lm_head)
    }

    /// Checks the sizes against the draft's, and shares the two heads when they are equal.
    ///
    /// # Errors
    /// The first tensor of the wrong size.
    pub(super) fn fit(&mut self, spec: &DraftSpec) -> Result<(), DraftError> {
        let head = spec.draft_vocab_size * spec.hidden_size;
        let sizes = [
            (
                "embed_tokens.weight",
                self.embed.len(),
                spec.vocab_size * spec.hidden_size,
            ),
            ("verifier_lm_head.weight", self.verifier_head.len(), head),
            ("verifier_norm.weight", self.verifier_norm.len(), spec.hidden_size),
            ("lm_head.weight", self.lm_head.len(), head),
        ];
        for (tensor, found, expected) in sizes {
            if found != expected {
                return Err(DraftError::Frozen {
                    tensor,
                    found,
                    expected,
                });
            }
        }
        if !self.heads_are_shared() && self.verifier_head == self.lm_head {
            self.lm_head = Arc::clone(&self.verifier_head);
        }
        Ok(())
    }
}

/// [`FrozenWeights`] where a device computes with them.
#[derive(Debug)]
pub(super) struct PlacedWeights {
    pub(super) embed: Buffer,
    /// None if it is the draft's own head.
    own_verifier_head: Option<Buffer>,
    pub(super) verifier_norm: Buffer,
    pub(super) verifier_norm_eps: f32,
    pub(super) lm_head: Buffer,
    /// The heads, for products.
    pub(super) own_head: Operand,
    pub(super) head: Operand,
}

impl PlacedWeights {
    /// Weights that fit.
    pub(super) fn new(weights: FrozenWeights, spec: &DraftSpec, device: &impl Device) -> Self {
        let place = |weights: Arc<[f32]>, name| device.place(Buffer::from(weights), name);
        let own_verifier_head = (!weights.heads_are_shared())
            .then(|| place(Arc::clone(&weights.verifier_head), "verifier_lm_head.weight"));
        let lm_head = place(weights.lm_head, "lm_head.weight");
        let matrix = |head| Matrix::new(head, spec.draft_vocab_size, spec.hidden_size);
        let (mut own_head, mut head) = (Operand::default(), Operand::default());
        if device.prepares() {
            head.prepare(device, matrix(lm_head.floats()));
            if let Some(own) = &own_verifier_head {
                own_head.prepare_forward(device, matrix(own.floats()));
            }
        }
        Self {
            own_verifier_head,
            embed: place(weights.embed, "embed_tokens.weight"),
            verifier_norm: place(weights.verifier_norm, "verifier_norm.weight"),
            verifier_norm_eps: weights.verifier_norm_eps,
            lm_head,
            own_head,
            head,
        }
    }

    /// Whether one product gives the logits of targets and drafts.
    pub(super) fn heads_are_shared(&self) -> bool {
        self.own_verifier_head.is_none()
    }

    /// The head of the targets.
    pub(super) fn verifier_head(&self) -> &Buffer {
        self.own_verifier_head.as_ref().unwrap_or(&self.lm_head)
    }
}
