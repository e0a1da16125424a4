//! `eaglet join`: starts and reaps the ranks of a machine that is not the coordinator's, on the coordinator's word.
//!
//! JOIN-1: its ranks end with it (HOST-1), and it ends them when the coordinator is gone or silent for longer than its lease;
//! only then does it look for a coordinator again.
//! JOIN-2: it finds the coordinator by `coordinator.json` in the run directory. So both see the same files, and who cannot read
//! the run cannot join it.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use eaglet_runtime::control::transport::{self, Dialed, TransportError};
use eaglet_runtime::control::{HostCommand, HostEvent, HostWelcome, Join, PROTOCOL};
use eaglet_runtime::cuda::SearchPath;
use eaglet_runtime::ids::{Generation, Seat};
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::coordinator::Endpoint;
use crate::gpus::{GpuMachine, Place};
use crate::processes::{Process, Starter};

/// Between two looks for a coordinator.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// Longest wait for killed ranks to be gone.
const REAP_TIMEOUT: Duration = Duration::from_secs(10);

/// How a host joins.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The `eaglet` executable that ranks are started from.
    pub executable: PathBuf,
    /// The run directory, as the coordinator names it.
    pub run_directory: PathBuf,
    /// The name of this machine in `cluster.toml`.
    pub name: String,
    /// How long a coordinator is waited for, at the start and when one was lost.
    pub patience: Duration,
    /// Leave when the coordinator is lost, instead of waiting for it to come back.
    pub once: bool,
}

/// Why a host left before the run was over.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// Nobody runs the run.
    #[error(
        "no coordinator is running on {directory}: {reason}; start it with `eaglet launch`, and give run.directory a place \
         that all hosts share"
    )]
    NoCoordinator {
        /// The run directory.
        directory: PathBuf,
        /// What was seen last.
        reason: String,
    },
    /// The coordinator does not want this host.
    #[error(transparent)]
    Refused(TransportError),
    /// Ranks would not find what they need here.
    #[error("this host cannot run its ranks: {0}")]
    Unfit(String),
    /// The coordinator is gone.
    #[error("the coordinator is gone: {0}; the ranks of this host were ended")]
    Lost(String),
}

/// Works for the coordinator of a run until the run is over.
///
/// Cancel safety: when it is dropped its ranks live on until the process ends.
///
/// # Errors
/// If there is no coordinator, it does not want this host, or ranks cannot run here.
pub async fn join(options: &JoinOptions) -> Result<(), JoinError> {
    loop {
        let (address, dialed) = find(options).await?;
        match serve(options, &address, dialed).await? {
            End::Over => return Ok(()),
            End::Lost(reason) if options.once => return Err(JoinError::Lost(reason)),
            End::Lost(reason) => {
                tracing::warn!(
                    reason,
                    "the coordinator is gone: the ranks were ended, waiting for it to come back"
                );
            }
        }
    }
}

/// A stream to the coordinator.
type Stream = Dialed<HostEvent, HostCommand>;

/// How a stream ended.
enum End {
    /// The run is over.
    Over,
    /// The coordinator is gone, and why it seems so.
    Lost(String),
}

/// Looks for the coordinator until it takes this host in.
async fn find(options: &JoinOptions) -> Result<(String, Stream), JoinError> {
    let deadline = Instant::now() + options.patience;
    loop {
        let reason = match reach(options).await {
            Ok(found) => return Ok(found),
            Err(Miss::Lasting(error)) => return Err(JoinError::Refused(error)),
            Err(Miss::Passing(reason)) => reason,
        };
        tracing::debug!(reason, "no coordinator yet");
        if Instant::now() >= deadline {
            return Err(JoinError::NoCoordinator {
                directory: options.run_directory.clone(),
                reason,
            });
        }
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Why there is no stream.
enum Miss {
    Passing(String),
    Lasting(TransportError),
}

async fn reach(options: &JoinOptions) -> Result<(String, Stream), Miss> {
    let passing = |error: &dyn std::fmt::Display| Miss::Passing(error.to_string());
    let endpoint = Endpoint::read(&options.run_directory).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Miss::Passing("its coordinator.json is not there".to_owned()),
        _ => Miss::Passing(format!("its coordinator.json cannot be read: {error}")),
    })?;
    let words = Join {
        protocol: PROTOCOL,
        token: endpoint.host_token,
        name: options.name.clone(),
        pid: std::process::id(),
        address: own_address(&endpoint.address).map_err(|error| passing(&error))?,
    };
    match transport::join(&endpoint.address, words).await {
        Ok(dialed) => Ok((endpoint.address, dialed)),
        Err(error @ TransportError::Refused { .. }) if !is_passing(&error) => Err(Miss::Lasting(error)),
        Err(error) => Err(passing(&error)),
    }
}

fn is_passing(error: &TransportError) -> bool {
    matches!(error, TransportError::Refused { refusal, .. } if refusal.is_passing)
}

/// The address of this machine from which another one is reached. Nothing is sent.
fn own_address(of_coordinator: &str) -> io::Result<IpAddr> {
    let any = if of_coordinator.starts_with('[') {
        "[::]:0"
    } else {
        "0.0.0.0:0"
    };
    let socket = UdpSocket::bind(any)?;
    socket.connect(of_coordinator)?;
    Ok(socket.local_addr()?.ip())
}

/// A rank's process has ended.
type Exit = ((Seat, Generation), String);

/// What runs here for one coordinator.
struct Tenancy {
    starter: Starter,
    running: HashMap<(Seat, Generation), Process>,
    exits: mpsc::UnboundedSender<Exit>,
}

/// Carries out what a coordinator says, until it says that the run is over or says nothing any more.
async fn serve(options: &JoinOptions, address: &str, mut stream: Stream) -> Result<End, JoinError> {
    let lost = |reason: &str| Ok(End::Lost(reason.to_owned()));
    let welcome = match tokio::time::timeout(REAP_TIMEOUT, stream.commands.message()).await {
        Ok(Ok(Some(HostCommand::Welcome(welcome)))) => welcome,
        Ok(Ok(Some(HostCommand::Quit))) => return Ok(End::Over),
        _ => return lost("it does not welcome this host"),
    };
    let lease = Duration::from_millis(welcome.lease_ms);
    let mut beats = tokio::time::interval(Duration::from_millis(welcome.beat_interval_ms.max(1)));
    let (exits, mut exited) = mpsc::unbounded_channel();
    let mut tenancy = match Tenancy::new(options, address, welcome, exits) {
        Ok(tenancy) => tenancy,
        Err(reason) => {
            let reason = format!("{reason} (host {})", options.name);
            // What the coordinator does not hear it sees: this host leaves.
            let _ = stream.events.try_send(HostEvent::Unfit {
                reason: reason.clone(),
            });
            drop(stream.events);
            while let Ok(Ok(Some(_))) = tokio::time::timeout(LOOK_INTERVAL, stream.commands.message()).await {
            }
            return Err(JoinError::Unfit(reason));
        }
    };
    tracing::info!(coordinator = address, host = options.name, "joined");
    let say = |event: HostEvent| stream.events.try_send(event).is_ok();
    let mut is_heard = say(HostEvent::Ready);
    let mut last_heard = Instant::now();
    let end = loop {
        if !is_heard {
            break End::Lost("it does not read what this host says".to_owned());
        }
        tokio::select! {
            command = stream.commands.message() => {
                last_heard = Instant::now();
                match command {
                    Ok(Some(HostCommand::Start { seat, generation })) => {
                        if let Some(event) = tenancy.start(seat, generation) {
                            is_heard = say(event);
                        }
                    }
                    Ok(Some(HostCommand::Kill { seat, generation })) => tenancy.kill(seat, generation),
                    Ok(Some(HostCommand::Quit)) => break End::Over,
                    Ok(Some(HostCommand::BeatAck | HostCommand::Welcome(_))) => {}
                    Ok(None) => break End::Lost("its link ended".to_owned()),
                    Err(status) => break End::Lost(format!("its link ended: {}", status.message())),
                }
            }
            // The sender lives in `tenancy`.
            Some(exit) = exited.recv() => is_heard = say(tenancy.exited(exit)),
            _ = beats.tick() => is_heard = say(HostEvent::Beat),
            () = tokio::time::sleep_until(last_heard + lease) => {
                break End::Lost(format!("no sign of life for {} ms", lease.as_millis()));
            }
        }
    };
    // JOIN-1
    tenancy.end(&mut exited).await;
    Ok(end)
}

impl Tenancy {
    /// Looks whether ranks can run here.
    fn new(
        options: &JoinOptions,
        address: &str,
        welcome: HostWelcome,
        exits: mpsc::UnboundedSender<Exit>,
    ) -> Result<Self, String> {
        // It is there, for this host has read it; but ranks are told the coordinator's path of it.
        if std::path::absolute(&options.run_directory).ok().as_ref() != Some(&welcome.run_directory) {
            return Err(format!(
                "{} is another path than the coordinator's, {}; ranks are told its paths, so use the same one",
                options.run_directory.display(),
                welcome.run_directory.display()
            ));
        }
        if let Some(missing) = welcome.needs.iter().find(|path| !path.exists()) {
            return Err(format!(
                "there is no {} here; put it on a file system that all hosts share, or at the same path on each",
                missing.display()
            ));
        }
        Ok(Self {
            starter: Starter {
                executable: options.executable.clone(),
                coordinator: address.to_owned(),
                token: welcome.token,
                host: options.name.clone(),
                network: Some(welcome.address),
                run_directory: options.run_directory.clone(),
                log_format: welcome.log_format,
                places: Arc::new(places(&welcome.seats)?),
            },
            running: HashMap::new(),
            exits,
        })
    }

    /// Starts a rank; what the coordinator must be told if that failed.
    fn start(&mut self, seat: Seat, generation: Generation) -> Option<HostEvent> {
        let exits = self.exits.clone();
        let started = self.starter.start(seat, generation, move |status| {
            // Whoever ended the tenancy has seen to its ranks.
            let _ = exits.send(((seat, generation), status));
        });
        match started {
            Ok(process) => {
                tracing::info!(%seat, %generation, pid = process.pid, "rank started");
                self.running.insert((seat, generation), process);
                None
            }
            Err(error) => Some(HostEvent::Exited {
                seat,
                generation,
                status: format!("its process cannot be started: {error}"),
            }),
        }
    }

    fn kill(&mut self, seat: Seat, generation: Generation) {
        if let Some(process) = self.running.get(&(seat, generation)) {
            process.kill();
        }
    }

    fn exited(&mut self, ((seat, generation), status): Exit) -> HostEvent {
        self.running.remove(&(seat, generation));
        tracing::info!(%seat, %generation, status, "rank ended");
        HostEvent::Exited {
            seat,
            generation,
            status,
        }
    }

    /// Kills what is left and waits until it is gone.
    async fn end(mut self, exited: &mut mpsc::UnboundedReceiver<Exit>) {
        self.running.values().for_each(Process::kill);
        let deadline = Instant::now() + REAP_TIMEOUT;
        while !self.running.is_empty() {
            match tokio::time::timeout_at(deadline, exited.recv()).await {
                Ok(Some(exit)) => {
                    self.exited(exit);
                }
                _ => {
                    let left = self.running.len();
                    tracing::error!(left, "killed ranks are still there");
                    return;
                }
            }
        }
    }
}

/// How ranks on GPUs are started here.
fn places(seats: &[(Seat, Option<u16>)]) -> Result<BTreeMap<Seat, Place>, String> {
    let on_gpus: Vec<(Seat, u16)> = seats
        .iter()
        .filter_map(|&(seat, gpu)| Some((seat, gpu?)))
        .collect();
    if on_gpus.is_empty() {
        return Ok(BTreeMap::new());
    }
    let machine = GpuMachine::open(&SearchPath::here())?;
    on_gpus
        .into_iter()
        .map(|(seat, number)| match machine.gpu(number) {
            Ok(gpu) => Ok((seat, gpu.place)),
            Err(error) => Err(format!("{seat} on cuda:{number}: {error}")),
        })
        .collect()
}
