//! LANES: who computes what as draft ranks come and go.

use eaglet_runtime::control::{BulkAddress, CoordinatorCommand, DraftOrigin, Handover, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};
use eaglet_runtime::samples::Location;

use super::setup::settings;
use crate::engine::{Command, Engine, Event, Outcome, SeatChange, Settings};
use crate::journal::{Record, SampleSource};

/// Ranks that do at once what they are told, and no verifier: the group forms, and no step ever begins.
pub(super) struct Group {
    pub(super) engine: Engine,
    pub(super) records: Vec<Record>,
    pub(super) owners: Vec<u16>,
    pub(super) members: Vec<u16>,
    pub(super) epoch: Epoch,
    pub(super) now_ms: u64,
    /// Whether members of an epoch say that they can reach each other.
    pub(super) meets: bool,
    /// Whose state goes to whom in the epoch.
    pub(super) handover: Option<Handover>,
    /// Where states were to come from.
    pub(super) origins: Vec<(Seat, DraftOrigin)>,
    /// What was told besides, and to whom.
    pub(super) told: Vec<(Seat, CoordinatorCommand)>,
    pub(super) killed: Vec<Seat>,
    pub(super) spawned: Vec<(Seat, Generation)>,
    pub(super) notices: Vec<String>,
    pub(super) outcome: Option<Outcome>,
}

impl Group {
    pub(super) fn new() -> Self {
        Self::with(settings())
    }

    pub(super) fn with(settings: Settings) -> Self {
        let mut group = Self {
            engine: Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing"),
            records: Vec::new(),
            owners: Vec::new(),
            members: Vec::new(),
            epoch: Epoch::default(),
            now_ms: 0,
            meets: true,
            handover: None,
            origins: Vec::new(),
            told: Vec::new(),
            killed: Vec::new(),
            spawned: Vec::new(),
            notices: Vec::new(),
            outcome: None,
        };
        let commands = group.engine.launch();
        group.obey(commands);
        for line in 1..40 {
            let source = SampleSource {
                file: "chats.jsonl".to_owned(),
                line,
                id: None,
            };
            group.feed(Event::SampleAccepted {
                source,
                location: Location { offset: line, len: 1 },
                tokens: 50,
                trained_tokens: 20,
            });
        }
        group.feed(Event::Prepared {
            vocabulary: vec![1],
            coverage: 1.0,
            held_out: Vec::new(),
        });
        group
    }

    pub(super) fn feed(&mut self, event: Event) {
        self.now_ms += 10;
        let commands = self.engine.handle(self.now_ms, event);
        self.obey(commands);
    }

    pub(super) fn say(&mut self, seat: Seat, generation: Generation, event: RankEvent) {
        self.feed(Event::Rank {
            seat,
            generation,
            event,
        });
    }

    fn obey(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Append { record, .. } => self.records.push(record),
                Command::Spawn { seat, generation } if seat.role == Role::Draft => {
                    self.spawned.push((seat, generation));
                    self.feed(Event::Attached {
                        seat,
                        generation,
                        pid: 1,
                        bulk: BulkAddress::default(),
                    });
                }
                Command::Send {
                    seat,
                    generation,
                    command,
                } => match command {
                    CoordinatorCommand::LoadDraft { load, origin, .. } => {
                        self.origins.push((seat, origin));
                        let (step, state) = (Step(0), Digest::of(b"initial"));
                        self.say(seat, generation, RankEvent::DraftReady { load, step, state });
                    }
                    CoordinatorCommand::FormGroup {
                        epoch,
                        members,
                        owners,
                        handover,
                    } => {
                        self.members = members.iter().map(|member| member.seat).collect();
                        self.owners = owners;
                        self.epoch = epoch;
                        self.handover = handover;
                        if self.meets {
                            let handover = self.handover.as_ref();
                            let taken = handover.filter(|handover| handover.receivers.contains(&seat.index));
                            let event = match taken {
                                Some(&Handover { step, state, .. }) => {
                                    RankEvent::StateTaken { epoch, step, state }
                                }
                                None => RankEvent::GroupReady { epoch },
                            };
                            self.say(seat, generation, event);
                        }
                    }
                    CoordinatorCommand::Quit => self.lose(seat, generation),
                    command => self.told.push((seat, command)),
                },
                Command::Kill { seat, .. } => self.killed.push(seat),
                Command::Notice(notice) => self.notices.push(notice.text),
                Command::Finish(outcome) => self.outcome = Some(outcome),
                _ => {}
            }
        }
    }

    pub(super) fn lose(&mut self, seat: Seat, generation: Generation) {
        self.feed(Event::Lost {
            seat,
            generation,
            cause: "killed".to_owned(),
            log_tail: String::new(),
        });
    }

    fn change(&mut self, change: SeatChange) {
        self.feed(Event::ChangeSeat { ticket: 7, change });
        // Membership changes at step boundaries, of which a tick finds one.
        self.feed(Event::Tick);
    }
}

#[test]
fn lanes_are_at_home_until_their_seat_leaves_and_even_out_when_one_comes() {
    let mut group = Group::new();
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[0, 1, 2][..], &[0, 1, 2][..])
    );
    group.change(SeatChange::Remove { seat: Seat::draft(1) });
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[0, 0, 2][..], &[0, 2][..])
    );
    group.change(SeatChange::Remove { seat: Seat::draft(0) });
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[2, 2, 2][..], &[2][..])
    );
    group.change(SeatChange::Restart { seat: Seat::draft(0) });
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[0, 2, 2][..], &[0, 2][..])
    );
    group.change(SeatChange::Add {
        role: Role::Draft,
        threads: 1,
    });
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[0, 3, 2][..], &[0, 2, 3][..])
    );
    // One more than there are lanes is a spare, and takes over from whoever is lost.
    group.change(SeatChange::Add {
        role: Role::Draft,
        threads: 1,
    });
    assert_eq!(
        (&group.owners[..], &group.members[..]),
        (&[0, 3, 2][..], &[0, 2, 3, 4][..])
    );
    let before = group.epoch;
    group.lose(Seat::draft(3), Generation(0));
    assert_eq!(group.owners, [0, 4, 2]);
    assert!(group.epoch > before, "FENCE: the old epoch is over");
    let changes: Vec<&Record> = group
        .records
        .iter()
        .filter(|record| matches!(record, Record::SeatAdded { .. } | Record::SeatRemoved { .. }))
        .collect();
    assert_eq!(changes.len(), 5, "{changes:?}");

    // A later launch has the same seats.
    let mut replayed = Engine::new(settings(), &group.records, 0).expect("the journal is sound");
    replayed.handle(0, Event::Tick);
    let seats: Vec<Seat> = replayed
        .view(0)
        .seats
        .iter()
        .filter(|seat| seat.seat.role == Role::Draft && seat.status != "gone")
        .map(|seat| seat.seat)
        .collect();
    assert_eq!(seats, [0, 2, 3, 4].map(Seat::draft));
}

#[test]
fn the_last_rank_of_a_role_is_not_removed() {
    let mut group = Group::new();
    for draft in [1, 2] {
        group.change(SeatChange::Remove {
            seat: Seat::draft(draft),
        });
    }
    for seat in [Seat::verifier(0), Seat::verifier(9), Seat::draft(0)] {
        let ticket = 1;
        let commands = group.engine.handle(
            1_000,
            Event::ChangeSeat {
                ticket,
                change: SeatChange::Remove { seat },
            },
        );
        let refused = |command: &Command| {
            matches!(command, Command::Answer { ticket: 1, answer: Err(why) }
            if why.contains("is the only ") || why.contains("there is no seat verifier-9"))
        };
        assert!(commands.iter().any(refused), "{commands:?}");
    }
}
