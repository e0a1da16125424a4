//! The shape of a verifier, from its Hugging Face `config.json`.
//!
//! Both generations of key spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`. The element
//! type that the file claims (`torch_dtype`, `dtype`) is not read at all: each tensor says its own.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::family::{Bias, ExpertLayout, Family, Projection, Window};
use super::keys::{KeyProblem, Keys};
use super::layer_config::{
    AttentionConfig, DenseConfig, ExpertsConfig, GroupedConfig, LatentConfig, LayerConfig, MlpConfig,
};
use super::rope_keys::{Ropes, ropes};
use crate::device::{ExpertGroups, Gate, Pairing};
use crate::model_files::{self, ModelFiles, ModelFilesError};
use crate::rope::Rope;

/// Why a verifier's configuration cannot be used; each names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file of the model could not be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// There is no configuration.
    #[error("there is no `{file}`; a verifier's folder must hold the config.json of its model")]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// The file is no JSON object.
    #[error("`{file}` is no JSON object: {reason}; download it again")]
    Json {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The family of the model is not known.
    #[error(
        "`{file}`: model_type `{model_type}` is not supported; supported: {}",
        Family::names()
    )]
    UnknownModelType {
        /// The file.
        file: PathBuf,
        /// Its `model_type`.
        model_type: String,
    },
    /// Keys are missing, of the wrong type or not supported: all of them.
    #[error("`{file}`: {}", problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Keys {
        /// The file.
        file: PathBuf,
        /// Everything that is wrong with it.
        problems: Vec<KeyProblem>,
    },
}

/// Most decoder layers of a verifier; no known one has a fifth of them.
const MAX_LAYERS: usize = 1000;
/// Most experts of a layer; known ones have up to 512.
const MAX_EXPERTS: usize = 4096;

/// Everything that decides a verifier's tensors and its forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifierConfig {
    /// `model_type` of the file.
    pub model_type: String,
    /// First entry of `architectures`, for the files of drafts; empty if there is none.
    pub architecture: String,
    /// Width H of the residual stream.
    pub hidden_size: usize,
    /// Width I of the dense MLP, or of an expert where there is none: what a draft's is unless it is told otherwise.
    pub intermediate_size: usize,
    /// Decoder layers n.
    pub layers: usize,
    /// What each layer consists of, `layers` of them.
    pub blocks: Vec<LayerConfig>,
    /// Query heads A.
    pub heads: usize,
    /// Key and value heads K of a draft; divides A.
    pub kv_heads: usize,
    /// Width D of a draft's head: the verifier's, or that of its values where the two differ.
    pub head_dim: usize,
    /// Vocabulary V: rows of embedding and head.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Attention and MLP are normed before and after.
    pub sandwich_norms: bool,
    /// Added to the stored weight of every norm.
    pub norm_offset: f32,
    /// Factor of the embedding.
    pub embedding_scale: f32,
    /// Logits are bent below this.
    pub logit_softcap: Option<f32>,
    /// Rotary embedding of a draft's queries and keys: that of layers with full attention.
    pub rope: Rope,
    /// Rows and columns that share a scale, for weights stored as FP8, if the file says.
    pub fp8_block: Option<[usize; 2]>,
    /// Bits of weights that are stored as packed integers.
    pub packed_bits: usize,
    /// The head is the embedding.
    pub tied_embeddings: bool,
    /// Longest sequence the model was made for, in tokens, if the file says.
    pub max_position_embeddings: Option<usize>,
    /// Tokens that end an answer: of `generation_config.json` if it has any, else of `config.json`.
    pub eos_token_ids: Vec<u32>,
}

impl VerifierConfig {
    /// Reads `config.json`, and `generation_config.json` if it is there, of a folder or GGUF file.
    ///
    /// # Errors
    /// When a file is unreadable, the family unknown, or keys are missing, ill-typed or unsupported (all at once).
    pub fn read(folder: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let files = ModelFiles::open(folder).map_err(ModelFilesError::from)?;
        Ok(Self::read_with_bytes(&files)?.0)
    }

    /// The configuration and the bytes of its `config.json`.
    pub(super) fn read_with_bytes(files: &ModelFiles) -> Result<(Self, Vec<u8>), ConfigError> {
        let file = files.place(model_files::CONFIG);
        let bytes = files
            .read(model_files::CONFIG)?
            .ok_or_else(|| ConfigError::Missing { file: file.clone() })?;
        let mut config = Self::parse(&file, &bytes)?;
        if let Some(bytes) = files.read(model_files::GENERATION_CONFIG)? {
            let generation = files.place(model_files::GENERATION_CONFIG);
            let ids = with_keys(&generation, &bytes, |keys| Ok(keys.token_ids("eos_token_id")))?;
            if !ids.is_empty() {
                config.eos_token_ids = ids;
            }
        }
        Ok((config, bytes))
    }

    /// Reads the bytes of a `config.json`; `file` is named in errors.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn parse(file: &Path, bytes: &[u8]) -> Result<Self, ConfigError> {
        with_keys(file, bytes, |root| {
            let file = file.to_owned();
            // A model that also sees or hears keeps its decoder's keys in a section of their own.
            let text = root.object("text_config");
            let keys = text.as_ref().unwrap_or(root);
            let Some(value) = keys.get("model_type") else {
                let expected = "the name of the verifier's family";
                let problems = vec![KeyProblem::Missing {
                    key: "model_type".to_owned(),
                    expected,
                }];
                return Err(ConfigError::Keys { file, problems });
            };
            let model_type = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            match Family::named(&model_type) {
                Some(family) => Ok(Self::from_keys(family, root, keys)),
                None => Err(ConfigError::UnknownModelType { file, model_type }),
            }
        })
    }

    fn from_keys(family: &Family, root: &Keys<'_>, keys: &Keys<'_>) -> Self {
        let heads = heads(family, keys);
        let layers = layers(keys);
        let ropes = ropes(keys, heads.rotated_dim);
        let gate = gate(family, keys);
        let windows = windows(family, keys, layers);
        let without_positions = without_positions(keys, layers);
        let intermediate_size = keys.required_count("intermediate_size");
        let blocks = (0..layers)
            .map(|layer| LayerConfig {
                attention: match family.projection {
                    Projection::Latent => AttentionConfig::Latent(latent(family, keys, &heads, &ropes)),
                    _ => {
                        let rope = if windows[layer].is_some() {
                            &ropes.sliding
                        } else {
                            &ropes.full
                        };
                        let rope = (!without_positions[layer]).then(|| rope.clone());
                        let grouped = grouped(family, keys, &heads, windows[layer], rope);
                        AttentionConfig::Grouped(grouped)
                    }
                },
                mlp: match family.experts.filter(|_| has_experts(family, keys, layer)) {
                    Some(_) => MlpConfig::Experts(experts(family, keys, gate)),
                    None => MlpConfig::Dense(DenseConfig {
                        inner: intermediate_size,
                        gate,
                        fused: family.projection == Projection::Fused,
                        bias: applies(family.mlp_bias, keys),
                    }),
                },
            })
            .collect();
        let quantization = keys
            .object("quantization_config")
            .or_else(|| root.object("quantization_config"));
        if let Some(quantization) = &quantization {
            check_quantization(quantization);
        }
        let either = |key: &str| keys.flag(key).or_else(|| root.flag(key));
        let hidden_size = keys.required_count("hidden_size");
        let mut eos_token_ids = keys.token_ids("eos_token_id");
        if eos_token_ids.is_empty() {
            eos_token_ids = root.token_ids("eos_token_id");
        }
        Self {
            model_type: family.model_type.to_owned(),
            architecture: root
                .get("architectures")
                .and_then(|list| list.get(0)?.as_str())
                .unwrap_or_default()
                .to_owned(),
            hidden_size,
            intermediate_size,
            layers,
            blocks,
            heads: heads.heads,
            kv_heads: heads.kv_heads,
            head_dim: heads.draft_dim,
            vocab_size: keys.required_count("vocab_size"),
            rms_norm_eps: keys.required_positive("rms_norm_eps") as f32,
            sandwich_norms: family.sandwich,
            norm_offset: if family.norm_adds_one { 1.0 } else { 0.0 },
            embedding_scale: if family.scaled_embedding {
                (hidden_size as f32).sqrt()
            } else {
                1.0
            },
            logit_softcap: keys.positive("final_logit_softcapping").map(|cap| cap as f32),
            rope: draft_rope(family, ropes.full),
            fp8_block: quantization
                .as_ref()
                .and_then(|keys| keys.indices("weight_block_size"))
                .and_then(|block| <[usize; 2]>::try_from(block).ok())
                .filter(|block| !block.contains(&0)),
            packed_bits: quantization.as_ref().map_or(4, packed_bits),
            tied_embeddings: either("tie_word_embeddings").unwrap_or(family.tied),
            max_position_embeddings: keys.count("max_position_embeddings"),
            eos_token_ids,
        }
    }

    /// Parameters that one token meets in the layers: half the floating-point operations of their products.
    pub fn active_parameters(&self) -> u64 {
        self.blocks
            .iter()
            .map(|layer| layer.active_parameters(self.hidden_size))
            .sum()
    }

    /// Floating-point operations of the layers per token that sees `context` others.
    pub fn flops_per_token(&self, context: usize) -> u64 {
        let attention: u64 = self
            .blocks
            .iter()
            .map(|layer| layer.attention_flops(context))
            .sum();
        2 * self.active_parameters() + attention
    }

    /// The layers that a draft is trained on unless told otherwise: `[2, n/2, n-3]`, the choice of vLLM and speculators.
    ///
    /// They are distinct and ascending from 7 layers on.
    pub fn default_aux_layers(&self) -> Vec<u32> {
        let layers = self.layers as u32;
        vec![2, layers / 2, layers.saturating_sub(3)]
    }
}

/// Runs `read` over the root object of a JSON file and turns the problems it noted into an error.
fn with_keys<T>(
    file: &Path,
    bytes: &[u8],
    read: impl FnOnce(&Keys<'_>) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    let broken = |reason| ConfigError::Json {
        file: file.to_owned(),
        reason,
    };
    let value: Value = serde_json::from_slice(bytes).map_err(|error| broken(error.to_string()))?;
    let map = value
        .as_object()
        .ok_or_else(|| broken("it holds another kind of value".to_owned()))?;
    let problems = RefCell::new(Vec::new());
    let result = read(&Keys::root(map, &problems))?;
    let mut problems = problems.into_inner();
    let mut seen: Vec<KeyProblem> = Vec::new();
    // A key can be asked for more than once.
    problems.retain(|problem| {
        let new = !seen.contains(problem);
        seen.push(problem.clone());
        new
    });
    if problems.is_empty() {
        Ok(result)
    } else {
        Err(ConfigError::Keys {
            file: file.to_owned(),
            problems,
        })
    }
}

/// Sizes of the attention's heads.
struct Heads {
    heads: usize,
    kv_heads: usize,
    /// Width of a head, or of its rotated part where only that is rotated.
    rotated_dim: usize,
    head_dim: usize,
    draft_dim: usize,
}

fn heads(family: &Family, keys: &Keys<'_>) -> Heads {
    let hidden_size = keys.required_count("hidden_size");
    let heads = keys.required_count("num_attention_heads");
    let kv_heads = keys.count("num_key_value_heads").unwrap_or(heads);
    if !heads.is_multiple_of(kv_heads) {
        let reason = format!("is {kv_heads}, which does not divide num_attention_heads {heads}");
        keys.inconsistent("num_key_value_heads", reason);
    }
    if family.projection == Projection::Latent {
        let (nope, rotated) = (
            keys.required_count("qk_nope_head_dim"),
            keys.required_count("qk_rope_head_dim"),
        );
        even(keys, "qk_rope_head_dim", rotated);
        return Heads {
            heads,
            kv_heads: heads,
            rotated_dim: rotated,
            head_dim: nope + rotated,
            draft_dim: keys.required_count("v_head_dim"),
        };
    }
    let head_dim = keys.count("head_dim").unwrap_or_else(|| {
        if !hidden_size.is_multiple_of(heads) {
            let reason =
                format!("is {hidden_size}, no multiple of num_attention_heads {heads}; add head_dim");
            keys.inconsistent("hidden_size", reason);
        }
        hidden_size / heads
    });
    even(keys, "head_dim", head_dim);
    Heads {
        heads,
        kv_heads,
        rotated_dim: head_dim,
        head_dim,
        draft_dim: head_dim,
    }
}

fn even(keys: &Keys<'_>, key: &str, dim: usize) {
    if !dim.is_multiple_of(2) {
        keys.inconsistent(key, format!("is {dim}; rotary embedding needs an even one"));
    }
}

fn grouped(
    family: &Family,
    keys: &Keys<'_>,
    heads: &Heads,
    window: Option<usize>,
    rope: Option<Rope>,
) -> GroupedConfig {
    // Gemma scales by another width than the head's.
    let scaled_by = keys
        .positive("query_pre_attn_scalar")
        .unwrap_or(heads.head_dim as f64);
    GroupedConfig {
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        scale: scaled_by.sqrt().recip() as f32,
        window,
        rope,
        qk_norm: family.qk_norm,
        qkv_bias: applies(family.qkv_bias, keys),
        output_bias: applies(family.output_bias, keys),
        sinks: family.sinks,
        fused: family.projection == Projection::Fused,
        softcap: keys.positive("attn_logit_softcapping").map(|cap| cap as f32),
    }
}

fn latent(family: &Family, keys: &Keys<'_>, heads: &Heads, ropes: &Ropes) -> LatentConfig {
    LatentConfig {
        heads: heads.heads,
        query_rank: keys.count("q_lora_rank"),
        kv_rank: keys.required_count("kv_lora_rank"),
        nope_dim: heads.head_dim - heads.rotated_dim,
        rope_dim: heads.rotated_dim,
        value_dim: heads.draft_dim,
        rope: ropes.full.clone(),
        pairing: if keys.flag("rope_interleave").unwrap_or(true) {
            Pairing::Neighbours
        } else {
            Pairing::Halves
        },
        scale: (ropes.score_magnitude / (heads.head_dim as f64).sqrt()) as f32,
        bias: applies(family.qkv_bias, keys),
    }
}

fn applies(bias: Bias, keys: &Keys<'_>) -> bool {
    match bias {
        Bias::Never => false,
        Bias::Always => true,
        Bias::If(key) => keys.flag(key).unwrap_or(false),
    }
}

fn gate(family: &Family, keys: &Keys<'_>) -> Gate {
    if matches!(family.experts, Some(experts) if experts.layout == ExpertLayout::Together) {
        return Gate::Clamped {
            alpha: keys.positive("swiglu_alpha").unwrap_or(1.702) as f32,
            limit: keys.positive("swiglu_limit").unwrap_or(7.0) as f32,
        };
    }
    let key = if keys.get("hidden_activation").is_some() {
        "hidden_activation"
    } else {
        "hidden_act"
    };
    match keys.text(key) {
        None if family.scaled_embedding => Gate::GeluTanh,
        None | Some("silu" | "swish") => Gate::Silu,
        Some("gelu_pytorch_tanh") => Gate::GeluTanh,
        // Gemma's first files say gelu and mean the approximation.
        Some("gelu") if family.scaled_embedding => Gate::GeluTanh,
        Some(_) => {
            keys.unsupported(key, "silu, gelu_pytorch_tanh");
            Gate::Silu
        }
    }
}

/// The window of each layer.
fn windows(family: &Family, keys: &Keys<'_>, layers: usize) -> Vec<Option<usize>> {
    if family.window == Window::Never {
        return vec![None; layers];
    }
    let window = match family.window {
        Window::LaterLayers if keys.flag("use_sliding_window") != Some(true) => None,
        _ => keys.count("sliding_window"),
    };
    if let Some(types) = keys.texts("layer_types") {
        if types.len() != layers {
            let reason = format!("lists {} layers where there are {layers}", types.len());
            keys.inconsistent("layer_types", reason);
            return vec![None; layers];
        }
        let sliding = types.iter().map(|kind| match kind.as_str() {
            "sliding_attention" => window,
            "full_attention" => None,
            _ => {
                keys.unsupported("layer_types", "full_attention, sliding_attention");
                None
            }
        });
        return sliding.collect();
    }
    let first = match family.window {
        Window::LaterLayers => keys.index("max_window_layers").unwrap_or(0),
        _ => 0,
    };
    let pattern = match family.window {
        Window::AllBut(n) => keys
            .count("sliding_window_pattern")
            .or_else(|| keys.count("_sliding_window_pattern"))
            .unwrap_or(n),
        _ => usize::MAX,
    };
    (0..layers)
        .map(|layer| window.filter(|_| layer >= first && (layer + 1) % pattern != 0))
        .collect()
}

/// Which layers rotate nothing (`no_rope_layers` lists a 1 for each that does).
fn without_positions(keys: &Keys<'_>, layers: usize) -> Vec<bool> {
    match keys.indices("no_rope_layers") {
        Some(list) if list.len() == layers => list.iter().map(|&rotates| rotates == 0).collect(),
        Some(list) if !list.is_empty() => {
            let reason = format!("lists {} layers where there are {layers}", list.len());
            keys.inconsistent("no_rope_layers", reason);
            vec![false; layers]
        }
        _ => match keys.count("no_rope_layer_interval") {
            Some(interval) => (0..layers).map(|layer| (layer + 1) % interval == 0).collect(),
            None => vec![false; layers],
        },
    }
}

fn has_experts(family: &Family, keys: &Keys<'_>, layer: usize) -> bool {
    if family.projection == Projection::Latent {
        let first = keys.index("first_k_dense_replace").unwrap_or(0);
        return layer >= first && layer.is_multiple_of(keys.count("moe_layer_freq").unwrap_or(1));
    }
    let dense = keys.indices("mlp_only_layers").unwrap_or_default();
    let step = keys.count("decoder_sparse_step").unwrap_or(1);
    !dense.contains(&layer) && (layer + 1).is_multiple_of(step)
}

fn experts(family: &Family, keys: &Keys<'_>, gate: Gate) -> ExpertsConfig {
    let described = family.experts.expect("only families with experts get here");
    let count_key = described
        .count_keys
        .iter()
        .find(|key| keys.get(key).is_some())
        .unwrap_or(&described.count_keys[0]);
    let mut count = keys.required_count(count_key);
    if count > MAX_EXPERTS {
        keys.unsupported(count_key, format!("1 to {MAX_EXPERTS}"));
        count = 1;
    }
    let top = keys.required_count("num_experts_per_tok");
    if top > count {
        let reason = format!("is {top}, more than the {count} experts of {count_key}");
        keys.inconsistent("num_experts_per_tok", reason);
    }
    let inner = keys.required_count(described.inner_key);
    let sigmoid = described.scoring == crate::device::Scoring::Sigmoid;
    if sigmoid {
        for (key, only) in [("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")] {
            if keys.text(key).is_some_and(|value| value != only) {
                keys.unsupported(key, only);
            }
        }
    }
    let groups = keys.count("n_group").filter(|&groups| sigmoid && groups > 1);
    if let Some(groups) = groups
        && (!count.is_multiple_of(groups) || keys.count("topk_group").unwrap_or(1) > groups)
    {
        let reason = format!("is {groups}; it must divide {count} experts and be at least topk_group");
        keys.inconsistent("n_group", reason);
    }
    ExpertsConfig {
        experts: count,
        top: top.min(count),
        inner,
        shared_inner: keys.index("n_shared_experts").unwrap_or(0) * inner,
        gate,
        scoring: described.scoring,
        groups: groups
            .filter(|&groups| count.is_multiple_of(groups))
            .map(|groups| ExpertGroups {
                count: groups,
                chosen: keys.count("topk_group").unwrap_or(1).min(groups),
            }),
        choice_bias: sigmoid,
        normalised: keys.flag("norm_topk_prob").unwrap_or(described.normalised),
        factor: keys.positive("routed_scaling_factor").unwrap_or(1.0) as f32,
        layout: described.layout,
    }
}

/// DeepSeek evens out YaRN's magnitude in its own way, which a Llama layer has not.
fn draft_rope(family: &Family, mut rope: Rope) -> Rope {
    if let crate::rope::RopeScaling::Yarn { attention_factor, .. } = &mut rope.scaling
        && family.projection == Projection::Latent
    {
        *attention_factor = None;
    }
    rope
}

/// Notes how weights are stored that cannot be computed with.
fn check_quantization(keys: &Keys<'_>) {
    match keys.text("quant_method") {
        Some("fp8" | "mxfp4") => {}
        Some("compressed-tensors") => {
            if !matches!(
                keys.text("format"),
                None | Some("pack-quantized" | "float-quantized" | "dense")
            ) {
                keys.unsupported("format", "pack-quantized, float-quantized");
            }
            for_each_weight_scheme(keys, |weights| {
                if weights.flag("symmetric") == Some(false) {
                    weights.unsupported("symmetric", "true");
                }
                if weights.get("actorder").is_some() {
                    weights.unsupported("actorder", "null");
                }
                if !matches!(weights.count("num_bits"), None | Some(4 | 8)) {
                    weights.unsupported("num_bits", "4, 8");
                }
            });
        }
        _ => keys.unsupported("quant_method", "compressed-tensors, fp8, mxfp4"),
    }
}

fn for_each_weight_scheme(keys: &Keys<'_>, mut see: impl FnMut(&Keys<'_>)) {
    if let Some(groups) = keys.object("config_groups") {
        for name in groups.names() {
            if let Some(weights) = groups.object(name).and_then(|group| group.object("weights")) {
                see(&weights);
            }
        }
    }
}

fn packed_bits(keys: &Keys<'_>) -> usize {
    let mut bits = 4;
    for_each_weight_scheme(keys, |weights| bits = weights.count("num_bits").unwrap_or(bits));
    bits
}

/// Number of layers. The bound keeps a slip of the finger from asking for a billion tensors.
fn layers(keys: &Keys<'_>) -> usize {
    let layers = keys.required_count("num_hidden_layers");
    if layers > MAX_LAYERS {
        keys.unsupported("num_hidden_layers", format!("1 to {MAX_LAYERS}"));
        return 1;
    }
    layers
}
