//! Which tensors a draft checkpoint has, and what its vocabulary maps must satisfy.
//!
//! Names and shapes are those of speculators 0.9 (`eagle3`), which vLLM loads. Linear weights are `[out, in]`, row-major.

use crate::draft::{DraftSpec, LayerKind};

/// Name of the embedding, a frozen copy of the verifier's; the one tensor a reader may find missing.
pub(super) const EMBEDDING: &str = "embed_tokens.weight";
/// Name of the map from draft ids to offsets, i64 `[draft_vocab_size]`.
pub(super) const D2T: &str = "d2t";
/// Name of the mask of verifier ids in the draft's vocabulary, bool `[vocab_size]`.
pub(super) const T2D: &str = "t2d";

/// Names and shapes of all float tensors of a draft's checkpoint, in the order of the forward pass.
///
/// Those of `d2t` and `t2d` are not among them.
pub fn tensor_table(spec: &DraftSpec) -> Vec<(String, Vec<usize>)> {
    let h = spec.hidden_size;
    let (queries, keys) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
    let mut table = vec![(EMBEDDING.to_owned(), vec![spec.vocab_size, h])];
    if spec.norm_before_fc {
        table.push(("input_norm.weight".to_owned(), vec![spec.aux_layers * h]));
    }
    if spec.fc_norm {
        table.extend((0..spec.aux_layers).map(|i| (format!("fc_norm.{i}.weight"), vec![h])));
    }
    table.push(("fc.weight".to_owned(), vec![h, spec.aux_layers * h]));
    let mut layer = |name: &str, shape: Vec<usize>| table.push((format!("layers.0.{name}.weight"), shape));
    layer("input_layernorm", vec![h]);
    layer("hidden_norm", vec![h]);
    layer("self_attn.q_proj", vec![queries, 2 * h]);
    layer("self_attn.k_proj", vec![keys, 2 * h]);
    layer("self_attn.v_proj", vec![keys, 2 * h]);
    if spec.layer == LayerKind::Qwen3 {
        layer("self_attn.q_norm", vec![spec.head_dim]);
        layer("self_attn.k_norm", vec![spec.head_dim]);
    }
    layer("self_attn.o_proj", vec![h, queries]);
    layer("post_attention_layernorm", vec![h]);
    layer("mlp.gate_proj", vec![spec.intermediate_size, h]);
    layer("mlp.up_proj", vec![spec.intermediate_size, h]);
    layer("mlp.down_proj", vec![h, spec.intermediate_size]);
    table.push(("norm.weight".to_owned(), vec![h]));
    table.push(("lm_head.weight".to_owned(), vec![spec.draft_vocab_size, h]));
    table
}

/// Checks the vocabulary maps against each other and the sizes of the vocabularies.
///
/// With a reduced vocabulary `d2t` is needed: vLLM would load its absence as zeros and draft wrong tokens without a word.
/// Returns the name of the offending map and what is wrong with it.
pub(super) fn check_maps(
    spec: &DraftSpec,
    d2t: Option<&[i64]>,
    t2d: Option<&[bool]>,
) -> Result<(), (&'static str, String)> {
    let (draft, verifier) = (spec.draft_vocab_size, spec.vocab_size);
    if let Some(d2t) = d2t {
        if d2t.len() != draft {
            return Err((
                D2T,
                format!(
                    "has {} entries where the draft vocabulary has {draft} tokens",
                    d2t.len()
                ),
            ));
        }
        let mut previous = -1i64;
        for (id, &offset) in d2t.iter().enumerate() {
            let target = (id as i64).saturating_add(offset);
            if target <= previous || target >= verifier as i64 {
                let problem = format!(
                    "maps draft token {id} to verifier token {target}: targets must ascend from 0 to below {verifier}"
                );
                return Err((D2T, problem));
            }
            previous = target;
        }
    } else if draft != verifier {
        return Err((
            D2T,
            format!("is missing, but the draft vocabulary ({draft}) is smaller than {verifier}"),
        ));
    }
    let Some(t2d) = t2d else { return Ok(()) };
    if t2d.len() != verifier {
        return Err((
            T2D,
            format!(
                "has {} entries where the verifier has {verifier} tokens",
                t2d.len()
            ),
        ));
    }
    let marked = t2d
        .iter()
        .enumerate()
        .filter(|(_, marked)| **marked)
        .map(|(id, _)| id as i64);
    // Without `d2t` the vocabulary is full, and each token is its own target.
    let targets = (0..draft).map(|id| id as i64 + d2t.map_or(0, |d2t| d2t[id]));
    if !marked.eq(targets) {
        return Err((T2D, "marks other verifier tokens than `d2t` maps to".to_owned()));
    }
    Ok(())
}
