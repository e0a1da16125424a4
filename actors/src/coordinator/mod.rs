//! The coordinator process: launches the ranks, carries the engine's commands, keeps the journal.
//!
//! Actors: `cluster` is the root and owns engine and journal; `proxy` stands for one rank each; `monitor` tells people.
//! `intake` reads samples on a thread of its own, `hosts` has processes started wherever they belong, `operator` answers those who ask
//! something of the live run, and `endpoint` tells them where.

mod callers;
mod cluster;
mod endpoint;
mod gate;
mod hosts;
mod intake;
mod monitor;
mod operator;
mod proxy;
mod times;

use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use eaglet_runtime::checkpoint;
use eaglet_runtime::checkpoint::CheckpointFolder;
use eaglet_runtime::control::transport;
use eaglet_runtime::samples::SampleStore;
use ractor::{Actor, ActorRef};
use tokio::sync::{oneshot, watch};

use self::cluster::{Cluster, ClusterArguments, ClusterMessage};
pub(crate) use self::endpoint::Endpoint;
pub use self::endpoint::{OperateError, operate};
use self::gate::{Gate, Registry};
use self::hosts::Hosts;
use self::intake::IntakeArguments;
pub(crate) use self::intake::files_in;
use self::monitor::{Monitor, MonitorArguments, MonitorMessage};
use self::operator::Desk;
use crate::config::LOCAL;
use crate::engine::{Event, Notice, Outcome, StoredSample};
use crate::faults::{self, Victim};
use crate::journal::{Journal, Record, SampleBook};
use crate::monitor::Snapshot;
use crate::preflight::{self, Finding, Ready};
use crate::processes::Starter;
use crate::recipe;

/// How a cluster is launched.
#[derive(Clone, Debug)]
pub struct LaunchOptions {
    /// The `eaglet` executable that ranks are started from.
    pub executable: PathBuf,
    /// Format of the ranks' log files: `text` or `json`.
    pub log_format: String,
}

/// A running cluster.
pub struct Launched {
    cluster: ActorRef<ClusterMessage>,
    finished: oneshot::Receiver<Outcome>,
    snapshots: watch::Receiver<Snapshot>,
    server: tokio::task::JoinHandle<()>,
    life: tokio::task::JoinHandle<()>,
    observer: tokio::task::JoinHandle<()>,
    hosts: Hosts,
    callers: Vec<tokio::task::JoinHandle<()>>,
    directory: PathBuf,
}

impl Launched {
    /// What there is to see, always the newest.
    pub fn snapshots(&self) -> watch::Receiver<Snapshot> {
        self.snapshots.clone()
    }

    /// Finishes the step in flight, writes a checkpoint, ends.
    pub fn drain(&self) {
        // A cluster that is gone has ended already.
        let _ = self.cluster.cast(ClusterMessage::Event(Event::Drain));
    }

    /// Ends at once.
    pub fn stop(&self) {
        // As above.
        let _ = self.cluster.cast(ClusterMessage::Stop);
    }

    /// Resolves when the run is over. Cancel safety: safe.
    pub async fn finished(&mut self) -> Outcome {
        (&mut self.finished).await.unwrap_or_else(|_| Outcome::Failed {
            report: "the coordinator's root actor ended; see its log".to_owned(),
        })
    }

    /// Ends what is left; to be called when [`Self::finished`] has resolved.
    pub async fn close(self) {
        self.cluster.stop(None);
        self.hosts.quit().await;
        // A task that panicked has said so in the log.
        let _ = self.life.await;
        let _ = self.observer.await;
        self.callers.iter().for_each(tokio::task::JoinHandle::abort);
        self.server.abort();
        Endpoint::remove(&self.directory);
    }
}

/// Starts a cluster that is ready to be launched.
///
/// # Errors
/// In one line each: a wrong list of faults, or a run directory, journal or port that has changed since it was looked at.
pub async fn launch(ready: Ready, options: LaunchOptions) -> anyhow::Result<Launched> {
    faults::arm(Victim::Coordinator)?;
    let Ready {
        config,
        files,
        tokenizer,
        contract,
        places,
        warnings,
    } = ready;
    let mut warnings: Vec<String> = warnings.iter().map(Finding::to_string).collect();
    let directory = config.run.directory.clone();
    let (journal, replay) = Journal::open(&directory.join("journal"))?;
    if replay.records.is_empty() {
        preflight::refuse_orphans(&directory)?;
    }
    let mut engine = preflight::engine(recipe::settings(&config, contract), &replay.records, &config)?;
    if replay.cut_bytes > 0 {
        warnings.push(format!(
            "a torn tail of {} bytes was cut off the journal",
            replay.cut_bytes
        ));
    }
    engine.keep_checkpoints(|known| {
        let folder = directory.join(&known.folder);
        match checkpoint::verify(&folder) {
            Ok(()) => true,
            Err(error) => {
                // Old checkpoints are removed in the course of a run; only one that is there can be damaged.
                if folder.exists() {
                    warnings.push(format!(
                        "the checkpoint of step {} is passed over: {error}",
                        known.step
                    ));
                }
                false
            }
        }
    });
    if engine.checkpoints().is_empty() && engine.committed().0 > 0 {
        warnings.push(format!(
            "no checkpoint is left: the {} committed steps are done again from the start",
            engine.committed()
        ));
    }
    // Nothing of the directory was changed before it was clear that it belongs to this run.
    std::fs::write(directory.join("cluster.toml"), config.to_toml()?).map_err(|error| {
        anyhow::anyhow!(
            "{}: cannot write the resolved configuration: {error}",
            directory.display()
        )
    })?;
    CheckpointFolder::new(directory.join("checkpoints"))?;
    let store = SampleStore::open_at(&directory.join("samples.bin"), stored_bytes(&replay.records))?;

    let (listener, address) = transport::bind(&config.run.listen.to_string()).await?;
    let (token, operator_token, host_token) = (new_token()?, new_token()?, new_token()?);
    let registry = Registry::default();

    if !address.ip().is_loopback() {
        warnings.push(format!(
            "run.listen = {address} can be reached from other machines, and nothing that is said there is encrypted; \
             use 127.0.0.1 unless that network is yours alone"
        ));
    }
    let (monitor, snapshots, observer) = Monitor::start(MonitorArguments {
        config: config.clone(),
        directory: directory.clone(),
        records: &replay.records,
    })
    .await?;
    for text in warnings {
        // The monitor was started a moment ago.
        let _ = monitor.cast(MonitorMessage::Notice(Notice {
            warning: true,
            quiet: false,
            text,
        }));
    }
    let book = SampleBook::of(&replay.records);
    let mut rank_config = config.clone();
    for record in &replay.records {
        if let Record::SeatAdded { seat, threads } = record {
            anyhow::ensure!(
                !config.is_on_gpus(seat.role) || config.rank(*seat).is_some(),
                "{seat} was added to this run on the CPU, and its other {} ranks are on GPUs now; go on with device = \
                 \"cpu\", or add {seat} to cluster.toml with a GPU",
                seat.role
            );
            rank_config.add_rank(*seat, *threads);
        }
    }
    let calls = config.hosts.clone();
    let (finish, finished) = oneshot::channel();
    let (intake, requests) = mpsc::channel();
    let starter = Starter {
        executable: options.executable,
        coordinator: address.to_string(),
        token: token.clone(),
        host: LOCAL.to_owned(),
        network: (!config.hosts.is_empty()).then(|| address.ip()),
        run_directory: directory.clone(),
        log_format: options.log_format,
        places: Arc::new(places),
    };
    let hosts = Hosts::new(&config, starter, host_token.clone());
    let arguments = ClusterArguments {
        engine,
        journal,
        store,
        hosts: hosts.clone(),
        config: rank_config,
        intake,
        registry: registry.clone(),
        monitor,
        finished: finish,
    };
    let (cluster, life) = Actor::spawn(None, Cluster, arguments).await?;
    let gate = Gate { token, registry };
    let desk = Desk {
        token: operator_token.clone(),
        cluster: cluster.clone(),
        snapshots: snapshots.clone(),
    };
    let receiving = hosts.clone();
    let server = tokio::spawn(async move {
        if let Err(error) = transport::serve(listener, gate, receiving, desk).await {
            tracing::error!(error, "the control port is closed");
        }
    });
    intake::start(IntakeArguments {
        config,
        tokenizer: Arc::new(tokenizer),
        verifier_vocab_size: files.config().vocab_size,
        book,
        journal: directory.join("journal"),
        cluster: cluster.clone(),
        requests,
    });
    let endpoint = Endpoint {
        address: address.to_string(),
        pid: std::process::id(),
        token: operator_token,
        host_token,
    };
    if let Err(error) = endpoint.write(&directory) {
        // Training needs no operator.
        tracing::warn!(%error, "coordinator.json cannot be written: the live run cannot be asked anything");
    }
    // Hosts find the coordinator by that file.
    hosts.open(cluster.clone());
    let callers = calls
        .into_iter()
        .map(|host| callers::call(host, &directory, cluster.clone()))
        .collect();
    Ok(Launched {
        cluster,
        finished,
        snapshots,
        server,
        life,
        observer,
        hosts,
        callers,
        directory,
    })
}

/// Makes the run directory with its folder of logs.
///
/// # Errors
/// If it cannot be made.
pub fn prepare_directory(directory: &Path) -> anyhow::Result<()> {
    let logs = directory.join("logs");
    std::fs::create_dir_all(&logs).map_err(|error| {
        anyhow::anyhow!(
            "{}: cannot make the run directory: {error}; give run.directory a folder that you can write",
            directory.display()
        )
    })
}

/// Bytes of the sample store that the journal knows of.
fn stored_bytes(records: &[Record]) -> u64 {
    records
        .iter()
        .filter_map(|record| match record {
            Record::Accepted { location, .. }
            | Record::Retried {
                stored: Some(StoredSample { location, .. }),
                ..
            } => Some(location.offset + u64::from(location.len)),
            _ => None,
        })
        .max()
        .unwrap_or(0)
}

/// Compares in a time that does not tell how much of it is right.
fn is_secret(given: &str, secret: &str) -> bool {
    let pairs = given.bytes().zip(secret.bytes());
    given.len() == secret.len() && pairs.fold(0, |differences, (a, b)| differences | (a ^ b)) == 0
}

/// A secret that no earlier launch had.
fn new_token() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty())?;
    }
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
