//! Runs that change while they live: samples that come later, ranks that come and go.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use eaglet_actors::journal::{self, Record, SampleBook, UnitStanding};
use eaglet_runtime::ids::{Step, Unit};
use eaglet_tests::{Cluster, Finished, ask, final_weights, processes_of};
use rustix::process::Signal;
use serde_json::Value;

/// Small steps, and a run that lives until it is closed.
const SETS: &[&str] = &[
    "samples.held_out=[]",
    "samples.poll_interval_ms=20",
    "training.tokens_per_row=256",
    "training.max_new_tokens=8",
    "checkpoints.every_steps=0",
    // Only what a test does to ranks happens to them, however busy the machine is.
    "supervision.dead_after_ms=15000",
    "supervision.coordinator_lease_ms=30000",
];

/// Chats of a line each; all numbers differ, and so do all answers.
fn chats(numbers: std::ops::Range<usize>) -> String {
    numbers.fold(String::new(), |mut text, number| {
        let answer = format!("It is {number}, and after it comes {}.", number + 1);
        let chat = serde_json::json!({
            "id": format!("chat-{number}"),
            "messages": [
                { "role": "user", "content": format!("Which number is {number}?") },
                { "role": "assistant", "content": answer },
            ],
        });
        // Writing to a text cannot fail.
        let _ = writeln!(text, "{chat}");
        text
    })
}

fn write(path: &Path, text: &str) {
    std::fs::write(path, text).expect("the temporary folder is writable");
}

fn append(path: &Path, text: &str) {
    let mut file = std::fs::OpenOptions::new()
        .append(true)
        .open(path)
        .expect("it is there");
    file.write_all(text.as_bytes())
        .expect("the temporary folder is writable");
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the temporary folder is UTF-8")
}

fn files(paths: &[&Path]) -> String {
    format!("samples.files={paths:?}")
}

fn records(directory: &Path) -> Vec<Record> {
    journal::read(&directory.join("journal"))
        .expect("a journal")
        .records
}

fn completed(finished: &Finished) {
    assert!(finished.status.success(), "{finished:#?}");
    assert!(
        finished.lines.iter().any(|line| line.contains("completed")),
        "{finished:#?}"
    );
}

/// Waits until so many units are trained and nothing waits.
fn wait_for_trained(cluster: &mut Cluster, units: u64) {
    cluster.wait(&format!("{units} trained units"), |cluster| {
        let status = cluster.status()?;
        let count = |name: &str| status["samples"][name].as_u64();
        let is_idle = status["phase"] == "waiting for samples";
        (is_idle && count("trained")? == units && count("pending")? == 0).then_some(())
    });
}

/// What a successful command says.
fn done(directory: &Path, arguments: &[&str]) -> String {
    let output = ask(directory, arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?}: {said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    said
}

/// What a command says that is refused.
fn refused(directory: &Path, arguments: &[&str]) -> String {
    let output = ask(directory, arguments);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {output:?}");
    assert!(output.stdout.is_empty(), "{arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// ONCE: all samples of a journal are trained, each pass over each of them in exactly one step, and steps have no gaps.
fn each_unit_was_trained_once(directory: &Path, samples: usize, passes: u32) {
    let records = records(directory);
    let book = SampleBook::of(&records);
    let mut places = BTreeSet::new();
    for (sample, known) in book.samples() {
        let place = (known.source.file.clone(), known.source.line, known.ordinal);
        assert!(
            places.insert(place),
            "sample {sample} was taken in twice: {:?}",
            known.source
        );
        for pass in 0..passes {
            let standing = known.standing(pass);
            assert!(
                matches!(standing, UnitStanding::Trained(_)),
                "sample {sample} in pass {pass}: {standing}"
            );
        }
    }
    assert_eq!(places.len(), samples);
    let plans = plans(&records);
    let mut steps = BTreeMap::new();
    for (&step, rows) in &plans {
        for unit in rows.iter().flatten() {
            let before = steps.insert(*unit, step);
            assert_eq!(before, None, "{unit:?} is part of two steps");
        }
    }
    assert_eq!(steps.len(), samples * passes as usize);
    let committed: Vec<u64> = records
        .iter()
        .filter_map(|record| match record {
            Record::Committed { step, .. } => Some(step.0),
            _ => None,
        })
        .collect();
    assert_eq!(committed, (0..plans.len() as u64).collect::<Vec<_>>());
}

fn plans(records: &[Record]) -> BTreeMap<Step, Vec<Vec<Unit>>> {
    let plans = records.iter().filter_map(|record| match record {
        Record::Planned { step, rows } => Some((*step, rows.clone())),
        _ => None,
    });
    plans.collect()
}

/// Steps that the newest checkpoint's optimizer has made.
fn optimizer_steps(directory: &Path) -> u64 {
    let bytes = &final_weights(directory)["training_state.safetensors"];
    let (_, metadata) = safetensors::SafeTensors::read_metadata(bytes).expect("a training state");
    let eaglet = metadata
        .metadata()
        .as_ref()
        .and_then(|map| map.get("eaglet"))
        .expect("its own metadata");
    let json: Value = serde_json::from_str(eaglet).expect("JSON");
    json["step"].as_u64().expect("a number")
}

/// Waits until the checkpoint of all that is trained is written, which comes after the training; its step.
fn wait_for_checkpoint(cluster: &mut Cluster) -> u64 {
    let directory = cluster.directory().to_owned();
    cluster.wait("a checkpoint of the last step", |cluster| {
        let step = cluster.status()?["step"].as_u64()?;
        let latest = directory.join(format!("checkpoints/step-{step:06}"));
        let is_latest =
            directory.join("checkpoints/latest").canonicalize().ok()? == latest.canonicalize().ok()?;
        is_latest
            .then(|| optimizer_steps(&directory))
            .filter(|&reached| reached == step)
    })
}

#[test]
fn ten_samples_become_a_thousand_in_one_live_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let (ten, more, inbox, directory) = (path("ten.jsonl"), path("more.jsonl"), path("inbox"), path("run"));
    std::fs::create_dir(&inbox).expect("the temporary folder is writable");
    write(&ten, &chats(0..10));
    let (files, watch) = (files(&[&ten]), format!("samples.watch=[{inbox:?}]"));
    let sets = [
        SETS,
        &[
            &files,
            &watch,
            "samples.follow=true",
            "training.passes=2",
            "training.tokens_per_row=1024",
        ],
    ]
    .concat();
    let mut cluster = Cluster::launch(&directory, &sets);
    wait_for_trained(&mut cluster, 20);
    let first = wait_for_checkpoint(&mut cluster);
    assert!(first > 0);

    // A file that is added, with a line that is mended later.
    write(&more, &chats(10..340)[1..]);
    assert!(done(&directory, &["samples", "add", text(&more)]).contains("more.jsonl is added"));
    wait_for_trained(&mut cluster, 2 * 339);
    assert!(wait_for_checkpoint(&mut cluster) > first);
    let listed = done(&directory, &["samples", "list"]);
    assert!(
        listed.contains("more.jsonl:1") && listed.lines().count() == 2,
        "{listed}"
    );
    let shown = done(&directory, &["samples", "show", "--sample", "10"]);
    assert!(
        shown.contains("quarantined") && shown.contains("chat-10"),
        "{shown}"
    );
    write(&more, &chats(10..340));
    let retried = done(&directory, &["samples", "retry"]);
    assert!(retried.starts_with("pending again: 1"), "{retried}");
    wait_for_trained(&mut cluster, 2 * 340);
    assert_eq!(
        done(&directory, &["samples", "list"]).trim(),
        "no sample is quarantined"
    );

    // A file that grows, and a folder in which files appear.
    let grown = chats(340..670);
    let (now, later) = grown.split_at(grown.len() / 2);
    append(&ten, now);
    write(&path("beside.jsonl"), &chats(670..1000));
    std::fs::rename(path("beside.jsonl"), inbox.join("late.jsonl")).expect("both are in one folder");
    append(&ten, later);
    wait_for_trained(&mut cluster, 2000);
    let all = done(&directory, &["samples", "list", "--all"]);
    assert_eq!(all.lines().count(), 1001, "{all}");
    assert!(all.contains("0: trained in step 0, 1: trained in step "), "{all}");

    assert!(done(&directory, &["samples", "close"]).contains("the run ends"));
    completed(&cluster.finish());
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    assert!(!directory.join("coordinator.json").exists());
    each_unit_was_trained_once(&directory, 1000, 2);
    assert_eq!(
        optimizer_steps(&directory),
        plans(&records(&directory)).len() as u64
    );
}

#[test]
fn a_coordinator_that_is_killed_while_a_file_is_added_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = |name: &str| folder.path().join(name);
    let (first, added, directory) = (path("first.jsonl"), path("added.jsonl"), path("run"));
    write(&first, &chats(0..40));
    let whole = chats(40..400);
    // It ends within a line, so the coordinator dies in the middle of it whenever that is.
    let (now, later) = whole.split_at(whole.len() / 2);
    write(&added, now);
    let files = files(&[&first]);
    let sets = [SETS, &[&files, "samples.follow=true", "training.passes=1"]].concat();
    let mut cluster = Cluster::launch(&directory, &sets);
    cluster.wait_for_step(1);
    done(&directory, &["samples", "add", text(&added)]);
    cluster.wait("samples of the added file", |_| {
        let records = records(&directory);
        let book = SampleBook::of(&records);
        (book.samples().count() > 80 && plans(&records).len() > 4).then_some(())
    });
    let ranks = [
        cluster.rank("draft", 0),
        cluster.rank("draft", 1),
        cluster.rank("verifier", 0),
    ];
    cluster.signal(Signal::KILL);
    cluster.wait_until_gone(&ranks);
    drop(cluster);
    let before = plans(&records(&directory));
    append(&added, later);
    for command in [&["ranks", "list"][..], &["samples", "close"]] {
        let said = refused(&directory, command);
        let expected = format!(
            "eaglet: no coordinator is running on {}; start it with `eaglet launch`\n",
            directory.display()
        );
        assert_eq!(said, expected);
    }

    let mut cluster = Cluster::launch(&directory, &sets);
    wait_for_trained(&mut cluster, 400);
    done(&directory, &["samples", "close"]);
    completed(&cluster.finish());
    each_unit_was_trained_once(&directory, 400, 1);
    let after = plans(&records(&directory));
    assert!(after.len() > before.len());
    for (step, rows) in &before {
        assert_eq!(
            &after[step], rows,
            "the rows of step {step} were decided before the crash"
        );
    }

    // Without a checkpoint all steps are done again from the journal: to the same weights.
    let weights = final_weights(&directory);
    std::fs::remove_dir_all(directory.join("checkpoints")).expect("its checkpoints");
    completed(&Cluster::launch(&directory, &sets).finish());
    for (name, bytes) in final_weights(&directory) {
        assert!(
            bytes == weights[name],
            "{name} differs after all steps were done again"
        );
    }
}

/// Trains three files one after the other; `between` happens when the run waits for the second and for the third one,
/// and while it trains the third.
fn run_of_three_files(
    directory: &Path,
    sources: &[PathBuf; 3],
    mut between: impl FnMut(usize, &mut Cluster),
) {
    let files = files(&[&sources[0]]);
    let sets = [SETS, &[&files, "samples.open=true", "training.passes=1"]].concat();
    let mut cluster = Cluster::launch(directory, &sets);
    wait_for_trained(&mut cluster, 60);
    for (moment, source) in sources.iter().enumerate().skip(1) {
        between(moment - 1, &mut cluster);
        done(directory, &["samples", "add", text(source)]);
        if moment == 2 {
            between(2, &mut cluster);
        }
        wait_for_trained(&mut cluster, 60 * (moment as u64 + 1));
    }
    done(directory, &["samples", "close"]);
    completed(&cluster.finish());
    assert_eq!(processes_of(directory), Vec::<u32>::new());
}

/// Waits until the ranks of a run satisfy something.
fn wait_for_ranks(cluster: &mut Cluster, what: &str, mut are: impl FnMut(&dyn Fn(&str) -> Value) -> bool) {
    let directory = cluster.directory().to_owned();
    cluster.wait(what, |_| {
        let ranks: Value =
            serde_json::from_str(&done(&directory, &["ranks", "list", "--json"])).expect("JSON");
        let rank = |seat: &str| {
            let ranks = ranks.as_array().expect("a list");
            let is_it = |rank: &&Value| {
                let place = &rank["seat"];
                format!(
                    "{}-{}",
                    place["role"].as_str().unwrap_or_default(),
                    place["index"]
                ) == seat
            };
            ranks.iter().find(is_it).cloned().unwrap_or(Value::Null)
        };
        are(&rank).then_some(())
    });
}

fn lanes(rank: &Value) -> usize {
    rank["lanes"].as_array().map_or(0, Vec::len)
}

#[test]
fn ranks_that_come_and_go_leave_the_weights_of_the_quiet_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let sources = [0, 1, 2].map(|number| {
        let file = folder.path().join(format!("{number}.jsonl"));
        write(&file, &chats(60 * number..60 * (number + 1)));
        file
    });
    let quiet = folder.path().join("quiet");
    run_of_three_files(&quiet, &sources, |_, _| {});

    let directory = folder.path().join("busy");
    run_of_three_files(&directory, &sources, |moment, cluster| match moment {
        0 => {
            let said = refused(&directory, &["ranks", "remove", "verifier-0"]);
            assert!(said.contains("verifier-0 is the only verifier rank"), "{said}");
            assert!(refused(&directory, &["ranks", "restart", "draft-7"]).contains("no seat draft-7"));
            let said = done(&directory, &["ranks", "add", "--role", "draft", "--threads", "1"]);
            assert!(said.contains("draft-2 is starting"), "{said}");
            wait_for_ranks(cluster, "third draft rank", |rank| {
                rank("draft-2")["state"] == "idle" && rank("draft-2")["beat_age_ms"].is_u64()
            });
            let table = done(&directory, &["ranks", "list"]);
            assert!(table.starts_with("seat") && table.lines().count() == 5, "{table}");
        }
        1 => {
            done(&directory, &["ranks", "remove", "draft-0"]);
            wait_for_ranks(cluster, "draft-2 in the place of draft-0", |rank| {
                rank("draft-0")["pid"].is_null()
                    && lanes(&rank("draft-1")) == 1
                    && lanes(&rank("draft-2")) == 1
            });
        }
        _ => {
            let before = cluster.rank("draft", 1);
            assert!(done(&directory, &["ranks", "restart", "draft-1"]).contains("draft-1 is restarted"));
            done(&directory, &["ranks", "restart", "verifier-0"]);
            wait_for_ranks(cluster, "another draft-1", |rank| {
                rank("draft-1")["pid"]
                    .as_u64()
                    .is_some_and(|pid| pid != u64::from(before))
            });
        }
    });
    each_unit_was_trained_once(&directory, 180, 1);
    assert_eq!(plans(&records(&directory)), plans(&records(&quiet)));
    for (name, bytes) in final_weights(&quiet) {
        assert!(
            bytes == final_weights(&directory)[name],
            "{name} differs from that of the quiet run"
        );
    }
    // The seats are remembered: what was removed stays away, what was added comes back.
    let status = std::fs::read(directory.join("status.json")).expect("a status file");
    let status: Value = serde_json::from_slice(&status).expect("JSON");
    let restarts = status["ranks"].as_array().expect("a list").len();
    assert_eq!(restarts, 4, "{status}");
}
