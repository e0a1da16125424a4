//! Memory of a verifier rank.

use eaglet_runtime::verifier::Shard;

use super::{MemoryPart, Use, gpu_context, process, ring_bytes};

/// What decides the memory of a verifier rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VerifierRank {
    /// Bytes of its part of the weights as they are stored.
    pub(crate) weight_bytes: u64,
    /// Bytes that they take on a GPU, with the tiles in which they are unpacked; 0 on a CPU.
    pub(crate) gpu_weight_bytes: u64,
    /// Bytes of those of them that are packed for AMX.
    pub(crate) packed_bytes: u64,
    /// Bytes of activations per token of a row.
    pub(crate) activation_bytes_per_token: u64,
    /// Bytes of keys and values that answering keeps per token.
    pub(crate) cache_bytes_per_token: u64,
    /// Bytes of logits per prompt that is answered; 0 where the head is not.
    pub(crate) logit_bytes_per_prompt: u64,
    /// Bytes of the states that it captures, per token.
    pub(crate) hidden_bytes_per_token: u64,
    /// Tokens of a row.
    pub(crate) tokens_per_row: u64,
    /// Tokens of the held-out prompts of a lane, with their answers; 0 where nothing is held out.
    pub(crate) held_out_tokens: u64,
    /// Held-out prompts of a lane at most.
    pub(crate) held_out_prompts: u64,
    /// Bytes that lie on their way to and from its other shards, per token.
    pub(crate) exchange_bytes_per_token: u64,
    /// Bytes on its GPU that slices are summed with.
    pub(crate) slice_sum_bytes: u64,
    /// Ranks that it sends to.
    pub(crate) links: u64,
    /// Compute threads.
    pub(crate) threads: usize,
}

impl VerifierRank {
    pub(crate) fn parts(&self) -> Vec<MemoryPart> {
        let longest = self.tokens_per_row.max(self.held_out_tokens);
        let answers = self.held_out_tokens * self.cache_bytes_per_token
            + self.held_out_prompts * self.logit_bytes_per_prompt;
        vec![
            MemoryPart {
                mapped: true,
                ..MemoryPart::new(Use::Weights, self.weight_bytes)
            },
            // In the cache of packed weights.
            MemoryPart {
                mapped: true,
                ..MemoryPart::new(Use::PackedWeights, self.packed_bytes)
            },
            MemoryPart::new(Use::Activations, longest * self.activation_bytes_per_token),
            MemoryPart::new(Use::Answers, answers),
            MemoryPart::new(Use::Exchange, longest * self.exchange_bytes_per_token),
            // One row is being captured while another one waits for the link.
            MemoryPart::new(
                Use::HiddenStates,
                (longest + self.tokens_per_row) * self.hidden_bytes_per_token,
            ),
            MemoryPart::new(Use::Links, self.links * ring_bytes()),
            process(self.threads),
        ]
    }
}

impl VerifierRank {
    /// What of it lies on a GPU; nothing of that is a mapped file.
    pub(crate) fn gpu_parts(&self) -> Vec<MemoryPart> {
        let on_gpu = [Use::Activations, Use::Answers];
        let parts = self
            .parts()
            .into_iter()
            .filter(|part| on_gpu.contains(&part.r#use));
        let parts = parts.map(|part| MemoryPart {
            mapped: false,
            ..part
        });
        let weights = MemoryPart::new(Use::Weights, self.gpu_weight_bytes);
        let sums = MemoryPart::new(Use::Exchange, self.slice_sum_bytes);
        [weights]
            .into_iter()
            .chain(parts)
            .chain([sums, gpu_context()])
            .collect()
    }
}

/// Bytes that lie on their way between the shards of a verifier, per token of a pass.
pub(crate) fn shard_exchange_bytes_per_token(shard: Shard, hidden: u64) -> u64 {
    // A residual stream that is sent on, and two of the stage before: one in work, one behind it.
    let residuals = u64::from(!shard.is_last()) + 2 * u64::from(!shard.is_first());
    // Addends that go out and come in.
    let sums = if shard.slices > 1 { 2 } else { 0 };
    (residuals + sums) * 4 * hidden
}

#[cfg(test)]
mod tests {
    use super::super::tests::bytes_of;
    use super::*;

    fn verifier() -> VerifierRank {
        VerifierRank {
            weight_bytes: 1_000_000,
            gpu_weight_bytes: 1_300_000,
            packed_bytes: 600_000,
            activation_bytes_per_token: 100,
            cache_bytes_per_token: 10,
            logit_bytes_per_prompt: 1000,
            hidden_bytes_per_token: 8,
            tokens_per_row: 50,
            held_out_tokens: 200,
            held_out_prompts: 3,
            exchange_bytes_per_token: 6,
            slice_sum_bytes: 77,
            links: 2,
            threads: 2,
        }
    }

    #[test]
    fn a_verifier_rank_maps_its_weights_and_holds_its_longest_row() {
        let parts = verifier().parts();
        assert_eq!(bytes_of(&parts, Use::Weights), 1_000_000);
        assert_eq!(bytes_of(&parts, Use::PackedWeights), 600_000);
        assert!(
            parts
                .iter()
                .all(|part| part.mapped == matches!(part.r#use, Use::Weights | Use::PackedWeights))
        );
        assert_eq!(bytes_of(&parts, Use::Activations), 200 * 100);
        assert_eq!(bytes_of(&parts, Use::Answers), 200 * 10 + 3 * 1000);
        assert_eq!(bytes_of(&parts, Use::Exchange), 200 * 6);
        assert_eq!(bytes_of(&parts, Use::HiddenStates), (200 + 50) * 8);
        assert_eq!(bytes_of(&parts, Use::Links), 2 * (8 << 20));
        assert_eq!(bytes_of(&parts, Use::Process), process(2).bytes);
    }

    #[test]
    fn on_a_gpu_lies_what_is_computed_with() {
        let parts = verifier().gpu_parts();
        assert!(parts.iter().all(|part| !part.mapped));
        let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
        assert_eq!(
            bytes,
            1_300_000 + 200 * 100 + 200 * 10 + 3 * 1000 + 77 + (512 << 20)
        );
    }

    #[test]
    fn what_shards_say_to_each_other_is_counted_by_hand() {
        let bytes =
            |index, stages, slices| shard_exchange_bytes_per_token(Shard::nth(index, stages, slices), 10);
        assert_eq!(bytes(0, 1, 1), 0);
        assert_eq!([bytes(0, 3, 1), bytes(1, 3, 1), bytes(2, 3, 1)], [40, 120, 80]);
        assert_eq!(bytes(0, 1, 2), 80);
        assert_eq!(bytes(2, 2, 2), 80 + 80);
    }
}
