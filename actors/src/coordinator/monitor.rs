//! Tells people: the snapshot that views draw, `status.json`, `metrics.jsonl`. Nothing reads them back to decide anything.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use eaglet_runtime::control::{Acceptance, Activity};
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use tokio::sync::watch;

use super::times::{Rate, Shares, WorkTimes};
use crate::config::ClusterConfig;
use crate::engine::{EngineView, Notice, Phase, SeatView, StepReport};
use crate::faults::unix_ms;
use crate::journal::Record;
use crate::monitor::{self, Point, RankState, RankView, SampleCounts, ShardView, Snapshot, StepAccuracy};

/// Views get a new snapshot at most this often.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(100);
/// `status.json` is written at most this often.
const STATUS_INTERVAL: Duration = Duration::from_millis(250);
/// Points kept of each curve.
const CURVE_POINTS: usize = 4096;
/// Events kept.
const EVENTS: usize = 100;

/// The actor.
pub(super) struct Monitor;

/// What it is made from.
pub(super) struct MonitorArguments<'a> {
    pub(super) config: ClusterConfig,
    pub(super) directory: PathBuf,
    pub(super) records: &'a [Record],
}

/// What it reacts to.
pub(super) enum MonitorMessage {
    /// The engine has moved.
    View(Box<EngineView>),
    /// A line for the user.
    Notice(Notice),
    /// A step was committed.
    Committed { report: StepReport, unix_ms: u64 },
    /// A rank was lost.
    Lost {
        seat: Seat,
        generation: Generation,
        cause: String,
        unix_ms: u64,
    },
    /// Acceptance was measured.
    Evaluated { step: u64, acceptance: Acceptance },
    /// The run is over, and how it ended.
    Finished {
        summary: String,
        checkpoint: Option<PathBuf>,
    },
}

pub(super) struct MonitorState {
    snapshot: Snapshot,
    views: watch::Sender<Snapshot>,
    started: Instant,
    shown: Instant,
    written: Instant,
    directory: PathBuf,
    status: PathBuf,
    metrics: Option<File>,
    extraction: Rate,
    training: Rate,
    trained_tokens: u64,
    steps: Rate,
    times: WorkTimes,
    /// The newest epoch that was formed.
    formed: Option<Epoch>,
}

impl Monitor {
    pub(super) async fn start(
        arguments: MonitorArguments<'_>,
    ) -> anyhow::Result<(
        ActorRef<MonitorMessage>,
        watch::Receiver<Snapshot>,
        tokio::task::JoinHandle<()>,
    )> {
        let MonitorArguments {
            config,
            directory,
            records,
        } = arguments;
        let mut snapshot = Snapshot {
            run: config.run.name.clone(),
            phase: "starting".to_owned(),
            ..Snapshot::default()
        };
        for record in records {
            if let Record::Committed { report, .. } = record {
                show_report(&mut snapshot, report);
            }
        }
        let path = directory.join("metrics.jsonl");
        let metrics = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .map_err(|error| anyhow::anyhow!("{}: cannot write metrics: {error}", path.display()))?;
        let (views, receiver) = watch::channel(snapshot.clone());
        let now = Instant::now();
        let state = MonitorState {
            snapshot,
            views,
            started: now,
            shown: now,
            written: now,
            status: directory.join("status.json"),
            directory,
            metrics: Some(metrics),
            extraction: Rate::default(),
            training: Rate::default(),
            trained_tokens: 0,
            steps: Rate::default(),
            times: WorkTimes::default(),
            formed: None,
        };
        let (actor, life) = Actor::spawn(None, Self, state).await?;
        Ok((actor, receiver, life))
    }
}

impl Actor for Monitor {
    type Msg = MonitorMessage;
    type State = MonitorState;
    type Arguments = MonitorState;

    async fn pre_start(
        &self,
        _: ActorRef<MonitorMessage>,
        mut state: MonitorState,
    ) -> Result<MonitorState, ActorProcessingErr> {
        state.publish(true);
        Ok(state)
    }

    async fn handle(
        &self,
        myself: ActorRef<MonitorMessage>,
        message: MonitorMessage,
        state: &mut MonitorState,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            MonitorMessage::View(view) => {
                let before = occupants(&state.snapshot.ranks);
                state.look(&view);
                // Whoever asks for the ranks after a change of them is to see it.
                let is_news = occupants(&state.snapshot.ranks) != before;
                state.publish(is_news);
            }
            MonitorMessage::Notice(notice) => {
                let mark = if notice.warning { "! " } else { "" };
                state.note(format!("{mark}{}", notice.text));
                state.publish(true);
            }
            MonitorMessage::Lost {
                seat,
                generation,
                cause,
                unix_ms,
            } => state.record(&serde_json::json!({
                "event": "lost",
                "seat": seat.to_string(),
                "generation": generation,
                "cause": cause,
                "unix_ms": unix_ms,
            })),
            MonitorMessage::Committed { report, unix_ms } => {
                let now = Instant::now();
                state.trained_tokens += report.tokens;
                state.training.add(now, state.trained_tokens);
                state.steps.add(now, report.step);
                show_report(&mut state.snapshot, &report);
                if !report.replay {
                    let ranks = state.times.line();
                    state.record(&serde_json::json!({
                        "step": report.step,
                        "loss": report.loss,
                        "ttt": report.ttt,
                        "learning_rate": report.learning_rate,
                        "tokens": report.tokens,
                        "trained_tokens": report.trained_tokens,
                        "ranks": ranks,
                        "elapsed_s": state.started.elapsed().as_secs_f64(),
                        "unix_ms": unix_ms,
                    }));
                }
                state.publish(true);
            }
            MonitorMessage::Evaluated { step, acceptance } => {
                state.show_acceptance(step, &acceptance);
                state.record(&serde_json::json!({
                    "step": step,
                    "acceptance_length": acceptance.length(),
                    "acceptance": acceptance,
                    "elapsed_s": state.started.elapsed().as_secs_f64(),
                }));
                state.publish(true);
            }
            MonitorMessage::Finished { summary, checkpoint } => {
                state.snapshot.finished = Some(summary);
                state.snapshot.phase = "finished".to_owned();
                if let Some(checkpoint) = checkpoint {
                    state.snapshot.checkpoint = Some(state.directory.join(checkpoint).display().to_string());
                }
                state.publish(true);
                state.write_status();
                myself.stop(None);
            }
        }
        Ok(())
    }
}

impl MonitorState {
    fn look(&mut self, view: &EngineView) {
        let now = Instant::now();
        self.extraction.add(now, view.extracted_tokens);
        self.times.look(now, &view.seats);
        let snapshot = &mut self.snapshot;
        snapshot.phase = match view.phase {
            Phase::Preparing => "reading samples",
            Phase::Training if view.waiting_for_samples => "waiting for samples",
            Phase::Training => "training",
            Phase::Closing { drained: false } => "closing",
            Phase::Closing { drained: true } => "draining",
            Phase::Leaving | Phase::Finished => "leaving",
        }
        .to_owned();
        let times = &self.times;
        snapshot.ranks = view
            .seats
            .iter()
            .map(|seat| rank_view(seat, times.shares(now, seat)))
            .collect();
        snapshot
            .ranks
            .sort_by_key(|rank| (rank.seat.role != Role::Verifier, rank.seat.index));
        snapshot.samples = SampleCounts {
            intake: view.ledger.intake,
            pending: view.ledger.pending,
            leased: view.ledger.leased,
            extracted: view.ledger.extracted,
            trained: view.ledger.trained,
            quarantined: view.ledger.quarantined,
            held_out: view.held_out,
        };
        snapshot.step = Step(view.committed);
        snapshot.total_steps = (view.total_steps > 0).then_some(Step(view.total_steps));
        snapshot.epoch = view.epoch;
        snapshot.extraction_tokens_per_s = self.extraction.per_second(now);
        snapshot.training_tokens_per_s = self.training.per_second(now);
        let rate = self.steps.per_second(now);
        let left = view.total_steps.saturating_sub(view.committed);
        snapshot.eta_s = (rate > 0.0).then(|| (left as f32 / rate) as u64);
        if let Some(checkpoint) = &view.checkpoint {
            snapshot.checkpoint = Some(self.directory.join(checkpoint).display().to_string());
        }
        let formed = view.formed.then_some(view.epoch);
        if formed.is_some() && formed != self.formed {
            self.formed = formed;
            self.record(&serde_json::json!({
                "event": "epoch",
                "epoch": view.epoch.to_string(),
                "step": view.committed,
                "unix_ms": unix_ms(),
            }));
        }
    }

    fn show_acceptance(&mut self, step: u64, acceptance: &Acceptance) {
        let shown = &mut self.snapshot.acceptance;
        let Some(length) = acceptance.length() else { return };
        shown.latest = Some(length as f32);
        let verifications = acceptance.verifications.max(1) as f32;
        shown.per_position = acceptance
            .accepted_at
            .iter()
            .map(|&n| n as f32 / verifications)
            .collect();
        push(
            &mut shown.history,
            Point {
                step: Step(step),
                value: length as f32,
            },
        );
        self.note(format!(
            "acceptance length {length:.2} on held-out answers at step {step}"
        ));
    }

    fn note(&mut self, text: String) {
        let seconds = self.started.elapsed().as_secs();
        let time = format!(
            "{:02}:{:02}:{:02}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        );
        self.snapshot.events_total += 1;
        let events = &mut self.snapshot.events;
        events.push(monitor::Event { time, text });
        if events.len() > EVENTS {
            events.remove(0);
        }
    }

    fn record(&mut self, line: &serde_json::Value) {
        if let Some(file) = &mut self.metrics
            && let Err(error) = writeln!(file, "{line}")
        {
            tracing::warn!(%error, "metrics.jsonl cannot be written any more");
            self.metrics = None;
        }
    }

    fn publish(&mut self, now: bool) {
        if now || self.shown.elapsed() >= SNAPSHOT_INTERVAL {
            self.shown = Instant::now();
            self.views.send_replace(self.snapshot.clone());
        }
        if self.written.elapsed() >= STATUS_INTERVAL {
            self.written = Instant::now();
            self.write_status();
        }
    }

    /// Written beside and renamed in, so that a reader never sees half of it.
    fn write_status(&self) {
        let beside = self.status.with_extension("json.partial");
        let written = serde_json::to_vec(&self.snapshot)
            .map_err(std::io::Error::from)
            .and_then(|bytes| std::fs::write(&beside, bytes))
            .and_then(|()| std::fs::rename(&beside, &self.status));
        if let Err(error) = written {
            // On a full disk there is half of it; if it cannot be removed either, the next one replaces it.
            let _ = std::fs::remove_file(&beside);
            tracing::debug!(%error, "status.json cannot be written");
        }
    }
}

fn occupants(ranks: &[RankView]) -> Vec<(Seat, Generation, Option<u32>)> {
    let occupant = |rank: &RankView| (rank.seat, rank.generation, rank.pid);
    ranks.iter().map(occupant).collect()
}

fn rank_view(seat: &SeatView, shares: Option<Shares>) -> RankView {
    // What the last occupant of an empty seat said is no longer true.
    let beat = seat.beat.filter(|_| seat.pid != 0);
    let activity = beat.map(|beat| beat.activity).unwrap_or_default();
    let state = match seat.status {
        "restarting" => RankState::Restarting,
        "host absent" => RankState::HostAbsent,
        "starting" => RankState::Starting,
        "loading" => RankState::Loading,
        "gone" => RankState::Gone,
        "leaving" => RankState::Leaving,
        _ => match activity {
            Activity::Loading => RankState::Loading,
            Activity::Extracting | Activity::Generating | Activity::AwaitingPeers => RankState::Extracting,
            Activity::Computing | Activity::Reducing | Activity::AwaitingCommit | Activity::Applying => {
                RankState::Training
            }
            Activity::Idle
            | Activity::Meeting
            | Activity::Donating
            | Activity::Saving
            | Activity::Evaluating => RankState::Idle,
        },
    };
    let lanes = format!("{} rows a step", seat.lanes.len());
    let detail = match activity {
        Activity::Computing if seat.lanes.len() != 1 => &lanes,
        Activity::Idle
        | Activity::Loading
        | Activity::Extracting
        | Activity::Computing
        | Activity::AwaitingPeers
        | Activity::AwaitingCommit => "",
        Activity::Generating => "answering held-out prompts",
        Activity::Meeting => "meeting its peers over NCCL",
        Activity::Reducing => "summing gradients",
        Activity::Applying => "applying the step",
        Activity::Donating => "giving its state to a peer",
        Activity::Saving => "writing a checkpoint",
        Activity::Evaluating => "measuring acceptance",
    };
    RankView {
        seat: seat.seat,
        generation: seat.generation,
        pid: (seat.pid != 0).then_some(seat.pid),
        state,
        restarts: seat.restarts,
        lanes: seat.lanes.clone(),
        rss_bytes: beat.map_or(0, |beat| beat.rss_bytes),
        beat_age_ms: beat.map(|_| seat.silent_ms),
        shard: seat.shard.map(|(replica, shard)| ShardView {
            replica,
            stage: shard.stage,
            slice: shard.slice,
        }),
        busy: shares.map(|shares| shares.busy),
        waiting: shares.map(|shares| shares.waiting),
        idle: shares.map(|shares| shares.idle),
        detail: [
            seat.host.as_ref().map(|host| format!("on {host}")),
            place_in_team(seat),
            time_spent(seat, shares),
            Some(detail.to_owned()),
        ]
        .into_iter()
        .flatten()
        .filter(|words| !words.is_empty())
        .collect::<Vec<_>>()
        .join("; "),
    }
}

/// How a rank that works spends its time, and what it waits for.
fn time_spent(seat: &SeatView, shares: Option<Shares>) -> Option<String> {
    let Shares { busy, waiting, idle } = shares.filter(|_| seat.status == "ready")?;
    let mut words = Vec::new();
    let input = match seat.seat.role {
        Role::Verifier => "without a row",
        Role::Draft => "waiting for rows",
    };
    for (share, what) in [(busy, "busy"), (waiting, "waiting for peers"), (idle, input)] {
        let percent = (100.0 * share).round();
        if percent > 0.0 || what == "busy" {
            words.push(format!("{percent} % {what}"));
        }
    }
    Some(words.join(", "))
}

/// Which part of which verifier a rank holds, if there is more than one part.
fn place_in_team(seat: &SeatView) -> Option<String> {
    let (replica, shard) = seat.shard.filter(|(_, shard)| shard.stages * shard.slices > 1)?;
    let mut place = format!("replica {replica}");
    if shard.stages > 1 {
        place.push_str(&format!(" stage {}", shard.stage));
    }
    if shard.slices > 1 {
        place.push_str(&format!(" slice {}", shard.slice));
    }
    if seat.status == "waiting" {
        place.push_str(", waits for the others");
    }
    Some(place)
}

fn show_report(snapshot: &mut Snapshot, report: &StepReport) {
    let step = Step(report.step);
    while snapshot.loss.last().is_some_and(|point| point.step >= step) {
        snapshot.loss.pop();
    }
    push(
        &mut snapshot.loss,
        Point {
            step,
            value: report.loss as f32,
        },
    );
    snapshot.learning_rate = report.learning_rate;
    snapshot.accuracy = report
        .ttt
        .iter()
        .map(|ttt| StepAccuracy {
            full: (ttt.full_correct / ttt.full_total.max(1.0)) as f32,
            conditional: (ttt.conditional_correct / ttt.conditional_total.max(1.0)) as f32,
        })
        .collect();
}

fn push(curve: &mut Vec<Point>, point: Point) {
    curve.push(point);
    if curve.len() > CURVE_POINTS {
        // Every second point of the older half keeps the shape at half the size.
        let half = curve.len() / 2;
        let mut index = 0;
        curve.retain(|_| {
            index += 1;
            index > half || index % 2 == 0
        });
    }
}
