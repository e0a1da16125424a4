//! One schedule: a virtual clock, and everything that happens in it, in one thread.

use std::collections::VecDeque;

use eaglet_runtime::control::{BulkAddress, CoordinatorCommand, RankEvent};

use super::clock::Clock;
use super::collective::Meeting;
use super::dice::{Dice, mix};
use super::disk::{Disk, Keep};
use super::fault::{Fault, FaultCounts};
use super::host::Coordinator;
use super::intake::Intake;
use super::invariants::liveness::PATIENCE_MS;
use super::invariants::{Broken, Checked, Checks, broken, same};
use super::network::{Parcel, Path};
use super::plan::Plan;
use super::rank::{Input, Rank, RankId};
use super::weights::Weights;

/// Events that are told with a violation.
const LAST_EVENTS: usize = 40;

/// Something that is going to happen.
#[derive(Debug)]
pub enum What {
    /// The coordinator of a launch looks at its clock.
    Tick(u32),
    /// Its intake looks for samples.
    Intake(u32),
    /// A process has come up.
    Dial(RankId),
    /// Its first words reach the coordinator.
    Attach(RankId),
    /// A message reaches the coordinator.
    Up(RankId, RankEvent),
    /// A message reaches a rank.
    Down(RankId, CoordinatorCommand),
    /// A parcel reaches a rank.
    Bulk(RankId, Parcel),
    /// A link to a rank broke.
    Closed(RankId, Box<Input>),
    /// NCCL tells a rank something.
    Word(RankId, Box<Input>),
    /// A compute thread is done with what it does.
    Work(RankId),
    /// A rank beats.
    Beat(RankId),
    /// The coordinator's host sees that a process is gone.
    Exited(RankId),
    /// The coordinator is told so.
    Lost(RankId),
    /// A control stream breaks.
    StreamBroken(RankId),
    /// A process ends.
    End(RankId, &'static str),
    /// The coordinator is launched.
    Launch,
    /// A fault, and the mean time to the next one of its kind.
    Fault(Fault, u64),
    /// The host beside the coordinator's joins a launch.
    HostJoins(u32),
    /// All faults stop.
    Calm,
}

/// How a schedule went.
#[derive(Clone, Debug)]
pub struct Report {
    /// Faults by kind.
    pub counts: FaultCounts,
    /// Things that happened.
    pub happened: u64,
    /// Events that the engine took.
    pub events: u64,
    /// Commands that it gave.
    pub commands: u64,
    /// Virtual time.
    pub virtual_ms: u64,
    /// Launches.
    pub launches: u32,
    /// Steps committed.
    pub steps: u64,
    /// The final weights.
    pub weights: Weights,
    /// Whether the run completed; else it failed for a reason that the schedule gave it.
    pub completed: bool,
    /// Failures on the way.
    pub failures: u32,
    /// Whether the final weights were compared with those of the quiet run.
    pub compared: bool,
}

/// A violated invariant, and how to see it again.
#[derive(Clone, Debug)]
pub struct Violation {
    /// The schedule.
    pub seed: u64,
    /// When.
    pub at_ms: u64,
    /// Which, and what was seen.
    pub broken: Broken,
    /// What happened before.
    pub last_events: Vec<String>,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Broken { invariant, what } = &self.broken;
        writeln!(
            f,
            "{invariant} is violated in seed {} at {} ms: {what}",
            self.seed, self.at_ms
        )?;
        for event in &self.last_events {
            writeln!(f, "  {event}")?;
        }
        write!(
            f,
            "replay: cargo run --release -p eaglet-tests --bin eaglet-sim -- --seed {} --trace",
            self.seed
        )
    }
}

/// What is told of the things that happen.
pub(super) enum Trace {
    /// Nothing.
    Off,
    /// The last ones are kept.
    Last(VecDeque<String>),
    /// All are given to somebody.
    All(fn(&str)),
}

/// A schedule in its course.
pub struct World {
    pub(super) seed: u64,
    pub(super) dice: Dice,
    pub(super) clock: Clock<What>,
    pub(super) plan: Plan,
    pub(super) disk: Disk,
    pub(super) ranks: Vec<Rank>,
    pub(super) paths: Vec<Path>,
    /// All meetings over NCCL, from the first on.
    pub(super) meetings: Vec<Meeting>,
    pub(super) coordinator: Option<Coordinator>,
    /// Whether the host beside the coordinator's has joined.
    pub(super) host_is_here: bool,
    pub(super) intake: Intake,
    pub(super) checks: Checks,
    pub(super) counts: FaultCounts,
    /// Whether all faults have stopped.
    pub(super) calm: bool,
    /// From when on the run has to end in time.
    pub(super) calm_since_ms: u64,
    /// How it ended.
    pub(super) ended: Option<bool>,
    pub(super) failures: u32,
    /// Whether something was asked for when the run was about to end: the next launch does it.
    pub(super) late_request: bool,
    /// Files that were added so far.
    pub(super) added_files: usize,
    pub(super) tickets: u64,
    /// The coordinator crashes right before so many more commands.
    pub(super) crash_in: Option<u64>,
    /// What that crash leaves of the journal.
    pub(super) crash_keeps: Keep,
    pub(super) events: u64,
    pub(super) commands: u64,
    /// Records that could be lost, before each command; for the exhaustive tests.
    pub(super) tails: Option<Vec<usize>>,
    pub(super) broken: Option<Broken>,
    pub(super) trace: Trace,
}

impl World {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Self {
        Self::of(seed, Plan::draw(seed))
    }

    /// A schedule of a plan.
    pub fn of(seed: u64, plan: Plan) -> Self {
        let checks = Checks::new(&plan.settings);
        let mut world = Self {
            seed,
            dice: Dice::new(mix(seed)),
            clock: Clock::default(),
            disk: Disk::new(plan.keep),
            ranks: Vec::new(),
            paths: Vec::new(),
            meetings: Vec::new(),
            coordinator: None,
            host_is_here: false,
            intake: Intake::default(),
            checks,
            counts: FaultCounts::default(),
            calm: false,
            calm_since_ms: 0,
            ended: None,
            failures: 0,
            late_request: false,
            added_files: 0,
            tickets: 0,
            crash_in: None,
            crash_keeps: Keep::Any,
            events: 0,
            commands: 0,
            tails: None,
            broken: None,
            trace: Trace::Off,
            plan,
        };
        world.clock.at(0, What::Launch);
        world.clock.at(world.plan.calm_ms, What::Calm);
        for (fault, every_ms) in world.plan.faults.timed.clone() {
            world.next_fault(fault, every_ms);
        }
        world
    }

    /// Tells everything that happens.
    pub fn traced(mut self, tell: fn(&str)) -> Self {
        self.trace = Trace::All(tell);
        self
    }

    /// The coordinator crashes right before a command, counted over all launches, and so many of the records that
    /// were not synced are left.
    pub fn crash_before(mut self, command: u64, keep: usize) -> Self {
        self.crash_in = Some(command);
        self.crash_keeps = Keep::Records(keep);
        self
    }

    /// Remembers, before each command, how many records a crash could take.
    pub fn noting_tails(mut self) -> Self {
        self.tails = Some(Vec::new());
        self
    }

    /// Runs to the end.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub fn run(self) -> Result<Report, Violation> {
        self.run_noting().map(|(report, _)| report)
    }

    /// As [`Self::run`], with what [`Self::noting_tails`] noted.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub fn run_noting(mut self) -> Result<(Report, Vec<usize>), Violation> {
        let seed = self.seed;
        match self.run_to_the_end() {
            Ok(()) => {
                let tails = self.tails.take().unwrap_or_default();
                Ok((self.report(), tails))
            }
            Err(broken) => Err(Violation {
                seed,
                at_ms: self.clock.now_ms(),
                broken,
                last_events: match self.trace {
                    Trace::Last(events) => events.into(),
                    _ => Vec::new(),
                },
            }),
        }
    }

    /// Runs to the end and keeps the last things that happened, to be told with a violation.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub fn run_remembering(mut self) -> Result<Report, Violation> {
        self.trace = Trace::Last(VecDeque::new());
        self.run()
    }

    fn report(self) -> Report {
        let book = &self.checks.book;
        Report {
            happened: self.clock.count(),
            events: self.events,
            commands: self.commands,
            virtual_ms: self.clock.now_ms(),
            launches: book.launches,
            steps: book.committed().0,
            weights: book.chain[book.chain.len() - 1],
            completed: self.ended == Some(true),
            failures: self.failures,
            compared: self.follows_the_quiet_run() && self.ended == Some(true),
            counts: self.counts,
        }
    }

    fn run_to_the_end(&mut self) -> Checked {
        while self.ended.is_none() {
            let Some(what) = self.clock.advance() else {
                return broken("LIVENESS", "nothing happens any more");
            };
            if self.calm && self.clock.now_ms() > self.calm_since_ms + PATIENCE_MS {
                let state = self
                    .coordinator
                    .as_ref()
                    .map(|coordinator| format!("{:?}", coordinator.engine.view(self.clock.now_ms())));
                return broken(
                    "LIVENESS",
                    format!("the run does not end {PATIENCE_MS} ms after all faults: {state:?}"),
                );
            }
            self.happen(what)?;
            if let Some(broken) = self.broken.take() {
                return Err(broken);
            }
        }
        Ok(())
    }

    fn happen(&mut self, what: What) -> Checked {
        if !matches!(self.trace, Trace::Off) {
            self.tell(&what);
        }
        if self.is_for_the_coordinator(&what)
            && let Some(until_ms) = self.stalled_until()
        {
            self.clock.at(until_ms, what);
            return Ok(());
        }
        match what {
            What::Tick(launch) => self.tick(launch),
            What::Intake(launch) => self.read_samples(launch),
            What::Attach(id) => self.attach(id),
            What::Up(id, event) => self.heard(id, event),
            What::Exited(id) => {
                self.exited(id);
                Ok(())
            }
            What::Lost(id) => self.lost(id),
            What::Launch => self.launch_coordinator(),
            What::HostJoins(launch) => self.host_joins(launch),
            What::Fault(fault, every_ms) => {
                if self.calm {
                    return Ok(());
                }
                self.next_fault(fault, every_ms);
                self.strike(fault)
            }
            other => {
                self.happen_elsewhere(other);
                Ok(())
            }
        }
    }

    fn happen_elsewhere(&mut self, what: What) {
        match what {
            What::Dial(id) => self.dial(id),
            What::Down(id, command) => self.command_arrived(id, command),
            What::Bulk(id, parcel) => self.input(id, Input::Bulk(parcel)),
            What::Closed(id, input) | What::Word(id, input) => self.input(id, *input),
            What::Work(id) => self.work(id),
            What::Beat(id) => self.beat(id),
            What::StreamBroken(id) => self.break_stream(id),
            What::End(id, why) => self.die(id, why),
            What::Calm => {
                self.calm = true;
                self.calm_since_ms = self.clock.now_ms();
                self.ranks.iter_mut().for_each(|rank| rank.slowness = 1);
            }
            _ => {}
        }
    }

    fn is_for_the_coordinator(&self, what: &What) -> bool {
        matches!(
            what,
            What::Tick(_)
                | What::Intake(_)
                | What::Attach(_)
                | What::Up(..)
                | What::Exited(_)
                | What::Lost(_)
                | What::HostJoins(_)
        )
    }

    /// The process behind the name of a bulk listener.
    pub(super) fn rank_at(&self, bulk: &BulkAddress) -> Option<RankId> {
        bulk.name
            .parse()
            .ok()
            .filter(|&id: &RankId| id < self.ranks.len())
    }

    /// A replica holds weights: SAME.
    pub(super) fn holds(&mut self, id: RankId, weights: Weights) {
        let who = || self.name(id);
        if let Err(broken) = same::weights(&self.checks.book, weights, who) {
            self.broken.get_or_insert(broken);
        }
    }

    /// TEAM: what the shards of a verifier have sent does not go together.
    pub(super) fn tear(&mut self, what: String) {
        self.broken.get_or_insert(Broken {
            invariant: "TEAM",
            what,
        });
    }

    /// Whether a contribution made of a row is not a number.
    pub(super) fn spoils(&mut self, content: u64) -> bool {
        let faults = &self.plan.faults;
        let always = u64::from(faults.never_finite_one_in);
        let spoiled = if always > 0 {
            mix(content ^ self.seed).is_multiple_of(always)
        } else {
            !self.calm && self.dice.one_in(faults.not_finite_one_in)
        };
        if spoiled {
            self.counts.note(Fault::NotFinite);
        }
        spoiled
    }

    /// Notes something for the trace, if there is one.
    pub(super) fn note(&mut self, text: impl FnOnce(&Self) -> String) {
        if matches!(self.trace, Trace::Off) {
            return;
        }
        let text = format!("{:6} ms  {}", self.clock.now_ms(), text(self));
        match &mut self.trace {
            Trace::Off => {}
            Trace::Last(events) => {
                if events.len() == LAST_EVENTS {
                    events.pop_front();
                }
                events.push_back(text);
            }
            Trace::All(tell) => tell(&text),
        }
    }

    fn tell(&mut self, what: &What) {
        match what {
            // Told where the engine takes it, or of no interest.
            What::Tick(_)
            | What::Intake(_)
            | What::Up(..)
            | What::Lost(_)
            | What::Beat(_)
            | What::Work(_) => {}
            What::Down(_, CoordinatorCommand::BeatAck { .. }) => {}
            What::Down(id, command) => {
                let text = format!("{} is told {command:?}", self.name(*id));
                self.note(|_| text);
            }
            What::Bulk(id, parcel) => {
                let text = format!(
                    "{} gets {:?} from {}",
                    self.name(*id),
                    parcel.load,
                    self.name(parcel.from)
                );
                self.note(|_| text);
            }
            other => {
                let text = format!("{other:?}");
                self.note(|_| text);
            }
        }
    }
}
