use std::collections::HashMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::tensor::TensorView as Stored;

use super::*;

fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn write(path: &Path, tensors: &[(&str, Dtype, &[usize], &[u8])]) {
    let tensors: Vec<_> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            (
                *name,
                Stored::new(*dtype, shape.to_vec(), bytes).expect("bytes fit the shape"),
            )
        })
        .collect();
    safetensors::serialize_to_file(tensors, None, path).expect("a temporary folder is writable");
}

/// Three tensors in one file: `a` f32 [3, 2], `b` bf16 [2], `ids` i64 [1].
fn single() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let b: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
        .collect();
    write(
        &folder.path().join("model.safetensors"),
        &[
            (
                "a",
                Dtype::F32,
                &[3, 2],
                &f32_bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
            ),
            ("b", Dtype::BF16, &[2], &b),
            ("ids", Dtype::I64, &[1], &7i64.to_le_bytes()),
        ],
    );
    folder
}

/// The same tensors in two shards with an index.
fn sharded() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let b: Vec<u8> = [1.5f32, -2.0]
        .iter()
        .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
        .collect();
    write(
        &folder.path().join("one.safetensors"),
        &[(
            "a",
            Dtype::F32,
            &[3, 2],
            &f32_bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        )],
    );
    write(
        &folder.path().join("two.safetensors"),
        &[
            ("b", Dtype::BF16, &[2], &b),
            ("ids", Dtype::I64, &[1], &7i64.to_le_bytes()),
        ],
    );
    write_index(
        folder.path(),
        &[
            ("a", "one.safetensors"),
            ("b", "two.safetensors"),
            ("ids", "two.safetensors"),
        ],
    );
    folder
}

fn write_index(folder: &Path, entries: &[(&str, &str)]) {
    let map: HashMap<&str, &str> = entries.iter().copied().collect();
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    fs::write(folder.join("model.safetensors.index.json"), index.to_string()).expect("writable");
}

fn message(error: &WeightsError) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "more than one line: {message}");
    message
}

#[test]
fn shards_and_a_single_file_hold_the_same() {
    let (single, sharded) = (single(), sharded());
    let (one, many) = (
        Weights::open(single.path()).unwrap(),
        Weights::open(sharded.path()).unwrap(),
    );
    assert_eq!(one.names().collect::<Vec<_>>(), ["a", "b", "ids"]);
    for name in one.names() {
        let (x, y) = (one.tensor(name).unwrap(), many.tensor(name).unwrap());
        assert_eq!(
            (x.dtype(), x.shape(), x.bytes()),
            (y.dtype(), y.shape(), y.bytes())
        );
    }
    assert_eq!(one.bytes(), 24 + 4 + 8);
    assert_eq!(one.digest(b"config"), many.digest(b"config"));
}

#[test]
fn the_digest_sees_config_names_shapes_and_dtypes_but_no_data() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let digest = |name: &str, dtype, shape: &[usize], bytes: &[u8], config: &[u8]| {
        write(&file, &[(name, dtype, shape, bytes)]);
        Weights::open(folder.path()).unwrap().digest(config)
    };
    let base = digest("a", Dtype::F32, &[2, 1], &[0; 8], b"c");
    assert_eq!(base, digest("a", Dtype::F32, &[2, 1], &[1; 8], b"c"), "data");
    assert_ne!(base, digest("b", Dtype::F32, &[2, 1], &[0; 8], b"c"), "name");
    assert_ne!(base, digest("a", Dtype::I32, &[2, 1], &[0; 8], b"c"), "dtype");
    assert_ne!(base, digest("a", Dtype::F32, &[1, 2], &[0; 8], b"c"), "shape");
    assert_ne!(base, digest("a", Dtype::F32, &[2, 1], &[0; 8], b"d"), "config");
}

#[test]
fn floats_widen_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let values = [1.0f32, -0.5, 3.25, 65504.0, -0.0, 6.1035156e-5];
    let narrow16: Vec<u8> = values
        .iter()
        .flat_map(|&x| f16::from_f32(x).to_le_bytes())
        .collect();
    let narrow: Vec<u8> = values
        .iter()
        .flat_map(|&x| bf16::from_f32(x).to_le_bytes())
        .collect();
    write(
        &folder.path().join("model.safetensors"),
        &[
            ("f32", Dtype::F32, &[3, 2], &f32_bytes(&values)),
            ("f16", Dtype::F16, &[3, 2], &narrow16),
            ("bf16", Dtype::BF16, &[3, 2], &narrow),
        ],
    );
    let weights = Weights::open(folder.path()).unwrap();
    let tensor = |name| weights.tensor(name).unwrap();
    assert_eq!(tensor("f32").to_f32().unwrap().as_ref(), values);
    assert_eq!(tensor("f16").to_f32().unwrap().as_ref(), values);
    let rounded = values.map(|x| bf16::from_f32(x).to_f32());
    assert_eq!(tensor("bf16").to_f32().unwrap().as_ref(), rounded);

    assert_eq!(tensor("f32").rows_f32(1..3).unwrap(), values[2..]);
    assert_eq!(tensor("f16").rows_f32(1..2).unwrap(), values[2..4]);
    assert_eq!(tensor("f16").rows_f32(3..3).unwrap(), [0.0f32; 0]);
    assert_eq!(
        tensor("bf16").gather_f32(&[2, 0, 2]).unwrap(),
        [4, 5, 0, 1, 4, 5].map(|i| rounded[i])
    );
}

#[test]
fn rows_outside_the_tensor_are_errors() {
    let folder = single();
    let a = Weights::open(folder.path()).unwrap().tensor("a").unwrap();
    let errors = [a.rows_f32(2..4).unwrap_err(), a.gather_f32(&[0, 3]).unwrap_err()];
    for error in errors {
        assert!(
            matches!(error, WeightsError::RowOutOfRange { row: 3, rows: 3, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_missing_tensor_suggests_the_nearest_name() {
    let folder = tempfile::tempdir().unwrap();
    write(
        &folder.path().join("model.safetensors"),
        &[("model.norm.weight", Dtype::F32, &[1], &[0; 4])],
    );
    let weights = Weights::open(folder.path()).unwrap();
    let near = message(&weights.tensor("norm.weight").unwrap_err());
    assert!(
        near.contains("no tensor `norm.weight` (the nearest name is `model.norm.weight`)"),
        "{near}"
    );
    let far = message(&weights.tensor("fc").unwrap_err());
    assert!(!far.contains("nearest"), "{far}");
}

#[test]
fn wrong_shapes_and_dtypes_are_errors() {
    let folder = single();
    let weights = Weights::open(folder.path()).unwrap();
    let shape = weights.tensor("a").unwrap().expect_shape(&[2, 3]).unwrap_err();
    let shape = message(&shape);
    assert!(
        shape.contains("tensor `a`") && shape.contains("[3, 2] where [2, 3] is needed"),
        "{shape}"
    );
    let ids = weights.tensor("ids").unwrap();
    for error in [
        ids.clone().expect_unpackable().unwrap_err(),
        ids.to_f32().map(drop).unwrap_err(),
        ids.gather_f32(&[0]).unwrap_err(),
    ] {
        let error = message(&error);
        assert!(
            error.contains("`ids`") && error.contains("I64") && error.contains("bf16, f16 or f32"),
            "{error}"
        );
    }
}

#[test]
fn folders_without_weights_say_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let error = Weights::open(folder.path().join("nowhere")).unwrap_err();
    assert!(matches!(error, WeightsError::FolderMissing { .. }), "{error}");
    let error = Weights::open(folder.path()).unwrap_err();
    assert!(matches!(error, WeightsError::NoWeights { .. }), "{error}");
    let error = Weights::open_file(folder.path().join("no.safetensors")).unwrap_err();
    assert!(matches!(error, WeightsError::Read { .. }), "{error}");
}

#[test]
fn an_index_must_fit_its_shards() {
    let folder = sharded();
    fs::remove_file(folder.path().join("two.safetensors")).unwrap();
    let error = message(&Weights::open(folder.path()).unwrap_err());
    assert!(error.contains("not beside it: `two.safetensors`"), "{error}");

    let folder = sharded();
    write_index(folder.path(), &[("a", "two.safetensors")]);
    let error = Weights::open(folder.path()).unwrap_err();
    assert!(
        matches!(&error, WeightsError::NotInShard { tensor, .. } if tensor == "a"),
        "{error}"
    );

    write_index(folder.path(), &[("a", "../one.safetensors")]);
    let error = Weights::open(folder.path()).unwrap_err();
    assert!(matches!(error, WeightsError::Index { .. }), "{error}");

    for broken in ["", "[]", "{}", "{\"weight_map\": 3}"] {
        fs::write(folder.path().join("model.safetensors.index.json"), broken).unwrap();
        let error = Weights::open(folder.path()).unwrap_err();
        assert!(matches!(error, WeightsError::Index { .. }), "{broken}: {error}");
    }
}

#[test]
fn every_cut_of_a_file_is_reported_as_truncated() {
    let folder = single();
    let file = folder.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    for length in 0..whole.len() {
        fs::write(&file, &whole[..length]).unwrap();
        let error = Weights::open(folder.path()).unwrap_err();
        assert!(
            matches!(error, WeightsError::Truncated { .. }),
            "{length} bytes: {error}"
        );
        message(&error);
    }
}

#[test]
fn foreign_and_damaged_files_are_no_safetensors_files() {
    let folder = single();
    let file = folder.path().join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    let mut longer = whole.clone();
    longer.push(0);
    let mut damaged = whole.clone();
    damaged[9] = 0xff;
    let mut overlapping = whole.clone();
    let at = overlapping.windows(4).position(|bytes| bytes == b"[3,2").unwrap();
    overlapping[at + 1] = b'9';
    let foreign = b"PK\x03\x04 a pickle in a zip, as PyTorch writes it".to_vec();
    for bytes in [longer, damaged, overlapping, foreign] {
        fs::write(&file, bytes).unwrap();
        let error = Weights::open(folder.path()).unwrap_err();
        assert!(matches!(error, WeightsError::NotSafetensors { .. }), "{error}");
        message(&error);
    }
}
