//! `eaglet join`: runs ranks on this machine for a coordinator on another one.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use eaglet_actors::config::HostConfig;
use eaglet_actors::host::{self, JoinOptions};
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::{Exit, JoinArgs, LogFormat};
use crate::logging;

/// Works for the coordinator until the run is over.
///
/// # Errors
/// If the process cannot log, there is no coordinator, or it does not want this machine.
pub(crate) fn command(arguments: &JoinArgs) -> Result<Exit> {
    let run_directory = std::path::absolute(&arguments.run).context("the run directory has no path")?;
    let name = match &arguments.host {
        Some(name) => name.clone(),
        None => rustix::system::uname().nodename().to_string_lossy().into_owned(),
    };
    // A log file is called by it.
    ensure!(
        HostConfig::is_name(&name),
        "`{name}` is no name of a host; use the name that [[hosts]] gives this machine"
    );
    wait_for_directory(arguments, &run_directory)?;
    logging::start(&run_directory, &format!("host-{name}"), LogFormat::Text, true)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .thread_name("host")
        .build()
        .context("cannot start the host's threads")?;
    let options = JoinOptions {
        executable: std::env::current_exe().context("cannot find the eaglet executable")?,
        run_directory,
        name,
        patience: Duration::from_secs(arguments.patience_s),
        once: arguments.once,
    };
    runtime.block_on(async {
        let mut interrupts = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        let mut terminations = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        tokio::select! {
            ended = host::join(&options) => ended.map(|()| Exit::Done).map_err(Into::into),
            // Ranks end with this process.
            _ = interrupts.recv() => Ok(Exit::Interrupted),
            _ = terminations.recv() => Ok(Exit::Interrupted),
        }
    })
}

/// A log can be written where there is a run directory only, and the coordinator makes it.
fn wait_for_directory(arguments: &JoinArgs, run_directory: &std::path::Path) -> Result<()> {
    let began = std::time::Instant::now();
    while !run_directory.join("logs").is_dir() {
        ensure!(
            began.elapsed() < Duration::from_secs(arguments.patience_s),
            "there is no run in {}; start it with `eaglet launch`, and give run.directory a place that all hosts share",
            run_directory.display()
        );
        std::thread::sleep(Duration::from_millis(500));
    }
    Ok(())
}
