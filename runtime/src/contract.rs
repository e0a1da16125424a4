//! What a hidden-state batch promises, so that a receiver can refuse another promise.
//!
//! A wrong capture layer, a forgotten final norm or another chat template train "fine" and are accepted one per cent of
//! the time. So each batch carries the digest of this contract, and both ends compare field by field when they attach.

use std::fmt;

use half::bf16;
use serde::{Deserialize, Serialize};

use crate::digest::{Digest, Digester};

/// Element type of hidden states on their way from a verifier to a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum HiddenDtype {
    /// bfloat16, as vLLM hands them out.
    Bf16,
    /// Single precision.
    F32,
}

impl HiddenDtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }

    /// Writes values as elements of this type, rounded to nearest, little-endian; `out` is as long as they need.
    pub(crate) fn write(self, values: &[f32], out: &mut [u8]) {
        match self {
            Self::F32 => {
                for (out, value) in out.chunks_exact_mut(4).zip(values) {
                    out.copy_from_slice(&value.to_le_bytes());
                }
            }
            Self::Bf16 => {
                for (out, &value) in out.chunks_exact_mut(2).zip(values) {
                    out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
        }
    }
}

/// The promise behind a batch of hidden states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contract {
    /// Digest of the verifier's configuration and of its tensors' names, shapes and dtypes.
    pub verifier: Digest,
    /// Layers whose *input* residual stream is captured, ascending; the convention of vLLM and speculators.
    pub aux_layers: Vec<u32>,
    /// Width of the residual stream.
    pub hidden_size: u32,
    /// Element type.
    pub dtype: HiddenDtype,
    /// Digest of `tokenizer.json`.
    pub tokenizer: Digest,
    /// Digest of the chat template.
    pub template: Digest,
}

impl Contract {
    /// Captured states per token: the aux layers and the last one, which is taken before the final norm.
    pub fn states_per_token(&self) -> usize {
        self.aux_layers.len() + 1
    }

    /// Bytes of the hidden states of one token.
    pub fn bytes_per_token(&self) -> usize {
        self.states_per_token() * self.hidden_size as usize * self.dtype.bytes()
    }

    /// Digest of the whole contract.
    pub fn digest(&self) -> Digest {
        let mut digester = Digester::new();
        digester.part(format!("{self:?}").as_bytes());
        digester.finish()
    }

    /// The first field in which another contract differs, in words.
    pub fn difference(&self, other: &Self) -> Option<Difference> {
        let fields: [(&'static str, String, String); 6] = [
            ("verifier", self.verifier.to_string(), other.verifier.to_string()),
            (
                "aux layers",
                format!("{:?}", self.aux_layers),
                format!("{:?}", other.aux_layers),
            ),
            (
                "hidden size",
                self.hidden_size.to_string(),
                other.hidden_size.to_string(),
            ),
            ("dtype", format!("{:?}", self.dtype), format!("{:?}", other.dtype)),
            (
                "tokenizer",
                self.tokenizer.to_string(),
                other.tokenizer.to_string(),
            ),
            (
                "chat template",
                self.template.to_string(),
                other.template.to_string(),
            ),
        ];
        fields
            .into_iter()
            .find(|(_, ours, theirs)| ours != theirs)
            .map(|(field, ours, theirs)| Difference { field, ours, theirs })
    }
}

/// A field in which two contracts differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The field, in words.
    pub field: &'static str,
    /// Its value here.
    pub ours: String,
    /// Its value there.
    pub theirs: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} is {} here and {} there",
            self.field, self.ours, self.theirs
        )
    }
}
