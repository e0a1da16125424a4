//! `eaglet check`: all that is wrong at once, with place and remedy, and plans in numbers; nothing is changed by it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use eaglet_tests::{Cluster, eaglet, kimi, repository};
use serde_json::{Value, json};

/// Exit code of a check that found a problem.
const BAD_INPUT: i32 = 2;

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// Checks a cluster file.
fn check(cluster: &Path, arguments: &[&str]) -> Output {
    Command::new(eaglet())
        .arg("check")
        .arg(cluster)
        .args(arguments)
        .output()
        .expect("eaglet can be started")
}

fn text(output: &Output) -> String {
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout.clone()).expect("texts only")
}

/// The JSON report of a cluster.
fn report(cluster: &Path, arguments: &[&str]) -> (Option<i32>, Value) {
    let output = check(cluster, &[arguments, &["--json"]].concat());
    let text = text(&output);
    let value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (output.status.code(), value)
}

/// Findings of a kind, as `topic: place: message`.
fn findings(report: &Value, kind: &str) -> Vec<String> {
    let list = report[kind].as_array().expect("a list");
    list.iter()
        .map(|finding| {
            let part = |name: &str| finding[name].as_str().expect("a text").to_owned();
            format!("{}: {}: {}", part("topic"), part("place"), part("message"))
        })
        .collect()
}

/// Asserts that some finding holds all of some words.
fn is_told(found: &[String], words: &[&str]) {
    let holds = |finding: &String| words.iter().all(|word| finding.contains(word));
    assert!(found.iter().any(holds), "{words:?} are not told: {found:#?}");
}

fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}

/// A run directory that is not there yet, as a flag.
fn run_directory(folder: &Path) -> String {
    format!("run.directory={}", quoted(&folder.join("run")))
}

fn demo() -> PathBuf {
    repository().join("cluster.toml")
}

#[test]
fn the_default_cluster_is_fine_and_nothing_is_left_behind() {
    let folder = folder();
    let directory = run_directory(folder.path());
    let output = check(&demo(), &["--set", &directory]);
    let shown = text(&output);
    assert!(output.status.success(), "{shown}");
    for words in [
        "input of [2, 4, 5] (vLLM, speculators) = output of [1, 3, 4] (SGLang, SpecForge)",
        "verifier-0  the verifier",
        "draft-1     the draft",
        "host local:",
        "hidden states",
        "all 520 rows",
        "no problems, no warnings: a launch would go well",
    ] {
        assert!(shown.contains(words), "no `{words}` in\n{shown}");
    }
    assert!(!folder.path().join("run").exists());
}

#[test]
fn the_report_is_one_json_document_with_stable_keys() {
    let folder = folder();
    let directory = run_directory(folder.path());
    let (code, report) = report(&demo(), &["--set", &directory, "--flops", "1e9"]);
    assert_eq!(code, Some(0), "{report:#}");
    let keys: Vec<&str> = report
        .as_object()
        .expect("an object")
        .keys()
        .map(String::as_str)
        .collect();
    assert_eq!(
        keys,
        [
            "format",
            "cluster",
            "run",
            "directory",
            "ok",
            "problems",
            "warnings",
            "verifier",
            "draft",
            "layers",
            "ranks",
            "hosts",
            "disk",
            "links",
            "samples",
            "vocabulary",
            "supply"
        ]
    );
    assert_eq!((&report["format"], &report["ok"]), (&json!(1), &json!(true)));
    // What is known of the demo: 1,706,112 parameters in bf16, in 75 tensors.
    assert_eq!(report["verifier"]["parameters"], 1_706_112);
    assert_eq!(report["verifier"]["bytes"], 2 * 1_706_112);
    assert_eq!(report["verifier"]["tensors"], 75);
    assert_eq!(report["layers"]["input_of"], json!([2, 4, 5]));
    assert_eq!(report["layers"]["output_of"], json!([1, 3, 4]));
    let seats: Vec<_> = report["ranks"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|rank| &rank["seat"])
        .collect();
    assert_eq!(seats, ["verifier-0", "draft-0", "draft-1"]);
    for rank in report["ranks"].as_array().expect("a list") {
        let parts = rank["memory"].as_array().expect("a list");
        let sum: u64 = parts.iter().filter_map(|part| part["bytes"].as_u64()).sum();
        assert_eq!(rank["memory_bytes"], sum, "{rank:#}");
    }
    // Four states of 128 in bf16 for each token.
    assert_eq!(report["links"][0]["cargo"], "hidden_states");
    assert_eq!(report["links"][0]["bytes"], 4 * 128 * 2);
    let samples = &report["samples"];
    assert_eq!((&samples["rows"], &samples["whole"]), (&json!(520), &json!(true)));
    assert_eq!(report["supply"]["source"], "given");
    assert!(
        report["supply"]["duration_s"]
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0)
    );
}

/// A cluster file that lies about almost everything, and the files that it lies about.
fn liar(folder: &Path) -> PathBuf {
    let verifier = folder.join("verifier");
    std::fs::create_dir(&verifier).expect("the temporary folder is writable");
    for entry in std::fs::read_dir(repository().join("bin/demo/verifier")).expect("the demo verifier") {
        let entry = entry.expect("an entry");
        std::fs::copy(entry.path(), verifier.join(entry.file_name())).expect("its files can be copied");
    }
    // Another width of the MLP than the weights have.
    let config = verifier.join("config.json");
    let bytes = std::fs::read(&config).expect("it was copied");
    let mut value: Value = serde_json::from_slice(&bytes).expect("JSON");
    value["intermediate_size"] = json!(300);
    std::fs::write(&config, value.to_string()).expect("the copy is writable");
    std::fs::write(
        folder.join("chats.jsonl"),
        "{\"messages\": [{\"ro\nno json\n{\"messages\": []}\n",
    )
    .expect("writable");
    std::fs::write(folder.join("taken"), "a file stands here").expect("writable");
    let cluster = folder.join("cluster.toml");
    std::fs::write(
        &cluster,
        r#"[run]
name = "lies"
directory = "taken/run"

[verifier]
path = "verifier"
aux_layers = [1, 3, 4]

[draft]
vocab_size = 4096
kv_headz = 3

[training]
learning_rate = 1e-3

[samples]
files = ["chats.jsonl"]
held_out = ["none.jsonl"]

[[ranks]]
role = "verifier"

[[ranks]]
role = "draft"
device = "cuda:0"
"#,
    )
    .expect("writable");
    cluster
}

#[test]
fn many_lies_at_once_are_all_named_with_their_lines() {
    let folder = folder();
    let cluster = liar(folder.path());
    let port = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = port.local_addr().expect("it is bound").to_string();
    let (code, report) = report(&cluster, &["--set", &format!("run.listen={address:?}")]);
    assert_eq!((code, &report["ok"]), (Some(BAD_INPUT), &json!(false)));
    let problems = findings(&report, "problems");
    for words in [
        &[
            "config: ",
            "cluster.toml:11: ",
            "draft.kv_headz is no key; did you mean draft.kv_heads?",
        ][..],
        &["config: ", "cluster.toml:18: ", "there is no file", "none.jsonl"],
        &["config: ", "cluster.toml:25: ", "cuda:0", "use \"cpu\""],
        &[
            "run-directory: ",
            "cluster.toml:3: ",
            "cannot be written",
            "run.directory",
        ],
        &[
            "port: ",
            "--set run.listen",
            "cannot listen on",
            "set run.listen to a free port",
        ],
        &[
            "tensors: ",
            "cluster.toml:6: ",
            "layers.0.mlp.gate_proj.weight",
            "[256, 128]",
            "[300, 128]",
        ],
        &["tensors: ", "cluster.toml:6: ", "4 more tensors"],
        &[
            "draft: ",
            "cluster.toml:10: ",
            "4096 exceeds the verifier's vocabulary of 2048",
        ],
        &[
            "samples: ",
            "cluster.toml:17: ",
            "none of the first",
            "chats.jsonl:1: the row is no whole JSON value",
        ],
    ] {
        is_told(&problems, words);
    }
    let warnings = findings(&report, "warnings");
    is_told(
        &warnings,
        &["layers: ", "cluster.toml:7: ", "[1, 3, 4]", "write [2, 4, 5]"],
    );
    // Every one has a place in the file, a variable or a flag.
    for finding in problems.iter().chain(&warnings) {
        assert!(
            finding.contains("cluster.toml") || finding.contains("--set "),
            "{finding}"
        );
    }

    // People see the same, and launch refuses what is fatal, all of it at once and without a trace.
    let shown = text(&check(&cluster, &[]));
    assert!(
        shown.contains("problem: ") && shown.contains("a launch would not go well"),
        "{shown}"
    );
    let output = Command::new(eaglet())
        .arg("launch")
        .arg(&cluster)
        .output()
        .expect("eaglet can be started");
    assert_eq!(output.status.code(), Some(BAD_INPUT));
    let errors = String::from_utf8_lossy(&output.stderr);
    for word in [
        "kv_headz",
        "none.jsonl",
        "cuda:0",
        "cannot be written",
        "gate_proj",
        "4096 exceeds",
    ] {
        assert!(errors.contains(word), "no `{word}` in {errors}");
    }
    assert!(folder.path().join("taken").is_file());
}

#[test]
fn a_file_that_is_no_toml_is_told_with_its_line_and_nothing_is_guessed() {
    let folder = folder();
    let cluster = folder.path().join("cluster.toml");
    std::fs::write(&cluster, "[run]\nname = \n").expect("writable");
    let (code, report) = report(&cluster, &[]);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&report, "problems"),
        &["cluster.toml:2", "no valid TOML"],
    );
    for section in ["verifier", "draft", "layers", "disk", "samples", "supply"] {
        assert_eq!(report[section], Value::Null, "{section}");
    }
    let missing = check(&folder.path().join("none.toml"), &[]);
    assert_eq!(missing.status.code(), Some(BAD_INPUT));
    assert!(text(&missing).contains("none.toml: cannot be read"));
}

#[test]
fn too_little_memory_is_told_with_the_largest_lever_and_refused_at_launch() {
    let folder = folder();
    let directory = run_directory(folder.path());
    let (code, report) = report(&demo(), &["--set", &directory, "--memory", "200MB"]);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&report, "problems"),
        &["memory: ", "the ranks on host local need", "it has 200 MB"],
    );

    // A draft that no machine has room for: master weights and moments of an MLP 2 billion wide.
    let sets = ["draft.intermediate_size=2000000000", &directory];
    let mut launch = Command::new(eaglet());
    launch.arg("launch").arg(demo());
    for set in sets {
        launch.args(["--set", set]);
    }
    let output = launch.output().expect("eaglet can be started");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(BAD_INPUT), "{errors}");
    assert_eq!(errors.lines().count(), 2, "memory and disk: {errors}");
    assert!(
        errors.contains("TB of memory") && errors.contains("draft.intermediate_size"),
        "{errors}"
    );
    assert!(errors.contains("checkpoints of"), "{errors}");
    assert!(!folder.path().join("run").exists());
}

#[test]
fn a_port_in_use_leaves_no_run_directory() {
    let folder = folder();
    let directory = folder.path().join("run");
    let port = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = port.local_addr().expect("it is bound").to_string();
    let finished = Cluster::launch(&directory, &[&format!("run.listen={address:?}")]).finish();
    assert_eq!(finished.status.code(), Some(BAD_INPUT));
    assert!(finished.errors.contains("cannot listen on"), "{finished:#?}");
    assert!(!directory.exists());
}

#[test]
fn a_run_directory_of_another_run_is_told_with_the_keys_that_differ() {
    let folder = folder();
    let directory = folder.path().join("run");
    let sets = [
        "training.steps=1",
        "training.tokens_per_row=160",
        "training.max_new_tokens=4",
        "training.passes=1",
    ];
    let finished = Cluster::launch(&directory, &sets).finish();
    assert!(finished.status.success(), "{finished:#?}");
    let place = run_directory(folder.path());
    let mut arguments = vec!["--set", place.as_str()];
    for set in &sets {
        arguments.extend(["--set", set]);
    }
    // The same run can go on; another rate cannot.
    assert_eq!(report(&demo(), &arguments).0, Some(0));
    arguments.extend(["--set", "training.learning_rate=1e-5"]);
    let (code, report) = report(&demo(), &arguments);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&report, "problems"),
        &[
            "run-directory: ",
            "training.learning_rate differ from what its run was started with",
        ],
    );
}

#[test]
fn warnings_are_no_problems_unless_they_are_asked_to_be() {
    let folder = folder();
    let directory = run_directory(folder.path());
    let sets = ["--set", &directory, "--set", "draft.vocab_size=32"];
    let shown = check(&demo(), &sets);
    assert_eq!(shown.status.code(), Some(0));
    let shown = text(&shown);
    assert!(
        shown.contains("warning: ") && shown.contains("raise draft.vocab_size"),
        "{shown}"
    );
    let strict = check(&demo(), &[&sets[..], &["--strict"]].concat());
    assert_eq!(strict.status.code(), Some(BAD_INPUT));
    assert!(text(&strict).contains("--strict asks for no warnings"));
}

/// A host that is not this one: 1.5 TB of memory, 1 TB of free disk, ranks that do 40 TFLOP/s.
const PLANNED: &[&str] = &["--memory", "1.5TB", "--disk", "1TB", "--flops", "4e13"];

/// Kimi-K2.5 without its weights, and a cluster file for it.
struct Kimi {
    folder: tempfile::TempDir,
}

impl Kimi {
    fn new() -> Self {
        let folder = folder();
        let verifier = folder.path().join("kimi-k2.5");
        std::fs::create_dir(&verifier).expect("the temporary folder is writable");
        let demo = repository().join("bin/demo");
        kimi::write(&verifier, &demo.join("verifier"));
        for name in ["chats.jsonl", "held_out.jsonl"] {
            std::fs::copy(demo.join(name), folder.path().join(name)).expect("the demo's chats");
        }
        let mut cluster = String::from(
            r#"[run]
name = "kimi"

[verifier]
path = "kimi-k2.5"
pipeline = 8

[draft]
vocab_size = 32000
intermediate_size = 12288
norm_before_fc = false

[training]
tokens_per_row = 2048
rows_per_step = 2

[samples]
files = ["chats.jsonl"]
held_out = ["held_out.jsonl"]
"#,
        );
        for _ in 0..8 {
            cluster.push_str("\n[[ranks]]\nrole = \"verifier\"\nthreads = 8\n");
        }
        for _ in 0..2 {
            cluster.push_str("\n[[ranks]]\nrole = \"draft\"\nthreads = 8\n");
        }
        std::fs::write(folder.path().join("cluster.toml"), cluster).expect("writable");
        Self { folder }
    }

    fn cluster(&self) -> PathBuf {
        self.folder.path().join("cluster.toml")
    }

    fn verifier(&self) -> PathBuf {
        self.folder.path().join("kimi-k2.5")
    }

    /// The report for that host.
    fn report(&self, sets: &[&str]) -> (Option<i32>, Value) {
        let mut arguments = PLANNED.to_vec();
        for set in sets {
            arguments.extend(["--set", set]);
        }
        report(&self.cluster(), &arguments)
    }
}

#[test]
fn kimi_is_planned_over_eight_ranks_and_what_is_wrong_with_it_is_named() {
    let kimi = Kimi::new();

    // All is well.
    let (code, report) = kimi.report(&[]);
    assert_eq!(findings(&report, "problems"), Vec::<String>::new());
    assert_eq!(code, Some(0));
    // 60 layers of 384 experts, 3·7168·2048 each, and the rest in bf16.
    let verifier = &report["verifier"];
    let experts = 60_u64 * 384 * 3 * 7168 * 2048;
    let attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168;
    let norms = 2 * 7168 + 1536 + 512;
    let rest = 61 * (attention + norms)
        + 60 * (3 * 7168 * 2048 + 384 * 7168 + 384)
        + 3 * 7168 * 18432
        + 2 * 163_840 * 7168
        + 7168;
    assert_eq!(verifier["parameters"], experts + rest);
    // Half a byte each, a scale of two bytes for 32; the router's bias is f32.
    let bytes = experts / 2 + experts / 32 * 2 + 2 * rest + 2 * 60 * 384;
    assert_eq!(verifier["bytes"], bytes);
    assert!((590e9..600e9).contains(&(bytes as f64)), "{bytes}");
    assert_eq!(report["draft"]["parameters"], 829_452_288);
    assert_eq!(report["layers"]["input_of"], json!([2, 30, 58]));
    assert_eq!(report["layers"]["output_of"], json!([1, 29, 57]));
    assert_eq!(report["layers"]["last"], 61);
    let ranks = report["ranks"].as_array().expect("a list");
    assert_eq!(ranks.len(), 10);
    let stages: Vec<_> = ranks.iter().take(8).map(|rank| &rank["shard"]).collect();
    let mut next = 0;
    for (index, stage) in stages.iter().enumerate() {
        assert_eq!((&stage["stage"], &stage["stages"]), (&json!(index), &json!(8)));
        assert_eq!(stage["first_layer"], next);
        next = stage["end_layer"].as_u64().expect("a number");
    }
    assert_eq!(next, 61);
    let held: u64 = ranks
        .iter()
        .take(8)
        .filter_map(|rank| rank["parameters"].as_u64())
        .sum();
    assert_eq!(held, experts + rest);
    for rank in ranks.iter().take(8) {
        let memory = rank["memory_bytes"].as_u64().expect("a number") as f64;
        assert!((50e9..100e9).contains(&memory), "{rank:#}");
    }
    // 57,344 bytes a token in all: three stages hand out a state, the last one two.
    let links = report["links"].as_array().expect("a list");
    let of = |cargo: &'static str| links.iter().filter(move |link| link["cargo"] == cargo);
    let hidden: u64 = of("hidden_states")
        .filter_map(|link| link["bytes"].as_u64())
        .sum();
    assert_eq!(hidden, 4 * 7168 * 2);
    assert_eq!(of("residual").count(), 7);
    assert!(of("residual").all(|link| link["bytes"] == 4 * 7168));
    assert_eq!(report["disk"]["checkpoint_bytes"], 14_419_959_808_u64);

    golden(&kimi);

    // On a machine with less memory than the weights take.
    let (code, small) = self::report(
        &kimi.cluster(),
        &["--memory", "512GB", "--disk", "1TB", "--flops", "4e13"],
    );
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&small, "problems"),
        &[
            "memory: ",
            "weights of verifier ranks take most of it",
            "it has 512 GB",
        ],
    );

    // The ids of the other convention.
    let (code, other) = kimi.report(&["verifier.aux_layers=[1, 29, 57]"]);
    assert_eq!(code, Some(0));
    is_told(
        &findings(&other, "warnings"),
        &[
            "layers: --set verifier.aux_layers",
            "[1, 29, 57]",
            "write [2, 30, 58]",
        ],
    );

    // One shard is missing: only that is told, and the rest is still planned.
    let missing = kimi.verifier().join(kimi::shard_name(31));
    let held = missing.with_extension("away");
    std::fs::rename(&missing, &held).expect("it can be moved");
    let (code, broken) = kimi.report(&[]);
    assert_eq!(code, Some(BAD_INPUT));
    let problems = findings(&broken, "problems");
    assert_eq!(problems.len(), 1, "{problems:#?}");
    is_told(
        &problems,
        &[
            "verifier: ",
            "cluster.toml:5: ",
            &kimi::shard_name(31),
            "download",
        ],
    );
    let lost: u64 = broken["ranks"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|rank| rank["missing_tensors"].as_u64())
        .sum();
    // Each packed matrix, its scales are not looked for; and what is not packed.
    assert!(lost >= 384 * 3, "{lost}");
    std::fs::rename(&held, &missing).expect("it can be moved");

    // One tensor has another shape, another one is not there.
    let changed = kimi.verifier().join(kimi::shard_name(12));
    let mut tensors = kimi::shard(12);
    let name = "language_model.model.layers.11.self_attn.kv_b_proj.weight";
    let (_, shape) = tensors.get_mut(name).expect("it has one");
    shape.swap(0, 1);
    kimi::write_shard(&changed, &tensors);
    let (code, broken) = kimi.report(&[]);
    assert_eq!(code, Some(BAD_INPUT));
    let problems = findings(&broken, "problems");
    assert_eq!(problems.len(), 1, "{problems:#?}");
    is_told(&problems, &["tensors: ", name, "[512, 16384]", "[16384, 512]"]);
    tensors.remove(name);
    kimi::write_shard(&changed, &tensors);
    let (_, broken) = kimi.report(&[]);
    is_told(
        &findings(&broken, "problems"),
        &["verifier: ", name, &kimi::shard_name(12)],
    );
}

/// Compares the report for people with the one that is kept in the repository.
fn golden(kimi: &Kimi) {
    let output = check(&kimi.cluster(), PLANNED);
    let shown = text(&output).replace(&format!("{}/", kimi.folder.path().display()), "");
    let file = repository().join("tests/golden/check/kimi.txt");
    let kept = std::fs::read_to_string(&file).unwrap_or_default();
    assert_eq!(
        shown,
        kept,
        "{} holds another report; if this one is right, keep it:\n{shown}",
        file.display()
    );
}
