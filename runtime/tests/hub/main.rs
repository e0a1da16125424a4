//! Fetching models from a Hub: a server of this process, no network.

mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use eaglet_runtime::hub::{Hub, HubError, HubModel, Need, Progress};
use serde_json::json;

use server::{Fault, REPO, Server};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed))
        .collect()
}

/// A server with an unsharded model, and an empty cache.
fn single() -> (Server, tempfile::TempDir) {
    let server = Server::new(
        COMMIT,
        &[
            ("README.md", b"# a model"),
            ("config.json", b"{}"),
            ("tokenizer.json", b"{\"model\": 1}"),
            ("model.safetensors", &bytes(1, 100_000)),
            ("pytorch_model.bin", &bytes(2, 1000)),
        ],
    );
    (server, tempfile::tempdir().expect("a temporary folder"))
}

fn hub(server: &Server, cache: &Path) -> Hub {
    Hub {
        endpoint: server.endpoint.clone(),
        cache: cache.to_owned(),
        token: None,
        is_offline: false,
        stall_timeout: Duration::from_secs(60),
        retry_pause: Duration::from_millis(1),
    }
}

fn model() -> HubModel {
    HubModel::parse(REPO, "main").expect("a name")
}

fn fetch(hub: &Hub) -> Result<PathBuf, HubError> {
    hub.fetch(&model(), Need::Whole, |_| {})
}

fn message(error: &HubError) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

fn says(error: &HubError, words: &[&str]) {
    let message = message(error);
    for word in words {
        assert!(message.contains(word), "no `{word}` in {message}");
    }
}

fn names(snapshot: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(snapshot).expect("a folder");
    let mut names: Vec<_> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("a text")
        })
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_needed_is_fetched_once_into_the_shared_layout() {
    let (server, cache) = single();
    let hub = hub(&server, cache.path());
    let mut heard: Vec<Progress> = Vec::new();
    let snapshot = hub
        .fetch(&model(), Need::Whole, |progress| heard.push(progress.clone()))
        .expect("it is fetched");
    assert_eq!(
        snapshot,
        cache.path().join("models--owner--model/snapshots").join(COMMIT)
    );
    assert_eq!(
        names(&snapshot),
        ["config.json", "model.safetensors", "tokenizer.json"]
    );
    assert_eq!(
        std::fs::read(snapshot.join("model.safetensors")).expect("it is"),
        bytes(1, 100_000)
    );
    let link = std::fs::read_link(snapshot.join("config.json")).expect("a link");
    assert!(link.starts_with("../../blobs"), "{link:?}");
    let main = std::fs::read_to_string(cache.path().join("models--owner--model/refs/main"));
    assert_eq!(main.expect("it is"), COMMIT);

    let total = 2 + 12 + 100_000;
    assert!(
        heard
            .iter()
            .all(|progress| progress.total_bytes == total && progress.pause.is_none())
    );
    assert!(
        heard
            .windows(2)
            .all(|pair| pair[0].done_bytes <= pair[1].done_bytes)
    );
    assert_eq!(heard.last().map(|progress| progress.done_bytes), Some(total));

    assert_eq!(server.bodies().len(), 3);
    assert_eq!(fetch(&hub).expect("it is there"), snapshot);
    assert_eq!(server.bodies(), []);
}

#[test]
fn a_cut_connection_is_taken_up_where_it_ended() {
    let (server, cache) = single();
    server.state().faults = vec![Fault::CutAfter(0), Fault::CutAfter(1)];
    server.state().files.retain(|name, _| name != "tokenizer.json");
    let hub = hub(&server, cache.path());
    let mut pauses = 0;
    let snapshot = hub.fetch(&model(), Need::Whole, |progress| {
        pauses += usize::from(progress.pause.is_some())
    });
    let snapshot = snapshot.expect("it is fetched");
    assert_eq!(pauses, 2);
    assert_eq!(std::fs::read(snapshot.join("config.json")).expect("it is"), b"{}");
    server.bodies();

    server
        .state()
        .files
        .insert("model.safetensors".to_owned(), bytes(9, 300_000));
    server.state().commit = COMMIT.replace('0', "f");
    // So often that only progress in between keeps it going.
    server.state().faults = (0..12).map(|_| Fault::CutAfter(20_000)).collect();
    let snapshot = fetch(&hub).expect("it is fetched");
    assert_eq!(
        std::fs::read(snapshot.join("model.safetensors")).expect("it is"),
        bytes(9, 300_000)
    );
    let starts: Vec<u64> = server.bodies().into_iter().map(|(_, start)| start).collect();
    assert_eq!(starts, (0..13).map(|part| part * 20_000).collect::<Vec<_>>());
}

#[test]
fn what_had_come_is_kept_for_a_later_process() {
    let (server, cache) = single();
    let hub = hub(&server, cache.path());
    hub.fetch(&model(), Need::Tokenizer, |_| {})
        .expect("the small files");
    server.bodies();
    server.state().faults = [Fault::CutAfter(70_000)]
        .into_iter()
        .chain([Fault::Fail; 20])
        .collect();
    let error = fetch(&hub).expect_err("it fails");
    says(
        &error,
        &[
            "cannot download model.safetensors of `owner/model@main`",
            "500",
            "launch again",
        ],
    );
    server.state().faults.clear();
    server.bodies();
    let snapshot = fetch(&hub).expect("it is fetched");
    assert_eq!(
        std::fs::read(snapshot.join("model.safetensors")).expect("it is"),
        bytes(1, 100_000)
    );
    assert_eq!(server.bodies(), [("model.safetensors".to_owned(), 70_000)]);
}

#[test]
fn a_whole_part_is_only_renamed_and_a_long_one_dropped() {
    for (len, expected) in [
        (100_000, vec![]),
        (100_001, vec![("model.safetensors".to_owned(), 0)]),
    ] {
        let (server, cache) = single();
        let hub = hub(&server, cache.path());
        hub.fetch(&model(), Need::Tokenizer, |_| {})
            .expect("the small files");
        server.state().faults = [Fault::CutAfter(10)]
            .into_iter()
            .chain([Fault::Fail; 20])
            .collect();
        fetch(&hub).expect_err("it fails");
        let blobs = cache.path().join("models--owner--model/blobs");
        let part = names(&blobs)
            .into_iter()
            .find(|name| name.ends_with(".part"))
            .expect("a part");
        let mut whole = bytes(1, 100_000);
        whole.resize(len, 0);
        std::fs::write(blobs.join(part), whole).expect("it is writable");
        server.state().faults.clear();
        server.bodies();
        let snapshot = fetch(&hub).expect("it is fetched");
        assert_eq!(
            std::fs::read(snapshot.join("model.safetensors")).expect("it is"),
            bytes(1, 100_000)
        );
        assert_eq!(server.bodies(), expected);
    }
}

#[test]
fn a_moved_branch_fetches_only_what_changed() {
    let (server, cache) = single();
    let hub = hub(&server, cache.path());
    let first = fetch(&hub).expect("it is fetched");
    server.bodies();
    let moved = "f".repeat(40);
    server.state().commit = moved.clone();
    server
        .state()
        .files
        .insert("config.json".to_owned(), b"{\"new\": 1}".to_vec());
    let second = fetch(&hub).expect("it is fetched");
    assert_eq!(server.bodies(), [("config.json".to_owned(), 0)]);
    assert_ne!(first, second);
    assert_eq!(std::fs::read(first.join("config.json")).expect("it is"), b"{}");
    assert_eq!(
        std::fs::read(second.join("model.safetensors")).expect("it is"),
        bytes(1, 100_000)
    );

    // The old commit is still there, by its name.
    let pinned = HubModel::parse(REPO, COMMIT).expect("a name");
    let mut offline = hub.clone();
    offline.is_offline = true;
    assert_eq!(
        offline.fetch(&pinned, Need::Whole, |_| {}).expect("it is there"),
        first
    );
    assert_eq!(fetch(&offline).expect("it is there"), second);
}

#[test]
fn a_draft_needs_only_the_shards_of_embedding_head_and_norm() {
    let index = json!({ "weight_map": {
        "language_model.model.embed_tokens.weight": "model-1.safetensors",
        "language_model.model.layers.0.self_attn.q_proj.weight": "model-2.safetensors",
        "language_model.model.norm.weight": "model-3.safetensors",
        "language_model.lm_head.weight": "model-4.safetensors",
        "language_model.model.layers.1.self_attn.q_norm.weight": "model-5.safetensors",
    }})
    .to_string();
    let server = Server::new(
        COMMIT,
        &[
            ("config.json", b"{}"),
            ("model.safetensors.index.json", index.as_bytes()),
            ("model-1.safetensors", b"1"),
            ("model-2.safetensors", b"2"),
            ("model-3.safetensors", b"3"),
            ("model-4.safetensors", b"4"),
            ("model-5.safetensors", b"5"),
        ],
    );
    let cache = tempfile::tempdir().expect("a temporary folder");
    let hub = hub(&server, cache.path());
    let snapshot = hub.fetch(&model(), Need::Frozen, |_| {}).expect("it is fetched");
    let held = [
        "config.json",
        "model-1.safetensors",
        "model-3.safetensors",
        "model-4.safetensors",
    ];
    assert_eq!(names(&snapshot)[..4], held);
    assert_eq!(names(&snapshot).len(), 5);

    let mut offline = hub.clone();
    offline.is_offline = true;
    assert_eq!(
        offline
            .fetch(&model(), Need::Frozen, |_| {})
            .expect("it is there"),
        snapshot
    );
    let error = fetch(&offline).expect_err("not all is there");
    says(
        &error,
        &[
            "HF_HUB_OFFLINE is set",
            "no model-2.safetensors of `owner/model@main`",
            "unset it",
        ],
    );
    fetch(&hub).expect("it is fetched");
    assert_eq!(names(&snapshot).len(), 7);
    fetch(&offline).expect("all is there");
}

#[test]
fn a_gguf_file_of_a_model_is_named_behind_it() {
    let server = Server::new(
        COMMIT,
        &[
            ("config.json", b"{}"),
            ("m.Q8_0.gguf", b"GGUF"),
            ("big-00001-of-00002.gguf", b"one"),
            ("big-00002-of-00002.gguf", b"two"),
        ],
    );
    let cache = tempfile::tempdir().expect("a temporary folder");
    let hub = hub(&server, cache.path());
    let fetch = |name: &str| {
        let model = HubModel::parse(&format!("{REPO}/{name}"), "main").expect("a name");
        hub.fetch(&model, Need::Whole, |_| {})
    };
    let file = fetch("m.Q8_0.gguf").expect("it is fetched");
    assert_eq!(std::fs::read(&file).expect("it is"), b"GGUF");
    let folder = file.parent().expect("a folder");
    assert_eq!(names(folder), ["m.Q8_0.gguf"]);
    assert!(
        fetch("big-00001-of-00002.gguf")
            .expect("it is fetched")
            .ends_with("big-00001-of-00002.gguf")
    );
    assert_eq!(names(folder).len(), 3);
    says(
        &fetch("m.Q4_0.gguf").expect_err("it is not there"),
        &["has no m.Q4_0.gguf; check the name"],
    );
}

#[test]
fn refusals_are_told_with_their_remedies() {
    let (server, cache) = single();
    let mut hub = hub(&server, cache.path());
    let other = HubModel::parse("owner/other", "main").expect("a name");
    let error = hub
        .fetch(&other, Need::Whole, |_| {})
        .expect_err("it is not there");
    says(
        &error,
        &[
            "`owner/other@main` is no local path",
            "has no such model",
            "check the spelling",
        ],
    );
    let error = hub.fetch(&HubModel::parse(REPO, "v2").expect("a name"), Need::Whole, |_| {});
    says(
        &error.expect_err("it is not there"),
        &["`owner/model@v2`", "verifier.revision"],
    );

    server.state().token = Some("secret".to_owned());
    says(
        &fetch(&hub).expect_err("it is gated"),
        &["(401) without a token", "set HF_TOKEN"],
    );
    hub.token = Some("wrong".to_owned());
    let error = fetch(&hub).expect_err("it is gated");
    says(&error, &["(401) with the token that was given"]);
    assert!(!message(&error).contains("wrong"), "tokens are not told");
    hub.token = Some("secret".to_owned());
    fetch(&hub).expect("it is fetched");
}

#[test]
fn models_that_lack_what_is_needed_are_told() {
    let (server, cache) = single();
    let hub = hub(&server, cache.path());
    server.state().files.remove("model.safetensors");
    says(
        &fetch(&hub).expect_err("no weights"),
        &[
            "has no model.safetensors and no model.safetensors.index.json",
            "safetensors files",
        ],
    );
    let outside = json!({ "weight_map": { "a": "../../outside" } })
        .to_string()
        .into_bytes();
    for (index, words) in [
        (outside, "its shard `../../outside` is no plain file name"),
        (b"[]".to_vec(), "usable model.safetensors.index.json"),
    ] {
        server
            .state()
            .files
            .insert("model.safetensors.index.json".to_owned(), index);
        server.state().commit.push('0');
        says(&fetch(&hub).expect_err("it is not usable"), &[words]);
    }
    server.state().files.remove("config.json");
    says(
        &fetch(&hub).expect_err("no configuration"),
        &["has no config.json", "OWNER/NAME/FILE.gguf"],
    );
    server.state().commit = "../../../outside".to_owned();
    says(
        &fetch(&hub).expect_err("no commit"),
        &["its answer names no commit"],
    );
}

#[test]
fn files_of_another_length_than_the_hub_says_are_not_taken() {
    let (server, cache) = single();
    server
        .state()
        .claimed
        .insert("model.safetensors".to_owned(), 99_999);
    let error = fetch(&hub(&server, cache.path())).expect_err("it is longer");
    says(&error, &["model.safetensors", "it came with another length"]);
    let snapshot = cache.path().join("models--owner--model/snapshots").join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists());
}

#[test]
fn without_a_hub_the_cache_is_enough() {
    let (server, cache) = single();
    let mut hub = hub(&server, cache.path());
    let snapshot = fetch(&hub).expect("it is fetched");
    // A port on which nobody listens: bound and closed again.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    hub.endpoint = format!("http://{}", gone.local_addr().expect("an address"));
    drop(gone);
    assert_eq!(fetch(&hub).expect("it is in the cache"), snapshot);
    std::fs::remove_file(snapshot.join("model.safetensors")).expect("it was there");
    says(
        &fetch(&hub).expect_err("it is not all there"),
        &[
            "cannot ask http://127.0.0.1",
            "`owner/model@main`",
            "HF_HUB_OFFLINE=1",
        ],
    );
    hub.is_offline = true;
    let empty = tempfile::tempdir().expect("a temporary folder");
    hub.cache = empty.path().to_owned();
    says(
        &fetch(&hub).expect_err("nothing is there"),
        &["HF_HUB_OFFLINE is set", "no file of"],
    );
}

#[test]
fn a_dead_connection_is_given_up() {
    let (server, cache) = single();
    let mut hub = hub(&server, cache.path());
    hub.fetch(&model(), Need::Tokenizer, |_| {})
        .expect("the small files");
    server.state().faults = vec![Fault::StallAfter(5000)];
    hub.stall_timeout = Duration::from_millis(300);
    let error = fetch(&hub).expect_err("nothing comes");
    assert!(matches!(error, HubError::Stalled { .. }), "{error}");
    says(&error, &["no byte of `owner/model@main`", "launch again"]);
}

#[test]
fn names_are_told_from_paths() {
    let model = HubModel::parse("HuggingFaceTB/SmolLM2-135M-Instruct", "main").expect("a name");
    assert_eq!(
        (model.repo.as_str(), model.file),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", None)
    );
    let model = HubModel::parse("bartowski/x_y-GGUF/x-Q4_K_M.gguf", "v1").expect("a name");
    assert_eq!(
        (model.repo.as_str(), model.file.as_deref()),
        ("bartowski/x_y-GGUF", Some("x-Q4_K_M.gguf"))
    );
    assert_eq!(model.to_string(), "bartowski/x_y-GGUF@v1");
    for path in [
        "model",
        "/a/b",
        "./a/b",
        "../a",
        "a/..",
        "a/b/",
        "a//b",
        "a/b/c",
        "models/m.gguf",
        "a/b/c/d.gguf",
        "a b/c",
        "~/m",
        "",
    ] {
        assert_eq!(HubModel::parse(path, "main"), None, "{path}");
    }
}

#[test]
fn variables_mean_what_they_mean_to_python() {
    let with = |variables: &[(&str, &str)]| {
        let value = |name: &str| variables.iter().find(|(known, _)| *known == name);
        Hub::from_variables(|name| value(name).map(|(_, value)| (*value).to_owned()))
    };
    let plain = with(&[("HOME", "/home/me"), ("HF_TOKEN", "")]).expect("a home");
    assert_eq!(plain.cache, Path::new("/home/me/.cache/huggingface/hub"));
    assert_eq!((plain.token, plain.is_offline), (None, false));
    assert!(plain.endpoint.starts_with("https://"));
    let cache = |variables: &[(&str, &str)]| with(variables).expect("a home").cache;
    assert_eq!(
        cache(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]),
        Path::new("/x/huggingface/hub")
    );
    assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "/hf")]), Path::new("/hf/hub"));
    assert_eq!(
        cache(&[("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")]),
        Path::new("/c")
    );
    assert!(matches!(with(&[]), Err(HubError::NoHome)));

    let home = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(home.path().join("token"), "from-the-file\n").expect("it is writable");
    let folder = home.path().display().to_string();
    let token = |variables: &[(&str, &str)]| with(variables).expect("a home").token;
    assert_eq!(token(&[("HF_HOME", &folder)]).as_deref(), Some("from-the-file"));
    assert_eq!(
        token(&[("HF_HOME", &folder), ("HF_TOKEN", "mine")]).as_deref(),
        Some("mine")
    );
    let set = with(&[
        ("HF_HOME", "/hf"),
        ("HF_HUB_OFFLINE", "True"),
        ("HF_ENDPOINT", "https://mirror/"),
    ]);
    let set = set.expect("a home");
    assert!(set.is_offline);
    assert_eq!(set.endpoint, "https://mirror");
}
