//! `eaglet launch` and `eaglet rank`: the two kinds of process of a cluster.

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result};
use eaglet_actors::TOKEN_VARIABLE;
use eaglet_actors::config::Survey;
use eaglet_actors::coordinator::{self, LaunchOptions, Launched};
use eaglet_actors::engine::Outcome;
use eaglet_actors::preflight::{self, Machine, Ready};
use eaglet_actors::rank::{self, RankArguments};
use eaglet_actors::verifier_source;
use eaglet_runtime::ids::Generation;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::cli::{Exit, LaunchArgs, RankArgs};
use crate::{fetch, live, logging, plain};

/// Time between the lines of numbers where there is no terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(5);

/// Runs a cluster to its end and shows it.
///
/// # Errors
/// If the process cannot log, or has no threads or signals to work with.
pub(crate) fn launch(arguments: &LaunchArgs, mut survey: Survey) -> Result<Exit> {
    let is_live = !arguments.plain && io::stdout().is_terminal();
    if survey.problems.is_empty() {
        // What has come is kept if this process is ended meanwhile.
        let need = verifier_source::need(&survey.config);
        if let Err(error) = fetch::verifier(&mut survey.config, need) {
            complain(&error.to_string());
            return Ok(Exit::BadInput);
        }
    }
    let ready = match preflight::ready(survey, Machine::here()) {
        Ok(ready) => ready,
        Err(findings) => {
            findings.iter().for_each(|finding| say(&finding.to_string()));
            return Ok(Exit::BadInput);
        }
    };
    let directory = ready.config.run.directory.clone();
    if let Err(error) = coordinator::prepare_directory(&directory) {
        complain(&error.to_string());
        return Ok(Exit::BadInput);
    }
    logging::start(&directory, "coordinator", arguments.log_format, !is_live)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .thread_name("coordinator")
        .build()
        .context("cannot start the coordinator's threads")?;
    let exit = runtime.block_on(run(arguments, ready, is_live));
    // A sample that is still being read is nobody's business any more.
    runtime.shutdown_background();
    exit
}

async fn run(arguments: &LaunchArgs, ready: Ready, is_live: bool) -> Result<Exit> {
    // Before the cluster starts, so that no signal is lost.
    let mut interrupts = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    let mut terminations = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let executable = std::env::current_exe().context("cannot find the eaglet executable")?;
    let options = LaunchOptions {
        executable,
        log_format: arguments.log_format.word().to_owned(),
    };
    let launched = coordinator::launch(ready, options).await;
    let mut launched = match launched {
        Ok(launched) => launched,
        Err(error) => {
            complain(&one_line(&error));
            return Ok(Exit::BadInput);
        }
    };
    let (quit, mut quits) = mpsc::unbounded_channel();
    let view = start_view(&launched, arguments, is_live, quit.clone())?;
    let mut requests = 0;
    let outcome = loop {
        tokio::select! {
            outcome = launched.finished() => break outcome,
            _ = interrupts.recv() => {}
            _ = terminations.recv() => {}
            // `quit` is held above, so the channel stays open.
            _ = quits.recv() => {}
        }
        requests += 1;
        if requests == 1 {
            tracing::info!("asked to stop: finishing the step in flight");
            launched.drain();
        } else {
            tracing::warn!("asked to stop again: ending at once");
            launched.stop();
        }
    };
    launched.close().await;
    if let Err(error) = view
        .await
        .context("the view ended badly")
        .and_then(|shown| shown.context("cannot show the run"))
    {
        tracing::warn!("{}", one_line(&error));
    }
    Ok(match outcome {
        Outcome::Completed { .. } => Exit::Done,
        Outcome::Drained { .. } | Outcome::Stopped => Exit::Interrupted,
        Outcome::Failed { report } => {
            // The view has said so already where both go to one terminal.
            if !(io::stdout().is_terminal() && io::stderr().is_terminal()) {
                complain(&report);
            }
            Exit::Failed
        }
    })
}

/// Starts the view that fits stdout.
fn start_view(
    launched: &Launched,
    arguments: &LaunchArgs,
    is_live: bool,
    quit: mpsc::UnboundedSender<()>,
) -> Result<tokio::task::JoinHandle<io::Result<()>>> {
    let snapshots = launched.snapshots();
    if !is_live {
        return Ok(tokio::spawn(plain::follow(
            snapshots,
            arguments.log_format,
            PLAIN_INTERVAL,
            io::stdout(),
        )));
    }
    let thread = live::show(snapshots, move || {
        // After the end there is nothing left to stop.
        let _ = quit.send(());
    })
    .context("cannot start the live view")?;
    Ok(tokio::task::spawn_blocking(move || {
        thread.join().unwrap_or_else(|_| {
            Err(io::Error::other(
                "the live view panicked; see the coordinator's log",
            ))
        })
    }))
}

/// Occupies a seat until the coordinator says that it is over.
///
/// # Errors
/// If the process was not started by a coordinator, cannot log, or cannot go on.
pub(crate) fn occupy(arguments: &RankArgs) -> Result<Exit> {
    let token = std::env::var(TOKEN_VARIABLE)
        .with_context(|| format!("{TOKEN_VARIABLE} is not set; ranks are started by `eaglet launch`"))?;
    logging::start(
        &arguments.run_directory,
        &arguments.seat.to_string(),
        arguments.log_format,
        true,
    )?;
    rank::run(&RankArguments {
        coordinator: arguments.coordinator.clone(),
        token,
        seat: arguments.seat,
        generation: Generation(arguments.generation),
        host: arguments.host.clone(),
        network: arguments.network,
        run_directory: arguments.run_directory.clone(),
        parent: arguments.parent,
    })?;
    Ok(Exit::Done)
}

/// Says on stderr what went wrong.
pub(crate) fn complain(text: &str) {
    say(&format!("eaglet: {text}"));
}

/// Says something on stderr that tells its own place.
fn say(text: &str) {
    // If stderr is gone there is nobody left who could be told.
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// An error and its causes in one line, without those that it quotes already.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    error
        .chain()
        .map(ToString::to_string)
        .fold(String::new(), |line, cause| {
            if line.is_empty() {
                cause
            } else if line.contains(&cause) {
                line
            } else {
                format!("{line}: {cause}")
            }
        })
}
