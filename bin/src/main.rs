//! The `eaglet` command.

mod cli;
mod live;
mod logging;
mod plain;
mod samples;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use eaglet_actors::config::{self, ClusterConfig};

use cli::{Cli, Command, Exit, PictureArgs, SamplesCommand};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::LivePicture(arguments) => picture(&arguments),
    };
    let exit = result.unwrap_or_else(|error| {
        // If stderr is gone there is nobody left who could be told.
        let _ = writeln!(io::stderr().lock(), "eaglet: {error:#}");
        Exit::Failed
    });
    exit.into()
}

/// Reads the cluster file and all that overrides it; prints its problems, one a line, if there are any.
fn load(path: &Path, sets: &[String]) -> Result<ClusterConfig, Exit> {
    ClusterConfig::load(path, config::environment(), sets).map_err(|error| {
        let _ = writeln!(io::stderr().lock(), "{error}");
        Exit::BadInput
    })
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
