//! `eaglet samples`: looks at samples, and tells a live run what to read.

mod list;
mod show;

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use eaglet_actors::config::ClusterConfig;
use eaglet_runtime::control::OperatorRequest;
use eaglet_runtime::hub::Need;
use eaglet_runtime::ids::SampleSeq;

use crate::cli::{Exit, SamplesCommand, ShowArgs};
use crate::{fetch, run};

/// Carries out a command about samples.
///
/// # Errors
/// If files cannot be read, or stdout cannot be written to.
pub(crate) fn command(command: &SamplesCommand) -> Result<Exit> {
    match command {
        SamplesCommand::Add { files, run } => match absolute(files)? {
            Ok(files) => run::ask(run, OperatorRequest::AddSamples { files }),
            Err(exit) => Ok(exit),
        },
        SamplesCommand::Close { run } => run::ask(run, OperatorRequest::CloseSamples),
        SamplesCommand::Retry { samples, run } => {
            let samples = samples.iter().copied().map(SampleSeq).collect();
            run::ask(run, OperatorRequest::RetrySamples { samples })
        }
        SamplesCommand::List { all, run } => match run::directory(run) {
            Ok(directory) => print(|out| list::write(&directory, *all, out)),
            Err(exit) => Ok(exit),
        },
        SamplesCommand::Show(arguments) => show(arguments),
    }
}

fn show(arguments: &ShowArgs) -> Result<Exit> {
    let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    match (&arguments.file, arguments.sample) {
        (_, Some(sample)) => match run::directory(&arguments.run) {
            Ok(directory) => print(|out| show::stored(&directory, SampleSeq(sample), out, colour)),
            Err(exit) => Ok(exit),
        },
        (Some(file), None) => match run::config(&arguments.run) {
            Ok(mut config) => {
                fetch::verifier(&mut config, Need::Tokenizer)?;
                print(|out| show::file(file, arguments.count, &config, out, colour))
            }
            Err(exit) => Ok(exit),
        },
        // The command line needs one of the two.
        (None, None) => Ok(Exit::BadInput),
    }
}

/// Prints to stdout. A pager that was left early has seen what it wanted.
pub(crate) fn print(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<Exit> {
    let mut out = io::BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| Ok(out.flush()?)) {
        Err(error) if is_broken_pipe(&error) => Ok(Exit::Done),
        written => written.map(|()| Exit::Done),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| cause.kind() == io::ErrorKind::BrokenPipe)
}

/// The files as the coordinator must be told of them, which may stand in another folder; or all that are no files.
fn absolute(files: &[PathBuf]) -> Result<Result<Vec<PathBuf>, Exit>> {
    let mut found = Vec::new();
    let mut missing = false;
    for file in files {
        if file.is_file() {
            let whole = std::path::absolute(file).with_context(|| format!("where is {}?", file.display()))?;
            // Joining component by component drops `.`, so that one file has one spelling.
            found.push(whole.components().collect());
        } else {
            crate::launch::complain(&format!(
                "there is no file {}; name a .jsonl or .json file",
                file.display()
            ));
            missing = true;
        }
    }
    Ok(if missing { Err(Exit::BadInput) } else { Ok(found) })
}

/// The configuration that a run was launched with last.
fn resolved_config(directory: &Path) -> Result<ClusterConfig> {
    let path = directory.join("cluster.toml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    ClusterConfig::from_resolved(&text)
        .with_context(|| format!("{} is no configuration of this version", path.display()))
}

/// Control characters as symbols, so that a sample cannot steer the terminal.
pub(crate) fn visible(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            '\0'..='\x1f' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('␀'),
            c if c.is_control() => '␡',
            c => c,
        })
        .collect()
}
