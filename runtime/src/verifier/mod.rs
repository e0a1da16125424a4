//! The large model whose hidden states are distilled.
//!
//! A verifier reads packed rows of documents and hands out, per token, the residual stream at some layers: the input of
//! the draft. Weights stay as they are stored, mapped or in a GPU's memory, and are unpacked tile by tile inside the
//! products; everything is computed in f32. A rank may hold a [`Shard`] of it only.
//!
//! Invariants:
//! - Documents never see each other: a document's states have the same bits alone and in any row.
//! - The same row gives the same bits, whatever the number of threads.
//! - A verifier that loaded has every tensor it needs, in the right shape. What it hands out is finite.

mod activations;
mod attention;
mod config;
mod cost;
mod decoder;
mod error;
mod extract;
mod family;
mod files;
mod frozen;
mod generate;
mod keys;
mod layer_config;
mod linear;
mod loader;
mod mlp;
mod residents;
mod rope_keys;
mod rotation;
mod self_check;
mod shard;
mod stored;

pub use config::{ConfigError, VerifierConfig};
pub use cost::ShardCost;
pub use error::{LayoutProblem, VerifierError};
pub(crate) use extract::largest_magnitude;
pub use extract::{Verifier, VerifierOptions};
pub use files::VerifierFiles;
pub use frozen::FrozenParts;
pub use keys::KeyProblem;
pub use layer_config::{
    AttentionConfig, DenseConfig, ExpertsConfig, GroupedConfig, LatentConfig, LayerConfig, MlpConfig,
};
pub use loader::Need;
pub use residents::GpuBytes;
pub use self_check::SelfCheck;
pub use shard::{Alone, Interrupted, Peers, Shard};

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod config_tests;
#[cfg(test)]
mod gpu_tests;
#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod packed_tests;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests;
#[cfg(test)]
mod tiny;
