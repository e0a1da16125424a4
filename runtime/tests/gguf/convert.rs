//! Converts a model in Hugging Face's layout to GGUF, as llama.cpp's `convert_hf_to_gguf.py` does.

use std::collections::BTreeMap;
use std::path::Path;

use eaglet_runtime::weights::Weights;
use serde_json::Value;

use super::quantise::Storage;
use super::writer::Writer;

/// Shape and values of a tensor.
type Matrix = (Vec<usize>, Vec<f32>);

/// Names of a layer's tensors: Hugging Face's and GGUF's.
const LAYER: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
];

struct Model {
    config: Value,
    architecture: &'static str,
}

/// GGUF's name of an architecture, if it can be converted.
pub(crate) fn architecture(model_type: &str) -> Option<&'static str> {
    Some(match model_type {
        "llama" | "mistral" => "llama",
        "qwen2" => "qwen2",
        "qwen3" => "qwen3",
        "qwen3_moe" => "qwen3moe",
        "phi3" => "phi3",
        "gemma3_text" => "gemma3",
        _ => return None,
    })
}

/// The model of a folder as a GGUF file, matrices stored as `storage`.
pub(crate) fn convert(folder: &Path, storage: Storage) -> Writer {
    let read = |name: &str| std::fs::read(folder.join(name)).ok();
    let config: Value = serde_json::from_slice(&read("config.json").expect("a config.json")).expect("JSON");
    let model_type = config["model_type"].as_str().expect("a model_type");
    let model = Model {
        architecture: architecture(model_type).expect("a known architecture"),
        config,
    };
    let mut writer = Writer::new(model.architecture);
    model.metadata(&mut writer);
    if let Some(tokenizer) = read("tokenizer.json") {
        let config = read("tokenizer_config.json").unwrap_or(b"{}".to_vec());
        tokens(
            &mut writer,
            &serde_json::from_slice(&tokenizer).expect("JSON"),
            &serde_json::from_slice(&config).expect("JSON"),
        );
    }
    model.tensors(&mut writer, &Weights::open(folder).expect("weights"), storage);
    writer
}

impl Model {
    fn count(&self, key: &str) -> Option<usize> {
        self.config[key].as_u64().map(|value| value as usize)
    }

    fn heads(&self) -> usize {
        self.count("num_attention_heads").expect("heads")
    }

    fn head_dim(&self) -> usize {
        let hidden_size = self.count("hidden_size").expect("a width");
        self.count("head_dim").unwrap_or(hidden_size / self.heads())
    }

    fn metadata(&self, writer: &mut Writer) {
        let config = &self.config;
        let key = |name: &str| format!("{}.{name}", self.architecture);
        for (name, count) in [
            ("block_count", self.count("num_hidden_layers")),
            ("context_length", self.count("max_position_embeddings")),
            ("embedding_length", self.count("hidden_size")),
            ("feed_forward_length", self.count("intermediate_size")),
            ("attention.head_count", Some(self.heads())),
            ("attention.head_count_kv", self.count("num_key_value_heads")),
            ("attention.key_length", self.count("head_dim")),
            ("attention.value_length", self.count("head_dim")),
            ("attention.sliding_window", self.count("sliding_window")),
            (
                "expert_count",
                self.count("num_local_experts").or(self.count("num_experts")),
            ),
            ("expert_used_count", self.count("num_experts_per_tok")),
            ("expert_feed_forward_length", self.count("moe_intermediate_size")),
        ] {
            if let Some(count) = count {
                writer.u32(&key(name), count);
            }
        }
        writer.f32(
            &key("attention.layer_norm_rms_epsilon"),
            config["rms_norm_eps"].as_f64().expect("an epsilon"),
        );
        for (name, id) in [("bos", "bos_token_id"), ("eos", "eos_token_id")] {
            if let Some(id) = self.count(id) {
                writer.u32(&format!("tokenizer.ggml.{name}_token_id"), id);
            }
        }
        let rope = &config["rope_parameters"];
        let full = if self.architecture == "gemma3" {
            &rope["full_attention"]
        } else {
            rope
        };
        let theta = full["rope_theta"].as_f64().or(config["rope_theta"].as_f64());
        writer.f32(&key("rope.freq_base"), theta.expect("a rotary base"));
        let number = |key: &str| full[key].as_f64();
        if let Some(factor) = number("partial_rotary_factor") {
            let head_dim = self.head_dim() as f64;
            writer.u32(&key("rope.dimension_count"), (head_dim * factor) as usize);
        }
        match full["rope_type"].as_str().unwrap_or("default") {
            "default" => {}
            kind @ ("linear" | "yarn") => {
                writer.text(&key("rope.scaling.type"), kind);
                writer.f32(&key("rope.scaling.factor"), number("factor").expect("a factor"));
                if let Some(original) = number("original_max_position_embeddings") {
                    writer.u32(&key("rope.scaling.original_context_length"), original as usize);
                }
            }
            "llama3" => self.rope_factors(writer, full, theta.expect("a rotary base")),
            other => panic!("no rope type {other}"),
        }
        if self.architecture == "gemma3" {
            let scalar = config["query_pre_attn_scalar"].as_f64().expect("a scalar");
            writer.f32(&key("attention.scale"), scalar.sqrt().recip());
            let layers = config["layer_types"].as_array().expect("a list");
            let slides: Vec<bool> = layers.iter().map(|layer| layer == "sliding_attention").collect();
            writer.flags(&key("attention.sliding_window_pattern"), &slides);
        }
    }

    /// What each frequency is divided by.
    fn rope_factors(&self, writer: &mut Writer, rope: &Value, theta: f64) {
        let number = |key: &str| rope[key].as_f64().expect("a number");
        let (factor, original) = (number("factor"), number("original_max_position_embeddings"));
        let (low, high) = (number("low_freq_factor"), number("high_freq_factor"));
        let pairs = self.head_dim() / 2;
        let factors: Vec<f32> = (0..pairs)
            .map(|pair| {
                let wave = std::f64::consts::TAU * theta.powf(pair as f64 / pairs as f64);
                let smooth = ((original / wave - low) / (high - low)).clamp(0.0, 1.0);
                ((1.0 - smooth) / factor + smooth).recip() as f32
            })
            .collect();
        writer.tensor("rope_freqs.weight", &[pairs], &factors, Storage::F32);
    }

    fn tensors(&self, writer: &mut Writer, weights: &Weights, storage: Storage) {
        let mut experts: BTreeMap<(usize, String), BTreeMap<usize, Matrix>> = BTreeMap::new();
        for name in weights.names() {
            let view = weights.tensor(name).expect("it was named");
            let values = view.to_f32().expect("floats").into_owned();
            let (stem, kind) = name.rsplit_once('.').expect("a kind");
            if let Some((layer, rest)) = in_layer(stem)
                && let Some(rest) = rest.strip_prefix("mlp.experts.")
            {
                let (expert, part) = rest.split_once('.').expect("a projection");
                let part = part.trim_end_matches("_proj").to_owned();
                experts
                    .entry((layer, part))
                    .or_default()
                    .insert(expert.parse().expect("a number"), (view.shape().to_vec(), values));
                continue;
            }
            let ours = self.name(stem);
            let values = self.prepared(&ours, view.shape(), values);
            let storage = if view.shape().len() > 1 {
                storage
            } else {
                Storage::F32
            };
            writer.tensor(&format!("{ours}.{kind}"), view.shape(), &values, storage);
        }
        for ((layer, part), experts) in experts {
            let shape = [&[experts.len()][..], &experts[&0].0].concat();
            let values: Vec<f32> = experts.into_values().flat_map(|(_, values)| values).collect();
            writer.tensor(
                &format!("blk.{layer}.ffn_{part}_exps.weight"),
                &shape,
                &values,
                storage,
            );
        }
    }

    fn name(&self, stem: &str) -> String {
        let Some((layer, part)) = in_layer(stem) else {
            return match stem {
                "model.embed_tokens" => "token_embd",
                "model.norm" => "output_norm",
                "lm_head" => "output",
                other => panic!("no name for {other}"),
            }
            .to_owned();
        };
        let ours = match (part, self.architecture) {
            ("post_attention_layernorm", "gemma3") => "post_attention_norm",
            ("post_attention_layernorm", _) | ("pre_feedforward_layernorm", _) => "ffn_norm",
            ("post_feedforward_layernorm", _) => "post_ffw_norm",
            _ => {
                LAYER
                    .iter()
                    .find(|(theirs, _)| *theirs == part)
                    .expect("a known part")
                    .1
            }
        };
        format!("blk.{layer}.{ours}")
    }

    /// What the converter does to values and their order.
    fn prepared(&self, ours: &str, shape: &[usize], values: Vec<f32>) -> Vec<f32> {
        if self.architecture == "gemma3" && ours.ends_with("norm") {
            return values.into_iter().map(|value| value + 1.0).collect();
        }
        let heads = match ours.rsplit('.').next() {
            Some("attn_q") => self.heads(),
            Some("attn_k") => self.count("num_key_value_heads").unwrap_or(self.heads()),
            _ => return values,
        };
        if self.architecture != "llama" {
            return values;
        }
        // Rows counted by head, half of the head and place in it become head, place, half.
        let row = values.len() / shape[0];
        let (head_dim, half) = (shape[0] / heads, shape[0] / heads / 2);
        let mut out = vec![0.0; values.len()];
        for (index, values) in values.chunks_exact(row).enumerate() {
            let (head, side, place) = (index / head_dim, index % head_dim / half, index % half);
            let stored = head * head_dim + place * 2 + side;
            out[stored * row..][..row].copy_from_slice(values);
        }
        out
    }
}

fn in_layer(stem: &str) -> Option<(usize, &str)> {
    let (layer, part) = stem.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().expect("a number"), part))
}

/// A byte-level tokenizer.
fn tokens(writer: &mut Writer, tokenizer: &Value, config: &Value) {
    let model = &tokenizer["model"];
    let vocab = model["vocab"].as_object().expect("a vocabulary");
    let added = tokenizer["added_tokens"].as_array().expect("a list");
    let mut by_id: BTreeMap<u64, (&str, i32)> = BTreeMap::new();
    for (text, id) in vocab {
        by_id.insert(id.as_u64().expect("an id"), (text, 1));
    }
    for token in added {
        let kind = if token["special"] == true { 3 } else { 4 };
        let text = token["content"].as_str().expect("a text");
        by_id.insert(token["id"].as_u64().expect("an id"), (text, kind));
    }
    assert!(
        by_id.keys().copied().eq(0..by_id.len() as u64),
        "ids without gaps"
    );
    let (texts, kinds): (Vec<&str>, Vec<i32>) = by_id.values().copied().unzip();
    let merges: Vec<String> = model["merges"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|merge| match merge {
            Value::String(merge) => merge.clone(),
            pair => format!(
                "{} {}",
                pair[0].as_str().expect("a text"),
                pair[1].as_str().expect("a text")
            ),
        })
        .collect();
    let digits = tokenizer["pre_tokenizer"]["pretokenizers"][0]["type"] == "Digits";
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", if digits { "smollm" } else { "gpt-2" });
    writer.texts("tokenizer.ggml.tokens", &texts);
    writer.i32s("tokenizer.ggml.token_type", &kinds);
    writer.texts("tokenizer.ggml.merges", &merges);
    if let Some(template) = config["chat_template"].as_str() {
        writer.text("tokenizer.chat_template", template);
    }
    for (name, key) in [("unknown", "unk_token"), ("padding", "pad_token")] {
        if let Some(id) = config[key].as_str().and_then(|text| vocab[text].as_u64()) {
            writer.u32(&format!("tokenizer.ggml.{name}_token_id"), id as usize);
        }
    }
}
