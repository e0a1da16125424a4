//! Where a verifier may come from besides a folder: a GGUF file, the Hub, and the Hub's cache without a network.

#[path = "../../runtime/tests/gguf/convert.rs"]
mod convert;
#[path = "../../runtime/tests/gguf/quantise.rs"]
#[allow(dead_code, reason = "shared with the tests of the reader")]
mod quantise;
#[path = "../../runtime/tests/hub/server.rs"]
#[allow(dead_code, reason = "shared with the tests of fetching")]
mod server;
#[path = "../../runtime/tests/gguf/writer.rs"]
#[allow(dead_code, reason = "shared with the tests of the reader")]
mod writer;

use std::path::Path;

use eaglet_tests::{Cluster, Finished, repository};
use serde_json::Value;

/// Exit code of a launch that could not start.
const BAD_INPUT: i32 = 2;

/// Runs two steps with a verifier.
fn run(directory: &Path, sets: &[&str], variables: &[(&str, &str)]) -> Finished {
    let short = [
        "training.steps=2",
        "training.passes=1",
        "training.tokens_per_row=160",
        "training.max_new_tokens=4",
    ];
    Cluster::launch_with(directory, &[&short, sets].concat(), variables).finish()
}

/// Asserts that a run completed, and returns what its checkpoint calls the verifier.
fn completed(directory: &Path, finished: &Finished) -> String {
    assert!(finished.status.success(), "{finished:#?}");
    let config = std::fs::read(directory.join("checkpoints/latest/config.json")).expect("a checkpoint");
    let config: Value = serde_json::from_slice(&config).expect("JSON");
    let name = &config["speculators_config"]["verifier"]["name_or_path"];
    name.as_str().expect("a text").to_owned()
}

#[test]
fn a_gguf_file_is_a_verifier() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("demo.Q8_0.gguf");
    let gguf = convert::convert(&repository().join("bin/demo/verifier"), quantise::Storage::Q8_0);
    std::fs::write(&file, gguf.bytes()).expect("the temporary folder is writable");
    let directory = folder.path().join("run");
    let path = format!("verifier.path={:?}", file.display().to_string());
    let finished = run(&directory, &[&path, "verifier.name=\"me/demo\""], &[]);
    assert_eq!(finished.errors, "");
    assert_eq!(completed(&directory, &finished), "me/demo");

    std::fs::write(&file, &gguf.bytes()[..1000]).expect("the temporary folder is writable");
    let directory = folder.path().join("cut");
    let finished = run(&directory, &[&path], &[]);
    assert_eq!(finished.status.code(), Some(BAD_INPUT), "{finished:#?}");
    assert_eq!(finished.errors.lines().count(), 1, "{finished:#?}");
    assert!(
        finished.errors.contains("demo.Q8_0.gguf` is truncated"),
        "{finished:#?}"
    );
}

#[test]
fn a_model_of_the_hub_is_fetched_once_and_then_used_without_a_network() {
    let demo = repository().join("bin/demo/verifier");
    let files: Vec<(String, Vec<u8>)> = std::fs::read_dir(demo)
        .expect("the demo verifier")
        .map(|entry| entry.expect("an entry").path())
        .map(|file| {
            let name = file
                .file_name()
                .and_then(|name| name.to_str())
                .expect("a text")
                .to_owned();
            (name, std::fs::read(file).expect("it can be read"))
        })
        .collect();
    let files: Vec<(&str, &[u8])> = files
        .iter()
        .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
        .collect();
    let server = server::Server::new(&"c0ffee".repeat(7)[..40], &files);
    server.state().faults = vec![server::Fault::CutAfter(100)];

    let folder = tempfile::tempdir().expect("a temporary folder");
    let home = folder.path().join("hub").display().to_string();
    let sets = [format!("verifier.path={:?}", server::REPO)];
    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
    let online = [
        ("HF_HOME", home.as_str()),
        ("HF_ENDPOINT", server.endpoint.as_str()),
        ("HF_HUB_OFFLINE", ""),
    ];
    let directory = folder.path().join("online");
    let finished = run(&directory, &sets, &online);
    assert_eq!(completed(&directory, &finished), server::REPO);
    assert!(finished.errors.contains("eaglet: fetching "), "{finished:#?}");
    assert_eq!(server.bodies().len(), files.len() + 1, "one was cut");

    let offline = [
        ("HF_HOME", home.as_str()),
        ("HF_ENDPOINT", server.endpoint.as_str()),
        ("HF_HUB_OFFLINE", "1"),
    ];
    let directory = folder.path().join("offline");
    let finished = run(&directory, &sets, &offline);
    assert_eq!(completed(&directory, &finished), server::REPO);
    assert_eq!(finished.errors, "");
    assert_eq!(server.bodies(), []);

    let elsewhere = folder.path().join("empty").display().to_string();
    let directory = folder.path().join("refused");
    let finished = run(
        &directory,
        &sets,
        &[("HF_HOME", &elsewhere), ("HF_HUB_OFFLINE", "1")],
    );
    assert_eq!(finished.status.code(), Some(BAD_INPUT), "{finished:#?}");
    assert_eq!(finished.errors.lines().count(), 1, "{finished:#?}");
    assert!(finished.errors.contains("HF_HUB_OFFLINE is set"), "{finished:#?}");
    assert!(
        !directory.join("logs/verifier-0.log").exists(),
        "a rank was started"
    );
}
