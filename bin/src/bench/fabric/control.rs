//! Round trips on the control plane: a beat and its answer, on the very transport that ranks use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use eaglet_runtime::control::transport::{self, Accepted, Admit, Dialed, Joined, Operate, Receive, Refusal};
use eaglet_runtime::control::{
    Activity, Attach, Beat, BulkAddress, CoordinatorCommand, OperatorCall, OperatorReply, PROTOCOL, RankEvent,
};
use eaglet_runtime::ids::{Generation, Seat};
use eaglet_runtime::link::SenderOptions;
use serde::Serialize;

use super::Plan;
use super::link::{Link, Way};
use crate::bench::facts::quantile;

/// Size of the tensors beside which round trips are measured.
const BULK_BYTES: usize = 16 << 20;

#[derive(Debug, Serialize)]
pub(super) struct Control {
    pub(super) quiet: Trips,
    pub(super) beside_bulk: Trips,
}

/// Times of round trips.
#[derive(Debug, Serialize)]
pub(super) struct Trips {
    pub(super) count: usize,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
    /// What went over a link at the same time.
    pub(super) bulk_gb_s: Option<f64>,
}

pub(super) fn measure(count: usize, plan: &Plan<'_>) -> Result<Control> {
    let runtime = || {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot start a thread")
    };
    // Coordinator and rank have a thread each.
    let (coordinator, rank) = (runtime()?, runtime()?);
    let (listener, address) = coordinator.block_on(transport::bind("127.0.0.1:0"))?;
    coordinator.spawn(transport::serve(listener, Echo, Nobody, Nobody));
    let attach = Attach {
        protocol: PROTOCOL,
        token: "bench".to_owned(),
        seat: Seat::draft(0),
        generation: Generation(0),
        pid: std::process::id(),
        bulk: BulkAddress::default(),
    };
    let mut dialed = rank.block_on(transport::dial(&address.to_string(), attach))?;
    let mut trips = |plan: &Plan<'_>| rank.block_on(round_trips(&mut dialed, count, plan));
    let quiet = Trips::of(&trips(plan)?, None);
    let bulk = Bulk::start()?;
    bulk.wait_until_it_moves(plan)?;
    let (begun, before) = (Instant::now(), bulk.moved.load(Ordering::Relaxed));
    let times = trips(plan)?;
    let rate = (bulk.stop() - before) as f64 / begun.elapsed().as_secs_f64() / 1e9;
    Ok(Control {
        quiet,
        beside_bulk: Trips::of(&times, Some(rate)),
    })
}

impl Trips {
    fn of(times_ms: &[f64], bulk_gb_s: Option<f64>) -> Self {
        Self {
            count: times_ms.len(),
            p50_ms: quantile(times_ms, 0.5),
            p99_ms: quantile(times_ms, 0.99),
            max_ms: quantile(times_ms, 1.0),
            bulk_gb_s,
        }
    }
}

async fn round_trips(dialed: &mut Dialed, count: usize, plan: &Plan<'_>) -> Result<Vec<f64>> {
    let mut times_ms = Vec::with_capacity(count);
    for sequence in 0..count as u64 {
        plan.interrupt.check()?;
        let beat = Beat {
            sequence,
            activity: Activity::Computing,
            ..Beat::default()
        };
        let begun = Instant::now();
        dialed
            .events
            .send(RankEvent::Beat(beat))
            .await
            .context("the control stream has ended")?;
        match dialed.commands.message().await? {
            Some(CoordinatorCommand::BeatAck { sequence: answer }) if answer == sequence => {
                times_ms.push(begun.elapsed().as_secs_f64() * 1e3);
            }
            other => bail!("{other:?} where the answer to beat {sequence} was expected"),
        }
    }
    Ok(times_ms)
}

/// A coordinator that answers beats.
struct Echo;

impl Admit for Echo {
    fn admit(&self, accepted: Accepted) -> Result<(), String> {
        let Accepted {
            mut events, commands, ..
        } = accepted;
        tokio::spawn(async move {
            while let Ok(Some(event)) = events.next().await {
                if let RankEvent::Beat(Beat { sequence, .. }) = event
                    && commands
                        .send(CoordinatorCommand::BeatAck { sequence })
                        .await
                        .is_err()
                {
                    return;
                }
            }
        });
        Ok(())
    }
}

struct Nobody;

impl Receive for Nobody {
    fn receive(&self, _: Joined) -> Result<(), Refusal> {
        Err(Refusal::lasting("a bench has no other hosts"))
    }
}

impl Operate for Nobody {
    async fn operate(&self, _: OperatorCall) -> Option<OperatorReply> {
        None
    }
}

/// Threads that keep a link full.
struct Bulk {
    stop: Arc<AtomicBool>,
    moved: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Bulk {
    fn start() -> Result<Self> {
        let link = Link::open(Way::Memory, SenderOptions::default())?;
        let (stop, moved) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let tensor = Bytes::from(vec![7; BULK_BYTES]);
        let (until, counter) = (Arc::clone(&stop), Arc::clone(&moved));
        let thread = std::thread::spawn(move || {
            while !until.load(Ordering::Relaxed)
                && link.carry(8, BULK_BYTES, &|_| Some(tensor.clone())).is_ok()
            {
                counter.fetch_add(8 * BULK_BYTES as u64, Ordering::Relaxed);
            }
        });
        Ok(Self { stop, moved, thread })
    }

    /// Waits for the first tensors: round trips before them would be quiet ones.
    fn wait_until_it_moves(&self, plan: &Plan<'_>) -> Result<()> {
        while self.moved.load(Ordering::Relaxed) == 0 {
            plan.interrupt.check()?;
            ensure!(
                !self.thread.is_finished(),
                "the link broke before anything was moved"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Bytes that were moved.
    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        // A panic was reported by its thread, and shows in the rate.
        let _ = self.thread.join();
        self.moved.load(Ordering::Relaxed)
    }
}
