//! Ranks on GPUs, which are the stand-ins of `tests/cuda` here: the processes, the kernels and the recovery are those that
//! a GPU gets. Skipped, with a line that says so, where there is no `g++` to build them with.
#![allow(clippy::print_stdout, reason = "shows how close the numbers are")]

#[path = "gpu/nccl.rs"]
mod nccl;
#[path = "gpu/slices.rs"]
mod slices;
#[path = "../cuda/stand_ins.rs"]
mod stand_ins;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use eaglet_tests::drill::{losses, lost_only, token};
use eaglet_tests::traces::{completed, nothing_is_left, same_weights};
use eaglet_tests::{
    Cluster, Finished, PATIENT, QUICK_RESTARTS, ask, eaglet, final_weights, repository, send,
};
use rustix::process::Signal;
use safetensors::SafeTensors;
use serde_json::Value;

/// A few small steps; threads of a GPU run one after the other here.
const SETS: &[&str] = &[
    "training.steps=5",
    "training.tokens_per_row=48",
    "training.ttt_steps=2",
    "training.evaluate_every_steps=0",
    "draft.vocab_size=128",
    "draft.intermediate_size=64",
    "checkpoints.every_steps=2",
    "samples.held_out=[]",
];
/// Two GPUs, so that a fault can be meant for one of the ranks.
const ON_GPUS: &str =
    "ranks=[{role=\"verifier\",device=\"cuda:0\",threads=1},{role=\"draft\",device=\"cuda:1\",threads=1}]";
const ON_CPUS: &str = "ranks=[{role=\"verifier\",threads=1},{role=\"draft\",threads=1}]";
/// Weights of a run on GPUs differ from those of the same run on CPUs by less than this part of their length.
const TOLERANCE: f64 = 2e-5;

/// Variables with which the binary finds the stand-ins, and keeps their kernels for the next process.
fn variables(devices: &str) -> Option<Vec<(&'static str, String)>> {
    let folder = stand_ins::stand_ins()?;
    Some(vec![
        ("EAGLET_CUDA_PATH", folder.display().to_string()),
        (
            "EAGLET_KERNEL_CACHE",
            folder.join("kernels").display().to_string(),
        ),
        ("EAGLET_STANDIN_DEVICES", devices.to_owned()),
    ])
}

fn launch(directory: &Path, sets: &[&str], extra: &[(&str, &str)]) -> Option<Cluster> {
    let stack = variables("2")?;
    let mut all: Vec<(&str, &str)> = stack
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    all.extend(extra);
    Some(Cluster::launch_with(
        directory,
        &[SETS, QUICK_RESTARTS, PATIENT, sets].concat(),
        &all,
    ))
}

/// The undisturbed run.
fn quiet() -> Option<&'static Path> {
    static QUIET: Once = Once::new();
    let quiet = once(&QUIET, |directory| launch(directory, &[ON_GPUS], &[]))?;
    assert_eq!(losses(quiet).len(), 0);
    Some(quiet)
}

/// Runs `eaglet` with a cluster of the repository.
fn run(command: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    Command::new(eaglet())
        .arg(command)
        .arg(repository().join("cluster.toml"))
        .args(arguments)
        .envs(variables.iter().copied())
        .output()
        .expect("eaglet can be started")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn has_driver() -> bool {
    let output = Command::new(eaglet())
        .args(["devices", "--json"])
        .output()
        .expect("eaglet runs");
    let devices: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    devices["libraries"]
        .as_array()
        .into_iter()
        .flatten()
        .any(|library| library["library"] == "the CUDA driver")
}

/// An undisturbed run, made once; `None` without stand-ins.
type Once = OnceLock<Option<(tempfile::TempDir, PathBuf)>>;

/// The directory of a run that is made by whoever asks for it first.
fn once(cell: &'static Once, run: impl FnOnce(&Path) -> Option<Cluster>) -> Option<&'static Path> {
    let made = cell.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let directory = folder.path().join("undisturbed");
        completed(&run(&directory)?.finish());
        Some((folder, directory))
    });
    made.as_ref().map(|(_, directory)| directory.as_path())
}

fn log(directory: &Path, seat: &str) -> String {
    std::fs::read_to_string(directory.join(format!("logs/{seat}.log"))).expect("a log")
}

#[test]
fn without_a_driver_a_rank_on_a_gpu_is_one_clear_error() {
    if has_driver() {
        return;
    }
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = format!(
        "run.directory={:?}",
        folder.path().join("run").display().to_string()
    );
    let nowhere = folder.path().join("no/toolkit");
    std::fs::create_dir_all(nowhere.join("lib64")).expect("a folder");
    let variables = [("EAGLET_CUDA_PATH", nowhere.to_str().expect("UTF-8"))];
    // Three ranks, and one reason.
    let ranks = "ranks=[{role=\"verifier\",device=\"cuda:0\"},{role=\"draft\",device=\"cuda:0\"},{role=\"draft\",device=\"cuda:1\"}]";
    for command in ["launch", "check"] {
        let output = run(command, &["--set", &directory, "--set", ranks], &variables);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = text(&output.stdout) + &text(&output.stderr);
        for words in [
            "ranks[0].device = \"cuda:0\": the CUDA driver was not found: looked for libcuda.so.1, libcuda.so in ",
            &nowhere.join("lib64").display().to_string(),
            "/usr/local/cuda/lib64",
            "install NVIDIA's driver, or name its folder in EAGLET_CUDA_PATH",
        ] {
            assert!(said.contains(words), "no `{words}` in {said}");
        }
        assert_eq!(said.matches("was not found").count(), 1, "{said}");
    }
    assert!(
        !folder.path().join("run").exists(),
        "a refused launch leaves nothing"
    );
}

#[test]
fn a_gpu_that_is_not_there_is_refused_with_the_number_of_those_that_are() {
    let Some(stack) = variables("2") else { return };
    let mut variables: Vec<(&str, &str)> = stack
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let ranks = "ranks=[{role=\"verifier\",device=\"cuda:1\"},{role=\"draft\",device=\"cuda:2\"}]";
    let output = run("check", &["--set", ranks], &variables);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let said = text(&output.stdout);
    assert!(
        said.contains(
            "ranks[1].device = \"cuda:2\": there is no cuda:2: the driver has 2 devices, cuda:0 to cuda:1"
        ),
        "{said}"
    );
    // Numbers count what the environment shows.
    variables.push(("CUDA_VISIBLE_DEVICES", "1"));
    let output = run("check", &["--set", ranks], &variables);
    let said = text(&output.stdout);
    for device in ["cuda:1", "cuda:2"] {
        let words =
            format!("there is no {device}: the driver has one device, cuda:0; CUDA_VISIBLE_DEVICES is `1`");
        assert!(said.contains(&words), "{said}");
    }
}

#[test]
fn a_check_tells_what_ranks_need_of_their_gpus() {
    let Some(stack) = variables("2") else { return };
    let base: Vec<(&str, &str)> = stack
        .iter()
        .map(|(name, value)| (*name, value.as_str()))
        .collect();
    let check = |ranks: &str, extra: &[(&str, &str)]| {
        let variables: Vec<_> = base.iter().chain(extra).copied().collect();
        let output = run("check", &["--json", "--set", ranks], &variables);
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON document");
        (output.status.code(), report)
    };
    let (code, report) = check(ON_GPUS, &[]);
    assert_eq!(code, Some(0), "{report:#}");
    let gpus = report["gpus"].as_array().expect("a list");
    assert_eq!(gpus.len(), 2);
    let (gpu, rank) = (&gpus[1], &gpus[1]["ranks"][0]);
    assert_eq!(
        (&gpu["device"], &gpu["name"], &rank["seat"]),
        (&"cuda:1".into(), &"stand-in GPU 1".into(), &"draft-0".into())
    );
    assert_eq!(
        (gpu["memory_bytes"].as_u64(), gpu["free_bytes"].as_u64()),
        (Some(8 << 30), Some(8 << 30))
    );
    assert_eq!(gpu["needed_bytes"], rank["bytes"]);
    assert_eq!(gpu["unread_peers"], Value::Array(vec![]));
    assert_eq!(
        report["supply"],
        Value::Null,
        "CPUs tell nothing of the speed of GPUs"
    );

    // The second of those that are shown is the machine's first.
    let (_, report) = check(ON_GPUS, &[("CUDA_VISIBLE_DEVICES", "1,0")]);
    assert_eq!(report["gpus"][1]["name"], "stand-in GPU 0", "{report:#}");

    let shared =
        "ranks=[{role=\"verifier\"},{role=\"draft\",device=\"cuda:0\"},{role=\"draft\",device=\"cuda:0\"}]";
    let (code, report) = check(shared, &[]);
    assert_eq!(code, Some(0), "{report:#}");
    assert!(
        report["warnings"]
            .to_string()
            .contains("draft-0 and draft-1 share cuda:0"),
        "{report:#}"
    );

    let small = [("EAGLET_STANDIN_MEMORY", "600000000")];
    let (code, report) = check(shared, &small);
    assert_eq!(code, Some(2), "{report:#}");
    let problems = report["problems"].to_string();
    for words in [
        "memory",
        "cuda:0 (stand-in GPU 0) has 600 MB free of 600 MB, and its ranks need ",
        "draft-0 ",
        "draft-1 ",
        "master weights and moments ",
    ] {
        assert!(problems.contains(words), "no `{words}` in {problems}");
    }

    let apart =
        "ranks=[{role=\"verifier\"},{role=\"draft\",device=\"cuda:0\"},{role=\"draft\",device=\"cuda:1\"}]";
    let (code, report) = check(apart, &[("EAGLET_STANDIN_ISLANDS", "1")]);
    assert_eq!(code, Some(0), "want of peer access is no error: {report:#}");
    assert_eq!(report["gpus"][0]["unread_peers"], serde_json::json!(["cuda:1"]));
}

/// How far the trained weights of two runs are from each other, of the length of the second.
fn distance(one: &Path, other: &Path) -> f64 {
    let read = |directory: &Path| -> Vec<f64> {
        let state = final_weights(directory)
            .remove("training_state.safetensors")
            .expect("a state");
        let state = SafeTensors::deserialize(&state).expect("a state");
        let parameters = state.tensor("parameters").expect("parameters");
        let values = parameters.data().chunks_exact(4);
        values
            .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            .collect()
    };
    let (one, other) = (read(one), read(other));
    assert_eq!(one.len(), other.len());
    let difference: f64 = one.iter().zip(&other).map(|(a, b)| (a - b).powi(2)).sum();
    let length: f64 = other.iter().map(|x| x * x).sum();
    (difference / length).sqrt()
}

#[test]
fn a_run_on_gpus_ends_with_the_same_bits_each_time_and_near_a_run_on_cpus() {
    let Some(quiet) = quiet() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let again = folder.path().join("again");
    // Which GPU is whose, and which others there are, decides nothing.
    let cluster = launch(&again, &[ON_GPUS], &[("CUDA_VISIBLE_DEVICES", "1,0")]).expect("as before");
    completed(&cluster.finish());
    same_weights(quiet, &again);

    let on_cpus = folder.path().join("cpus");
    completed(&launch(&on_cpus, &[ON_CPUS], &[]).expect("as before").finish());
    let distance = distance(quiet, &on_cpus);
    assert!(
        distance > 0.0,
        "they cannot round alike: did ranks compute on GPUs at all?"
    );
    println!("weights of GPUs and CPUs differ by {distance:.1e} of {TOLERANCE:.0e}");
    assert!(distance < TOLERANCE, "{distance:e}");
}

#[test]
fn killed_ranks_leave_the_weights_of_the_quiet_run() {
    let Some(quiet) = quiet() else { return };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("killed");
    let mut cluster = launch(&directory, &[ON_GPUS], &[]).expect("as before");
    let tokens = BTreeSet::from([token(&mut cluster)]);
    cluster.wait_for_step(1);
    send(cluster.rank("draft", 0), Signal::KILL);
    cluster.wait_for_step(3);
    // One that is added would compute on the CPU.
    let added = ask(&directory, &["ranks", "add", "--role", "draft"]);
    let refused = text(&added.stderr);
    assert!(
        added.status.code() == Some(1) && refused.contains("the draft ranks of this run compute on GPUs"),
        "{added:?}"
    );
    send(cluster.rank("verifier", 0), Signal::KILL);
    completed(&cluster.finish());
    assert_eq!(losses(&directory).len(), 2);
    nothing_is_left(&directory, &tokens);
    same_weights(quiet, &directory);
}

/// A run in which something goes wrong once, on one of the GPUs.
fn with_fault(fault: &str) -> Option<(tempfile::TempDir, PathBuf, Finished)> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("faulty");
    let once = folder.path().join("struck");
    let variables = [
        ("EAGLET_STANDIN_FAULT", fault),
        ("EAGLET_STANDIN_ONCE", once.to_str().expect("UTF-8")),
    ];
    let finished = launch(&directory, &[ON_GPUS], &variables)?.finish();
    assert!(once.exists(), "{fault} did not strike: {finished:#?}");
    Some((folder, directory, finished))
}

#[test]
fn a_gpu_that_fails_costs_its_rank_and_nothing_else() {
    let Some(quiet) = quiet() else { return };
    for (fault, seat, cause) in [
        ("launch:100@0", "verifier-0", "the gpu failed: "),
        ("launch:120@1", "draft-0", "CUDA_ERROR_LAUNCH_FAILED (719)"),
        ("die:200@1", "draft-0", "killed by signal 9"),
    ] {
        let (_folder, directory, finished) = with_fault(fault).expect("as before");
        completed(&finished);
        let losses = losses(&directory);
        let [loss] = losses.as_slice() else {
            panic!("{fault}: {losses:#?}\n{finished:#?}")
        };
        assert!(
            loss.seat == seat && loss.cause.contains(cause),
            "{fault}: {loss:?}"
        );
        same_weights(quiet, &directory);
        let log = std::fs::read_to_string(directory.join(format!("logs/{seat}.out"))).expect("a log");
        assert!(!log.contains("panicked"), "{log}");
    }
}

#[test]
fn a_gpu_without_room_ends_the_run_with_its_words() {
    let Some((_folder, directory, finished)) = with_fault("alloc:20@1") else {
        return;
    };
    assert_eq!(finished.status.code(), Some(1), "{finished:#?}");
    for words in [
        "draft-0",
        "the gpu failed: no room for ",
        " on cuda:1: ",
        "; this rank holds ",
        "eaglet check",
    ] {
        assert!(finished.errors.contains(words), "no `{words}` in {finished:#?}");
    }
    assert_eq!(losses(&directory).len(), 1, "a restart would end the same way");
}
