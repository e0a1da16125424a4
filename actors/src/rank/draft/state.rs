//! Where a replica's weights come from, and who gets them.

use eaglet_runtime::control::{Activity, DraftOrigin, Member, RankEvent};
use eaglet_runtime::ids::Seat;
use eaglet_runtime::link::BulkMessage;

use super::{DraftWorker, RankDevice, RankFault, group, is_ahead, not_loaded};
use crate::faults::{self, Point};
use crate::replica::IncomingState;

impl<D: RankDevice> DraftWorker<D> {
    pub(super) fn take_origin(&mut self, origin: DraftOrigin) -> Result<(), RankFault> {
        self.donor = None;
        self.incoming = IncomingState::default();
        if !matches!(origin, DraftOrigin::Peer(_)) {
            self.early_states.clear();
        }
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        match origin {
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
}
