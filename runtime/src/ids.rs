//! The names that everything in a cluster is addressed by.
//!
//! A *seat* is a numbered place for one rank; a *generation* is the n-th occupant of a seat; an *epoch* is the n-th
//! membership of a group of ranks: of the draft replicas, or of the shards of one verifier. Messages carry them, and
//! anything older than the receiver's is dropped.
//!
//! A *lane* is a numbered row of every step. Which draft seat computes a lane may change from epoch to epoch; the lane's
//! samples and its place in the sum do not, and so neither do the weights.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What the occupant of a seat does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Holds a verifier shard and extracts hidden states.
    Verifier,
    /// Holds a replica of the draft and trains it.
    Draft,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Verifier => "verifier",
            Role::Draft => "draft",
        })
    }
}

/// A numbered place of the cluster, written `draft-0` or `verifier-1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Seat {
    /// What its occupant does.
    pub role: Role,
    /// Number within the role, from 0.
    pub index: u16,
}

impl Seat {
    /// The `index`-th draft seat.
    pub const fn draft(index: u16) -> Self {
        Self {
            role: Role::Draft,
            index,
        }
    }

    /// The `index`-th verifier seat.
    pub const fn verifier(index: u16) -> Self {
        Self {
            role: Role::Verifier,
            index,
        }
    }
}

impl fmt::Display for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.role, self.index)
    }
}

/// A text that is no seat.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no seat; seats are written like draft-0 or verifier-1")]
pub struct SeatParseError(String);

impl FromStr for Seat {
    type Err = SeatParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || SeatParseError(text.to_owned());
        let (role, index) = text.rsplit_once('-').ok_or_else(wrong)?;
        let role = match role {
            "verifier" => Role::Verifier,
            "draft" => Role::Draft,
            _ => return Err(wrong()),
        };
        Ok(Self {
            role,
            index: index.parse().map_err(|_| wrong())?,
        })
    }
}

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        pub struct $name(pub $inner);

        impl $name {
            /// The one after this.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

counter! {
    /// The n-th occupant of a seat.
    Generation(u32)
}
/// The n-th membership of a group of ranks: of the draft replicas, or of the shards of one verifier. The upper half counts
/// the launches of the run, so that no epoch of an earlier launch comes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Epoch(pub u64);

impl Epoch {
    /// The first epoch of a launch.
    pub const fn first_of(launch: u32) -> Self {
        Self((launch as u64) << 32)
    }

    /// The one after this.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 >> 32, self.0 & 0xffff_ffff)
    }
}
counter! {
    /// Number of optimizer steps committed: step `n` is the one that takes the weights from `n` to `n + 1`.
    Step(u64)
}
counter! {
    /// Place of a sample in the order in which the journal accepted it.
    SampleSeq(u64)
}

/// The unit of account of the ledger: one pass over one sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Unit {
    /// Which pass over the data, from 0.
    pub pass: u32,
    /// Which sample.
    pub sample: SampleSeq,
}

/// A row: the work of one lane in one optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum RowId {
    /// A row that is trained.
    Train {
        /// The step it belongs to.
        step: Step,
        /// The lane it belongs to.
        lane: u16,
    },
    /// A row that is only evaluated.
    HeldOut {
        /// The lane it belongs to.
        lane: u16,
        /// Which part of the lane's prompts it answers.
        part: u16,
    },
}

impl RowId {
    /// The step that a row is trained in.
    pub const fn step(self) -> Option<Step> {
        match self {
            Self::Train { step, .. } => Some(step),
            Self::HeldOut { .. } => None,
        }
    }

    /// The lane whose work this row is.
    pub const fn lane(self) -> u16 {
        match self {
            Self::Train { lane, .. } | Self::HeldOut { lane, .. } => lane,
        }
    }
}

impl fmt::Display for RowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Train { step, lane } => write!(f, "row of step {step} in lane {lane}"),
            Self::HeldOut { lane, part } => write!(f, "held-out row {part} of lane {lane}"),
        }
    }
}
