//! Buffers of one training step, and which positions it computes.
//!
//! Only positions that reach the loss are unrolled: *active* position i has a masked target at i, i+1, … or
//! i + ttt_steps − 1. The others still give keys and values in step 0. A chat whose prompt is half of its tokens costs
//! little more than half.

use super::batch::DraftBatch;
use super::spec::{DraftSpec, LayerKind};
use crate::device::{AttentionPlan, Buffer, Device};

/// Which positions a pass unrolls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// Those with a masked target in one of the steps.
    Trained,
    /// Those that are masked themselves: the anchors of acceptance.
    Anchors,
    /// All.
    All,
}

/// Sizes of a pass. T positions, R active ones, S steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sizes {
    /// T: positions of the row.
    pub(super) positions: usize,
    /// R: active positions.
    pub(super) active: usize,
    /// S: TTT steps.
    pub(super) steps: usize,
    /// H.
    pub(super) hidden: usize,
    /// I.
    pub(super) intermediate: usize,
    /// Width of a query row.
    pub(super) query: usize,
    /// Width of a key row.
    pub(super) key: usize,
    /// k·H: width of the aux states.
    pub(super) aux: usize,
}

impl Sizes {
    /// Sizes of a row of `positions`, of which `active` are unrolled over `steps`.
    pub(super) fn new(spec: &DraftSpec, steps: usize, positions: usize, active: usize) -> Self {
        Self {
            positions,
            active,
            steps,
            hidden: spec.hidden_size,
            intermediate: spec.intermediate_size,
            query: spec.heads * spec.head_dim,
            key: spec.kv_heads * spec.head_dim,
            aux: spec.aux_layers * spec.hidden_size,
        }
    }

    /// S·R: rows of a stack over all steps.
    pub(super) fn stacked(&self) -> usize {
        self.steps * self.active
    }

    /// Rows of keys: all positions in step 0, the active ones in later steps.
    pub(super) fn keys(&self) -> usize {
        self.positions + (self.steps - 1) * self.active
    }

    /// Tokens that any step reads: the row and S − 1 zeros behind it.
    pub(super) fn tokens(&self) -> usize {
        self.positions + self.steps - 1
    }

    /// Rows of step `step` in a stack of `width` wide rows.
    pub(super) fn of_step(&self, step: usize, width: usize) -> std::ops::Range<usize> {
        step * self.active * width..(step + 1) * self.active * width
    }

    /// Rows of step `step` in a stack of key rows.
    pub(super) fn keys_of_step(&self, step: usize) -> std::ops::Range<usize> {
        match step {
            0 => 0..self.positions * self.key,
            _ => {
                let start = self.positions + (step - 1) * self.active;
                start * self.key..(start + self.active) * self.key
            }
        }
    }
}

/// What a pass computes, derived from the row.
#[derive(Debug, Default)]
pub(super) struct RowPlan {
    pub(super) sizes: Sizes,
    /// Active positions, ascending, `[R]`.
    pub(super) active: Vec<u32>,
    /// Place of each position among the active ones, `u32::MAX` for the others, `[T]`.
    pub(super) place: Vec<u32>,
    /// Input tokens, zeros behind the row, `[T + S − 1]`.
    pub(super) tokens: Vec<u32>,
    /// `active` shifted by each step: rows of `tokens` that step reads, `[S, R]`.
    pub(super) token_rows: Vec<u32>,
    /// Rotary positions of the active positions per step, `[S, R]`.
    pub(super) rotary: Vec<u32>,
    pub(super) attention: AttentionPlan,
}

impl RowPlan {
    pub(super) fn prepare(&mut self, spec: &DraftSpec, steps: usize, batch: &DraftBatch, wanted: Wanted) {
        let positions = batch.len();
        let masked = |i: usize| batch.loss_mask.get(i).is_some_and(|&mask| mask != 0);
        let is_active = |i: usize| match wanted {
            Wanted::Trained => (0..steps).any(|step| masked(i + step)),
            Wanted::Anchors => masked(i),
            Wanted::All => true,
        };
        self.active.clear();
        self.active
            .extend((0..positions as u32).filter(|&i| is_active(i as usize)));
        self.place.clear();
        self.place.resize(positions, u32::MAX);
        for (place, &position) in self.active.iter().enumerate() {
            self.place[position as usize] = place as u32;
        }
        self.tokens.clear();
        self.tokens.extend_from_slice(&batch.tokens);
        self.tokens.resize(positions + steps - 1, 0);
        self.token_rows.clear();
        self.rotary.clear();
        for step in 0..steps as u32 {
            self.token_rows.extend(self.active.iter().map(|&i| i + step));
            self.rotary
                .extend(self.active.iter().map(|&i| batch.position_ids[i as usize] + step));
        }
        self.attention
            .set(batch.segments(), &self.active, spec.sliding_window);
        self.sizes = Sizes::new(spec, steps, positions, self.active.len());
    }
}

macro_rules! buffers {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $size:expr,)* } ($sizes:ident, $spec:ident)) => {
        $(#[$doc])*
        #[derive(Debug, Default)]
        pub(super) struct $name {
            $($(#[$field_doc])* pub(super) $field: Buffer,)*
        }

        impl $name {
            /// Gives every buffer its length; contents are what was left in them.
            pub(super) fn fit(&mut self, device: &impl Device, $sizes: &Sizes, $spec: &DraftSpec) {
                $(device.fit(&mut self.$field, concat!(stringify!($name), ".", stringify!($field)), $size);)*
            }

            /// Elements of all buffers together, once they have that length.
            pub(super) fn elements($sizes: &Sizes, $spec: &DraftSpec) -> usize {
                0 $(+ $size)*
            }
        }
    };
}

buffers! {
    /// What the forward pass leaves for the backward pass.
    Activations {
        /// Normalised aux states, `[T, k·H]`; empty without a norm before `fc`.
        fc_input: if spec.norm_before_fc || spec.fc_norm { sizes.positions * sizes.aux } else { 0 },
        /// 1 / rms of the aux states, `[norms, T]`.
        fc_rstd: sizes.positions * if spec.fc_norm { spec.aux_layers } else { 1 },
        /// Output of `fc`, `[T, H]`.
        fc_output: sizes.positions * sizes.hidden,
        /// Embedded tokens, `[T + S − 1, H]`.
        embedding: sizes.tokens() * sizes.hidden,
        embedding_rstd: sizes.tokens(),
        /// Normalised embeddings, `[T + S − 1, H]`.
        embedding_norm: sizes.tokens() * sizes.hidden,
        /// What the embeddings alone give queries, keys and values; each step reads it shifted.
        token_q: sizes.tokens() * sizes.query,
        token_k: sizes.tokens() * sizes.key,
        token_v: sizes.tokens() * sizes.key,
        /// Normalised hidden input of step 0 at all positions, `[T, H]`.
        first_norm: sizes.positions * sizes.hidden,
        first_rstd: sizes.positions,
        /// Normalised hidden inputs at active positions, `[S·R, H]`.
        hidden_norm: sizes.stacked() * sizes.hidden,
        hidden_rstd: sizes.stacked(),
        /// Queries before their norm (qwen3 only) and after rotation, `[S·R, heads · head_dim]`.
        q_raw: if spec.layer == LayerKind::Qwen3 { sizes.stacked() * sizes.query } else { 0 },
        q_rstd: sizes.stacked() * spec.heads,
        q: sizes.stacked() * sizes.query,
        /// Keys likewise, `[T + (S−1)·R, kv_heads · head_dim]`.
        k_raw: if spec.layer == LayerKind::Qwen3 { sizes.keys() * sizes.key } else { 0 },
        k_rstd: sizes.keys() * spec.kv_heads,
        k: sizes.keys() * sizes.key,
        v: sizes.keys() * sizes.key,
        /// Attention's output before `o_proj`, and its softmax statistics.
        attention: sizes.stacked() * sizes.query,
        lse: sizes.stacked() * spec.heads,
        /// Residual stream after attention, `[S·R, H]`.
        middle: sizes.stacked() * sizes.hidden,
        middle_rstd: sizes.stacked(),
        middle_norm: sizes.stacked() * sizes.hidden,
        gate: sizes.stacked() * sizes.intermediate,
        up: sizes.stacked() * sizes.intermediate,
        product: sizes.stacked() * sizes.intermediate,
        /// Residual stream after the MLP, `[S·R, H]`.
        output: sizes.stacked() * sizes.hidden,
        output_rstd: sizes.stacked(),
        /// `norm` of it: what the head reads, `[S·R, H]`.
        head_input: sizes.stacked() * sizes.hidden,
    }
    (sizes, spec)
}

buffers! {
    /// Gradients of activations, named after what they are the gradient of.
    Deltas {
        head_input: sizes.stacked() * sizes.hidden,
        output: sizes.stacked() * sizes.hidden,
        middle: sizes.stacked() * sizes.hidden,
        middle_norm: sizes.active * sizes.hidden,
        product: sizes.active * sizes.intermediate,
        attention: sizes.active * sizes.query,
        q: sizes.stacked() * sizes.query,
        k: sizes.keys() * sizes.key,
        v: sizes.keys() * sizes.key,
        token_q: sizes.tokens() * sizes.query,
        token_k: sizes.tokens() * sizes.key,
        token_v: sizes.tokens() * sizes.key,
        embedding_norm: sizes.tokens() * sizes.hidden,
        /// Of the normalised hidden input of one step at active positions.
        hidden_norm: sizes.active * sizes.hidden,
        /// Of step 0's at all positions.
        first_norm: sizes.positions * sizes.hidden,
        /// Of the state handed from one step to the next.
        next: sizes.active * sizes.hidden,
        fc_output: sizes.positions * sizes.hidden,
        fc_input: if spec.norm_before_fc || spec.fc_norm { sizes.positions * sizes.aux } else { 0 },
        /// A key row or query row before its norm (qwen3 only).
        raw: if spec.layer == LayerKind::Qwen3 {
            (sizes.active * sizes.query).max(sizes.positions * sizes.key)
        } else {
            0
        },
    }
    (sizes, spec)
}
