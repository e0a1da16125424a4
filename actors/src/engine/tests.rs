//! The engine against a fake cluster: ranks, links, journal and disk in one thread, every choice from a seed.
//!
//! Ranks keep the protocol; the world does not: it kills ranks, duplicates what they say, holds messages back, and
//! kills the coordinator between any two commands. After every event LEDGER, ONCE and FENCE are checked; at the end the
//! weights must be those of the quiet run.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::PathBuf;

use eaglet_runtime::contract::{Contract, HiddenDtype};
use eaglet_runtime::control::{Acceptance, CoordinatorCommand, DraftOrigin, Member, RankEvent, SeatMetrics};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat, Step, Unit};
use eaglet_runtime::samples::Location;

use super::{Command, Engine, Event, Fall, LearningRate, Outcome, RestartPolicy, Settings};
use crate::journal::{Record, SampleSource};

const DRAFTS: u16 = 3;
const VERIFIERS: u16 = 2;
const SAMPLES: u64 = 60;

fn settings() -> Settings {
    Settings {
        draft_seats: DRAFTS,
        verifier_seats: VERIFIERS,
        contract: contract(),
        recipe: Digest::of(b"recipe"),
        tokens_per_row: 100,
        passes: 2,
        step_limit: None,
        prefetch_steps: 3,
        evaluate_every_steps: 5,
        max_new_tokens: 8,
        held_out_rows: 4,
        checkpoint_every_steps: 4,
        learning_rate: LearningRate {
            peak: 1e-3,
            warmup_ratio: 0.1,
            fall: Fall::Linear,
        },
        suspect_after_ms: 1_000,
        dead_after_ms: 2_000,
        attach_timeout_ms: 30_000,
        load_timeout_ms: 60_000,
        step_timeout_ms: 60_000,
        leave_timeout_ms: 10_000,
        restarts: RestartPolicy {
            max_restarts: u32::MAX,
            window_ms: 60_000,
            backoff_initial_ms: 10,
            backoff_max_ms: 100,
        },
    }
}

fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![2, 3, 5],
        hidden_size: 8,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

/// SplitMix64: all the randomness of a schedule.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.roll() % n.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.roll().is_multiple_of(n)
    }
}

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

struct World {
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
    outcome: Option<Outcome>,
    kills: u32,
    crashes: u32,
    /// The verifiers refuse held-out rows.
    refuses_held_out: bool,
    /// The verifiers refuse this sample of this pass wherever it is, or all of them.
    refuses: Option<fn(Unit) -> bool>,
}

impl World {
    fn new(seed: u64, kill_one_in: u64, crash_one_in: u64) -> Self {
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

    fn take_in(&mut self) {
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
    fn step(&mut self) {
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
    fn run(mut self) -> Finished {
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

struct Finished {
    outcome: Outcome,
    weights: (Step, Digest),
    trained: BTreeSet<Unit>,
    kills: u32,
    crashes: u32,
}

fn quiet() -> Finished {
    World::new(1, 0, 0).run()
}

#[test]
fn the_quiet_run_trains_every_accepted_sample_in_every_pass() {
    let finished = quiet();
    assert!(matches!(
        finished.outcome,
        Outcome::Completed {
            acceptance: Some(_),
            ..
        }
    ));
    let refused = (0..SAMPLES).filter(|line| line % 13 == 7).count() as u64;
    assert_eq!(finished.trained.len() as u64, 2 * (SAMPLES - refused));
}

fn same_as_quiet(seeds: std::ops::Range<u64>, kill_one_in: u64, crash_one_in: u64) -> (u32, u32) {
    let quiet = quiet();
    let (mut kills, mut crashes) = (0, 0);
    for seed in seeds {
        let finished = World::new(seed, kill_one_in, crash_one_in).run();
        assert!(
            matches!(finished.outcome, Outcome::Completed { .. }),
            "seed {seed}: {:?}",
            finished.outcome
        );
        assert_eq!(finished.weights, quiet.weights, "seed {seed}");
        assert_eq!(finished.trained, quiet.trained, "seed {seed}");
        kills += finished.kills;
        crashes += finished.crashes;
    }
    (kills, crashes)
}

#[test]
fn killed_ranks_change_nothing_about_the_weights() {
    let (kills, _) = same_as_quiet(100..160, 60, 0);
    assert!(kills > 200, "only {kills} kills");
}

#[test]
fn a_killed_coordinator_changes_nothing_about_the_weights() {
    let (_, crashes) = same_as_quiet(200..260, 0, 400);
    assert!(crashes > 60, "only {crashes} crashes");
}

#[test]
fn both_together_change_nothing_about_the_weights() {
    let (kills, crashes) = same_as_quiet(300..360, 120, 900);
    assert!(
        kills > 50 && crashes > 30,
        "only {kills} kills and {crashes} crashes"
    );
}

#[test]
fn a_refused_held_out_row_is_not_waited_for() {
    let mut world = World::new(1, 0, 0);
    world.refuses_held_out = true;
    let finished = world.run();
    assert!(
        matches!(finished.outcome, Outcome::Completed { acceptance: None, .. }),
        "{:?}",
        finished.outcome
    );
    assert_eq!(finished.weights, quiet().weights);
}

#[test]
fn a_refused_sample_is_quarantined_and_everything_else_is_trained() {
    let bad: fn(Unit) -> bool = |unit| unit.sample.0 % 20 == 3 && unit.pass == 1;
    let run = |seed, kill_one_in, crash_one_in| {
        let mut world = World::new(seed, kill_one_in, crash_one_in);
        world.refuses = Some(bad);
        world.run()
    };
    let expected: BTreeSet<Unit> = quiet().trained.into_iter().filter(|&unit| !bad(unit)).collect();
    let calm = run(1, 0, 0);
    assert_eq!(calm.trained, expected);
    for seed in 400..420 {
        let finished = run(seed, 90, 900);
        assert!(
            matches!(finished.outcome, Outcome::Completed { .. }),
            "seed {seed}: {:?}",
            finished.outcome
        );
        assert_eq!(finished.weights, calm.weights, "seed {seed}");
        assert!(finished.trained == expected, "seed {seed}");
    }
}

#[test]
fn a_verifier_that_refuses_everything_ends_the_run() {
    let mut world = World::new(1, 0, 0);
    world.refuses = Some(|_| true);
    world.take_in();
    while world.outcome.is_none() {
        world.step();
    }
    match world.outcome {
        Some(Outcome::Failed { report }) => assert!(report.contains("refused every sample"), "{report}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_keeps_dying_is_given_up_with_its_last_cause() {
    let mut settings = settings();
    settings.restarts.max_restarts = 2;
    let mut engine = Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing");
    let mut commands = engine.handle(0, Event::Tick);
    let seat = Seat::verifier(0);
    for generation in 0..3 {
        let generation = Generation(generation);
        let spawned = |c: &Command| matches!(c, Command::Spawn { seat: s, generation: g } if *s == seat && *g == generation);
        assert!(commands.iter().any(spawned), "{commands:?}");
        let lost = Event::Lost {
            seat,
            generation,
            cause: format!("cause {generation}"),
            log_tail: "oh".to_owned(),
        };
        commands = engine.handle(1000 * u64::from(generation.0 + 1), lost);
        commands.extend(engine.handle(1000 * u64::from(generation.0 + 1) + 500, Event::Tick));
    }
    commands.extend(engine.handle(20_000, Event::Tick));
    let report = commands.iter().find_map(|command| match command {
        Command::Finish(Outcome::Failed { report }) => Some(report.clone()),
        _ => None,
    });
    let report = report.expect("it is given up");
    assert!(
        report.contains("verifier-0 was lost 3 times") && report.contains("cause 2"),
        "{report}"
    );
    assert!(report.contains("oh"), "{report}");
}

#[test]
fn backoff_doubles_up_to_its_limit() {
    let policy = RestartPolicy {
        max_restarts: 9,
        window_ms: 1,
        backoff_initial_ms: 200,
        backoff_max_ms: 1000,
    };
    let waits = [0, 1, 2, 3, 4, 64, 65, u32::MAX].map(|recent| policy.backoff_ms(recent));
    assert_eq!(waits, [0, 200, 400, 800, 1000, 1000, 1000, 1000]);
}

#[test]
fn fence_an_older_generation_is_not_heard() {
    let mut engine = Engine::new(settings(), &[], 0).expect("an empty journal contradicts nothing");
    engine.handle(0, Event::Tick);
    let seat = Seat::verifier(0);
    let lost = Event::Lost {
        seat,
        generation: Generation(0),
        cause: "killed".to_owned(),
        log_tail: String::new(),
    };
    engine.handle(1, lost.clone());
    let from_the_dead = RankEvent::Fault {
        reason: "late".to_owned(),
        permanent: true,
    };
    let commands = engine.handle(
        2,
        Event::Rank {
            seat,
            generation: Generation(0),
            event: from_the_dead,
        },
    );
    assert_eq!(commands, Vec::new());
    assert_eq!(engine.handle(3, lost), Vec::new());
    let view = engine.view(3);
    let state = view
        .seats
        .iter()
        .find(|s| s.seat == seat)
        .expect("it has that seat");
    assert_eq!((state.generation, state.restarts), (Generation(1), 1));
    assert_eq!(state.seat.role, Role::Verifier);
}
