//! `config.json` of a draft, with the keys that speculators 0.9 writes and vLLM reads.
//!
//! Written: exactly that key set, sorted. `speculators_version`, `transformers_version` and `auto_map` are written with the
//! values of the versions whose spelling we follow; they are informational for vLLM. `norm_before_residual` is always
//! written, because its readers disagree about its default.
//!
//! Read: unknown keys are ignored, and keys that older files lack get the defaults of speculators' class, but what
//! contradicts our draft (biases, more layers, another activation) is refused, not ignored.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

pub use super::config_section::ConfigError;
pub(super) use super::config_section::Section;
use super::{CheckpointError, rope_json};
use crate::draft::{DraftSpec, LayerKind};

/// Version of speculators whose format is written.
const SPECULATORS_VERSION: &str = "0.9.0";
/// Version of transformers whose spelling is written.
const TRANSFORMERS_VERSION: &str = "5.19.0";
/// Aux layers that vLLM's Llama draft assumes unless told otherwise.
const USUAL_AUX_LAYERS: usize = 3;

/// What a draft's `config.json` says beyond its [`DraftSpec`].
#[derive(Clone, Debug, PartialEq)]
pub struct ExportInfo {
    /// Hub id or path of the verifier; vLLM loads it from there.
    pub verifier_name_or_path: String,
    /// `architectures` of the verifier's own `config.json`.
    pub verifier_architectures: Vec<String>,
    /// Layers whose *input* the draft reads, ascending (vLLM's convention).
    pub aux_layer_ids: Vec<u32>,
    /// TTT steps of the training; becomes the number of tokens drafted per round.
    pub ttt_steps: usize,
    /// Longest context in tokens.
    pub max_position_embeddings: usize,
    /// Standard deviation of fresh weights; informational.
    pub initializer_range: f64,
    /// Token that starts a text.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text: none is written as null, one as a number, more as a list.
    pub eos_token_ids: Vec<u32>,
    /// Token that fills a batch.
    pub pad_token_id: Option<u32>,
}

/// A draft's configuration, checked.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftConfig {
    spec: DraftSpec,
    info: ExportInfo,
}

impl DraftConfig {
    /// A configuration for writing.
    ///
    /// # Errors
    /// The spec and the info contradict each other or say what the format cannot.
    pub fn new(spec: DraftSpec, info: ExportInfo) -> Result<Self, ConfigError> {
        let wrong = |key: &str, problem: String| {
            Err(ConfigError {
                key: key.to_owned(),
                problem,
            })
        };
        let ids = &info.aux_layer_ids;
        if ids.len() != spec.aux_layers || ids.is_empty() {
            let problem = format!(
                "names {} layers, but `fc` takes {} of them",
                ids.len(),
                spec.aux_layers
            );
            return wrong("eagle_aux_hidden_state_layer_ids", problem);
        }
        if !ids.is_sorted_by(|a, b| a < b) {
            return wrong(
                "eagle_aux_hidden_state_layer_ids",
                format!("is {ids:?}; it must ascend"),
            );
        }
        if spec.rope.dim != spec.head_dim {
            let problem = format!(
                "rotates {} of {} dimensions; drafts rotate whole heads",
                spec.rope.dim, spec.head_dim
            );
            return wrong("rope_parameters", problem);
        }
        if spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
            let problem = format!(
                "({}) does not divide num_attention_heads ({})",
                spec.kv_heads, spec.heads
            );
            return wrong("num_key_value_heads", problem);
        }
        if !spec.head_dim.is_multiple_of(2) {
            return wrong(
                "head_dim",
                format!("is {}; it must be even for the rotary embedding", spec.head_dim),
            );
        }
        if spec.draft_vocab_size > spec.vocab_size {
            let problem = format!(
                "({}) is larger than the verifier's {}",
                spec.draft_vocab_size, spec.vocab_size
            );
            return wrong("draft_vocab_size", problem);
        }
        if spec.fc_norm && spec.norm_before_fc {
            return wrong("fc_norm", "and `norm_before_fc` exclude each other".to_owned());
        }
        if !(spec.rms_norm_eps.is_finite() && spec.rms_norm_eps >= 0.0) {
            return wrong(
                "rms_norm_eps",
                format!("is {}; it must be a small positive number", spec.rms_norm_eps),
            );
        }
        Ok(Self { spec, info })
    }

    /// Shape and switches of the draft.
    pub fn spec(&self) -> &DraftSpec {
        &self.spec
    }

    /// Everything else.
    pub fn info(&self) -> &ExportInfo {
        &self.info
    }

    /// The content of `config.json`, keys sorted.
    pub fn to_json(&self) -> Value {
        let (spec, info) = (&self.spec, &self.info);
        let mut value = json!({
            "architectures": ["Eagle3DraftModel"],
            "auto_map": { "": "config.Eagle3SpeculatorConfig" },
            "draft_vocab_size": spec.draft_vocab_size,
            "dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": info.aux_layer_ids,
            "embed_requires_grad": false,
            "fc_norm": spec.fc_norm,
            "norm_before_fc": spec.norm_before_fc,
            "norm_before_residual": spec.norm_before_residual,
            "norm_output": spec.norm_output,
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": info.ttt_steps,
                    "verifier_accept_k": 1,
                }],
                "verifier": {
                    "architectures": info.verifier_architectures,
                    "name_or_path": info.verifier_name_or_path,
                },
            },
            "speculators_model_type": "eagle3",
            "speculators_version": SPECULATORS_VERSION,
            "target_hidden_size": null,
            "tie_word_embeddings": false,
            "transformer_layer_config": self.layer_json(),
            "transformers_version": TRANSFORMERS_VERSION,
        });
        value.sort_all_objects();
        value
    }

    fn layer_json(&self) -> Value {
        let (spec, info) = (&self.spec, &self.info);
        let eos = match info.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            more => json!(more),
        };
        let sliding = spec.sliding_window.is_some();
        let mut layer = json!({
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": info.bos_token_id,
            "eos_token_id": eos,
            "head_dim": spec.head_dim,
            "hidden_act": "silu",
            "hidden_size": spec.hidden_size,
            "initializer_range": info.initializer_range,
            "intermediate_size": spec.intermediate_size,
            "layer_types": [if sliding { "sliding_attention" } else { "full_attention" }],
            "max_position_embeddings": info.max_position_embeddings,
            "num_attention_heads": spec.heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": spec.kv_heads,
            "pad_token_id": info.pad_token_id,
            "rms_norm_eps": shortest(spec.rms_norm_eps),
            "rope_parameters": rope_json::to_json(&spec.rope),
            "sliding_window": spec.sliding_window,
            "tie_word_embeddings": false,
            "use_cache": true,
            "use_sliding_window": sliding,
            "vocab_size": spec.vocab_size,
        });
        match spec.layer {
            LayerKind::Llama => {
                layer["model_type"] = json!("llama");
                layer["mlp_bias"] = json!(false);
                layer["pretraining_tp"] = json!(1);
            }
            LayerKind::Qwen3 => {
                layer["model_type"] = json!("qwen3");
                layer["max_window_layers"] = json!(28);
            }
        }
        // vLLM's Llama draft does not count the list of layer ids: it must be told when there are not three.
        if spec.layer == LayerKind::Llama && spec.aux_layers != USUAL_AUX_LAYERS {
            layer["num_aux_hidden_states"] = json!(spec.aux_layers);
        }
        layer
    }

    /// The configuration in the content of a `config.json`.
    ///
    /// # Errors
    /// A needed key is missing, or a key says what our draft is not.
    pub fn from_json(value: &Value) -> Result<Self, ConfigError> {
        let root = Section::root(value)?;
        let kind = root.str("speculators_model_type")?;
        if kind != "eagle3" {
            return Err(root.error(
                "speculators_model_type",
                format!("is `{kind}`; only eagle3 drafts can be read"),
            ));
        }
        // vLLM takes an absent key as true, speculators as false: whoever guesses serves another draft than was trained.
        let Some(norm_before_residual) = root.optional_bool("norm_before_residual")? else {
            let problem = "is missing and its readers disagree about the default; write true if vLLM serves this draft well";
            return Err(root.error("norm_before_residual", problem));
        };
        let switch = |key: &str| Ok(root.optional_bool(key)?.unwrap_or(false));
        let aux_layer_ids = root.ids("eagle_aux_hidden_state_layer_ids")?;
        if aux_layer_ids.is_empty() {
            let problem =
                "is missing; name the layers whose input the draft reads, such as [2, n/2, n-3] of n layers";
            return Err(root.error("eagle_aux_hidden_state_layer_ids", problem));
        }
        let layer = root.section("transformer_layer_config")?;
        let hidden_size = layer.size("hidden_size")?;
        if let Some(width) = root
            .optional_size("target_hidden_size")?
            .filter(|width| *width != hidden_size)
        {
            let problem = format!("is {width}; drafts have the width of their verifier, here {hidden_size}");
            return Err(root.error("target_hidden_size", problem));
        }
        let (kind, heads, head_dim) = read_layer(&layer, hidden_size)?;
        let spec = DraftSpec {
            layer: kind,
            hidden_size,
            intermediate_size: layer.size("intermediate_size")?,
            heads,
            kv_heads: layer.size("num_key_value_heads")?,
            head_dim,
            vocab_size: layer.size("vocab_size")?,
            draft_vocab_size: root.size("draft_vocab_size")?,
            aux_layers: aux_layer_ids.len(),
            rms_norm_eps: layer.f64("rms_norm_eps")? as f32,
            rope: rope_json::from_json(&layer, head_dim)?,
            sliding_window: sliding_window(&layer)?,
            norm_before_residual,
            norm_before_fc: switch("norm_before_fc")?,
            fc_norm: switch("fc_norm")?,
            norm_output: switch("norm_output")?,
        };
        let speculators = root.section("speculators_config")?;
        let verifier = speculators.section("verifier")?;
        let info = ExportInfo {
            verifier_name_or_path: verifier.str("name_or_path")?.to_owned(),
            verifier_architectures: verifier.texts("architectures")?,
            aux_layer_ids,
            ttt_steps: speculators
                .first_of("proposal_methods")?
                .size("speculative_tokens")?,
            max_position_embeddings: layer.size("max_position_embeddings")?,
            initializer_range: layer.optional_f64("initializer_range")?.unwrap_or(0.02),
            bos_token_id: layer.optional_id("bos_token_id")?,
            eos_token_ids: layer.ids("eos_token_id")?,
            pad_token_id: layer.optional_id("pad_token_id")?,
        };
        Self::new(spec, info)
    }

    /// Reads a `config.json`.
    ///
    /// # Errors
    /// The file cannot be read, is no JSON, lacks a needed key, or says what our draft is not.
    pub fn read(path: &Path) -> Result<Self, CheckpointError> {
        let text = std::fs::read(path).map_err(|cause| CheckpointError::read(path, cause))?;
        let value: Value = serde_json::from_slice(&text)
            .map_err(|error| CheckpointError::damaged(path, format!("it is no JSON: {error}")))?;
        Self::from_json(&value).map_err(|error| CheckpointError::Config {
            path: path.into(),
            error,
        })
    }

    /// Writes and syncs a `config.json`.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), CheckpointError> {
        let failed = |cause| CheckpointError::write(path, cause);
        let mut file = File::create(path).map_err(failed)?;
        file.write_all(format!("{:#}\n", self.to_json()).as_bytes())
            .map_err(failed)?;
        file.sync_all().map_err(failed)
    }
}

/// Kind, query heads and head width of the draft's layer, after refusing what our layer is not.
fn read_layer(layer: &Section<'_>, hidden_size: usize) -> Result<(LayerKind, usize, usize), ConfigError> {
    let kind = match layer.str("model_type")? {
        "llama" => LayerKind::Llama,
        "qwen3" => LayerKind::Qwen3,
        other => {
            return Err(layer.error(
                "model_type",
                format!("is `{other}`; draft layers are llama or qwen3"),
            ));
        }
    };
    for key in ["attention_bias", "mlp_bias"] {
        if layer.optional_bool(key)? == Some(true) {
            return Err(layer.error(key, "is true; draft layers have no biases"));
        }
    }
    if let Some(other) = layer.optional_str("hidden_act")?.filter(|act| *act != "silu") {
        return Err(layer.error("hidden_act", format!("is `{other}`; draft layers use silu")));
    }
    if let Some(count) = layer
        .optional_size("num_hidden_layers")?
        .filter(|count| *count != 1)
    {
        return Err(layer.error("num_hidden_layers", format!("is {count}; drafts have 1 layer")));
    }
    let heads = layer.size("num_attention_heads")?;
    let head_dim = match (layer.optional_size("head_dim")?, kind) {
        (Some(head_dim), _) => head_dim,
        (None, LayerKind::Llama) => hidden_size / heads,
        (None, LayerKind::Qwen3) => return Err(layer.error("head_dim", "is missing")),
    };
    Ok((kind, heads, head_dim))
}

/// The window, if the one layer is a sliding one. Without `layer_types` layer 0 sees everything, as in transformers.
fn sliding_window(layer: &Section<'_>) -> Result<Option<usize>, ConfigError> {
    match layer.texts("layer_types")?.first().map(String::as_str) {
        None | Some("full_attention") => Ok(None),
        Some("sliding_attention") => Ok(Some(layer.size("sliding_window")?)),
        Some(other) => {
            let problem =
                format!("starts with `{other}`; draft layers are full_attention or sliding_attention");
            Err(layer.error("layer_types", problem))
        }
    }
}

/// The f64 with the shortest text of an f32: 1e-5 and not 9.999999747378752e-6.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}
