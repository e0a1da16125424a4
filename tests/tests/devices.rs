//! `eaglet devices` on whatever machine this is: with a driver it lists GPUs, without one it says what it looked for.

use std::process::Command;

use eaglet_tests::eaglet;
use serde_json::Value;

fn devices(arguments: &[&str]) -> String {
    let output = Command::new(eaglet())
        .arg("devices")
        .args(arguments)
        .env("EAGLET_CUDA_PATH", "/does/not/exist")
        .output()
        .expect("eaglet runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_machine_is_listed_with_or_without_a_driver() {
    let document: Value = serde_json::from_str(&devices(&["--json"])).expect("one JSON document");
    let cpu = &document["cpu"];
    assert!(
        cpu["cores"].as_u64() > Some(0) && cpu["threads"].as_u64() > Some(0),
        "{cpu}"
    );
    assert!(cpu["memory_bytes"].as_u64() > Some(1 << 28), "{cpu}");
    let (gpus, problems) = (&document["gpus"], &document["problems"]);
    let count = |list: &Value| list.as_array().map_or(0, Vec::len);
    assert!(count(gpus) > 0 || count(problems) > 0, "{document}");
    let shown = devices(&[]);
    assert!(shown.starts_with("cpu     "), "{shown}");
    if count(gpus) == 0 {
        // LIBRARY-1
        assert!(shown.contains("no GPU can be used:\nmissing "), "{shown}");
    }
    for problem in problems.as_array().into_iter().flatten() {
        let problem = problem.as_str().expect("a sentence");
        assert!(shown.contains(problem), "{shown}");
    }
    let is_missing = |library: &str| {
        let found = document["libraries"].as_array().into_iter().flatten();
        !found.into_iter().any(|found| found["library"] == library)
    };
    if is_missing("the CUDA driver") {
        assert!(
            shown.contains("looked for libcuda.so.1, libcuda.so in ") && shown.contains("EAGLET_CUDA_PATH"),
            "{shown}"
        );
    }
}
