//! A fake rank process: a control thread that beats and holds the lease, and a compute thread that takes one input after the
//! other. What it does with each is in [`super::draft`] and [`super::verifier`].

use std::collections::VecDeque;

use eaglet_runtime::control::{Activity, Beat, CoordinatorCommand, RankEvent};
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat};
use eaglet_runtime::verifier::Shard;

use super::collective::{MeetingId, Word};
use super::draft::Draft;
use super::fault::Fault;
use super::network::{Direction, Link, Parcel};
use super::verifier::Verifier;
use super::world::{What, World};

/// Time between two beats.
const BEAT_MS: u64 = 100;

/// A process, by the order of its start.
pub type RankId = usize;

/// What the compute thread takes from its inbox.
#[derive(Debug)]
pub enum Input {
    /// The coordinator said something.
    Command(CoordinatorCommand),
    /// Something arrived on the bulk plane.
    Bulk(Parcel),
    /// A link from another rank broke.
    Closed {
        /// Its sender.
        from: Seat,
        /// Its generation.
        generation: Generation,
        /// The epoch that it was made for.
        epoch: Epoch,
    },
    /// NCCL has something to tell.
    Collective {
        /// Of which meeting.
        meeting: MeetingId,
        /// What.
        word: Word,
    },
}

/// Why a rank cannot go on.
#[derive(Debug)]
pub struct RankFault {
    /// In one line.
    pub reason: String,
    /// Starting it again would end the same way.
    pub permanent: bool,
}

impl RankFault {
    /// A fault that a new start may heal.
    pub fn passing(reason: impl ToString) -> Self {
        Self {
            reason: reason.to_string(),
            permanent: false,
        }
    }

    /// A fault that stays whatever is started.
    pub fn permanent(reason: impl ToString) -> Self {
        Self {
            reason: reason.to_string(),
            permanent: true,
        }
    }
}

/// A role's way of working.
#[derive(Debug)]
pub enum Worker {
    /// Extracts.
    Verifier(Box<Verifier>),
    /// Trains.
    Draft(Box<Draft>),
}

impl Worker {
    /// What it does without input, and for how long at most.
    fn work(&self) -> Option<(Activity, u64)> {
        match self {
            Self::Verifier(verifier) => Some((verifier.activity(), verifier.work_ms()?)),
            Self::Draft(draft) => Some((Activity::Computing, draft.work_ms()?)),
        }
    }
}

/// How far a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    /// Started, has not dialed.
    Starting,
    /// Dialed.
    Up,
    /// Gone.
    Dead,
}

/// A process.
#[derive(Debug)]
pub struct Rank {
    /// Its seat.
    pub seat: Seat,
    /// Which occupant.
    pub generation: Generation,
    /// Launch of its coordinator: its token.
    pub launch: u32,
    /// How far it is.
    pub life: Life,
    /// Whether the coordinator has admitted its stream.
    pub attached: bool,
    /// Whether it was declared gone.
    pub given_up: bool,
    /// Whether no kill reaches it.
    pub zombie: bool,
    /// Its end of the stream, towards the coordinator.
    pub up: Direction,
    /// The coordinator's end.
    pub down: Direction,
    /// Messages on their way to it.
    pub on_the_way: u32,
    /// Links over which it sends to other ranks.
    pub links: Vec<Link>,
    /// The process is stopped until then.
    pub stopped_until_ms: u64,
    /// The compute thread is stopped until then.
    pub stuck_until_ms: u64,
    /// How many times slower than others it computes.
    pub slowness: u64,
    /// Things that it says or writes before it is killed.
    pub effects_left: Option<u32>,
    inbox: VecDeque<Input>,
    early: Vec<Input>,
    welcomed: bool,
    busy: bool,
    /// What it is busy with needs no input.
    proceeds: bool,
    activity: Activity,
    activity_since_ms: u64,
    beats: u64,
    last_heard_ms: u64,
    worker: Option<Worker>,
}

impl Rank {
    /// A process that was just started.
    pub fn new(seat: Seat, generation: Generation, launch: u32, now_ms: u64) -> Self {
        Self {
            seat,
            generation,
            launch,
            life: Life::Starting,
            attached: false,
            given_up: false,
            zombie: false,
            up: Direction::default(),
            down: Direction::default(),
            on_the_way: 0,
            links: Vec::new(),
            stopped_until_ms: 0,
            stuck_until_ms: 0,
            slowness: 1,
            effects_left: None,
            inbox: VecDeque::new(),
            early: Vec::new(),
            welcomed: false,
            busy: false,
            proceeds: false,
            activity: Activity::Idle,
            activity_since_ms: now_ms,
            beats: 0,
            last_heard_ms: now_ms,
            worker: None,
        }
    }

    /// Whether its process exists.
    pub fn is_alive(&self) -> bool {
        self.life != Life::Dead
    }

    fn enter(&mut self, activity: Activity, now_ms: u64) {
        if self.activity != activity {
            (self.activity, self.activity_since_ms) = (activity, now_ms);
        }
    }
}

impl World {
    /// The process has come up and dials the coordinator.
    pub(super) fn dial(&mut self, id: RankId) {
        let now_ms = self.clock.now_ms();
        let rank = &mut self.ranks[id];
        if rank.life != Life::Starting {
            return;
        }
        if now_ms < rank.stopped_until_ms {
            let resumed_ms = rank.stopped_until_ms;
            self.clock.at(resumed_ms, What::Dial(id));
            return;
        }
        rank.life = Life::Up;
        rank.last_heard_ms = now_ms;
        let at_ms = self.arrival_of_attach(id);
        self.clock.at(at_ms, What::Attach(id));
        self.clock.after(0, What::Beat(id));
    }

    /// The control thread's beat, and its look at the lease.
    pub(super) fn beat(&mut self, id: RankId) {
        let now_ms = self.clock.now_ms();
        let lease_ms = self.plan.lease_ms;
        let rank = &mut self.ranks[id];
        if !rank.is_alive() {
            return;
        }
        if now_ms < rank.stopped_until_ms {
            let resumed_ms = rank.stopped_until_ms;
            self.clock.at(resumed_ms, What::Beat(id));
            return;
        }
        if now_ms > rank.last_heard_ms + lease_ms {
            // RANK-1
            self.die(id, "its lease on the coordinator ran out");
            return;
        }
        let beat = Beat {
            sequence: rank.beats,
            activity: rank.activity,
            activity_age_ms: now_ms - rank.activity_since_ms,
            rss_bytes: 0,
            busy_ms: 0,
            waiting_ms: 0,
            idle_ms: 0,
        };
        rank.beats += 1;
        self.clock.after(BEAT_MS, What::Beat(id));
        self.send_up(id, RankEvent::Beat(beat));
    }

    /// A command reached the rank.
    pub(super) fn command_arrived(&mut self, id: RankId, command: CoordinatorCommand) {
        let now_ms = self.clock.now_ms();
        let rank = &mut self.ranks[id];
        rank.on_the_way = rank.on_the_way.saturating_sub(1);
        if !rank.is_alive() {
            return;
        }
        if now_ms >= rank.stopped_until_ms {
            rank.last_heard_ms = now_ms;
        }
        if !matches!(command, CoordinatorCommand::BeatAck { .. }) {
            self.input(id, Input::Command(command));
        }
    }

    /// Something for the compute thread.
    pub(super) fn input(&mut self, id: RankId, input: Input) {
        let rank = &mut self.ranks[id];
        if rank.is_alive() {
            rank.inbox.push_back(input);
            if !rank.busy {
                self.go_on(id);
            }
        }
    }

    /// Takes inputs, and does work that needs none, until something needs time.
    fn go_on(&mut self, id: RankId) {
        loop {
            let now_ms = self.clock.now_ms();
            let rank = &mut self.ranks[id];
            rank.busy = false;
            let (activity, ms) = match rank.inbox.front() {
                Some(input) if rank.welcomed => cost(input),
                Some(_) => (None, 0),
                // Everything that has arrived is taken in before work goes on.
                None => match rank.worker.as_ref().and_then(Worker::work) {
                    Some((activity, ms)) => (Some(activity), ms),
                    None => return,
                },
            };
            rank.proceeds = rank.inbox.is_empty();
            let ready_ms = rank.stopped_until_ms.max(rank.stuck_until_ms);
            if let Some(activity) = activity.filter(|_| now_ms >= rank.stopped_until_ms) {
                if rank.proceeds {
                    // Each lane and each row has the whole time limit.
                    rank.activity_since_ms = now_ms;
                }
                rank.enter(activity, now_ms);
            }
            let factor = rank.slowness;
            let ms = if ms == 0 {
                0
            } else {
                self.dice.between(1, ms) * factor
            };
            if ms > 0 || now_ms < ready_ms {
                self.ranks[id].busy = true;
                self.clock.at((now_ms + ms).max(ready_ms), What::Work(id));
                return;
            }
            self.do_next(id);
            if !self.ranks[id].is_alive() {
                return;
            }
        }
    }

    /// The compute thread is done with what it does.
    pub(super) fn work(&mut self, id: RankId) {
        let now_ms = self.clock.now_ms();
        let rank = &mut self.ranks[id];
        if !rank.is_alive() {
            return;
        }
        let ready_ms = rank.stopped_until_ms.max(rank.stuck_until_ms);
        if now_ms < ready_ms {
            self.clock.at(ready_ms, What::Work(id));
            return;
        }
        self.do_next(id);
        if self.ranks[id].is_alive() {
            self.go_on(id);
        }
    }

    fn do_next(&mut self, id: RankId) {
        let result = if std::mem::take(&mut self.ranks[id].proceeds) {
            self.with_worker(id, |worker, world| match worker {
                Worker::Draft(draft) => draft.proceed(world, id),
                Worker::Verifier(verifier) => verifier.proceed(world, id),
            })
        } else {
            match self.ranks[id].inbox.pop_front() {
                Some(input) => self.handle_input(id, input),
                None => Ok(()),
            }
        };
        if let Err(fault) = result {
            self.note(|world| format!("{} cannot go on: {}", world.name(id), fault.reason));
            self.say(
                id,
                RankEvent::Fault {
                    reason: fault.reason,
                    permanent: fault.permanent,
                },
            );
            self.die(id, "it could not go on");
        }
    }

    fn handle_input(&mut self, id: RankId, input: Input) -> Result<(), RankFault> {
        let rank = &mut self.ranks[id];
        match input {
            Input::Command(CoordinatorCommand::Quit) => {
                self.say(id, RankEvent::Bye);
                self.die(id, "it left");
                Ok(())
            }
            Input::Command(CoordinatorCommand::Welcome { .. }) if !rank.welcomed => {
                rank.welcomed = true;
                let early = std::mem::take(&mut rank.early);
                let worker = match rank.seat.role {
                    Role::Verifier => {
                        let (stages, slices) = (self.plan.settings.pipeline, self.plan.settings.tensor);
                        let index = rank.seat.index % (stages * slices);
                        Worker::Verifier(Box::new(Verifier::new(Shard::nth(index, stages, slices))))
                    }
                    Role::Draft => Worker::Draft(Box::default()),
                };
                rank.worker = Some(worker);
                early.into_iter().try_for_each(|input| self.work_on(id, input))
            }
            input if !rank.welcomed => {
                rank.early.push(input);
                Ok(())
            }
            input => self.work_on(id, input),
        }
    }

    fn work_on(&mut self, id: RankId, input: Input) -> Result<(), RankFault> {
        self.with_worker(id, |worker, world| match worker {
            Worker::Verifier(verifier) => verifier.take(world, id, input),
            Worker::Draft(draft) => draft.take(world, id, input),
        })
    }

    fn with_worker(
        &mut self,
        id: RankId,
        work: impl FnOnce(&mut Worker, &mut Self) -> Result<(), RankFault>,
    ) -> Result<(), RankFault> {
        // It is put back below; while it works, nothing else looks at it.
        let Some(mut worker) = self.ranks[id].worker.take() else {
            return Ok(());
        };
        let result = work(&mut worker, self);
        let activity = match &worker {
            Worker::Draft(draft) => draft.activity(),
            Worker::Verifier(verifier) => verifier.activity(),
        };
        let now_ms = self.clock.now_ms();
        let rank = &mut self.ranks[id];
        rank.enter(activity, now_ms);
        if rank.is_alive() {
            rank.worker = Some(worker);
        }
        result
    }

    /// Whether something that a rank is about to do still happens: it may be killed between any two of its effects.
    pub(super) fn has_effect(&mut self, id: RankId) -> bool {
        let rank = &mut self.ranks[id];
        match &mut rank.effects_left {
            Some(0) => {
                rank.effects_left = None;
                self.counts.note(Fault::RankKilledInside);
                self.die(id, "killed inside a handler");
            }
            Some(left) => *left -= 1,
            None => {}
        }
        self.ranks[id].is_alive()
    }

    /// A rank says something to its coordinator.
    pub(super) fn say(&mut self, id: RankId, event: RankEvent) {
        if self.has_effect(id) {
            self.send_up(id, event);
        }
    }

    /// The process ends; its links break, and whoever waits for it is told.
    pub(super) fn die(&mut self, id: RankId, why: &'static str) {
        if !self.ranks[id].is_alive() {
            return;
        }
        self.note(|world| format!("{} ends: {why}", world.name(id)));
        let rank = &mut self.ranks[id];
        rank.life = Life::Dead;
        rank.inbox.clear();
        rank.early.clear();
        rank.worker = None;
        self.break_links_of(id);
        self.leave_all(id);
        let rank = &self.ranks[id];
        if !rank.given_up && Some(rank.launch) == self.launch() {
            let wait_ms = self.dice.between(1, 3);
            self.clock.after(wait_ms, What::Exited(id));
        }
    }

    /// A process's name in traces.
    pub(super) fn name(&self, id: RankId) -> String {
        let rank = &self.ranks[id];
        format!("{} of generation {}.{}", rank.seat, rank.launch, rank.generation)
    }
}

/// What an input keeps the compute thread busy with, and for how long at most.
fn cost(input: &Input) -> (Option<Activity>, u64) {
    match input {
        Input::Command(command) => match command {
            CoordinatorCommand::LoadVerifier | CoordinatorCommand::LoadDraft { .. } => {
                (Some(Activity::Loading), 20)
            }
            CoordinatorCommand::SendState { .. } => (Some(Activity::Donating), 4),
            CoordinatorCommand::FormGroup { .. } | CoordinatorCommand::FormTeam { .. } => (None, 2),
            CoordinatorCommand::Commit { .. } => (Some(Activity::Applying), 3),
            CoordinatorCommand::Checkpoint { .. } => (Some(Activity::Saving), 10),
            CoordinatorCommand::Evaluate => (Some(Activity::Evaluating), 6),
            _ => (None, 0),
        },
        Input::Bulk(_) | Input::Closed { .. } | Input::Collective { .. } => (None, 0),
    }
}
