//! Which run a command is about, and how a live one is asked.

use std::io;
use std::path::PathBuf;

use anyhow::{Context, Result};
use eaglet_actors::config::{self, ClusterConfig, Survey};
use eaglet_actors::coordinator;
use eaglet_runtime::control::{OperatorReply, OperatorRequest};

use crate::cli::{Exit, RunArgs};
use crate::{launch, samples};

/// Reads a cluster file and all that overrides it, with what is wrong and where.
pub(crate) fn survey(path: &std::path::Path, sets: &[String]) -> Survey {
    ClusterConfig::survey(path, config::environment(), sets)
}

/// Reads a cluster file and all that overrides it; prints its problems, one a line, if there are any.
pub(crate) fn load(path: &std::path::Path, sets: &[String]) -> Result<ClusterConfig, Exit> {
    ClusterConfig::load(path, config::environment(), sets).map_err(|error| {
        // If stderr is gone there is nobody left who could be told.
        let _ = io::Write::write_fmt(&mut io::stderr().lock(), format_args!("{error}\n"));
        Exit::BadInput
    })
}

/// The configuration that the cluster file gives.
pub(crate) fn config(run: &RunArgs) -> Result<ClusterConfig, Exit> {
    load(&run.cluster, &run.sets)
}

/// The directory of the run that is meant.
pub(crate) fn directory(run: &RunArgs) -> Result<PathBuf, Exit> {
    match &run.run {
        Some(directory) => Ok(directory.clone()),
        None => config(run).map(|config| config.run.directory),
    }
}

/// Asks a live run to do something and prints what it says.
///
/// # Errors
/// If there are no threads to ask with, or stdout cannot be written to.
pub(crate) fn ask(run: &RunArgs, request: OperatorRequest) -> Result<Exit> {
    match answer(run, request)? {
        Ok(OperatorReply::Done(text)) => {
            samples::print(|out| Ok(writeln!(out, "{}", samples::visible(&text))?))
        }
        Ok(OperatorReply::Refused(reason)) => {
            launch::complain(&samples::visible(&reason));
            Ok(Exit::Failed)
        }
        Ok(OperatorReply::Ranks(_)) => anyhow::bail!("the coordinator answered something else"),
        Err(exit) => Ok(exit),
    }
}

/// Asks a live run something; what is wrong is printed.
///
/// # Errors
/// If there are no threads to ask with.
pub(crate) fn answer(run: &RunArgs, request: OperatorRequest) -> Result<Result<OperatorReply, Exit>> {
    let directory = match directory(run) {
        Ok(directory) => directory,
        Err(exit) => return Ok(Err(exit)),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot wait for an answer")?;
    Ok(runtime
        .block_on(coordinator::operate(&directory, request))
        .map_err(|error| {
            launch::complain(&error.to_string());
            Exit::Failed
        }))
}
