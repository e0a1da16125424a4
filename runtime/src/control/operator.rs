//! What people ask of a live run, and what it answers.
//!
//! A call is one question and one answer. It carries a token of its own, which lies in the run directory where only the
//! owner of the run can read it; the ranks' token opens nothing here.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, Role, SampleSeq, Seat};

/// A request with the right to make it.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
pub struct OperatorCall {
    /// The operators' secret of this launch.
    pub token: String,
    /// What is asked.
    pub request: OperatorRequest,
}

impl fmt::Debug for OperatorCall {
    /// Without the token: what is printed ends in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OperatorCall")
            .field("request", &self.request)
            .finish_non_exhaustive()
    }
}

/// What can be asked of a live run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum OperatorRequest {
    /// Who sits where.
    Ranks,
    /// Start a rank more.
    AddRank {
        /// What it does.
        role: Role,
        /// CPU threads it computes with; 0 takes an even share.
        threads: usize,
    },
    /// Let a rank leave and its seat stay empty.
    RemoveRank {
        /// Its seat.
        seat: Seat,
    },
    /// Kill a rank and fill its seat again.
    RestartRank {
        /// Its seat.
        seat: Seat,
    },
    /// Read files of conversations, besides those that the run has.
    AddSamples {
        /// The files, as absolute paths.
        files: Vec<PathBuf>,
    },
    /// Read nothing more: the run ends when all is trained.
    CloseSamples,
    /// Try quarantined samples again.
    RetrySamples {
        /// Which; none stands for all that are quarantined.
        samples: Vec<SampleSeq>,
    },
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum OperatorReply {
    /// It is done, or will be whatever happens; what exactly, in a line or more.
    Done(String),
    /// The answer to [`OperatorRequest::Ranks`].
    Ranks(Vec<RankLine>),
    /// It is not done; why, and what to do instead.
    Refused(String),
}

/// A seat and its occupant, for showing.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankLine {
    /// The seat.
    pub seat: Seat,
    /// Which occupant of the seat this is.
    pub generation: Generation,
    /// What it is doing, in one word.
    pub state: String,
    /// Its process; `None` while the seat is empty.
    pub pid: Option<u32>,
    /// Restarts of the seat so far.
    pub restarts: u32,
    /// Resident memory of the process, in bytes; 0 if unknown.
    pub rss_bytes: u64,
    /// Draft only: the lanes that it computes.
    pub lanes: Vec<u16>,
    /// Time since its last beat, in ms; `None` before the first.
    pub beat_age_ms: Option<u64>,
    /// A few words more.
    pub detail: String,
}
