//! Unpacked values have the bits that gguf-py computes, whichever rows are asked for.

use eaglet_runtime::gguf::Gguf;
use eaglet_runtime::weights::{Encoding, TensorView};

use super::quantise::Storage;
use super::writer::Writer;
use super::{golden, written};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn every_format_unpacks_to_the_bits_of_the_reference() {
    let gguf = Gguf::open(golden("blocks.gguf")).expect("it opens");
    let tensor = |name: &str| gguf.tensors().find(|tensor| tensor.name() == name).cloned();
    let mut formats = Vec::new();
    for expected in gguf.tensors() {
        let Some(name) = expected.name().strip_suffix(".f32") else {
            continue;
        };
        let stored = tensor(name)
            .expect("each has its blocks")
            .expect_unpackable()
            .expect("it is known");
        assert_eq!(stored.encoding().to_string(), name);
        assert_eq!(stored.shape(), expected.shape());
        let expected = expected.as_f32().expect("they are f32");
        assert_eq!(bits(&stored.to_f32().expect("floats")), bits(expected), "{name}");
        rows_alone(&stored, expected);
        formats.push(name.to_owned());
    }
    assert_eq!(formats.len(), 12, "{formats:?}");
}

/// All ranges of rows, and rows in any order.
fn rows_alone(stored: &TensorView, expected: &[f32]) {
    let (rows, len) = (stored.rows(), stored.row_len());
    for start in 0..=rows {
        for end in start..=rows {
            let mut out = vec![f32::NAN; (end - start) * len];
            stored.unpack_rows(start..end, &mut out);
            assert_eq!(
                bits(&out),
                bits(&expected[start * len..end * len]),
                "{stored:?} {start}..{end}"
            );
        }
    }
    let last = rows as u32 - 1;
    let gathered = stored.gather_f32(&[last, 0, last]).expect("they are there");
    let row = |row: u32| &expected[row as usize * len..][..len];
    assert_eq!(bits(&gathered), bits(&[row(last), row(0), row(last)].concat()));
    assert!(stored.gather_f32(&[rows as u32]).is_err());
}

#[test]
fn a_list_in_blocks_is_read_element_by_element() {
    let values: Vec<f32> = (0..96).map(|i| i as f32 - 40.0).collect();
    let mut writer = Writer::new("list");
    writer.tensor("list", &[96], &values, Storage::Q8_0);
    let (_folder, file) = written(&writer.bytes());
    let gguf = Gguf::open(file).expect("it opens");
    let list = gguf.tensors().next().expect("one tensor");
    let whole = list.to_f32().expect("floats");
    assert!(
        whole
            .iter()
            .zip(&values)
            .all(|(read, value)| (read - value).abs() < 0.3)
    );
    let expected = |range: std::ops::Range<usize>| bits(&whole[range]);
    for range in [3..5, 30..34, 31..97 - 1, 0..96, 64..64] {
        let mut out = vec![f32::NAN; range.len()];
        list.unpack_rows(range.clone(), &mut out);
        assert_eq!(bits(&out), expected(range));
    }
}

#[test]
fn what_is_stored_comes_back_within_half_a_step() {
    let values: Vec<f32> = (0..512).map(|i| ((i * 37 % 101) as f32 - 50.0) / 77.0).collect();
    let span = 100.0 / 77.0;
    for (storage, steps) in [
        (Storage::Q4_0, 16.0),
        (Storage::Q4_1, 15.0),
        (Storage::Q8_0, 254.0),
        (Storage::Q4_K, 14.0),
        (Storage::Q6_K, 61.0),
        (Storage::F16, 2048.0),
        (Storage::Bf16, 256.0),
    ] {
        let mut writer = Writer::new("values");
        writer.tensor("values", &[2, 256], &values, storage);
        let (_folder, file) = written(&writer.bytes());
        let gguf = Gguf::open(file).expect("it opens");
        let read = gguf
            .tensors()
            .next()
            .expect("one tensor")
            .to_f32()
            .expect("floats")
            .into_owned();
        let worst = read
            .iter()
            .zip(&values)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        // Half a step, and a little for the rounding of scales; Q4_0 loses a whole step at the end without a value.
        let allowed = if storage == Storage::Q4_0 { 1.01 } else { 0.56 };
        assert!(worst <= allowed * span / steps, "{storage:?}: {worst}");
    }
}

#[test]
fn types_that_cannot_be_unpacked_are_told_when_they_are_used() {
    let mut writer = Writer::new("values");
    writer.stored("values", &[1, 256], 16, vec![0; 66]);
    let (_folder, file) = written(&writer.bytes());
    let gguf = Gguf::open(file).expect("it opens");
    let tensor = gguf.tensors().next().expect("one tensor").clone();
    assert_eq!(tensor.encoding(), Encoding::Other("IQ2_XXS"));
    let error = tensor.expect_unpackable().expect_err("it cannot").to_string();
    assert!(
        error.contains("tensor `values`") && error.contains("stored as IQ2_XXS; convert it"),
        "{error}"
    );
}
