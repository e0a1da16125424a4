//! What a run leaves behind, and what it must not.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use eaglet_runtime::digest::Digest;
use serde_json::Value;

use crate::{Finished, final_weights, processes_of};

/// Longest that the kernel may take to end what was killed, on a busy machine.
const END: Duration = Duration::from_secs(5);

/// Asserts that a run completed and said so.
///
/// # Panics
/// If not.
pub fn completed(finished: &Finished) {
    assert!(finished.status.success(), "{finished:#?}");
    let last = finished.lines.last().expect("it printed something");
    assert!(last.contains("completed"), "{finished:#?}");
}

/// Asserts that two runs ended with the same bits in weights and moments.
///
/// # Panics
/// If they differ.
pub fn same_weights(quiet: &Path, other: &Path) {
    let others = final_weights(other);
    for (name, bytes) in final_weights(quiet) {
        assert!(
            bytes == others[name],
            "{name} of {} differs from that of the quiet run",
            other.display()
        );
    }
}

/// A run's account of its samples, from its status file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    /// Units taken in.
    pub intake: u64,
    /// Units whose effect is in the weights.
    pub trained: u64,
    /// Units put aside.
    pub quarantined: u64,
}

/// Asserts LEDGER on the status file.
///
/// # Panics
/// If there is none, or it does not add up.
pub fn account(directory: &Path) -> Account {
    let bytes = std::fs::read(directory.join("status.json")).expect("a status file");
    let status: Value = serde_json::from_slice(&bytes).expect("JSON");
    let count = |name: &str| status["samples"][name].as_u64().expect("a count");
    let sum: u64 = ["pending", "leased", "extracted", "trained", "quarantined"]
        .into_iter()
        .map(count)
        .sum();
    assert_eq!(count("intake"), sum, "{}", status["samples"]);
    Account {
        intake: count("intake"),
        trained: count("trained"),
        quarantined: count("quarantined"),
    }
}

/// Asserts that nothing of a run is left but its files: no process, no socket of its launches, no file that is not
/// described in `docs/formats.md`.
///
/// # Panics
/// If something is left.
pub fn nothing_is_left(directory: &Path, tokens: &BTreeSet<String>) {
    nothing_is_left_but(directory, tokens, &[]);
}

/// As [`nothing_is_left`], after the coordinator was killed: its address is still there, and the next launch replaces it.
///
/// # Panics
/// If something else is left.
pub fn only_its_address_is_left(directory: &Path, tokens: &BTreeSet<String>) {
    nothing_is_left_but(directory, tokens, &["coordinator.json"]);
}

fn nothing_is_left_but(directory: &Path, tokens: &BTreeSet<String>, spared: &[&str]) {
    // A process that was killed is gone only when its last thread is.
    let begun = Instant::now();
    loop {
        let (processes, sockets) = (processes_of(directory), sockets(tokens));
        if processes.is_empty() && sockets.is_empty() {
            break;
        }
        assert!(begun.elapsed() < END, "{processes:?} and {sockets:?} are left");
        std::thread::yield_now();
    }
    let mut unknown = Vec::new();
    walk(directory, Path::new(""), &mut unknown);
    unknown.retain(|path: &String| !spared.contains(&path.as_str()));
    assert!(unknown.is_empty(), "{} holds {unknown:?}", directory.display());
}

/// Names of abstract sockets that belong to launches with these tokens.
pub fn sockets(tokens: &BTreeSet<String>) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/unix").expect("every Linux has it");
    let launches: Vec<String> = tokens
        .iter()
        .map(|token| format!("eaglet-{}", &Digest::of(token.as_bytes()).to_string()[..12]))
        .collect();
    table
        .lines()
        .filter_map(|line| line.rsplit_once('@'))
        .map(|(_, name)| name)
        .filter(|name| launches.iter().any(|launch| name.starts_with(launch)))
        .map(str::to_owned)
        .collect()
}

/// Collects what a run directory may not hold.
fn walk(directory: &Path, below: &Path, unknown: &mut Vec<String>) {
    for entry in std::fs::read_dir(directory.join(below)).expect("a run directory") {
        let entry = entry.expect("an entry");
        let path = below.join(entry.file_name());
        let is_folder = entry.file_type().expect("a kind").is_dir();
        if !is_known(&path.display().to_string(), is_folder) {
            unknown.push(path.display().to_string());
        } else if is_folder {
            walk(directory, &path, unknown);
        }
    }
}

fn is_known(path: &str, is_folder: bool) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    let is_step = |name: &str| {
        name.strip_prefix("step-")
            .is_some_and(|number| number.len() >= 6 && number.bytes().all(|byte| byte.is_ascii_digit()))
    };
    match (&parts[..], is_folder) {
        (["cluster.toml" | "journal" | "samples.bin" | "metrics.jsonl" | "status.json"], false) => true,
        (["logs" | "checkpoints"], true) => true,
        (["logs", log], false) => log.ends_with(".log") || log.ends_with(".out"),
        (["checkpoints", "latest"], false) => true,
        (["checkpoints", step], true) => is_step(step),
        (["checkpoints", step, file], false) => {
            is_step(step)
                && matches!(
                    *file,
                    "config.json" | "manifest.json" | "model.safetensors" | "training_state.safetensors"
                )
        }
        _ => false,
    }
}

/// The secret of a process's launch, which names its sockets.
pub fn token_of(pid: u32) -> Option<String> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    environment
        .split(|&byte| byte == 0)
        .find_map(|variable| variable.strip_prefix(b"EAGLET_RANK_TOKEN="))
        .map(|token| String::from_utf8_lossy(token).into_owned())
        .filter(|token| token.len() >= 12)
}
