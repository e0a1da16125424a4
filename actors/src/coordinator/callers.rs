//! Gets `eaglet join` going on other hosts: by a command of the user's, or by telling people what to run where.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use ractor::ActorRef;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::Command;
use tokio::task::JoinHandle;

use super::cluster::ClusterMessage;
use crate::config::HostConfig;
use crate::engine::Notice;

/// Wait before a command that has ended is run again.
const AGAIN_AFTER: Duration = Duration::from_secs(5);
/// Longest wait, after doublings.
const AGAIN_AT_LATEST: Duration = Duration::from_secs(60);
/// A command that ran for so long had worked: the next wait is short again.
const WORKED_AFTER: Duration = Duration::from_secs(60);
/// What is read of a command's output at a time, and so the longest line of it.
const PIECE_BYTES: usize = 2048;

/// Sees to it that a host joins, for as long as the task lives.
pub(super) fn call(host: HostConfig, directory: &Path, cluster: ActorRef<ClusterMessage>) -> JoinHandle<()> {
    let join = vec![
        "join".to_owned(),
        directory.display().to_string(),
        "--host".to_owned(),
        host.name.clone(),
    ];
    let caller = Caller { host, join, cluster };
    tokio::spawn(async move {
        if caller.host.start.is_empty() {
            let words = caller.join.join(" ");
            caller.notice(
                false,
                format!(
                    "waiting for host {}: run `eaglet {words}` there",
                    caller.host.name
                ),
            );
        } else {
            caller.keep_running().await;
        }
    })
}

struct Caller {
    host: HostConfig,
    /// What `eaglet` is told to do there.
    join: Vec<String>,
    cluster: ActorRef<ClusterMessage>,
}

impl Caller {
    async fn keep_running(&self) {
        let mut wait = AGAIN_AFTER;
        loop {
            let began = tokio::time::Instant::now();
            let ended = self.run().await;
            if began.elapsed() >= WORKED_AFTER {
                wait = AGAIN_AFTER;
            }
            self.notice(
                true,
                format!(
                    "the command that starts eaglet on host {} {ended}; it is run again in {} s",
                    self.host.name,
                    wait.as_secs()
                ),
            );
            tokio::time::sleep(wait).await;
            wait = (2 * wait).min(AGAIN_AT_LATEST);
        }
    }

    /// Runs the command to its end; how it ended, with its last words.
    async fn run(&self) -> String {
        let Some((program, words)) = self.host.start.split_first() else {
            return "has no words".to_owned();
        };
        let mut command = std::process::Command::new(program);
        command
            .args(words)
            .args(&self.join)
            // The command is run again here, so nobody need wait there.
            .arg("--once")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // Ctrl-C is for the coordinator, which then drains.
            .process_group(0);
        let mut command = Command::from(command);
        let child = command.kill_on_drop(true).spawn();
        let mut child = match child {
            Ok(child) => child,
            Err(error) => return format!("cannot be run ({program}: {error})"),
        };
        let last = match child.stderr.take() {
            Some(stderr) => self.pass_on(stderr).await,
            None => None,
        };
        let status = child
            .wait()
            .await
            .map_or_else(|error| error.to_string(), |status| status.to_string());
        match last {
            Some(line) => format!("has ended ({status}): {line}"),
            None => format!("has ended ({status})"),
        }
    }

    /// Logs what a command says, and returns the last line that says something.
    async fn pass_on(&self, mut stderr: impl AsyncRead + Unpin) -> Option<String> {
        let mut last = None;
        let mut piece = vec![0; PIECE_BYTES];
        loop {
            let length = match stderr.read(&mut piece).await {
                Ok(length) if length > 0 => length,
                // An output that cannot be read has ended.
                _ => return last,
            };
            for line in String::from_utf8_lossy(&piece[..length]).lines().map(str::trim) {
                if !line.is_empty() {
                    tracing::info!(host = self.host.name, line, "said on another host");
                    last = Some(line.to_owned());
                }
            }
        }
    }

    fn notice(&self, warning: bool, text: String) {
        // A cluster that is gone has nobody to tell.
        let _ = self.cluster.cast(ClusterMessage::Notice(Notice {
            warning,
            quiet: false,
            text,
        }));
    }
}
