//! Packed weights that ranks of one host share (PACKED-1 to PACKED-5), with the AMX unit or its double in software.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use safetensors::Dtype;

use super::tests::{document, pack};
use super::tiny::Tiny;
use super::*;
use crate::contract::HiddenDtype;
use crate::device::Cpu;
use crate::digest::Digest;

/// Verifier and cache of a process that shares them; set by the test that starts it.
const SHARED: &str = "EAGLET_TEST_PACKED";

fn tiny() -> tempfile::TempDir {
    let tiny = Tiny {
        dtype: Dtype::BF16,
        ..Tiny::llama()
    };
    tiny.folder()
}

fn load(verifier: &Path, cache: &Path) -> Verifier {
    Verifier::load_on(Cpu::with_packed_cache(2, cache), verifier, None, Shard::WHOLE).unwrap()
}

/// Digest of all hidden states of a row. The head is used, too.
fn states(verifier: &mut Verifier) -> Digest {
    let row = pack(&[document(1, 40), document(2, 9)]);
    verifier.self_check(HiddenDtype::F32, &mut Alone).unwrap();
    Digest::of(
        &verifier
            .extract(&row, HiddenDtype::F32, &mut Alone)
            .unwrap()
            .bytes,
    )
}

/// States by weights that are packed in this process's memory.
fn private_states(folder: &Path) -> Digest {
    states(&mut Verifier::load_on(Cpu::with_amx(2), folder, None, Shard::WHOLE).unwrap())
}

fn files(cache: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(cache)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    files
}

fn only_file(cache: &Path) -> PathBuf {
    let files = files(cache);
    assert!(
        files.len() == 1 && files[0].extension().unwrap() == "packed",
        "{files:?}"
    );
    files[0].clone()
}

/// Of this process's maps of a file, in KiB: what is shared, what is this process's own, and its share of all.
fn map_of(file: &Path) -> [u64; 3] {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let name = file.to_str().unwrap();
    let mut sums = [0; 3];
    let mut is_file = false;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let Some(first) = words.next() else { continue };
        if !first.ends_with(':') {
            is_file = line.ends_with(name);
            continue;
        }
        let kib: u64 = words.next().and_then(|kib| kib.parse().ok()).unwrap_or(0);
        let sum = match first {
            "Shared_Clean:" | "Shared_Dirty:" => 0,
            "Private_Clean:" | "Private_Dirty:" => 1,
            "Pss:" => 2,
            _ => continue,
        };
        if is_file {
            sums[sum] += kib;
        }
    }
    sums
}

/// PACKED-2
#[test]
fn two_processes_have_one_copy_between_them() {
    let (verifier, cache) = (tiny(), tempfile::tempdir().unwrap());
    let mut ours = load(verifier.path(), cache.path());
    let expected = states(&mut ours);
    assert_eq!(expected, private_states(verifier.path()), "the same bits");
    let file = only_file(cache.path());
    let [shared, own, _] = map_of(&file);
    assert!(
        shared == 0 && own > 0,
        "alone: {shared} KiB shared, {own} KiB its own"
    );

    let both = format!("{}\n{}", verifier.path().display(), cache.path().display());
    let test = "verifier::packed_tests::a_process_that_shares_packed_weights";
    let other = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .env(SHARED, both)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&other.stdout);
    let line = said
        .lines()
        .find_map(|line| line.split_once("packed weights: "))
        .map(|(_, line)| line);
    let line = line.unwrap_or_else(|| panic!("{said}{}", String::from_utf8_lossy(&other.stderr)));
    let words: Vec<&str> = line.split_whitespace().collect();
    let number = |index: usize| words[index].parse::<u64>().unwrap();
    let (shared, other_own, pss) = (number(0), number(1), number(2));
    assert_eq!(
        words[3],
        expected.to_string(),
        "the same bits in the other process"
    );
    assert!(
        shared > 0 && other_own == 0,
        "{shared} KiB shared, {other_own} KiB its own"
    );
    assert!(pss <= shared / 2 + 1, "{pss} KiB are its share of {shared}");
    assert_eq!(only_file(cache.path()), file, "nothing was packed again");
    drop(ours);
}

#[test]
#[ignore = "is run by another test, in a process of its own"]
#[expect(clippy::print_stdout, reason = "the test that runs it reads it")]
fn a_process_that_shares_packed_weights() {
    let both = std::env::var(SHARED).unwrap();
    let (verifier, cache) = both.split_once('\n').unwrap();
    let mut verifier = load(Path::new(verifier), Path::new(cache));
    let states = states(&mut verifier);
    let [shared, own, pss] = map_of(&only_file(Path::new(cache)));
    println!("packed weights: {shared} {own} {pss} {states}");
}

/// PACKED-1
#[test]
fn what_is_torn_or_damaged_is_packed_again() {
    let (verifier, cache) = (tiny(), tempfile::tempdir().unwrap());
    let expected = states(&mut load(verifier.path(), cache.path()));
    let file = only_file(cache.path());
    let whole = fs::read(&file).unwrap();
    let replace = |bytes: &[u8]| {
        fs::remove_file(&file).unwrap();
        fs::write(&file, bytes).unwrap();
    };
    // Seen when it is opened.
    for cut in [0, 50, 4096, whole.len() - 1] {
        replace(&whole[..cut]);
        assert_eq!(
            states(&mut load(verifier.path(), cache.path())),
            expected,
            "cut to {cut}"
        );
        assert!(
            fs::read(&file).unwrap() == whole,
            "cut to {cut}, it is made again"
        );
    }
    for place in [0, 20, 60, 70, 100] {
        let mut damaged = whole.clone();
        damaged[place] ^= 1;
        replace(&damaged);
        assert_eq!(
            states(&mut load(verifier.path(), cache.path())),
            expected,
            "byte {place}"
        );
        assert!(
            fs::read(&file).unwrap() == whole,
            "byte {place}, it is made again"
        );
    }
    // Seen when the matrix is used, here the last one: the head.
    let mut damaged = whole.clone();
    *damaged.last_mut().unwrap() ^= 1;
    replace(&damaged);
    let mut ours = load(verifier.path(), cache.path());
    assert!(file.exists(), "nothing is seen before its use");
    assert_eq!(states(&mut ours), expected);
    assert!(files(cache.path()).is_empty(), "it is dropped");
    assert_eq!(states(&mut load(verifier.path(), cache.path())), expected);
    assert!(fs::read(&file).unwrap() == whole, "it is made again");
}

#[test]
fn other_weights_have_another_file() {
    let (verifier, cache) = (tiny(), tempfile::tempdir().unwrap());
    let before = states(&mut load(verifier.path(), cache.path()));
    let mut changed = Tiny {
        dtype: Dtype::BF16,
        ..Tiny::llama()
    };
    changed.values("model.layers.0.self_attn.q_proj.weight")[0] += 0.25;
    changed.write(verifier.path(), 1);
    let after = states(&mut load(verifier.path(), cache.path()));
    assert_eq!(after, private_states(verifier.path()));
    assert!(after != before && files(cache.path()).len() == 2);
    // Each slice is a shard of its own.
    for slice in 0..2 {
        let shard = Shard {
            slices: 2,
            slice,
            ..Shard::WHOLE
        };
        let device = Cpu::with_packed_cache(1, cache.path());
        drop(Verifier::load_on(device, verifier.path(), None, shard).unwrap());
    }
    assert_eq!(files(cache.path()).len(), 4);
}

/// PACKED-3
#[test]
fn of_several_at_once_one_packs() {
    let (verifier, cache) = (tiny(), tempfile::tempdir().unwrap());
    let expected = private_states(verifier.path());
    let all = || states(&mut load(verifier.path(), cache.path()));
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..4).map(|_| scope.spawn(all)).collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), expected);
        }
    });
    only_file(cache.path());
}

/// PACKED-4
#[test]
fn files_that_nobody_used_for_long_are_deleted() {
    let (verifier, cache) = (tiny(), tempfile::tempdir().unwrap());
    let mapped = load(verifier.path(), cache.path());
    let file = only_file(cache.path());
    let age = |path: &Path, days: u64| {
        let file = fs::File::options().append(true).create(true).open(path).unwrap();
        let at = SystemTime::now() - Duration::from_secs(days * 24 * 3600);
        file.set_modified(at).unwrap();
    };
    let name = |index: u128, rest: &str| cache.path().join(format!("{index:032x}.{rest}"));
    let (old, recent) = (name(1, "packed"), name(2, "packed"));
    let (partial, foreign) = (name(3, "77.partial"), cache.path().join("notes.packed"));
    for (path, days) in [
        (&old, 31),
        (&recent, 29),
        (&partial, 1),
        (&foreign, 400),
        (&file, 400),
    ] {
        age(path, days);
    }
    // Another shard.
    let last = Shard {
        stages: 2,
        stage: 1,
        ..Shard::WHOLE
    };
    drop(
        Verifier::load_on(
            Cpu::with_packed_cache(1, cache.path()),
            verifier.path(),
            None,
            last,
        )
        .unwrap(),
    );
    assert!(!old.exists() && !partial.exists());
    assert!(
        recent.exists() && foreign.exists() && file.exists(),
        "in use, or not ours"
    );
    drop(mapped);
    drop(load(verifier.path(), cache.path()));
    assert!(file.exists(), "its use counts before its age");
}

/// PACKED-5
#[test]
fn without_a_folder_weights_are_packed_in_memory() {
    let verifier = tiny();
    let place = tempfile::NamedTempFile::new().unwrap();
    let mut verifier_without = load(verifier.path(), &place.path().join("below"));
    assert_eq!(states(&mut verifier_without), private_states(verifier.path()));
}
