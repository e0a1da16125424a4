//! The content of Hugging Face's `config.json`, from the metadata.

use serde_json::{Map, Value as Json, json};

use super::architecture::ROPE_TENSORS;
use super::rope::Llama3Scaling;
use super::value::Value;
use super::{Gguf, GgufError};

/// Rotary base of llama.cpp where the metadata have none.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;
/// Every so many layers of Gemma 3 one sees all tokens, where the metadata do not say.
const GEMMA3_PATTERN: i128 = 6;
/// Layers of Gemma 3 27B, whose queries are scaled by the width per head instead of the head's.
const GEMMA3_27B_LAYERS: usize = 62;

impl Gguf {
    /// What `config.json` of the model would say.
    ///
    /// # Errors
    /// When the architecture is not known, or metadata are missing or cannot be expressed.
    pub fn config_json(&self) -> Result<Json, GgufError> {
        let architecture = self.architecture()?;
        let hidden_size = self.required_count("embedding_length")?;
        let heads = self.required_count("attention.head_count")?;
        let head_dim = self.head_dim(hidden_size, heads)?;
        let context = self.count("context_length")?;
        let mut config = object(json!({
            "architectures": [architecture.class],
            "model_type": architecture.model_type,
            "hidden_size": hidden_size,
            "intermediate_size": self.required_count("feed_forward_length")?,
            "num_hidden_layers": self.layers()?,
            "num_attention_heads": heads,
            "num_key_value_heads": self.head_count_kv()?,
            "head_dim": head_dim,
            "vocab_size": self.vocab_size()?,
            "rms_norm_eps": self.required_number("attention.layer_norm_rms_epsilon")?,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "tie_word_embeddings": self.stored_tensor("output.weight").is_none(),
            "bos_token_id": self.token_id("tokenizer.ggml.bos_token_id")?,
            "eos_token_id": self.eos_token_ids()?,
            "rope_parameters": self.rope_parameters(head_dim, context)?,
        }));
        for (key, name) in [
            ("attn_logit_softcapping", "attn_logit_softcapping"),
            ("final_logit_softcapping", "final_logit_softcapping"),
        ] {
            if let Some(value) = self.number(name)?.filter(|&value| value != 0.0) {
                config.insert(key.to_owned(), json!(value));
            }
        }
        match architecture.name {
            "llama" => self.llama(&mut config)?,
            "qwen3moe" => self.qwen3_moe(&mut config)?,
            "phi3" => self.phi3(&mut config, context)?,
            "gemma3" => self.gemma3(&mut config)?,
            _ => {}
        }
        for (key, tensor) in [
            ("attention_bias", "blk.0.attn_q.bias"),
            ("mlp_bias", "blk.0.ffn_up.bias"),
        ] {
            // Qwen 2 has biases without saying so.
            if architecture.name != "qwen2" && self.stored_tensor(tensor).is_some() {
                config.insert(key.to_owned(), json!(true));
            }
        }
        Ok(Json::Object(config))
    }

    fn llama(&self, config: &mut Map<String, Json>) -> Result<(), GgufError> {
        if self.count("expert_count")?.is_some() {
            let key = self.full_key("expert_count");
            return Err(self.key_error(&key, "makes this a Mixtral, which is not read from GGUF"));
        }
        if let Some(window) = self.count("attention.sliding_window")? {
            config.insert("model_type".to_owned(), json!("mistral"));
            config.insert("architectures".to_owned(), json!(["MistralForCausalLM"]));
            config.insert("sliding_window".to_owned(), json!(window));
        }
        Ok(())
    }

    fn qwen3_moe(&self, config: &mut Map<String, Json>) -> Result<(), GgufError> {
        let sparse = |layer: usize| {
            let name = format!("blk.{layer}.ffn_gate_exps.weight");
            self.stored_tensor(&name).is_some()
        };
        let dense: Vec<usize> = (0..self.layers()?).filter(|&layer| !sparse(layer)).collect();
        let key = "expert_weights_norm";
        config.extend(object(json!({
            "num_experts": self.required_count("expert_count")?,
            "num_experts_per_tok": self.required_count("expert_used_count")?,
            "moe_intermediate_size": self.required_count("expert_feed_forward_length")?,
            // llama.cpp computes this architecture so, whether the file says it or not.
            "norm_topk_prob": self.flag(&self.full_key(key))?.unwrap_or(true),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        })));
        Ok(())
    }

    fn phi3(&self, config: &mut Map<String, Json>, context: Option<usize>) -> Result<(), GgufError> {
        let original = self.count("rope.scaling.original_context_length")?.or(context);
        config.insert("original_max_position_embeddings".to_owned(), json!(original));
        config.insert(
            "sliding_window".to_owned(),
            json!(self.count("attention.sliding_window")?),
        );
        Ok(())
    }

    fn gemma3(&self, config: &mut Map<String, Json>) -> Result<(), GgufError> {
        let layers = self.layers()?;
        let number = |key: &str| config[key].as_u64().unwrap_or_default() as f64;
        let scalar = match self.number("attention.scale")? {
            Some(scale) => (scale * scale).recip(),
            None if layers == GEMMA3_27B_LAYERS => number("hidden_size") / number("num_attention_heads"),
            None => number("head_dim"),
        };
        let full = config["rope_parameters"].take();
        let local_theta = self.number("rope.freq_base_swa")?.unwrap_or(DEFAULT_ROPE_THETA);
        config.extend(object(json!({
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": scalar,
            "sliding_window": self.count("attention.sliding_window")?,
            "layer_types": self.gemma3_layers(layers)?,
            "rope_parameters": {
                "full_attention": full,
                "sliding_attention": { "rope_type": "default", "rope_theta": local_theta },
            },
        })));
        config.remove("hidden_act");
        Ok(())
    }

    /// Which layers see a window only.
    fn gemma3_layers(&self, layers: usize) -> Result<Vec<&'static str>, GgufError> {
        let key = self.full_key("attention.sliding_window_pattern");
        let name = |slides: bool| {
            if slides {
                "sliding_attention"
            } else {
                "full_attention"
            }
        };
        if let Some(Value::Array(_)) = self.value(&key) {
            let slides = self.scalars(&key)?.unwrap_or_default();
            let names: Option<Vec<_>> = slides
                .iter()
                .map(|slides| match slides {
                    Value::Flag(slides) => Some(name(*slides)),
                    _ => None,
                })
                .collect();
            return names
                .filter(|names| names.len() == layers)
                .ok_or_else(|| self.key_error(&key, format!("is no list of {layers} flags")));
        }
        let period = self.whole(&key)?.unwrap_or(GEMMA3_PATTERN);
        let period = usize::try_from(period).ok().filter(|&period| period > 0);
        let period = period.ok_or_else(|| self.key_error(&key, "is no number of layers"))?;
        Ok((1..=layers)
            .map(|layer| name(!layer.is_multiple_of(period)))
            .collect())
    }

    fn rope_parameters(&self, head_dim: usize, context: Option<usize>) -> Result<Json, GgufError> {
        let theta = self.number("rope.freq_base")?.unwrap_or(DEFAULT_ROPE_THETA);
        let mut rope = object(json!({ "rope_type": "default", "rope_theta": theta }));
        let turned = self.count("rope.dimension_count")?.unwrap_or(head_dim);
        if turned != head_dim {
            let factor = turned as f64 / head_dim as f64;
            rope.insert("partial_rotary_factor".to_owned(), json!(factor));
        }
        let original = self.count("rope.scaling.original_context_length")?;
        let kind = self.text(&self.full_key("rope.scaling.type"))?.unwrap_or("none");
        // Older files call linear scaling by its factor only.
        let factor = match self.number("rope.scaling.factor")? {
            None => self.number("rope.scale_linear")?,
            factor => factor,
        };
        let factor = factor.filter(|&factor| factor != 0.0 && factor != 1.0);
        for name in ["yarn_ext_factor", "yarn_attn_factor"] {
            let name = format!("rope.scaling.{name}");
            if let Some(value) = self.number(&name)?.filter(|&value| value != 1.0) {
                let key = self.full_key(&name);
                return Err(self.key_error(&key, format!("is {value}, which is not supported; only 1 is")));
            }
        }
        let [freqs, long, short] = ROPE_TENSORS;
        match (
            self.rope_factors(freqs)?,
            self.rope_factors(long)?,
            self.rope_factors(short)?,
        ) {
            (None, None, None) => match (kind, factor) {
                ("none" | "linear", None) => {}
                ("none" | "linear", Some(factor)) => {
                    rope.extend(object(json!({ "rope_type": "linear", "factor": factor })));
                }
                ("yarn", Some(factor)) => {
                    rope.extend(object(json!({
                        "rope_type": "yarn",
                        "factor": factor,
                        "original_max_position_embeddings": original,
                    })));
                    for (key, name) in [("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")] {
                        if let Some(value) = self.number(&format!("rope.scaling.{name}"))? {
                            rope.insert(key.to_owned(), json!(value));
                        }
                    }
                }
                (kind, _) => {
                    let key = self.full_key("rope.scaling.type");
                    return Err(self.key_error(
                        &key,
                        format!("is `{kind}` without what it needs, or is not known"),
                    ));
                }
            },
            (Some(factors), None, None) => {
                let scaling =
                    Llama3Scaling::of_factors(&factors, theta).ok_or_else(|| GgufError::Damaged {
                        file: self.path.clone(),
                        place: format!("tensor `{freqs}`"),
                        reason: "holds factors that no llama3 rope scaling has".to_owned(),
                    })?;
                rope.extend(object(json!({
                    "rope_type": "llama3",
                    "factor": scaling.factor,
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_max_position_embeddings as u64,
                })));
            }
            (None, Some(long), Some(short)) => {
                let original = original.or(context);
                let factor = context
                    .zip(original)
                    .map(|(context, original)| context as f64 / original as f64);
                rope.extend(object(json!({
                    "rope_type": "longrope",
                    "long_factor": decimals(&long),
                    "short_factor": decimals(&short),
                    "original_max_position_embeddings": original,
                    "factor": factor,
                })));
            }
            _ => {
                return Err(GgufError::Damaged {
                    file: self.path.clone(),
                    place: "the tensors of the rotary embedding".to_owned(),
                    reason: "do not go together".to_owned(),
                });
            }
        }
        Ok(Json::Object(rope))
    }

    /// A tensor with one factor per pair of dimensions.
    fn rope_factors(&self, name: &str) -> Result<Option<Vec<f32>>, GgufError> {
        let Some(tensor) = self.stored_tensor(name) else {
            return Ok(None);
        };
        let damaged = |reason: String| GgufError::Damaged {
            file: tensor.file().to_owned(),
            place: format!("tensor `{name}`"),
            reason,
        };
        if tensor.shape().len() != 1 {
            return Err(damaged(format!(
                "has shape {:?}, which is no list",
                tensor.shape()
            )));
        }
        let values = tensor
            .to_f32()
            .map_err(|_| damaged(format!("is stored as {}, which are no floats", tensor.encoding())))?;
        Ok(Some(values.into_owned()))
    }

    fn head_dim(&self, hidden_size: usize, heads: usize) -> Result<usize, GgufError> {
        let (keys, values) = (
            self.count("attention.key_length")?,
            self.count("attention.value_length")?,
        );
        if let (Some(keys), Some(values)) = (keys, values)
            && keys != values
        {
            let key = self.full_key("attention.value_length");
            return Err(self.key_error(&key, format!("is {values}, and keys have {keys}")));
        }
        if let Some(head_dim) = keys {
            return Ok(head_dim);
        }
        if !hidden_size.is_multiple_of(heads) {
            let key = self.full_key("attention.key_length");
            return Err(self.key_error(&key, "is missing, and the heads do not divide the width"));
        }
        Ok(hidden_size / heads)
    }

    /// Number of layers; each has tensors, so a claim of more layers than tensors is none.
    fn layers(&self) -> Result<usize, GgufError> {
        let layers = self.required_count("block_count")?;
        if layers > self.tensors().count() {
            let key = self.full_key("block_count");
            return Err(self.key_error(&key, format!("is {layers}, more than there are tensors")));
        }
        Ok(layers)
    }

    /// Key and value heads; as many as query heads if the file does not say.
    pub(super) fn head_count_kv(&self) -> Result<usize, GgufError> {
        match self.count("attention.head_count_kv")? {
            Some(heads) => Ok(heads),
            None => self.required_count("attention.head_count"),
        }
    }

    /// Rows of the embedding.
    fn vocab_size(&self) -> Result<usize, GgufError> {
        let embedding = self
            .stored_tensor("token_embd.weight")
            .ok_or_else(|| GgufError::Damaged {
                file: self.path.clone(),
                place: "tensor `token_embd.weight`".to_owned(),
                reason: "is missing".to_owned(),
            })?;
        Ok(embedding.rows())
    }

    /// Tokens that end an answer, without repeats.
    fn eos_token_ids(&self) -> Result<Vec<u32>, GgufError> {
        let mut ids = Vec::new();
        for name in ["eos", "eot", "eom"] {
            let id = self.token_id(&format!("tokenizer.ggml.{name}_token_id"))?;
            ids.extend(id.filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }

    /// A key of the architecture: `llama.block_count`.
    fn full_key(&self, name: &str) -> String {
        let architecture = self
            .text("general.architecture")
            .ok()
            .flatten()
            .unwrap_or_default();
        format!("{architecture}.{name}")
    }

    /// A number of things; zero is none. Some files have one per layer, which must all be the same.
    fn count(&self, name: &str) -> Result<Option<usize>, GgufError> {
        let key = self.full_key(name);
        let value = match self.value(&key) {
            Some(Value::Array(_)) => {
                let values = self.scalars(&key)?.unwrap_or_default();
                match values.split_first() {
                    Some((&Value::Whole(first), rest))
                        if rest.iter().all(|value| *value == Value::Whole(first)) =>
                    {
                        Some(first)
                    }
                    _ => {
                        return Err(
                            self.key_error(&key, "differs from layer to layer, which is not supported")
                        );
                    }
                }
            }
            _ => self.whole(&key)?,
        };
        let count = value.map(|value| {
            // More than 32 bits are no size of a model.
            let count = u32::try_from(value)
                .ok()
                .and_then(|count| usize::try_from(count).ok());
            count.ok_or_else(|| self.key_error(&key, format!("is {value}, no size")))
        });
        Ok(count.transpose()?.filter(|&count| count > 0))
    }

    pub(super) fn required_count(&self, name: &str) -> Result<usize, GgufError> {
        self.count(name)?
            .ok_or_else(|| self.key_error(&self.full_key(name), "is missing or 0"))
    }

    fn number(&self, name: &str) -> Result<Option<f64>, GgufError> {
        let key = self.full_key(name);
        match self.value(&key) {
            None => Ok(None),
            Some(&Value::Float(value)) if value.is_finite() => Ok(Some(value)),
            Some(&Value::Whole(value)) => Ok(Some(value as f64)),
            Some(_) => Err(self.key_error(&key, "is no finite number")),
        }
    }

    fn required_number(&self, name: &str) -> Result<f64, GgufError> {
        self.number(name)?
            .ok_or_else(|| self.key_error(&self.full_key(name), "is missing"))
    }
}

/// The map of a literal object.
fn object(value: Json) -> Map<String, Json> {
    match value {
        Json::Object(map) => map,
        _ => Map::new(),
    }
}

/// Singles at their shortest decimal notation.
fn decimals(values: &[f32]) -> Vec<f64> {
    values
        .iter()
        .map(|value| value.to_string().parse().unwrap_or(f64::from(*value)))
        .collect()
}
