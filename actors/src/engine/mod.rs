//! The rules of a run, as a pure state machine: events in, commands out.
//!
//! The engine has no clock, no I/O, no randomness and no `async`: time comes with each event, and everything it wants
//! done goes out as a [`Command`]. So every rule about seats, epochs, leases and votes can be driven by a test.
//!
//! Invariants, each held after every event:
//! - LEDGER: `intake = pending + leased + extracted + trained + quarantined` ([`ledger`]).
//! - ONCE: a unit's effect is committed exactly once; "trained" is written in the record that commits the step.
//! - FENCE: what an older epoch or generation says has no effect.
//! - ORDER: the batch of a step depends only on the journal ([`Record::Planned`] precedes its use).
//! - SAME: all replicas hold the same digest at the same step, or the step is not committed.
//! - COUNTED: what is kept counted beside seats, teams and rows is what a walk over all of them finds (`audit`), so that an
//!   event costs the same however many there are.
//! - TEAM: the shards of a verifier are given the same rows in the same order, while all of them are together (`teams`).
//!
//! Files: `seats` who sits where, `census` how many how, `losses` what is done about a lost rank, `repair` about a broken
//! link, `membership` who comes and goes on request, `teams` which ranks are one verifier, `lanes` who computes what,
//! `group` when the draft replicas form an epoch, `rows` where rows are, `router` which goes where, `steps` begin, stage,
//! commit, `plan` and `growth` what is trained, [`ledger`] the account, `replay` the state that a journal implies.

mod audit;
mod census;
mod command;
mod group;
mod growth;
mod hosts;
mod lanes;
pub mod ledger;
mod losses;
mod membership;
mod plan;
mod repair;
mod replay;
mod router;
mod rows;
mod seats;
mod settings;
mod steps;
mod teams;
mod view;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;

pub use command::{Command, Event, Notice, Outcome, SeatChange, StepReport, StoredSample};
use eaglet_runtime::control::{Acceptance, Handover, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, SampleSeq, Seat, Step};
use eaglet_runtime::samples::Location;
pub use ledger::LedgerCounts;
pub use replay::ReplayError;
pub use settings::{Fall, LearningRate, Length, Pace, RestartPolicy, Settings, Turn, WhenExhausted};
pub use view::{EngineView, SeatView};

use self::hosts::Hosts;
use self::ledger::Ledger;
use self::plan::Plans;
use self::repair::Rift;
use self::rows::Rows;
use self::seats::Seats;
use self::steps::{Staged, StepPhase};
use self::teams::Teams;
use crate::journal::Record;

/// How far a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Samples are being read; ranks start.
    Preparing,
    /// Steps are being trained, or more samples waited for.
    Training,
    /// The last checkpoint is being written.
    Closing {
        /// Whether the run was stopped on request.
        drained: bool,
    },
    /// Ranks are told to leave.
    Leaving,
    /// [`Command::Finish`] was given.
    Finished,
}

/// A checkpoint that the journal knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownCheckpoint {
    /// Its step.
    pub step: Step,
    /// Digest of its weights and moments.
    pub state: Digest,
    /// Its folder.
    pub folder: PathBuf,
}

/// What is kept of a sample.
#[derive(Clone, Copy, Debug)]
struct SampleFact {
    location: Location,
    tokens: u32,
    /// Index of its file in `files`.
    file: u32,
    line: u64,
}

/// The state machine of one run.
pub struct Engine {
    settings: Settings,
    now_ms: u64,
    phase: Phase,
    outcome: Option<Outcome>,
    ledger: Ledger,
    samples: BTreeMap<SampleSeq, SampleFact>,
    /// Names of the files that samples came from.
    files: Vec<String>,
    /// Files that were added to the live run.
    added_sources: Vec<PathBuf>,
    /// Samples that are quarantined in some pass or all, each with its file and line.
    quarantined: BTreeMap<SampleSeq, (u32, u64)>,
    /// Whether more samples may come after all are trained.
    open: bool,
    next_sample: SampleSeq,
    vocabulary: Vec<u32>,
    held_out: Vec<Vec<u32>>,
    prepared: bool,
    total_steps: u64,
    pace: Pace,
    /// Learning rate of the last committed step.
    last_rate: f64,
    plans: Plans,
    committed: Step,
    /// Of committed steps that a checkpoint may have to be led over again.
    history: BTreeMap<Step, CommittedStep>,
    checkpoints: Vec<KnownCheckpoint>,
    seats: Seats,
    hosts: Hosts,
    teams: Teams,
    epoch: Epoch,
    formed: bool,
    /// Whether a group was formed in this launch.
    was_filled: bool,
    /// Draft seats of the present epoch, from their invitation on; ascending.
    members: Vec<u16>,
    forming_since_ms: u64,
    /// The draft seat that computes each lane, `[lanes]`.
    owners: Vec<Option<u16>>,
    rows: Rows,
    /// Leases given so far in this launch.
    leases: u64,
    step_phase: StepPhase,
    evaluated: Option<(Step, Acceptance)>,
    /// Rows that were given out since the last part of the held-out prompts.
    rows_since_part: u32,
    gradient_disputes: u32,
    /// Steps in a row of which the verifier refused every sample.
    refused_steps: u32,
    /// What the members of an epoch told of each other that they cannot do any more.
    rift: Option<Rift>,
    /// Epochs in a row that broke over NCCL, without a step in between.
    collective_faults: u32,
    /// Whether the id of the present epoch was passed on. An older one is never needed again, so no record holds it.
    has_id: bool,
    /// Whose state goes to whom in the present epoch.
    handover: Option<Handover>,
    extracted_tokens: u64,
    launch: u32,
    leaving_since_ms: u64,
    commands: Vec<Command>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct CommittedStep {
    gradient: Digest,
    state: Digest,
    learning_rate: f64,
}

impl Engine {
    /// An engine in the state that a journal implies, with nobody seated yet.
    ///
    /// # Errors
    /// If the records contradict each other or these settings.
    pub fn new(settings: Settings, records: &[Record], now_ms: u64) -> Result<Self, ReplayError> {
        let seats = Seats::new(&settings, now_ms);
        let hosts = Hosts::new(&settings, now_ms);
        let (open, lanes) = (settings.open, usize::from(settings.lanes));
        let mut engine = Self {
            settings,
            now_ms,
            phase: Phase::Preparing,
            outcome: None,
            ledger: Ledger::default(),
            samples: BTreeMap::new(),
            files: Vec::new(),
            added_sources: Vec::new(),
            quarantined: BTreeMap::new(),
            open,
            next_sample: SampleSeq::default(),
            vocabulary: Vec::new(),
            held_out: Vec::new(),
            prepared: false,
            total_steps: 0,
            pace: Pace::default(),
            last_rate: 0.0,
            plans: Plans::default(),
            committed: Step::default(),
            history: BTreeMap::new(),
            checkpoints: Vec::new(),
            seats,
            hosts,
            teams: Teams::default(),
            epoch: Epoch::default(),
            formed: false,
            was_filled: false,
            members: Vec::new(),
            forming_since_ms: now_ms,
            owners: vec![None; lanes],
            rows: Rows::default(),
            leases: 0,
            step_phase: StepPhase::Idle,
            evaluated: None,
            rows_since_part: 0,
            gradient_disputes: 0,
            refused_steps: 0,
            rift: None,
            collective_faults: 0,
            has_id: false,
            handover: None,
            extracted_tokens: 0,
            launch: 0,
            leaving_since_ms: now_ms,
            commands: Vec::new(),
        };
        engine.replay(records)?;
        Ok(engine)
    }

    /// Takes an event at a time that never goes backwards; returns what to do, in order.
    pub fn handle(&mut self, now_ms: u64, event: Event) -> Vec<Command> {
        self.now_ms = self.now_ms.max(now_ms);
        if self.phase != Phase::Finished {
            // Most events are beats, and what they make possible the next tick sees.
            let is_beat = matches!(
                event,
                Event::Rank {
                    event: RankEvent::Beat(_),
                    ..
                }
            );
            self.take(event);
            if !is_beat {
                self.advance();
            }
        }
        debug_assert!(
            self.ledger.counts().adds_up(),
            "LEDGER: {:?}",
            self.ledger.counts()
        );
        #[cfg(test)]
        assert_eq!(self.audit(), Ok(()));
        std::mem::take(&mut self.commands)
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::SampleAccepted {
                source,
                location,
                tokens,
                trained_tokens,
            } => {
                self.accept_sample(source, location, tokens, trained_tokens);
            }
            Event::SampleRefused { source, reason } => self.refuse_sample(source, reason),
            Event::Prepared {
                vocabulary,
                coverage,
                held_out,
            } => {
                self.finish_preparing(vocabulary, coverage, held_out);
            }
            Event::Grown => self.grow(),
            Event::SourceAdded { file } => self.add_source(file),
            Event::IntakeClosed => self.close_intake(),
            Event::SampleRetried { sample, stored } => self.retry_sample(sample, stored),
            Event::ChangeSeat { ticket, change } => self.change_seat(ticket, change),
            Event::Attached {
                seat,
                generation,
                pid,
                bulk,
            } => {
                self.seats.attached(seat, generation, pid, bulk, self.now_ms);
                self.welcome(seat, generation);
            }
            Event::Rank {
                seat,
                generation,
                event,
            } => {
                // FENCE: only the present occupant of a seat is heard.
                if self.seats.is_current(seat, generation) {
                    self.rank_said(seat, generation, event);
                }
            }
            Event::Lost {
                seat,
                generation,
                cause,
                log_tail,
            } => {
                self.rank_lost(seat, generation, &cause, &log_tail);
            }
            Event::HostJoined { host } => self.host_joined(&host),
            Event::HostLost { host, cause } => self.host_lost(&host, &cause),
            Event::Broken { report } => self.fail(report),
            Event::Tick => {
                self.tick();
                self.close_absent_hosts();
                self.mend_group();
                self.mend_teams();
                self.expire_rows();
            }
            Event::Drain => {
                if matches!(
                    self.phase,
                    Phase::Preparing | Phase::Training | Phase::Closing { drained: false }
                ) {
                    self.notice("draining: the step in flight is finished and a checkpoint written");
                    if matches!(self.step_phase, StepPhase::Evaluating { .. }) {
                        // Nobody waits for its result any more.
                        self.step_phase = StepPhase::Idle;
                    }
                    self.phase = Phase::Closing { drained: true };
                }
            }
        }
    }

    /// Everything that has become possible.
    fn advance(&mut self) {
        self.keep_roles();
        self.respawn();
        self.plan_ahead();
        self.advance_group();
        self.advance_teams();
        self.route();
        self.advance_step();
        self.leave();
    }

    fn rank_said(&mut self, seat: Seat, generation: Generation, event: RankEvent) {
        match event {
            RankEvent::Attach(_) => {}
            RankEvent::Beat(beat) => {
                self.seats.beat(seat, beat, self.now_ms);
                self.send(
                    seat,
                    eaglet_runtime::control::CoordinatorCommand::BeatAck {
                        sequence: beat.sequence,
                    },
                );
            }
            RankEvent::VerifierReady { contract } => self.verifier_ready(seat, &contract),
            RankEvent::DraftReady { load, step, state } => self.draft_ready(seat, load, step, state),
            RankEvent::CollectiveId { epoch, id } => self.collective_id(seat, epoch, &id),
            RankEvent::CollectiveBroken { epoch, reason } => {
                self.collective_broken(seat, generation, epoch, &reason);
            }
            RankEvent::GroupReady { epoch } => self.group_ready(seat, epoch),
            RankEvent::StateTaken { epoch, step, state } => self.state_taken(seat, epoch, step, state),
            RankEvent::Extracted { row, lease, tokens } => self.row_extracted(seat, row, lease, tokens),
            RankEvent::NotSent {
                row,
                lease,
                seat: draft,
                generation: occupant,
                reason,
            } => {
                self.row_not_sent(seat, (row, lease), (draft, occupant), &reason);
            }
            RankEvent::BadSample {
                row,
                lease,
                unit,
                reason,
            } => self.bad_sample(seat, (row, lease), unit, &reason),
            RankEvent::Received { row, lease } => self.row_received(seat, generation, row, lease),
            RankEvent::StateNotSent {
                seat: draft,
                generation: occupant,
                reason,
            } => self.state_not_sent(seat, generation, (draft, occupant), &reason),
            RankEvent::LinkBroken {
                from,
                generation: sender,
                epoch,
                reason,
            } => {
                self.link_broken(seat, from, sender, epoch, &reason);
            }
            RankEvent::Staged {
                epoch,
                step,
                gradient,
                finite,
                state,
                lanes,
            } => {
                let vote = Staged {
                    gradient,
                    finite,
                    state,
                    lanes,
                };
                self.staged(seat, epoch, step, vote);
            }
            RankEvent::Applied { step, state } => self.applied(seat, step, state),
            RankEvent::Checkpointed { step, folder } => self.checkpointed(seat, step, folder),
            RankEvent::Evaluated { step, acceptance } => self.seat_evaluated(seat, step, &acceptance),
            RankEvent::Fault { reason, permanent } => {
                if permanent {
                    self.condemn(seat, reason);
                } else {
                    self.seats.fault(seat, reason.clone());
                    self.kill(seat, &reason);
                }
            }
            // Its process ends next, and that is what counts.
            RankEvent::Bye => {}
        }
    }

    fn send(&mut self, seat: Seat, command: eaglet_runtime::control::CoordinatorCommand) {
        let generation = self.seats.get(seat).generation;
        self.commands.push(Command::Send {
            seat,
            generation,
            command,
        });
    }

    fn kill(&mut self, seat: Seat, reason: &str) {
        let generation = self.seats.get(seat).generation;
        self.commands.push(Command::Kill {
            seat,
            generation,
            reason: reason.to_owned(),
        });
    }

    fn append(&mut self, record: Record, sync: bool) {
        self.commands.push(Command::Append { record, sync });
    }

    fn notice(&mut self, text: impl Into<String>) {
        self.commands.push(Command::Notice(Notice {
            warning: false,
            quiet: false,
            text: text.into(),
        }));
    }

    fn warn(&mut self, text: impl Into<String>) {
        // Reasons quote what stands in files: nothing of it may steer a terminal or break a line.
        let text = text
            .into()
            .replace(|c: char| c.is_control() && c != '\n', "\u{fffd}");
        self.commands.push(Command::Notice(Notice {
            warning: true,
            quiet: false,
            text,
        }));
    }

    /// As [`Self::warn`], for one of many.
    fn warn_quietly(&mut self, text: impl Into<String>) {
        self.warn(text);
        if let Some(Command::Notice(notice)) = self.commands.last_mut() {
            notice.quiet = true;
        }
    }

    /// Gives the run up; the first cause stands.
    fn fail(&mut self, report: String) {
        if self.outcome.is_none() {
            self.outcome = Some(Outcome::Failed { report });
        }
        if !matches!(self.phase, Phase::Leaving | Phase::Finished) {
            self.start_leaving();
        }
    }

    fn latest_checkpoint(&self) -> Option<&KnownCheckpoint> {
        self.checkpoints.last()
    }

    /// How far the run is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether intake was completed, now or by an earlier launch.
    pub fn is_prepared(&self) -> bool {
        self.prepared
    }

    /// Samples taken in so far, accepted or refused.
    pub fn samples_taken_in(&self) -> u64 {
        self.next_sample.0
    }
}
