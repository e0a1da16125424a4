//! What the journal remembers.

use std::path::PathBuf;

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::Contract;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, SampleSeq, Seat, Step, Unit};
use eaglet_runtime::samples::Location;
use serde::{Deserialize, Serialize};

use crate::engine::{StepReport, StoredSample};

/// Where a sample came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SampleSource {
    /// The file.
    pub file: String,
    /// Its line, from 1; in a JSON array the element, from 1.
    pub line: u64,
    /// The conversation's own name, if it has one.
    pub id: Option<String>,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// The coordinator was started on this run directory.
    Launched {
        /// How often, this time included.
        launch: u32,
        /// What hidden states promise; a later launch must promise the same.
        contract: Contract,
        /// Digest of the parts of the configuration that decide the weights.
        recipe: Digest,
    },
    /// A sample was taken in.
    Accepted {
        /// Its place.
        sample: SampleSeq,
        /// Where it came from.
        source: SampleSource,
        /// Where it lies in the sample store.
        location: Location,
        /// Its length.
        tokens: u32,
        /// How many of them are trained.
        trained_tokens: u32,
    },
    /// A sample was refused on arrival.
    Refused {
        /// Its place.
        sample: SampleSeq,
        /// Where it came from.
        source: SampleSource,
        /// Why.
        reason: String,
    },
    /// Intake is complete; what training starts from.
    Prepared {
        /// Verifier ids of the draft vocabulary, ascending.
        vocabulary: Vec<u32>,
        /// Held-out prompts.
        held_out: Vec<Vec<u32>>,
        /// Steps of the whole run: the learning-rate schedule's length.
        total_steps: u64,
    },
    /// The rows of a step are decided.
    Planned {
        /// The step.
        step: Step,
        /// Per lane, the units of its row.
        rows: Vec<Vec<Unit>>,
    },
    /// The run has another number of steps than was counted before: more was read, or samples were refused.
    Grown {
        /// Steps of the whole run from now on.
        total_steps: u64,
    },
    /// A file was added to the live run.
    SourceAdded {
        /// The file.
        file: PathBuf,
    },
    /// Nothing more will be read.
    Closed,
    /// A quarantined sample is pending again, in the passes in which it was quarantined.
    Retried {
        /// The sample.
        sample: SampleSeq,
        /// What was stored for it, if it had been refused on arrival.
        stored: Option<StoredSample>,
    },
    /// A rank was added to the live run.
    SeatAdded {
        /// Its seat.
        seat: Seat,
        /// CPU threads it computes with; 0 takes an even share.
        threads: usize,
    },
    /// A rank was removed from the live run.
    SeatRemoved {
        /// Its seat.
        seat: Seat,
    },
    /// A unit turned out bad at the verifier and was taken out of its row.
    Quarantined {
        /// The step it was planned for.
        step: Step,
        /// The unit.
        unit: Unit,
        /// Why.
        reason: String,
    },
    /// A step is committed: its units are trained.
    Committed {
        /// The step.
        step: Step,
        /// In which epoch.
        epoch: Epoch,
        /// Digest of the reduced gradient.
        gradient: Digest,
        /// Digest of weights and moments that the step starts from.
        state: Digest,
        /// What it measured.
        report: StepReport,
    },
    /// A checkpoint is complete on disk.
    Checkpointed {
        /// Its step.
        step: Step,
        /// Digest of its weights and moments.
        state: Digest,
        /// Its folder.
        folder: PathBuf,
    },
    /// Gradients of lanes are added in an order that is not theirs, from here on. Exact sums go without saying.
    Sums {
        /// In which.
        mode: SumMode,
    },
}
