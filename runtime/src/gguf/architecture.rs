//! The architectures that are read, and what llama.cpp's converter does to the tensors of each.

use crate::weights::{RowOrder, TensorView};

/// One value of `general.architecture`.
#[derive(Debug)]
pub(super) struct Architecture {
    /// The value.
    pub(super) name: &'static str,
    /// `model_type` of the model in Hugging Face's layout.
    pub(super) model_type: &'static str,
    /// Its class in transformers.
    pub(super) class: &'static str,
    /// Rows of queries and keys are stored as [`RowOrder::Interleaved`].
    interleaved: bool,
    /// Norms are stored with one added.
    norms_plus_one: bool,
    /// Tensors of a layer that are named otherwise than in [`LAYER_TENSORS`].
    layer_tensors: &'static [(&'static str, &'static str)],
}

const ARCHITECTURES: &[Architecture] = &[
    // Mistral's converter writes the same architecture.
    Architecture {
        name: "llama",
        model_type: "llama",
        class: "LlamaForCausalLM",
        interleaved: true,
        norms_plus_one: false,
        layer_tensors: &[],
    },
    Architecture {
        name: "qwen2",
        model_type: "qwen2",
        class: "Qwen2ForCausalLM",
        interleaved: false,
        norms_plus_one: false,
        layer_tensors: &[],
    },
    Architecture {
        name: "qwen3",
        model_type: "qwen3",
        class: "Qwen3ForCausalLM",
        interleaved: false,
        norms_plus_one: false,
        layer_tensors: &[],
    },
    Architecture {
        name: "qwen3moe",
        model_type: "qwen3_moe",
        class: "Qwen3MoeForCausalLM",
        interleaved: false,
        norms_plus_one: false,
        layer_tensors: &[],
    },
    Architecture {
        name: "phi3",
        model_type: "phi3",
        class: "Phi3ForCausalLM",
        interleaved: false,
        norms_plus_one: false,
        layer_tensors: &[("attn_qkv", "self_attn.qkv_proj"), ("ffn_up", "mlp.gate_up_proj")],
    },
    Architecture {
        name: "gemma3",
        model_type: "gemma3_text",
        class: "Gemma3ForCausalLM",
        interleaved: false,
        norms_plus_one: true,
        layer_tensors: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
    },
];

/// Tensors outside the layers: GGUF's name and Hugging Face's.
const GLOBAL_TENSORS: &[(&str, &str)] = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
];

/// Tensors of a layer: GGUF's name and Hugging Face's.
const LAYER_TENSORS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
    ("ffn_gate_inp", "mlp.gate"),
];

/// Tensors of a layer that hold the same matrix of all experts.
const EXPERT_TENSORS: &[(&str, &str)] = &[
    ("ffn_gate_exps", "gate_proj"),
    ("ffn_up_exps", "up_proj"),
    ("ffn_down_exps", "down_proj"),
];

/// Tensors that are settings of the rotary embedding; they go into the configuration.
pub(super) const ROPE_TENSORS: [&str; 3] = [
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
];

/// Heads of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Heads {
    /// Of queries.
    pub(super) queries: usize,
    /// Of keys and values.
    pub(super) keys: usize,
}

impl Architecture {
    /// The architecture of this name.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        ARCHITECTURES
            .iter()
            .find(|architecture| architecture.name == name)
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        let names: Vec<_> = ARCHITECTURES
            .iter()
            .map(|architecture| architecture.name)
            .collect();
        names.join(", ")
    }

    /// A tensor under Hugging Face's name and in its order; the stacked matrices of experts one by one.
    ///
    /// Names that are not known stay, in a layer under the layer's name, so that who checks a layer's tensors finds them.
    /// Nothing is returned for [`ROPE_TENSORS`].
    ///
    /// # Errors
    /// What is wrong with the tensor.
    pub(super) fn tensors(&self, stored: &TensorView, heads: Heads) -> Result<Vec<TensorView>, String> {
        let name = stored.name().to_owned();
        if ROPE_TENSORS.contains(&name.as_str()) {
            return Ok(Vec::new());
        }
        let (stem, kind) = name.rsplit_once('.').unwrap_or((&name, ""));
        let Some((layer, part)) = layer_part(stem) else {
            let known = look_up(GLOBAL_TENSORS, stem);
            let name = known.map_or(name.clone(), |known| format!("{known}.{kind}"));
            return Ok(vec![self.restored(
                stored.clone().named(name),
                part_of(stem),
                heads,
            )?]);
        };
        let layer = format!("model.layers.{layer}");
        if let Some(projection) = look_up(EXPERT_TENSORS, part) {
            if stored.shape().len() != 3 {
                return Err(format!(
                    "has shape {:?} where experts are stacked",
                    stored.shape()
                ));
            }
            let experts = stored.parts().enumerate();
            return Ok(experts
                .map(|(expert, view)| view.named(format!("{layer}.mlp.experts.{expert}.{projection}.{kind}")))
                .collect());
        }
        let known = look_up(self.layer_tensors, part).or_else(|| look_up(LAYER_TENSORS, part));
        let view = stored
            .clone()
            .named(format!("{layer}.{}.{kind}", known.unwrap_or(part)));
        Ok(vec![self.restored(view, part, heads)?])
    }

    /// Undoes what the converter did to the values and their order.
    fn restored(&self, view: TensorView, part: &str, heads: Heads) -> Result<TensorView, String> {
        if self.norms_plus_one && part.ends_with("norm") {
            return Ok(view.shifted(-1.0));
        }
        let heads = match part {
            "attn_q" => heads.queries,
            "attn_k" => heads.keys,
            _ => return Ok(view),
        };
        if !self.interleaved {
            return Ok(view);
        }
        let rows = view.rows();
        if heads == 0 || !rows.is_multiple_of(2 * heads) {
            return Err(format!(
                "has {rows} rows, which are no {heads} heads of an even number of rows"
            ));
        }
        Ok(view.in_order(RowOrder::Interleaved {
            head_dim: rows / heads,
        }))
    }
}

/// Number and part of a name like `blk.3.attn_q`.
fn layer_part(stem: &str) -> Option<(usize, &str)> {
    let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
    Some((layer.parse().ok()?, part))
}

/// The last part of a name.
fn part_of(stem: &str) -> &str {
    stem.rsplit('.').next().unwrap_or(stem)
}

fn look_up(table: &[(&str, &'static str)], name: &str) -> Option<&'static str> {
    table
        .iter()
        .find(|(known, _)| *known == name)
        .map(|&(_, known)| known)
}
