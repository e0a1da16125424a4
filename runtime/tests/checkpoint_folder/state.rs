//! The training state: every bit comes back, and every wrong one is noticed.

use std::fs;
use std::path::Path;

use eaglet_runtime::checkpoint::{CheckpointError, STATE_FILE, TrainingState, layout_digest};
use eaglet_runtime::ids::Step;
use proptest::prelude::*;

use crate::{assert_same_bits, layout, state, temporary};

#[test]
fn a_state_comes_back_to_the_bit_and_has_the_same_bytes_each_time() {
    let folder = temporary();
    let path = folder.path().join(STATE_FILE);
    // NaNs with their payloads, infinities and subnormals included.
    let mut original = state(123, 5000);
    original.parameters[7] = f32::from_bits(0x7fc0_1234);
    original.second_moment[8] = f32::INFINITY;
    original.save(&path, layout()).expect("saved");
    assert_same_bits(&TrainingState::load(&path, layout()).expect("loaded"), &original);
    let first = fs::read(&path).expect("a file");
    original.view().save(&path, layout()).expect("saved again");
    assert!(fs::read(&path).expect("a file") == first);
    assert!(first.len() < 3 * 5000 * 4 + 1024, "{} bytes", first.len());

    let empty = TrainingState {
        step: Step(0),
        parameters: vec![],
        first_moment: vec![],
        second_moment: vec![],
    };
    empty.save(&path, layout()).expect("saved");
    assert_same_bits(&TrainingState::load(&path, layout()).expect("loaded"), &empty);
}

#[test]
fn a_torn_state_is_refused() {
    let folder = temporary();
    let path = folder.path().join(STATE_FILE);
    state(5, 300).save(&path, layout()).expect("saved");
    let whole = fs::read(&path).expect("a file");
    let cuts = (0..16)
        .map(|sixteenth| whole.len() * sixteenth / 16)
        .chain([1, 7, 8, 9, whole.len() - 1]);
    for cut in cuts {
        fs::write(&path, &whole[..cut]).expect("a file");
        let error = TrainingState::load(&path, layout()).expect_err("a torn file");
        assert!(
            matches!(error, CheckpointError::Damaged { .. }),
            "cut at {cut}: {error}"
        );
        let message = error.to_string();
        assert!(
            message.contains(STATE_FILE) && !message.contains('\n'),
            "{message}"
        );
    }
    let mut longer = whole.clone();
    longer.push(0);
    fs::write(&path, &longer).expect("a file");
    assert!(TrainingState::load(&path, layout()).is_err());
    // A header length that no memory could hold.
    let mut huge = whole;
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&path, &huge).expect("a file");
    let error = TrainingState::load(&path, layout()).expect_err("a huge header");
    assert!(error.to_string().contains("promise a header"), "{error}");
}

#[test]
fn a_flipped_bit_in_any_byte_of_a_state_is_refused() {
    let folder = temporary();
    let path = folder.path().join(STATE_FILE);
    state(5, 20).save(&path, layout()).expect("saved");
    let whole = fs::read(&path).expect("a file");
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().expect("8 bytes")) as usize;
    for place in 0..whole.len() {
        let mut altered = whole.clone();
        altered[place] ^= 1 << (place % 8);
        // A space of the padding may become another JSON space; all else must be noticed.
        let still_space = place < header && whole[place] == b' ' && b"\t\n\r ".contains(&altered[place]);
        fs::write(&path, &altered).expect("a file");
        let result = TrainingState::load(&path, layout());
        assert!(
            result.is_err() || still_space,
            "byte {place} of {} went unnoticed",
            whole.len()
        );
    }
}

#[test]
fn a_state_of_another_draft_is_refused() {
    let folder = temporary();
    let path = folder.path().join(STATE_FILE);
    state(5, 20).save(&path, layout()).expect("saved");
    // Same lengths, other names, shapes or order: the flat vectors would fit and mean something else.
    for other in [
        layout_digest([("fc.weight", [24, 8].as_slice()), ("norm.weight", [8].as_slice())]),
        layout_digest([("fc.weigh", [8, 24].as_slice()), ("norm.weight", [8].as_slice())]),
        layout_digest([("norm.weight", [8].as_slice()), ("fc.weight", [8, 24].as_slice())]),
        layout_digest([("fc.weight", [8, 24].as_slice())]),
    ] {
        let error = TrainingState::load(&path, other).expect_err("another layout");
        assert!(matches!(error, CheckpointError::Foreign { .. }), "{error}");
        assert!(
            error
                .to_string()
                .contains("belongs to a draft with other parameters"),
            "{error}"
        );
    }
    // A safetensors file of somebody else.
    let golden =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/eagle3/default/init_full.safetensors");
    let error = TrainingState::load(&golden, layout()).expect_err("no state");
    assert!(error.to_string().contains("is no training state"), "{error}");
    let error = TrainingState::load(&folder.path().join("none"), layout()).expect_err("no file");
    assert!(error.to_string().starts_with("cannot read"), "{error}");
}

#[test]
fn a_state_with_unequal_vectors_is_not_written() {
    let folder = temporary();
    let path = folder.path().join(STATE_FILE);
    let mut uneven = state(1, 10);
    uneven.second_moment.pop();
    let error = uneven.save(&path, layout()).expect_err("unequal vectors");
    assert!(
        error
            .to_string()
            .contains("`second_moment` has 9 values where 10 are needed"),
        "{error}"
    );
    assert!(!path.exists());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_floats_survive_a_state(
        step in any::<u64>(),
        raw in proptest::collection::vec(any::<[u32; 3]>(), 0..200),
    ) {
        let column = |i: usize| -> Vec<f32> { raw.iter().map(|row| f32::from_bits(row[i])).collect() };
        let original = TrainingState {
            step: Step(step),
            parameters: column(0),
            first_moment: column(1),
            second_moment: column(2),
        };
        let folder = temporary();
        let path = folder.path().join(STATE_FILE);
        original.save(&path, layout()).expect("saved");
        assert_same_bits(&TrainingState::load(&path, layout()).expect("loaded"), &original);
    }
}
