//! What a shard costs, known from the configuration alone: memory of the buffers of a pass, and work of a token.
//!
//! It mirrors what `activations`, `attention`, `mlp` and `generate` allocate.

use std::ops::Range;

use super::layer_config::{AttentionConfig, MlpConfig};
use super::{Shard, VerifierConfig};
use crate::device::AttentionShape;

/// Memory and work of a shard.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardCost {
    /// Its layers.
    pub layers: Range<usize>,
    /// Bytes of activations per token of a pass, at most: as if all tokens chose the same expert.
    pub activation_bytes_per_token: u64,
    /// Bytes of cached keys and values per token of prompts and answers.
    pub cache_bytes_per_token: u64,
    /// Bytes of logits per prompt that is answered; 0 on a shard without the head.
    pub logit_bytes_per_prompt: u64,
    /// Floating-point operations of an extracted token, a multiply-add counted as two.
    pub flops_per_token: f64,
}

impl VerifierConfig {
    /// What a shard costs whose tokens see `context` tokens on average.
    pub fn shard_cost(&self, shard: Shard, context: usize) -> ShardCost {
        let layers = shard.layers(self);
        let (hidden, slices) = (self.hidden_size, usize::from(shard.slices));
        let (mut widest, mut cache, mut flops) = (Widths::default(), 0, 0.0);
        for block in &self.blocks[layers.clone()] {
            let shape = slice_of(block.attention.shape(), shard);
            widest.attention(&shape, &block.attention);
            widest.mlp(&block.mlp, hidden, shard);
            cache += shape.key_width() + shape.value_width();
            let operations = 2 * block.active_parameters(hidden) + block.attention_flops(context);
            flops += operations as f64 / slices as f64;
        }
        // Residual stream, its norm, and what is added to it where that is not done at once.
        let added_at_once = slices == 1 && !self.sandwich_norms;
        let streams = if added_at_once { 2 } else { 3 };
        let logits = if shard.is_last() {
            shard.slice_of(self.vocab_size, 1).len()
        } else {
            0
        };
        let bytes = |elements: usize| elements as u64 * size_of::<f32>() as u64;
        ShardCost {
            activation_bytes_per_token: bytes(streams * hidden + widest.sum()),
            cache_bytes_per_token: bytes(cache),
            logit_bytes_per_prompt: bytes(logits),
            flops_per_token: flops,
            layers,
        }
    }
}

/// The heads of a slice.
fn slice_of(whole: AttentionShape, shard: Shard) -> AttentionShape {
    let heads = shard.slice_of(whole.heads, 1).len();
    let group = (whole.heads / whole.kv_heads.max(1)).max(1);
    AttentionShape {
        heads,
        kv_heads: heads.div_ceil(group),
        ..whole
    }
}

/// Elements per token of each buffer, the most of all layers.
#[derive(Default)]
struct Widths {
    q: usize,
    k: usize,
    v: usize,
    raw: usize,
    latent: usize,
    attended: usize,
    heads: usize,
    inner: usize,
    scores: usize,
    picked: usize,
}

impl Widths {
    fn attention(&mut self, shape: &AttentionShape, config: &AttentionConfig) {
        let grow = |width: &mut usize, to: usize| *width = (*width).max(to);
        grow(&mut self.q, shape.query_width());
        grow(&mut self.k, shape.key_width());
        grow(&mut self.v, shape.value_width());
        grow(&mut self.attended, shape.output_width());
        grow(&mut self.heads, shape.heads);
        match config {
            AttentionConfig::Grouped(grouped) if grouped.qk_norm => {
                grow(&mut self.raw, shape.query_width().max(shape.key_width()));
            }
            AttentionConfig::Grouped(_) => {}
            AttentionConfig::Latent(latent) => {
                let expanded = shape.heads * (latent.nope_dim + latent.value_dim);
                let query_rank = latent.query_rank.unwrap_or(0);
                grow(
                    &mut self.raw,
                    query_rank.max(latent.kv_rank + latent.rope_dim + expanded),
                );
                grow(&mut self.latent, query_rank.max(latent.kv_rank));
            }
        }
    }

    fn mlp(&mut self, config: &MlpConfig, hidden: usize, shard: Shard) {
        let grow = |width: &mut usize, to: usize| *width = (*width).max(to);
        match config {
            MlpConfig::Dense(dense) => grow(&mut self.inner, shard.slice_of(dense.inner, 1).len()),
            MlpConfig::Experts(experts) => {
                let shared = shard.slice_of(experts.shared_inner, 1).len();
                grow(&mut self.inner, experts.inner.max(shared));
                // Logits of the router; chosen experts and their weights.
                grow(&mut self.scores, experts.experts + 2 * experts.top);
                // What goes into an expert and what comes out.
                grow(&mut self.picked, 2 * hidden);
            }
        }
    }

    fn sum(&self) -> usize {
        let attention = self.q + self.k + self.v + self.raw + self.latent + self.attended + self.heads;
        attention + 3 * self.inner + self.scores + self.picked
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    fn parse(config: &serde_json::Value) -> VerifierConfig {
        VerifierConfig::parse(Path::new("config.json"), config.to_string().as_bytes()).expect("it is right")
    }

    fn llama() -> VerifierConfig {
        parse(&json!({
            "model_type": "llama", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 100, "rms_norm_eps": 1e-5
        }))
    }

    fn deepseek() -> VerifierConfig {
        parse(&json!({
            "model_type": "deepseek_v3", "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5,
            "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3, "vocab_size": 100, "rms_norm_eps": 1e-5,
            "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "n_shared_experts": 1,
            "first_k_dense_replace": 1
        }))
    }

    #[test]
    fn a_whole_llama_is_counted_by_hand() {
        let cost = llama().shard_cost(Shard::WHOLE, 10);
        // Two streams of 16; q 16, k 8, v 8, attended 16, 4 softmax statistics; three inner products of 40.
        assert_eq!(
            cost.activation_bytes_per_token,
            4 * (32 + 16 + 8 + 8 + 16 + 4 + 120)
        );
        assert_eq!(cost.cache_bytes_per_token, 4 * 3 * (8 + 8));
        assert_eq!(cost.logit_bytes_per_prompt, 400);
        // q and o 16·16 each, k and v 16·8 each, MLP 3·16·40; scores and values 2·4·(4 + 4)·10.
        let layer = 2.0 * f64::from(2 * 256 + 2 * 128 + 1920) + f64::from(2 * 4 * 8 * 10);
        assert_eq!(cost.flops_per_token, 3.0 * layer);
        assert_eq!(cost.layers, 0..3);
    }

    #[test]
    fn stages_share_the_work_and_slices_cut_it() {
        let config = llama();
        let whole = config.shard_cost(Shard::WHOLE, 10);
        let stages: Vec<ShardCost> = (0..3)
            .map(|n| config.shard_cost(Shard::nth(n, 3, 1), 10))
            .collect();
        let flops: f64 = stages.iter().map(|stage| stage.flops_per_token).sum();
        assert_eq!(flops, whole.flops_per_token);
        let logits: Vec<u64> = stages.iter().map(|stage| stage.logit_bytes_per_prompt).collect();
        assert_eq!(logits, [0, 0, 400]);
        assert!(stages.iter().all(|stage| stage.cache_bytes_per_token == 4 * 16));

        let slice = config.shard_cost(Shard::nth(1, 1, 2), 10);
        assert_eq!(slice.flops_per_token, whole.flops_per_token / 2.0);
        assert_eq!(slice.cache_bytes_per_token, whole.cache_bytes_per_token / 2);
        // What a slice has is summed before it is added: one stream more, and half of the rest.
        assert_eq!(
            slice.activation_bytes_per_token,
            4 * (48 + (16 + 8 + 8 + 16 + 4 + 120) / 2)
        );
        assert_eq!(slice.logit_bytes_per_prompt, 200);
    }

    #[test]
    fn latent_attention_and_experts_are_counted_by_hand() {
        let cost = deepseek().shard_cost(Shard::WHOLE, 0);
        // q and k 4·6, v and attended 4·3, raw 5 + 2 + 4·7, latent 6, 4 statistics.
        let attention = 24 + 24 + 12 + 12 + 35 + 6 + 4;
        // The dense layer is the widest: 40. Router 8 + 2·2; an expert's tokens in and out 2·16.
        let mlp = 3 * 40 + 12 + 32;
        assert_eq!(cost.activation_bytes_per_token, 4 * (32 + attention + mlp) as u64);
        assert_eq!(cost.cache_bytes_per_token, 4 * 3 * (24 + 12));
    }
}
