//! Memory of each rank in parts, and of each host against what it has.
//!
//! An estimate of the peak, from the sizes of the very buffers that ranks allocate. It leans to more rather than less: rows
//! are full and every token of them trained, and whatever may happen in a run happens, such as a replica that is replaced
//! (`docs/operations.md` compares it with measured runs). Weights are mapped: ranks of a host that map the same part of a
//! verifier share its pages, and pages that do not fit are read from the disk again for every row.

use std::collections::BTreeMap;

use eaglet_runtime::draft::{DraftSpec, RowLoad};
use eaglet_runtime::ids::Role;
use eaglet_runtime::link::SenderOptions;
use serde::Serialize;

use super::links::state_bytes;
use super::machine::Machine;
use super::units::size;

/// A process that has loaded nothing: the binary, its threads' stacks, its allocator.
const PROCESS_BYTES: u64 = 24 << 20;
/// Buffers of a compute thread for tiles of products.
const THREAD_BYTES: u64 = 4 << 20;
/// The coordinator of a run, without its samples: tokenizer, journal, connections.
const COORDINATOR_BYTES: u64 = 96 << 20;
/// What the coordinator remembers of a sample.
const COORDINATOR_SAMPLE_BYTES: u64 = 400;

/// What a part of a rank's memory is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Use {
    /// A verifier's weights as they are stored.
    Weights,
    /// The verifier's embedding, head rows and norm, in f32: what a draft computes with and does not train.
    Frozen,
    /// Master weights and both moments.
    OptimizerState,
    /// The gradient of the row in work.
    Gradient,
    /// Gradients on their way between draft ranks, or a state on its way to a replacement.
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
    const fn remedy(self, role: Role) -> &'static str {
        match (self, role) {
            (Self::Weights, _) => {
                "take a machine with more memory, a verifier with quantised weights, or fewer different parts of it on one host"
            }
            (Self::Frozen, _) => "take fewer draft ranks, or a smaller draft.vocab_size",
            (Self::OptimizerState | Self::Gradient, _) => {
                "take fewer draft ranks, or a smaller draft.intermediate_size"
            }
            (Self::Exchange, _) => "lower training.rows_per_step, or take a smaller draft.intermediate_size",
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
            Self::Frozen => "embedding and head rows",
            Self::OptimizerState => "master weights and moments",
            Self::Gradient => "gradients of rows",
            Self::Exchange => "gradients and states on their way",
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

/// What decides the memory of a verifier rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct VerifierRank {
    /// Bytes of its part of the weights as they are stored.
    pub(crate) weight_bytes: u64,
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
    /// Draft ranks that it is linked to.
    pub(crate) drafts: u64,
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
            MemoryPart::new(Use::Activations, longest * self.activation_bytes_per_token),
            MemoryPart::new(Use::Answers, answers),
            // One row is being captured while another one waits for the link.
            MemoryPart::new(
                Use::HiddenStates,
                (longest + self.tokens_per_row) * self.hidden_bytes_per_token,
            ),
            MemoryPart::new(Use::Links, self.drafts * ring_bytes()),
            process(self.threads),
        ]
    }
}

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
}

impl DraftRank<'_> {
    /// Lanes of the rank that has most of them.
    pub(crate) fn own_lanes(&self) -> u64 {
        self.lanes.div_ceil(self.members.max(1))
    }

    pub(crate) fn parts(&self) -> Vec<MemoryPart> {
        let spec = self.spec;
        let positions = self.tokens_per_row as usize;
        let cost = spec.row_cost(&RowLoad {
            positions,
            active: positions,
            steps: self.steps,
            visible: 0.0,
        });
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
        // The embedding is widened into one place and moved to another before anything else is there.
        let all: u64 = parts.iter().map(|part| part.bytes).sum();
        let loading = 2 * embedding + (frozen - embedding);
        if let Some(part) = parts.first_mut() {
            part.bytes += loading.saturating_sub(all);
        }
        parts
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
        summing.max(donating)
    }
}

/// Memory of the coordinator of a run with so many samples.
pub(crate) fn coordinator_bytes(samples: u64) -> u64 {
    COORDINATOR_BYTES + samples * COORDINATOR_SAMPLE_BYTES
}

/// A rank as far as its host is concerned.
#[derive(Clone, Debug)]
pub(crate) struct Tenant {
    /// What it does.
    pub(crate) role: Role,
    /// Its memory.
    pub(crate) parts: Vec<MemoryPart>,
    /// What it maps; tenants with the same share those pages.
    pub(crate) mapping: Option<(u16, u16)>,
}

/// Memory of a host, needed and there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HostMemory {
    /// The host.
    pub host: String,
    /// What its processes need for themselves.
    pub private_bytes: u64,
    /// Files that they map, each part once.
    pub mapped_bytes: u64,
    /// Memory of the host.
    pub memory_bytes: u64,
    /// Memory that is free now.
    pub available_bytes: u64,
    /// What takes most, over all ranks of a role.
    pub largest: Use,
    /// Of which role.
    pub largest_role: Role,
    /// Its bytes.
    pub largest_bytes: u64,
}

/// How a host's memory falls short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shortage {
    /// The host never has so much.
    Never(String),
    /// It has not so much now.
    Now(String),
}

impl HostMemory {
    pub(crate) fn new(host: &str, tenants: &[Tenant], coordinator_bytes: u64, machine: Machine) -> Self {
        let mut uses: BTreeMap<(Use, Role), u64> = BTreeMap::new();
        let (mut private, mut mapped) = (coordinator_bytes, 0);
        let mut mappings = Vec::new();
        for tenant in tenants {
            let is_shared = tenant.mapping.is_some() && mappings.contains(&tenant.mapping);
            mappings.push(tenant.mapping);
            for part in tenant.parts.iter().filter(|part| !(part.mapped && is_shared)) {
                *uses.entry((part.r#use, tenant.role)).or_default() += part.bytes;
                if part.mapped {
                    mapped += part.bytes;
                } else {
                    private += part.bytes;
                }
            }
        }
        let largest = uses.into_iter().max_by_key(|(_, bytes)| *bytes);
        let ((largest, largest_role), largest_bytes) = largest.unwrap_or(((Use::Process, Role::Draft), 0));
        Self {
            host: host.to_owned(),
            private_bytes: private,
            mapped_bytes: mapped,
            memory_bytes: machine.memory_bytes,
            available_bytes: machine.available_bytes,
            largest,
            largest_role,
            largest_bytes,
        }
    }

    /// All that is needed.
    pub fn needed_bytes(&self) -> u64 {
        self.private_bytes + self.mapped_bytes
    }

    /// What is wrong, if there is too little.
    pub(crate) fn shortage(&self) -> Option<Shortage> {
        let needed = self.needed_bytes();
        if needed <= self.available_bytes {
            return None;
        }
        let held = if self.available_bytes < self.memory_bytes {
            format!(
                "{} of its {} are free",
                size(self.available_bytes),
                size(self.memory_bytes)
            )
        } else {
            format!("it has {}", size(self.memory_bytes))
        };
        let text = format!(
            "the ranks on host {} need {} of memory and {held}; {} of {} ranks take most of it, {}: {}",
            self.host,
            size(needed),
            self.largest.words(),
            self.largest_role,
            size(self.largest_bytes),
            self.largest.remedy(self.largest_role),
        );
        Some(if self.private_bytes > self.memory_bytes {
            Shortage::Never(text)
        } else {
            Shortage::Now(text)
        })
    }
}

#[cfg(test)]
mod tests {
    use eaglet_runtime::draft::LayerKind;
    use eaglet_runtime::rope::{Rope, RopeScaling};

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
        }
    }

    fn bytes_of(parts: &[MemoryPart], r#use: Use) -> u64 {
        let of_use = parts.iter().filter(|part| part.r#use == r#use);
        of_use.map(|part| part.bytes).sum()
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

    fn verifier() -> VerifierRank {
        VerifierRank {
            weight_bytes: 1_000_000,
            activation_bytes_per_token: 100,
            cache_bytes_per_token: 10,
            logit_bytes_per_prompt: 1000,
            hidden_bytes_per_token: 8,
            tokens_per_row: 50,
            held_out_tokens: 200,
            held_out_prompts: 3,
            drafts: 2,
            threads: 2,
        }
    }

    #[test]
    fn a_verifier_rank_maps_its_weights_and_holds_its_longest_row() {
        let parts = verifier().parts();
        assert_eq!(bytes_of(&parts, Use::Weights), 1_000_000);
        assert!(
            parts
                .iter()
                .all(|part| part.mapped == (part.r#use == Use::Weights))
        );
        assert_eq!(bytes_of(&parts, Use::Activations), 200 * 100);
        assert_eq!(bytes_of(&parts, Use::Answers), 200 * 10 + 3 * 1000);
        assert_eq!(bytes_of(&parts, Use::HiddenStates), (200 + 50) * 8);
        assert_eq!(bytes_of(&parts, Use::Links), 2 * (8 << 20));
        assert_eq!(bytes_of(&parts, Use::Process), PROCESS_BYTES + 2 * THREAD_BYTES);
    }

    fn host(memory: u64, available: u64, mappings: &[Option<(u16, u16)>]) -> HostMemory {
        let tenants: Vec<Tenant> = mappings
            .iter()
            .map(|&mapping| Tenant {
                role: Role::Verifier,
                parts: vec![
                    MemoryPart {
                        mapped: true,
                        ..MemoryPart::new(Use::Weights, 500)
                    },
                    MemoryPart::new(Use::Activations, 40),
                ],
                mapping,
            })
            .collect();
        let machine = Machine {
            cores: 1,
            memory_bytes: memory,
            available_bytes: available,
        };
        HostMemory::new("local", &tenants, 20, machine)
    }

    #[test]
    fn replicas_on_a_host_share_what_they_map() {
        let two = host(10_000, 10_000, &[Some((0, 0)), Some((0, 0))]);
        assert_eq!((two.private_bytes, two.mapped_bytes), (100, 500));
        let stages = host(10_000, 10_000, &[Some((0, 0)), Some((1, 0))]);
        assert_eq!((stages.private_bytes, stages.mapped_bytes), (100, 1000));
        assert_eq!((stages.largest, stages.largest_bytes), (Use::Weights, 1000));
        assert_eq!(stages.shortage(), None);
    }

    #[test]
    fn too_little_is_told_with_the_largest_lever_and_mapped_pages_can_be_dropped() {
        let seats = [Some((0, 0)), Some((1, 0))];
        let Some(Shortage::Now(text)) = host(1050, 1050, &seats).shortage() else {
            panic!("1100 are needed")
        };
        assert!(
            text.contains("weights of verifier ranks") && text.contains("quantised"),
            "{text}"
        );
        let Some(Shortage::Now(text)) = host(10_000, 900, &seats).shortage() else {
            panic!("1100 are needed")
        };
        assert!(text.contains("are free"), "{text}");
        assert!(matches!(
            host(99, 99, &seats).shortage(),
            Some(Shortage::Never(_))
        ));
    }
}
