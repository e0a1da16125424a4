//! What the coordinator and its ranks say to each other.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::contract::Contract;
use crate::digest::Digest;
use crate::ids::{Epoch, Generation, RowId, Seat, Step, Unit};
use crate::row::PackedRow;

/// Version of this vocabulary; both ends must speak the same one.
pub const PROTOCOL: u32 = 6;

/// A rank's first words on a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attach {
    /// [`PROTOCOL`] of the rank.
    pub protocol: u32,
    /// Secret of this launch; a rank of an earlier launch has another one.
    pub token: String,
    /// The seat it was started for.
    pub seat: Seat,
    /// Which occupant of the seat it is.
    pub generation: Generation,
    /// Its process.
    pub pid: u32,
    /// Where its bulk listener is reached.
    pub bulk: BulkAddress,
}

/// Where a rank's bulk listener is reached.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkAddress {
    /// Its machine, as `cluster.toml` calls it.
    pub host: String,
    /// Name of the listener, for ranks of the same machine.
    pub name: String,
    /// Where ranks of other machines reach it, in a cluster that has some.
    pub network: Option<SocketAddr>,
}

/// What a rank's compute thread is busy with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activity {
    /// Waiting for a command.
    #[default]
    Idle,
    /// Reading weights.
    Loading,
    /// Computing hidden states.
    Extracting,
    /// Continuing held-out prompts.
    Generating,
    /// Computing a gradient.
    Computing,
    /// Waiting for the other members of an epoch to meet over NCCL.
    Meeting,
    /// Waiting for the other replicas' gradients.
    Reducing,
    /// Waiting for the other shards of its verifier.
    AwaitingPeers,
    /// Waiting for the others' votes and the journal, with a vote given.
    AwaitingCommit,
    /// Applying the optimizer.
    Applying,
    /// Sending its state to a replacement.
    Donating,
    /// Writing a checkpoint.
    Saving,
    /// Measuring acceptance length.
    Evaluating,
}

/// A sign of life, sent from a thread of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Beat {
    /// Counts the beats of this incarnation.
    pub sequence: u64,
    /// What the compute thread does.
    pub activity: Activity,
    /// For how long it has been doing that.
    pub activity_age_ms: u64,
    /// Resident memory of the process.
    pub rss_bytes: u64,
    /// Time that the compute thread has spent on rows or steps since it started.
    pub busy_ms: u64,
    /// Time that it has spent waiting for peers in the middle of work.
    pub waiting_ms: u64,
    /// Time that it has had nothing to do: it waited for input.
    pub idle_ms: u64,
}

impl Activity {
    /// Whether the compute thread does work of its own.
    pub const fn is_work(self) -> bool {
        !matches!(self, Self::Idle) && !self.is_waiting()
    }

    /// Whether it waits for other ranks in the middle of work.
    pub const fn is_waiting(self) -> bool {
        matches!(
            self,
            Self::Meeting | Self::Reducing | Self::AwaitingPeers | Self::AwaitingCommit
        )
    }
}

/// An occupant of a seat, as those who send to it need to know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Number of the seat within its role.
    pub seat: u16,
    /// Which occupant.
    pub generation: Generation,
    /// Where its bulk listener is reached.
    pub bulk: BulkAddress,
}

/// What the members of an epoch need to meet over NCCL: made by one of them, good for one meeting, and nothing that anybody
/// in between understands.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveId(Vec<u8>);

impl CollectiveId {
    /// Bytes of an id.
    pub const BYTES: usize = 128;

    /// The id of these bytes.
    pub fn new(bytes: &[u8; Self::BYTES]) -> Self {
        Self(bytes.to_vec())
    }

    /// Its bytes; none if somebody sent another number of them.
    pub fn bytes(&self) -> Option<[u8; Self::BYTES]> {
        self.0.as_slice().try_into().ok()
    }
}

impl fmt::Debug for CollectiveId {
    /// A digest: who knows an id can join, and what is printed ends in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CollectiveId({})", Digest::of(&self.0))
    }
}

/// Where a draft replica takes its state from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DraftOrigin {
    /// Initial weights, a function of the seed.
    Initial,
    /// A checkpoint folder.
    Checkpoint(PathBuf),
    /// A healthy peer, which will send its state over the bulk plane.
    Peer(Member),
    /// None yet: it is told another time, or comes with an epoch.
    Later,
}

/// The state that goes from one member of an epoch to others, once all have met over NCCL.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Handover {
    /// The draft seat that has it.
    pub donor: u16,
    /// The draft seats that need it, ascending.
    pub receivers: Vec<u16>,
    /// Step of the state.
    pub step: Step,
    /// Digest of weights and moments.
    pub state: Digest,
}

/// The place of a row in the work of the shards of one verifier: all of them compute the same in the same order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Turn {
    /// Membership of the team for which it was given.
    pub epoch: Epoch,
    /// What the team was given before it in that epoch.
    pub number: u64,
}

/// Hidden states to compute.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Extraction {
    /// Which row.
    pub row: RowId,
    /// Number of the lease; it comes back with the row.
    pub lease: u64,
    /// When it is computed.
    pub turn: Turn,
    /// The unit behind each document, to name a bad one.
    pub units: Vec<Unit>,
    /// Tokens, masks, boundaries.
    pub content: PackedRow,
    /// Who gets the hidden states.
    pub destination: Member,
}

/// Held-out prompts that the verifier continues greedily before it extracts them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeldOutRequest {
    /// Which row.
    pub row: RowId,
    /// Number of the lease; it comes back with the row.
    pub lease: u64,
    /// When it is computed.
    pub turn: Turn,
    /// Token ids of each prompt, up to where the answer begins.
    pub prompts: Vec<Vec<u32>>,
    /// Longest answer, in tokens.
    pub max_new_tokens: usize,
    /// Who gets the hidden states.
    pub destination: Member,
}

/// Loss and accuracy of one TTT step over one row (definitions: speculators 0.9 `eagle3`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepMetrics {
    /// Mean loss over the masked positions.
    pub loss: f64,
    /// Positions at which this and all earlier TTT steps were right.
    pub full_correct: f64,
    /// Masked positions.
    pub full_total: f64,
    /// Positions at which this TTT step was right, of those where all earlier ones were.
    pub conditional_correct: f64,
    /// Positions at which all earlier TTT steps were right.
    pub conditional_total: f64,
}

/// What was measured on one lane in one optimizer step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LaneMetrics {
    /// The lane.
    pub lane: u16,
    /// Whether its gradient holds nothing but finite numbers.
    pub finite: bool,
    /// Total loss of the row.
    pub loss: f64,
    /// Per TTT step.
    pub ttt: Vec<StepMetrics>,
    /// Tokens of the row.
    pub tokens: u64,
    /// Trained positions of the row.
    pub trained_tokens: u64,
    /// Time spent on forward and backward.
    pub compute_ms: u64,
}

/// Counts of simulated verifications on held-out answers; they add up over seats.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Verification passes.
    pub verifications: u64,
    /// Drafted tokens that were accepted.
    pub accepted: u64,
    /// Per TTT step: how often its token was reached and could be judged.
    pub tried: Vec<u64>,
    /// Per TTT step: how often it was accepted.
    pub accepted_at: Vec<u64>,
}

impl Acceptance {
    /// Mean tokens per verification: one by the verifier itself plus the accepted ones.
    pub fn length(&self) -> Option<f64> {
        (self.verifications > 0).then(|| 1.0 + self.accepted as f64 / self.verifications as f64)
    }

    /// Adds another seat's counts.
    pub fn add(&mut self, other: &Self) {
        self.verifications += other.verifications;
        self.accepted += other.accepted;
        for (ours, theirs) in [
            (&mut self.tried, &other.tried),
            (&mut self.accepted_at, &other.accepted_at),
        ] {
            ours.resize(ours.len().max(theirs.len()), 0);
            for (a, b) in ours.iter_mut().zip(theirs) {
                *a += b;
            }
        }
    }
}

/// From a rank to the coordinator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RankEvent {
    /// The first message of a stream.
    Attach(Attach),
    /// A sign of life.
    Beat(Beat),
    /// A verifier has loaded its shard.
    VerifierReady {
        /// What its hidden states promise.
        contract: Contract,
    },
    /// A draft replica holds a state.
    DraftReady {
        /// Number of the [`CoordinatorCommand::LoadDraft`] that this answers.
        load: u32,
        /// Step of that state.
        step: Step,
        /// Digest of weights and moments.
        state: Digest,
    },
    /// The member of an epoch with the lowest seat has made what the others need to meet it over NCCL.
    CollectiveId {
        /// The epoch.
        epoch: Epoch,
        /// What they need.
        id: CollectiveId,
    },
    /// The members of an epoch did not meet over NCCL, or a sum over it failed or is late.
    CollectiveBroken {
        /// The epoch.
        epoch: Epoch,
        /// What was seen.
        reason: String,
    },
    /// A draft replica, or a shard of a verifier, can reach the members of its epoch and holds nothing of an older one.
    GroupReady {
        /// The epoch.
        epoch: Epoch,
    },
    /// As [`Self::GroupReady`], from a draft replica that has taken the state of its epoch.
    StateTaken {
        /// The epoch.
        epoch: Epoch,
        /// Step of the state.
        step: Step,
        /// Digest of weights and moments.
        state: Digest,
    },
    /// A shard of a verifier is done with a row, and has sent the states that it captured, if any, on their way.
    Extracted {
        /// The row.
        row: RowId,
        /// The lease that it was extracted for.
        lease: u64,
        /// Its tokens.
        tokens: u64,
    },
    /// A shard of a verifier could not hand its part of a row over.
    NotSent {
        /// The row.
        row: RowId,
        /// The lease that it was extracted for.
        lease: u64,
        /// The draft seat it was meant for.
        seat: u16,
        /// Which occupant of it.
        generation: Generation,
        /// What was seen.
        reason: String,
    },
    /// A verifier found a sample that cannot be used.
    BadSample {
        /// The row it was part of.
        row: RowId,
        /// The lease that it was extracted for.
        lease: u64,
        /// The sample.
        unit: Option<Unit>,
        /// Why.
        reason: String,
    },
    /// A draft replica holds the hidden states of a row, the parts of all shards.
    Received {
        /// The row.
        row: RowId,
        /// The lease that it was extracted for.
        lease: u64,
    },
    /// A donor could not send its state.
    StateNotSent {
        /// The draft seat that it was meant for.
        seat: u16,
        /// Which occupant of it.
        generation: Generation,
        /// What was seen.
        reason: String,
    },
    /// A rank lost a link to another one.
    LinkBroken {
        /// The other end.
        from: Seat,
        /// Its generation.
        generation: Generation,
        /// The epoch that the link was made for; those from verifiers to draft replicas belong to none.
        epoch: Epoch,
        /// What was seen.
        reason: String,
    },
    /// The reduced gradient of a step is there, and nothing has been applied.
    Staged {
        /// Epoch of the step.
        epoch: Epoch,
        /// The step.
        step: Step,
        /// Digest of the reduced gradient.
        gradient: Digest,
        /// Whether the reduced gradient holds nothing but finite numbers.
        finite: bool,
        /// Digest of weights and moments that the step starts from.
        state: Digest,
        /// What was measured on each lane that this seat computed, ascending.
        lanes: Vec<LaneMetrics>,
    },
    /// A committed step has been applied.
    Applied {
        /// The step that the state has reached.
        step: Step,
        /// Digest of weights and moments.
        state: Digest,
    },
    /// A checkpoint is complete on disk.
    Checkpointed {
        /// Its step.
        step: Step,
        /// Its folder.
        folder: PathBuf,
    },
    /// Acceptance was measured on the held-out rows of this seat's lanes.
    Evaluated {
        /// Step of the weights.
        step: Step,
        /// The counts.
        acceptance: Acceptance,
    },
    /// The rank cannot go on and is about to exit.
    Fault {
        /// Why, in one line with the remedy.
        reason: String,
        /// Whether starting it again can help.
        permanent: bool,
    },
    /// The rank ends because it was told to.
    Bye,
}

/// From the coordinator to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum CoordinatorCommand {
    /// Answer to [`RankEvent::Attach`].
    Welcome {
        /// The resolved `cluster.toml`.
        config: String,
    },
    /// Answer to a beat; its absence lets a rank's lease on the coordinator run out.
    BeatAck {
        /// The beat's number.
        sequence: u64,
    },
    /// Load the verifier.
    LoadVerifier,
    /// Build the draft and take a state.
    LoadDraft {
        /// Counts the loads of this incarnation.
        load: u32,
        /// Verifier ids of the draft vocabulary, ascending.
        vocabulary: Vec<u32>,
        /// What hidden states must promise.
        contract: Contract,
        /// Where the state comes from.
        origin: DraftOrigin,
    },
    /// Stop what belongs to an older epoch and wait.
    Abandon {
        /// The new epoch.
        epoch: Epoch,
    },
    /// Send the state to a replacement.
    SendState {
        /// Who needs it.
        to: Member,
    },
    /// Link up with the other shards of a verifier. What was given in an older epoch is void.
    FormTeam {
        /// The epoch.
        epoch: Epoch,
        /// All members in the order of their shards, this rank among them.
        members: Vec<Member>,
    },
    /// Compare a few hidden states with the verifier's own logits, together with its other shards.
    CheckVerifier {
        /// When: the first work of each epoch.
        turn: Turn,
    },
    /// Link up with these members, in seat order.
    FormGroup {
        /// The epoch.
        epoch: Epoch,
        /// All members in the order of their seats, this rank among them.
        members: Vec<Member>,
        /// The draft seat that computes each lane, `[lanes]`.
        owners: Vec<u16>,
        /// Whose state goes to whom when all have met.
        handover: Option<Handover>,
    },
    /// Meet the other members of an epoch over NCCL.
    Meet {
        /// The epoch.
        epoch: Epoch,
        /// What its member with the lowest seat has made.
        id: CollectiveId,
    },
    /// Compute the hidden states of a row and send them.
    Extract(Extraction),
    /// Continue held-out prompts, compute their hidden states and send them.
    ExtractHeldOut(HeldOutRequest),
    /// Compute and reduce the gradient of a step.
    Begin {
        /// The epoch.
        epoch: Epoch,
        /// The step.
        step: Step,
        /// Lanes that have a row in this step, ascending; the sum over them is divided by their number.
        lanes: Vec<u16>,
    },
    /// The step is in the journal: apply it.
    Commit {
        /// The epoch.
        epoch: Epoch,
        /// The step.
        step: Step,
        /// Learning rate.
        learning_rate: f64,
    },
    /// Write a checkpoint of the present state.
    Checkpoint {
        /// The checkpoint that the journal knows. It is not removed: until the new one is recorded, it is the one that
        /// replicas are loaded from, however many newer ones a cut-off launch has left unrecorded.
        recorded: Option<Step>,
    },
    /// Measure acceptance on the held-out rows of this seat's lanes.
    Evaluate,
    /// Say [`RankEvent::Bye`] and exit.
    Quit,
}
