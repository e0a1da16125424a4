use std::fs;
use std::path::Path;

use super::*;
use crate::contract::{Contract, HiddenDtype};
use crate::digest::Digest;
use crate::row::HiddenStates;
use crate::row::{PackedRow, Sample};
use crate::verifier::{Alone, Verifier, VerifierOptions};

const SHAPE: (usize, usize) = (3, 4);

fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![2, 5],
        hidden_size: 4,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

/// States that tell token, state and place.
fn states(tokens: &[u32], dtype: HiddenDtype) -> HiddenStates {
    let mut states = HiddenStates::zeros(dtype, tokens.len(), SHAPE.0, SHAPE.1);
    for (token, &id) in tokens.iter().enumerate() {
        for state in 0..SHAPE.0 {
            let values: Vec<f32> = (0..SHAPE.1)
                .map(|i| (id * 8 + state as u32 * 2) as f32 + 0.25 * i as f32)
                .collect();
            states.set(token, state, &values);
        }
    }
    states.share()
}

fn written(samples: &[&[u32]]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let writer = HiddenWriter::create(folder.path(), &contract()).unwrap();
    for (number, tokens) in samples.iter().enumerate() {
        writer
            .write(number as u64, tokens, &states(tokens, HiddenDtype::Bf16))
            .unwrap();
    }
    folder
}

fn text(error: &HiddenFileError) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

/// The same states, to be changed.
fn owned(states: &HiddenStates) -> HiddenStates<Vec<u8>> {
    HiddenStates {
        dtype: states.dtype,
        states: states.states,
        hidden: states.hidden,
        bytes: states.bytes.to_vec(),
    }
}

#[test]
fn files_1_samples_are_found_by_their_tokens() {
    let samples: [&[u32]; 3] = [&[1, 2, 3], &[4, 5], &[1, 2, 3, 4, 5, 6]];
    let folder = written(&samples);
    // Another numbering changes nothing.
    fs::rename(
        folder.path().join(file_name(0)),
        folder.path().join(file_name(77)),
    )
    .unwrap();
    let files = HiddenFiles::open(folder.path(), 100).unwrap();
    assert_eq!((files.len(), files.refused().len()), (3, 0));
    files.expect(&contract()).unwrap();
    for tokens in samples {
        let read = files.read(tokens, SHAPE, HiddenDtype::Bf16).unwrap();
        assert_eq!(read, Some(states(tokens, HiddenDtype::Bf16)));
    }
    assert_eq!(files.read(&[1, 2], SHAPE, HiddenDtype::Bf16).unwrap(), None);
    assert_eq!(files.shortest(2).unwrap(), [vec![4, 5], vec![1, 2, 3]]);
}

#[test]
fn a_sample_that_a_row_cuts_off_is_found_by_what_is_left() {
    let folder = written(&[&[1, 2, 3, 4, 5, 6], &[7, 8]]);
    let files = HiddenFiles::open(folder.path(), 4).unwrap();
    let read = files.read(&[1, 2, 3, 4], SHAPE, HiddenDtype::Bf16).unwrap();
    assert_eq!(read, Some(states(&[1, 2, 3, 4], HiddenDtype::Bf16)));
    assert!(files.read(&[7, 8], SHAPE, HiddenDtype::Bf16).unwrap().is_some());
}

#[test]
fn the_layout_of_speculators_is_read() {
    // A dataset folder whose files lie in `hidden_states`, without a contract.
    let folder = tempfile::tempdir().unwrap();
    let inner = folder.path().join("hidden_states");
    fs::create_dir(&inner).unwrap();
    HiddenFile::write(&inner, 4, &[9, 8, 7], &states(&[9, 8, 7], HiddenDtype::F32)).unwrap();
    let files = HiddenFiles::open(folder.path(), 100).unwrap();
    assert_eq!(files.contract(), None);
    let read = files.read(&[9, 8, 7], SHAPE, HiddenDtype::Bf16).unwrap();
    assert_eq!(read, Some(states(&[9, 8, 7], HiddenDtype::Bf16)));
}

#[test]
fn another_contract_is_refused_with_its_difference() {
    let folder = written(&[&[1, 2]]);
    let files = HiddenFiles::open(folder.path(), 100).unwrap();
    let mut other = contract();
    other.aux_layers = vec![1, 4];
    let error = text(&files.expect(&other).unwrap_err());
    assert!(
        error.contains("aux layers") && error.contains("[2, 5]"),
        "{error}"
    );
    let error = text(&HiddenWriter::create(folder.path(), &other).unwrap_err());
    assert!(error.contains("aux layers"), "{error}");
    // The element type is only how they travel.
    let wide = Contract {
        dtype: HiddenDtype::F32,
        ..contract()
    };
    files.expect(&wide).unwrap();

    let file = folder.path().join(CONTRACT_FILE);
    let output = fs::read_to_string(&file)
        .unwrap()
        .replace("\"input\"", "\"output\"");
    fs::write(&file, output).unwrap();
    let error = text(&HiddenFiles::open(folder.path(), 100).unwrap_err());
    assert!(error.contains("layer_convention is `output`"), "{error}");
    fs::write(&file, "{").unwrap();
    assert!(matches!(
        HiddenFiles::open(folder.path(), 100),
        Err(HiddenFileError::Contract { .. })
    ));
}

#[test]
fn files_2_what_is_no_hidden_state_is_refused_by_name() {
    let folder = written(&[&[1, 2, 3], &[4, 5]]);
    let good = fs::read(folder.path().join(file_name(0))).unwrap();
    fs::write(folder.path().join("hs_5.safetensors"), &good[..good.len() - 1]).unwrap();
    fs::write(folder.path().join("hs_6.safetensors"), b"").unwrap();
    let files = HiddenFiles::open(folder.path(), 100).unwrap();
    assert_eq!((files.len(), files.refused().len()), (2, 2));
    assert!(text(&files.refused()[0]).contains("hs_5.safetensors"));

    let error = files.read(&[4, 5], (4, 4), HiddenDtype::Bf16).unwrap_err();
    let error = text(&error);
    assert!(
        error.contains("3 states of width 4") && error.contains("4 of width 4"),
        "{error}"
    );

    let mut wrong = owned(&states(&[6, 6], HiddenDtype::F32));
    wrong.set(1, 2, &[0.0, f32::NAN, 0.0, 0.0]);
    HiddenFile::write(folder.path(), 9, &[6, 6], &wrong.clone().share()).unwrap();
    wrong.set(1, 2, &[0.0, 3.4e38, 0.0, 0.0]);
    HiddenFile::write(folder.path(), 10, &[7, 7], &wrong.share()).unwrap();
    let files = HiddenFiles::open(folder.path(), 100).unwrap();
    for tokens in [[6, 6], [7, 7]] {
        let error = text(&files.read(&tokens, SHAPE, HiddenDtype::Bf16).unwrap_err());
        assert!(error.contains("state 2 of token 1 is not finite"), "{error}");
    }
}

#[test]
fn every_damaged_byte_is_an_error_or_harmless() {
    let folder = written(&[&[1, 2, 3]]);
    let file = folder.path().join(file_name(0));
    let good = fs::read(&file).unwrap();
    for at in 0..good.len() {
        for flip in [0x01, 0x80] {
            let mut bad = good.clone();
            bad[at] ^= flip;
            fs::write(&file, &bad).unwrap();
            if let Ok(opened) = HiddenFile::open(&file) {
                let tokens = opened.tokens().len();
                // Whatever is read has the shape that was asked for.
                if let Ok(read) = opened.read(tokens, SHAPE, HiddenDtype::Bf16) {
                    assert_eq!(
                        (read.tokens(), read.states, read.hidden),
                        (tokens, SHAPE.0, SHAPE.1)
                    );
                }
            }
        }
    }
}

#[test]
fn files_3_a_full_disk_leaves_nothing_half_written() {
    let missing = Path::new("/nonexistent-folder");
    let error = HiddenFile::write(missing, 0, &[1], &states(&[1], HiddenDtype::Bf16)).unwrap_err();
    assert!(text(&error).contains("cannot write `/nonexistent-folder/hs_0.safetensors`"));
    let empty = tempfile::tempdir().unwrap();
    let error = HiddenFiles::open(empty.path(), 10).unwrap_err();
    assert!(text(&error).contains("holds no hs_*.safetensors"));
}

/// The golden Llama with these aux layers.
fn verifier(folder: &str, aux_layers: &[u32]) -> Verifier {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/verifiers")
        .join(folder);
    let options = VerifierOptions {
        aux_layers: Some(aux_layers.to_vec()),
        ..VerifierOptions::default()
    };
    Verifier::load(folder, options).unwrap()
}

#[test]
fn states_of_unknown_origin_are_recognised_by_their_values() {
    let tokens: Vec<u32> = (1..20).map(|i| i * i % 96).collect();
    let mut row = PackedRow::default();
    row.push(&Sample {
        tokens: tokens.clone(),
        loss_mask: vec![1; tokens.len()],
    });
    let mut wanted = verifier("llama", &[1, 2]);
    let states = wanted.extract(&row, HiddenDtype::Bf16, &mut Alone).unwrap();
    recognise(&mut wanted, &tokens, &states).unwrap();

    // Ids in the other convention: one layer later.
    let later = verifier("llama", &[2, 3])
        .extract(&row, HiddenDtype::Bf16, &mut Alone)
        .unwrap();
    let error = recognise(&mut wanted, &tokens, &later).unwrap_err().to_string();
    assert!(
        error.contains("enter layers [2, 3, 3] where [1, 2, 3]")
            && error.contains("verifier.aux_layers = [2, 3]"),
        "{error}"
    );

    // The last state after the final norm.
    let (normed, _) = wanted.logits(&row, &mut Alone).unwrap();
    let mut post = owned(&states);
    for (token, values) in normed.chunks_exact(post.hidden).enumerate() {
        post.set(token, 2, values);
    }
    let error = recognise(&mut wanted, &tokens, &post.share())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("final norm") && error.contains("before the final norm"),
        "{error}"
    );

    // Another model, and another text.
    let other = verifier("llama_tied", &[1, 2])
        .extract(&row, HiddenDtype::Bf16, &mut Alone)
        .unwrap();
    let error = recognise(&mut wanted, &tokens, &other).unwrap_err();
    assert!(matches!(error, Unrecognised::Stranger { .. }), "{error}");
    let mut shifted = tokens.clone();
    shifted.rotate_left(1);
    let error = recognise(&mut wanted, &shifted, &states).unwrap_err();
    assert!(matches!(error, Unrecognised::Stranger { .. }), "{error}");
}
