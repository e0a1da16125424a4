//! Held-out prompts are answered in parts between rows, so that training starts at once and goes on.

use std::collections::VecDeque;

use eaglet_runtime::control::{Acceptance, BulkAddress, CoordinatorCommand, LaneMetrics, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Generation, Role, RowId, Seat, Step};
use eaglet_runtime::samples::Location;

use super::setup::settings;
use crate::engine::{Command, Engine, Event, Outcome, Settings};
use crate::journal::SampleSource;

const PROMPTS: usize = 20;
const ROWS: u64 = 70;

/// One draft rank that does at once what it is told, and verifiers that do their next piece of work when a test says so.
struct Cluster {
    engine: Engine,
    events: VecDeque<Event>,
    /// What verifiers were given, in order: the row, its lease, the verifier, and how many prompts.
    given: Vec<(RowId, u64, Seat, usize)>,
    /// Steps are staged as soon as they begin.
    trains: bool,
    evaluated: u32,
    finished: Option<Outcome>,
    now_ms: u64,
}

impl Cluster {
    fn new(verifiers: u16, trains: bool) -> Self {
        let settings = Settings {
            lanes: 1,
            seats: [Seat::draft(0)]
                .into_iter()
                .chain((0..verifiers).map(Seat::verifier))
                .collect(),
            passes: 1,
            // Nobody beats here.
            suspect_after_ms: 1 << 40,
            dead_after_ms: 1 << 40,
            ..settings()
        };
        let mut cluster = Self {
            engine: Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing"),
            events: VecDeque::new(),
            given: Vec::new(),
            trains,
            evaluated: 0,
            finished: None,
            now_ms: 0,
        };
        let commands = cluster.engine.launch();
        cluster.obey(commands);
        for line in 1..=ROWS {
            cluster.events.push_back(Event::SampleAccepted {
                source: SampleSource {
                    file: "chats.jsonl".to_owned(),
                    line,
                    id: None,
                },
                location: Location { offset: line, len: 1 },
                tokens: 100,
                trained_tokens: 20,
            });
        }
        cluster.events.push_back(Event::Prepared {
            vocabulary: vec![1],
            coverage: 1.0,
            held_out: vec![vec![1; 10]; PROMPTS],
        });
        cluster.settle();
        cluster
    }

    fn settle(&mut self) {
        while let Some(event) = self.events.pop_front() {
            self.now_ms += 1;
            let commands = self.engine.handle(self.now_ms, event);
            self.obey(commands);
        }
    }

    fn say(&mut self, seat: Seat, event: RankEvent) {
        self.events.push_back(Event::Rank {
            seat,
            generation: Generation(0),
            event,
        });
    }

    fn obey(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Spawn { seat, generation } => self.events.push_back(Event::Attached {
                    seat,
                    generation,
                    pid: 1,
                    bulk: BulkAddress::default(),
                }),
                Command::Lease {
                    members, row, lease, ..
                } => self.given.push((row, lease, members[0].0, 0)),
                Command::Send { seat, command, .. } => self.told(seat, command),
                Command::Evaluated { .. } => self.evaluated += 1,
                Command::Finish(outcome) => self.finished = Some(outcome),
                _ => {}
            }
        }
    }

    fn told(&mut self, seat: Seat, command: CoordinatorCommand) {
        let state = |step: Step| Digest::of(&step.0.to_le_bytes());
        let event = match command {
            CoordinatorCommand::LoadVerifier => RankEvent::VerifierReady {
                contract: settings().contract,
            },
            CoordinatorCommand::LoadDraft { load, .. } => RankEvent::DraftReady {
                load,
                step: Step(0),
                state: state(Step(0)),
            },
            CoordinatorCommand::FormTeam { epoch, .. } | CoordinatorCommand::FormGroup { epoch, .. } => {
                RankEvent::GroupReady { epoch }
            }
            CoordinatorCommand::ExtractHeldOut(request) => {
                self.given
                    .push((request.row, request.lease, seat, request.prompts.len()));
                return;
            }
            CoordinatorCommand::Begin { epoch, step, .. } if self.trains => RankEvent::Staged {
                epoch,
                step,
                gradient: Digest::default(),
                finite: true,
                state: state(step),
                lanes: vec![LaneMetrics {
                    finite: true,
                    tokens: 100,
                    ..LaneMetrics::default()
                }],
            },
            CoordinatorCommand::Commit { step, .. } => RankEvent::Applied {
                step: step.next(),
                state: state(step.next()),
            },
            CoordinatorCommand::Checkpoint { .. } => RankEvent::Checkpointed {
                step: self.engine.committed(),
                folder: "checkpoints/step".into(),
            },
            CoordinatorCommand::Evaluate => RankEvent::Evaluated {
                step: self.engine.committed(),
                acceptance: Acceptance::default(),
            },
            CoordinatorCommand::Quit => {
                self.events.push_back(Event::Lost {
                    seat,
                    generation: Generation(0),
                    cause: "it left".to_owned(),
                    log_tail: String::new(),
                });
                return;
            }
            _ => return,
        };
        self.say(seat, event);
    }

    /// The first `count` pieces of work that were given are done, each in the order in which it was given.
    fn do_work(&mut self, done: &mut usize, count: usize) {
        while *done < count {
            let &(row, lease, verifier, _) = self.given.get(*done).expect("there is work");
            *done += 1;
            let tokens = 100;
            self.say(verifier, RankEvent::Extracted { row, lease, tokens });
            self.say(Seat::draft(0), RankEvent::Received { row, lease });
            self.settle();
        }
    }
}

fn is_part(row: RowId) -> bool {
    matches!(row, RowId::HeldOut { .. })
}

/// Where the verifier is the bottleneck: parts come now and then, and all prompts are answered once.
#[test]
fn held_out_prompts_are_answered_between_rows() {
    let mut cluster = Cluster::new(1, true);
    let mut done = 0;
    while cluster.finished.is_none() {
        assert!(
            done < cluster.given.len(),
            "the run stands still after {done} rows"
        );
        let next = done + 1;
        cluster.do_work(&mut done, next);
        for _ in 0..30 {
            cluster.events.push_back(Event::Tick);
            cluster.settle();
        }
    }
    assert!(
        matches!(cluster.finished, Some(Outcome::Completed { .. })),
        "{:?}",
        cluster.finished
    );
    let rows: Vec<bool> = cluster.given.iter().map(|&(row, ..)| is_part(row)).collect();
    assert_eq!(rows.iter().filter(|&&part| !part).count() as u64, ROWS);
    let places: Vec<usize> = (0..rows.len()).filter(|&place| rows[place]).collect();
    assert_eq!(places.len(), 3, "{places:?}");
    assert!(places[0] >= 16, "training starts at once: {places:?}");
    assert!(places.windows(2).all(|pair| pair[1] - pair[0] > 16), "{places:?}");
    assert!(places[2] < ROWS as usize, "none waits for the end: {places:?}");
    let prompts: Vec<usize> = cluster
        .given
        .iter()
        .map(|&(.., prompts)| prompts)
        .filter(|&n| n > 0)
        .collect();
    assert_eq!(prompts, [8, 8, 4]);
    assert!(
        cluster.evaluated > 1,
        "acceptance is measured before the end, too"
    );
}

/// Where the draft is the bottleneck, verifiers answer prompts while they have nothing better to do.
#[test]
fn a_verifier_without_rows_answers_held_out_prompts() {
    let mut cluster = Cluster::new(1, false);
    let ahead = settings().prefetch_steps as usize;
    let mut done = 0;
    cluster.do_work(&mut done, ahead);
    let given: Vec<bool> = cluster.given.iter().map(|&(row, ..)| is_part(row)).collect();
    assert_eq!(given, [false, false, false, true], "one part at a time");
    cluster.do_work(&mut done, ahead + 3);
    assert_eq!(cluster.given.len(), ahead + 3, "all of them, and no more");
    // Of several verifiers one is left to rows.
    let cluster = Cluster::new(3, false);
    let parts: Vec<Seat> = cluster
        .given
        .iter()
        .filter(|&&(row, ..)| is_part(row))
        .map(|&(_, _, verifier, _)| verifier)
        .collect();
    assert_eq!(
        (parts.len(), parts.iter().all(|seat| seat.role == Role::Verifier)),
        (2, true)
    );
}
