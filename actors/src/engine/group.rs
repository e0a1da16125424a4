//! When the draft replicas form an epoch: all seats filled, all at the same step with the same digest.
//!
//! A replica without a state takes it from a healthy peer; only if nobody has one, from the latest checkpoint, and the
//! journal's steps after it are then done again with the same batches.

use eaglet_runtime::control::{CoordinatorCommand, DraftOrigin};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};

use super::seats::Status;
use super::steps::StepPhase;
use super::{Engine, Phase};

impl Engine {
    /// A draft replica is gone: what belongs to the present epoch is void.
    pub(super) fn break_group(&mut self, seat: Seat, generation: Generation) {
        self.epoch = self.epoch.next();
        self.formed = false;
        self.step_phase = StepPhase::Idle;
        let epoch = self.epoch;
        for other in self.draft_seats() {
            let state = self.seats.get_mut(other);
            if state.donor == Some((seat.index, generation)) {
                // Its donor died: it needs another one.
                state.donor = None;
                state.status = Status::Attached;
            }
            if state.status == Status::Ready {
                self.send(other, CoordinatorCommand::Abandon { epoch });
            }
        }
    }

    pub(super) fn draft_ready(&mut self, seat: Seat, step: Step, digest: Digest) {
        if let Some(known) = self
            .latest_checkpoint()
            .filter(|known| known.step == step && known.state != digest)
        {
            let folder = known.folder.display().to_string();
            self.fail(format!(
                "the state of step {step} in {folder} is not the one that this run saved; put the right checkpoint back"
            ));
            return;
        }
        let now_ms = self.now_ms;
        let state = self.seats.get_mut(seat);
        state.status = Status::Ready;
        state.since_ms = now_ms;
        state.donor = None;
        state.state = Some((step, digest));
    }

    pub(super) fn group_ready(&mut self, seat: Seat, epoch: Epoch) {
        self.seats.get_mut(seat).joined = Some(epoch);
    }

    /// Gives states to those without one, and forms the epoch once all agree.
    pub(super) fn advance_group(&mut self) {
        if !self.prepared || matches!(self.phase, Phase::Leaving | Phase::Finished) || self.formed {
            return;
        }
        self.heal();
        let Some(common) = self.common_state() else { return };
        let epoch = self.epoch;
        let seats: Vec<Seat> = self.draft_seats().collect();
        if seats
            .iter()
            .all(|&seat| self.seats.get(seat).joined == Some(epoch))
        {
            self.formed = true;
            self.step_phase = StepPhase::Idle;
            self.notice(format!(
                "epoch {epoch}: {} draft replicas at step {}",
                seats.len(),
                common.0
            ));
            return;
        }
        let members: Vec<_> = seats
            .iter()
            .map(|&seat| self.seats.get(seat).member(seat))
            .collect();
        for seat in seats {
            let state = self.seats.get_mut(seat);
            if state.invited != Some(epoch) {
                state.invited = Some(epoch);
                self.send(
                    seat,
                    CoordinatorCommand::FormGroup {
                        epoch,
                        members: members.clone(),
                    },
                );
            }
        }
    }

    /// The state that all draft replicas hold, if they do.
    pub(super) fn common_state(&mut self) -> Option<(Step, Digest)> {
        let mut common = None;
        for seat in self.draft_seats() {
            let state = self.seats.get(seat);
            if state.status != Status::Ready || state.applying {
                return None;
            }
            let here = state.state?;
            match common {
                None => common = Some(here),
                Some(other) if other == here => {}
                Some((step, _)) if step != here.0 => return None,
                Some(_) => {
                    self.dissolve("draft replicas hold different weights at the same step");
                    return None;
                }
            }
        }
        common
    }

    /// SAME is violated and nobody can tell who is right: all replicas go back to the latest checkpoint.
    pub(super) fn dissolve(&mut self, why: &str) {
        self.warn(format!(
            "{why}; all of them are started again from the latest checkpoint"
        ));
        for seat in self.draft_seats() {
            let state = self.seats.get_mut(seat);
            state.state = None;
            if state.status == Status::Ready {
                state.status = Status::Loading;
            }
            self.kill(seat, why);
        }
    }

    fn heal(&mut self) {
        let seats: Vec<Seat> = self.draft_seats().collect();
        let best = seats
            .iter()
            .filter(|&&seat| self.seats.get(seat).status == Status::Ready)
            .filter_map(|&seat| self.seats.get(seat).state.map(|(step, _)| (step, seat)))
            .max_by_key(|&(step, seat)| (step, std::cmp::Reverse(seat)));
        for seat in seats {
            let state = self.seats.get(seat);
            let behind = state.status == Status::Ready
                && !state.applying
                && matches!((state.state, best), (Some((step, _)), Some((top, _))) if step < top);
            if state.status != Status::Attached && !behind {
                continue;
            }
            let origin = match best {
                Some((_, donor)) if donor != seat => {
                    let to = self.seats.get(seat).member(seat);
                    let from = self.seats.get(donor).member(donor);
                    self.seats.get_mut(seat).donor = Some((donor.index, from.generation));
                    self.send(donor, CoordinatorCommand::SendState { to });
                    DraftOrigin::Peer(from)
                }
                _ => match self.latest_checkpoint() {
                    Some(checkpoint) => DraftOrigin::Checkpoint(checkpoint.folder.clone()),
                    None => DraftOrigin::Initial,
                },
            };
            let now_ms = self.now_ms;
            let state = self.seats.get_mut(seat);
            state.status = Status::Loading;
            state.since_ms = now_ms;
            state.state = None;
            state.joined = None;
            let vocabulary = self.vocabulary.clone();
            let contract = self.settings.contract.clone();
            self.send(
                seat,
                CoordinatorCommand::LoadDraft {
                    vocabulary,
                    contract,
                    origin,
                },
            );
        }
    }
}
