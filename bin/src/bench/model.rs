//! The coordinator's engine and journal among ranks that answer at once: what the coordinator itself costs.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use eaglet_actors::engine::{
    Command, Engine, Event, Fall, LearningRate, Outcome, RestartPolicy, Settings, WhenExhausted,
};
use eaglet_actors::journal::{Journal, Record, SampleSource};
use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::{Contract, HiddenDtype};
use eaglet_runtime::control::{
    Activity, Beat, BulkAddress, CoordinatorCommand, LaneMetrics, RankEvent, StepMetrics,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Generation, Seat, Step};
use eaglet_runtime::samples::Location;

use super::interrupt::Interrupt;

/// Tokens of a sample, and of a row.
const TOKENS: u32 = 2048;
/// Rows are extracted for so many steps ahead.
const PREFETCH_STEPS: u64 = 2;
/// TTT steps whose metrics are in each vote.
const TTT_STEPS: usize = 3;

/// Which cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) verifiers: u16,
    /// As many rows a step, too.
    pub(super) drafts: u16,
    pub(super) steps: u64,
}

/// What the coordinator has done in one step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StepCost {
    pub(super) events: u64,
    pub(super) commands: u64,
    /// In the engine, for all events of the step.
    pub(super) engine_ms: f64,
    /// Of it, for the votes.
    pub(super) votes_ms: f64,
    pub(super) slowest_event_ms: f64,
    /// Appending records, and waiting for the disk.
    pub(super) journal_ms: f64,
    pub(super) journal_bytes: u64,
}

/// The cluster.
pub(super) struct Model {
    shape: Shape,
    engine: Engine,
    journal: Option<Journal>,
    journal_file: Option<std::path::PathBuf>,
    events: VecDeque<Event>,
    /// The draft seat that computes each lane.
    owners: Vec<u16>,
    generations: HashMap<Seat, Generation>,
    cost: StepCost,
    steps: Vec<StepCost>,
    written_bytes: u64,
    outcome: Option<Outcome>,
    now_ms: u64,
}

impl Model {
    /// A cluster that has not begun; with a journal, records are written and synced.
    ///
    /// # Errors
    /// If the journal cannot be written.
    pub(super) fn start(shape: Shape, journal: Option<&Path>) -> Result<Self> {
        let settings = settings(shape);
        let opened = journal
            .map(|path| Journal::open(path).map(|(journal, _)| journal))
            .transpose()
            .context("cannot make a journal")?;
        Ok(Self {
            engine: Engine::new(settings, &[], 0).context("the engine refuses an empty journal")?,
            shape,
            journal: opened,
            journal_file: journal.map(Path::to_owned),
            events: VecDeque::new(),
            owners: Vec::new(),
            generations: HashMap::new(),
            cost: StepCost::default(),
            steps: Vec::new(),
            written_bytes: 0,
            outcome: None,
            now_ms: 0,
        })
    }

    /// Runs all steps. What comes before the first commit is in no step, see [`Self::begin`].
    ///
    /// # Errors
    /// If the engine fails, or the user interrupts.
    pub(super) fn run(&mut self, interrupt: &Interrupt) -> Result<Vec<StepCost>> {
        self.begin(interrupt)?;
        self.go_on(interrupt)
    }

    /// Starts all ranks and trains the first step; what that took.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) fn begin(&mut self, interrupt: &Interrupt) -> Result<StepCost> {
        let commands = self.engine.launch();
        self.carry_out(commands)?;
        let samples = u64::from(self.shape.drafts) * self.shape.steps;
        for line in 1..=samples {
            self.feed(Event::SampleAccepted {
                source: SampleSource {
                    file: "/data/chats.jsonl".to_owned(),
                    line,
                    id: None,
                },
                location: Location {
                    offset: line * u64::from(TOKENS) * 5,
                    len: TOKENS * 5,
                },
                tokens: TOKENS,
                trained_tokens: TOKENS / 2,
            })?;
        }
        // Reading samples is no part of starting ranks.
        self.cost = StepCost::default();
        self.events.push_back(Event::Prepared {
            vocabulary: (0..8192).collect(),
            coverage: 1.0,
            held_out: Vec::new(),
        });
        self.turn(interrupt, |model| model.steps.len() == 1)?;
        self.steps.pop().context("no step was committed")
    }

    /// Trains the rest, and tells of all steps but the last ones, while which nothing is extracted any more.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub(super) fn go_on(&mut self, interrupt: &Interrupt) -> Result<Vec<StepCost>> {
        self.turn(interrupt, |model| model.outcome.is_some())?;
        match self.outcome.take() {
            Some(Outcome::Completed { .. }) => {
                let mut steps = std::mem::take(&mut self.steps);
                // While the last ones are trained nothing is left to extract.
                steps.truncate(steps.len().saturating_sub(PREFETCH_STEPS as usize).max(1));
                Ok(steps)
            }
            other => bail!("the run has not come to its end: {other:?}"),
        }
    }

    /// Hands events to the engine until something is so.
    fn turn(&mut self, interrupt: &Interrupt, done: impl Fn(&Self) -> bool) -> Result<()> {
        let mut idle = 0;
        while !done(self) {
            match self.events.pop_front() {
                Some(event) => {
                    idle = 0;
                    self.feed(event)?;
                }
                None => {
                    interrupt.check()?;
                    idle += 1;
                    ensure!(idle < 1000, "the cluster stands still: {:?}", self.engine.phase());
                    self.now_ms += 100;
                    self.feed(Event::Tick)?;
                }
            }
        }
        Ok(())
    }

    /// Time of a beat of each rank, in ms.
    ///
    /// # Errors
    /// If the engine fails.
    pub(super) fn beats(&mut self) -> Result<f64> {
        let before = self.cost;
        let seats: Vec<(Seat, Generation)> =
            self.generations.iter().map(|(&seat, &nth)| (seat, nth)).collect();
        let begun = Instant::now();
        for (seat, generation) in seats {
            let event = RankEvent::Beat(Beat {
                activity: Activity::Computing,
                ..Beat::default()
            });
            self.feed(Event::Rank {
                seat,
                generation,
                event,
            })?;
        }
        self.cost = before;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    }

    /// Time of a look at the engine for views, in ms.
    pub(super) fn view(&self) -> f64 {
        let begun = Instant::now();
        std::hint::black_box(self.engine.view(self.now_ms));
        begun.elapsed().as_secs_f64() * 1e3
    }

    fn feed(&mut self, event: Event) -> Result<()> {
        let is_vote = matches!(
            event,
            Event::Rank {
                event: RankEvent::Staged { .. },
                ..
            }
        );
        let begun = Instant::now();
        let commands = self.engine.handle(self.now_ms, event);
        let ms = begun.elapsed().as_secs_f64() * 1e3;
        let cost = &mut self.cost;
        cost.events += 1;
        cost.commands += commands.len() as u64;
        cost.engine_ms += ms;
        cost.slowest_event_ms = cost.slowest_event_ms.max(ms);
        if is_vote {
            cost.votes_ms += ms;
        }
        self.carry_out(commands)
    }

    fn carry_out(&mut self, commands: Vec<Command>) -> Result<()> {
        for command in commands {
            match command {
                Command::Append { record, sync } => self.append(&record, sync)?,
                Command::Spawn { seat, generation } => {
                    self.generations.insert(seat, generation);
                    self.events.push_back(Event::Attached {
                        seat,
                        generation,
                        pid: 1,
                        bulk: BulkAddress {
                            name: format!("eaglet-0123456789ab-{seat}-{generation}"),
                            ..BulkAddress::default()
                        },
                    });
                }
                Command::Send {
                    seat,
                    generation,
                    command,
                } => self.answer(seat, generation, command),
                Command::Lease {
                    members,
                    row,
                    lease,
                    destination,
                    ..
                } => {
                    for (seat, generation) in members {
                        let tokens = u64::from(TOKENS);
                        self.say(seat, generation, RankEvent::Extracted { row, lease, tokens });
                    }
                    let to = Seat::draft(destination.seat);
                    self.say(to, destination.generation, RankEvent::Received { row, lease });
                }
                Command::Committed(_) => {
                    let cost = std::mem::take(&mut self.cost);
                    self.steps.push(cost);
                }
                Command::Finish(outcome) => self.outcome = Some(outcome),
                Command::Kill { seat, reason, .. } => bail!("{seat} is to be killed: {reason}"),
                Command::Notice(notice) if notice.warning => bail!("{}", notice.text),
                _ => {}
            }
        }
        Ok(())
    }

    fn append(&mut self, record: &Record, sync: bool) -> Result<()> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        let begun = Instant::now();
        journal.append(record, sync)?;
        self.cost.journal_ms += begun.elapsed().as_secs_f64() * 1e3;
        if let Some(file) = self.journal_file.as_ref().filter(|_| sync) {
            let bytes = std::fs::metadata(file)
                .context("cannot look at the journal")?
                .len();
            self.cost.journal_bytes += bytes - self.written_bytes;
            self.written_bytes = bytes;
        }
        Ok(())
    }

    fn say(&mut self, seat: Seat, generation: Generation, event: RankEvent) {
        self.events.push_back(Event::Rank {
            seat,
            generation,
            event,
        });
    }

    /// What a rank says to a command, at once.
    fn answer(&mut self, seat: Seat, generation: Generation, command: CoordinatorCommand) {
        let event = match command {
            CoordinatorCommand::LoadVerifier => RankEvent::VerifierReady { contract: contract() },
            CoordinatorCommand::LoadDraft { load, .. } => RankEvent::DraftReady {
                load,
                step: Step::default(),
                state: state(Step::default()),
            },
            CoordinatorCommand::FormTeam { epoch, .. } => RankEvent::GroupReady { epoch },
            CoordinatorCommand::FormGroup { epoch, owners, .. } => {
                self.owners = owners;
                RankEvent::GroupReady { epoch }
            }
            CoordinatorCommand::Begin { epoch, step, lanes } => RankEvent::Staged {
                epoch,
                step,
                gradient: state(step),
                finite: true,
                state: state(step),
                lanes: lanes
                    .into_iter()
                    .filter(|&lane| self.owners.get(usize::from(lane)) == Some(&seat.index))
                    .map(metrics)
                    .collect(),
            },
            CoordinatorCommand::Commit { step, .. } => RankEvent::Applied {
                step: step.next(),
                state: state(step.next()),
            },
            CoordinatorCommand::Checkpoint { .. } => RankEvent::Checkpointed {
                step: Step(self.shape.steps),
                folder: "checkpoints/step".into(),
            },
            CoordinatorCommand::Quit => {
                self.events.push_back(Event::Lost {
                    seat,
                    generation,
                    cause: "it left".to_owned(),
                    log_tail: String::new(),
                });
                return;
            }
            _ => return,
        };
        self.say(seat, generation, event);
    }
}

fn metrics(lane: u16) -> LaneMetrics {
    LaneMetrics {
        lane,
        finite: true,
        loss: 2.0,
        ttt: vec![StepMetrics::default(); TTT_STEPS],
        tokens: u64::from(TOKENS),
        trained_tokens: u64::from(TOKENS) / 2,
        compute_ms: 1,
    }
}

/// Digest of the weights at a step.
fn state(step: Step) -> Digest {
    Digest::of(&step.0.to_le_bytes())
}

fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![2, 16, 29],
        hidden_size: 4096,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

fn settings(shape: Shape) -> Settings {
    let restarts = RestartPolicy {
        max_restarts: 0,
        window_ms: 60_000,
        backoff_initial_ms: 10,
        backoff_max_ms: 100,
        then: WhenExhausted::Stop,
    };
    // Nobody is late: time passes only while nothing happens.
    let patience_ms = u64::MAX / 1_000_000;
    Settings {
        lanes: shape.drafts,
        pipeline: 1,
        tensor: 1,
        hosts: BTreeMap::new(),
        host_timeout_ms: patience_ms,
        seats: (0..shape.verifiers)
            .map(Seat::verifier)
            .chain((0..shape.drafts).map(Seat::draft))
            .collect(),
        open: false,
        contract: contract(),
        recipe: Digest::of(b"recipe"),
        sums: SumMode::Exact,
        slice_sums: SumMode::Exact,
        tokens_per_row: TOKENS,
        passes: 1,
        step_limit: None,
        prefetch_steps: PREFETCH_STEPS,
        evaluate_every_steps: 0,
        max_new_tokens: 8,
        held_out_rows: 1,
        checkpoint_every_steps: 0,
        learning_rate: LearningRate {
            peak: 1e-4,
            warmup_ratio: 0.1,
            fall: Fall::Linear,
        },
        suspect_after_ms: patience_ms,
        dead_after_ms: patience_ms,
        attach_timeout_ms: patience_ms,
        load_timeout_ms: patience_ms,
        step_timeout_ms: patience_ms,
        leave_timeout_ms: patience_ms,
        form_timeout_ms: patience_ms,
        team_timeout_ms: patience_ms,
        broadcasts_state: false,
        verifier_restarts: restarts,
        draft_restarts: restarts,
    }
}
