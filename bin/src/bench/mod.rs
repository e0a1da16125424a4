//! `eaglet bench`: measurements that anybody can repeat on their own machine.

mod coordinator;
mod device;
mod end_to_end;
mod extract;
mod fabric;
mod facts;
mod gemm;
mod interrupt;
mod model;
mod picture;
mod recovery;
mod run;
mod stages;
mod train;

use std::io::Write;

use anyhow::Result;
use clap::Subcommand;
use eaglet_runtime::hub::Need;

use crate::cli::Exit;
use crate::{fetch, run as cluster_file};

/// `eaglet bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Matrix products of some shapes, against the machine's limit.
    Gemm(gemm::GemmArgs),
    /// A draft's training step: tokens per second, and where the time goes.
    Train(train::TrainArgs),
    /// A verifier's hidden states: tokens per second, and where the time goes.
    Extract(extract::ExtractArgs),
    /// Moving data: tensors within a host and between hosts, control round trips, votes and journal.
    Fabric(fabric::FabricArgs),
    /// What the coordinator costs as the cluster grows, among simulated ranks.
    Coordinator(coordinator::CoordinatorArgs),
    /// A whole run, from the launch to the last commit, and how its ranks spend their time.
    EndToEnd(end_to_end::EndToEndArgs),
    /// Hurt a small cluster again and again: how long until a fault is noticed, and until training goes on.
    Recovery(recovery::RecoveryArgs),
}

/// Measures and prints.
///
/// # Errors
/// If what is asked for cannot be measured.
pub(crate) fn command(command: &BenchCommand) -> Result<Exit> {
    let out = &mut std::io::stdout().lock();
    match command {
        BenchCommand::Gemm(arguments) => gemm::gemm(arguments, out)?,
        BenchCommand::Train(arguments) => train::train(arguments, out)?,
        BenchCommand::Extract(arguments) => extract::extract(arguments, out)?,
        BenchCommand::Fabric(arguments) => fabric::fabric(arguments, out)?,
        BenchCommand::Coordinator(arguments) => coordinator::coordinator(arguments, out)?,
        BenchCommand::EndToEnd(arguments) => return end_to_end::end_to_end(arguments, out),
        BenchCommand::Recovery(arguments) => {
            let mut config = match cluster_file::load(&arguments.cluster, &arguments.sets) {
                Ok(config) => config,
                Err(exit) => return Ok(exit),
            };
            fetch::verifier(&mut config, Need::Whole)?;
            recovery::recovery(arguments, config, out)?;
        }
    }
    Ok(Exit::Done)
}

/// Prints a report as one line of JSON, or as `text` writes it.
fn print<R: serde::Serialize, W: Write>(
    report: &R,
    json: bool,
    out: &mut W,
    text: impl FnOnce(&R, &mut W) -> std::io::Result<()>,
) -> Result<()> {
    if json {
        serde_json::to_writer(&mut *out, report)?;
        writeln!(out)?;
    } else {
        text(report, out)?;
    }
    Ok(())
}
