//! Harness of the whole-cluster tests: real processes of the real binary, in run directories of their own.

pub mod disk;
pub mod drill;
pub mod kimi;
pub mod report;
pub mod sim;
pub mod traces;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Longest that any test waits for anything.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// Settings with which whoever is lost comes again at once, however often.
pub const QUICK_RESTARTS: &[&str] = &[
    "verifier_restarts.max=100",
    "verifier_restarts.backoff_initial_ms=1",
    "verifier_restarts.backoff_max_ms=1",
    "draft_restarts.max=100",
    "draft_restarts.backoff_initial_ms=1",
    "draft_restarts.backoff_max_ms=1",
];

/// Settings with which only a fault is a loss, however busy the machine is.
pub const PATIENT: &[&str] = &[
    "supervision.dead_after_ms=15000",
    "supervision.coordinator_lease_ms=30000",
];

/// The repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .canonicalize()
        .expect("this package lies in the repository")
}

/// The `eaglet` binary of this build.
///
/// # Panics
/// If it was not built.
pub fn eaglet() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its executable");
    let folder = test
        .parent()
        .and_then(Path::parent)
        .expect("tests lie in target/PROFILE/deps");
    let binary = folder.join("eaglet");
    assert!(
        binary.exists(),
        "{} is not built; run the tests with --workspace, or build it with `cargo build --release`",
        binary.display()
    );
    binary
}

/// Runs a command of `eaglet` about a run directory, such as `ranks list`, and waits for its end.
///
/// # Panics
/// If the process cannot be started.
pub fn ask(directory: &Path, arguments: &[&str]) -> Output {
    Command::new(eaglet())
        .args(arguments)
        .arg("--run")
        .arg(directory)
        .stdin(Stdio::null())
        .output()
        .expect("eaglet can be started")
}

/// A cluster that is running or has ended.
pub struct Cluster {
    child: Child,
    directory: PathBuf,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Cluster {
    /// Launches the repository's default cluster with other settings, in a run directory that may exist already.
    ///
    /// # Panics
    /// If the process cannot be started.
    pub fn launch(directory: &Path, sets: &[&str]) -> Self {
        Self::launch_with(directory, sets, &[])
    }

    /// As [`Self::launch`], with faults on purpose.
    ///
    /// # Panics
    /// If the process cannot be started.
    pub fn launch_with_faults(directory: &Path, sets: &[&str], faults: &str) -> Self {
        Self::launch_with(directory, sets, &[("EAGLET_FAULTS", faults)])
    }

    /// As [`Self::launch`], with variables in the environment.
    ///
    /// # Panics
    /// If the process cannot be started.
    pub fn launch_with(directory: &Path, sets: &[&str], variables: &[(&str, &str)]) -> Self {
        let directory_set = format!("run.directory={:?}", directory.display().to_string());
        let mut command = Command::new(eaglet());
        command.arg("launch").args(["--set", &directory_set]);
        Self::start(command, directory, sets, variables)
    }

    /// Writes the hidden states of the default cluster's samples to a folder.
    ///
    /// # Panics
    /// If the process cannot be started.
    pub fn extract(out: &Path, sets: &[&str]) -> Self {
        std::fs::create_dir_all(out).expect("a folder to write to");
        let mut command = Command::new(eaglet());
        command.arg("extract").arg("--out").arg(out);
        Self::start(command, &out.join("run"), sets, &[])
    }

    fn start(mut command: Command, directory: &Path, sets: &[&str], variables: &[(&str, &str)]) -> Self {
        command
            .arg(repository().join("cluster.toml"))
            .args(["--plain", "--log-format", "json"]);
        for set in sets {
            command.args(["--set", set]);
        }
        let errors = std::fs::File::create(directory.with_extension("stderr")).expect("a file for stderr");
        let mut child = command
            .env("EAGLET_FAULTS", "")
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .expect("eaglet can be started");
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Self {
            child,
            directory: directory.to_owned(),
            lines,
            seen: Vec::new(),
        }
    }

    /// The run directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// What it said on stderr so far.
    pub fn errors(&self) -> String {
        std::fs::read_to_string(self.directory.with_extension("stderr")).unwrap_or_default()
    }

    /// Process number of the coordinator.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The newest status file, once there is one.
    pub fn status(&self) -> Option<Value> {
        let bytes = std::fs::read(self.directory.join("status.json")).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Lines of the metrics file.
    pub fn metrics(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.directory.join("metrics.jsonl")).unwrap_or_default();
        text.lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Steps in the metrics file so far.
    pub fn steps(&self) -> u64 {
        self.metrics()
            .iter()
            .filter_map(|line| line.get("loss").and(line["step"].as_u64()))
            .max()
            .unwrap_or(0)
    }

    /// Process of the present occupant of a seat such as `draft-0`.
    ///
    /// # Panics
    /// If it is not there in time.
    pub fn rank(&mut self, role: &str, index: u64) -> u32 {
        self.wait(&format!("a process of {role}-{index}"), |cluster| {
            let status = cluster.status()?;
            let ranks = status["ranks"].as_array()?;
            let rank = ranks
                .iter()
                .find(|r| r["seat"]["role"] == role && r["seat"]["index"] == index)?;
            rank["pid"]
                .as_u64()
                .map(|pid| pid as u32)
                .filter(|&pid| is_alive(pid))
        })
    }

    /// Waits until `look` finds something.
    ///
    /// # Panics
    /// If the cluster ends or the patience does.
    pub fn wait<T>(&mut self, what: &str, mut look: impl FnMut(&Self) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = look(self) {
                return found;
            }
            let ended = self.child.try_wait().expect("it is our child");
            assert!(
                begun.elapsed() < PATIENCE && ended.is_none(),
                "no {what}: after {:?} the cluster {}\n{}\n{}",
                begun.elapsed(),
                if ended.is_some() {
                    "has ended"
                } else {
                    "is still running"
                },
                self.seen.join("\n"),
                self.errors(),
            );
            // A line is news; without one the files are looked at again soon.
            match self.lines.recv_timeout(Duration::from_millis(5)) {
                Ok(line) => self.seen.push(line),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::yield_now(),
            }
        }
    }

    /// Waits until the metrics hold a step.
    ///
    /// # Panics
    /// As [`Self::wait`].
    pub fn wait_for_step(&mut self, step: u64) {
        self.wait(&format!("step {step}"), |cluster| {
            (cluster.steps() >= step).then_some(())
        });
    }

    /// Waits until processes are gone.
    ///
    /// # Panics
    /// If one of them stays.
    pub fn wait_until_gone(&mut self, pids: &[u32]) {
        let begun = Instant::now();
        while pids.iter().any(|&pid| is_alive(pid)) {
            assert!(begun.elapsed() < PATIENCE, "{pids:?} outlive their coordinator");
            std::thread::yield_now();
        }
        // Reaped, so that it is no zombie of ours.
        let _ = self.child.wait();
    }

    /// Waits for the end; returns how the process ended and all it printed.
    ///
    /// # Panics
    /// If the patience ends first.
    pub fn finish(mut self) -> Finished {
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("it is our child") {
                break status;
            }
            if begun.elapsed() > PATIENCE {
                // Its ranks end with it.
                let _ = self.child.kill();
                let _ = self.child.wait();
                panic!(
                    "the cluster did not end\n{}\n{}",
                    self.seen.join("\n"),
                    self.errors()
                );
            }
            if let Ok(line) = self.lines.recv_timeout(Duration::from_millis(20)) {
                self.seen.push(line);
            }
        };
        self.seen.extend(self.lines.iter());
        Finished {
            status,
            lines: std::mem::take(&mut self.seen),
            errors: self.errors(),
        }
    }

    /// Sends a signal to the coordinator.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind: the ranks end with their coordinator.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a cluster ended.
#[derive(Debug)]
pub struct Finished {
    /// Of the coordinator.
    pub status: ExitStatus,
    /// All it printed.
    pub lines: Vec<String>,
    /// What it said on stderr.
    pub errors: String,
}

/// Sends a signal; a process that is gone is no error.
pub fn send(pid: u32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid as i32) {
        // The only failure is that the process is gone.
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process exists and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with('Z'))
    })
}

/// Processes whose command line names a run directory.
pub fn processes_of(directory: &Path) -> Vec<u32> {
    let wanted = directory.display().to_string();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&pid: &u32| {
            is_alive(pid)
                && pid != std::process::id()
                && std::fs::read(format!("/proc/{pid}/cmdline"))
                    .is_ok_and(|line| String::from_utf8_lossy(&line).contains(&wanted))
        })
        .collect()
}

/// The files that two runs must share bit for bit: weights and training state of the last checkpoint.
///
/// # Panics
/// If there is no checkpoint.
pub fn final_weights(directory: &Path) -> BTreeMap<&'static str, Vec<u8>> {
    let latest = directory.join("checkpoints/latest");
    ["model.safetensors", "training_state.safetensors"]
        .into_iter()
        .map(|name| {
            let file = latest.join(name);
            (
                name,
                std::fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display())),
            )
        })
        .collect()
}
