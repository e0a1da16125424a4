//! What `eaglet check` says.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::eaglet;

/// Exit code of a check that found a problem.
pub const BAD_INPUT: i32 = 2;

/// Checks a cluster file.
///
/// # Panics
/// If the process cannot be started.
pub fn check(cluster: &Path, arguments: &[&str]) -> Output {
    Command::new(eaglet())
        .arg("check")
        .arg(cluster)
        .args(arguments)
        .output()
        .expect("eaglet can be started")
}

/// What a check has printed.
///
/// # Panics
/// If something went to stderr.
pub fn text(output: &Output) -> String {
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).expect("texts only")
}

/// The exit code and the JSON report of a cluster.
///
/// # Panics
/// If it is no JSON.
pub fn report(cluster: &Path, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = check(cluster, &[arguments, &["--json"]].concat());
    let text = text(&output);
    let value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (output.status.code(), value)
}

/// Findings of a kind, `problems` or `warnings`, as `topic: place: message`.
///
/// # Panics
/// If the report has none such.
pub fn findings(report: &Value, kind: &str) -> Vec<String> {
    let list = report[kind].as_array().expect("a list");
    list.iter()
        .map(|finding| {
            let part = |name: &str| finding[name].as_str().expect("a text").to_owned();
            format!("{}: {}: {}", part("topic"), part("place"), part("message"))
        })
        .collect()
}

/// Asserts that some finding holds all of some words.
///
/// # Panics
/// If none does.
pub fn is_told(found: &[String], words: &[&str]) {
    let holds = |finding: &String| words.iter().all(|word| finding.contains(word));
    assert!(found.iter().any(holds), "{words:?} are not told: {found:#?}");
}
