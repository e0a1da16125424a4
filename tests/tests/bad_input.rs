//! Bad input: what is wrong is told in one line with its place and its remedy, and a bad sample stops no run.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use eaglet_tests::{Cluster, Finished, processes_of, repository};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};

/// Exit code of a launch whose cluster file or input was wrong before anything was started.
const BAD_INPUT: i32 = 2;

/// A short run.
const SHORT: &[&str] = &[
    "training.steps=2",
    "training.passes=1",
    "training.tokens_per_row=160",
    "training.max_new_tokens=4",
];

/// A tensor of the demo verifier, `[64, 128]`.
const TENSOR: &str = "model.layers.3.self_attn.k_proj.weight";

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Text of a path as a TOML string.
fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// Launches with settings besides those of a short run, and waits for the end.
fn launch(directory: &Path, sets: &[&str]) -> Finished {
    Cluster::launch(directory, &[SHORT, sets].concat()).finish()
}

/// Asserts that a launch failed with one line that holds some words, and left no process.
fn failed(directory: &Path, finished: &Finished, words: &[&str]) {
    let code = finished.status.code().expect("no signal ended it");
    assert_ne!(code, 0, "{finished:#?}");
    assert_eq!(finished.errors.lines().count(), 1, "{finished:#?}");
    for word in words {
        assert!(finished.errors.contains(word), "no `{word}` in {finished:#?}");
    }
    no_panic(directory, finished);
    assert_eq!(processes_of(directory), Vec::<u32>::new());
}

/// Asserts that no process of the run panicked, by what it said or logged.
fn no_panic(directory: &Path, finished: &Finished) {
    let mut said = vec![finished.errors.clone(), finished.lines.join("\n")];
    if let Ok(logs) = std::fs::read_dir(directory.join("logs")) {
        said.extend(logs.map(|log| std::fs::read_to_string(log.expect("an entry").path()).expect("a log")));
    }
    for text in said {
        assert!(!text.contains("panicked at"), "{text}");
    }
}

/// Asserts that settings are refused before a rank starts.
fn refused(sets: &[&str], words: &[&str]) {
    let folder = folder();
    let directory = folder.path().join("run");
    let finished = launch(&directory, sets);
    failed(&directory, &finished, words);
    assert_eq!(finished.status.code(), Some(BAD_INPUT), "{finished:#?}");
    assert!(finished.lines.is_empty(), "{finished:#?}");
    let ranks = ["verifier-0", "draft-0", "draft-1"].map(|rank| directory.join(format!("logs/{rank}.log")));
    assert!(ranks.iter().all(|log| !log.exists()), "a rank was started");
    assert!(!directory.join("checkpoints/latest").exists());
}

/// Asserts that a copy of the demo verifier that was damaged is refused; the words may name its files.
fn verifier_refused(damage: impl FnOnce(&Path), words: &[&str]) {
    let folder = folder();
    let verifier = folder.path().join("verifier");
    copy_verifier(&verifier);
    damage(&verifier);
    refused(&[&format!("verifier.path={}", quoted(&verifier))], words);
}

fn copy_verifier(to: &Path) {
    std::fs::create_dir(to).expect("the temporary folder is writable");
    for entry in std::fs::read_dir(repository().join("bin/demo/verifier")).expect("the demo verifier") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), to.join(entry.file_name())).expect("its files can be copied");
    }
}

/// Changes a JSON file of a verifier.
fn change(file: &Path, change: impl FnOnce(&mut Value)) {
    let bytes = std::fs::read(file).expect("it was copied");
    let mut value = serde_json::from_slice(&bytes).expect("JSON");
    change(&mut value);
    std::fs::write(file, value.to_string()).expect("the copy is writable");
}

/// Writes the tensors of a verifier anew: those that `select` returns, as it returns them.
fn rewrite<'a>(
    bytes: &'a [u8],
    to: &Path,
    select: impl Fn(&str, TensorView<'a>) -> Option<TensorView<'a>>,
) -> Vec<String> {
    let file = SafeTensors::deserialize(bytes).expect("the demo verifier is whole");
    let tensors: Vec<_> = file
        .tensors()
        .into_iter()
        .filter_map(|(name, view)| select(&name, view).map(|view| (name, view)))
        .collect();
    let names = tensors.iter().map(|(name, _)| name.clone()).collect();
    safetensors::serialize_to_file(tensors, None, to).expect("the copy is writable");
    names
}

/// Turns a verifier's one file into two shards with an index; the second holds the layers.
fn shard(verifier: &Path) {
    let whole = verifier.join("model.safetensors");
    let bytes = std::fs::read(&whole).expect("it was copied");
    let mut map = serde_json::Map::new();
    for (shard, holds_layers) in [("a.safetensors", false), ("b.safetensors", true)] {
        let names = rewrite(&bytes, &verifier.join(shard), |name, view| {
            (name.starts_with("model.layers.") == holds_layers).then_some(view)
        });
        map.extend(names.into_iter().map(|name| (name, Value::from(shard))));
    }
    std::fs::remove_file(whole).expect("the copy is writable");
    let index = json!({ "metadata": {}, "weight_map": map });
    std::fs::write(verifier.join("model.safetensors.index.json"), index.to_string()).expect("writable");
}

fn cut(file: &Path, bytes: usize) {
    let whole = std::fs::read(file).expect("it was copied");
    std::fs::write(file, &whole[..whole.len() - bytes]).expect("the copy is writable");
}

/// Good lines of the demo chats with others among them, from line 3 on.
fn chats(folder: &Path, bad: &[&[u8]]) -> PathBuf {
    let chats = std::fs::read(repository().join("bin/demo/chats.jsonl")).expect("the demo chats");
    let good: Vec<&[u8]> = chats.split(|&byte| byte == b'\n').take(30).collect();
    let lines = [&good[..2], bad, &good[2..]].concat();
    let file = folder.join("chats.jsonl");
    std::fs::write(&file, lines.join(&b'\n')).expect("the temporary folder is writable");
    file
}

#[test]
fn a_shard_that_is_missing_or_truncated_is_named() {
    verifier_refused(
        |verifier| {
            shard(verifier);
            std::fs::remove_file(verifier.join("b.safetensors")).expect("it was written");
        },
        &["model.safetensors.index.json", "`b.safetensors`", "download"],
    );
    verifier_refused(
        |verifier| {
            shard(verifier);
            cut(&verifier.join("b.safetensors"), 100);
        },
        &["b.safetensors` is truncated", "download it again"],
    );
    verifier_refused(
        |verifier| std::fs::remove_file(verifier.join("model.safetensors")).expect("it was copied"),
        &["holds neither model.safetensors nor", "download"],
    );
}

#[test]
fn a_tensor_of_the_wrong_shape_is_named_with_both_shapes() {
    let turn = |verifier: &Path| {
        let file = verifier.join("model.safetensors");
        let bytes = std::fs::read(&file).expect("it was copied");
        rewrite(&bytes, &file, |name, view| {
            if name != TENSOR {
                return Some(view);
            }
            Some(TensorView::new(view.dtype(), vec![128, 64], view.data()).expect("as many bytes"))
        });
    };
    let remedy = "config.json and weights must be of the same model";
    verifier_refused(turn, &[TENSOR, "[128, 64]", "[64, 128]", remedy]);
}

#[test]
fn a_configuration_that_cannot_be_used_is_told_with_its_key() {
    let missing = "config.json`: key `hidden_size` is missing; add a whole number";
    let text = "config.json`: key `hidden_size` is \"128\"; it must be a whole number";
    let family = "config.json`: model_type `gpt2` is not supported; supported: llama";
    for (key, value, words) in [
        ("hidden_size", None, missing),
        ("hidden_size", Some("128"), text),
        ("model_type", Some("gpt2"), family),
    ] {
        let damage = |config: &mut Value| {
            let keys = config.as_object_mut().expect("an object");
            match value {
                Some(value) => keys.insert(key.to_owned(), value.into()),
                None => keys.remove(key),
            };
        };
        verifier_refused(|verifier| change(&verifier.join("config.json"), damage), &[words]);
    }
}

#[test]
fn a_tokenizer_that_does_not_fit_the_embedding_is_told_with_the_id() {
    let token = json!({
        "id": 2048, "content": "<|extra|>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true
    });
    let add = |tokenizer: &mut Value| {
        let added = tokenizer["added_tokens"].as_array_mut().expect("a list");
        added.push(token);
    };
    let place = "id 2048 (`<|extra|>`) has no row in the embedding";
    let remedy = "not of the same verifier";
    verifier_refused(
        |verifier| change(&verifier.join("tokenizer.json"), add),
        &[place, remedy],
    );
}

#[test]
fn an_empty_dataset_ends_the_run_with_the_key_that_names_it() {
    let folder = folder();
    let empty = folder.path().join("empty.jsonl");
    std::fs::write(&empty, "").expect("the temporary folder is writable");
    let directory = folder.path().join("run");
    let finished = launch(&directory, &[&format!("samples.files=[{}]", quoted(&empty))]);
    failed(
        &directory,
        &finished,
        &["empty.jsonl: no sample can be trained", "samples.files"],
    );
}

#[test]
fn bad_samples_are_quarantined_with_their_place_and_reason_and_the_run_completes() {
    let folder = folder();
    let not_utf8 = b"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}";
    let no_answer = br#"{"messages": [{"role": "user", "content": "Is anybody there?"}]}"#;
    let file = chats(folder.path(), &[not_utf8, no_answer, b"{\"messages\": [{\"ro"]);
    let directory = folder.path().join("run");
    let finished = launch(&directory, &[&format!("samples.files=[{}]", quoted(&file))]);
    assert!(finished.status.success(), "{finished:#?}");
    assert_eq!(finished.errors, "");
    no_panic(&directory, &finished);
    for (line, reason) in [
        (3, "no UTF-8"),
        (4, "no message is an assistant's answer"),
        (5, "no whole JSON value"),
    ] {
        let place = format!("{}:{line}", file.display());
        let is_told = |said: &String| said.contains(&place) && said.contains(reason);
        assert!(finished.lines.iter().any(is_told), "{place}: {finished:#?}");
    }
    let status = std::fs::read(directory.join("status.json")).expect("a status file");
    let status: Value = serde_json::from_slice(&status).expect("JSON");
    assert_eq!(status["samples"]["quarantined"], 3);
}

#[test]
fn a_port_in_use_is_named_with_the_key() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = taken.local_addr().expect("it is bound").to_string();
    let place = format!("cannot listen on {address}");
    refused(
        &[&format!("run.listen={address:?}")],
        &[&place, "set run.listen to a free port"],
    );
}

#[test]
fn a_run_directory_that_cannot_be_written_is_named() {
    let folder = folder();
    let directory = folder.path().join("run");
    std::fs::write(&directory, "a file stands here").expect("the temporary folder is writable");
    let finished = launch(&directory, &[]);
    failed(&directory, &finished, &[&directory.display().to_string(), "writ"]);
    assert!(directory.is_file());
}

#[test]
fn two_ranks_on_one_seat_are_both_named() {
    let ranks = r#"ranks=[{role="verifier"},{role="draft",seat=0},{role="draft",seat=0}]"#;
    refused(&[ranks], &["ranks[2]", "draft-0", "ranks[1]"]);
}
