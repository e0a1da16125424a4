//! A fake draft replica: what `actors/src/rank/draft` does with each input, fences and faults included, around the real
//! reduction and fake weights. Files as there: `step` from begin to commit, `state` where weights come from.

mod state;
mod step;

use std::collections::BTreeMap;

use eaglet_runtime::control::{Acceptance, Activity, CoordinatorCommand, Handover, Member, RankEvent};
use eaglet_runtime::ids::{Epoch, RowId, Seat, Step};

use self::step::Phase;
use super::collective::{self, Attendance, MeetingId, Word};
use super::network::{LinkKind, Load, PARTS, Parcel};
use super::rank::{Input, RankFault, RankId};
use super::weights::Weights;
use super::world::World;

/// The worker of a draft seat.
#[derive(Default)]
pub struct Draft {
    replica: Option<Weights>,
    load: u32,
    epoch: Epoch,
    group: Option<Group>,
    /// An id that came, perhaps before the epoch that it is for.
    id: Option<(Epoch, MeetingId)>,
    phase: Phase,
    /// Rows with the lease that they were extracted for, and what they are made of.
    rows: BTreeMap<RowId, (u64, u64)>,
    /// Rows of which something is missing: the lease, and what came of each stage.
    parts: BTreeMap<RowId, (u64, BTreeMap<u16, u64>)>,
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
    meeting: Option<Attendance>,
    /// The state that goes round once all have met.
    handover: Option<Handover>,
}

impl Group {
    fn owner(&self, lane: u16) -> Option<u16> {
        self.owners.get(usize::from(lane)).copied()
    }
}

impl Draft {
    /// What it is busy with between two inputs.
    pub(super) fn activity(&self) -> Activity {
        let meeting = self.group.as_ref().and_then(|group| group.meeting);
        match (meeting, self.phase.activity()) {
            (Some(Attendance::Awaited | Attendance::Joined(_) | Attendance::Passing(_)), Activity::Idle) => {
                Activity::Meeting
            }
            (_, activity) => activity,
        }
    }

    /// Work that needs no input, by the time that it takes at most.
    pub(super) fn work_ms(&self) -> Option<u64> {
        self.phase.work_ms()
    }

    /// Does a piece of that work.
    pub(super) fn proceed(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        self.compute(world, id)
    }

    /// Takes one input.
    pub(super) fn take(&mut self, world: &mut World, id: RankId, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(command) => self.command(world, id, command),
            Input::Bulk(parcel) => match parcel.load {
                Load::Row {
                    row,
                    lease,
                    stage,
                    content,
                } => {
                    self.take_part(world, id, (row, lease), stage, content);
                    Ok(())
                }
                Load::Shard { .. } => Ok(()),
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
            Input::Collective { meeting, word } => self.take_word(world, id, meeting, word),
        }
    }

    /// NCCL has something to tell; of a meeting that was left it is not heard.
    fn take_word(
        &mut self,
        world: &mut World,
        id: RankId,
        meeting: MeetingId,
        word: Word,
    ) -> Result<(), RankFault> {
        let epoch = self.epoch;
        let Some(group) = self.group.as_mut() else {
            return Ok(());
        };
        let Some(state) = group.meeting.filter(|state| state.number() == Some(meeting)) else {
            return Ok(());
        };
        let is_broken = match word {
            Word::Met => {
                if matches!(state, Attendance::Joined(_)) {
                    match group.handover.clone() {
                        None => {
                            group.meeting = Some(Attendance::Met(meeting));
                            world.say(id, RankEvent::GroupReady { epoch });
                        }
                        Some(handover) => {
                            group.meeting = Some(Attendance::Passing(meeting));
                            self.pass_state(world, id, meeting, &handover)?;
                        }
                    }
                }
                false
            }
            Word::HandedOver(weights) => {
                if matches!(state, Attendance::Passing(_)) {
                    group.meeting = Some(Attendance::Met(meeting));
                    self.handed_over(world, id, weights);
                }
                false
            }
            Word::HandoverLate => matches!(state, Attendance::Passing(_)),
            Word::MeetingLate => matches!(state, Attendance::Joined(_)),
            Word::SumLate { step } => self.phase.awaits(step),
            Word::Torn => true,
            // Verifiers' business.
            Word::SlicesSummed { .. } | Word::SlicesLate { .. } => false,
            Word::Summed { step, values } => {
                self.take_sum(world, id, step, values.to_vec())?;
                false
            }
        };
        if is_broken {
            let reason = String::new();
            world.say(id, RankEvent::CollectiveBroken { epoch, reason });
        }
        Ok(())
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
            CoordinatorCommand::Abandon { epoch } => self.abandon(world, id, epoch)?,
            CoordinatorCommand::SendState { to } => self.send_state(world, id, &to)?,
            CoordinatorCommand::FormGroup {
                epoch,
                members,
                owners,
                handover,
            } => self.form(world, id, epoch, &members, (owners, handover))?,
            CoordinatorCommand::Meet { epoch, id: told } => {
                if let Some(meeting) = collective::meeting_of(&told).filter(|_| epoch >= self.epoch) {
                    self.id = Some((epoch, meeting));
                    self.meet(world, id);
                }
            }
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
            CoordinatorCommand::Checkpoint { recorded } => {
                let weights = self.replica.ok_or_else(not_loaded)?;
                if world.has_effect(id) {
                    let folder = world.disk.save(weights, recorded);
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
            | CoordinatorCommand::FormTeam { .. }
            | CoordinatorCommand::CheckVerifier { .. }
            | CoordinatorCommand::Extract(_)
            | CoordinatorCommand::ExtractHeldOut(_) => {
                return Err(RankFault::passing("a draft replica was told to be a verifier"));
            }
        }
        Ok(())
    }

    fn abandon(&mut self, world: &mut World, id: RankId, epoch: Epoch) -> Result<(), RankFault> {
        if epoch < self.epoch {
            return Ok(());
        }
        self.epoch = epoch;
        self.phase = Phase::Idle;
        let group = self.group.take();
        self.early.retain(|parcel| parcel.epoch >= epoch);
        if let Some(meeting) = group.and_then(|group| group.meeting?.number()) {
            if world.abort_is_stuck() {
                return Err(RankFault::passing("its part in a collective does not end"));
            }
            world.leave(id, meeting);
        }
        Ok(())
    }

    /// Joins the meeting of the present epoch, once it is known which one that is.
    fn meet(&mut self, world: &mut World, id: RankId) {
        let (Some(group), Some((epoch, meeting))) = (&mut self.group, self.id) else {
            return;
        };
        if epoch == self.epoch && group.meeting == Some(Attendance::Awaited) {
            group.meeting = Some(Attendance::Joined(meeting));
            world.join(id, meeting, group.members.len());
        }
    }

    fn form(
        &mut self,
        world: &mut World,
        id: RankId,
        epoch: Epoch,
        members: &[Member],
        (owners, handover): (Vec<u16>, Option<Handover>),
    ) -> Result<(), RankFault> {
        if epoch < self.epoch {
            return Ok(());
        }
        if epoch == self.epoch && self.group.as_ref().is_some_and(|group| group.meeting.is_some()) {
            return Ok(());
        }
        self.abandon(world, id, epoch)?;
        world.close(id, |link| link.kind == LinkKind::Group);
        let own = world.ranks[id].seat.index;
        self.retain_rows(|row| owners.get(usize::from(row.lane())) == Some(&own));
        let mut group = Group {
            members: Vec::with_capacity(members.len()),
            owners,
            meeting: None,
            handover,
        };
        let sums_over_nccl = world.plan.sums_over_nccl && members.len() > 1;
        for member in members {
            let to = world
                .rank_at(&member.bulk)
                .ok_or_else(|| RankFault::passing("a member that was never started"))?;
            group.members.push((member.seat, to));
            if !sums_over_nccl && member.seat != own && world.connect(id, to, LinkKind::Group, epoch).is_err()
            {
                // Most often it has just died: no reason to lose this replica too.
                let from = Seat::draft(member.seat);
                let (generation, reason) = (member.generation, String::new());
                world.say(
                    id,
                    RankEvent::LinkBroken {
                        from,
                        generation,
                        epoch,
                        reason,
                    },
                );
                return Ok(());
            }
        }
        group.meeting = sums_over_nccl.then_some(Attendance::Awaited);
        self.group = Some(group);
        if !sums_over_nccl {
            world.say(id, RankEvent::GroupReady { epoch });
            return Ok(());
        }
        if members.first().is_some_and(|first| first.seat == own) {
            let meeting = world.make_meeting();
            self.id = Some((epoch, meeting));
            let id_of = collective::id_of(meeting);
            world.say(id, RankEvent::CollectiveId { epoch, id: id_of });
        }
        self.meet(world, id);
        Ok(())
    }

    fn take_part(
        &mut self,
        world: &mut World,
        id: RankId,
        (row, lease): (RowId, u64),
        stage: u16,
        content: u64,
    ) {
        let is_old = self.replica.is_some_and(|weights| !is_ahead(row, weights.step));
        let is_known = self.rows.get(&row).is_some_and(|&(known, _)| known >= lease);
        let is_superseded = self.parts.get(&row).is_some_and(|&(known, _)| known > lease);
        if is_old || is_known || is_superseded {
            return;
        }
        let (known, parts) = self.parts.entry(row).or_default();
        if *known != lease {
            *known = lease;
            parts.clear();
        }
        parts.insert(stage, content);
        let stages = (0..world.plan.settings.pipeline).filter(|&stage| world.plan.captures(stage));
        if !stages.clone().all(|stage| parts.contains_key(&stage)) {
            return;
        }
        let first = parts.values().next().copied().unwrap_or_default();
        if parts.values().any(|&other| other != first) {
            let parts = parts.clone();
            world.tear(format!(
                "the {row} of lease {lease} has parts of different rows: {parts:?}"
            ));
        }
        self.parts.remove(&row);
        self.rows.insert(row, (lease, first));
        world.say(id, RankEvent::Received { row, lease });
    }

    /// Forgets rows that are not wanted any more.
    fn retain_rows(&mut self, is_wanted: impl Fn(RowId) -> bool) {
        self.rows.retain(|&row, _| is_wanted(row));
        self.parts.retain(|&row, _| is_wanted(row));
    }
}

fn is_ahead(row: RowId, reached: Step) -> bool {
    match row {
        RowId::Train { step, .. } => step >= reached,
        RowId::HeldOut { .. } => true,
    }
}

fn not_loaded() -> RankFault {
    RankFault::passing("asked to work before a draft was loaded")
}
