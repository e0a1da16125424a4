//! `eaglet check` of Kimi-K2.5, of which it reads nothing but headers.

use std::path::PathBuf;

use eaglet_tests::report::{BAD_INPUT, check, findings, is_told, report, text};
use eaglet_tests::{kimi, repository};
use serde_json::{Value, json};

/// A host that is not this one: 1.5 TB of memory, 1 TB of free disk, ranks that do 40 TFLOP/s.
const PLANNED: &[&str] = &["--memory", "1.5TB", "--disk", "1TB", "--flops", "4e13"];

/// Kimi-K2.5 without its weights, and a cluster file for it.
struct Kimi {
    folder: tempfile::TempDir,
}

impl Kimi {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
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
    // Weights and moments in f32; weights, embedding and head in bf16; the maps of the vocabulary.
    let served = 2 * (829_452_288 + (163_840 + 32_000) * 7168);
    let maps = 8 * 32_000 + 163_840;
    assert_eq!(
        report["disk"]["checkpoint_bytes"],
        12 * 829_452_288_u64 + served + maps
    );

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
