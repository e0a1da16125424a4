//! The shape of a verifier, from its Hugging Face `config.json`.
//!
//! Both generations of key spellings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`. The element
//! type that the file claims (`torch_dtype`, `dtype`) is not read at all: each tensor says its own.

use std::cell::RefCell;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::family::{Family, Window};
use super::keys::{KeyProblem, Keys};
use crate::model_files::{self, ModelFiles, ModelFilesError};
use crate::rope::{Rope, RopeScaling};

/// Rotary base of transformers' Llama when a file has none.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

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

/// Everything that decides a verifier's tensors and its forward pass.
#[derive(Clone, Debug, PartialEq)]
pub struct VerifierConfig {
    /// `model_type` of the file.
    pub model_type: String,
    /// First entry of `architectures`, for the files of drafts; empty if there is none.
    pub architecture: String,
    /// Width H of the residual stream.
    pub hidden_size: usize,
    /// Width I of the MLP.
    pub intermediate_size: usize,
    /// Decoder layers n.
    pub layers: usize,
    /// Query heads A.
    pub heads: usize,
    /// Key and value heads K; divides A.
    pub kv_heads: usize,
    /// Width D of a head.
    pub head_dim: usize,
    /// Vocabulary V: rows of embedding and head.
    pub vocab_size: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding of queries and keys.
    pub rope: Rope,
    /// A query sees itself and this many minus one tokens before it; `None` is full attention.
    pub sliding_window: Option<usize>,
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
        with_keys(file, bytes, |keys| {
            let file = file.to_owned();
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
                Some(family) => Ok(Self::from_keys(family, keys)),
                None => Err(ConfigError::UnknownModelType { file, model_type }),
            }
        })
    }

    fn from_keys(family: &Family, keys: &Keys<'_>) -> Self {
        let hidden_size = keys.required_count("hidden_size");
        let heads = keys.required_count("num_attention_heads");
        let kv_heads = keys.count("num_key_value_heads").unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            let reason = format!("is {kv_heads}, which does not divide num_attention_heads {heads}");
            keys.inconsistent("num_key_value_heads", reason);
        }
        let head_dim = keys.count("head_dim").unwrap_or_else(|| {
            if !hidden_size.is_multiple_of(heads) {
                let reason =
                    format!("is {hidden_size}, no multiple of num_attention_heads {heads}; add head_dim");
                keys.inconsistent("hidden_size", reason);
            }
            hidden_size / heads
        });
        if !head_dim.is_multiple_of(2) {
            keys.inconsistent(
                "head_dim",
                format!("is {head_dim}; rotary embedding needs an even one"),
            );
        }
        for &flag in family.must_be_false {
            if keys.flag(flag) == Some(true) {
                keys.unsupported(flag, format!("false, for {}", family.model_type));
            }
        }
        if keys.get("hidden_act").is_some()
            && !matches!(keys.text("hidden_act"), Some("silu" | "swish") | None)
        {
            keys.unsupported("hidden_act", "silu");
        }
        if keys.get("quantization_config").is_some() {
            keys.unsupported("quantization_config", "weights stored as bf16, f16 or f32");
        }
        Self {
            model_type: family.model_type.to_owned(),
            architecture: keys
                .get("architectures")
                .and_then(|list| list.get(0)?.as_str())
                .unwrap_or_default()
                .to_owned(),
            hidden_size,
            intermediate_size: keys.required_count("intermediate_size"),
            layers: layers(keys),
            heads,
            kv_heads,
            head_dim,
            vocab_size: keys.required_count("vocab_size"),
            rms_norm_eps: keys.required_positive("rms_norm_eps") as f32,
            rope: rope(keys, head_dim),
            sliding_window: match family.window {
                Window::Never => None,
                Window::EveryLayer => keys.count("sliding_window"),
            },
            tied_embeddings: keys.flag("tie_word_embeddings").unwrap_or(false),
            max_position_embeddings: keys.count("max_position_embeddings"),
            eos_token_ids: keys.token_ids("eos_token_id"),
        }
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
    let problems = problems.into_inner();
    if problems.is_empty() {
        Ok(result)
    } else {
        Err(ConfigError::Keys {
            file: file.to_owned(),
            problems,
        })
    }
}

/// Reads the rotary embedding in either spelling.
fn rope(keys: &Keys<'_>, dim: usize) -> Rope {
    let scaling_key = if keys.get("rope_parameters").is_some() {
        "rope_parameters"
    } else {
        "rope_scaling"
    };
    let parameters = keys.object(scaling_key);
    let theta = parameters
        .as_ref()
        .and_then(|parameters| parameters.positive("rope_theta"))
        .or_else(|| keys.positive("rope_theta"))
        .unwrap_or(DEFAULT_ROPE_THETA);
    for keys in parameters.iter().chain([keys]) {
        if keys
            .positive("partial_rotary_factor")
            .is_some_and(|factor| factor != 1.0)
        {
            keys.unsupported("partial_rotary_factor", "1.0");
        }
    }
    let scaling = parameters.as_ref().map_or(RopeScaling::None, rope_scaling);
    Rope { theta, dim, scaling }
}

fn rope_scaling(keys: &Keys<'_>) -> RopeScaling {
    // transformers called the key `type` before it was `rope_type`.
    let type_key = if keys.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    match keys.text(type_key) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: keys.required_positive("factor"),
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: keys.required_positive("factor"),
            low_freq_factor: keys.required_positive("low_freq_factor"),
            high_freq_factor: keys.required_positive("high_freq_factor"),
            original_max_position_embeddings: keys.required_positive("original_max_position_embeddings"),
        },
        Some(_) => {
            keys.unsupported(type_key, "default, linear, llama3");
            RopeScaling::None
        }
    }
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
