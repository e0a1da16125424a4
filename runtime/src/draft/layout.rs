//! Where each trainable tensor lies in the flat parameter vector.
//!
//! Masters, gradients and both moments share this layout. Names and shapes are those of a speculators checkpoint; the
//! order is that of `named_parameters()` there, which also fixes the order of every sum over all parameters.

use std::ops::Range;

use super::error::DraftError;
use super::spec::{DraftSpec, LayerKind};

/// One trainable tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSlot {
    /// Name in the checkpoint, such as `layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// Shape, row-major: `[out, in]` or `[width]`.
    pub shape: Vec<usize>,
    /// Its elements in the flat vector.
    pub range: Range<usize>,
}

/// Names, shapes and places of all trainable tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterLayout {
    tensors: Vec<TensorSlot>,
    pub(super) places: Places,
}

/// Ranges of the tensors that the forward and backward passes address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    pub(super) fc: Range<usize>,
    pub(super) q: Range<usize>,
    pub(super) k: Range<usize>,
    pub(super) v: Range<usize>,
    pub(super) o: Range<usize>,
    /// Norms of queries and of keys; empty without them.
    pub(super) q_norm: Range<usize>,
    pub(super) k_norm: Range<usize>,
    pub(super) gate: Range<usize>,
    pub(super) up: Range<usize>,
    pub(super) down: Range<usize>,
    pub(super) input_norm: Range<usize>,
    pub(super) post_norm: Range<usize>,
    pub(super) hidden_norm: Range<usize>,
    pub(super) norm: Range<usize>,
    /// Norms before `fc`: none, one of width k·H, or k of width H.
    pub(super) fc_norms: Vec<Range<usize>>,
}

#[derive(Default)]
struct Builder {
    tensors: Vec<TensorSlot>,
    next: usize,
}

impl Builder {
    fn push(&mut self, name: &str, shape: &[usize]) -> Range<usize> {
        let range = self.next..self.next + shape.iter().product::<usize>();
        self.next = range.end;
        self.tensors.push(TensorSlot {
            name: name.to_owned(),
            shape: shape.to_vec(),
            range: range.clone(),
        });
        range
    }
}

impl ParameterLayout {
    /// The layout of a draft.
    ///
    /// # Errors
    /// If the spec contradicts itself.
    pub fn new(spec: &DraftSpec) -> Result<Self, DraftError> {
        spec.check()?;
        let (h, i) = (spec.hidden_size, spec.intermediate_size);
        let (q, kv) = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim);
        let mut b = Builder::default();
        let mut places = Places {
            fc: b.push("fc.weight", &[h, spec.aux_layers * h]),
            q: b.push("layers.0.self_attn.q_proj.weight", &[q, 2 * h]),
            k: b.push("layers.0.self_attn.k_proj.weight", &[kv, 2 * h]),
            v: b.push("layers.0.self_attn.v_proj.weight", &[kv, 2 * h]),
            o: b.push("layers.0.self_attn.o_proj.weight", &[h, q]),
            ..Places::default()
        };
        if spec.layer == LayerKind::Qwen3 {
            places.q_norm = b.push("layers.0.self_attn.q_norm.weight", &[spec.head_dim]);
            places.k_norm = b.push("layers.0.self_attn.k_norm.weight", &[spec.head_dim]);
        }
        places.gate = b.push("layers.0.mlp.gate_proj.weight", &[i, h]);
        places.up = b.push("layers.0.mlp.up_proj.weight", &[i, h]);
        places.down = b.push("layers.0.mlp.down_proj.weight", &[h, i]);
        places.input_norm = b.push("layers.0.input_layernorm.weight", &[h]);
        places.post_norm = b.push("layers.0.post_attention_layernorm.weight", &[h]);
        places.hidden_norm = b.push("layers.0.hidden_norm.weight", &[h]);
        places.norm = b.push("norm.weight", &[h]);
        if spec.norm_before_fc {
            places.fc_norms = vec![b.push("input_norm.weight", &[spec.aux_layers * h])];
        } else if spec.fc_norm {
            places.fc_norms = (0..spec.aux_layers)
                .map(|k| b.push(&format!("fc_norm.{k}.weight"), &[h]))
                .collect();
        }
        Ok(Self {
            tensors: b.tensors,
            places,
        })
    }

    /// Stretches of the gradient, in the order in which the backward pass finishes them.
    pub fn final_order(&self) -> Vec<Range<usize>> {
        let p = &self.places;
        let norms = [&p.norm, &p.post_norm, &p.hidden_norm, &p.q_norm, &p.k_norm];
        let weights = [
            &p.down,
            &p.up,
            &p.gate,
            &p.o,
            &p.input_norm,
            &p.v,
            &p.k,
            &p.q,
            &p.fc,
        ];
        norms
            .into_iter()
            .chain(weights)
            .chain(&p.fc_norms)
            .filter(|place| !place.is_empty())
            .cloned()
            .collect()
    }

    /// All tensors, in order.
    pub fn tensors(&self) -> &[TensorSlot] {
        &self.tensors
    }

    /// The tensor of that name.
    pub fn get(&self, name: &str) -> Option<&TensorSlot> {
        self.tensors.iter().find(|slot| slot.name == name)
    }

    /// Number of parameters: the length of the flat vectors.
    #[expect(clippy::len_without_is_empty, reason = "a layout is never empty")]
    pub fn len(&self) -> usize {
        self.tensors.last().map_or(0, |slot| slot.range.end)
    }
}
