//! What one decoder layer consists of.

use crate::device::{AttentionShape, ExpertGroups, Gate, Pairing, Scoring};
use crate::rope::Rope;

/// One decoder layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerConfig {
    /// Its attention.
    pub attention: AttentionConfig,
    /// Its MLP.
    pub mlp: MlpConfig,
}

/// Attention of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum AttentionConfig {
    /// Query heads that share key and value heads.
    Grouped(GroupedConfig),
    /// Keys and values through a shared low-rank latent (MLA, DeepSeek-V2).
    Latent(LatentConfig),
}

/// Grouped-query attention.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupedConfig {
    /// Query heads A.
    pub heads: usize,
    /// Key and value heads K; divides A.
    pub kv_heads: usize,
    /// Width D of a head.
    pub head_dim: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// A query sees itself and this many minus one tokens before it; `None` is full attention.
    pub window: Option<usize>,
    /// Rotary embedding of queries and keys; `None` where the layer knows no positions.
    pub rope: Option<Rope>,
    /// Heads of queries and keys are normed.
    pub qk_norm: bool,
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The output has a bias.
    pub output_bias: bool,
    /// There is a sink per query head.
    pub sinks: bool,
    /// Queries, keys and values are one matrix in the file.
    pub fused: bool,
    /// Scores are bent below this.
    pub softcap: Option<f32>,
}

/// Multi-head latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct LatentConfig {
    /// Heads A.
    pub heads: usize,
    /// Width of the queries' latent; `None` where queries come straight from the residual stream.
    pub query_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Width of the part of a head that is not rotated.
    pub nope_dim: usize,
    /// Width of the part of a head that is rotated; keys share it.
    pub rope_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Rotary embedding.
    pub rope: Rope,
    /// Which dimensions turn together.
    pub pairing: Pairing,
    /// Factor of the scores.
    pub scale: f32,
    /// The first projections of queries and of keys and values, and the output, have biases.
    pub bias: bool,
}

impl AttentionConfig {
    /// Sizes of the whole attention.
    pub fn shape(&self) -> AttentionShape {
        match self {
            Self::Grouped(config) => AttentionShape {
                heads: config.heads,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                value_dim: config.head_dim,
                scale: config.scale,
            },
            Self::Latent(config) => AttentionShape {
                heads: config.heads,
                kv_heads: config.heads,
                head_dim: config.nope_dim + config.rope_dim,
                value_dim: config.value_dim,
                scale: config.scale,
            },
        }
    }

    /// Tokens that a query sees; `None` is all.
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Grouped(config) => config.window,
            Self::Latent(_) => None,
        }
    }
}

/// MLP of a layer.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpConfig {
    /// One gated MLP.
    Dense(DenseConfig),
    /// A mixture of experts.
    Experts(ExpertsConfig),
}

/// A gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseConfig {
    /// Width I.
    pub inner: usize,
    /// What joins gate and up.
    pub gate: Gate,
    /// Gate and up are one matrix in the file.
    pub fused: bool,
    /// All three have biases.
    pub bias: bool,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertsConfig {
    /// Experts to choose from.
    pub experts: usize,
    /// Experts of a token.
    pub top: usize,
    /// Width of an expert.
    pub inner: usize,
    /// Width of the expert that every token goes to; 0 if there is none.
    pub shared_inner: usize,
    /// What joins gate and up.
    pub gate: Gate,
    /// From logits to weights.
    pub scoring: Scoring,
    /// Groups of experts, if there are any.
    pub groups: Option<ExpertGroups>,
    /// A bias per expert decides who is chosen.
    pub choice_bias: bool,
    /// Weights of the chosen are divided by their sum.
    pub normalised: bool,
    /// Factor of the weights.
    pub factor: f32,
    /// How the tensors are named and laid out.
    pub(super) layout: super::family::ExpertLayout,
}

impl LayerConfig {
    /// Parameters that one token meets, for a residual stream of `hidden`: half the floating-point operations of the
    /// layer's products.
    pub fn active_parameters(&self, hidden: usize) -> u64 {
        let attention = match &self.attention {
            AttentionConfig::Grouped(config) => {
                hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
            }
            AttentionConfig::Latent(config) => {
                let head = config.nope_dim + config.rope_dim;
                let queries = match config.query_rank {
                    Some(rank) => rank * (hidden + config.heads * head),
                    None => hidden * config.heads * head,
                };
                queries
                    + hidden * (config.kv_rank + config.rope_dim)
                    + config.kv_rank * config.heads * (config.nope_dim + config.value_dim)
                    + config.heads * config.value_dim * hidden
            }
        };
        let mlp = match &self.mlp {
            MlpConfig::Dense(config) => 3 * hidden * config.inner,
            MlpConfig::Experts(config) => {
                hidden * (config.experts + 3 * (config.top * config.inner + config.shared_inner))
            }
        };
        (attention + mlp) as u64
    }

    /// Floating-point operations of the scores and of the weighted sum of values, per token that sees `context` others.
    pub fn attention_flops(&self, context: usize) -> u64 {
        let shape = self.attention.shape();
        let seen = self
            .attention
            .window()
            .map_or(context, |window| window.min(context));
        (2 * shape.heads * (shape.head_dim + shape.value_dim) * seen) as u64
    }
}
