//! Memory of a draft rank.

use eaglet_runtime::collective::BucketPlan;
use eaglet_runtime::draft::{DraftSpec, RowCost, RowLoad};

use super::{MemoryPart, Use, gpu_context, process, ring_bytes};
use crate::preflight::links::state_bytes;

/// What decides the memory of a draft rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftRank<'a> {
    /// The draft.
    pub(crate) spec: &'a DraftSpec,
    /// Its trained parameters.
    pub(crate) parameters: u64,
    /// TTT steps.
    pub(crate) steps: usize,
    /// Tokens of a row.
    pub(crate) tokens_per_row: u64,
    /// Rows of a step.
    pub(crate) lanes: u64,
    /// Draft ranks.
    pub(crate) members: u64,
    /// Steps whose rows are extracted ahead.
    pub(crate) prefetch_steps: u64,
    /// Bytes of hidden states per token.
    pub(crate) hidden_bytes_per_token: u64,
    /// Tokens of the held-out rows of a lane; 0 where nothing is held out.
    pub(crate) held_out_tokens: u64,
    /// Compute threads.
    pub(crate) threads: usize,
    /// Gradients are summed over NCCL, where they lie.
    pub(crate) over_nccl: bool,
    /// Products go through AMX.
    pub(crate) packs: bool,
    /// A GPU rounds the factors of its products to bf16.
    pub(crate) rounds: bool,
}

impl DraftRank<'_> {
    /// Lanes of the rank that has most of them.
    pub(crate) fn own_lanes(&self) -> u64 {
        self.lanes.div_ceil(self.members.max(1))
    }

    pub(crate) fn parts(&self) -> Vec<MemoryPart> {
        let spec = self.spec;
        let cost = self.cost();
        let hidden = spec.hidden_size as u64;
        let embedding = 4 * spec.vocab_size as u64 * hidden;
        let frozen = embedding + 4 * (spec.draft_vocab_size as u64 + 1) * hidden;
        let (weights, own) = (4 * self.parameters, self.own_lanes());
        let row = self.tokens_per_row * self.hidden_bytes_per_token;
        let held_out = self.held_out_tokens * self.hidden_bytes_per_token;
        // Rows of coming steps, held-out rows, and a copy of a lane's while it is evaluated.
        let rows = self.prefetch_steps * own * row + (own + 1) * held_out;
        let peers = self.members - 1;
        let mut parts = vec![
            MemoryPart::new(Use::Frozen, frozen),
            MemoryPart::new(Use::OptimizerState, state_bytes(self.parameters)),
            MemoryPart::new(Use::Gradient, weights),
            MemoryPart::new(Use::Exchange, self.exchange_bytes()),
            MemoryPart::new(
                Use::Activations,
                cost.activation_bytes + cost.delta_bytes + cost.batch_bytes,
            ),
            MemoryPart::new(Use::Logits, cost.logit_bytes),
            MemoryPart::new(Use::HiddenStates, rows),
            MemoryPart::new(Use::Links, peers * ring_bytes()),
            process(self.threads),
        ];
        if self.packs {
            parts.push(MemoryPart::new(Use::PackedWeights, self.packed_bytes()));
        }
        // The embedding is widened into one place and moved to another before anything else is there.
        let all: u64 = parts.iter().map(|part| part.bytes).sum();
        let loading = 2 * embedding + (frozen - embedding);
        if let Some(part) = parts.first_mut() {
            part.bytes += loading.saturating_sub(all);
        }
        parts
    }

    /// A row of which every token is trained.
    fn cost(&self) -> RowCost {
        let positions = self.tokens_per_row as usize;
        self.spec.row_cost(&RowLoad {
            positions,
            active: positions,
            steps: self.steps,
            visible: 0.0,
        })
    }

    /// The head and the weights of the layer that each TTT step multiplies with, in bf16, for both ways through them.
    fn packed_bytes(&self) -> u64 {
        let spec = self.spec;
        let heads = spec.heads + 2 * spec.kv_heads + spec.heads;
        let inputs = heads * spec.head_dim + 3 * spec.intermediate_size + spec.draft_vocab_size;
        2 * 2 * (inputs * spec.hidden_size) as u64
    }

    /// What of it lies on a GPU.
    pub(crate) fn gpu_parts(&self) -> Vec<MemoryPart> {
        let on_gpu = [
            Use::Frozen,
            Use::OptimizerState,
            Use::Gradient,
            Use::Activations,
            Use::Logits,
        ];
        let parts = self
            .parts()
            .into_iter()
            .filter(|part| on_gpu.contains(&part.r#use));
        let (weights, own) = (4 * self.parameters, self.own_lanes());
        // The sum, own lanes that others are not ready for, and a bucket of another's.
        let bucket = 4 * BucketPlan::bucket_elements_for(self.parameters as usize) as u64;
        let summing = self
            .over_nccl
            .then(|| MemoryPart::new(Use::Exchange, (1 + own) * weights + bucket));
        // The row that is computed and the next one, as they came.
        let row = self.tokens_per_row * self.hidden_bytes_per_token;
        let rows = MemoryPart::new(Use::HiddenStates, 2 * row);
        let rounded = self
            .rounds
            .then(|| MemoryPart::new(Use::Activations, self.cost().rounded_bytes));
        parts
            .chain(summing)
            .chain(rounded)
            .chain([rows, gpu_context()])
            .collect()
    }

    /// Gradients that are being summed, or the whole state on its way to a replacement, whichever is more.
    fn exchange_bytes(&self) -> u64 {
        let (weights, own) = (4 * self.parameters, self.own_lanes());
        let segment = weights.div_ceil(self.members);
        // Copies of the own lanes, segments of the others', and the sum.
        let summing = own * weights + (self.lanes - own.min(self.lanes)) * segment + segment;
        let donating = if self.members > 1 {
            state_bytes(self.parameters)
        } else {
            0
        };
        if self.over_nccl {
            donating
        } else {
            summing.max(donating)
        }
    }
}

#[cfg(test)]
mod tests {
    use eaglet_runtime::draft::LayerKind;
    use eaglet_runtime::rope::{Rope, RopeScaling};

    use super::super::tests::bytes_of;
    use super::*;

    /// The draft of Kimi-K2.5 as it is published.
    fn kimi() -> DraftSpec {
        DraftSpec {
            layer: LayerKind::Llama,
            hidden_size: 7168,
            intermediate_size: 12288,
            heads: 64,
            kv_heads: 64,
            head_dim: 128,
            vocab_size: 163_840,
            draft_vocab_size: 32_000,
            aux_layers: 3,
            rms_norm_eps: 1e-5,
            rope: Rope {
                theta: 50_000.0,
                dim: 128,
                scaling: RopeScaling::None,
            },
            sliding_window: None,
            norm_before_residual: true,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: true,
        }
    }

    fn draft(spec: &DraftSpec, lanes: u64, members: u64) -> DraftRank<'_> {
        DraftRank {
            spec,
            parameters: spec.parameters().expect("it is consistent"),
            steps: 3,
            tokens_per_row: 2048,
            lanes,
            members,
            prefetch_steps: 3,
            hidden_bytes_per_token: 57_344,
            held_out_tokens: 0,
            threads: 1,
            over_nccl: false,
            packs: false,
            rounds: false,
        }
    }

    #[test]
    fn a_draft_rank_of_kimi_is_counted_by_hand() {
        let spec = kimi();
        let parts = draft(&spec, 1, 1).parts();
        // 0.83 billion parameters; embedding and head rows of 7168.
        let parameters = 829_452_288;
        assert_eq!(bytes_of(&parts, Use::OptimizerState), 12 * parameters);
        assert_eq!(bytes_of(&parts, Use::Gradient), 4 * parameters);
        assert_eq!(bytes_of(&parts, Use::Frozen), 4 * 7168 * (163_840 + 32_000 + 1));
        // Alone it copies its lane's gradient and sums it.
        assert_eq!(bytes_of(&parts, Use::Exchange), 8 * parameters);
        // Three steps ahead of one row of 2048 tokens, 57,344 bytes each.
        assert_eq!(bytes_of(&parts, Use::HiddenStates), 3 * 2048 * 57_344);
        assert_eq!(bytes_of(&parts, Use::Links), 0);
        // 131 rows of logits: 4 Mi elements over 32,000 tokens.
        assert_eq!(bytes_of(&parts, Use::Logits), 4 * 131 * (2 * 7168 + 32_000));
        assert!(parts.iter().all(|part| !part.mapped));
        let packing = DraftRank {
            packs: true,
            ..draft(&spec, 1, 1)
        };
        let (heads, kv_heads, width) = (spec.heads, spec.kv_heads, spec.head_dim);
        let rows = 2 * (heads + kv_heads) * width + 3 * spec.intermediate_size + 32_000;
        assert_eq!(
            bytes_of(&packing.parts(), Use::PackedWeights),
            4 * 7168 * rows as u64
        );
    }

    #[test]
    fn on_a_gpu_lies_what_is_computed_with() {
        let spec = kimi();
        let rank = draft(&spec, 1, 1);
        let (host, gpu) = (rank.parts(), rank.gpu_parts());
        for part in [Use::Frozen, Use::OptimizerState, Use::Gradient, Use::Activations] {
            assert_eq!(bytes_of(&gpu, part), bytes_of(&host, part));
        }
        assert_eq!(bytes_of(&gpu, Use::Process), 512 << 20);
        let row = rank.tokens_per_row * rank.hidden_bytes_per_token;
        assert_eq!(bytes_of(&gpu, Use::HiddenStates), 2 * row);
        assert_eq!(bytes_of(&gpu, Use::Exchange), 0);
        let rounding = DraftRank { rounds: true, ..rank };
        // The head is the largest factor, 437.5 MiB in bf16; copies of all sizes come to four of the next power of two.
        assert_eq!(
            bytes_of(&rounding.gpu_parts(), Use::Activations) - bytes_of(&gpu, Use::Activations),
            4 * (512 << 20)
        );
        let words = super::super::parts_in_words(&gpu);
        assert!(
            words.starts_with("master weights and moments 10.0 GB, "),
            "{words}"
        );
    }

    #[test]
    fn sums_over_nccl_lie_on_the_gpu() {
        let spec = kimi();
        let weights = 4 * 829_452_288_u64;
        let mut rank = draft(&spec, 3, 2);
        rank.over_nccl = true;
        // The sum, both lanes of the rank that has two, and a bucket.
        assert_eq!(
            bytes_of(&rank.gpu_parts(), Use::Exchange),
            3 * weights + (16 << 20)
        );
        // On the host a state may still be on its way.
        assert_eq!(bytes_of(&rank.parts(), Use::Exchange), 3 * weights);
    }

    #[test]
    fn several_replicas_exchange_segments_and_may_give_their_state_away() {
        let spec = kimi();
        let weights = 4 * 829_452_288_u64;
        // Two ranks, a lane each: a copy, half of the other's and half a sum; a donated state is more.
        assert_eq!(draft(&spec, 2, 2).exchange_bytes(), 3 * weights);
        // Two ranks, eight lanes: four copies, half of four, half a sum.
        assert_eq!(
            draft(&spec, 8, 2).exchange_bytes(),
            4 * weights + 2 * weights + weights / 2
        );
        assert_eq!(bytes_of(&draft(&spec, 2, 2).parts(), Use::Links), 8 << 20);
        // A spare rank owns no lane more than the others have.
        assert_eq!(draft(&spec, 2, 3).own_lanes(), 1);
    }

    #[test]
    fn while_a_large_embedding_is_loaded_it_is_there_twice() {
        let mut spec = kimi();
        (
            spec.hidden_size,
            spec.intermediate_size,
            spec.heads,
            spec.kv_heads,
        ) = (64, 64, 1, 1);
        (spec.vocab_size, spec.draft_vocab_size) = (1 << 20, 16);
        let mut rank = draft(&spec, 1, 1);
        (rank.tokens_per_row, rank.hidden_bytes_per_token) = (16, 4);
        let parts = rank.parts();
        let embedding = 4 * 64 * (1 << 20);
        let total: u64 = parts.iter().map(|part| part.bytes).sum();
        assert_eq!(total, 2 * embedding + 4 * 64 * 17, "{parts:?}");
    }
}
