//! Where a replica's weights come from, and who gets them: over a link, or over NCCL from device to device.

use std::sync::Arc;

use eaglet_runtime::control::{Activity, DraftOrigin, Handover, Member, RankEvent};
use eaglet_runtime::cuda::{View, ViewMut};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Seat, Step};
use eaglet_runtime::link::BulkMessage;

use super::group::Group;
use super::nccl::Part;
use super::{DraftWorker, RankDevice, RankFault, group, is_ahead, not_loaded};
use crate::faults::{self, Point};
use crate::replica::{IncomingState, Replica};

impl<D: RankDevice> DraftWorker<D> {
    pub(super) fn take_origin(&mut self, origin: DraftOrigin) -> Result<(), RankFault> {
        self.donor = None;
        self.incoming = IncomingState::default();
        if !matches!(origin, DraftOrigin::Peer(_)) {
            self.early_states.clear();
        }
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        match origin {
            DraftOrigin::Later => {}
            DraftOrigin::Initial => replica.initialise(self.context.config.run.seed),
            DraftOrigin::Checkpoint(folder) => {
                // Relative to the run directory, which may have been moved.
                let folder = self.context.run_directory.join(folder);
                replica.load(&folder).map_err(RankFault::permanent)?;
            }
            DraftOrigin::Peer(donor) => {
                self.donor = Some(donor);
                for message in std::mem::take(&mut self.early_states) {
                    self.take_state(message)?;
                }
                return Ok(());
            }
        }
        self.say_ready();
        Ok(())
    }

    fn say_ready(&mut self) {
        if let Some(replica) = &self.replica {
            self.rows.retain(|row| is_ahead(row, replica.step()));
            self.context.say(RankEvent::DraftReady {
                load: self.load,
                step: replica.step(),
                state: replica.digest(),
            });
        }
    }

    pub(super) fn send_state(&mut self, to: &Member) -> Result<(), RankFault> {
        self.context.enter(Activity::Donating);
        tracing::info!(to = to.seat, "the state is sent over a link");
        let pieces = self.replica.as_ref().ok_or_else(not_loaded)?.pieces();
        if let Err(error) = group::send_once(&self.context.here, to, self.epoch, pieces) {
            tracing::warn!(to = to.seat, %error, "cannot send the state");
            // Most often its process is gone; if not, it is to ask again rather than to wait.
            self.context.say(RankEvent::StateNotSent {
                seat: to.seat,
                generation: to.generation,
                reason: error.to_string(),
            });
        }
        Ok(())
    }

    pub(super) fn take_state(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let Some(donor) = self.donor.as_ref() else {
            // DRAFT-2: of several donors only the last one was asked to replace the others.
            let sender = |message: &BulkMessage| (message.header.from, message.header.generation);
            let newest = sender(&message);
            self.early_states.retain(|piece| sender(piece) == newest);
            self.early_states.push(message);
            return Ok(());
        };
        if (message.header.from, message.header.generation) != (Seat::draft(donor.seat), donor.generation) {
            return Ok(()); // the state of a donor that has died since
        }
        let bytes = message.parts.first().map_or(&[][..], |part| &part[..]);
        let whole = self
            .incoming
            .take(&message.header.kind, bytes)
            .map_err(RankFault::passing)?;
        if let Some(state) = whole {
            self.replica
                .as_mut()
                .ok_or_else(not_loaded)?
                .adopt(state)
                .map_err(RankFault::permanent)?;
            self.donor = None;
            self.early_states.clear();
            self.say_ready();
        } else {
            faults::reach(Point::Adopting, None)?;
        }
        Ok(())
    }

    /// The replica, its part in the epoch, and what goes round in it.
    fn passing(&mut self) -> Option<(&mut Replica<D>, &mut Part, Handover)> {
        let part = self.group.as_mut().and_then(Group::part)?;
        let handover = part.handover()?.clone();
        Some((self.replica.as_mut()?, part, handover))
    }

    /// Gives more of the state to the other members of the epoch, if that is this seat's.
    pub(super) fn give_state(&mut self) -> Result<(), RankFault> {
        let own = self.context.seat.index;
        let Some((replica, part, handover)) = self.passing() else {
            return Ok(());
        };
        if handover.donor != own {
            return Ok(());
        }
        if (replica.step(), replica.digest()) != (handover.step, handover.state) {
            return Err(RankFault::passing(format!(
                "the state of step {} was to be given, and this replica is at step {} with other weights",
                handover.step,
                replica.step()
            )));
        }
        let stream = replica.device().stream().ok_or_else(no_gpu)?;
        let vectors: Option<Vec<View<'_, f32>>> = replica.state().into_iter().map(|of| of.as_gpu()).collect();
        let vectors = vectors.ok_or_else(no_gpu)?;
        part.sums()
            .give_state(&vectors, stream)
            .map_err(RankFault::passing)?;
        faults::reach(Point::Donating, None)?;
        Ok(())
    }

    /// Takes what has arrived over NCCL of the epoch's state. RANK-3: the coordinator counts on no state here until all of it
    /// is taken.
    pub(super) fn take_arrived(&mut self) -> Result<(), RankFault> {
        let Some((replica, part, _)) = self.passing() else {
            return Ok(());
        };
        let device = Arc::clone(replica.device());
        let stream = device.stream().ok_or_else(no_gpu)?;
        let vectors: Option<Vec<ViewMut<'_, f32>>> =
            replica.state_mut().into_iter().map(|of| of.into_gpu()).collect();
        part.sums()
            .take_state(&mut vectors.ok_or_else(no_gpu)?, stream)
            .map_err(RankFault::passing)?;
        faults::reach(Point::Adopting, None)?;
        Ok(())
    }

    /// Adopts the state that has come over NCCL, if one was to come to this seat: its step and digest.
    pub(super) fn adopt_arrived(&mut self) -> Result<Option<(Step, Digest)>, RankFault> {
        let own = self.context.seat.index;
        let Some((replica, _, handover)) = self.passing() else {
            return Ok(None);
        };
        if handover.donor == own {
            tracing::info!(step = handover.step.0, to = ?handover.receivers, "the state is given over NCCL");
        }
        if !handover.receivers.contains(&own) {
            return Ok(None);
        }
        replica
            .adopt_written(handover.step, handover.state)
            .map_err(RankFault::passing)?;
        self.rows.retain(|row| is_ahead(row, handover.step));
        tracing::info!(
            step = handover.step.0,
            from = handover.donor,
            "the state came over NCCL"
        );
        Ok(Some((handover.step, handover.state)))
    }
}

fn no_gpu() -> RankFault {
    RankFault::permanent("a state over NCCL needs a replica on a GPU")
}
