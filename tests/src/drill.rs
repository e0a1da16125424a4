//! Drills: whole runs with faults on purpose (`EAGLET_FAULTS`), and what is read from their files afterwards.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::traces::{Account, account, completed, nothing_is_left, same_weights, token_of};
use crate::{Cluster, Finished, is_alive, processes_of};

/// An undisturbed run, which all others are compared with.
pub struct Quiet {
    folder: tempfile::TempDir,
    /// Its run directory.
    pub directory: PathBuf,
    /// Its account of samples.
    pub account: Account,
}

impl Quiet {
    /// Runs it.
    ///
    /// # Panics
    /// If it does not complete, or loses a rank.
    pub fn run(sets: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let directory = folder.path().join("quiet");
        let mut cluster = Cluster::launch(&directory, sets);
        let tokens = BTreeSet::from([token(&mut cluster)]);
        completed(&cluster.finish());
        nothing_is_left(&directory, &tokens);
        let account = account(&directory);
        assert_eq!(account.quarantined, 0);
        assert!(account.trained > 0);
        assert_eq!(losses(&directory).len(), 0);
        Self {
            folder,
            directory,
            account,
        }
    }

    /// A run directory for another run, and a place for what belongs to it.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Asserts that another run has ended as this one did, and left as little.
    ///
    /// # Panics
    /// If not.
    pub fn is_like(&self, directory: &Path, tokens: &BTreeSet<String>) {
        nothing_is_left(directory, tokens);
        assert_eq!(account(directory), self.account, "{}", directory.display());
        same_weights(&self.directory, directory);
    }

    /// A run with faults, during which nothing is done; asserts all that must hold after it.
    ///
    /// # Panics
    /// If a fault did not strike, a rank was lost for another reason, or the run ended otherwise than this one.
    pub fn drill(&self, name: &str, sets: &[&str], faults: &str) -> Vec<Line> {
        self.drill_with(name, sets, faults, Effect::Loss, |_| {})
    }

    /// As [`Self::drill`], with something to do while it runs.
    ///
    /// # Panics
    /// As [`Self::drill`].
    pub fn drill_with(
        &self,
        name: &str,
        sets: &[&str],
        faults: &str,
        effect: Effect,
        meanwhile: impl FnOnce(&mut Cluster),
    ) -> Vec<Line> {
        let directory = self.beside(name);
        let mut cluster = Cluster::launch_with_faults(&directory, sets, faults);
        let tokens = BTreeSet::from([token(&mut cluster)]);
        meanwhile(&mut cluster);
        let finished = cluster.finish();
        let lines = examine(&directory, faults, effect, &finished);
        completed(&finished);
        self.is_like(&directory, &tokens);
        lines
    }
}

/// The secret of a launch, as soon as it has a rank.
pub fn token(cluster: &mut Cluster) -> String {
    cluster.wait("a rank", |cluster| {
        processes_of(cluster.directory()).into_iter().find_map(token_of)
    })
}

/// What the faults of a drill come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Each of them costs a rank, unless it only spoils data.
    Loss,
    /// Nobody is lost.
    Delay,
}

/// A line of the table: a fault, and what became of it.
#[derive(Clone, Debug)]
pub struct Line {
    /// As in `EAGLET_FAULTS`.
    pub fault: String,
    /// From the fault to when the coordinator knew of the loss, in ms. `None` if nobody was lost.
    pub detect_ms: Option<u64>,
    /// From the fault to the next committed step, in ms. `None` if no step was left.
    pub recover_ms: Option<u64>,
}

/// Prints a table past the test harness, which hides what a passing test prints.
pub fn print(title: &str, lines: &[Line]) {
    let number = |ms: Option<u64>| ms.map_or_else(|| "-".to_owned(), |ms| ms.to_string());
    if lines.is_empty() {
        // As below.
        let _ = writeln!(std::io::stdout().lock(), "{title}");
        return;
    }
    let mut text = format!(
        "\n{title}\n{:<8} {:<14} {:<16} {:>9} {:>10}\n",
        "fault", "who", "phase", "detect ms", "recover ms"
    );
    for line in lines {
        let entry = Entry::of(&line.fault);
        text.push_str(&format!(
            "{:<8} {:<14} {:<16} {:>9} {:>10}\n",
            entry.action,
            entry.who,
            entry.place,
            number(line.detect_ms),
            number(line.recover_ms)
        ));
    }
    // A closed pipe takes nothing from the test.
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// An entry of `EAGLET_FAULTS` in its parts.
struct Entry<'a> {
    who: &'a str,
    place: &'a str,
    action: &'a str,
}

impl<'a> Entry<'a> {
    fn of(text: &'a str) -> Self {
        let (who, rest) = text.split_once(':').expect("tests write right entries");
        let (place, action) = rest.split_once('=').expect("tests write right entries");
        Self { who, place, action }
    }

    fn seat(&self) -> (&'a str, u64) {
        match self.who.split_once('/') {
            None => (self.who, 0),
            Some((seat, generation)) => (seat, generation.parse().expect("a generation")),
        }
    }

    /// Words that the cause of the loss must hold; `None` if nobody is lost.
    fn cause(&self) -> Option<&'static str> {
        Some(match self.action {
            "kill" => "killed by signal 9",
            "segv" => "killed by signal 11",
            "exit" => "exited with code 3",
            "error" => "EAGLET_FAULTS asks for",
            "stop" => "no sign of life for",
            "hang" => " ms",
            _ => return None,
        })
    }
}

/// A fault that struck: its entry and when.
pub fn strikes(directory: &Path) -> Vec<(String, u64)> {
    let logs = std::fs::read_dir(directory.join("logs")).expect("a folder of logs");
    let mut strikes = Vec::new();
    for log in logs {
        let text = std::fs::read_to_string(log.expect("an entry").path()).expect("a log");
        for line in text
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        {
            let is_strike = line["message"] == "a fault on purpose";
            if let (true, Some(fault), Some(unix_ms)) =
                (is_strike, line["fault"].as_str(), line["unix_ms"].as_u64())
            {
                strikes.push((fault.to_owned(), unix_ms));
            }
        }
    }
    strikes.sort_by_key(|&(_, unix_ms)| unix_ms);
    strikes
}

/// A rank that was lost, from `metrics.jsonl`.
#[derive(Clone, Debug)]
pub struct Loss {
    /// Its seat.
    pub seat: String,
    /// Which occupant.
    pub generation: u64,
    /// Why.
    pub cause: String,
    /// When the coordinator knew.
    pub unix_ms: u64,
}

/// Lines of a run's `metrics.jsonl`.
pub fn metrics(directory: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(directory.join("metrics.jsonl")).unwrap_or_default();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

/// When the first step was committed at or after a time, in ms since 1970.
pub fn commit_after(directory: &Path, since_ms: u64) -> Option<u64> {
    metrics(directory)
        .iter()
        .filter(|line| line.get("loss").is_some())
        .filter_map(|line| line["unix_ms"].as_u64())
        .find(|&unix_ms| unix_ms >= since_ms)
}

/// All ranks that a run has lost.
pub fn losses(directory: &Path) -> Vec<Loss> {
    metrics(directory)
        .iter()
        .filter(|line| line["event"] == "lost")
        .map(|line| Loss {
            seat: line["seat"].as_str().expect("a seat").to_owned(),
            generation: line["generation"].as_u64().expect("a generation"),
            cause: line["cause"].as_str().expect("a cause").to_owned(),
            unix_ms: line["unix_ms"].as_u64().expect("a time"),
        })
        .collect()
}

/// Asserts that a run has lost the occupants of these seats, in this order, and nobody else.
///
/// # Panics
/// If not; with what it has lost.
pub fn lost_only(directory: &Path, seats: &[&str]) {
    let losses = losses(directory);
    let lost: Vec<&str> = losses.iter().map(|loss| loss.seat.as_str()).collect();
    assert_eq!(lost, seats, "{losses:#?}");
}

/// Asserts that every fault of a list struck exactly once and had its effect, and that nobody else was lost.
///
/// # Panics
/// If not.
pub fn examine(directory: &Path, faults: &str, effect: Effect, finished: &Finished) -> Vec<Line> {
    let strikes = strikes(directory);
    let mut losses = losses(directory);
    let mut lines = Vec::new();
    for fault in faults.split(';') {
        let struck: Vec<u64> = strikes
            .iter()
            .filter(|(text, _)| text == fault)
            .map(|&(_, at)| at)
            .collect();
        let [at] = struck[..] else {
            panic!(
                "{fault} struck {} times: {strikes:#?}\n{losses:#?}\n{finished:#?}",
                struck.len()
            )
        };
        let entry = Entry::of(fault);
        let (seat, generation) = entry.seat();
        let known = losses
            .iter()
            .position(|loss| (&*loss.seat, loss.generation) == (seat, generation));
        let cause = entry.cause().filter(|_| effect == Effect::Loss);
        let detected = cause.map(|words| {
            let loss = known.map(|index| losses.remove(index));
            let loss = loss.unwrap_or_else(|| panic!("{fault} was not noticed: {finished:#?}"));
            assert!(loss.cause.contains(words), "{fault}: {loss:?}");
            loss.unix_ms
        });
        let next = commit_after(directory, detected.unwrap_or(at));
        lines.push(Line {
            fault: fault.to_owned(),
            detect_ms: detected.map(|detected| detected.saturating_sub(at)),
            recover_ms: next.map(|next| next - at),
        });
    }
    assert!(
        losses.is_empty(),
        "lost besides {faults}: {losses:#?}\n{finished:#?}"
    );
    assert_eq!(strikes.len(), lines.len(), "{strikes:#?}");
    lines
}

/// Whether a process is stopped.
pub fn is_stopped(pid: u32) -> bool {
    is_alive(pid)
        && std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| {
            stat.rsplit_once(") ")
                .is_some_and(|(_, rest)| rest.starts_with('T'))
        })
}
