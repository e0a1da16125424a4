//! Memory of each rank in parts, and of each host against what it has.
//!
//! An estimate of the peak, from the sizes of the very buffers that ranks allocate. It leans to more rather than less: rows
//! are full and every token of them trained, and whatever may happen in a run happens, such as a replica that is replaced
//! (`docs/operations.md` compares it with measured runs). Weights are mapped: ranks of a host that map the same part of a
//! verifier share its pages, and pages that do not fit are read from the disk again for every row.

mod draft;
mod host;
mod verifier;

use eaglet_runtime::ids::Role;
use eaglet_runtime::link::SenderOptions;
use serde::Serialize;

use super::units::size;

pub(crate) use self::draft::DraftRank;
pub use self::host::HostMemory;
pub(crate) use self::host::{Shortage, Tenant, coordinator_bytes};
pub(crate) use self::verifier::{VerifierRank, shard_exchange_bytes_per_token};

/// A process that has loaded nothing: the binary, its threads' stacks, its allocator.
const PROCESS_BYTES: u64 = 24 << 20;
/// Buffers of a compute thread for tiles of products.
const THREAD_BYTES: u64 = 4 << 20;
/// A process on a GPU before it holds a tensor: context, kernels, workspace of products.
const GPU_CONTEXT_BYTES: u64 = 512 << 20;
/// What a part of a rank's memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// A verifier's weights as they are stored.
    Weights,
    /// Weights as AMX takes them.
    PackedWeights,
    /// The verifier's embedding, head rows and norm, in f32: what a draft computes with and does not train.
    Frozen,
    /// Master weights and both moments.
    OptimizerState,
    /// The gradient of the row in work.
    Gradient,
    /// What is on its way between ranks of a role: gradients, or a state for a replacement; residual streams and partial
    /// sums between the shards of a verifier.
    Exchange,
    /// What a pass over a row keeps.
    Activations,
    /// Logits of a block of rows.
    Logits,
    /// Keys, values and logits while held-out prompts are answered.
    Answers,
    /// Captured states: in work, on their way, and those that wait for their step.
    HiddenStates,
    /// Rings of shared memory.
    Links,
    /// The process itself.
    Process,
}

impl Use {
    /// What makes it smaller in the ranks of a role.
    pub(super) const fn remedy(self, role: Role) -> &'static str {
        match (self, role) {
            (Self::Weights, _) => {
                "take a machine with more memory, a verifier with quantised weights, or fewer different parts of it on one host"
            }
            (Self::PackedWeights, Role::Draft) => "set draft.products to \"f32\", or take fewer draft ranks",
            (Self::PackedWeights, Role::Verifier) => {
                "set verifier.products to \"f32\", or take a machine with more memory or more, smaller shards"
            }
            (Self::Frozen, _) => "take fewer draft ranks, or a smaller draft.vocab_size",
            (Self::OptimizerState | Self::Gradient, _) => {
                "take fewer draft ranks, or a smaller draft.intermediate_size"
            }
            (Self::Exchange, Role::Verifier) => "lower training.tokens_per_row",
            (Self::Exchange, Role::Draft) => {
                "lower training.rows_per_step, or take a smaller draft.intermediate_size"
            }
            (Self::Activations, Role::Draft) => {
                "lower training.tokens_per_row or training.ttt_steps, or take a smaller draft.intermediate_size"
            }
            (Self::Activations, Role::Verifier) => {
                "lower training.tokens_per_row, and samples.held_out_rows if that is more than 1"
            }
            (Self::Logits, _) => "take a smaller draft.vocab_size",
            (Self::Answers, _) => "lower samples.held_out_rows or training.max_new_tokens",
            (Self::HiddenStates, _) => {
                "lower samples.held_out_rows, training.rows_per_step or training.tokens_per_row"
            }
            (Self::Links | Self::Process, _) => "take fewer ranks",
        }
    }

    /// In words.
    const fn words(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::PackedWeights => "packed weights",
            Self::Frozen => "embedding and head rows",
            Self::OptimizerState => "master weights and moments",
            Self::Gradient => "gradients of rows",
            Self::Exchange => "tensors on their way between them",
            Self::Activations => "activations",
            Self::Logits => "logits",
            Self::Answers => "held-out answers",
            Self::HiddenStates => "hidden states",
            Self::Links => "links",
            Self::Process => "processes",
        }
    }
}

/// A part of a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryPart {
    /// What it is for.
    pub r#use: Use,
    /// Its bytes.
    pub bytes: u64,
    /// Whether it is a file that is mapped: its pages can be dropped and read again.
    pub mapped: bool,
}

impl MemoryPart {
    fn new(r#use: Use, bytes: u64) -> Self {
        Self {
            r#use,
            bytes,
            mapped: false,
        }
    }
}

/// Bytes of a ring of a link.
fn ring_bytes() -> u64 {
    let options = SenderOptions::default();
    u64::from(options.slots) * u64::from(options.slot_bytes)
}

/// The process of a rank with a number of compute threads.
fn process(threads: usize) -> MemoryPart {
    MemoryPart::new(Use::Process, PROCESS_BYTES + threads as u64 * THREAD_BYTES)
}

/// What each part is and takes, the largest first, without those that take nothing.
pub(super) fn parts_in_words(parts: &[MemoryPart]) -> String {
    let mut parts: Vec<&MemoryPart> = parts.iter().filter(|part| part.bytes > 0).collect();
    parts.sort_by_key(|part| std::cmp::Reverse(part.bytes));
    let words = parts
        .iter()
        .map(|part| format!("{} {}", part.r#use.words(), size(part.bytes)));
    words.collect::<Vec<_>>().join(", ")
}

/// What a process takes of a GPU for itself.
const fn gpu_context() -> MemoryPart {
    MemoryPart {
        r#use: Use::Process,
        bytes: GPU_CONTEXT_BYTES,
        mapped: false,
    }
}

/// Memory of a rank that only reads or writes hidden states: `tokens` of them wait, and a row is in work.
pub(crate) fn file_rank(tokens: u64, hidden_bytes_per_token: u64, links: u64) -> Vec<MemoryPart> {
    vec![
        MemoryPart::new(Use::HiddenStates, tokens * hidden_bytes_per_token),
        MemoryPart::new(Use::Links, links * ring_bytes()),
        process(1),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes of the parts for a use.
    pub(super) fn bytes_of(parts: &[MemoryPart], r#use: Use) -> u64 {
        let of_use = parts.iter().filter(|part| part.r#use == r#use);
        of_use.map(|part| part.bytes).sum()
    }

    #[test]
    fn a_rank_of_files_holds_rows_only() {
        let parts = file_rank(100, 8, 1);
        assert_eq!(bytes_of(&parts, Use::HiddenStates), 800);
        assert_eq!(bytes_of(&parts, Use::Links), 8 << 20);
    }
}
