//! One look at a running cluster. Views draw it, files keep it; nothing reads it back to decide anything.

use std::fmt;

use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use serde::{Deserialize, Serialize};

/// What the occupant of a seat is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RankState {
    /// Its process was started and has not attached yet.
    #[default]
    Starting,
    /// It loads weights.
    Loading,
    /// It waits for work.
    Idle,
    /// It computes hidden states.
    Extracting,
    /// It computes or applies a step.
    Training,
    /// It was told to leave for good.
    Leaving,
    /// The seat is empty for good: removed, or given up.
    Gone,
    /// Its next occupant waits for its turn to start.
    Restarting,
    /// Its host has not joined, or was lost.
    HostAbsent,
}

impl fmt::Display for RankState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Starting => "starting",
            Self::Loading => "loading",
            Self::Idle => "idle",
            Self::Extracting => "extracting",
            Self::Training => "training",
            Self::Leaving => "leaving",
            Self::Gone => "gone",
            Self::Restarting => "restarting",
            Self::HostAbsent => "no host",
        })
    }
}

/// A part of a verifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardView {
    /// Which verifier, from 0.
    pub replica: u16,
    /// Which stage of its layers.
    pub stage: u16,
    /// Which slice of the stage.
    pub slice: u16,
}

/// A seat and its occupant.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankView {
    /// The seat.
    pub seat: Seat,
    /// Which occupant of the seat this is.
    pub generation: Generation,
    /// Its process; `None` while the seat is empty.
    pub pid: Option<u32>,
    /// What it is doing.
    pub state: RankState,
    /// Restarts of the seat so far.
    pub restarts: u32,
    /// Draft only: the lanes that it computes.
    #[serde(default)]
    pub lanes: Vec<u16>,
    /// Verifier only: the part of it that the rank holds.
    #[serde(default)]
    pub shard: Option<ShardView>,
    /// Part of its time that it has computed lately, 0 to 1.
    #[serde(default)]
    pub busy: Option<f32>,
    /// Part of its time that it has waited for other ranks in the middle of work lately, 0 to 1.
    #[serde(default)]
    pub waiting: Option<f32>,
    /// Part of its time that it has waited for input lately, 0 to 1.
    #[serde(default)]
    pub idle: Option<f32>,
    /// Resident memory of the process, in bytes; 0 if unknown.
    pub rss_bytes: u64,
    /// Time since its last beat, in ms; `None` before the first.
    pub beat_age_ms: Option<u64>,
    /// A few words more, such as the row it works on.
    pub detail: String,
}

/// The ledger in numbers, in (sample, pass) units; `intake` is the sum of the others but `held_out`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleCounts {
    /// Accepted into the journal.
    pub intake: u64,
    /// Waiting for a verifier.
    pub pending: u64,
    /// Given to a verifier.
    pub leased: u64,
    /// With hidden states, waiting for their step.
    pub extracted: u64,
    /// Part of a committed step.
    pub trained: u64,
    /// Put aside with a reason.
    pub quarantined: u64,
    /// Only evaluated; not part of `intake`.
    pub held_out: u64,
}

/// A value at a step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The step.
    pub step: Step,
    /// The value.
    pub value: f32,
}

/// Accuracy of one TTT step, 0 to 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepAccuracy {
    /// This and all earlier TTT steps are right, of all tokens.
    pub full: f32,
    /// Right, of the tokens whose earlier TTT steps are right.
    pub conditional: f32,
}

/// Tokens accepted per verifier pass, measured as it will be served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Acceptance {
    /// Newest mean length, the verifier's own token included; `None` before the first evaluation.
    pub latest: Option<f32>,
    /// Part of the passes that accepted the token at each position, `[positions]`.
    pub per_position: Vec<f32>,
    /// Mean length at each evaluation, oldest first.
    pub history: Vec<Point>,
}

/// A line of the event log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Time of day, as it is shown.
    pub time: String,
    /// What happened.
    pub text: String,
}

/// One look at a running cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Name of the run.
    pub run: String,
    /// What the cluster is doing, in a word or two.
    pub phase: String,
    /// Seats in the order of their numbers, verifiers first.
    pub ranks: Vec<RankView>,
    /// The ledger in numbers.
    pub samples: SampleCounts,
    /// Steps committed.
    pub step: Step,
    /// Steps of the whole run; `None` until the samples are counted.
    pub total_steps: Option<Step>,
    /// Membership of the draft group.
    pub epoch: Epoch,
    /// Tokens whose hidden states were extracted, per second, lately.
    pub extraction_tokens_per_s: f32,
    /// Tokens trained, per second, lately.
    pub training_tokens_per_s: f32,
    /// Training loss, oldest first.
    pub loss: Vec<Point>,
    /// Accuracy of each TTT step in the newest training step; empty before the first.
    pub accuracy: Vec<StepAccuracy>,
    /// Held-out acceptance length.
    pub acceptance: Acceptance,
    /// Learning rate of the last step.
    pub learning_rate: f64,
    /// Time left, in s; `None` if unknown.
    pub eta_s: Option<u64>,
    /// Newest events, oldest first.
    pub events: Vec<Event>,
    /// Events of the whole run; the first of `events` is number `events_total - events.len()`.
    pub events_total: u64,
    /// Newest checkpoint.
    pub checkpoint: Option<String>,
    /// How the run ended; `None` while it goes on.
    pub finished: Option<String>,
}

impl Snapshot {
    /// Part of the run that is done, 0 to 1; `None` if its length is unknown.
    pub fn progress(&self) -> Option<f64> {
        let total = self.total_steps?.0;
        (total > 0).then(|| (self.step.0 as f64 / total as f64).min(1.0))
    }

    /// Newest training loss.
    pub fn latest_loss(&self) -> Option<f32> {
        self.loss.last().map(|point| point.value)
    }
}
