//! A rank process: one seat's occupant.
//!
//! Three kinds of threads: the control thread (the link to the coordinator, beats, the self-fence), the compute thread
//! (device, weights, everything in order), and the bulk threads (tensors in and out). The compute thread owns all state
//! and takes its work from one inbox, so nothing here is locked.
//!
//! RANK-1: a rank whose coordinator is silent for longer than its lease ends itself.
//! RANK-2: what belongs to an older epoch is dropped when it is taken from the inbox.
//! RANK-3: weights change only when a commit is carried out, and when a whole state replaces them.
//! RANK-4: whatever ends the compute thread is told to the coordinator, a panic too.

mod activity;
mod control;
mod device;
mod draft;
mod inbox;
mod nccl;
mod peer_links;
mod sink;
mod verifier;

pub(crate) use self::sink::STATES_FOLDER;

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use eaglet_runtime::control::{Activity, Attach, BulkAddress, CoordinatorCommand, PROTOCOL, RankEvent};
use eaglet_runtime::cuda::Cuda;
use eaglet_runtime::device::Cpu;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat};
use eaglet_runtime::link::{BulkListener, Endpoint, ListenerOptions, Network, SenderOptions};
use rustix::process::{Pid, Signal, getpid, kill_process};

use self::activity::ActivityGauge;
use self::control::Control;
use self::device::{RankDevice, guarded};
use self::inbox::{Inbox, Input, Nothing};
use self::nccl::AbortSwitch;
use self::peer_links::Here;
use crate::config::ClusterConfig;
use crate::faults::{self, Damage, Point, Victim};

/// How soon a worker looks again for room in a link.
const ROOM_INTERVAL: Duration = Duration::from_millis(2);

/// Exit code of a rank that fenced itself off.
pub const FENCED: i32 = 75;

/// What a rank process is started with.
#[derive(Clone, Debug)]
pub struct RankArguments {
    /// Where the coordinator listens.
    pub coordinator: String,
    /// Secret of the launch.
    pub token: String,
    /// The seat.
    pub seat: Seat,
    /// Which occupant of the seat.
    pub generation: Generation,
    /// The machine, as `cluster.toml` calls it.
    pub host: String,
    /// Address at which ranks of other machines reach this one; none in a cluster of one machine.
    pub network: Option<IpAddr>,
    /// The run directory.
    pub run_directory: PathBuf,
    /// The process that started this one.
    pub parent: u32,
}

/// Why a rank cannot go on.
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub(crate) struct RankFault {
    reason: String,
    /// Starting it again would end the same way.
    permanent: bool,
}

impl RankFault {
    /// A fault that a new start may heal.
    fn passing(reason: impl ToString) -> Self {
        Self {
            reason: reason.to_string(),
            permanent: false,
        }
    }

    /// A fault that stays whatever is started.
    fn permanent(reason: impl ToString) -> Self {
        Self {
            reason: reason.to_string(),
            permanent: true,
        }
    }
}

impl From<faults::Injected> for RankFault {
    fn from(fault: faults::Injected) -> Self {
        Self::passing(fault)
    }
}

/// What a worker of either role gets to work with.
struct Context {
    seat: Seat,
    here: Here,
    config: ClusterConfig,
    threads: usize,
    control: Control,
    activity: ActivityGauge,
    run_directory: PathBuf,
    wires: Wires,
}

/// How other threads of a rank reach its compute thread, and what it does over NCCL.
#[derive(Clone)]
struct Wires {
    /// The compute thread's own inbox, for what other threads of this rank have to tell it.
    inputs: crossbeam_channel::Sender<Input>,
    abort_switch: AbortSwitch,
}

impl Context {
    fn say(&self, event: RankEvent) {
        self.control.say(event);
    }

    fn enter(&self, activity: Activity) {
        self.activity.enter(activity);
    }

    /// Ends the process after its last words, without the end of anything in it.
    fn end_process(&self, fault: &RankFault) -> ! {
        tracing::error!(reason = fault.reason, "the process has to end");
        self.say(RankEvent::Fault {
            reason: fault.reason.clone(),
            permanent: fault.permanent,
        });
        self.control.finish();
        loop {
            // A process may always signal itself.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    /// Tells the coordinator of a link that broke; one that its sender closed in order is no news.
    fn say_broken(&self, from: Endpoint, epoch: Epoch, reason: String) {
        tracing::warn!(%from, reason, "a bulk link broke");
        self.say(RankEvent::LinkBroken {
            from: from.seat,
            generation: from.generation,
            epoch,
            reason,
        });
    }
}

/// What a worker can do without further input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// Nothing.
    Waits,
    /// Something will find room in a link soon.
    Blocked,
    /// There is more work.
    More,
}

/// A role's way of working.
trait Worker {
    /// Takes one input; commands that belong to the other role are faults.
    fn take(&mut self, input: Input) -> Result<(), RankFault>;

    /// Does a piece of work; called while the inbox is empty. Who waits for a peer in it keeps taking what arrives.
    fn proceed(&mut self, inbox: &mut Inbox) -> Result<Progress, RankFault>;
}

/// Runs a rank until it is told to quit; the calling thread becomes the compute thread.
///
/// # Errors
/// If the rank cannot start, or has told the coordinator why it cannot go on.
pub fn run(arguments: &RankArguments) -> anyhow::Result<()> {
    die_with_parent(arguments.parent)?;
    faults::arm(Victim::Rank(arguments.seat, Some(arguments.generation)))?;
    let _rank =
        tracing::info_span!("rank", seat = %arguments.seat, generation = arguments.generation.0).entered();
    let (inputs, arriving) = crossbeam_channel::unbounded();
    let name = bulk_name(&arguments.token, arguments.seat, arguments.generation);
    let (bulk_inputs, control_inputs) = (inputs.clone(), inputs.clone());
    let abort_switch = AbortSwitch::default();
    let switch = abort_switch.clone();
    let wires = Wires { inputs, abort_switch };
    let here = Endpoint {
        seat: arguments.seat,
        generation: arguments.generation,
    };
    let network = arguments.network.map(|address| Network {
        address: SocketAddr::from((address, 0)),
        token: arguments.token.clone(),
    });
    let listener = BulkListener::bind(&name, here, ListenerOptions::default(), network, move |event| {
        // The compute thread outlives the listener.
        let _ = bulk_inputs.send(Input::Bulk(event));
    })?;
    let activity = ActivityGauge::default();
    let attach = Attach {
        protocol: PROTOCOL,
        token: arguments.token.clone(),
        seat: arguments.seat,
        generation: arguments.generation,
        pid: std::process::id(),
        bulk: BulkAddress {
            host: arguments.host.clone(),
            name,
            network: listener.network_address(),
        },
    };
    let control = Control::start(
        arguments.coordinator.clone(),
        attach,
        activity.clone(),
        move |command| {
            switch.hear(&command);
            // As above.
            let _ = control_inputs.send(Input::Command(command));
        },
    )?;
    // RANK-4
    let result = guarded(|device| {
        work(
            arguments,
            &control,
            activity,
            &wires,
            &mut Inbox::new(arriving),
            device,
        )
    });
    if let Err(fault) = &result {
        tracing::error!(reason = fault.reason, "the rank cannot go on");
        control.say(RankEvent::Fault {
            reason: fault.reason.clone(),
            permanent: fault.permanent,
        });
    } else {
        control.say(RankEvent::Bye);
    }
    listener.close();
    control.finish();
    result.map_err(Into::into)
}

fn work(
    arguments: &RankArguments,
    control: &Control,
    activity: ActivityGauge,
    wires: &Wires,
    inbox: &mut Inbox,
    device: &mut String,
) -> Result<(), RankFault> {
    let mut worker: Option<Box<dyn Worker>> = None;
    let mut early = Vec::new();
    let mut progress = Progress::Waits;
    // The control thread ends the process when the coordinator is gone, so this ends only by `Quit` or a fault.
    loop {
        let patience = match progress {
            Progress::Waits => None,
            Progress::Blocked => Some(ROOM_INTERVAL),
            Progress::More => Some(Duration::ZERO),
        };
        let input = match (inbox.next(patience), &mut worker) {
            (Ok(input), _) => input,
            (Err(Nothing::Yet), Some(worker)) => {
                progress = worker.proceed(inbox)?;
                continue;
            }
            (Err(Nothing::Yet), None) => {
                progress = Progress::Waits;
                continue;
            }
            (Err(Nothing::Ever), _) => return Ok(()),
        };
        match (input, &mut worker) {
            (Input::Command(CoordinatorCommand::Quit), _) => return Ok(()),
            (Input::Command(CoordinatorCommand::Welcome { config }), slot @ None) => {
                let config = ClusterConfig::from_resolved(&config).map_err(|error| {
                    RankFault::permanent(format!("the coordinator's configuration: {error}"))
                })?;
                let context = context(
                    arguments,
                    config,
                    control.clone(),
                    activity.clone(),
                    wires.clone(),
                )?;
                let rank = context.config.rank(arguments.seat);
                let gpu = rank.and_then(|rank| context.config.gpu_of(rank));
                if let (Some(rank), Some(_)) = (rank, gpu) {
                    device.clone_from(&rank.device);
                }
                let mut made = match gpu {
                    Some(_) => worker_on::<Cuda>(context),
                    None => worker_on::<Cpu>(context),
                };
                for input in early.drain(..) {
                    made.take(input)?;
                }
                *slot = Some(made);
            }
            (input, Some(worker)) => worker.take(input)?,
            (input, None) => early.push(input),
        }
        // Everything that has arrived is taken in before work goes on.
        progress = Progress::More;
    }
}

/// The worker of a seat that computes on a device of this kind, if it computes at all.
fn worker_on<D: RankDevice>(context: Context) -> Box<dyn Worker> {
    match context.seat.role {
        Role::Verifier if context.config.samples.hidden_states.is_some() => {
            Box::new(verifier::StoredWorker::new(context))
        }
        Role::Verifier => Box::new(verifier::VerifierWorker::<D>::new(context)),
        Role::Draft => match context.config.run.extract_to.clone() {
            Some(folder) => Box::new(sink::SinkWorker::new(context, folder)),
            None => Box::new(draft::DraftWorker::<D>::new(context)),
        },
    }
}

fn context(
    arguments: &RankArguments,
    config: ClusterConfig,
    control: Control,
    activity: ActivityGauge,
    wires: Wires,
) -> Result<Context, RankFault> {
    let rank = config
        .rank(arguments.seat)
        .ok_or_else(|| RankFault::permanent(format!("cluster.toml has no seat {}", arguments.seat)))?;
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = config.threads(rank, cores);
    Ok(Context {
        seat: arguments.seat,
        here: Here {
            endpoint: Endpoint {
                seat: arguments.seat,
                generation: arguments.generation,
            },
            host: arguments.host.clone(),
            token: arguments.token.clone(),
        },
        threads,
        config,
        control,
        activity,
        run_directory: arguments.run_directory.clone(),
        wires,
    })
}

/// Options of every link to another rank.
fn link_options() -> SenderOptions {
    let corrupt = faults::pass(Point::Link, None) == Some(Damage::Corrupt);
    SenderOptions {
        // The first chunk is a header, the second a tensor.
        corrupt_nth: corrupt.then_some(1),
        ..SenderOptions::default()
    }
}

/// Options of links between the shards of a verifier. What one of them has under way is what a row needs, and who waits for
/// its peers has no other use for its memory, so nothing is gained by a bound on the queue.
fn shard_link_options() -> SenderOptions {
    SenderOptions {
        queue_messages: usize::MAX,
        queue_bytes: u64::MAX,
        ..link_options()
    }
}

/// The bulk listener's name: in the abstract namespace, so that no file is left behind. Every user of the machine can read
/// it, so it shows a digest and nothing of the launch's secret.
fn bulk_name(token: &str, seat: Seat, generation: Generation) -> String {
    let launch: String = Digest::of(token.as_bytes())
        .to_string()
        .chars()
        .take(12)
        .collect();
    format!("eaglet-{launch}-{seat}-{generation}")
}

/// Makes the kernel kill this process when the coordinator ends, however it ends.
fn die_with_parent(parent: u32) -> anyhow::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // It may have ended before the line above.
    let alive = rustix::process::getppid()
        .map(Pid::as_raw_nonzero)
        .map(|pid| pid.get() as u32);
    anyhow::ensure!(
        alive == Some(parent),
        "the coordinator that started this rank is gone"
    );
    Ok(())
}
