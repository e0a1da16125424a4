//! The folder of checkpoints under damage, crashes and full disks.

#![allow(clippy::print_stdout, reason = "a test that cannot run says why")]

mod state;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use eaglet_runtime::checkpoint::{
    CheckpointError, CheckpointFolder, MANIFEST_FILE, STATE_FILE, TrainingState, layout_digest, verify,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::Step;

/// A state whose values have all kinds of bit patterns.
fn state(step: u64, count: usize) -> TrainingState {
    let values = |salt: u32| -> Vec<f32> {
        let bits = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(salt) & !0x4000_0000;
        (0..count as u32).map(|i| f32::from_bits(bits(i))).collect()
    };
    TrainingState {
        step: Step(step),
        parameters: values(1),
        first_moment: values(2),
        second_moment: values(3),
    }
}

fn layout() -> Digest {
    layout_digest([("fc.weight", [8, 24].as_slice()), ("norm.weight", [8].as_slice())])
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn assert_same_bits(a: &TrainingState, b: &TrainingState) {
    assert_eq!(a.step, b.step);
    assert_eq!(bits(&a.parameters), bits(&b.parameters));
    assert_eq!(bits(&a.first_moment), bits(&b.first_moment));
    assert_eq!(bits(&a.second_moment), bits(&b.second_moment));
}

fn temporary() -> tempfile::TempDir {
    tempfile::tempdir().expect("a folder")
}

/// Names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).expect("a folder");
    let mut names: Vec<String> = entries
        .map(|entry| {
            entry
                .expect("an entry")
                .file_name()
                .into_string()
                .expect("a name")
        })
        .collect();
    names.sort();
    names
}

/// Writes the checkpoint of a step with a training state in it.
fn write(folder: &CheckpointFolder, step: u64) -> PathBuf {
    let fill = |path: &Path| state(step, 200).save(&path.join(STATE_FILE), layout());
    folder.write(Step(step), fill).expect("a checkpoint")
}

fn steps(folder: &CheckpointFolder) -> Vec<u64> {
    folder
        .list()
        .expect("a list")
        .into_iter()
        .map(|checkpoint| checkpoint.step.0)
        .collect()
}

/// Flips a bit in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).expect("a file");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).expect("a file");
}

#[test]
fn checkpoints_appear_whole_and_latest_follows() {
    let run = temporary();
    let root = run.path().join("run/checkpoints");
    let folder = CheckpointFolder::new(&root).expect("a folder");
    assert!(folder.latest_valid().expect("no checkpoint is fine").is_none());
    for step in [100, 20, 1_234_567] {
        let seen = |path: &Path| {
            // Nothing of it shows under its name while it is being written.
            assert!(!names(&root).contains(&format!("step-{step:06}")));
            state(step, 10).save(&path.join(STATE_FILE), layout())
        };
        let path = folder.write(Step(step), seen).expect("a checkpoint");
        assert_eq!(path, root.join(format!("step-{step:06}")));
        assert_eq!(
            fs::read_link(root.join("latest")).expect("a link"),
            Path::new(&format!("step-{step:06}"))
        );
        assert_eq!(names(&path), [MANIFEST_FILE, STATE_FILE]);
    }
    assert_eq!(steps(&folder), [20, 100, 1_234_567]);
    assert_eq!(
        names(&root),
        ["latest", "step-000020", "step-000100", "step-1234567"]
    );
    let latest = folder.latest_valid().expect("valid").expect("a checkpoint");
    assert_eq!(latest.checkpoint.step, Step(1_234_567));
    assert!(latest.skipped.is_empty());
    assert_eq!(steps(&CheckpointFolder::open(&root)), [20, 100, 1_234_567]);
    assert_eq!(
        steps(&CheckpointFolder::open(run.path().join("none"))),
        Vec::<u64>::new()
    );
}

#[test]
fn a_step_that_is_redone_replaces_its_checkpoint() {
    let run = temporary();
    let folder = CheckpointFolder::new(run.path()).expect("a folder");
    let path = write(&folder, 7);
    damage(&path.join(STATE_FILE));
    fs::write(path.join("leftover"), "x").expect("a file");
    assert!(verify(&path).is_err());
    write(&folder, 7);
    assert_eq!(names(run.path()), ["latest", "step-000007"]);
    assert_eq!(names(&path), [MANIFEST_FILE, STATE_FILE]);
    verify(&path).expect("whole again");
    assert_same_bits(
        &TrainingState::load(&path.join(STATE_FILE), layout()).expect("a state"),
        &state(7, 200),
    );
}

#[test]
fn a_failing_write_leaves_what_was_there() {
    let run = temporary();
    let folder = CheckpointFolder::new(run.path()).expect("a folder");
    let path = write(&folder, 1);
    for step in [1, 2] {
        let error = folder.write(Step(step), |partial| {
            fs::write(partial.join("half"), "half").expect("a file");
            TrainingState::load(&partial.join("none"), layout()).map(drop)
        });
        assert!(
            error
                .expect_err("a failing write")
                .to_string()
                .starts_with("cannot read")
        );
        assert_eq!(names(run.path()), ["latest", "step-000001"]);
        verify(&path).expect("untouched");
    }
    let error = folder
        .write(Step(3), |_| Ok(()))
        .expect_err("an empty checkpoint");
    assert!(error.to_string().contains("holds no file"), "{error}");
    let error = folder.write(Step(3), |partial| {
        fs::create_dir(partial.join("nested")).expect("a folder");
        Ok(())
    });
    assert!(
        error
            .expect_err("a nested folder")
            .to_string()
            .contains("no plain file")
    );
    assert_eq!(names(run.path()), ["latest", "step-000001"]);
}

#[test]
fn a_damaged_newest_checkpoint_gives_way_to_the_previous() {
    type Damage = (&'static str, fn(&Path), &'static str);
    let damages: [Damage; 5] = [
        ("a flipped bit", |path| damage(&path.join(STATE_FILE)), "digest"),
        (
            "a cut file",
            |path| fs::write(path.join(STATE_FILE), "short").expect("a file"),
            "has 5 bytes",
        ),
        (
            "a missing file",
            |path| fs::remove_file(path.join(STATE_FILE)).expect("removed"),
            "cannot read",
        ),
        (
            "a missing manifest",
            |path| fs::remove_file(path.join(MANIFEST_FILE)).expect("removed"),
            "cannot read",
        ),
        (
            "a damaged manifest",
            |path| fs::write(path.join(MANIFEST_FILE), "{").expect("a file"),
            "not readable",
        ),
    ];
    for (what, damage, expected) in damages {
        let run = temporary();
        let folder = CheckpointFolder::new(run.path()).expect("a folder");
        write(&folder, 10);
        let newest = write(&folder, 20);
        damage(&newest);
        let latest = folder.latest_valid().expect(what).expect("a checkpoint");
        assert_eq!(latest.checkpoint.step, Step(10), "{what}");
        let [error] = latest.skipped.as_slice() else {
            panic!("{what}: {:?}", latest.skipped)
        };
        let message = error.to_string();
        assert!(
            message.contains("step-000020") && message.contains(expected),
            "{what}: {message}"
        );

        // With none left a run must not start from scratch by itself.
        fs::remove_dir_all(&latest.checkpoint.path).expect("removed");
        let message = folder.latest_valid().expect_err(what).to_string();
        assert!(
            message.contains("none of the 1 checkpoints") && message.contains("start from scratch"),
            "{message}"
        );
    }
}

#[test]
fn leftovers_of_a_crash_are_removed_and_nothing_else() {
    let run = temporary();
    let root = run.path();
    let folder = CheckpointFolder::new(root).expect("a folder");
    write(&folder, 1);
    // This process's own id too: in a container a new process often has the id of the one that crashed.
    for pid in [4_000_000, std::process::id()] {
        let partial = root.join(format!(".step-000002.partial-{pid}"));
        fs::create_dir(&partial).expect("a folder");
        fs::write(partial.join(STATE_FILE), "half").expect("a file");
    }
    fs::create_dir(root.join(".final.partial-77")).expect("a folder");
    symlink("step-000002", root.join(".latest.partial-77")).expect("a link");
    let kept = [".notes", ".step-000003.partial-x", ".step-000004.partial-5"];
    fs::create_dir(root.join(kept[0])).expect("a folder");
    fs::create_dir(root.join(kept[1])).expect("a folder");
    fs::write(root.join(kept[2]), "a file, not a folder").expect("a file");
    let everything = names(root);
    assert_eq!(steps(&CheckpointFolder::open(root)), [1]);
    assert_eq!(names(root), everything, "a reader changes nothing");

    let folder = CheckpointFolder::new(root).expect("a folder");
    assert_eq!(names(root), [kept[0], kept[1], kept[2], "latest", "step-000001"]);
    // So does a writer that takes over while the run goes on.
    let partial = root.join(".step-000003.partial-4000001");
    fs::create_dir(&partial).expect("a folder");
    fs::write(partial.join(STATE_FILE), "half").expect("a file");
    write(&CheckpointFolder::open(root), 2);
    assert!(!partial.exists());
    // What is being written right now is no leftover.
    folder
        .write(Step(5), |partial| {
            CheckpointFolder::new(root).expect("a second opening");
            assert!(partial.is_dir());
            state(5, 10).save(&partial.join(STATE_FILE), layout())
        })
        .expect("a checkpoint");
    assert_eq!(steps(&folder), [1, 2, 5]);
}

#[test]
fn a_writer_killed_in_the_middle_leaves_the_last_checkpoint() {
    let run = temporary();
    let executable = std::env::current_exe().expect("this test");
    let mut child = Command::new(executable)
        .args(["--exact", "killed_in_the_middle", "--ignored"])
        .env("EAGLET_TEST_FOLDER", run.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a child");
    assert!(!child.wait().expect("its end").success());
    let left = names(run.path());
    assert!(
        left.iter().any(|name| name.starts_with(".step-000002.partial-")),
        "{left:?}"
    );
    let folder = CheckpointFolder::new(run.path()).expect("a folder");
    assert_eq!(names(run.path()), ["latest", "step-000001"]);
    assert_eq!(
        folder
            .latest_valid()
            .expect("valid")
            .expect("a checkpoint")
            .checkpoint
            .step,
        Step(1)
    );
}

#[test]
#[ignore = "run by a_writer_killed_in_the_middle_leaves_the_last_checkpoint"]
fn killed_in_the_middle() {
    let folder =
        CheckpointFolder::new(std::env::var_os("EAGLET_TEST_FOLDER").expect("a folder")).expect("a folder");
    write(&folder, 1);
    let _ = folder.write(Step(2), |partial| {
        state(2, 10).save(&partial.join(STATE_FILE), layout())?;
        // No destructor runs: as good as a kill.
        std::process::abort()
    });
}

#[test]
fn prune_keeps_the_newest_and_named_ones() {
    let run = temporary();
    let folder = CheckpointFolder::new(run.path()).expect("a folder");
    for step in 1..=5 {
        write(&folder, step);
    }
    let fill = |path: &Path| state(5, 10).save(&path.join(STATE_FILE), layout());
    folder.write_named("final", fill).expect("a named checkpoint");
    verify(&run.path().join("final")).expect("whole");
    assert_eq!(folder.prune(7, None).expect("nothing to do"), []);
    assert_eq!(folder.prune(3, None).expect("pruned"), [Step(1), Step(2)]);
    assert_eq!(
        names(run.path()),
        ["final", "latest", "step-000003", "step-000004", "step-000005"]
    );
    // The journal knows an older one only: the newer ones are of a launch that was cut off.
    write(&folder, 2);
    write(&folder, 5);
    assert_eq!(folder.prune(2, Some(Step(2))).expect("pruned"), [Step(3)]);
    assert_eq!(
        names(run.path()),
        ["final", "latest", "step-000002", "step-000004", "step-000005"]
    );
    assert_eq!(folder.prune(2, None).expect("pruned"), [Step(2)]);
    // A run that fell back to step 3 writes it anew: `latest` points there, and it stays.
    write(&folder, 3);
    assert_eq!(folder.prune(0, None).expect("pruned"), [Step(4)]);
    assert_eq!(
        names(run.path()),
        ["final", "latest", "step-000003", "step-000005"]
    );
}

#[test]
fn names_that_are_none_are_refused() {
    let run = temporary();
    let folder = CheckpointFolder::new(run.path()).expect("a folder");
    for name in [
        "",
        "..",
        ".hidden",
        "a/b",
        "latest",
        "step-000001",
        "two words",
        "dot.",
    ] {
        let error = folder
            .write_named(name, |_| panic!("not reached"))
            .expect_err(name);
        assert!(matches!(error, CheckpointError::Name { .. }), "{name}: {error}");
    }
    assert_eq!(names(run.path()), Vec::<String>::new());
    // What only looks like a step is not listed.
    for name in ["step-1", "step-0000001", "step-x", "step-"] {
        fs::create_dir(run.path().join(name)).expect("a folder");
    }
    fs::write(run.path().join("step-000009"), "a file").expect("a file");
    assert_eq!(steps(&folder), Vec::<u64>::new());
    let error = folder.write(Step(9), |path| state(9, 1).save(&path.join(STATE_FILE), layout()));
    assert!(
        error
            .expect_err("a file in the way")
            .to_string()
            .contains("move it away")
    );
    let error = CheckpointFolder::new(run.path().join("step-000009")).expect_err("a file in the way");
    assert!(error.to_string().contains("step-000009"), "{error}");
}

/// Runs two tests of this file on a small file system of their own, first writable and then read-only, in a mount
/// namespace that ends with them.
#[test]
fn full_and_read_only_disks() {
    let run = temporary();
    let script = r#"
        mount -t tmpfs -o size=256k tmpfs "$EAGLET_TEST_FOLDER" || exit 77
        "$0" --exact on_a_full_disk --ignored || exit 1
        mount -o remount,ro "$EAGLET_TEST_FOLDER" || exit 77
        "$0" --exact on_a_read_only_disk --ignored || exit 1
    "#;
    let executable = std::env::current_exe().expect("this test");
    let output = Command::new("unshare")
        .args(["--user", "--map-root-user", "--mount", "sh", "-c", script])
        .arg(executable)
        .env("EAGLET_TEST_FOLDER", run.path())
        .output();
    match output {
        Err(error) => println!("skipped: no `unshare` here: {error}"),
        Ok(output) => {
            let text = format!(
                "{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            // `unshare` itself ends with 1 and runs no test if namespaces are not permitted.
            if output.status.code() == Some(77) || text.contains("unshare:") {
                println!("skipped: mounting is not permitted here: {text}");
            } else {
                assert!(output.status.success(), "{text}");
                assert_eq!(text.matches("test result: ok. 1 passed").count(), 2, "{text}");
                println!("both ran on a file system of 256 KiB");
            }
        }
    }
}

fn small_disk() -> PathBuf {
    PathBuf::from(std::env::var_os("EAGLET_TEST_FOLDER").expect("the folder of the small disk"))
        .join("checkpoints")
}

#[test]
#[ignore = "run by full_and_read_only_disks"]
fn on_a_full_disk() {
    let root = small_disk();
    let folder = CheckpointFolder::new(&root).expect("a folder");
    let path = write(&folder, 1);
    // 300 KB do not fit; nor do they when the step has a checkpoint already.
    for step in [2, 1] {
        let large = |partial: &Path| state(step, 25_000).save(&partial.join(STATE_FILE), layout());
        let message = folder
            .write(Step(step), large)
            .expect_err("a full disk")
            .to_string();
        assert!(message.contains("free space on that file system"), "{message}");
        assert!(message.contains(&format!("step-{step:06}")), "{message}");
        assert_eq!(names(&root), ["latest", "step-000001"]);
        verify(&path).expect("the first checkpoint is untouched");
    }
    // The space of the failed ones is free again.
    write(&folder, 3);
    assert_eq!(steps(&folder), [1, 3]);
}

#[test]
#[ignore = "run by full_and_read_only_disks"]
fn on_a_read_only_disk() {
    let root = small_disk();
    let folder = CheckpointFolder::new(&root).expect("opening needs no write");
    let fill = |path: &Path| state(4, 10).save(&path.join(STATE_FILE), layout());
    let message = folder
        .write(Step(4), fill)
        .expect_err("a read-only disk")
        .to_string();
    assert!(
        message.contains("mount it read-write") && message.contains("step-000004"),
        "{message}"
    );
    let message = folder.prune(1, None).expect_err("a read-only disk").to_string();
    assert!(message.contains("mount it read-write"), "{message}");
    assert_eq!(
        folder
            .latest_valid()
            .expect("readable")
            .expect("a checkpoint")
            .checkpoint
            .step,
        Step(3)
    );
    let error = CheckpointFolder::new(root.join("more")).expect_err("a read-only disk");
    assert!(error.to_string().contains("mount it read-write"), "{error}");
}
