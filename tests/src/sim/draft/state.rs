//! Where a fake replica's weights come from, and who gets them.

use eaglet_runtime::control::{DraftOrigin, Handover, Member, RankEvent};
use eaglet_runtime::ids::Seat;

use super::{Draft, is_ahead, not_loaded};
use crate::sim::collective::MeetingId;
use crate::sim::network::{LinkKind, Load, PARTS, Parcel};
use crate::sim::rank::{Rank, RankFault, RankId};
use crate::sim::weights::Weights;
use crate::sim::world::World;

impl Draft {
    pub(super) fn take_origin(
        &mut self,
        world: &mut World,
        id: RankId,
        origin: DraftOrigin,
    ) -> Result<(), RankFault> {
        self.donor = None;
        self.incoming = [None; PARTS];
        match origin {
            DraftOrigin::Later => {
                self.early_states.clear();
                self.replica = Some(Weights::VOID);
            }
            DraftOrigin::Initial => {
                self.early_states.clear();
                self.replica = Some(Weights::INITIAL);
            }
            DraftOrigin::Checkpoint(folder) => {
                self.early_states.clear();
                let weights = world
                    .disk
                    .load(&folder)
                    .ok_or_else(|| RankFault::permanent("the checkpoint is not there"))?;
                self.replica = Some(weights);
            }
            DraftOrigin::Peer(donor) => {
                self.donor = Some(donor);
                for parcel in std::mem::take(&mut self.early_states) {
                    self.take_piece(world, id, parcel)?;
                }
                return Ok(());
            }
        }
        self.say_ready(world, id);
        Ok(())
    }

    fn say_ready(&mut self, world: &mut World, id: RankId) {
        if let Some(weights) = self.replica {
            self.retain_rows(|row| is_ahead(row, weights.step));
            if weights != Weights::VOID {
                world.holds(id, weights);
            }
            world.say(
                id,
                RankEvent::DraftReady {
                    load: self.load,
                    step: weights.step,
                    state: weights.digest(),
                },
            );
        }
    }

    pub(super) fn send_state(&mut self, world: &mut World, id: RankId, to: &Member) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let Some(to) = world.rank_at(&to.bulk) else {
            return Ok(());
        };
        let sent = world.connect(id, to, LinkKind::State, self.epoch).and_then(|()| {
            (0..PARTS).try_for_each(|part| {
                let load = Load::Piece { weights, part };
                world.send_over(id, to, LinkKind::State, self.epoch, load)
            })
        });
        world.close(id, |link| link.kind == LinkKind::State);
        if sent.is_err() {
            let Rank { seat, generation, .. } = &world.ranks[to];
            let (seat, generation) = (seat.index, *generation);
            let reason = "the link is gone".to_owned();
            world.say(
                id,
                RankEvent::StateNotSent {
                    seat,
                    generation,
                    reason,
                },
            );
        }
        Ok(())
    }

    /// Takes part in the handover of its epoch, after which a receiver holds no state until it has all of the new one.
    pub(super) fn pass_state(
        &mut self,
        world: &mut World,
        id: RankId,
        meeting: MeetingId,
        handover: &Handover,
    ) -> Result<(), RankFault> {
        let own = world.ranks[id].seat.index;
        let weights = self.replica.ok_or_else(not_loaded)?;
        let is_donor = handover.donor == own;
        if is_donor && (weights.step, weights.digest()) != (handover.step, handover.state) {
            return Err(RankFault::passing("the state that was to be given is not here"));
        }
        if handover.receivers.contains(&own) {
            self.replica = Some(Weights::VOID);
        }
        world.pass_state(id, meeting, is_donor.then_some(weights));
        Ok(())
    }

    /// The state of the epoch has gone round.
    pub(super) fn handed_over(&mut self, world: &mut World, id: RankId, weights: Weights) {
        let (epoch, own) = (self.epoch, world.ranks[id].seat.index);
        let handover = self.group.as_ref().and_then(|group| group.handover.as_ref());
        if !handover.is_some_and(|handover| handover.receivers.contains(&own)) {
            world.say(id, RankEvent::GroupReady { epoch });
            return;
        }
        self.replica = Some(weights);
        self.retain_rows(|row| is_ahead(row, weights.step));
        world.holds(id, weights);
        let (step, state) = (weights.step, weights.digest());
        world.say(id, RankEvent::StateTaken { epoch, step, state });
    }

    pub(super) fn take_piece(
        &mut self,
        world: &mut World,
        id: RankId,
        parcel: Parcel,
    ) -> Result<(), RankFault> {
        let Some(donor) = self.donor.as_ref() else {
            // Of several donors only the last one was asked to replace the others.
            self.early_states.retain(|piece| piece.from == parcel.from);
            self.early_states.push(parcel);
            return Ok(());
        };
        let sender = &world.ranks[parcel.from];
        if (sender.seat, sender.generation) != (Seat::draft(donor.seat), donor.generation) {
            return Ok(());
        }
        let Load::Piece { weights, part } = parcel.load else {
            return Ok(());
        };
        let follows = self.incoming.iter().flatten().all(|before| *before == weights);
        if !follows || self.incoming[part].replace(weights).is_some() {
            return Err(RankFault::passing("has pieces that do not follow each other"));
        }
        if self.incoming.iter().all(Option::is_some) {
            self.incoming = [None; PARTS];
            self.replica = Some(weights);
            self.donor = None;
            self.early_states.clear();
            self.say_ready(world, id);
        }
        Ok(())
    }
}
