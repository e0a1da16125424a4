//! Kimi-K2.5 without its weights: its configuration, its index of tensors, and shards with true headers over holes.
//!
//! A header-only model is what `eaglet check` reads of the real one: names, shapes and dtypes of 208 thousand tensors in
//! 64 files that say they hold 595 GB and take a few megabytes of disk. The configuration is the published one, written
//! out; the tokenizer and the chat template are the demo verifier's, since the published ones are no `tokenizer.json`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use serde_json::{Value, json};

/// Decoder layers.
pub const LAYERS: usize = 61;
/// Width of the residual stream.
pub const HIDDEN: usize = 7168;
/// Tokens of the vocabulary.
pub const VOCAB: usize = 163_840;
/// Experts of a layer.
pub const EXPERTS: usize = 384;
/// Width of an expert.
pub const INNER: usize = 2048;
/// Files of weights.
pub const SHARDS: usize = 64;

/// Width of the dense MLP of the first layer.
const DENSE_INNER: usize = 18432;
/// Attention heads, and widths of the parts of one.
const HEADS: usize = 64;
const NOPE: usize = 128;
const ROPE: usize = 64;
const VALUE: usize = 128;
/// Widths of the latents of queries, and of keys and values.
const QUERY_RANK: usize = 1536;
const KV_RANK: usize = 512;
/// Weights that share a scale.
const GROUP: usize = 32;
/// Weights in a 32-bit word.
const PER_WORD: usize = 8;

/// A tensor of a shard: its dtype as safetensors spells it, and its shape.
type Tensor = (&'static str, Vec<usize>);

/// Tensors of one file by name.
pub type Shard = BTreeMap<String, Tensor>;

/// Name of a file of weights, from 1.
pub fn shard_name(number: usize) -> String {
    format!("model-{number:05}-of-{SHARDS:06}.safetensors")
}

/// The published `config.json`.
pub const CONFIG: &str = include_str!("../golden/check/kimi_k25_config.json");

/// The tensors of a file, from 1: a layer each, then embedding and norm, the head, and the vision tower.
pub fn shard(number: usize) -> Shard {
    let bf16 = |shape: &[usize]| ("BF16", shape.to_vec());
    let mut tensors = Shard::new();
    match number {
        1..=LAYERS => layer(number - 1, &mut tensors),
        62 => {
            tensors.insert(
                "language_model.model.embed_tokens.weight".to_owned(),
                bf16(&[VOCAB, HIDDEN]),
            );
            tensors.insert("language_model.model.norm.weight".to_owned(), bf16(&[HIDDEN]));
        }
        63 => {
            tensors.insert("language_model.lm_head.weight".to_owned(), bf16(&[VOCAB, HIDDEN]));
        }
        _ => {
            tensors.insert(
                "vision_tower.patch_embed.proj.weight".to_owned(),
                bf16(&[1152, 3, 14, 14]),
            );
            tensors.insert("mm_projector.proj.0.weight".to_owned(), bf16(&[4608, 4608]));
        }
    }
    tensors
}

fn layer(index: usize, tensors: &mut Shard) {
    let mut put = |name: &str, dtype: &'static str, shape: &[usize]| {
        tensors.insert(
            format!("language_model.model.layers.{index}.{name}"),
            (dtype, shape.to_vec()),
        );
    };
    let head = NOPE + ROPE;
    for (name, shape) in [
        ("input_layernorm", vec![HIDDEN]),
        ("post_attention_layernorm", vec![HIDDEN]),
        ("self_attn.q_a_proj", vec![QUERY_RANK, HIDDEN]),
        ("self_attn.q_a_layernorm", vec![QUERY_RANK]),
        ("self_attn.q_b_proj", vec![HEADS * head, QUERY_RANK]),
        ("self_attn.kv_a_proj_with_mqa", vec![KV_RANK + ROPE, HIDDEN]),
        ("self_attn.kv_a_layernorm", vec![KV_RANK]),
        ("self_attn.kv_b_proj", vec![HEADS * (NOPE + VALUE), KV_RANK]),
        ("self_attn.o_proj", vec![HIDDEN, HEADS * VALUE]),
    ] {
        put(&format!("{name}.weight"), "BF16", &shape);
    }
    let mut gated = |module: &str, inner: usize, packed: bool| {
        for (part, rows, cols) in [
            ("gate_proj", inner, HIDDEN),
            ("up_proj", inner, HIDDEN),
            ("down_proj", HIDDEN, inner),
        ] {
            let name = format!("mlp.{module}{part}.weight");
            if packed {
                put(&format!("{name}_packed"), "I32", &[rows, cols / PER_WORD]);
                put(&format!("{name}_scale"), "BF16", &[rows, cols / GROUP]);
                put(&format!("{name}_shape"), "I32", &[2]);
            } else {
                put(&name, "BF16", &[rows, cols]);
            }
        }
    };
    if index == 0 {
        return gated("", DENSE_INNER, false);
    }
    gated("shared_experts.", INNER, false);
    for expert in 0..EXPERTS {
        gated(&format!("experts.{expert}."), INNER, true);
    }
    put("mlp.gate.weight", "BF16", &[EXPERTS, HIDDEN]);
    put("mlp.gate.e_score_correction_bias", "F32", &[EXPERTS]);
}

/// Writes a file of weights: its header, and a hole where the data would be.
///
/// # Panics
/// If the file cannot be written.
pub fn write_shard(path: &Path, tensors: &Shard) -> u64 {
    let mut header = String::from("{");
    let mut end = 0_u64;
    for (name, (dtype, shape)) in tensors {
        let element = if matches!(*dtype, "BF16") { 2 } else { 4 };
        let start = end;
        end += element * shape.iter().map(|&side| side as u64).product::<u64>();
        if header.len() > 1 {
            header.push(',');
        }
        header.push_str(&format!(
            "\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{start},{end}]}}"
        ));
    }
    header.push('}');
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = File::create(path).expect("the test's folder is writable");
    let mut start = (header.len() as u64).to_le_bytes().to_vec();
    start.extend_from_slice(header.as_bytes());
    file.write_all(&start).expect("a few megabytes are left");
    file.set_len(start.len() as u64 + end)
        .expect("the file system can make holes");
    end
}

/// Writes the whole model into a folder; `tokenizer` is a folder whose tokenizer and chat template it gets.
///
/// # Panics
/// If the folder cannot be written.
pub fn write(folder: &Path, tokenizer: &Path) {
    let put = |name: &str, value: &Value| {
        std::fs::write(folder.join(name), value.to_string()).expect("the test's folder is writable");
    };
    std::fs::write(folder.join("config.json"), CONFIG).expect("the test's folder is writable");
    // A token of the tokenizer that it gets.
    put("generation_config.json", &json!({"eos_token_id": 2}));
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(tokenizer.join(name), folder.join(name)).expect("the demo verifier has one");
    }
    let (mut weight_map, mut total) = (serde_json::Map::new(), 0);
    for number in 1..=SHARDS {
        let (name, tensors) = (shard_name(number), shard(number));
        total += write_shard(&folder.join(&name), &tensors);
        weight_map.extend(tensors.into_keys().map(|tensor| (tensor, json!(name))));
    }
    put(
        "model.safetensors.index.json",
        &json!({"metadata": {"total_size": total}, "weight_map": weight_map}),
    );
}
