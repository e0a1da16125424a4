//! What goes into the engine and what comes out.

use std::path::PathBuf;

use eaglet_runtime::control::{
    Acceptance, BulkAddress, CoordinatorCommand, Member, RankEvent, StepMetrics, Turn,
};
use eaglet_runtime::ids::{Generation, Role, RowId, SampleSeq, Seat, Unit};
use serde::{Deserialize, Serialize};

use crate::journal::{Record, SampleSource};
use eaglet_runtime::samples::Location;

/// Something happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// Intake read a sample and stored it.
    SampleAccepted {
        /// Where it came from.
        source: SampleSource,
        /// Where it lies in the sample store.
        location: Location,
        /// Its length.
        tokens: u32,
        /// How many of them are trained.
        trained_tokens: u32,
    },
    /// Intake read a sample that cannot be used.
    SampleRefused {
        /// Where it came from.
        source: SampleSource,
        /// Why.
        reason: String,
    },
    /// Intake has read all that the run starts with.
    Prepared {
        /// Verifier ids of the draft vocabulary, ascending.
        vocabulary: Vec<u32>,
        /// Share of the supervised tokens inside the draft vocabulary.
        coverage: f64,
        /// Held-out prompts.
        held_out: Vec<Vec<u32>>,
    },
    /// Intake has read all there is for now, beyond what the run started with.
    Grown,
    /// A file was added to the live run; it is journaled before it is read.
    SourceAdded {
        /// The file.
        file: PathBuf,
    },
    /// Nothing more will come: the run ends when all is trained.
    IntakeClosed,
    /// A quarantined sample is to be tried again.
    SampleRetried {
        /// Which.
        sample: SampleSeq,
        /// What was stored for it now, if it was refused on arrival and is accepted this time.
        stored: Option<StoredSample>,
    },
    /// A rank is to be added, removed or restarted.
    ChangeSeat {
        /// Who asked: comes back with the answer.
        ticket: u64,
        /// What.
        change: SeatChange,
    },
    /// A rank's process attached.
    Attached {
        /// Its seat.
        seat: Seat,
        /// Its generation.
        generation: Generation,
        /// Its process.
        pid: u32,
        /// Where its bulk listener is reached.
        bulk: BulkAddress,
    },
    /// A rank said something.
    Rank {
        /// Its seat.
        seat: Seat,
        /// Its generation.
        generation: Generation,
        /// What it said.
        event: RankEvent,
    },
    /// A rank's process is gone.
    Lost {
        /// Its seat.
        seat: Seat,
        /// Its generation.
        generation: Generation,
        /// Why, in one line.
        cause: String,
        /// Last lines of its log.
        log_tail: String,
    },
    /// A host has joined.
    HostJoined {
        /// Its name.
        host: String,
    },
    /// A host is gone.
    HostLost {
        /// Its name.
        host: String,
        /// Why, in one line.
        cause: String,
    },
    /// The coordinator itself cannot go on.
    Broken {
        /// Why, and what to do.
        report: String,
    },
    /// Time passed.
    Tick,
    /// Finish the step in flight, write a checkpoint, end.
    Drain,
}

/// Where an accepted sample lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredSample {
    /// Where it lies in the sample store.
    pub location: Location,
    /// Its length.
    pub tokens: u32,
    /// How many of them are trained.
    pub trained_tokens: u32,
}

/// A change of the ranks of a live run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeatChange {
    /// A rank on a new seat, behind the last one of its role; of a verifier that is cut into shards, ranks for all of them.
    Add {
        /// What it does.
        role: Role,
        /// CPU threads it computes with; 0 takes an even share.
        threads: usize,
    },
    /// The rank leaves at the next step boundary and its seat stays empty; of a verifier, all shards of its replica leave.
    Remove {
        /// Its seat.
        seat: Seat,
    },
    /// The rank is killed and its seat filled again, now and with a clean slate; also a seat that is empty for good.
    Restart {
        /// Its seat.
        seat: Seat,
    },
}

/// Something to do. Commands are carried out in order; a failed append stops everything behind it.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Append to the journal.
    Append {
        /// What.
        record: Record,
        /// Whether it must be on disk before the next command.
        sync: bool,
    },
    /// Start a process for a seat.
    Spawn {
        /// The seat.
        seat: Seat,
        /// The generation.
        generation: Generation,
    },
    /// Kill a seat's process.
    Kill {
        /// The seat.
        seat: Seat,
        /// The generation.
        generation: Generation,
        /// Why.
        reason: String,
    },
    /// Say something to a rank.
    Send {
        /// The seat.
        seat: Seat,
        /// The generation.
        generation: Generation,
        /// What.
        command: CoordinatorCommand,
    },
    /// Read a row's samples from the store and send it to all shards of a verifier.
    Lease {
        /// Their seats and generations.
        members: Vec<(Seat, Generation)>,
        /// The row.
        row: RowId,
        /// Number of the lease.
        lease: u64,
        /// When they compute it.
        turn: Turn,
        /// Its documents.
        documents: Vec<(Unit, Location)>,
        /// Who gets the hidden states.
        destination: Member,
    },
    /// Tell the user.
    Notice(Notice),
    /// A rank is gone that nobody has asked to go.
    Lost {
        /// Its seat.
        seat: Seat,
        /// Its generation.
        generation: Generation,
        /// Why, in one line.
        cause: String,
    },
    /// A step was committed.
    Committed(StepReport),
    /// Acceptance was measured.
    Evaluated {
        /// Step of the weights.
        step: u64,
        /// Counts over all seats.
        acceptance: Acceptance,
    },
    /// A seat was added: ranks are told of it with their configuration.
    SeatAdded {
        /// The seat.
        seat: Seat,
        /// CPU threads it computes with; 0 takes an even share.
        threads: usize,
    },
    /// The answer to [`Event::ChangeSeat`].
    Answer {
        /// Whose.
        ticket: u64,
        /// What was done, or why not.
        answer: Result<String, String>,
    },
    /// The run is over.
    Finish(Outcome),
}

/// A line for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notice {
    /// Whether it needs attention.
    pub warning: bool,
    /// Whether it is one of many, which only the log has room for.
    pub quiet: bool,
    /// One line.
    pub text: String,
}

/// What one committed step measured, averaged over the seats that had a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepReport {
    /// Steps committed, this one included.
    pub step: u64,
    /// Total loss.
    pub loss: f64,
    /// Per TTT step: mean loss and summed counts.
    pub ttt: Vec<StepMetrics>,
    /// Learning rate the step is applied with.
    pub learning_rate: f64,
    /// Tokens of the step's rows.
    pub tokens: u64,
    /// Trained positions of the step's rows.
    pub trained_tokens: u64,
    /// Whether the step had been committed by an earlier incarnation and is only caught up with.
    pub replay: bool,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// All steps are committed.
    Completed {
        /// The last checkpoint.
        checkpoint: Option<PathBuf>,
        /// Acceptance on held-out answers, if any were given.
        acceptance: Option<Acceptance>,
    },
    /// Stopped on request after a checkpoint.
    Drained {
        /// The last checkpoint.
        checkpoint: Option<PathBuf>,
    },
    /// Ended at once on request.
    Stopped,
    /// Given up.
    Failed {
        /// Why: the first cause, and what to do.
        report: String,
    },
}
