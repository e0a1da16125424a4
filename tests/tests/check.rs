//! `eaglet check`: all that is wrong at once, with place and remedy, and plans in numbers; nothing is changed by it.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use eaglet_runtime::device::{Cpu, Products};
use eaglet_tests::report::{BAD_INPUT, check, findings, is_told, report, text};
use eaglet_tests::{Cluster, eaglet, repository};
use serde_json::{Value, json};

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
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
            "gpus",
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
device = "gpu:0"
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
        &["config: ", "cluster.toml:25: ", "gpu:0", "use \"cpu\""],
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
        "gpu:0",
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

#[test]
fn bf16_products_are_planned_for_with_amx_and_a_warning_without() {
    let folder = folder();
    let directory = run_directory(folder.path());
    let (code, report) = report(&demo(), &["--set", &directory, "--set", "verifier.products=bf16"]);
    assert_eq!(code, Some(0));
    let parts = report["ranks"][0]["memory"].as_array().expect("a list");
    let packed = parts.iter().find(|part| part["use"] == "packed_weights");
    let packed = packed.and_then(|part| part["bytes"].as_u64()).expect("a part");
    match Cpu::kernel_for(Products::Bf16) {
        // All matrices of the demo's verifier are bf16.
        Ok(_) => assert!((3_300_000..=2 * 1_706_112).contains(&packed), "{packed} bytes"),
        Err(reason) => {
            assert_eq!(packed, 0);
            let words = ["verifier.products = \"bf16\" needs AMX", &reason.to_string()];
            is_told(&findings(&report, "warnings"), &words);
        }
    }
}

#[test]
fn an_extraction_is_checked_by_what_it_writes() {
    let folder = folder();
    let out = folder.path().join("states").display().to_string();
    let (code, report) = report(&demo(), &["--extract", &out, "--flops", "1e9"]);
    assert_eq!(code, Some(0), "{report:#}");
    assert_eq!(report["draft"], Value::Null);
    // 480 samples, 1,024 bytes of states for each of their tokens.
    let tokens = report["samples"]["estimated_tokens"].as_u64().expect("a number");
    assert_eq!(report["disk"]["hidden_state_bytes"], 1024 * tokens);
    assert_eq!(report["disk"]["checkpoint_bytes"], 0);
    assert_eq!(
        (&report["supply"]["draft"], &report["supply"]["waiting"]),
        (&Value::Null, &json!("neither"))
    );
    assert!(
        report["supply"]["duration_s"]
            .as_f64()
            .is_some_and(|seconds| seconds > 0.0)
    );
    let cargo: Vec<_> = report["links"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|link| &link["cargo"])
        .collect();
    assert_eq!(cargo, ["hidden_states"]);
    assert!(!folder.path().join("states").exists());

    let (code, small) = self::report(&demo(), &["--extract", &out, "--disk", "1MB"]);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&small, "problems"),
        &["disk: ", "hidden states", "extract fewer samples"],
    );
}

#[test]
fn hidden_states_of_another_contract_are_told() {
    let folder = folder();
    let states = folder.path().join("states");
    std::fs::create_dir(&states).expect("the temporary folder is writable");
    let directory = run_directory(folder.path());
    let key = format!("samples.hidden_states={}", quoted(&states));
    let sets = ["--set", &directory, "--set", &key, "--set", "samples.held_out=[]"];
    let (code, empty) = report(&demo(), &sets);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&empty, "problems"),
        &["hidden-states: ", "--set samples.hidden_states", "states"],
    );

    std::fs::write(states.join("hs_0.safetensors"), "").expect("writable");
    let digest = "0".repeat(32);
    let contract = json!({
        "written_by": "eaglet 0", "verifier": digest, "aux_layers": [2, 4, 5], "layer_convention": "input",
        "last_state": "before the final norm", "hidden_size": 128, "dtype": "bf16", "tokenizer": digest, "template": digest
    });
    std::fs::write(states.join("contract.json"), contract.to_string()).expect("writable");
    let (code, other) = report(&demo(), &sets);
    assert_eq!(code, Some(BAD_INPUT));
    is_told(
        &findings(&other, "problems"),
        &["hidden-states: ", "verifier is "],
    );
    // Nobody computes hidden states, so nobody holds weights of the verifier.
    assert_eq!(other["ranks"][0]["parameters"], 0);
    assert_eq!(other["supply"]["verifier"], Value::Null);
}
