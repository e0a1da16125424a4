//! The root actor: owns the engine and the journal, supervises one proxy per rank, carries out commands.
//!
//! CLUSTER-1: commands are carried out in the order the engine gave them; if a journal append fails, none behind it is.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use eaglet_runtime::control::{Acceptance, CoordinatorCommand, Extraction, OperatorReply, RankEvent};
use eaglet_runtime::ids::{Generation, RowId, Seat, Step, Unit};
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::samples::{Location, SampleStore, StoreError};
use ractor::{Actor, ActorId, ActorProcessingErr, ActorRef, RpcReplyPort, SupervisionEvent};
use tokio::sync::oneshot;

use super::gate::Registry;
use super::hosts::Hosts;
use super::intake::{IntakeItem, IntakeRequest};
use super::monitor::MonitorMessage;
use super::operator::{Reply, Tickets};
use super::proxy::{ProxyArguments, ProxyMessage, RankProxy};
use crate::config::ClusterConfig;
use crate::engine::{Command, Engine, Event, Notice, Outcome, Phase, SeatChange, StoredSample};
use crate::faults::{self, Point};
use crate::journal::{Journal, Record};

const TICK: Duration = Duration::from_millis(100);
/// Views are told of routine at most this often.
const VIEW_INTERVAL: Duration = Duration::from_millis(50);

/// The actor.
pub(super) struct Cluster;

/// What it reacts to.
pub(super) enum ClusterMessage {
    /// For the engine.
    Event(Event),
    /// For the engine; the reply comes when it has been acted upon.
    Tell(Event, RpcReplyPort<()>),
    /// Samples to store and to number; the reply is the back-pressure.
    Intake(Vec<IntakeItem>, RpcReplyPort<()>),
    /// A line for the user.
    Notice(Notice),
    /// An operator wants other ranks.
    ChangeSeat(SeatChange, Reply),
    /// An operator wants something read.
    Read(IntakeRequest),
    /// End at once.
    Stop,
}

/// What it is made from.
pub(super) struct ClusterArguments {
    pub(super) engine: Engine,
    pub(super) journal: Journal,
    pub(super) store: SampleStore,
    pub(super) hosts: Hosts,
    /// What ranks are told; it has the seats that were added to the live run.
    pub(super) config: ClusterConfig,
    pub(super) intake: std::sync::mpsc::Sender<IntakeRequest>,
    pub(super) registry: Registry,
    pub(super) monitor: ActorRef<MonitorMessage>,
    pub(super) finished: oneshot::Sender<Outcome>,
}

pub(super) struct ClusterState {
    arguments: ClusterArguments,
    finished: Option<oneshot::Sender<Outcome>>,
    started: Instant,
    /// When views were told of the engine last.
    viewed: Instant,
    proxies: HashMap<ActorId, (Seat, Generation)>,
    tickets: Tickets,
    broken: bool,
}

impl Actor for Cluster {
    type Msg = ClusterMessage;
    type State = ClusterState;
    type Arguments = ClusterArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ClusterMessage>,
        mut arguments: ClusterArguments,
    ) -> Result<ClusterState, ActorProcessingErr> {
        let (placeholder, _) = oneshot::channel();
        let finished = std::mem::replace(&mut arguments.finished, placeholder);
        let mut state = ClusterState {
            arguments,
            finished: Some(finished),
            started: Instant::now(),
            viewed: Instant::now(),
            proxies: HashMap::new(),
            tickets: Tickets::default(),
            broken: false,
        };
        let commands = state.arguments.engine.launch();
        state.carry_out(&myself, commands).await;
        // Fires until the actor stops.
        let _ticker = myself.send_interval(TICK, || ClusterMessage::Event(Event::Tick));
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<ClusterMessage>,
        message: ClusterMessage,
        state: &mut ClusterState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ClusterMessage::Event(event) => state.feed(&myself, event).await,
            ClusterMessage::Tell(event, done) => {
                if state.takes_samples() {
                    state.feed(&myself, event).await;
                    // An intake that has gone away needs no reply.
                    let _ = done.send(());
                }
            }
            ClusterMessage::Notice(notice) => state.tell_people(notice),
            // An added rank computes on the CPU, and would round otherwise than its peers.
            ClusterMessage::ChangeSeat(SeatChange::Add { role, .. }, reply)
                if state.arguments.config.is_on_gpus(role) =>
            {
                let refused = format!(
                    "the {role} ranks of this run compute on GPUs, and a rank that is added would not; stop the run, add \
                     [[ranks]] with a device to cluster.toml and launch again"
                );
                // As above.
                let _ = reply.send(OperatorReply::Refused(refused));
            }
            ClusterMessage::ChangeSeat(change, reply) => {
                let ticket = state.tickets.open(reply);
                state.feed(&myself, Event::ChangeSeat { ticket, change }).await;
            }
            ClusterMessage::Read(request) => state.read(request),
            ClusterMessage::Intake(items, done) => {
                if state.takes_samples() {
                    state.intake(&myself, items).await;
                    // As above.
                    let _ = done.send(());
                }
            }
            ClusterMessage::Stop => {
                for proxy in state.arguments.registry.proxies().values() {
                    // A proxy that is gone has no process.
                    let _ = proxy.cast(ProxyMessage::Kill("stopped by the user".to_owned()));
                }
                // What the killed ranks' proxies report now is nobody's business.
                state.broken = true;
                state.finish(Outcome::Stopped);
            }
        }
        Ok(())
    }

    async fn handle_supervisor_evt(
        &self,
        myself: ActorRef<ClusterMessage>,
        event: SupervisionEvent,
        state: &mut ClusterState,
    ) -> Result<(), ActorProcessingErr> {
        let (id, cause) = match event {
            SupervisionEvent::ActorFailed(cell, error) => (cell.get_id(), error.to_string()),
            SupervisionEvent::ActorTerminated(cell, ..) => (cell.get_id(), "it left".to_owned()),
            _ => return Ok(()),
        };
        if let Some((seat, generation)) = state.proxies.remove(&id) {
            state.arguments.registry.proxies().remove(&(seat, generation));
            let log_tail = state.arguments.hosts.last_words(seat);
            // Supervision overtakes messages. Behind those that the proxy has passed on, so that the rank's last words,
            // such as what was wrong with it, are heard first.
            let _ = myself.cast(ClusterMessage::Event(Event::Lost {
                seat,
                generation,
                cause,
                log_tail,
            }));
        }
        Ok(())
    }
}

/// Whether an event is one of the many of each step, which need no look of their own: a look takes as long as there are
/// seats.
fn is_routine(event: &Event) -> bool {
    matches!(
        event,
        Event::Rank {
            event: RankEvent::Beat(_)
                | RankEvent::Extracted { .. }
                | RankEvent::Received { .. }
                | RankEvent::Staged { .. }
                | RankEvent::Applied { .. },
            ..
        }
    )
}

/// The step that a replica votes for.
fn vote(event: &Event) -> Option<Step> {
    match event {
        Event::Rank {
            event: RankEvent::Staged { step, .. },
            ..
        } => Some(*step),
        _ => None,
    }
}

/// Whether a command puts a committed step on disk.
fn commits(command: &Command) -> bool {
    matches!(
        command,
        Command::Append {
            record: Record::Committed { .. },
            ..
        }
    )
}

impl ClusterState {
    /// Whether the journal still grows. If it does not, the intake gets no reply, and promises nobody anything.
    fn takes_samples(&self) -> bool {
        !self.broken && self.arguments.engine.phase() != Phase::Finished
    }

    async fn feed(&mut self, myself: &ActorRef<ClusterMessage>, event: Event) {
        if self.broken {
            return;
        }
        let now_ms = self.started.elapsed().as_millis() as u64;
        let vote = vote(&event);
        let is_routine = is_routine(&event);
        let commands = self.arguments.engine.handle(now_ms, event);
        if vote.is_some() && !commands.iter().any(commits) {
            faults::pass(Point::Voted, vote);
        }
        self.carry_out(myself, commands).await;
        if is_routine && self.viewed.elapsed() < VIEW_INTERVAL {
            return;
        }
        self.viewed = Instant::now();
        let view = self.arguments.engine.view(now_ms);
        self.show(MonitorMessage::View(Box::new(view)));
    }

    /// Stores samples before the journal knows of them, so that no crash of the machine leaves a record without its sample.
    async fn intake(&mut self, myself: &ActorRef<ClusterMessage>, items: Vec<IntakeItem>) {
        let events: Result<Vec<Event>, StoreError> =
            items.into_iter().map(|item| self.arrival(item)).collect();
        let events = events.and_then(|events| self.arguments.store.sync().map(|()| events));
        match events {
            Ok(events) => {
                for event in events {
                    self.feed(myself, event).await;
                }
            }
            Err(error) => {
                self.feed(
                    myself,
                    Event::Broken {
                        report: error.to_string(),
                    },
                )
                .await
            }
        }
        if let Err(error) = self.arguments.journal.sync() {
            self.give_up(&error.to_string());
        }
    }

    fn arrival(&mut self, item: IntakeItem) -> Result<Event, StoreError> {
        Ok(match item {
            IntakeItem::Arrived {
                source,
                verdict: Ok(sample),
            } => {
                let stored = self.store(&sample)?;
                Event::SampleAccepted {
                    source,
                    location: stored.location,
                    tokens: stored.tokens,
                    trained_tokens: stored.trained_tokens,
                }
            }
            IntakeItem::Arrived {
                source,
                verdict: Err(reason),
            } => Event::SampleRefused { source, reason },
            IntakeItem::Retried { sample, mended } => Event::SampleRetried {
                sample,
                stored: mended.map(|mended| self.store(&mended)).transpose()?,
            },
        })
    }

    fn store(&mut self, sample: &Sample) -> Result<StoredSample, StoreError> {
        Ok(StoredSample {
            location: self.arguments.store.append(sample)?,
            tokens: sample.tokens.len() as u32,
            trained_tokens: sample.loss_mask.iter().filter(|&&mask| mask != 0).count() as u32,
        })
    }

    /// Passes a request on to the intake, as long as what it reads can still be trained.
    fn read(&mut self, request: IntakeRequest) {
        if matches!(self.arguments.engine.phase(), Phase::Preparing | Phase::Training) {
            // An intake that has ended has ended the run; the request is dropped with its promise of an answer.
            let _ = self.arguments.intake.send(request);
        } else {
            request.refuse("the run is about to end; start it again with `eaglet launch` and ask then");
        }
    }

    async fn carry_out(&mut self, myself: &ActorRef<ClusterMessage>, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Append { record, sync } => {
                    if let Err(error) = self.arguments.journal.append(&record, sync) {
                        self.give_up(&error.to_string());
                        return;
                    }
                    if let Record::Committed { step, .. } = record {
                        faults::pass(Point::Journaled, Some(step));
                    }
                }
                Command::Spawn { seat, generation } => self.spawn(myself, seat, generation).await,
                Command::Kill {
                    seat,
                    generation,
                    reason,
                } => {
                    tracing::warn!(%seat, %generation, reason, "killing a rank");
                    self.tell(seat, generation, ProxyMessage::Kill(reason));
                }
                Command::Send {
                    seat,
                    generation,
                    command,
                } => {
                    self.tell(seat, generation, ProxyMessage::Send(command));
                }
                Command::Lease {
                    members,
                    row,
                    lease,
                    turn,
                    documents,
                    destination,
                } => {
                    match self.read_row(row, &documents) {
                        Ok(content) => {
                            let units = documents.into_iter().map(|(unit, _)| unit).collect();
                            let extraction = Extraction {
                                row,
                                lease,
                                turn,
                                units,
                                content,
                                destination,
                            };
                            for (seat, generation) in members {
                                let command = CoordinatorCommand::Extract(extraction.clone());
                                self.tell(seat, generation, ProxyMessage::Send(command));
                            }
                        }
                        Err(report) => {
                            // Back through the mailbox: the engine is not entered twice.
                            let _ = myself.cast(ClusterMessage::Event(Event::Broken { report }));
                        }
                    }
                }
                Command::Notice(notice) => self.tell_people(notice),
                Command::Lost {
                    seat,
                    generation,
                    cause,
                } => self.show(MonitorMessage::Lost {
                    seat,
                    generation,
                    cause,
                    unix_ms: faults::unix_ms(),
                }),
                Command::Committed(report) => {
                    let unix_ms = faults::unix_ms();
                    self.show(MonitorMessage::Committed { report, unix_ms });
                }
                Command::Evaluated { step, acceptance } => {
                    self.show(MonitorMessage::Evaluated { step, acceptance });
                }
                Command::SeatAdded { seat, threads } => self.arguments.config.add_rank(seat, threads),
                Command::Answer { ticket, answer } => self.tickets.answer(ticket, answer),
                Command::Finish(outcome) => self.finish(outcome),
            }
        }
    }

    fn tell_people(&self, notice: Notice) {
        if notice.warning {
            tracing::warn!("{}", notice.text);
        } else {
            tracing::info!("{}", notice.text);
        }
        if !notice.quiet {
            self.show(MonitorMessage::Notice(notice));
        }
    }

    fn show(&self, message: MonitorMessage) {
        // The monitor lives as long as the cluster.
        let _ = self.arguments.monitor.cast(message);
    }

    async fn spawn(&mut self, myself: &ActorRef<ClusterMessage>, seat: Seat, generation: Generation) {
        let config = match self.arguments.config.to_toml() {
            Ok(config) => config,
            Err(error) => {
                return self.give_up(&format!("the configuration cannot be told to ranks: {error}"));
            }
        };
        let arguments = ProxyArguments {
            seat,
            generation,
            hosts: self.arguments.hosts.clone(),
            config,
            cluster: myself.clone(),
            registry: self.arguments.registry.clone(),
        };
        match Actor::spawn_linked(None, RankProxy, arguments, myself.get_cell()).await {
            Ok((proxy, _)) => {
                self.proxies.insert(proxy.get_id(), (seat, generation));
            }
            Err(error) => {
                self.arguments.registry.proxies().remove(&(seat, generation));
                let cause = format!("its process cannot be started: {error}");
                let event = Event::Lost {
                    seat,
                    generation,
                    cause,
                    log_tail: String::new(),
                };
                // Back through the mailbox: the engine is not entered twice.
                let _ = myself.cast(ClusterMessage::Event(event));
            }
        }
    }

    fn tell(&self, seat: Seat, generation: Generation, message: ProxyMessage) {
        if let Some(proxy) = self.arguments.registry.proxies().get(&(seat, generation)) {
            // A proxy that is gone reports its end by itself.
            let _ = proxy.cast(message);
        }
    }

    fn read_row(&mut self, row: RowId, documents: &[(Unit, Location)]) -> Result<PackedRow, String> {
        let mut packed = PackedRow::default();
        for (unit, location) in documents {
            let sample =
                self.arguments.store.read(*location).map_err(|error| {
                    format!("sample {} of the {row} cannot be read: {error}", unit.sample)
                })?;
            packed.push(&sample);
        }
        Ok(packed)
    }

    fn give_up(&mut self, report: &str) {
        self.broken = true;
        for proxy in self.arguments.registry.proxies().values() {
            // A proxy that is gone has no process.
            let _ = proxy.cast(ProxyMessage::Kill("the coordinator cannot go on".to_owned()));
        }
        self.finish(Outcome::Failed {
            report: report.to_owned(),
        });
    }

    fn finish(&mut self, outcome: Outcome) {
        let (summary, checkpoint) = match &outcome {
            Outcome::Completed {
                checkpoint,
                acceptance,
            } => {
                let mut summary = "completed".to_owned();
                if let Some(length) = acceptance.as_ref().and_then(Acceptance::length) {
                    summary.push_str(&format!(
                        ", mean acceptance length {length:.2} on held-out answers"
                    ));
                }
                if let Some(folder) = checkpoint {
                    let folder = self.arguments.hosts.run_directory().join(folder);
                    summary.push_str(&format!(", checkpoint in {}", folder.display()));
                }
                (summary, checkpoint.clone())
            }
            Outcome::Drained { checkpoint } => (
                "stopped as asked; the same command goes on from here".to_owned(),
                checkpoint.clone(),
            ),
            Outcome::Stopped => (
                "stopped at once; the same command goes on from the last checkpoint".to_owned(),
                None,
            ),
            Outcome::Failed { report } => (format!("failed: {report}"), None),
        };
        self.show(MonitorMessage::Finished { summary, checkpoint });
        if let Some(finished) = self.finished.take() {
            // Whoever waited for the run may have gone.
            let _ = finished.send(outcome);
        }
    }
}
