//! The command as a shell sees it.

use std::process::{Command, Output};

fn eaglet(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_eaglet"))
        .args(arguments)
        .output()
        .expect("eaglet can be started")
}

#[test]
fn help_names_the_commands_that_people_call() {
    let output = eaglet(&["--help"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success());
    assert!(
        text.contains("launch") && text.contains("samples") && !text.contains("rank "),
        "{text}"
    );
}

#[test]
fn a_missing_cluster_file_is_one_line_with_its_name() {
    let output = eaglet(&["launch", "no/such/cluster.toml"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text.lines().count() == 1 && text.contains("no/such/cluster.toml"),
        "{text}"
    );
}

#[test]
fn a_rank_without_a_coordinator_does_not_start() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().display().to_string();
    let output = eaglet(&[
        "rank",
        "--coordinator",
        "127.0.0.1:1",
        "--seat",
        "draft-0",
        "--generation",
        "0",
        "--run-directory",
        &directory,
        "--parent",
        "1",
    ]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(
        text.contains("eaglet launch") && !text.contains("panicked"),
        "{text}"
    );
}

#[test]
fn samples_are_shown_with_what_is_trained() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    let chats = format!("{root}/bin/demo/chats.jsonl");
    let cluster = format!("{root}/cluster.toml");
    let output = eaglet(&["samples", "show", &chats, "--cluster", &cluster, "-n", "2"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        text.matches("trained").count() == 2 && text.contains('⟦'),
        "{text}"
    );
}
