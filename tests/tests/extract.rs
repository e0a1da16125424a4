//! Hidden states in files: written by `eaglet extract`, and trained on instead of a live verifier.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::hidden_files::{CONTRACT_FILE, HiddenFile, file_name};
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{Alone, Verifier, VerifierOptions};
use eaglet_tests::traces::{account, completed, same_weights};
use eaglet_tests::{Cluster, Finished, processes_of, repository, send};
use rustix::process::Signal;
use serde_json::Value;

/// Samples of the runs here.
const SAMPLES: usize = 40;

/// The first chats of the demo, in a file of their own, and the settings of a run over them.
fn chats(folder: &Path, count: usize) -> Vec<String> {
    let all = std::fs::read_to_string(repository().join("bin/demo/chats.jsonl")).expect("the demo's chats");
    let lines: Vec<&str> = all.lines().take(count).collect();
    let file = folder.join(format!("chats-{count}.jsonl"));
    std::fs::write(&file, lines.join("\n") + "\n").expect("a file of chats");
    let files = format!("samples.files=[{:?}]", file.display().to_string());
    let sets = [
        files.as_str(),
        "samples.held_out=[]",
        "training.passes=1",
        "training.tokens_per_row=160",
        "training.rows_per_step=2",
        "draft.vocab_size=256",
        "supervision.dead_after_ms=15000",
        "supervision.coordinator_lease_ms=30000",
    ];
    sets.map(str::to_owned).to_vec()
}

fn borrowed(sets: &[String]) -> Vec<&str> {
    sets.iter().map(String::as_str).collect()
}

/// What an extraction has left: every file by its name, but for the folder of the run.
fn files_of(out: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    for folder in [out.to_owned(), out.join("hidden_states")] {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            if path.is_file() && !name.ends_with(".stderr") {
                files.insert(name, std::fs::read(&path).expect("a file"));
            }
        }
    }
    files
}

fn lines(out: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(out.join("samples.jsonl")).expect("the samples");
    text.lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

fn extracted(out: &Path, sets: &[String]) -> Finished {
    let finished = Cluster::extract(out, &borrowed(sets)).finish();
    assert!(finished.status.success(), "{finished:#?}");
    assert_eq!(processes_of(&out.join("run")), Vec::<u32>::new());
    finished
}

fn numbers(line: &Value, key: &str) -> Vec<u32> {
    let values = line[key].as_array().expect("a list").iter();
    values
        .map(|value| value.as_u64().expect("a number") as u32)
        .collect()
}

#[test]
fn every_sample_has_its_file_with_the_verifiers_states() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, sets) = (folder.path().join("out"), chats(folder.path(), SAMPLES));
    extracted(&out, &sets);
    let samples = lines(&out);
    assert!(samples.len() >= SAMPLES, "{} samples", samples.len());
    assert!(out.join("hidden_states").join(CONTRACT_FILE).is_file());

    let mut verifier = Verifier::load(repository().join("bin/demo/verifier"), VerifierOptions::default())
        .expect("the demo's verifier");
    let (states, hidden) = (verifier.states_per_token(), verifier.hidden_size());
    for (number, line) in samples.iter().enumerate() {
        let (tokens, mask) = (numbers(line, "input_ids"), numbers(line, "loss_mask"));
        assert!(tokens.len() == mask.len() && mask.contains(&1));
        let file = out.join("hidden_states").join(file_name(number as u64));
        let file = HiddenFile::open(&file).expect("a file of hidden states");
        assert_eq!(
            file.tokens(),
            tokens,
            "line {number} is the sample of file {number}"
        );
        let mut row = PackedRow::default();
        row.push(&Sample {
            loss_mask: vec![1; tokens.len()],
            tokens: tokens.clone(),
        });
        let expected = verifier
            .extract(&row, HiddenDtype::Bf16, &mut Alone)
            .expect("states");
        let stored = file
            .read(tokens.len(), (states, hidden), HiddenDtype::Bf16)
            .expect("states");
        assert!(stored == expected, "the verifier's bits in file {number}");
    }
    let mut all: Vec<Vec<u32>> = samples.iter().map(|line| numbers(line, "input_ids")).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), samples.len(), "no sample twice");
}

#[test]
fn a_killed_extraction_goes_on_and_leaves_the_files_of_the_quiet_one() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sets = chats(folder.path(), 120);
    let quiet = folder.path().join("quiet");
    extracted(&quiet, &sets);

    let out = folder.path().join("killed");
    let mut cluster = Cluster::extract(&out, &borrowed(&sets));
    let number = |n: u64| out.join("hidden_states").join(file_name(n));
    cluster.wait("a first file", |_| number(0).is_file().then_some(()));
    let sink = cluster.rank("draft", 0);
    send(sink, Signal::KILL);
    cluster.wait("more files", |_| number(30).is_file().then_some(()));
    let ranks = [cluster.rank("draft", 0), cluster.rank("verifier", 0)];
    cluster.signal(Signal::KILL);
    cluster.wait_until_gone(&ranks);
    drop(cluster);
    extracted(&out, &sets);
    let (killed, quiet) = (files_of(&out), files_of(&quiet));
    assert_eq!(
        killed.keys().collect::<Vec<_>>(),
        quiet.keys().collect::<Vec<_>>()
    );
    for (name, bytes) in &quiet {
        assert!(
            killed[name] == *bytes,
            "{name} has the bytes of the quiet extraction"
        );
    }
}

/// Trains over stored states.
fn trained(directory: PathBuf, sets: &[String], stored: &Path, more: &[&str]) -> (PathBuf, Finished) {
    let stored = format!("samples.hidden_states={:?}", stored.display().to_string());
    let mut sets = borrowed(sets);
    sets.push(&stored);
    sets.extend(more);
    let finished = Cluster::launch(&directory, &sets).finish();
    (directory, finished)
}

#[test]
fn training_from_files_gives_the_weights_of_training_from_the_verifier() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, sets) = (folder.path().join("out"), chats(folder.path(), SAMPLES));
    extracted(&out, &sets);
    let live = folder.path().join("live");
    completed(&Cluster::launch(&live, &borrowed(&sets)).finish());

    let (stored, finished) = trained(folder.path().join("stored"), &sets, &out, &[]);
    completed(&finished);
    same_weights(&live, &stored);

    // A folder without a contract is one of another program: its states are recognised by their values.
    std::fs::remove_file(out.join("hidden_states").join(CONTRACT_FILE)).expect("a contract");
    let (foreign, finished) = trained(folder.path().join("foreign"), &sets, &out, &[]);
    completed(&finished);
    same_weights(&live, &foreign);
    let (_, finished) = trained(
        folder.path().join("other-layers"),
        &sets,
        &out,
        &["verifier.aux_layers=[1,3,4]", "verifier_restarts.then=\"stop\""],
    );
    assert!(!finished.status.success(), "{finished:#?}");
    let said = format!("{}{}", finished.errors, finished.lines.join("\n"));
    assert!(
        said.contains("enter layers") && said.contains("verifier.aux_layers"),
        "{said}"
    );
}

#[test]
fn a_sample_without_a_file_is_put_aside() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, sets) = (folder.path().join("out"), chats(folder.path(), SAMPLES));
    extracted(&out, &sets);
    let samples = lines(&out).len() as u64;
    std::fs::remove_file(out.join("hidden_states").join(file_name(3))).expect("a file");
    let (directory, finished) = trained(folder.path().join("stored"), &sets, &out, &[]);
    completed(&finished);
    let account = account(&directory);
    assert_eq!((account.trained, account.quarantined), (samples - 1, 1));
}

#[test]
fn what_was_extracted_under_another_contract_is_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, sets) = (folder.path().join("out"), chats(folder.path(), 6));
    extracted(&out, &sets);
    let mut other = sets.clone();
    other.push("verifier.aux_layers=[1,3,4]".to_owned());
    let (_, finished) = trained(folder.path().join("stored"), &other, &out, &[]);
    let said = format!("{}{}", finished.errors, finished.lines.join("\n"));
    assert!(
        !finished.status.success() && said.contains("aux layers"),
        "{said}"
    );
    let finished = Cluster::extract(&out, &borrowed(&other)).finish();
    assert!(!finished.status.success(), "{finished:#?}");
}
