//! `eaglet bench coordinator`: what the coordinator costs as the cluster grows, with its real engine and journal among
//! simulated ranks that answer at once. Half of the seats extract, half of them train.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use super::facts::{Machine, Spread, load};
use super::interrupt::Interrupt;
use super::model::{Model, Shape, StepCost};
use super::print;

/// `eaglet bench coordinator`.
#[derive(Debug, Args)]
pub(crate) struct CoordinatorArgs {
    /// Seats of a cluster, half of them verifier ranks; may be repeated.
    #[arg(long, value_name = "N", default_values_t = [2, 8, 64, 256, 1024],
          value_parser = clap::value_parser!(u16).range(2..=8192))]
    seats: Vec<u16>,
    /// Steps of each cluster.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(4..))]
    steps: u64,
    /// Where the journal is written, as that of a run is.
    #[arg(long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    clusters: Vec<Cluster>,
}

/// One size of cluster.
#[derive(Debug, Serialize)]
struct Cluster {
    seats: u16,
    verifier_ranks: u16,
    draft_ranks: u16,
    /// Engine time from the launch to the first commit, without reading samples.
    start_ms: f64,
    start_events: u64,
    events_per_step: f64,
    commands_per_step: f64,
    journal_bytes_per_step: f64,
    engine_us_per_event: f64,
    slowest_event_ms: f64,
    /// Engine and journal, per step.
    engine_ms: Spread,
    journal_ms: Spread,
    total_ms: Spread,
    /// Engine time of one beat of every rank.
    beats_ms: f64,
    /// Time of one look for the views.
    view_ms: f64,
}

/// Measures and prints.
///
/// # Errors
/// If the folder for the journal cannot be written, or `out`.
pub(crate) fn coordinator(arguments: &CoordinatorArgs, out: &mut impl Write) -> Result<()> {
    let (load_before, interrupt) = (load(), Interrupt::listen()?);
    let clusters = arguments
        .seats
        .iter()
        .map(|&seats| measure(seats, arguments, &interrupt))
        .collect::<Result<_>>()?;
    let report = Report {
        bench: "coordinator",
        machine: Machine::look(load_before),
        clusters,
    };
    print(&report, arguments.json, out, Report::write)
}

fn measure(seats: u16, arguments: &CoordinatorArgs, interrupt: &Interrupt) -> Result<Cluster> {
    let folder = tempfile::tempdir_in(&arguments.directory)
        .with_context(|| format!("cannot make a folder in {}", arguments.directory.display()))?;
    let verifiers = seats / 2;
    let shape = Shape {
        verifiers,
        drafts: seats - verifiers,
        steps: arguments.steps,
    };
    let mut model = Model::start(shape, Some(&folder.path().join("journal")))?;
    let start = model.begin(interrupt)?;
    let (beats_ms, view_ms) = (model.beats()?, model.view());
    let steps = model.go_on(interrupt)?;
    let mean = |what: fn(&StepCost) -> f64| steps.iter().map(what).sum::<f64>() / steps.len().max(1) as f64;
    let spread = |what: fn(&StepCost) -> f64| Spread::of(&steps.iter().map(what).collect::<Vec<_>>());
    let events_per_step = mean(|step| step.events as f64);
    Ok(Cluster {
        seats,
        verifier_ranks: shape.verifiers,
        draft_ranks: shape.drafts,
        start_ms: start.engine_ms,
        start_events: start.events,
        events_per_step,
        commands_per_step: mean(|step| step.commands as f64),
        journal_bytes_per_step: mean(|step| step.journal_bytes as f64),
        engine_us_per_event: 1e3 * mean(|step| step.engine_ms) / events_per_step.max(1.0),
        slowest_event_ms: spread(|step| step.slowest_event_ms).max,
        engine_ms: spread(|step| step.engine_ms),
        journal_ms: spread(|step| step.journal_ms),
        total_ms: spread(|step| step.engine_ms + step.journal_ms),
        beats_ms,
        view_ms,
    })
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}\n", self.machine)?;
        writeln!(
            out,
            "{:>5} {:>10} {:>7} {:>9} {:>9} {:>9} {:>11} {:>11} {:>10} {:>9} {:>8}",
            "seats",
            "start ms",
            "events",
            "commands",
            "µs/event",
            "slowest",
            "engine ms",
            "journal ms",
            "journal B",
            "beats ms",
            "view ms"
        )?;
        for cluster in &self.clusters {
            writeln!(
                out,
                "{:>5} {:>10.1} {:>7.0} {:>9.0} {:>9.2} {:>9.3} {:>11.3} {:>11.3} {:>10.0} {:>9.3} {:>8.3}",
                cluster.seats,
                cluster.start_ms,
                cluster.events_per_step,
                cluster.commands_per_step,
                cluster.engine_us_per_event,
                cluster.slowest_event_ms,
                cluster.engine_ms.median,
                cluster.journal_ms.median,
                cluster.journal_bytes_per_step,
                cluster.beats_ms,
                cluster.view_ms
            )?;
        }
        writeln!(
            out,
            "\nper step, but for: start ms, from the launch to the first commit; slowest, the slowest event of all steps in ms;\n\
             beats ms, a beat of every rank; view ms, one look for the views"
        )
    }
}
