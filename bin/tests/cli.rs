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
        ["launch", "ranks", "samples"]
            .iter()
            .all(|command| text.contains(command))
            && !text.contains("rank "),
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
        "--host",
        "local",
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

#[test]
fn a_run_that_is_not_alive_is_told_with_the_remedy() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().display().to_string();
    let chats = folder.path().join("chats.jsonl");
    std::fs::write(&chats, "").expect("the temporary folder is writable");
    let chats = chats.display().to_string();
    for command in [
        &["ranks", "list"][..],
        &["ranks", "add", "--role", "draft"],
        &["ranks", "remove", "draft-1"],
        &["samples", "add", &chats],
        &["samples", "close"],
        &["samples", "retry", "1"],
    ] {
        let output = eaglet(&[command, &["--run", &directory]].concat());
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert_eq!(
            String::from_utf8_lossy(&output.stderr),
            format!("eaglet: no coordinator is running on {directory}; start it with `eaglet launch`\n")
        );
    }
    for command in [&["samples", "list"][..], &["samples", "show", "--sample", "0"]] {
        let output = eaglet(&[command, &["--run", &directory]].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert!(
            text.lines().count() == 1 && text.contains("cannot open the journal"),
            "{text}"
        );
    }
}

#[test]
fn files_to_add_must_be_there() {
    let output = eaglet(&[
        "samples",
        "add",
        "no/such.jsonl",
        "nor/such.jsonl",
        "--run",
        "nowhere",
    ]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text.lines().count() == 2 && text.contains("no/such.jsonl") && text.contains("nor/such.jsonl"),
        "{text}"
    );
}

/// The README's first command names no binary.
#[test]
fn cargo_run_in_the_repository_means_eaglet() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
        .output()
        .expect("cargo has built this test");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("metadata");
    let list = |value: &serde_json::Value| value.as_array().cloned().unwrap_or_default();
    let members = list(&metadata["workspace_default_members"]);
    let binaries: Vec<String> = list(&metadata["packages"])
        .iter()
        .filter(|package| members.contains(&package["id"]))
        .flat_map(|package| list(&package["targets"]))
        .filter(|target| list(&target["kind"]).contains(&"bin".into()))
        .map(|target| target["name"].to_string())
        .collect();
    assert_eq!(binaries, ["\"eaglet\""]);
}
