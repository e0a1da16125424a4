//! A fake cluster around the engine: ranks, links, journal and disk in one thread, every choice from a seed.
//!
//! Ranks keep the protocol; the world does not: it kills ranks, duplicates what they say, holds messages back, and
//! kills the coordinator between any two commands. After every event LEDGER, ONCE and FENCE are checked; at the end the
//! weights must be those of the quiet run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use eaglet_runtime::control::{Acceptance, CoordinatorCommand, DraftOrigin, Member, RankEvent, SeatMetrics};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, RowId, Seat, Step, Unit};
use eaglet_runtime::samples::Location;

use super::setup::{DRAFTS, Dice, SAMPLES, contract, settings};
use crate::engine::{Command, Engine, Event, Outcome};
use crate::journal::{Record, SampleSource};

#[derive(Default)]
struct FakeRank {
    inbox: VecDeque<CoordinatorCommand>,
    outbox: VecDeque<RankEvent>,
    /// Rows and states on their way to it.
    bulk: VecDeque<Bulk>,
    attached: bool,
    stopped: bool,
    state: Option<(Step, Digest)>,
    donor: Option<Member>,
    early_states: Vec<(u16, Generation, Step, Digest)>,
    epoch: Epoch,
    rows: BTreeMap<RowId, Vec<Unit>>,
    reducing: Option<Step>,
    staged: Option<(Step, Digest)>,
}

enum Bulk {
    Row(RowId, Vec<Unit>),
    State {
        from: u16,
        generation: Generation,
        step: Step,
        digest: Digest,
    },
}

/// Contributions to the sums, as (epoch, step) → seat → units.
type Board = BTreeMap<(Epoch, Step), BTreeMap<u16, Vec<Unit>>>;

pub(super) struct World {
    seed: u64,
    dice: Dice,
    /// Kills are one in so many deliveries; 0 is none.
    kill_one_in: u64,
    crash_one_in: u64,
    engine: Engine,
    journal: Vec<Record>,
    synced: usize,
    disk: BTreeMap<PathBuf, (Step, Digest)>,
    ranks: BTreeMap<(Seat, Generation), FakeRank>,
    lost: VecDeque<(Seat, Generation)>,
    board: Board,
    trained: BTreeMap<Unit, Step>,
    now_ms: u64,
    pub(super) outcome: Option<Outcome>,
    kills: u32,
    crashes: u32,
    /// The verifiers refuse held-out rows.
    pub(super) refuses_held_out: bool,
    /// The verifiers refuse this sample of this pass wherever it is, or all of them.
    pub(super) refuses: Option<fn(Unit) -> bool>,
}

impl World {
    pub(super) fn new(seed: u64, kill_one_in: u64, crash_one_in: u64) -> Self {
        let engine = Engine::new(settings(), &[], 0).expect("an empty journal contradicts nothing");
        let mut world = Self {
            seed,
            dice: Dice(seed),
            kill_one_in,
            crash_one_in,
            engine,
            journal: Vec::new(),
            synced: 0,
            disk: BTreeMap::new(),
            ranks: BTreeMap::new(),
            lost: VecDeque::new(),
            board: Board::new(),
            trained: BTreeMap::new(),
            now_ms: 0,
            outcome: None,
            kills: 0,
            crashes: 0,
            refuses_held_out: false,
            refuses: None,
        };
        world.launch();
        world
    }

    fn launch(&mut self) {
        let commands = self.engine.launch();
        self.carry_out(commands);
    }

    fn feed(&mut self, event: Event) {
        let commands = self.engine.handle(self.now_ms, event);
        assert!(
            self.engine.view(self.now_ms).ledger.adds_up(),
            "LEDGER, seed {}",
            self.seed
        );
        self.carry_out(commands);
    }

    fn carry_out(&mut self, commands: Vec<Command>) {
        for command in commands {
            if self.dice.one_in(self.crash_one_in) {
                self.crash_coordinator();
                return;
            }
            match command {
                Command::Append { record, sync } => {
                    if let Record::Committed { step, .. } = &record {
                        self.account(*step);
                    }
                    self.journal.push(record);
                    if sync {
                        self.synced = self.journal.len();
                    }
                }
                Command::Spawn { seat, generation } => {
                    self.ranks.insert((seat, generation), FakeRank::default());
                }
                Command::Kill { seat, generation, .. } => self.kill((seat, generation)),
                Command::Send {
                    seat,
                    generation,
                    command,
                } => {
                    if let CoordinatorCommand::Commit { step, .. } = &command {
                        let known = self.journal[..self.synced]
                            .iter()
                            .any(|r| matches!(r, Record::Committed { step: s, .. } if s == step));
                        assert!(
                            known,
                            "step {step} is committed before its record is on disk, seed {}",
                            self.seed
                        );
                    }
                    if let Some(rank) = self.ranks.get_mut(&(seat, generation)) {
                        rank.inbox.push_back(command);
                    }
                }
                Command::Lease {
                    seat,
                    generation,
                    row,
                    documents,
                    destination,
                } => {
                    let units = documents.into_iter().map(|(unit, _)| unit).collect();
                    let extraction = eaglet_runtime::control::Extraction {
                        row,
                        units,
                        content: Default::default(),
                        destination,
                    };
                    if let Some(rank) = self.ranks.get_mut(&(seat, generation)) {
                        rank.inbox.push_back(CoordinatorCommand::Extract(extraction));
                    }
                }
                Command::Finish(outcome) => self.outcome = Some(outcome),
                Command::Notice(_) | Command::Committed(_) | Command::Evaluated { .. } => {}
            }
        }
    }

    /// ONCE and ORDER, from the journal alone.
    fn account(&mut self, step: Step) {
        let mut rows: Option<Vec<Vec<Unit>>> = None;
        for record in &self.journal {
            match record {
                Record::Planned {
                    step: s,
                    rows: planned,
                } if *s == step => rows = Some(planned.clone()),
                Record::Quarantined { step: s, unit, .. } if *s == step => {
                    for row in rows.iter_mut().flatten() {
                        row.retain(|other| other != unit);
                    }
                }
                _ => {}
            }
        }
        for unit in rows
            .expect("ORDER: a committed step was planned")
            .into_iter()
            .flatten()
        {
            let before = self.trained.insert(unit, step);
            assert_eq!(before, None, "ONCE: {unit:?} twice, seed {}", self.seed);
        }
    }

    fn kill(&mut self, key: (Seat, Generation)) {
        if self.ranks.remove(&key).is_some() {
            self.lost.push_back(key);
        }
    }

    /// All ranks die with their coordinator; what was not synced may be gone, wherever the cut falls.
    fn crash_coordinator(&mut self) {
        self.crashes += 1;
        let unsynced = self.journal.len() - self.synced;
        let keep = self.synced + self.dice.below(unsynced + 1);
        self.journal.truncate(keep);
        self.synced = keep;
        self.ranks.clear();
        self.lost.clear();
        self.board.clear();
        self.now_ms = 0;
        self.outcome = None;
        self.engine = Engine::new(settings(), &self.journal, 0)
            .unwrap_or_else(|error| panic!("seed {}: {error}", self.seed));
        let disk = &self.disk;
        self.engine
            .keep_checkpoints(|known| disk.contains_key(&known.folder));
        self.launch();
        if !self.engine.is_prepared() {
            self.take_in();
        }
    }

    pub(super) fn take_in(&mut self) {
        for line in self.engine.samples_taken_in()..SAMPLES {
            let crashes = self.crashes;
            let source = SampleSource {
                file: "chats.jsonl".to_owned(),
                line,
                id: None,
            };
            let event = if line % 13 == 7 {
                Event::SampleRefused {
                    source,
                    reason: "no answer".to_owned(),
                }
            } else {
                let tokens = 10 + (line * 37 % 60) as u32;
                Event::SampleAccepted {
                    source,
                    location: Location { offset: line, len: 1 },
                    tokens,
                    trained_tokens: tokens / 2,
                }
            };
            self.feed(event);
            if self.crashes != crashes {
                return; // the crash has started another intake
            }
        }
        let held_out = (0..7).map(|n| vec![n; 5]).collect();
        self.feed(Event::Prepared {
            vocabulary: vec![1, 2, 3],
            coverage: 0.9,
            held_out,
        });
    }

    fn member(seat: Seat, generation: Generation) -> Member {
        Member {
            seat: seat.index,
            generation,
            bulk_name: format!("{seat}-{generation}"),
        }
    }

    /// One thing happens somewhere.
    pub(super) fn step(&mut self) {
        self.now_ms += 5;
        if self.dice.one_in(10) {
            self.feed(Event::Tick);
        }
        if let Some((seat, generation)) = self.lost.pop_front() {
            self.feed(Event::Lost {
                seat,
                generation,
                cause: "killed".to_owned(),
                log_tail: String::new(),
            });
        }
        let keys: Vec<_> = self.ranks.keys().copied().collect();
        if keys.is_empty() {
            self.feed(Event::Tick);
            return;
        }
        let key = keys[self.dice.below(keys.len())];
        if self.dice.one_in(self.kill_one_in) {
            self.kills += 1;
            self.kill(key);
            return;
        }
        match self.dice.below(4) {
            0 => self.say(key),
            1 => self.deliver_bulk(key),
            _ => self.deliver_command(key),
        }
        self.settle_sums();
    }

    fn say(&mut self, (seat, generation): (Seat, Generation)) {
        let Some(rank) = self.ranks.get_mut(&(seat, generation)) else {
            return;
        };
        if !rank.attached {
            rank.attached = true;
            let bulk_name = Self::member(seat, generation).bulk_name;
            self.feed(Event::Attached {
                seat,
                generation,
                pid: 1,
                bulk_name,
            });
            return;
        }
        let beat = eaglet_runtime::control::Beat {
            sequence: 0,
            activity: Default::default(),
            activity_age_ms: 0,
            rss_bytes: 0,
        };
        let event = rank.outbox.pop_front().unwrap_or(RankEvent::Beat(beat));
        let bye = event == RankEvent::Bye;
        let twice = self.dice.one_in(20) && self.kill_one_in > 0;
        if twice {
            self.feed(Event::Rank {
                seat,
                generation,
                event: event.clone(),
            });
        }
        self.feed(Event::Rank {
            seat,
            generation,
            event,
        });
        if bye {
            self.kill((seat, generation));
        }
    }

    fn deliver_bulk(&mut self, key: (Seat, Generation)) {
        let Some(rank) = self.ranks.get_mut(&key) else {
            return;
        };
        match rank.bulk.pop_front() {
            Some(Bulk::Row(row, units)) => {
                let reached = rank.state.map(|(step, _)| step);
                let old = matches!(row, RowId::Train { step, .. } if reached.is_some_and(|at| step < at));
                if !old {
                    rank.rows.insert(row, units);
                    rank.outbox.push_back(RankEvent::Received { row });
                }
            }
            Some(Bulk::State {
                from,
                generation,
                step,
                digest,
            }) => {
                rank.early_states.push((from, generation, step, digest));
                rank.take_state();
            }
            None => {}
        }
    }

    fn deliver_command(&mut self, (seat, generation): (Seat, Generation)) {
        let disk = self.disk.clone();
        let Some(rank) = self.ranks.get_mut(&(seat, generation)) else {
            return;
        };
        if !rank.attached || rank.stopped {
            return;
        }
        let Some(command) = rank.inbox.pop_front() else {
            return;
        };
        match command {
            CoordinatorCommand::LoadVerifier => {
                rank.outbox
                    .push_back(RankEvent::VerifierReady { contract: contract() });
            }
            CoordinatorCommand::Extract(extraction) => {
                let bad = self
                    .refuses
                    .and_then(|refuses| extraction.units.iter().copied().find(|&unit| refuses(unit)));
                if bad.is_some() {
                    let reason = "not finite".to_owned();
                    rank.outbox.push_back(RankEvent::BadSample {
                        row: extraction.row,
                        unit: bad,
                        reason,
                    });
                    return;
                }
                let (row, to) = (extraction.row, extraction.destination);
                rank.outbox.push_back(RankEvent::Extracted {
                    row,
                    generation: to.generation,
                    tokens: 1,
                });
                if let Some(draft) = self.ranks.get_mut(&(Seat::draft(to.seat), to.generation)) {
                    draft.bulk.push_back(Bulk::Row(row, extraction.units));
                }
            }
            CoordinatorCommand::ExtractHeldOut(request) => {
                if self.refuses_held_out {
                    let reason = "not finite".to_owned();
                    rank.outbox.push_back(RankEvent::BadSample {
                        row: request.row,
                        unit: None,
                        reason,
                    });
                    return;
                }
                let (row, to) = (request.row, request.destination);
                rank.outbox.push_back(RankEvent::Extracted {
                    row,
                    generation: to.generation,
                    tokens: 1,
                });
                if let Some(draft) = self.ranks.get_mut(&(Seat::draft(to.seat), to.generation)) {
                    draft.bulk.push_back(Bulk::Row(row, Vec::new()));
                }
            }
            CoordinatorCommand::LoadDraft { origin, .. } => {
                rank.donor = None;
                match origin {
                    DraftOrigin::Initial => rank.ready((Step(0), Digest::of(b"initial"))),
                    DraftOrigin::Checkpoint(folder) => rank.ready(disk[&folder]),
                    DraftOrigin::Peer(donor) => {
                        rank.donor = Some(donor);
                        rank.take_state();
                    }
                }
            }
            CoordinatorCommand::SendState { to } => {
                let (step, digest) = rank.state.expect("a donor holds a state");
                let state = Bulk::State {
                    from: seat.index,
                    generation,
                    step,
                    digest,
                };
                if let Some(draft) = self.ranks.get_mut(&(Seat::draft(to.seat), to.generation)) {
                    draft.bulk.push_back(state);
                }
            }
            CoordinatorCommand::Abandon { epoch } => rank.abandon(epoch),
            CoordinatorCommand::FormGroup { epoch, members } => {
                assert_eq!(members.len(), usize::from(DRAFTS));
                rank.abandon(epoch);
                rank.outbox.push_back(RankEvent::GroupReady { epoch });
            }
            CoordinatorCommand::Begin {
                epoch, step, has_row, ..
            } if epoch == rank.epoch => {
                assert_eq!(rank.state.map(|(at, _)| at), Some(step), "seed {}", self.seed);
                let row = RowId::Train {
                    step,
                    seat: seat.index,
                };
                let units = if has_row {
                    rank.rows
                        .get(&row)
                        .cloned()
                        .unwrap_or_else(|| panic!("no {row}, seed {}", self.seed))
                } else {
                    Vec::new()
                };
                rank.reducing = Some(step);
                self.board
                    .entry((epoch, step))
                    .or_default()
                    .insert(seat.index, units);
            }
            CoordinatorCommand::Commit { epoch, step, .. } if epoch == rank.epoch => {
                let (staged, gradient) = rank.staged.take().expect("only staged steps are committed");
                assert_eq!(staged, step, "seed {}", self.seed);
                let (_, state) = rank.state.expect("it staged from a state");
                let next = (step.next(), Digest::of(format!("{state}{gradient}").as_bytes()));
                rank.state = Some(next);
                rank.rows
                    .retain(|row, _| !matches!(row, RowId::Train { step: s, .. } if *s <= step));
                rank.outbox.push_back(RankEvent::Applied {
                    step: next.0,
                    state: next.1,
                });
            }
            CoordinatorCommand::Checkpoint => {
                let state = rank.state.expect("a state is saved");
                let folder = PathBuf::from(format!("step-{}", state.0));
                rank.outbox.push_back(RankEvent::Checkpointed {
                    step: state.0,
                    folder: folder.clone(),
                });
                self.disk.insert(folder, state);
            }
            CoordinatorCommand::Evaluate => {
                let (step, _) = rank.state.expect("a state is evaluated");
                let acceptance = Acceptance {
                    verifications: 1,
                    accepted: 1,
                    ..Acceptance::default()
                };
                rank.outbox.push_back(RankEvent::Evaluated { step, acceptance });
            }
            CoordinatorCommand::Quit => {
                rank.stopped = true;
                rank.outbox.push_back(RankEvent::Bye);
            }
            CoordinatorCommand::Begin { .. }
            | CoordinatorCommand::Commit { .. }
            | CoordinatorCommand::Welcome { .. }
            | CoordinatorCommand::BeatAck { .. } => {}
        }
    }

    /// Replicas whose sum is complete stage it.
    fn settle_sums(&mut self) {
        for rank in self.ranks.values_mut() {
            let Some(step) = rank.reducing else { continue };
            let Some(parts) = self.board.get(&(rank.epoch, step)) else {
                continue;
            };
            if parts.len() == usize::from(DRAFTS) {
                let gradient = Digest::of(format!("{step}{parts:?}").as_bytes());
                let (_, state) = rank.state.expect("it reduces from a state");
                rank.reducing = None;
                rank.staged = Some((step, gradient));
                let metrics = SeatMetrics::default();
                let epoch = rank.epoch;
                rank.outbox.push_back(RankEvent::Staged {
                    epoch,
                    step,
                    gradient,
                    state,
                    metrics,
                });
            }
        }
    }

    /// Runs to the end; the last part without faults, so that it must come.
    pub(super) fn run(mut self) -> Finished {
        self.take_in();
        for turn in 0.. {
            if self.outcome.is_some() {
                break;
            }
            if turn == 40_000 {
                (self.kill_one_in, self.crash_one_in) = (0, 0);
            }
            assert!(
                turn < 400_000,
                "no end in sight, seed {}: {:?}",
                self.seed,
                self.engine.view(self.now_ms)
            );
            self.step();
        }
        let last = self.disk.values().max_by_key(|(step, _)| *step).copied();
        Finished {
            outcome: self.outcome.expect("the loop ended"),
            weights: last.expect("a checkpoint was written"),
            trained: self.trained.keys().copied().collect(),
            kills: self.kills,
            crashes: self.crashes,
        }
    }
}

impl FakeRank {
    fn ready(&mut self, state: (Step, Digest)) {
        self.state = Some(state);
        self.rows
            .retain(|row, _| !matches!(row, RowId::Train { step, .. } if *step < state.0));
        self.outbox.push_back(RankEvent::DraftReady {
            step: state.0,
            state: state.1,
        });
    }

    fn take_state(&mut self) {
        let Some(donor) = &self.donor else { return };
        let from = (donor.seat, donor.generation);
        let found = self
            .early_states
            .iter()
            .find(|(seat, generation, ..)| (*seat, *generation) == from);
        if let Some(&(_, _, step, digest)) = found {
            self.donor = None;
            self.early_states.clear();
            self.ready((step, digest));
        }
    }

    fn abandon(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.reducing = None;
        self.staged = None;
    }
}

pub(super) struct Finished {
    pub(super) outcome: Outcome,
    pub(super) weights: (Step, Digest),
    pub(super) trained: BTreeSet<Unit>,
    pub(super) kills: u32,
    pub(super) crashes: u32,
}
