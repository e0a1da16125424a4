//! A cluster whose verifiers do what a test says.

use eaglet_runtime::control::{Activity, Beat, BulkAddress, CoordinatorCommand, RankEvent, Turn};
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat, Unit};
use eaglet_runtime::samples::Location;

use super::super::setup::settings;
use crate::engine::{Command, Engine, Event, Outcome, SeatChange, Settings};
use crate::journal::{Record, SampleSource};

/// A row that was given out.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Given {
    pub(super) members: Vec<u16>,
    pub(super) row: RowId,
    pub(super) lease: u64,
    pub(super) turn: Turn,
    pub(super) units: Vec<Unit>,
}

/// Ranks of which a test decides what they say; those of drafts load for ever.
pub(super) struct Cluster {
    pub(super) engine: Engine,
    pub(super) now_ms: u64,
    pub(super) records: Vec<Record>,
    pub(super) told: Vec<(Seat, CoordinatorCommand)>,
    pub(super) given: Vec<Given>,
    pub(super) killed: Vec<Seat>,
    pub(super) notices: Vec<String>,
    pub(super) outcome: Option<Outcome>,
}

pub(super) fn sharded(replicas: u16) -> Settings {
    let mut settings = settings();
    (settings.pipeline, settings.tensor) = (2, 2);
    settings.seats = (0..3)
        .map(Seat::draft)
        .chain((0..4 * replicas).map(Seat::verifier))
        .collect();
    settings
}

impl Cluster {
    pub(super) fn new(replicas: u16) -> Self {
        let settings = sharded(replicas);
        let seats = settings.seats.clone();
        let mut cluster = Self {
            engine: Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing"),
            now_ms: 0,
            records: Vec::new(),
            told: Vec::new(),
            given: Vec::new(),
            killed: Vec::new(),
            notices: Vec::new(),
            outcome: None,
        };
        let commands = cluster.engine.launch();
        cluster.obey(commands);
        for line in 1..40 {
            let source = SampleSource {
                file: "chats.jsonl".to_owned(),
                line,
                id: None,
            };
            cluster.feed(Event::SampleAccepted {
                source,
                location: Location { offset: line, len: 1 },
                tokens: 50,
                trained_tokens: 20,
            });
        }
        cluster.feed(Event::Prepared {
            vocabulary: vec![1],
            coverage: 1.0,
            held_out: Vec::new(),
        });
        for seat in seats {
            cluster.arrive(seat, Generation(0));
        }
        cluster
    }

    pub(super) fn feed(&mut self, event: Event) {
        self.now_ms += 10;
        let commands = self.engine.handle(self.now_ms, event);
        self.obey(commands);
    }

    pub(super) fn obey(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Append { record, .. } => self.records.push(record),
                Command::Send { seat, command, .. } => self.told.push((seat, command)),
                Command::Lease {
                    members,
                    row,
                    lease,
                    turn,
                    documents,
                    ..
                } => self.given.push(Given {
                    members: members.iter().map(|(seat, _)| seat.index).collect(),
                    row,
                    lease,
                    turn,
                    units: documents.into_iter().map(|(unit, _)| unit).collect(),
                }),
                Command::Kill { seat, .. } => self.killed.push(seat),
                Command::Notice(notice) => self.notices.push(notice.text),
                Command::Finish(outcome) => self.outcome = Some(outcome),
                _ => {}
            }
        }
    }

    /// A process attaches, and a verifier loads its shard.
    pub(super) fn arrive(&mut self, seat: Seat, generation: Generation) {
        self.feed(Event::Attached {
            seat,
            generation,
            pid: 1,
            bulk: BulkAddress::default(),
        });
        if seat.role == Role::Verifier {
            let contract = settings().contract;
            self.say(seat.index, generation.0, RankEvent::VerifierReady { contract });
        }
    }

    pub(super) fn say(&mut self, index: u16, generation: u32, event: RankEvent) {
        self.feed(Event::Rank {
            seat: Seat::verifier(index),
            generation: Generation(generation),
            event,
        });
    }

    /// Beats of all drafts and of verifiers, which do what a test says.
    pub(super) fn beat(&mut self, activities: &[(u16, Activity, u64)]) {
        let drafts = (0..3).map(|index| (Seat::draft(index), Activity::Loading, 0));
        let verifiers = activities
            .iter()
            .map(|&(index, activity, age_ms)| (Seat::verifier(index), activity, age_ms));
        for (seat, activity, activity_age_ms) in drafts.chain(verifiers).collect::<Vec<_>>() {
            let beat = Beat {
                sequence: 0,
                activity,
                activity_age_ms,
                rss_bytes: 0,
                busy_ms: 0,
                waiting_ms: 0,
                idle_ms: 0,
            };
            self.feed(Event::Rank {
                seat,
                generation: Generation(0),
                event: RankEvent::Beat(beat),
            });
        }
    }

    pub(super) fn join(&mut self, members: &[(u16, u32)], epoch: Epoch) {
        for &(index, generation) in members {
            self.say(index, generation, RankEvent::GroupReady { epoch });
        }
    }

    pub(super) fn lose(&mut self, index: u16, generation: u32) {
        self.feed(Event::Lost {
            seat: Seat::verifier(index),
            generation: Generation(generation),
            cause: "killed".to_owned(),
            log_tail: String::new(),
        });
    }

    pub(super) fn answer(&mut self, change: SeatChange) -> Result<String, String> {
        self.now_ms += 10;
        let commands = self
            .engine
            .handle(self.now_ms, Event::ChangeSeat { ticket: 1, change });
        let answer = commands.iter().find_map(|command| match command {
            Command::Answer { answer, .. } => Some(answer.clone()),
            _ => None,
        });
        self.obey(commands);
        answer.expect("every request is answered")
    }

    /// Who was told to form a team, and with which epoch and generations.
    pub(super) fn invited(&self, epoch: Epoch) -> Vec<(u16, Vec<(u16, u32)>)> {
        let told = self.told.iter().filter_map(|(seat, command)| match command {
            CoordinatorCommand::FormTeam { epoch: told, members } if *told == epoch => {
                let members = members.iter().map(|member| (member.seat, member.generation.0));
                Some((seat.index, members.collect()))
            }
            _ => None,
        });
        told.collect()
    }

    pub(super) fn abandoned(&self, epoch: Epoch) -> Vec<u16> {
        let told = self.told.iter().filter_map(|(seat, command)| match command {
            CoordinatorCommand::Abandon { epoch: told } if *told == epoch && seat.role == Role::Verifier => {
                Some(seat.index)
            }
            _ => None,
        });
        told.collect()
    }
}
