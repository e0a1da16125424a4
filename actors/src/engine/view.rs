//! What can be shown of the engine.

use std::collections::BTreeMap;
use std::path::PathBuf;

use eaglet_runtime::control::Beat;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat};
use eaglet_runtime::verifier::Shard;

use super::rows::RowState;
use super::seats::Status;
use super::{Engine, LedgerCounts, Phase};

/// A seat, for showing.
#[derive(Clone, Debug)]
pub struct SeatView {
    /// The seat.
    pub seat: Seat,
    /// Which occupant.
    pub generation: Generation,
    /// Its host, if that is not the coordinator's.
    pub host: Option<String>,
    /// What it is up to, in one word.
    pub status: &'static str,
    /// Its process, 0 if there is none.
    pub pid: u32,
    /// How often the seat was filled again.
    pub restarts: u32,
    /// Draft only: the lanes that it computes.
    pub lanes: Vec<u16>,
    /// Verifier only: its replica, and the part of it that it holds.
    pub shard: Option<(u16, Shard)>,
    /// Time since it was last heard.
    pub silent_ms: u64,
    /// Its last beat.
    pub beat: Option<Beat>,
}

/// The engine, for showing.
#[derive(Clone, Debug)]
pub struct EngineView {
    /// How far the run is.
    pub phase: Phase,
    /// Membership of the draft group.
    pub epoch: Epoch,
    /// Whether its members are linked up.
    pub formed: bool,
    /// Steps committed.
    pub committed: u64,
    /// Steps of the whole run so far, 0 until known.
    pub total_steps: u64,
    /// Whether all is trained that there is, and more may come.
    pub waiting_for_samples: bool,
    /// The account of samples.
    pub ledger: LedgerCounts,
    /// Held-out prompts.
    pub held_out: u64,
    /// Tokens extracted by this launch.
    pub extracted_tokens: u64,
    /// The newest checkpoint.
    pub checkpoint: Option<PathBuf>,
    /// All seats.
    pub seats: Vec<SeatView>,
}

impl Engine {
    /// What can be shown at a time.
    pub fn view(&self, now_ms: u64) -> EngineView {
        let mut lanes: BTreeMap<u16, Vec<u16>> = BTreeMap::new();
        for (lane, owner) in (0..).zip(&self.owners) {
            if let Some(owner) = owner {
                lanes.entry(*owner).or_default().push(lane);
            }
        }
        EngineView {
            phase: self.phase,
            epoch: self.epoch,
            formed: self.formed,
            committed: self.committed.0,
            total_steps: self.total_steps,
            waiting_for_samples: self.prepared
                && self.phase == Phase::Training
                && self.committed.0 >= self.total_steps
                && self.is_open(),
            ledger: self.ledger.counts(),
            held_out: self.held_out.len() as u64,
            extracted_tokens: self.extracted_tokens,
            checkpoint: self.latest_checkpoint().map(|known| known.folder.clone()),
            seats: self
                .seats
                .iter()
                .map(|(seat, state)| SeatView {
                    seat,
                    generation: state.generation,
                    host: self.hosts.of(seat).map(str::to_owned),
                    status: match state.status {
                        Status::Vacant { .. } if !self.hosts.is_here(seat) => "host absent",
                        Status::Vacant { .. } => "restarting",
                        Status::Starting | Status::Attached => "starting",
                        Status::Loading => "loading",
                        Status::Ready if seat.role == Role::Draft && !self.formed => "waiting",
                        Status::Ready
                            if seat.role == Role::Verifier && !self.is_formed(self.replica_of(seat)) =>
                        {
                            "waiting"
                        }
                        Status::Ready => "ready",
                        Status::Leaving => "leaving",
                        Status::Empty => "gone",
                    },
                    pid: state.pid,
                    restarts: state.restarts_total,
                    lanes: if seat.role == Role::Draft {
                        lanes.remove(&seat.index).unwrap_or_default()
                    } else {
                        Vec::new()
                    },
                    shard: (seat.role == Role::Verifier).then(|| {
                        let shards = self.settings.shards();
                        let (stages, slices) = (self.settings.pipeline, self.settings.tensor);
                        let shard = Shard::nth(seat.index % shards, stages.max(1), slices.max(1));
                        (self.replica_of(seat), shard)
                    }),
                    silent_ms: now_ms.saturating_sub(state.last_heard_ms),
                    beat: state.beat,
                })
                .collect(),
        }
    }

    /// The account of units.
    pub fn ledger(&self) -> LedgerCounts {
        self.ledger.counts()
    }

    /// Rows that are being extracted, on their way, or waiting at a draft replica.
    pub fn rows_under_way(&self) -> usize {
        self.rows
            .iter()
            .filter(|(_, row)| row.state != RowState::Waiting)
            .count()
    }
}
