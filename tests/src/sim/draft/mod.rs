//! A fake draft replica: what `actors/src/rank/draft.rs` does with each input, fences and faults included, around the real
//! reduction and fake weights.

use std::collections::BTreeMap;

use eaglet_runtime::collective::{Outgoing, ReduceShape, SeatOrderedReduce};
use eaglet_runtime::control::{Acceptance, CoordinatorCommand, DraftOrigin, LaneMetrics, Member, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, RowId, Seat, Step};

use super::fault::Fault;
use super::network::{LinkKind, Load, PARTS, Parcel};
use super::rank::{Input, RankFault, RankId};
use super::weights::{ELEMENTS, Weights, gradient_of};
use super::world::World;

/// The worker of a draft seat.
#[derive(Default)]
pub struct Draft {
    replica: Option<Weights>,
    load: u32,
    epoch: Epoch,
    group: Option<Group>,
    phase: Phase,
    rows: BTreeMap<RowId, (u64, u64)>,
    early: Vec<Parcel>,
    donor: Option<Member>,
    incoming: [Option<Weights>; PARTS],
    early_states: Vec<Parcel>,
}

impl std::fmt::Debug for Draft {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Draft({:?}, epoch {})", self.replica, self.epoch)
    }
}

struct Group {
    /// Seats of the members, ascending, and their processes.
    members: Vec<(u16, RankId)>,
    owners: Vec<u16>,
}

#[derive(Default)]
enum Phase {
    #[default]
    Idle,
    Reducing {
        step: Step,
        reduce: Box<SeatOrderedReduce>,
        lanes: Vec<LaneMetrics>,
    },
    Staged {
        step: Step,
        gradient: Vec<f32>,
    },
}

impl Draft {
    /// Whether it waits for its peers' gradients.
    pub(super) fn is_reducing(&self) -> bool {
        matches!(self.phase, Phase::Reducing { .. })
    }

    /// Takes one input.
    pub(super) fn take(&mut self, world: &mut World, id: RankId, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(command) => self.command(world, id, command),
            Input::Bulk(parcel) => match parcel.load {
                Load::Row { row, lease, content } => {
                    self.take_row(world, id, row, lease, content);
                    Ok(())
                }
                Load::Segment { .. } => {
                    self.take_segment(world, id, parcel)?;
                    self.stage_if_reduced(world, id)
                }
                Load::Piece { .. } => self.take_piece(world, id, parcel),
            },
            Input::Closed {
                from,
                generation,
                epoch,
            } => {
                let reason = String::new();
                world.say(
                    id,
                    RankEvent::LinkBroken {
                        from,
                        generation,
                        epoch,
                        reason,
                    },
                );
                Ok(())
            }
        }
    }

    fn command(
        &mut self,
        world: &mut World,
        id: RankId,
        command: CoordinatorCommand,
    ) -> Result<(), RankFault> {
        match command {
            CoordinatorCommand::LoadDraft { load, origin, .. } => {
                self.replica.get_or_insert(Weights::INITIAL);
                self.load = load;
                self.take_origin(world, id, origin)?;
            }
            CoordinatorCommand::Abandon { epoch } => self.abandon(epoch),
            CoordinatorCommand::SendState { to } => self.send_state(world, id, &to)?,
            CoordinatorCommand::FormGroup {
                epoch,
                members,
                owners,
            } => self.form(world, id, epoch, &members, owners)?,
            CoordinatorCommand::Begin { epoch, step, lanes } => {
                if epoch == self.epoch {
                    self.begin(world, id, step, &lanes)?;
                }
            }
            CoordinatorCommand::Commit {
                epoch,
                step,
                learning_rate,
            } => {
                if epoch == self.epoch {
                    self.commit(world, id, step, learning_rate)?;
                }
            }
            CoordinatorCommand::Checkpoint => {
                let weights = self.replica.ok_or_else(not_loaded)?;
                if world.has_effect(id) {
                    let folder = world.disk.save(weights);
                    world.say(
                        id,
                        RankEvent::Checkpointed {
                            step: weights.step,
                            folder,
                        },
                    );
                }
            }
            CoordinatorCommand::Evaluate => {
                let step = self.replica.ok_or_else(not_loaded)?.step;
                let held_out = self
                    .rows
                    .keys()
                    .filter(|row| matches!(row, RowId::HeldOut { .. }));
                let acceptance = Acceptance {
                    verifications: held_out.count() as u64,
                    ..Acceptance::default()
                };
                world.say(id, RankEvent::Evaluated { step, acceptance });
            }
            CoordinatorCommand::Welcome { .. }
            | CoordinatorCommand::BeatAck { .. }
            | CoordinatorCommand::Quit => {}
            CoordinatorCommand::LoadVerifier
            | CoordinatorCommand::Extract(_)
            | CoordinatorCommand::ExtractHeldOut(_) => {
                return Err(RankFault::passing("a draft replica was told to be a verifier"));
            }
        }
        Ok(())
    }

    fn take_origin(&mut self, world: &mut World, id: RankId, origin: DraftOrigin) -> Result<(), RankFault> {
        self.donor = None;
        self.incoming = [None; PARTS];
        match origin {
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
            self.rows.retain(|row, _| is_ahead(*row, weights.step));
            world.holds(id, weights);
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

    fn abandon(&mut self, epoch: Epoch) {
        if epoch < self.epoch {
            return;
        }
        self.epoch = epoch;
        self.phase = Phase::Idle;
        self.group = None;
        self.early.retain(|parcel| parcel.epoch >= epoch);
    }

    fn form(
        &mut self,
        world: &mut World,
        id: RankId,
        epoch: Epoch,
        members: &[Member],
        owners: Vec<u16>,
    ) -> Result<(), RankFault> {
        if epoch < self.epoch {
            return Ok(());
        }
        self.abandon(epoch);
        world.close(id, |link| link.kind == LinkKind::Group);
        let own = world.ranks[id].seat.index;
        self.rows
            .retain(|row, _| owners.get(usize::from(row.lane())) == Some(&own));
        let mut group = Group {
            members: Vec::with_capacity(members.len()),
            owners,
        };
        for member in members {
            let to = world
                .rank_named(&member.bulk_name)
                .ok_or_else(|| RankFault::passing("a member that was never started"))?;
            group.members.push((member.seat, to));
            if member.seat != own {
                world
                    .connect(id, to, LinkKind::Group, epoch)
                    .map_err(|_| RankFault::passing("a member cannot be reached"))?;
            }
        }
        self.group = Some(group);
        world.say(id, RankEvent::GroupReady { epoch });
        Ok(())
    }

    fn begin(&mut self, world: &mut World, id: RankId, step: Step, lanes: &[u16]) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_ref()
            .ok_or_else(|| RankFault::passing("a step began before the group"))?;
        if weights.step != step {
            return Err(RankFault::passing(format!(
                "step {step} began at step {}",
                weights.step
            )));
        }
        let own = world.ranks[id].seat.index;
        let shape = ReduceShape {
            elements: ELEMENTS,
            members: group.members.iter().map(|&(seat, _)| seat).collect(),
            own,
            lanes: lanes
                .iter()
                .map(|&lane| {
                    let owner = group.owners.get(usize::from(lane)).copied();
                    (lane, owner.unwrap_or(u16::MAX))
                })
                .collect(),
        };
        let mut reduce = SeatOrderedReduce::new(shape).map_err(RankFault::passing)?;
        let mut measured = Vec::new();
        for &lane in lanes {
            if group.owners.get(usize::from(lane)) != Some(&own) {
                continue;
            }
            let row = RowId::Train { step, lane };
            let (_, content) = *self
                .rows
                .get(&row)
                .ok_or_else(|| RankFault::passing(format!("the {row} is not here")))?;
            let mut gradient = gradient_of(content);
            if world.spoils(content) {
                gradient[0] = f32::NAN;
            }
            measured.push(LaneMetrics {
                lane,
                finite: is_finite(&gradient),
                tokens: 1,
                ..LaneMetrics::default()
            });
            let outgoing = reduce.contribute(lane, &gradient).map_err(RankFault::passing)?;
            send_all(world, id, group, self.epoch, step, outgoing);
        }
        let outgoing = reduce.start(vec![0.0; ELEMENTS]).map_err(RankFault::passing)?;
        send_all(world, id, group, self.epoch, step, outgoing);
        self.phase = Phase::Reducing {
            step,
            reduce: Box::new(reduce),
            lanes: measured,
        };
        for parcel in std::mem::take(&mut self.early) {
            self.take_segment(world, id, parcel)?;
        }
        self.stage_if_reduced(world, id)
    }

    fn take_segment(&mut self, world: &mut World, id: RankId, parcel: Parcel) -> Result<(), RankFault> {
        if parcel.epoch < self.epoch {
            return Ok(());
        }
        let Load::Segment {
            step: at,
            phase,
            segment,
            ref bytes,
        } = parcel.load
        else {
            return Ok(());
        };
        match &mut self.phase {
            Phase::Reducing { step, reduce, .. } if *step == at && parcel.epoch == self.epoch => {
                let Some(group) = &self.group else { return Ok(()) };
                let from = world.ranks[parcel.from].seat.index;
                let outgoing = reduce
                    .receive(from, phase, segment, bytes.clone())
                    .map_err(RankFault::passing)?;
                send_all(world, id, group, self.epoch, at, outgoing);
            }
            _ => self.early.push(parcel),
        }
        Ok(())
    }

    fn stage_if_reduced(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        if !matches!(&self.phase, Phase::Reducing { reduce, .. } if reduce.is_done()) {
            return Ok(());
        }
        let Phase::Reducing {
            step,
            reduce,
            mut lanes,
        } = std::mem::take(&mut self.phase)
        else {
            return Ok(());
        };
        let weights = self.replica.ok_or_else(not_loaded)?;
        let mut gradient = reduce.finish().map_err(RankFault::passing)?;
        let alone = self.group.as_ref().is_none_or(|group| group.members.len() < 2);
        if !alone && !world.calm && world.dice.one_in(world.plan.faults.disagree_one_in) {
            // A bit of its memory flipped. Alone nobody would see it.
            world.counts.note(Fault::Disagreement);
            gradient[0] += 1.0 + id as f32;
        }
        if !is_finite(&gradient) {
            lanes.iter_mut().for_each(|lane| lane.finite = false);
        }
        let event = RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient: Digest::of_f32(&gradient),
            state: weights.digest(),
            lanes,
        };
        self.phase = Phase::Staged { step, gradient };
        world.say(id, event);
        Ok(())
    }

    fn commit(
        &mut self,
        world: &mut World,
        id: RankId,
        step: Step,
        learning_rate: f64,
    ) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let weights = match std::mem::take(&mut self.phase) {
            Phase::Staged {
                step: staged,
                gradient,
            } if staged == step => weights.after(&gradient, learning_rate),
            _ => {
                return Err(RankFault::passing(format!(
                    "step {step} is committed and not staged here"
                )));
            }
        };
        self.replica = Some(weights);
        world.holds(id, weights);
        self.rows.retain(|row, _| is_ahead(*row, weights.step));
        world.say(
            id,
            RankEvent::Applied {
                step: weights.step,
                state: weights.digest(),
            },
        );
        Ok(())
    }

    fn send_state(&mut self, world: &mut World, id: RankId, to: &Member) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let Some(to) = world.rank_named(&to.bulk_name) else {
            return Ok(());
        };
        // If it cannot be reached its process is gone, and the coordinator asks again for the next one.
        if world.connect(id, to, LinkKind::State, self.epoch).is_ok() {
            for part in 0..PARTS {
                let load = Load::Piece { weights, part };
                if world
                    .send_over(id, to, LinkKind::State, self.epoch, load)
                    .is_err()
                {
                    break;
                }
            }
            world.close(id, |link| link.kind == LinkKind::State);
        }
        Ok(())
    }

    fn take_piece(&mut self, world: &mut World, id: RankId, parcel: Parcel) -> Result<(), RankFault> {
        let Some(donor) = self.donor.as_ref() else {
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

    fn take_row(&mut self, world: &mut World, id: RankId, row: RowId, lease: u64, content: u64) {
        let is_old = self.replica.is_some_and(|weights| !is_ahead(row, weights.step));
        let is_superseded = self.rows.get(&row).is_some_and(|&(known, _)| known > lease);
        if !is_old && !is_superseded {
            self.rows.insert(row, (lease, content));
            world.say(id, RankEvent::Received { row, lease });
        }
    }
}

fn send_all(world: &mut World, id: RankId, group: &Group, epoch: Epoch, step: Step, outgoing: Vec<Outgoing>) {
    for Outgoing {
        to_seat,
        phase,
        segment,
        bytes,
    } in outgoing
    {
        let Some(&(_, to)) = group.members.iter().find(|(seat, _)| *seat == to_seat) else {
            continue;
        };
        let load = Load::Segment {
            step,
            phase,
            segment,
            bytes,
        };
        // A link that has ended is left to the coordinator.
        let _ = world.send_over(id, to, LinkKind::Group, epoch, load);
    }
}

fn is_ahead(row: RowId, reached: Step) -> bool {
    match row {
        RowId::Train { step, .. } => step >= reached,
        RowId::HeldOut { .. } => true,
    }
}

fn is_finite(values: &[f32]) -> bool {
    values.iter().all(|value| value.is_finite())
}

fn not_loaded() -> RankFault {
    RankFault::passing("asked to work before a draft was loaded")
}
