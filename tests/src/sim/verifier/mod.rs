//! A fake shard of a verifier: what `actors/src/rank/verifier` does, without a model.
//!
//! A row's content goes down the stages as its residual does: each stage computes with what it was handed, never with what
//! it was told, and slices compare what they hold. So shards that do not compute the same rows in the same order end in
//! another row, or in a fault.

mod courier;

use std::collections::{BTreeMap, VecDeque};

use eaglet_runtime::control::{
    Activity, CoordinatorCommand, Extraction, HeldOutRequest, Member, RankEvent, Turn,
};
use eaglet_runtime::ids::{Epoch, RowId, SampleSeq, Unit};
use eaglet_runtime::verifier::Shard;

use self::courier::courier;
use super::collective::{self, Attendance, MeetingId};
use super::dice::mix;
use super::fault::Fault;
use super::network::{LinkKind, Load, Parcel, Word};
use super::plan::contract;
use super::rank::{Input, RankFault, RankId};
use super::weights::row_content;
use super::world::World;

/// Longest time that a shard computes a row.
const ROW_MS: u64 = 8;
/// Longest time that it compares a few states with its logits.
const CHECK_MS: u64 = 4;
/// Longest time that it answers held-out prompts.
const ANSWER_MS: u64 = 12;

/// What a row is made of so far, and the unit that some shard has found to be bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Residual {
    /// The content.
    pub content: u64,
    /// The bad unit; of held-out rows, which name none, any.
    pub bad: Option<Unit>,
}

/// The worker of a verifier seat.
#[derive(Debug)]
pub struct Verifier {
    shard: Shard,
    loaded: bool,
    epoch: Epoch,
    tried: Option<Epoch>,
    /// Processes in the order of their shards; none while they are apart.
    members: Vec<RankId>,
    jobs: BTreeMap<Turn, Job>,
    next: u64,
    phase: Phase,
    /// How far its stage is that sums over NCCL.
    meeting: Option<Attendance>,
    /// An id that came, perhaps before the epoch that it is for.
    id: Option<(Epoch, MeetingId)>,
    /// What the slices of the stage hold, of the row that they have summed last.
    summed: Option<(u64, Vec<Residual>)>,
    sent: BTreeMap<RankId, u64>,
    taken: BTreeMap<RankId, u64>,
    arrived: BTreeMap<RankId, VecDeque<Load>>,
}

#[derive(Clone, Debug)]
enum Job {
    Check,
    Row(Extraction),
    HeldOut(HeldOutRequest),
}

/// How far a row is.
#[derive(Clone, Debug)]
enum Phase {
    Idle,
    /// The residual of the stage before is awaited.
    Entering(Job),
    Computing(Job, Residual),
    /// Other slices are awaited.
    Summing(Job, Residual),
    /// The last stage's tokens are awaited.
    Listening(Job, Residual),
}

impl Job {
    fn content(&self) -> u64 {
        match self {
            Self::Check => 1,
            Self::Row(extraction) => match extraction.row {
                RowId::Train { step, lane } => row_content(step, lane, &extraction.units),
                RowId::HeldOut { .. } => 0,
            },
            Self::HeldOut(request) => request.prompts.len() as u64,
        }
    }
}

impl Verifier {
    /// The worker of a shard.
    pub fn new(shard: Shard) -> Self {
        Self {
            shard,
            loaded: false,
            epoch: Epoch::default(),
            tried: None,
            members: Vec::new(),
            jobs: BTreeMap::new(),
            next: 0,
            phase: Phase::Idle,
            meeting: None,
            id: None,
            summed: None,
            sent: BTreeMap::new(),
            taken: BTreeMap::new(),
            arrived: BTreeMap::new(),
        }
    }

    /// What it is busy with between two inputs.
    pub(super) fn activity(&self) -> Activity {
        match &self.phase {
            Phase::Idle => match self.meeting {
                Some(Attendance::Awaited | Attendance::Joined(_)) => Activity::Meeting,
                _ => Activity::Idle,
            },
            // The device waits, and who computes on it knows nothing of that.
            Phase::Summing(Job::Row(_), _) if self.meeting.is_some() => Activity::Extracting,
            Phase::Summing(Job::HeldOut(_), _) if self.meeting.is_some() => Activity::Generating,
            Phase::Computing(Job::Check, _) => Activity::Loading,
            Phase::Computing(Job::Row(_), _) => Activity::Extracting,
            Phase::Computing(Job::HeldOut(_), _) => Activity::Generating,
            Phase::Entering(_) | Phase::Summing(..) | Phase::Listening(..) => Activity::AwaitingPeers,
        }
    }

    /// Work that needs no input, by the time that it takes at most.
    pub(super) fn work_ms(&self) -> Option<u64> {
        match &self.phase {
            Phase::Computing(Job::Check, _) => Some(CHECK_MS),
            Phase::Computing(Job::Row(_), _) => Some(ROW_MS),
            Phase::Computing(Job::HeldOut(_), _) => Some(ANSWER_MS),
            _ => None,
        }
    }

    /// Takes one input.
    pub(super) fn take(&mut self, world: &mut World, id: RankId, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(CoordinatorCommand::LoadVerifier) => {
                self.loaded = true;
                world.say(id, RankEvent::VerifierReady { contract: contract() });
            }
            Input::Command(CoordinatorCommand::Abandon { epoch }) => self.abandon(world, id, epoch)?,
            Input::Command(CoordinatorCommand::FormTeam { epoch, members }) => {
                self.form(world, id, epoch, &members)?;
            }
            Input::Command(CoordinatorCommand::Meet { epoch, id: told }) => {
                if let Some(meeting) = collective::meeting_of(&told).filter(|_| epoch >= self.epoch) {
                    self.id = Some((epoch, meeting));
                    self.meet(world, id);
                }
            }
            Input::Command(CoordinatorCommand::CheckVerifier { turn }) => self.enqueue(turn, Job::Check),
            Input::Command(CoordinatorCommand::Extract(extraction)) => {
                self.enqueue(extraction.turn, Job::Row(extraction));
            }
            Input::Command(CoordinatorCommand::ExtractHeldOut(request)) => {
                self.enqueue(request.turn, Job::HeldOut(request));
            }
            Input::Command(command) => {
                return Err(RankFault::passing(format!("a verifier was told {command:?}")));
            }
            Input::Bulk(parcel) => self.keep(parcel),
            Input::Collective { meeting, word } => self.take_word(world, id, meeting, word)?,
            Input::Closed {
                from,
                generation,
                epoch,
            } => {
                if epoch == self.epoch && !self.members.is_empty() {
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
                    self.give_up(world, id)?;
                }
            }
        }
        self.go_on(world, id)
    }

    /// Does a piece of work that needs no input.
    pub(super) fn proceed(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        let Phase::Computing(job, mut residual) = std::mem::replace(&mut self.phase, Phase::Idle) else {
            return Ok(());
        };
        if !self.loaded {
            return Err(RankFault::passing(
                "asked to extract before the verifier was loaded",
            ));
        }
        residual.bad = residual.bad.or(self.found(world, &job));
        if let Some(Attendance::Met(meeting)) = self.meeting {
            let patience_ms = world.plan.settings.step_timeout_ms * 9 / 10;
            world.bring_slice(id, meeting, self.next, residual, patience_ms);
        } else {
            let others: Vec<RankId> = self.slices().collect();
            for other in others {
                self.send(world, id, other, Word::Addend, residual);
            }
        }
        self.phase = Phase::Summing(job, residual);
        self.go_on(world, id)
    }

    /// NCCL has something to tell; of a meeting that was left it is not heard.
    fn take_word(
        &mut self,
        world: &mut World,
        id: RankId,
        meeting: MeetingId,
        word: collective::Word,
    ) -> Result<(), RankFault> {
        let epoch = self.epoch;
        let Some(state) = self.meeting.filter(|state| state.number() == Some(meeting)) else {
            return Ok(());
        };
        let sums = |turn| turn == self.next && matches!(self.phase, Phase::Summing(..));
        let is_broken = match word {
            collective::Word::Met => {
                if matches!(state, Attendance::Joined(_)) {
                    self.meeting = Some(Attendance::Met(meeting));
                    world.say(id, RankEvent::GroupReady { epoch });
                }
                false
            }
            collective::Word::MeetingLate => matches!(state, Attendance::Joined(_)),
            collective::Word::SlicesLate { turn } => sums(turn),
            collective::Word::Torn => true,
            collective::Word::SlicesSummed { turn, residuals } => {
                self.summed = Some((turn, residuals));
                false
            }
            // Drafts' business.
            collective::Word::HandedOver(_)
            | collective::Word::HandoverLate
            | collective::Word::Summed { .. }
            | collective::Word::SumLate { .. } => false,
        };
        if is_broken {
            let reason = String::new();
            world.say(id, RankEvent::CollectiveBroken { epoch, reason });
            self.give_up(world, id)?;
        }
        Ok(())
    }

    /// The present epoch comes to nothing.
    fn give_up(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        let epoch = self.epoch;
        self.leave(world, id, epoch)?;
        self.jobs.retain(|turn, _| turn.epoch > epoch);
        Ok(())
    }

    /// Joins the meeting of the present epoch, once it is known which one that is.
    fn meet(&mut self, world: &mut World, id: RankId) {
        let Some((epoch, meeting)) = self.id else { return };
        if epoch == self.epoch && self.meeting == Some(Attendance::Awaited) {
            self.meeting = Some(Attendance::Joined(meeting));
            world.join(id, meeting, usize::from(self.shard.slices));
        }
    }

    /// The bad unit that this shard finds in a row. Which shard finds which unit is decided by the unit; refusals for no
    /// reason are those of the first shard.
    fn found(&self, world: &mut World, job: &Job) -> Option<Unit> {
        let own = u64::from(self.shard.stage * self.shard.slices + self.shard.slice);
        let shards = u64::from(self.shard.stages * self.shard.slices);
        match job {
            Job::Check => None,
            Job::Row(extraction) => {
                let mut bad = extraction
                    .units
                    .iter()
                    .copied()
                    .find(|&unit| is_bad(world, unit) && mix(unit.sample.0) % shards == own);
                let units = &extraction.units;
                if bad.is_none()
                    && own == 0
                    && !world.calm
                    && world.dice.one_in(world.plan.faults.refuse_one_in)
                {
                    bad = Some(units[world.dice.place(units.len())]);
                }
                if bad.is_some() {
                    world.counts.note(Fault::SampleRefused);
                }
                bad
            }
            Job::HeldOut(_) => (world.plan.faults.refuse_held_out && own == 0).then(|| {
                world.counts.note(Fault::HeldOutRefused);
                Unit {
                    pass: 0,
                    sample: SampleSeq::default(),
                }
            }),
        }
    }

    /// Goes as far as it can without time or input.
    fn go_on(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        loop {
            let phase = std::mem::replace(&mut self.phase, Phase::Idle);
            self.phase = match phase {
                Phase::Idle => match self.next_job() {
                    Some(job) => Phase::Entering(job),
                    None => return Ok(()),
                },
                Phase::Entering(job) if self.shard.is_first() => {
                    let content = job.content();
                    Phase::Computing(job, Residual { content, bad: None })
                }
                Phase::Entering(job) => {
                    match self.receive(world, self.stage(self.shard.stage - 1), Word::Residual)? {
                        Some(residual) => Phase::Computing(job, residual),
                        None => {
                            self.phase = Phase::Entering(job);
                            return Ok(());
                        }
                    }
                }
                Phase::Computing(job, residual) => {
                    self.phase = Phase::Computing(job, residual);
                    return Ok(());
                }
                Phase::Summing(job, mut residual) => {
                    let Some(all) = self.addends(world)? else {
                        self.phase = Phase::Summing(job, residual);
                        return Ok(());
                    };
                    for theirs in all {
                        if theirs.content != residual.content {
                            // Another row: what comes of it is none.
                            residual.content = mix(residual.content ^ theirs.content);
                        }
                        residual.bad = residual.bad.or(theirs.bad);
                    }
                    if !self.shard.is_last() {
                        let next = self.stage(self.shard.stage + 1);
                        self.send(world, id, next, Word::Residual, residual);
                    } else if matches!(job, Job::HeldOut(_)) {
                        for stage in 0..self.shard.stage {
                            let to = self.stage(stage);
                            self.send(world, id, to, Word::Tokens, residual);
                        }
                    }
                    match &job {
                        Job::HeldOut(_) if !self.shard.is_last() => Phase::Listening(job, residual),
                        _ => {
                            self.hand_over(world, id, &job, residual);
                            Phase::Idle
                        }
                    }
                }
                Phase::Listening(job, residual) => {
                    let last = self.stage(self.shard.stages - 1);
                    match self.receive(world, last, Word::Tokens)? {
                        Some(answers) => {
                            // What the last stage has found out goes for all.
                            let bad = residual.bad.or(answers.bad);
                            self.hand_over(world, id, &job, Residual { bad, ..answers });
                            Phase::Idle
                        }
                        None => {
                            self.phase = Phase::Listening(job, residual);
                            return Ok(());
                        }
                    }
                }
            };
            if !world.ranks[id].is_alive() {
                return Ok(());
            }
        }
    }

    /// What the slices of the stage hold: of all of them that this one waits for, or nothing is taken.
    fn addends(&mut self, world: &World) -> Result<Option<Vec<Residual>>, RankFault> {
        if self.meeting.is_some() {
            let is_present = |(turn, _): &mut (u64, Vec<Residual>)| *turn == self.next;
            return Ok(self.summed.take_if(is_present).map(|(_, residuals)| residuals));
        }
        let others: Vec<RankId> = self.slices().collect();
        if others
            .iter()
            .any(|other| self.arrived.get(other).is_none_or(VecDeque::is_empty))
        {
            return Ok(None);
        }
        let mut all = Vec::new();
        for other in others {
            all.extend(self.receive(world, other, Word::Addend)?);
        }
        Ok(Some(all))
    }

    fn stage(&self, stage: u16) -> RankId {
        self.members[usize::from(stage * self.shard.slices + self.shard.slice)]
    }

    fn slices(&self) -> impl Iterator<Item = RankId> + use<> {
        let Shard {
            stage, slice, slices, ..
        } = self.shard;
        let members = self.members.clone();
        (0..slices)
            .filter(move |&other| other != slice)
            .map(move |other| members[usize::from(stage * slices + other)])
    }

    fn leave(&mut self, world: &mut World, id: RankId, epoch: Epoch) -> Result<(), RankFault> {
        world.close(id, |link| link.kind == LinkKind::Team);
        self.epoch = epoch;
        self.members.clear();
        self.phase = Phase::Idle;
        self.next = 0;
        self.sent.clear();
        self.taken.clear();
        self.arrived.clear();
        self.summed = None;
        if let Some(meeting) = self.meeting.take().and_then(Attendance::number) {
            if world.abort_is_stuck() {
                return Err(RankFault::passing("its part in a collective does not end"));
            }
            world.leave(id, meeting);
        }
        Ok(())
    }

    fn abandon(&mut self, world: &mut World, id: RankId, epoch: Epoch) -> Result<(), RankFault> {
        if epoch > self.epoch {
            self.leave(world, id, epoch)?;
            self.jobs.retain(|turn, _| turn.epoch >= epoch);
        }
        Ok(())
    }

    fn form(
        &mut self,
        world: &mut World,
        id: RankId,
        epoch: Epoch,
        members: &[Member],
    ) -> Result<(), RankFault> {
        if epoch < self.epoch || self.tried == Some(epoch) {
            return Ok(());
        }
        self.abandon(world, id, epoch)?;
        self.tried = Some(epoch);
        let processes: Option<Vec<RankId>> =
            members.iter().map(|member| world.rank_at(&member.bulk)).collect();
        let Some(processes) = processes else { return Ok(()) };
        for &to in processes.iter().filter(|&&to| to != id) {
            if world.connect(id, to, LinkKind::Team, epoch).is_err() {
                let peer = &world.ranks[to];
                let event = RankEvent::LinkBroken {
                    from: peer.seat,
                    generation: peer.generation,
                    epoch,
                    reason: "it cannot be reached".to_owned(),
                };
                world.say(id, event);
                return Ok(());
            }
        }
        self.members = processes;
        if !world.plan.slices_over_nccl || self.shard.slices == 1 {
            world.say(id, RankEvent::GroupReady { epoch });
            return Ok(());
        }
        self.meeting = Some(Attendance::Awaited);
        if self.shard.slice == 0 {
            let meeting = world.make_meeting();
            self.id = Some((epoch, meeting));
            let id_of = collective::id_of(meeting);
            world.say(id, RankEvent::CollectiveId { epoch, id: id_of });
        }
        self.meet(world, id);
        Ok(())
    }

    fn enqueue(&mut self, turn: Turn, job: Job) {
        let present = Turn {
            epoch: self.epoch,
            number: self.next,
        };
        if turn >= present && !(turn.epoch == self.epoch && self.members.is_empty()) {
            self.jobs.insert(turn, job);
        }
    }

    fn next_job(&mut self) -> Option<Job> {
        let turn = Turn {
            epoch: self.epoch,
            number: self.next,
        };
        let job = self.jobs.remove(&turn)?;
        self.next += 1;
        Some(job)
    }

    fn keep(&mut self, parcel: Parcel) {
        let is_present = parcel.epoch == self.epoch && self.members.contains(&parcel.from);
        if is_present && matches!(parcel.load, Load::Shard { .. }) {
            self.arrived
                .entry(parcel.from)
                .or_default()
                .push_back(parcel.load);
        }
    }

    fn send(&mut self, world: &mut World, id: RankId, to: RankId, word: Word, residual: Residual) {
        let sent = self.sent.entry(to).or_default();
        let load = Load::Shard {
            turn: self.next,
            sequence: *sent,
            word,
            residual,
        };
        *sent += 1;
        // A link that has ended is left to the coordinator.
        let _ = world.send_over(id, to, LinkKind::Team, self.epoch, load);
    }

    /// The next word of a peer, if it is here.
    fn receive(
        &mut self,
        world: &World,
        from: RankId,
        expected: Word,
    ) -> Result<Option<Residual>, RankFault> {
        let Some(Load::Shard {
            turn,
            sequence,
            word,
            residual,
        }) = self.arrived.get_mut(&from).and_then(VecDeque::pop_front)
        else {
            return Ok(None);
        };
        let taken = self.taken.entry(from).or_default();
        if (turn, sequence, word) != (self.next, *taken, expected) {
            return Err(RankFault::passing(format!(
                "{} said {word:?} {sequence} of turn {turn} where {expected:?} {taken} of turn {} was expected",
                world.name(from),
                self.next
            )));
        }
        *taken += 1;
        Ok(Some(residual))
    }

    fn hand_over(&mut self, world: &mut World, id: RankId, job: &Job, residual: Residual) {
        let (row, lease, destination) = match job {
            Job::Check => return,
            Job::Row(extraction) => (extraction.row, extraction.lease, &extraction.destination),
            Job::HeldOut(request) => (request.row, request.lease, &request.destination),
        };
        if let Some(unit) = residual.bad {
            world.say(
                id,
                RankEvent::BadSample {
                    row,
                    lease,
                    unit: row.step().map(|_| unit),
                    reason: "its hidden states are not finite".to_owned(),
                },
            );
            return;
        }
        let sends = lease % u64::from(self.shard.slices) == u64::from(self.shard.slice);
        if sends && world.plan.captures(self.shard.stage) {
            let load = Load::Row {
                row,
                lease,
                stage: self.shard.stage,
                content: residual.content,
            };
            if !courier(world, id, (row, lease), load, destination) {
                return;
            }
        }
        let tokens = 1;
        world.say(id, RankEvent::Extracted { row, lease, tokens });
    }
}

/// Whether every verifier refuses a unit.
fn is_bad(world: &World, unit: Unit) -> bool {
    let one_in = u64::from(world.plan.faults.bad_unit_one_in);
    one_in > 0 && mix(world.seed ^ unit.sample.0 << 8 ^ u64::from(unit.pass)).is_multiple_of(one_in)
}
