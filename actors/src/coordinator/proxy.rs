//! Stands for one incarnation of a rank, so that a dead process is an ordinary `ActorFailed`.
//!
//! PROXY-1: it starts its process and fails exactly when that process is gone, with the first cause it saw.

use std::time::Duration;

use eaglet_runtime::control::transport::{Accepted, EventStream};
use eaglet_runtime::control::{CoordinatorCommand, RankEvent};
use eaglet_runtime::ids::{Generation, Seat};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;

use super::cluster::ClusterMessage;
use super::gate::Registry;
use super::hosts::{Hosts, Process};
use crate::engine::Event;

/// How long the last messages of a dead process may take to arrive.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// The actor.
pub(super) struct RankProxy;

/// What it is made from.
pub(super) struct ProxyArguments {
    pub(super) seat: Seat,
    pub(super) generation: Generation,
    pub(super) hosts: Hosts,
    pub(super) config: String,
    pub(super) cluster: ActorRef<ClusterMessage>,
    pub(super) registry: Registry,
}

/// What it reacts to.
pub(super) enum ProxyMessage {
    /// The process attached.
    Admitted(Box<Accepted>),
    /// The process said something.
    Heard(RankEvent),
    /// The stream is over.
    StreamEnded(String),
    /// The process is gone.
    Exited(String),
    /// The last words of a dead process had time enough.
    Silent,
    /// Say something to it.
    Send(CoordinatorCommand),
    /// End it.
    Kill(String),
}

pub(super) struct ProxyState {
    arguments: ProxyArguments,
    process: Process,
    commands: Option<mpsc::Sender<CoordinatorCommand>>,
    streaming: bool,
    said_bye: bool,
    exited: Option<String>,
    /// The first thing that went wrong.
    cause: Option<String>,
}

impl Actor for RankProxy {
    type Msg = ProxyMessage;
    type State = ProxyState;
    type Arguments = ProxyArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<ProxyMessage>,
        arguments: ProxyArguments,
    ) -> Result<ProxyState, ActorProcessingErr> {
        // Before the process exists, so that it finds its proxy however fast it attaches.
        arguments
            .registry
            .enter(arguments.seat, arguments.generation, &myself);
        let process = arguments
            .hosts
            .start(arguments.seat, arguments.generation, move |status| {
                // A proxy that is gone needs no news of its process.
                let _ = myself.cast(ProxyMessage::Exited(status));
            })?;
        tracing::info!(seat = %arguments.seat, generation = %arguments.generation, "rank started");
        Ok(ProxyState {
            arguments,
            process,
            commands: None,
            streaming: false,
            said_bye: false,
            exited: None,
            cause: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<ProxyMessage>,
        message: ProxyMessage,
        state: &mut ProxyState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            ProxyMessage::Admitted(accepted) => state.admit(&myself, *accepted),
            ProxyMessage::Heard(event) => {
                state.said_bye |= event == RankEvent::Bye;
                let (seat, generation) = (state.arguments.seat, state.arguments.generation);
                state.arguments.cluster.cast(ClusterMessage::Event(Event::Rank {
                    seat,
                    generation,
                    event,
                }))?;
            }
            ProxyMessage::StreamEnded(reason) => {
                state.streaming = false;
                state.commands = None;
                if state.exited.is_none() && !state.said_bye {
                    state.end(&format!("its control link ended: {reason}"));
                }
                return state.finish_if_over(&myself);
            }
            ProxyMessage::Exited(status) => {
                state.exited = Some(status);
                if state.streaming {
                    myself.send_after(LAST_WORDS, || ProxyMessage::Silent);
                }
                return state.finish_if_over(&myself);
            }
            ProxyMessage::Silent => {
                state.streaming = false;
                return state.finish_if_over(&myself);
            }
            ProxyMessage::Send(command) => state.send(command),
            ProxyMessage::Kill(reason) => state.end(&reason),
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<ProxyMessage>,
        state: &mut ProxyState,
    ) -> Result<(), ActorProcessingErr> {
        state.process.kill();
        Ok(())
    }
}

impl ProxyState {
    fn admit(&mut self, myself: &ActorRef<ProxyMessage>, accepted: Accepted) {
        if self.commands.is_some() || self.exited.is_some() {
            return; // dropping the stream refuses it
        }
        let Accepted {
            attach,
            events,
            commands,
        } = accepted;
        self.commands = Some(commands);
        self.streaming = true;
        self.send(CoordinatorCommand::Welcome {
            config: self.arguments.config.clone(),
        });
        let event = Event::Attached {
            seat: self.arguments.seat,
            generation: self.arguments.generation,
            pid: attach.pid,
            bulk: attach.bulk,
        };
        // The cluster outlives its proxies.
        let _ = self.arguments.cluster.cast(ClusterMessage::Event(event));
        tokio::spawn(listen(events, myself.clone()));
    }

    fn send(&mut self, command: CoordinatorCommand) {
        let Some(commands) = &self.commands else { return };
        if commands.try_send(command).is_err() {
            self.end("it does not read its commands");
        }
    }

    fn end(&mut self, reason: &str) {
        self.cause.get_or_insert_with(|| reason.to_owned());
        self.process.kill();
    }

    fn finish_if_over(&self, myself: &ActorRef<ProxyMessage>) -> Result<(), ActorProcessingErr> {
        let Some(status) = &self.exited else { return Ok(()) };
        if self.streaming {
            return Ok(());
        }
        if self.said_bye && self.cause.is_none() {
            myself.stop(None);
            return Ok(());
        }
        Err(match &self.cause {
            Some(cause) => format!("{cause}; {status}").into(),
            None => status.clone().into(),
        })
    }
}

async fn listen(mut events: EventStream, proxy: ActorRef<ProxyMessage>) {
    let reason = loop {
        match events.next().await {
            Ok(Some(event)) => {
                if proxy.cast(ProxyMessage::Heard(event)).is_err() {
                    return;
                }
            }
            Ok(None) => break "closed by the other side".to_owned(),
            Err(reason) => break reason,
        }
    };
    // A proxy that is gone has no use for it.
    let _ = proxy.cast(ProxyMessage::StreamEnded(reason));
}
