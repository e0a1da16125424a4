//! Which part of which verifier each verifier rank holds, and what that part costs.

use std::ops::Range;

use eaglet_runtime::verifier::{Shard, VerifierConfig, VerifierFiles};

use super::report::ShardPlan;
use crate::config::ClusterConfig;

/// What a part of a verifier costs.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ShardCost {
    /// Its layers.
    pub(crate) layers: Range<usize>,
    /// Tensors that it reads.
    pub(crate) tensors: u64,
    /// Parameters in them.
    pub(crate) parameters: u64,
    /// Their bytes as they are stored.
    pub(crate) weight_bytes: u64,
    /// Bytes of activations per token of a row.
    pub(crate) activation_bytes_per_token: u64,
    /// Bytes of keys and values per token that is kept for answering.
    pub(crate) cache_bytes_per_token: u64,
    /// Bytes of logits per prompt that is answered.
    pub(crate) logit_bytes_per_prompt: u64,
    /// Captured states per token that it hands out.
    pub(crate) captured: u64,
    /// Floating-point operations per token that sees `visible` others.
    pub(crate) flops_per_token: f64,
}

/// Stages and slices of each verifier.
pub(crate) fn cut(_config: &ClusterConfig) -> (u16, u16) {
    (1, 1)
}

/// The part that a verifier seat holds.
pub(crate) fn shard_of(config: &ClusterConfig, seat: u16) -> Shard {
    let (stages, slices) = cut(config);
    Shard::nth(seat % (stages * slices), stages, slices)
}

impl ShardCost {
    /// What a part costs of a verifier whose `aux_layers` are captured.
    pub(crate) fn new(files: &VerifierFiles, shard: Shard, aux_layers: &[u32], visible: f64) -> Self {
        let config = files.config();
        let layers = 0..config.layers;
        let is_here = |layer: &&u32| layers.contains(&(**layer as usize));
        let captured = aux_layers.iter().filter(is_here).count() as u64 + u64::from(shard.is_last());
        Self {
            tensors: files.weights().names().count() as u64,
            parameters: files.weights().bytes() / 2,
            weight_bytes: files.weights().bytes(),
            activation_bytes_per_token: 4 * activations(config),
            cache_bytes_per_token: 8 * (layers.len() * config.kv_heads * config.head_dim) as u64,
            logit_bytes_per_prompt: 4 * config.vocab_size as u64,
            captured,
            flops_per_token: visible,
            layers,
        }
    }

    /// For the report.
    pub(crate) fn plan(&self, shard: Shard, replica: u16) -> ShardPlan {
        ShardPlan {
            replica,
            stage: shard.stage,
            stages: shard.stages,
            slice: shard.slice,
            slices: shard.slices,
            first_layer: self.layers.start,
            end_layer: self.layers.end,
        }
    }
}

fn activations(config: &VerifierConfig) -> u64 {
    let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
    (3 * config.hidden_size + 2 * queries + 2 * keys + 3 * config.intermediate_size) as u64
}
