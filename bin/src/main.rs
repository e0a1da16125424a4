//! The `eaglet` command.

mod bench;
mod cli;
mod launch;
mod live;
mod logging;
mod plain;
mod samples;

use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use eaglet_actors::config::{self, ClusterConfig};

use cli::{BenchCommand, Cli, Command, Exit, PictureArgs, RecoveryArgs, SamplesCommand, ShowArgs};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Launch(arguments) => match load(&arguments.cluster, &arguments.sets) {
            Ok(config) => launch::launch(&arguments, config),
            Err(exit) => Ok(exit),
        },
        Command::Rank(arguments) => launch::occupy(&arguments),
        Command::Samples(SamplesCommand::Show(arguments)) => show(&arguments),
        Command::Bench(BenchCommand::Recovery(arguments)) => bench_recovery(&arguments),
        Command::LivePicture(arguments) => picture(&arguments),
    };
    let exit = result.unwrap_or_else(|error| {
        launch::complain(&launch::one_line(&error));
        Exit::Failed
    });
    exit.into()
}

/// Reads the cluster file and all that overrides it; prints its problems, one a line, if there are any.
fn load(path: &Path, sets: &[String]) -> Result<ClusterConfig, Exit> {
    ClusterConfig::load(path, config::environment(), sets).map_err(|error| {
        // If stderr is gone there is nobody left who could be told.
        let _ = writeln!(io::stderr().lock(), "{error}");
        Exit::BadInput
    })
}

fn show(arguments: &ShowArgs) -> Result<Exit> {
    let config = match load(&arguments.cluster, &arguments.sets) {
        Ok(config) => config,
        Err(exit) => return Ok(exit),
    };
    let mut out = io::BufWriter::new(io::stdout().lock());
    let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let shown = samples::show(arguments, &config, &mut out, colour).and_then(|()| Ok(out.flush()?));
    match shown {
        // A pager that was left early has seen what it wanted.
        Err(error) if is_broken_pipe(&error) => Ok(Exit::Done),
        shown => shown.map(|()| Exit::Done),
    }
}

fn bench_recovery(arguments: &RecoveryArgs) -> Result<Exit> {
    match load(&arguments.cluster, &arguments.sets) {
        Ok(config) => bench::recovery(arguments, config, &mut io::stdout().lock()).map(|()| Exit::Done),
        Err(exit) => Ok(exit),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

fn picture(arguments: &PictureArgs) -> Result<Exit> {
    let shown = arguments.snapshot.display();
    let text =
        std::fs::read_to_string(&arguments.snapshot).with_context(|| format!("cannot read {shown}"))?;
    let snapshot = serde_json::from_str(&text).with_context(|| format!("{shown} is no snapshot"))?;
    let svg = live::svg(
        &snapshot,
        arguments.columns.clamp(1, 500),
        arguments.rows.clamp(1, 200),
    );
    std::fs::write(&arguments.out, svg)
        .with_context(|| format!("cannot write {}", arguments.out.display()))?;
    Ok(Exit::Done)
}
