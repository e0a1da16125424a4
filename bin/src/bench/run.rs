//! A cluster of this executable that is launched to be hurt.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use eaglet_actors::config::ClusterConfig;
use eaglet_runtime::ids::{Generation, Seat};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::interrupt::Interrupt;

/// Longest wait for anything that a healthy cluster does.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longest wait for a step of a cluster that is not made small.
const STEP_PATIENCE: Duration = Duration::from_secs(1800);
/// Time between two looks.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A running cluster, its coordinator a child of this process. Dropped, it is killed, and its folder removed.
pub(super) struct Run {
    folder: PathBuf,
    config: PathBuf,
    child: Option<Child>,
    metrics: Metrics,
    interrupt: Interrupt,
}

/// `metrics.jsonl`, read as it grows.
struct Metrics {
    path: PathBuf,
    offset: u64,
    rest: Vec<u8>,
    /// When steps were committed, in ms since 1970.
    commits: Vec<u64>,
    /// Who was lost when.
    losses: Vec<(String, u64, u64)>,
    /// What stands beside each commit.
    steps: Vec<StepLine>,
}

/// A committed step, as `metrics.jsonl` has it.
#[derive(Clone, Debug)]
pub(super) struct StepLine {
    pub(super) unix_ms: u64,
    pub(super) tokens: u64,
    /// What each rank has spent since the line before: busy, waiting for peers, waiting for input, in ms.
    pub(super) ranks: Vec<(String, [u64; 3])>,
}

impl StepLine {
    fn read(line: &Value, unix_ms: u64) -> Self {
        let ranks = line["ranks"].as_array().map(Vec::as_slice).unwrap_or_default();
        Self {
            unix_ms,
            tokens: line["tokens"].as_u64().unwrap_or_default(),
            ranks: ranks
                .iter()
                .map(|rank| {
                    let spent = ["busy_ms", "waiting_ms", "idle_ms"];
                    let seat = rank["seat"].as_str().unwrap_or_default().to_owned();
                    (seat, spent.map(|what| rank[what].as_u64().unwrap_or_default()))
                })
                .collect(),
        }
    }
}

impl Run {
    /// Writes the cluster file of a run in a folder of its own; nothing is started.
    ///
    /// # Errors
    /// If the folder cannot be written.
    pub(super) fn prepare(mut config: ClusterConfig, interrupt: Interrupt) -> Result<Self> {
        let folder = tempfile::Builder::new()
            .prefix("eaglet-bench-")
            .tempdir()
            .context("cannot make a folder for the measurement")?
            // Kept if something goes wrong, for its logs.
            .keep();
        config.run.directory = folder.join("run");
        let file = folder.join("cluster.toml");
        std::fs::write(&file, config.to_toml()?)
            .with_context(|| format!("cannot write {}", file.display()))?;
        Ok(Self {
            metrics: Metrics {
                path: config.run.directory.join("metrics.jsonl"),
                offset: 0,
                rest: Vec::new(),
                commits: Vec::new(),
                losses: Vec::new(),
                steps: Vec::new(),
            },
            folder,
            config: file,
            child: None,
            interrupt,
        })
    }

    /// Starts the cluster, anew or on what an earlier start has left.
    ///
    /// # Errors
    /// If it cannot be started.
    pub(super) fn launch(&mut self) -> Result<()> {
        let executable = std::env::current_exe().context("cannot find the eaglet executable")?;
        let errors = File::create(self.errors()).context("cannot write in the temporary folder")?;
        let child = Command::new(executable)
            .arg("launch")
            .arg(&self.config)
            .arg("--plain")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .context("cannot start the cluster")?;
        self.child = Some(child);
        Ok(())
    }

    fn errors(&self) -> PathBuf {
        self.folder.join("stderr")
    }

    /// Process of a seat's present occupant, and which occupant it is.
    ///
    /// # Errors
    /// If there is none in time.
    pub(super) fn rank(&mut self, seat: Seat) -> Result<(u32, Generation)> {
        let seat = seat.to_string();
        let folder = self.folder.clone();
        self.wait(&format!("a process of {seat}"), |_| occupant(&folder, &seat))
    }

    /// Kills the coordinator and waits until all that belongs to it is gone; says when it was killed, and for how long
    /// its ranks outlived it, in ms.
    ///
    /// # Errors
    /// If its ranks stay.
    pub(super) fn kill_coordinator(&mut self) -> Result<(u64, u64)> {
        let mut child = self.child.take().context("no coordinator runs")?;
        let killed_ms = unix_ms();
        child.kill().context("cannot kill the coordinator")?;
        child.wait().context("cannot wait for the coordinator")?;
        let begun = Instant::now();
        while processes(&self.folder).next().is_some() {
            ensure!(begun.elapsed() < PATIENCE, "ranks outlive their coordinator");
            std::thread::sleep(LOOK_INTERVAL);
        }
        Ok((killed_ms, unix_ms() - killed_ms))
    }

    /// Steps that were committed so far.
    pub(super) fn commits(&mut self) -> Result<usize> {
        self.metrics.read()?;
        Ok(self.metrics.commits.len())
    }

    /// Waits until so many steps are committed, counted over all launches.
    ///
    /// # Errors
    /// If the cluster ends, or takes too long.
    pub(super) fn wait_for_commits(&mut self, count: usize) -> Result<()> {
        self.wait(&format!("{count} committed steps"), |metrics| {
            (metrics.commits.len() >= count).then_some(())
        })
    }

    /// Waits for the loss of an occupant; says when the coordinator knew of it, in ms since 1970.
    ///
    /// # Errors
    /// As [`Self::wait_for_commits`].
    pub(super) fn wait_for_loss(&mut self, seat: Seat, generation: Generation) -> Result<u64> {
        let seat = seat.to_string();
        self.wait(&format!("the loss of {seat}"), |metrics| {
            let mut losses = metrics.losses.iter();
            let known = losses.find(|(lost, nth, _)| *lost == seat && *nth == u64::from(generation.0));
            known.map(|&(_, _, unix_ms)| unix_ms)
        })
    }

    /// Waits for the first step that is committed at or after a time; says when, in ms since 1970.
    ///
    /// # Errors
    /// As [`Self::wait_for_commits`].
    pub(super) fn wait_for_commit_after(&mut self, since_ms: u64) -> Result<u64> {
        self.wait("a committed step", |metrics| {
            metrics
                .commits
                .iter()
                .copied()
                .find(|&unix_ms| unix_ms >= since_ms)
        })
    }

    /// Waits until the cluster has come to its end by itself; its committed steps.
    ///
    /// # Errors
    /// If it fails, or does nothing for a long time.
    pub(super) fn finish(&mut self) -> Result<Vec<StepLine>> {
        let (mut progress, mut seen) = (Instant::now(), 0);
        loop {
            self.interrupt.check()?;
            let child = self.child.as_mut().context("no coordinator runs")?;
            let status = child.try_wait().context("cannot wait for the cluster")?;
            // What it wrote before it ended is there now.
            self.metrics.read()?;
            match status {
                Some(status) if status.success() => {
                    self.child = None;
                    return Ok(std::mem::take(&mut self.metrics.steps));
                }
                Some(status) => {
                    let said = std::fs::read_to_string(self.errors()).unwrap_or_default();
                    bail!("the cluster ended ({status}): {}", said.trim());
                }
                None => {}
            }
            if self.metrics.commits.len() > seen {
                (progress, seen) = (Instant::now(), self.metrics.commits.len());
            }
            ensure!(
                progress.elapsed() < STEP_PATIENCE,
                "no step was committed for {} s",
                STEP_PATIENCE.as_secs()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }

    fn wait<T>(&mut self, what: &str, look: impl Fn(&Metrics) -> Option<T>) -> Result<T> {
        let begun = Instant::now();
        loop {
            self.interrupt.check()?;
            self.metrics.read()?;
            if let Some(found) = look(&self.metrics) {
                return Ok(found);
            }
            if let Some(child) = &mut self.child
                && let Some(status) = child.try_wait().context("cannot wait for the cluster")?
            {
                let said = std::fs::read_to_string(self.errors()).unwrap_or_default();
                bail!("the cluster ended ({status}) before {what}: {}", said.trim());
            }
            ensure!(
                begun.elapsed() < PATIENCE,
                "no {what} within {} s",
                PATIENCE.as_secs()
            );
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // Its ranks end with it. Nobody is left who could be told of a failure.
            let _ = child.kill();
            let _ = child.wait();
        }
        let begun = Instant::now();
        while processes(&self.folder).next().is_some() && begun.elapsed() < PATIENCE {
            std::thread::sleep(LOOK_INTERVAL);
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Metrics {
    fn read(&mut self) -> Result<()> {
        let Ok(mut file) = File::open(&self.path) else {
            return Ok(()); // nothing was written yet
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let read = file.read_to_end(&mut self.rest)?;
        self.offset += read as u64;
        // The last line may be half written.
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else {
            return Ok(());
        };
        let whole: Vec<u8> = self.rest.drain(..=end).collect();
        for line in whole.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()) {
            let line: Value = serde_json::from_slice(line)
                .with_context(|| format!("{} holds a line that is no JSON", self.path.display()))?;
            let Some(unix_ms) = line["unix_ms"].as_u64() else {
                continue;
            };
            if line["event"] == "lost" {
                let seat = line["seat"].as_str().unwrap_or_default().to_owned();
                let generation = line["generation"].as_u64().unwrap_or_default();
                self.losses.push((seat, generation, unix_ms));
            } else if line.get("loss").is_some() {
                self.commits.push(unix_ms);
                self.steps.push(StepLine::read(&line, unix_ms));
            }
        }
        Ok(())
    }
}

/// Command lines of processes that name a folder.
fn processes(folder: &Path) -> impl Iterator<Item = (u32, Vec<String>)> {
    let wanted = folder.join("run").display().to_string();
    let entries = std::fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(move |entry| {
        let pid: u32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
        // A zombie has no command line.
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
        let words: Vec<String> = line
            .split(|&byte| byte == 0)
            .map(|word| String::from_utf8_lossy(word).into_owned())
            .collect();
        words.contains(&wanted).then_some((pid, words))
    })
}

fn occupant(folder: &Path, seat: &str) -> Option<(u32, Generation)> {
    processes(folder)
        .filter_map(|(pid, words)| {
            let after = |flag: &str| {
                let at = words.iter().position(|word| word == flag)?;
                words.get(at + 1)
            };
            let generation = after("--generation")?.parse().ok()?;
            (after("--seat")? == seat).then_some((pid, Generation(generation)))
        })
        .max_by_key(|&(_, generation)| generation)
}

/// Sends a signal; says when, in ms since 1970.
///
/// # Errors
/// If the process is gone.
pub(super) fn send(pid: u32, signal: Signal) -> Result<u64> {
    let number = Pid::from_raw(pid as i32).context("a process without a number")?;
    let sent_ms = unix_ms();
    kill_process(number, signal).with_context(|| format!("cannot signal process {pid}"))?;
    Ok(sent_ms)
}

/// Now, in ms since 1970.
pub(super) fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}
