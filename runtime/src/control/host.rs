//! What the coordinator and the hosts beside its own say to each other.
//!
//! One stream per joined host, with the same rules as a rank's: its life is the life of the host in the run, and it ends well
//! only after [`HostCommand::Quit`].

use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::ids::{Generation, Seat};

/// A host's first words.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join {
    /// [`super::PROTOCOL`] of the host.
    pub protocol: u32,
    /// The hosts' secret of this launch. It lies in the run directory, so who knows it shares that directory.
    pub token: String,
    /// Its name in `cluster.toml`.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Address from which it reaches the coordinator.
    pub address: IpAddr,
}

impl fmt::Debug for Join {
    /// Without the token: what is printed ends in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Join")
            .field("protocol", &self.protocol)
            .field("name", &self.name)
            .field("pid", &self.pid)
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// What a host tells the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostEvent {
    /// Opens a stream.
    Join(Join),
    /// It is there.
    Beat,
    /// It has looked at what its ranks need, and has it.
    Ready,
    /// It lacks something that its ranks cannot do without.
    Unfit {
        /// What, and what to do.
        reason: String,
    },
    /// A rank's process is gone, or could not be started.
    Exited {
        /// Its seat.
        seat: Seat,
        /// Which occupant.
        generation: Generation,
        /// How it ended.
        status: String,
    },
}

/// What the coordinator tells a host.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostCommand {
    /// It may work.
    Welcome(HostWelcome),
    /// The answer to a beat.
    BeatAck,
    /// Start a rank.
    Start {
        /// Its seat.
        seat: Seat,
        /// Which occupant.
        generation: Generation,
    },
    /// Kill a rank, if it is there.
    Kill {
        /// Its seat.
        seat: Seat,
        /// Which occupant.
        generation: Generation,
    },
    /// The run is over: end what is left and leave.
    Quit,
}

impl fmt::Debug for HostCommand {
    /// Without tokens, as above.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Welcome(_) => f.write_str("Welcome"),
            Self::BeatAck => f.write_str("BeatAck"),
            Self::Start { seat, generation } => write!(f, "Start({seat} generation {generation})"),
            Self::Kill { seat, generation } => write!(f, "Kill({seat} generation {generation})"),
            Self::Quit => f.write_str("Quit"),
        }
    }
}

/// What a host needs to start ranks.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostWelcome {
    /// Secret of the ranks of this launch.
    pub token: String,
    /// Format of the ranks' log files.
    pub log_format: String,
    /// Address at which its ranks are reached by those of other hosts.
    pub address: IpAddr,
    /// Its seats, and the GPU that each computes on, as the host counts them.
    pub seats: Vec<(Seat, Option<u16>)>,
    /// The run directory, as ranks are told it.
    pub run_directory: PathBuf,
    /// Further paths that must be there, as on the coordinator's machine.
    pub needs: Vec<PathBuf>,
    /// Time between beats, in ms.
    pub beat_interval_ms: u64,
    /// Silence of the coordinator after which the host ends its ranks, in ms.
    pub lease_ms: u64,
}
