//! The machines that ranks run on: the coordinator's own, and those that have joined it.
//!
//! HOSTS-3: a rank on a lost host counts as gone only when it must have fenced itself off, `coordinator_lease_ms` after the
//! host was lost: its successor never works beside it.
//! HOSTS-4: a host that joins knows a secret that lies in the run directory, so it sees the same files.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use eaglet_runtime::control::transport::{EventStream, Joined, Receive, Refusal};
use eaglet_runtime::control::{HostCommand, HostEvent, HostWelcome, Join, PROTOCOL};
use eaglet_runtime::ids::{Generation, Seat};
use ractor::ActorRef;
use tokio::sync::{mpsc, watch};

use super::cluster::ClusterMessage;
use super::is_secret;
use crate::config::{ClusterConfig, HostConfig, LOCAL};
use crate::engine::{Event, Notice};
use crate::processes::{self, Starter};

/// Longest wait for hosts to leave when the run is over.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);

/// Called once when a rank's process is gone, with how it ended.
type Exited = Box<dyn FnOnce(String) + Send>;

/// All hosts of a launch.
#[derive(Clone)]
pub(super) struct Hosts(Arc<Shared>);

struct Shared {
    local: Starter,
    /// Secret of the hosts of this launch.
    token: String,
    config: ClusterConfig,
    /// Hosts of the seats that are not on this machine.
    places: BTreeMap<Seat, String>,
    table: Mutex<Table>,
    cluster: OnceLock<ActorRef<ClusterMessage>>,
    /// Has a receiver for each stream of a host.
    attended: watch::Sender<()>,
}

#[derive(Default)]
struct Table {
    /// Hosts that have joined.
    joined: BTreeMap<String, mpsc::Sender<HostCommand>>,
    /// Ranks that other hosts were asked to start and have not told the end of.
    ranks: BTreeMap<(Seat, Generation), Exited>,
}

/// A rank's process, wherever it is.
pub(super) enum Process {
    Here(processes::Process),
    There {
        hosts: Hosts,
        seat: Seat,
        generation: Generation,
    },
}

impl Process {
    /// Kills it; nothing happens if it is gone.
    pub(super) fn kill(&self) {
        match self {
            Self::Here(process) => process.kill(),
            Self::There {
                hosts,
                seat,
                generation,
            } => {
                let (seat, generation) = (*seat, *generation);
                // A host that is gone takes it along (HOSTS-3).
                let _ = hosts.tell(seat, HostCommand::Kill { seat, generation });
            }
        }
    }
}

impl Hosts {
    /// The hosts of a configuration. Nobody has joined, and ranks start on this machine only.
    pub(super) fn new(config: &ClusterConfig, local: Starter, token: String) -> Self {
        Self(Arc::new(Shared {
            token,
            places: config
                .ranks
                .iter()
                .filter(|rank| !rank.is_local())
                .map(|rank| (rank.seat(), rank.host.clone()))
                .collect(),
            config: config.clone(),
            local,
            table: Mutex::default(),
            cluster: OnceLock::new(),
            attended: watch::Sender::new(()),
        }))
    }

    /// What a host needs to work for this launch.
    fn welcome(&self, host: &HostConfig, called_from: IpAddr) -> HostWelcome {
        let Shared { local, config, .. } = &*self.0;
        let ranks = config.ranks.iter().filter(|rank| rank.host == host.name);
        let mut needs = vec![config.verifier.path.clone()];
        needs.extend(config.samples.hidden_states.clone());
        HostWelcome {
            token: local.token.clone(),
            log_format: local.log_format.clone(),
            address: host.address.unwrap_or(called_from),
            seats: ranks.map(|rank| (rank.seat(), config.gpu_of(rank))).collect(),
            run_directory: local.run_directory.clone(),
            needs,
            beat_interval_ms: config.supervision.beat_interval_ms,
            lease_ms: config.supervision.coordinator_lease_ms,
        }
    }

    /// Lets hosts join; before, all of them are refused.
    pub(super) fn open(&self, cluster: ActorRef<ClusterMessage>) {
        // Set once a launch.
        let _ = self.0.cluster.set(cluster);
    }

    /// The run directory.
    pub(super) fn run_directory(&self) -> &PathBuf {
        &self.0.local.run_directory
    }

    /// Starts a rank on its host, and calls `exited` once when its process is gone.
    ///
    /// # Errors
    /// If its host is not there, or cannot start it.
    pub(super) fn start(
        &self,
        seat: Seat,
        generation: Generation,
        exited: impl FnOnce(String) + Send + 'static,
    ) -> io::Result<Process> {
        if !self.0.places.contains_key(&seat) {
            return self.0.local.start(seat, generation, exited).map(Process::Here);
        }
        self.table().ranks.insert((seat, generation), Box::new(exited));
        match self.tell(seat, HostCommand::Start { seat, generation }) {
            Ok(()) => Ok(Process::There {
                hosts: self.clone(),
                seat,
                generation,
            }),
            Err(error) => {
                self.table().ranks.remove(&(seat, generation));
                Err(error)
            }
        }
    }

    /// The last lines that a rank wrote to standard error, as far as this machine sees its log.
    pub(super) fn last_words(&self, seat: Seat) -> String {
        self.0.local.last_words(seat)
    }

    /// Tells the hosts that the run is over, and waits a moment for them to leave: who does not hear it waits for another
    /// launch.
    pub(super) async fn quit(&self) {
        for host in std::mem::take(&mut self.table().joined).into_values() {
            // One that is gone needs no word.
            let _ = host.try_send(HostCommand::Quit);
        }
        if tokio::time::timeout(LEAVE_TIMEOUT, self.0.attended.closed())
            .await
            .is_err()
        {
            tracing::warn!("a host has not left");
        }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        // The maps are never left half changed, so a poisoned lock holds sound ones.
        self.0.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, seat: Seat, command: HostCommand) -> io::Result<()> {
        let name = self.0.places.get(&seat).map_or(LOCAL, String::as_str);
        let host = self.table().joined.get(name).cloned();
        host.and_then(|host| host.try_send(command).ok())
            .ok_or_else(|| io::Error::other(format!("host {name} is not there")))
    }

    fn cast(&self, message: ClusterMessage) {
        if let Some(cluster) = self.0.cluster.get() {
            // The cluster outlives the hosts; after its end nobody is to be told.
            let _ = cluster.cast(message);
        }
    }

    fn warn(&self, text: String) {
        self.cast(ClusterMessage::Notice(Notice {
            warning: true,
            quiet: false,
            text,
        }));
    }

    /// A stream of a host that may join, from its welcome to its end.
    async fn attend(
        self,
        join: Join,
        welcome: HostWelcome,
        joined: (EventStream<HostEvent>, mpsc::Sender<HostCommand>),
    ) {
        let (mut events, commands) = joined;
        let name = join.name;
        let attended = self.0.attended.subscribe();
        let cause = self.hear(&name, welcome, &mut events, &commands).await;
        // The order counts: what was started after this is not the business of this stream.
        let is_joined = {
            let mut table = self.table();
            let is_ours = table
                .joined
                .get(&name)
                .is_some_and(|known| known.same_channel(&commands));
            if is_ours {
                table.joined.remove(&name);
            }
            is_ours
        };
        drop((commands, attended));
        if !is_joined {
            return; // the run is over
        }
        tracing::warn!(host = name, cause, "a host is lost");
        let host = name.clone();
        self.cast(ClusterMessage::Event(Event::HostLost {
            host,
            cause: cause.clone(),
        }));
        // HOSTS-3
        let lease = self.0.config.supervision.coordinator_lease();
        let lost: Vec<(Seat, Generation)> = {
            let table = self.table();
            let here = |seat: &Seat| self.0.places.get(seat) == Some(&name);
            table
                .ranks
                .keys()
                .copied()
                .filter(|(seat, _)| here(seat))
                .collect()
        };
        tokio::time::sleep(lease).await;
        for rank in lost {
            self.exited(rank, format!("its host {name} was lost: {cause}"));
        }
    }

    /// Welcomes a host and hears what it says; why there is nothing more to hear.
    async fn hear(
        &self,
        name: &str,
        welcome: HostWelcome,
        events: &mut EventStream<HostEvent>,
        commands: &mpsc::Sender<HostCommand>,
    ) -> String {
        let supervision = &self.0.config.supervision;
        let dead_after =
            Duration::from_millis(supervision.dead_after_ms.max(supervision.coordinator_lease_ms));
        let unread = || "it does not read its commands".to_owned();
        if commands.try_send(HostCommand::Welcome(welcome)).is_err() {
            return unread();
        }
        loop {
            let event = match tokio::time::timeout(dead_after, events.next()).await {
                Err(_) => return format!("no sign of life for {} ms", dead_after.as_millis()),
                Ok(Ok(Some(event))) => event,
                Ok(Ok(None)) => return "its link ended".to_owned(),
                Ok(Err(reason)) => return format!("its link ended: {reason}"),
            };
            match event {
                HostEvent::Join(_) => {}
                HostEvent::Beat => {
                    if commands.try_send(HostCommand::BeatAck).is_err() {
                        return unread();
                    }
                }
                HostEvent::Ready => self.cast(ClusterMessage::Event(Event::HostJoined {
                    host: name.to_owned(),
                })),
                HostEvent::Unfit { reason } => {
                    self.warn(format!("host {name} cannot run its ranks: {reason}"));
                }
                HostEvent::Exited {
                    seat,
                    generation,
                    status,
                } if self.0.places.get(&seat).is_some_and(|place| place == name) => {
                    self.exited((seat, generation), status);
                }
                HostEvent::Exited { seat, .. } => {
                    tracing::warn!(host = name, %seat, "a host tells of a rank that is not its own");
                }
            }
        }
    }

    fn exited(&self, rank: (Seat, Generation), status: String) {
        let exited = self.table().ranks.remove(&rank);
        if let Some(exited) = exited {
            exited(status);
        }
    }
}

impl Receive for Hosts {
    fn receive(&self, joined: Joined) -> Result<(), Refusal> {
        let Joined {
            join,
            events,
            commands,
        } = joined;
        if join.protocol != PROTOCOL {
            return Err(Refusal::lasting(format!(
                "this coordinator speaks protocol {PROTOCOL}, the host {}; both need the same eaglet",
                join.protocol
            )));
        }
        if !is_secret(&join.token, &self.0.token) {
            return Err(Refusal::passing("it belongs to another launch"));
        }
        let hosts = &self.0.config.hosts;
        let Some(host) = hosts.iter().find(|host| host.name == join.name) else {
            let known: Vec<&str> = hosts.iter().map(|host| host.name.as_str()).collect();
            return Err(Refusal::lasting(format!(
                "cluster.toml has no host {}; its [[hosts]] are: {}",
                join.name,
                if known.is_empty() {
                    "none".to_owned()
                } else {
                    known.join(", ")
                }
            )));
        };
        if self.0.cluster.get().is_none() {
            return Err(Refusal::passing("the run is about to start"));
        }
        let mut table = self.table();
        if table.joined.contains_key(&join.name) {
            return Err(Refusal::passing(format!("host {} has joined already", join.name)));
        }
        table.joined.insert(join.name.clone(), commands.clone());
        drop(table);
        let welcome = self.welcome(host, join.address);
        tracing::info!(host = join.name, pid = join.pid, address = %welcome.address, "a host joins");
        tokio::spawn(self.clone().attend(join, welcome, (events, commands)));
        Ok(())
    }
}
