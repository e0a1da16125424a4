//! The parts of a verifier that a draft computes with but never trains.

use std::path::Path;

use super::{VerifierConfig, VerifierError, VerifierFiles};

/// Embedding, some rows of the head, and final norm of a verifier, in f32; a draft rank needs no more of it.
#[derive(Clone, Debug)]
pub struct FrozenParts {
    /// Configuration of the verifier.
    pub config: VerifierConfig,
    /// Embedding, `[V, H]`.
    pub embedding: Vec<f32>,
    /// Rows of the head, `[ids, H]`, in the order of the ids asked for.
    pub head_rows: Vec<f32>,
    /// Weight of the final norm, `[H]`.
    pub final_norm: Vec<f32>,
}

impl FrozenParts {
    /// Reads the parts of the verifier in `folder`; `ids` are the tokens of the draft's vocabulary.
    ///
    /// Only these tensors are checked and only their bytes are read; shards without them may be missing.
    ///
    /// # Errors
    /// When configuration or weights are unusable, or an id is outside the vocabulary.
    pub fn load(folder: impl AsRef<Path>, ids: &[u32]) -> Result<Self, VerifierError> {
        let files = VerifierFiles::open_present(folder.as_ref())?;
        Ok(Self {
            embedding: files.embedding()?.to_f32()?.into_owned(),
            head_rows: files.head()?.gather_f32(ids)?,
            final_norm: files.final_norm()?,
            config: files.config().clone(),
        })
    }
}
