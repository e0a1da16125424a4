//! The control thread of a rank: an OS thread with a runtime of its own, so that no computation can hold up a beat.

use std::time::{Duration, Instant};

use eaglet_runtime::control::transport::{self, Dialed};
use eaglet_runtime::control::{Attach, Beat, CoordinatorCommand, RankEvent};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::mpsc;

use super::FENCED;
use super::activity::ActivityGauge;
use crate::config::ClusterConfig;

/// Beats before the configuration is known.
const FIRST_BEAT_INTERVAL: Duration = Duration::from_millis(100);
/// Lease on the coordinator before the configuration is known.
const FIRST_LEASE: Duration = Duration::from_secs(10);
/// Longest wait for the coordinator to read a rank's last words.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The compute thread's handle on the control thread.
#[derive(Clone)]
pub(super) struct Control {
    link: ActorRef<LinkMessage>,
}

impl Control {
    /// Attaches to the coordinator; `heard` is called for each of its commands.
    pub(super) fn start(
        coordinator: String,
        attach: Attach,
        activity: ActivityGauge,
        heard: impl Fn(CoordinatorCommand) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (ready, attached) = std::sync::mpsc::channel();
        std::thread::Builder::new()
            .name("control".to_owned())
            .spawn(move || {
                let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                    Ok(runtime) => runtime,
                    Err(error) => {
                        // The starter waits for exactly one answer.
                        let _ = ready.send(Err(anyhow::Error::from(error)));
                        return;
                    }
                };
                runtime.block_on(attend(&coordinator, attach, activity, heard, &ready));
            })?;
        let link = attached
            .recv()
            .unwrap_or_else(|_| anyhow::bail!("the control thread ended"))?;
        Ok(Self { link })
    }

    /// Says something to the coordinator.
    pub(super) fn say(&self, event: RankEvent) {
        // If the link is gone, so is this process in a moment.
        let _ = self.link.cast(LinkMessage::Say(event));
    }

    /// Waits until the coordinator has closed the stream, for a while.
    pub(super) fn finish(&self) {
        let (done, closed) = std::sync::mpsc::channel();
        if self.link.cast(LinkMessage::Finish(done)).is_ok() {
            // Whether it closed or the time ran out, the process ends next.
            let _ = closed.recv_timeout(LAST_WORDS);
        }
    }
}

async fn attend(
    coordinator: &str,
    attach: Attach,
    activity: ActivityGauge,
    heard: impl Fn(CoordinatorCommand) + Send + 'static,
    ready: &std::sync::mpsc::Sender<anyhow::Result<ActorRef<LinkMessage>>>,
) {
    let Dialed { events, mut commands } = match transport::dial(coordinator, attach).await {
        Ok(dialed) => dialed,
        Err(error) => {
            // As above: exactly one answer.
            let _ = ready.send(Err(error.into()));
            return;
        }
    };
    let (link, life) = match Actor::spawn(None, Link, LinkArguments { events, activity }).await {
        Ok(spawned) => spawned,
        Err(error) => {
            let _ = ready.send(Err(error.into()));
            return;
        }
    };
    let _ = ready.send(Ok(link.clone()));
    let reason = loop {
        match commands.message().await {
            Ok(Some(command)) => {
                // The link actor lives until this loop ends.
                let _ = link.cast(LinkMessage::Heard(match &command {
                    CoordinatorCommand::Welcome { config } => Some(config.clone()),
                    _ => None,
                }));
                if !matches!(command, CoordinatorCommand::BeatAck { .. }) {
                    heard(command);
                }
            }
            Ok(None) => break "the coordinator closed the control link".to_owned(),
            Err(status) => break status.to_string(),
        }
    };
    let _ = link.cast(LinkMessage::Ended(reason));
    // The actor ends the process unless it was told to finish.
    let _ = life.await;
}

struct Link;

struct LinkArguments {
    events: mpsc::Sender<RankEvent>,
    activity: ActivityGauge,
}

enum LinkMessage {
    /// The coordinator said something; with its first words, the configuration.
    Heard(Option<String>),
    /// Time for a beat.
    Beat,
    /// Say something.
    Say(RankEvent),
    /// The stream is over.
    Ended(String),
    /// The process is about to end by itself; tell when the stream is closed.
    Finish(std::sync::mpsc::Sender<()>),
}

struct LinkState {
    arguments: LinkArguments,
    sequence: u64,
    interval: Duration,
    lease: Duration,
    last_heard: Instant,
    finishing: Option<std::sync::mpsc::Sender<()>>,
}

impl Actor for Link {
    type Msg = LinkMessage;
    type State = LinkState;
    type Arguments = LinkArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<LinkMessage>,
        arguments: LinkArguments,
    ) -> Result<LinkState, ActorProcessingErr> {
        myself.cast(LinkMessage::Beat)?;
        Ok(LinkState {
            arguments,
            sequence: 0,
            interval: FIRST_BEAT_INTERVAL,
            lease: FIRST_LEASE,
            last_heard: Instant::now(),
            finishing: None,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<LinkMessage>,
        message: LinkMessage,
        state: &mut LinkState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            LinkMessage::Heard(config) => {
                state.last_heard = Instant::now();
                if let Some(config) = config.and_then(|text| ClusterConfig::from_resolved(&text).ok()) {
                    state.interval = config.supervision.beat_interval();
                    state.lease = config.supervision.coordinator_lease();
                }
            }
            LinkMessage::Beat => {
                let silent = state.last_heard.elapsed();
                if silent > state.lease {
                    end(&format!(
                        "the coordinator is silent for {} ms",
                        silent.as_millis()
                    ));
                }
                let reading = state.arguments.activity.read();
                let beat = Beat {
                    sequence: state.sequence,
                    activity: reading.activity,
                    activity_age_ms: reading.age_ms,
                    rss_bytes: resident_bytes().unwrap_or(0),
                    busy_ms: reading.busy_ms,
                    waiting_ms: reading.waiting_ms,
                    idle_ms: reading.idle_ms,
                };
                state.sequence += 1;
                state.say(RankEvent::Beat(beat));
                myself.send_after(state.interval, || LinkMessage::Beat);
            }
            LinkMessage::Say(event) => state.say(event),
            LinkMessage::Ended(reason) => match state.finishing.take() {
                Some(done) => {
                    // Whoever asked may have stopped waiting.
                    let _ = done.send(());
                    myself.stop(None);
                }
                None => end(&reason),
            },
            LinkMessage::Finish(done) => {
                state.finishing = Some(done);
                // Closes our half once everything said so far is on its way.
                let (closed, _) = mpsc::channel(1);
                state.arguments.events = closed;
            }
        }
        Ok(())
    }
}

impl LinkState {
    fn say(&self, event: RankEvent) {
        match self.arguments.events.try_send(event) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => {
                end("the coordinator does not read this rank's messages")
            }
            // The reading side reports why.
            Err(mpsc::error::TrySendError::Closed(_)) => {}
        }
    }
}

/// RANK-1: ends the process from the control thread, whatever the compute thread is doing.
fn end(reason: &str) -> ! {
    tracing::error!(reason, "the rank fences itself off");
    std::process::exit(FENCED);
}

/// Resident memory of this process.
fn resident_bytes() -> Option<u64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
