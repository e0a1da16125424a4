//! Tiny random verifiers for tests.

use std::collections::BTreeMap;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

pub(super) const HIDDEN: usize = 24;
pub(super) const VOCAB: usize = 61;
pub(super) const LAYERS: usize = 7;

/// A verifier about to be written: change what the test is about, then [`Tiny::write`].
pub(super) struct Tiny {
    pub(super) config: Value,
    pub(super) tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub(super) dtype: Dtype,
}

impl Tiny {
    /// A Llama with grouped keys, a head dimension that is not H / A, and an untied head.
    pub(super) fn llama() -> Self {
        let (heads, kv_heads, head_dim, inner) = (4, 2, 8, 40);
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": LAYERS,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim,
            "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2,
            "tie_word_embeddings": false,
        });
        let mut tiny = Self {
            config,
            tensors: BTreeMap::new(),
            dtype: Dtype::F32,
        };
        tiny.add("model.embed_tokens.weight", &[VOCAB, HIDDEN]);
        tiny.add("lm_head.weight", &[VOCAB, HIDDEN]);
        tiny.add("model.norm.weight", &[HIDDEN]);
        for layer in 0..LAYERS {
            for (part, shape) in [
                ("input_layernorm", vec![HIDDEN]),
                ("self_attn.q_proj", vec![heads * head_dim, HIDDEN]),
                ("self_attn.k_proj", vec![kv_heads * head_dim, HIDDEN]),
                ("self_attn.v_proj", vec![kv_heads * head_dim, HIDDEN]),
                ("self_attn.o_proj", vec![HIDDEN, heads * head_dim]),
                ("post_attention_layernorm", vec![HIDDEN]),
                ("mlp.gate_proj", vec![inner, HIDDEN]),
                ("mlp.up_proj", vec![inner, HIDDEN]),
                ("mlp.down_proj", vec![HIDDEN, inner]),
            ] {
                tiny.add(&format!("model.layers.{layer}.{part}.weight"), &shape);
            }
        }
        tiny
    }

    /// A Mistral with a window of `window` tokens.
    pub(super) fn mistral(window: usize) -> Self {
        let mut tiny = Self::llama();
        tiny.config["model_type"] = json!("mistral");
        tiny.config["sliding_window"] = json!(window);
        tiny
    }

    /// Adds a tensor of values between -0.3 and 0.3 (norms: around 1), exact in bf16 and f16.
    pub(super) fn add(&mut self, name: &str, shape: &[usize]) {
        let mut state = name.bytes().fold(0x9e37_79b9_7f4a_7c15_u64, |state, byte| {
            (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let center = if shape.len() == 1 { 1.0 } else { 0.0 };
        let values = (0..shape.iter().product())
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                center + ((state >> 40) % 64) as f32 / 64.0 * 0.625 - 0.3125
            })
            .map(|value| bf16::from_f32(value).to_f32())
            .collect();
        self.tensors.insert(name.to_owned(), (shape.to_vec(), values));
    }

    /// Values of a tensor, to be changed.
    pub(super) fn values(&mut self, name: &str) -> &mut Vec<f32> {
        &mut self
            .tensors
            .get_mut(name)
            .expect("the test names a tensor that is there")
            .1
    }

    fn bytes(&self, values: &[f32]) -> Vec<u8> {
        match self.dtype {
            Dtype::BF16 => values
                .iter()
                .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
                .collect(),
            Dtype::F16 => values
                .iter()
                .flat_map(|&x| f16::from_f32(x).to_le_bytes())
                .collect(),
            Dtype::F64 => values.iter().flat_map(|&x| f64::from(x).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
        }
    }

    /// Writes config.json and the tensors in `shards` files.
    pub(super) fn write(&self, folder: &Path, shards: usize) {
        std::fs::write(folder.join("config.json"), self.config.to_string()).expect("writable");
        let stored: Vec<(&String, &Vec<usize>, Vec<u8>)> = self
            .tensors
            .iter()
            .map(|(name, (shape, values))| (name, shape, self.bytes(values)))
            .collect();
        let mut index = serde_json::Map::new();
        for (shard, part) in stored.chunks(stored.len().div_ceil(shards)).enumerate() {
            let file = match shards {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{shard:05}.safetensors"),
            };
            let views = part.iter().map(|(name, shape, bytes)| {
                let view = TensorView::new(self.dtype, shape.to_vec(), bytes).expect("bytes fit the shape");
                (name.as_str(), view)
            });
            safetensors::serialize_to_file(views, None, &folder.join(&file)).expect("writable");
            index.extend(part.iter().map(|(name, _, _)| ((*name).clone(), json!(file))));
        }
        if shards > 1 {
            let index = json!({ "weight_map": index });
            std::fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("writable");
        }
    }

    /// A folder with this verifier in one file.
    pub(super) fn folder(&self) -> tempfile::TempDir {
        let folder = tempfile::tempdir().expect("a temporary folder");
        self.write(folder.path(), 1);
        folder
    }
}
