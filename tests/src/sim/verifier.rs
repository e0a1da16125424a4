//! A fake verifier: what `actors/src/rank/verifier.rs` does, without a model.

use eaglet_runtime::control::{CoordinatorCommand, Extraction, HeldOutRequest, Member, RankEvent};
use eaglet_runtime::ids::{Epoch, RowId, Unit};

use super::dice::mix;
use super::fault::Fault;
use super::network::{LinkKind, Load};
use super::plan::contract;
use super::rank::{Input, RankFault, RankId};
use super::weights::row_content;
use super::world::World;

/// The worker of a verifier seat.
#[derive(Debug, Default)]
pub struct Verifier {
    loaded: bool,
}

impl Verifier {
    /// Takes one input.
    pub(super) fn take(&mut self, world: &mut World, id: RankId, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(CoordinatorCommand::LoadVerifier) => {
                self.loaded = true;
                world.say(id, RankEvent::VerifierReady { contract: contract() });
                Ok(())
            }
            Input::Command(CoordinatorCommand::Extract(extraction)) => self.extract(world, id, extraction),
            Input::Command(CoordinatorCommand::ExtractHeldOut(request)) => {
                self.extract_held_out(world, id, request)
            }
            Input::Command(command) => Err(RankFault::passing(format!("a verifier was told {command:?}"))),
            Input::Bulk(_) | Input::Closed { .. } => Ok(()),
        }
    }

    fn extract(
        &mut self,
        world: &mut World,
        id: RankId,
        Extraction {
            row,
            lease,
            units,
            destination,
            ..
        }: Extraction,
    ) -> Result<(), RankFault> {
        self.check_loaded()?;
        let refused = units.iter().copied().find(|&unit| is_bad(world, unit));
        let refused = match refused {
            None if !world.calm && world.dice.one_in(world.plan.faults.refuse_one_in) => {
                Some(units[world.dice.place(units.len())])
            }
            other => other,
        };
        if let Some(unit) = refused {
            world.counts.note(Fault::SampleRefused);
            let reason = "its hidden states are not finite".to_owned();
            world.say(
                id,
                RankEvent::BadSample {
                    row,
                    unit: Some(unit),
                    reason,
                },
            );
            return Ok(());
        }
        let RowId::Train { step, lane } = row else {
            return Err(RankFault::passing("a held-out row without prompts"));
        };
        hand_over(
            world,
            id,
            (row, lease),
            row_content(step, lane, &units),
            &destination,
        );
        Ok(())
    }

    fn extract_held_out(
        &mut self,
        world: &mut World,
        id: RankId,
        request: HeldOutRequest,
    ) -> Result<(), RankFault> {
        self.check_loaded()?;
        let row = request.row;
        if world.plan.faults.refuse_held_out {
            world.counts.note(Fault::HeldOutRefused);
            let reason = "no held-out prompt has finite hidden states".to_owned();
            world.say(
                id,
                RankEvent::BadSample {
                    row,
                    unit: None,
                    reason,
                },
            );
            return Ok(());
        }
        hand_over(
            world,
            id,
            (row, request.lease),
            request.prompts.len() as u64,
            &request.destination,
        );
        Ok(())
    }

    fn check_loaded(&self) -> Result<(), RankFault> {
        if self.loaded {
            Ok(())
        } else {
            Err(RankFault::passing(
                "asked to extract before the verifier was loaded",
            ))
        }
    }
}

fn hand_over(world: &mut World, id: RankId, (row, lease): (RowId, u64), content: u64, destination: &Member) {
    let epoch = Epoch::default();
    let Some(to) = world.rank_named(&destination.bulk_name) else {
        return;
    };
    // A seat's new occupant gets a new link.
    let others = world.ranks[to].seat;
    let seats: Vec<RankId> = world.ranks[id]
        .links
        .iter()
        .map(|link| link.to)
        .filter(|&other| other != to && world.ranks[other].seat == others)
        .collect();
    world.close(id, |link| seats.contains(&link.to));
    let send = |world: &mut World| {
        world
            .connect(id, to, LinkKind::Rows, epoch)
            .and_then(|()| world.send_over(id, to, LinkKind::Rows, epoch, Load::Row { row, lease, content }))
    };
    let sent = send(world).or_else(|_| {
        // The link may have broken long ago: whether the receiver is there shows a new one.
        world.close(id, |link| link.to == to);
        send(world)
    });
    let (seat, generation) = (destination.seat, destination.generation);
    let event = match sent {
        Ok(()) => RankEvent::Extracted {
            row,
            seat,
            generation,
            tokens: 1,
        },
        Err(_) => {
            world.close(id, |link| link.to == to);
            let reason = "the link is gone".to_owned();
            RankEvent::NotSent {
                row,
                seat,
                generation,
                reason,
            }
        }
    };
    world.say(id, event);
}

/// Whether every verifier refuses a unit.
fn is_bad(world: &World, unit: Unit) -> bool {
    let one_in = u64::from(world.plan.faults.bad_unit_one_in);
    one_in > 0 && mix(world.seed ^ unit.sample.0 << 8 ^ u64::from(unit.pass)).is_multiple_of(one_in)
}
