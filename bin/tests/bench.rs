//! Short runs of the benches of the fabric, the coordinator and whole runs, and what they say to wrong arguments.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_eaglet"))
        .arg("bench")
        .args(arguments)
        .output()
        .expect("eaglet can be started")
}

fn json(output: &Output) -> Value {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|value| value > 0.0)
}

fn demo(name: &str) -> String {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    root.join(name).display().to_string()
}

#[test]
fn the_fabric_is_measured_beside_its_limits() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().display().to_string();
    let small = [
        "fabric",
        "--bytes",
        "100",
        "--bytes",
        "200000",
        "--repeats",
        "2",
        "--round-mib",
        "1",
        "--round-trips",
        "20",
        "--draft-ranks",
        "2",
        "--steps",
        "4",
        "--directory",
        &directory,
    ];
    let report = json(&bench(&[&small[..], &["--json"]].concat()));
    assert_eq!(report["bench"], "fabric");
    for (place, bytes) in [100, 200_000].into_iter().enumerate() {
        let (same, between) = (&report["same_host"][place], &report["between_hosts"][place]);
        assert_eq!(
            (&same["bytes"], &between["bytes"]),
            (&bytes.into(), &bytes.into())
        );
        for rate in ["memcpy", "crc32c", "copied", "unchecked", "in_place", "slots"] {
            assert!(
                positive(&same[format!("{rate}_gb_s")]["median"]),
                "{rate}: {same}"
            );
        }
        for rate in ["tcp", "link", "unchecked"] {
            assert!(
                positive(&between[format!("{rate}_gb_s")]["median"]),
                "{rate}: {between}"
            );
        }
    }
    let control = &report["control"];
    assert_eq!(control["quiet"]["count"], 20);
    assert!(
        positive(&control["quiet"]["p50_ms"]) && positive(&control["beside_bulk"]["bulk_gb_s"]),
        "{control}"
    );
    let commit = &report["commit"][0];
    assert_eq!(commit["draft_ranks"], 2);
    assert!(
        positive(&commit["votes_ms"]["median"])
            && positive(&commit["journal_ms"]["median"])
            && positive(&commit["journal_bytes"]),
        "{commit}"
    );
    let text = bench(&small).stdout;
    let text = String::from_utf8_lossy(&text);
    assert!(
        text.contains("limit: memcpy") && text.contains("votes and journal"),
        "{text}"
    );
    assert_eq!(
        std::fs::read_dir(folder.path()).expect("it is there").count(),
        0,
        "it tidies up"
    );
}

#[test]
fn the_coordinator_is_measured_at_every_size() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().display().to_string();
    let report = json(&bench(&[
        "coordinator",
        "--seats",
        "2",
        "--seats",
        "9",
        "--steps",
        "12",
        "--directory",
        &directory,
        "--json",
    ]));
    let [small, large] = [0, 1].map(|place| &report["clusters"][place]);
    assert_eq!(
        (&large["verifier_ranks"], &large["draft_ranks"]),
        (&4.into(), &5.into())
    );
    // Of each row: extracted, received; of each draft rank: its vote, and that it has applied the step. Where a step begins
    // to count is a matter of a few events.
    for (cluster, events) in [(small, 4.0), (large, 20.0)] {
        let found = cluster["events_per_step"].as_f64().expect("a number");
        assert!((0.7 * events..=1.3 * events).contains(&found), "{cluster}");
    }
    for cluster in [small, large] {
        assert!(
            positive(&cluster["engine_us_per_event"]) && positive(&cluster["journal_bytes_per_step"]),
            "{cluster}"
        );
    }
}

#[test]
fn a_whole_run_is_measured() {
    let output = bench(&[
        "end-to-end",
        "--cluster",
        &demo("cluster.toml"),
        "--samples",
        &demo("bin/demo/chats.jsonl"),
        "--tokens-per-row",
        "128",
        "--steps",
        "3",
        "--threads",
        "1",
        "--set",
        "training.ttt_steps=1",
        "--json",
    ]);
    let report = json(&output);
    assert_eq!(
        (&report["bench"], &report["steps"]),
        (&"end-to-end".into(), &3.into())
    );
    assert!(
        positive(&report["tokens"])
            && positive(&report["wall_seconds"]["median"])
            && positive(&report["steady_tokens_per_s"]["median"]),
        "{report}"
    );
    let seats: Vec<&str> = report["ranks"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|rank| rank["seat"].as_str())
        .collect();
    assert!(
        seats.contains(&"draft-0") && seats.contains(&"verifier-0"),
        "{report}"
    );
    for rank in report["ranks"].as_array().expect("a list") {
        let shares = ["busy", "waiting_for_input", "waiting_for_peers"].map(|what| rank[what].as_f64());
        assert!(
            shares
                .iter()
                .all(|share| share.is_some_and(|share| (0.0..=1.0).contains(&share))),
            "{rank}"
        );
    }
}

#[test]
fn what_cannot_be_measured_is_said_with_the_remedy() {
    let cluster = demo("cluster.toml");
    let chats = demo("bin/demo/chats.jsonl");
    let cases: [(&[&str], &str); 9] = [
        (&["fabric", "--bytes", "0"], "--bytes"),
        (&["fabric", "--repeats", "0"], "--repeats"),
        (&["fabric", "--draft-ranks", "0"], "--draft-ranks"),
        (&["coordinator", "--seats", "1"], "--seats"),
        (&["coordinator", "--steps", "3"], "--steps"),
        (
            &["coordinator", "--seats", "2", "--directory", "/no/such/folder"],
            "/no/such/folder",
        ),
        (&["end-to-end", "--steps", "1"], "--steps"),
        (
            &["end-to-end", "--cluster", &cluster, "--samples", "no/such.jsonl"],
            "no/such.jsonl",
        ),
        (
            &[
                "end-to-end",
                "--cluster",
                &cluster,
                "--samples",
                &chats,
                "--verifier",
                "no/such/model",
            ],
            "no/such/model",
        ),
    ];
    for (arguments, words) in cases {
        let output = bench(arguments);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(
            text.contains(words) && !text.contains("panicked"),
            "{arguments:?}: {text}"
        );
    }
}
