//! `eaglet bench recovery`: how long it takes until a fault is noticed, and until training goes on.
//!
//! A small cluster is launched and hurt from outside, again and again. Its draft has as much state as is asked for, since
//! a replacement must be given all of it. Only the first restart of a seat comes at once in a real run; here all do.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use eaglet_actors::config::{ClusterConfig, RankConfig};
use eaglet_actors::recipe;
use eaglet_runtime::draft::ParameterLayout;
use eaglet_runtime::ids::{Role, Seat};
use eaglet_runtime::verifier::VerifierFiles;
use rustix::process::Signal;
use serde::Serialize;

use super::facts::{Machine, load, percentile};
use super::interrupt::Interrupt;
use super::run::{Run, send};

/// Commits between two faults, so that each meets a cluster that is at work.
const COMMITS_BETWEEN: usize = 2;
/// Bytes of state per parameter: weight, first and second moment in f32.
const STATE_BYTES: usize = 12;

/// `eaglet bench recovery`.
#[derive(Debug, Args)]
pub(crate) struct RecoveryArgs {
    /// The cluster file that names verifier and samples; its ranks and its training are replaced.
    #[arg(long, default_value = "cluster.toml")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// How many draft ranks.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) drafts: u16,
    /// Weights and moments of a draft rank, in MB.
    #[arg(long, default_value_t = 100)]
    pub(crate) state_mb: usize,
    /// How often each fault strikes each role.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// Print one JSON object with all samples instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What was measured of one fault of one role.
#[derive(Debug, Serialize)]
struct Series {
    fault: &'static str,
    role: &'static str,
    /// From the signal to the coordinator's knowledge; of the coordinator, to the end of its last rank.
    detect_ms: Vec<u64>,
    /// From the signal to the next step that is committed after it was noticed.
    recover_ms: Vec<u64>,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Report {
    machine: Machine,
    draft_ranks: u16,
    state_bytes: usize,
    dead_after_ms: u64,
    series: Vec<Series>,
}

/// Measures and prints.
///
/// # Errors
/// If the cluster does not work, or `out` cannot be written to.
pub(super) fn recovery(arguments: &RecoveryArgs, config: ClusterConfig, out: &mut impl Write) -> Result<()> {
    let load_before = load();
    let (config, state_bytes) = cluster(config, arguments)?;
    let mut report = Report {
        machine: Machine::look(load_before),
        draft_ranks: arguments.drafts,
        state_bytes,
        dead_after_ms: config.supervision.dead_after_ms,
        series: Vec::new(),
    };
    let mut run = Run::prepare(config, Interrupt::listen()?)?;
    run.launch()?;
    run.wait_for_commits(COMMITS_BETWEEN)?;
    for (fault, signal) in [("kill", Signal::KILL), ("stop", Signal::STOP)] {
        for (role, name) in [(Role::Verifier, "verifier"), (Role::Draft, "draft")] {
            let mut series = Series::new(fault, name);
            for repeat in 0..arguments.repeats {
                let seats = if role == Role::Draft { arguments.drafts } else { 1 };
                let index = (repeat % u32::from(seats)) as u16;
                series.hurt(&mut run, Seat { role, index }, signal)?;
            }
            report.series.push(series);
        }
    }
    let mut series = Series::new("kill", "coordinator");
    for _ in 0..arguments.repeats {
        let (killed_ms, outlived_ms) = run.kill_coordinator()?;
        let before = run.commits()?;
        run.launch()?;
        series.detect_ms.push(outlived_ms);
        let next_ms = run.wait_for_commit_after(killed_ms + outlived_ms)?;
        series.recover_ms.push(next_ms - killed_ms);
        run.wait_for_commits(before + COMMITS_BETWEEN)?;
    }
    report.series.push(series);
    drop(run);
    report.machine = Machine::look(load_before);
    if arguments.json {
        serde_json::to_writer(&mut *out, &report)?;
        writeln!(out)?;
        return Ok(());
    }
    report.write(out).context("cannot print")
}

impl Series {
    fn new(fault: &'static str, role: &'static str) -> Self {
        Self {
            fault,
            role,
            detect_ms: Vec::new(),
            recover_ms: Vec::new(),
        }
    }

    fn hurt(&mut self, run: &mut Run, seat: Seat, signal: Signal) -> Result<()> {
        let (pid, generation) = run.rank(seat)?;
        let sent_ms = send(pid, signal)?;
        let known_ms = run.wait_for_loss(seat, generation)?;
        let next_ms = run.wait_for_commit_after(known_ms)?;
        self.detect_ms.push(known_ms.saturating_sub(sent_ms));
        self.recover_ms.push(next_ms - sent_ms);
        let commits = run.commits()?;
        run.wait_for_commits(commits + COMMITS_BETWEEN)
    }
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        let Machine { cores, cpu, load } = &self.machine;
        writeln!(
            out,
            "{} draft ranks with {:.0} MB of state each, 1 verifier rank; silence is noticed after {} ms",
            self.draft_ranks,
            self.state_bytes as f64 / 1e6,
            self.dead_after_ms
        )?;
        writeln!(
            out,
            "{cores} cores, {cpu}, load {:.1} before and {:.1} after\n",
            load[0], load[1]
        )?;
        writeln!(
            out,
            "{:<6} {:<12} {:>4} {:>12} {:>12} {:>12} {:>12}",
            "fault", "role", "n", "detect p50", "detect p99", "recover p50", "recover p99"
        )?;
        for series in &self.series {
            let of = |values: &[u64], percent| {
                percentile(values, percent).map_or_else(|| "-".to_owned(), |ms| format!("{ms} ms"))
            };
            writeln!(
                out,
                "{:<6} {:<12} {:>4} {:>12} {:>12} {:>12} {:>12}",
                series.fault,
                series.role,
                series.detect_ms.len(),
                of(&series.detect_ms, 50),
                of(&series.detect_ms, 99),
                of(&series.recover_ms, 50),
                of(&series.recover_ms, 99)
            )?;
        }
        writeln!(
            out,
            "\ndetect: from the signal to the coordinator's knowledge; of the coordinator, to the end of its last rank\n\
             recover: from the signal to the next committed step"
        )
    }
}

/// A cluster that trains small rows for as long as it is let, and a draft with as much state as asked for; and how much
/// that is, in bytes.
fn cluster(mut config: ClusterConfig, arguments: &RecoveryArgs) -> Result<(ClusterConfig, usize)> {
    let rank = |role| RankConfig {
        threads: 1,
        ..RankConfig::new(role)
    };
    config.ranks = vec![rank(Role::Verifier)];
    config.ranks.extend((0..arguments.drafts).map(|seat| RankConfig {
        seat,
        ..rank(Role::Draft)
    }));
    // More than a long measurement takes; every pass of a sample is a unit that the ledger holds.
    config.training.passes = 1000;
    config.training.rows_per_step = Some(arguments.drafts);
    config.training.steps = None;
    config.training.tokens_per_row = 64;
    config.training.ttt_steps = 1;
    config.training.evaluate_every_steps = 0;
    config.samples.held_out = Vec::new();
    config.samples.held_out_every = 0;
    config.checkpoints.every_steps = 20;
    for restarts in [&mut config.verifier_restarts, &mut config.draft_restarts] {
        restarts.max = 1_000_000;
        restarts.backoff_initial_ms = 1;
        restarts.backoff_max_ms = 1;
    }
    let files = VerifierFiles::open(&config.verifier.path)?;
    let aux_layers = config.verifier.aux_layers.as_ref().map_or(3, Vec::len);
    let parameters = |width: usize| -> Result<usize> {
        let mut sized = config.clone();
        sized.draft.intermediate_size = Some(width);
        let spec = recipe::draft_spec(&sized, files.config(), aux_layers)?;
        Ok(ParameterLayout::new(&spec)?.len())
    };
    let (one, two) = (parameters(1)?, parameters(2)?);
    let wanted = arguments.state_mb.saturating_mul(1_000_000) / STATE_BYTES;
    ensure!(
        wanted >= one,
        "--state-mb {}: the smallest draft of this verifier has {} MB of weights and moments",
        arguments.state_mb,
        (one * STATE_BYTES).div_ceil(1_000_000)
    );
    let width = 1 + (wanted - one) / (two - one);
    let state_bytes = parameters(width)? * STATE_BYTES;
    config.draft.intermediate_size = Some(width);
    Ok((config, state_bytes))
}
