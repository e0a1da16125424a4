//! What the product is for: killed processes change nothing about the weights.

use std::path::Path;

use eaglet_tests::traces::{account, completed, same_weights};
use eaglet_tests::{Cluster, is_alive, processes_of, send};
use rustix::process::Signal;

/// A run of about forty steps, with an evaluation and a checkpoint on the way.
const SETS: &[&str] = &[
    "training.steps=24",
    "training.tokens_per_row=160",
    "training.evaluate_every_steps=20",
    "training.max_new_tokens=12",
    "checkpoints.every_steps=10",
    "samples.held_out=[]",
    "samples.held_out_every=60",
    // Only the kills of a test are losses, however busy the machine is.
    "supervision.dead_after_ms=15000",
    "supervision.coordinator_lease_ms=30000",
];

fn ledger_adds_up(directory: &Path) {
    assert!(account(directory).trained > 0);
}

fn quiet_run(folder: &Path) -> std::path::PathBuf {
    let directory = folder.join("quiet");
    let finished = Cluster::launch(&directory, SETS).finish();
    completed(&finished);
    ledger_adds_up(&directory);
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    directory
}

#[test]
fn killed_ranks_and_a_killed_coordinator_leave_the_weights_of_the_quiet_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let quiet = quiet_run(folder.path());

    // Ranks: a replica, the verifier, then both replicas at once.
    let directory = folder.path().join("killed-ranks");
    let mut cluster = Cluster::launch(&directory, SETS);
    cluster.wait_for_step(3);
    let draft = cluster.rank("draft", 1);
    send(draft, Signal::KILL);
    cluster.wait_for_step(6);
    let verifier = cluster.rank("verifier", 0);
    send(verifier, Signal::KILL);
    cluster.wait_for_step(13);
    let drafts = [cluster.rank("draft", 0), cluster.rank("draft", 1)];
    assert!(!drafts.contains(&draft) && !is_alive(draft));
    for pid in drafts {
        send(pid, Signal::KILL);
    }
    let finished = cluster.finish();
    completed(&finished);
    ledger_adds_up(&directory);
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    let lost = finished
        .lines
        .iter()
        .filter(|line| line.contains("lost "))
        .count();
    assert_eq!(lost, 4, "{finished:#?}");
    same_weights(&quiet, &directory);

    // The coordinator: its ranks end with it, and a second launch goes on.
    let directory = folder.path().join("killed-coordinator");
    let mut cluster = Cluster::launch(&directory, SETS);
    cluster.wait_for_step(14);
    let ranks = [
        cluster.rank("draft", 0),
        cluster.rank("draft", 1),
        cluster.rank("verifier", 0),
    ];
    cluster.signal(Signal::KILL);
    cluster.wait_until_gone(&ranks);
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    drop(cluster);
    let finished = Cluster::launch(&directory, SETS).finish();
    completed(&finished);
    ledger_adds_up(&directory);
    same_weights(&quiet, &directory);

    // A second launch of a run that is complete changes nothing and says so.
    let finished = Cluster::launch(&directory, SETS).finish();
    completed(&finished);
    same_weights(&quiet, &directory);
}

#[test]
fn a_drained_run_goes_on_to_the_same_weights() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let quiet = quiet_run(folder.path());
    let directory = folder.path().join("drained");
    let mut cluster = Cluster::launch(&directory, SETS);
    cluster.wait_for_step(5);
    cluster.signal(Signal::INT);
    let finished = cluster.finish();
    assert_eq!(finished.status.code(), Some(130), "{finished:#?}");
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    // A run directory may move.
    let moved = folder.path().join("moved");
    std::fs::rename(&directory, &moved).expect("a free name");
    let directory = moved;
    let finished = Cluster::launch(&directory, SETS).finish();
    completed(&finished);
    ledger_adds_up(&directory);
    same_weights(&quiet, &directory);

    // The same directory with other mathematics is refused, and left as it is.
    let mut sets = SETS.to_vec();
    sets.push("training.learning_rate=0.5");
    let finished = Cluster::launch(&directory, &sets).finish();
    assert_eq!(finished.status.code(), Some(2), "{finished:#?}");
    assert!(
        finished.errors.contains("training.learning_rate differ"),
        "{finished:#?}"
    );
    same_weights(&quiet, &directory);

    // Without its journal nobody knows what the directory holds.
    std::fs::rename(directory.join("journal"), folder.path().join("journal")).expect("a free name");
    let finished = Cluster::launch(&directory, SETS).finish();
    assert_eq!(finished.status.code(), Some(2), "{finished:#?}");
    assert!(finished.errors.contains("journal"), "{finished:#?}");
    same_weights(&quiet, &directory);
}

#[test]
fn a_second_interrupt_ends_at_once_and_leaves_nobody_behind() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("run");
    let mut cluster = Cluster::launch(&directory, SETS);
    let ranks = [
        cluster.rank("draft", 0),
        cluster.rank("draft", 1),
        cluster.rank("verifier", 0),
    ];
    // A hung rank cannot be drained, so only the second interrupt can end this.
    send(ranks[0], Signal::STOP);
    cluster.signal(Signal::INT);
    cluster.signal(Signal::INT);
    let finished = cluster.finish();
    assert!(!finished.status.success(), "{finished:#?}");
    for pid in ranks {
        assert!(!is_alive(pid));
    }
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
}
