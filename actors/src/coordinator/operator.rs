//! Answers what operators ask of the live run.

use std::collections::HashMap;

use eaglet_runtime::control::transport::Operate;
use eaglet_runtime::control::{OperatorCall, OperatorReply, OperatorRequest, RankLine};
use ractor::ActorRef;
use tokio::sync::{oneshot, watch};

use super::cluster::ClusterMessage;
use super::intake::IntakeRequest;
use super::is_secret;
use crate::engine::SeatChange;
use crate::monitor::{RankView, Snapshot};

/// Where an answer goes.
pub(super) type Reply = oneshot::Sender<OperatorReply>;

/// Takes calls and passes them on to whoever can answer them.
pub(super) struct Desk {
    /// The operators' secret of this launch.
    pub(super) token: String,
    pub(super) cluster: ActorRef<ClusterMessage>,
    pub(super) snapshots: watch::Receiver<Snapshot>,
}

impl Operate for Desk {
    async fn operate(&self, call: OperatorCall) -> Option<OperatorReply> {
        if !is_secret(&call.token, &self.token) {
            return None;
        }
        if call.request != OperatorRequest::Ranks {
            tracing::info!(request = ?call.request, "an operator asks");
        }
        let (reply, answer) = oneshot::channel();
        let message = match call.request {
            OperatorRequest::Ranks => return Some(self.ranks()),
            OperatorRequest::AddRank { role, threads } => {
                ClusterMessage::ChangeSeat(SeatChange::Add { role, threads }, reply)
            }
            OperatorRequest::RemoveRank { seat } => {
                ClusterMessage::ChangeSeat(SeatChange::Remove { seat }, reply)
            }
            OperatorRequest::RestartRank { seat } => {
                ClusterMessage::ChangeSeat(SeatChange::Restart { seat }, reply)
            }
            OperatorRequest::AddSamples { files } => {
                ClusterMessage::Read(IntakeRequest::Add { files, reply })
            }
            OperatorRequest::CloseSamples => ClusterMessage::Read(IntakeRequest::Close { reply }),
            OperatorRequest::RetrySamples { samples } => {
                ClusterMessage::Read(IntakeRequest::Retry { samples, reply })
            }
        };
        // A cluster that is gone drops the request, and with it the promise of an answer.
        let _ = self.cluster.cast(message);
        let ended = || OperatorReply::Refused("the run ended before it could answer".to_owned());
        Some(answer.await.unwrap_or_else(|_| ended()))
    }
}

impl Desk {
    fn ranks(&self) -> OperatorReply {
        OperatorReply::Ranks(self.snapshots.borrow().ranks.iter().map(rank_line).collect())
    }
}

fn rank_line(rank: &RankView) -> RankLine {
    RankLine {
        seat: rank.seat,
        generation: rank.generation,
        state: rank.state.to_string(),
        pid: rank.pid,
        restarts: rank.restarts,
        rss_bytes: rank.rss_bytes,
        lanes: rank.lanes.clone(),
        beat_age_ms: rank.beat_age_ms,
        detail: rank.detail.clone(),
    }
}

/// Changes of seats that the engine has not answered yet.
#[derive(Default)]
pub(super) struct Tickets {
    last: u64,
    waiting: HashMap<u64, Reply>,
}

impl Tickets {
    /// A number under which the engine's answer comes back.
    pub(super) fn open(&mut self, reply: Reply) -> u64 {
        self.last += 1;
        self.waiting.insert(self.last, reply);
        self.last
    }

    /// Passes the engine's answer on.
    pub(super) fn answer(&mut self, ticket: u64, answer: Result<String, String>) {
        let Some(reply) = self.waiting.remove(&ticket) else {
            return;
        };
        // An operator who has gone away needs no answer.
        let _ = reply.send(match answer {
            Ok(done) => OperatorReply::Done(done),
            Err(reason) => OperatorReply::Refused(reason),
        });
    }
}
