//! The `eaglet` command.

mod bench;
mod check;
mod cli;
mod devices;
mod extract;
mod fetch;
mod join;
mod launch;
mod live;
mod logging;
mod plain;
mod ranks;
mod run;
mod samples;
mod table;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use cli::{Cli, Command, Exit, ExtractArgs, PictureArgs};

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Check(arguments) => check::command(&arguments),
        Command::Devices(arguments) => devices::command(&arguments),
        Command::Launch(arguments) => {
            launch::launch(&arguments, run::survey(&arguments.cluster, &arguments.sets))
        }
        Command::Extract(ExtractArgs {
            launch: arguments,
            out,
        }) => {
            let survey = extract::survey(&arguments.cluster, &arguments.sets, &out);
            launch::launch(&arguments, survey)
        }
        Command::Join(arguments) => join::command(&arguments),
        Command::Rank(arguments) => launch::occupy(&arguments),
        Command::Bench(command) => bench::command(&command),
        Command::Ranks(command) => ranks::command(&command),
        Command::Samples(command) => samples::command(&command),
        Command::LivePicture(arguments) => picture(&arguments),
    };
    let exit = result.unwrap_or_else(|error| {
        launch::complain(&launch::one_line(&error));
        Exit::Failed
    });
    exit.into()
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
