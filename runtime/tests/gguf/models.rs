//! Models compute the same from a GGUF file as from the folder it was made from.
//!
//! Real models: `EAGLET_REAL_DIR=DIR cargo test --release --workspace --test gguf -- --nocapture real`, where DIR has
//! `models/smollm2-135m` (safetensors, SmolLM2-135M-Instruct) and, if wanted, `models/SmolLM2-135M-Instruct.*.gguf` as
//! llama.cpp converts it. Each `models/*.peer.safetensors` that `tests/peers/gguf_logits.py` wrote is compared, too.
#![allow(
    clippy::print_stdout,
    reason = "says what was skipped and how close the numbers are"
)]

use std::path::{Path, PathBuf};

use eaglet_runtime::model_files::ModelFiles;
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::samples::ChatTokenizer;
use eaglet_runtime::verifier::{Alone, FrozenParts, Verifier, VerifierConfig, VerifierOptions};
use eaglet_runtime::weights::Weights;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::convert::{architecture, convert};
use super::quantise::Storage;
use super::{golden, written};

/// Largest difference over the largest value where one is added to norms and taken off again.
const NORM_TOLERANCE: f32 = 1e-5;

fn load(path: &Path) -> Verifier {
    let options = VerifierOptions {
        threads: 2,
        aux_layers: Some(vec![1]),
        ..VerifierOptions::default()
    };
    Verifier::load(path, options).unwrap_or_else(|error| panic!("{error}"))
}

fn row(tokens: Vec<u32>) -> PackedRow {
    let mut row = PackedRow::default();
    row.push(&Sample {
        loss_mask: vec![1; tokens.len()],
        tokens,
    });
    row
}

/// Residual streams of all layers, final norm and logits, one behind the other.
fn everything(path: &Path, vocab_size: usize) -> Vec<f32> {
    let tokens = (0..40).map(|i: u32| (i * i * 7 + i * 3 + 5) % vocab_size as u32);
    let row = row(tokens.collect());
    let mut verifier = load(path);
    let mut all = verifier
        .residuals(&row, &mut Alone)
        .unwrap_or_else(|error| panic!("{error}"))
        .concat();
    let (normed, logits) = verifier
        .logits(&row, &mut Alone)
        .unwrap_or_else(|error| panic!("{error}"));
    all.extend(normed.iter().chain(&logits));
    all
}

/// Largest difference over the largest expected value.
fn difference(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected
        .iter()
        .fold(0.0f32, |largest, value| largest.max(value.abs()));
    let worst = actual.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // NaN must not be lost in the maximum.
    worst.fold(0.0, |worst, x| if x <= worst { worst } else { x }) / largest
}

/// Writes a model anew with its matrices rounded to another float type, in f32.
fn rounded(folder: &Path, to: &Path, storage: Storage) {
    let narrow = |value: f32| match storage {
        Storage::F16 => half::f16::from_f32(value).to_f32(),
        Storage::Bf16 => half::bf16::from_f32(value).to_f32(),
        _ => value,
    };
    let weights = Weights::open(folder).expect("weights");
    let stored: Vec<(String, Vec<usize>, Vec<u8>)> = weights
        .names()
        .map(|name| {
            let view = weights.tensor(name).expect("it was named");
            let values = view.to_f32().expect("floats");
            let matrix = view.shape().len() > 1;
            let values = values
                .iter()
                .map(|&value| if matrix { narrow(value) } else { value });
            (
                name.to_owned(),
                view.shape().to_vec(),
                values.flat_map(f32::to_le_bytes).collect(),
            )
        })
        .collect();
    let views = stored.iter().map(|(name, shape, bytes)| {
        (
            name,
            TensorView::new(Dtype::F32, shape.clone(), bytes).expect("bytes fit the shape"),
        )
    });
    safetensors::serialize_to_file(views, None, &to.join("model.safetensors")).expect("it is writable");
    for name in ["config.json", "generation_config.json"] {
        if folder.join(name).is_file() {
            let text = std::fs::read_to_string(folder.join(name)).expect("it can be read");
            // Windows of Qwen are nothing that a GGUF file could say.
            let text = text.replace("\"use_sliding_window\": true", "\"use_sliding_window\": false");
            std::fs::write(to.join(name), text).expect("it is writable");
        }
    }
}

/// Golden models: the project's own and those of `EAGLET_GOLDEN_DIR`.
fn golden_models() -> Vec<PathBuf> {
    let own = golden("../verifiers");
    let more = std::env::var_os("EAGLET_GOLDEN_DIR").map(|folder| Path::new(&folder).join("verifiers"));
    let folders = [Some(own), more]
        .into_iter()
        .flatten()
        .filter(|folder| folder.is_dir());
    folders
        .flat_map(|folder| std::fs::read_dir(folder).expect("a folder"))
        .map(|entry| entry.expect("an entry").path())
        .collect()
}

#[test]
fn a_file_of_the_reference_writer_computes_as_its_folder() {
    let (folder, file) = (golden("tiny"), golden("tiny/model.gguf"));
    let config = |path: &Path| VerifierConfig::read(path).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(config(&file), config(&folder));
    assert!(everything(&file, 64) == everything(&folder, 64), "the same bits");

    // In the folder's order, though the file has another.
    let weights = |path: &Path| {
        ModelFiles::open(path)
            .expect("it opens")
            .weights()
            .expect("weights")
    };
    let (from_file, from_folder) = (weights(&file), weights(&folder));
    assert!(from_file.names().eq(from_folder.names()));
    for name in from_folder.names() {
        let (one, other) = (
            from_file.tensor(name).expect("it is"),
            from_folder.tensor(name).expect("it is"),
        );
        assert_eq!(one.shape(), other.shape(), "{name}");
        assert_eq!(
            one.to_f32().expect("floats"),
            other.to_f32().expect("floats"),
            "{name}"
        );
        let moved = name.contains("q_proj") || name.contains("k_proj");
        assert_eq!(one.bytes() != other.bytes(), moved, "{name}");
    }
    let parts = |path: &Path| FrozenParts::load(path, &[63, 0, 7]).unwrap_or_else(|error| panic!("{error}"));
    let (one, other) = (parts(&file), parts(&folder));
    assert_eq!(one.embedding, other.embedding);
    assert_eq!(one.head_rows, other.head_rows);
    assert_eq!(one.final_norm, other.final_norm);
}

#[test]
fn every_family_computes_from_gguf_as_from_its_folder() {
    let mut checked = Vec::new();
    for folder in golden_models() {
        // Families and forms that the verifier does not know are its own tests' business.
        let Ok(config) = VerifierConfig::read(&folder) else {
            continue;
        };
        if architecture(&config.model_type).is_none() {
            println!("skipped: {} is not converted", folder.display());
            continue;
        }
        for storage in [Storage::F32, Storage::F16, Storage::Bf16] {
            let (_kept, file) = written(&convert(&folder, storage).bytes());
            let copy = tempfile::tempdir().expect("a temporary folder");
            rounded(&folder, copy.path(), storage);
            let (actual, expected) = (
                everything(&file, config.vocab_size),
                everything(copy.path(), config.vocab_size),
            );
            if config.model_type.starts_with("gemma") {
                let difference = difference(&actual, &expected);
                assert!(
                    difference <= NORM_TOLERANCE,
                    "{storage:?} {}: {difference:e}",
                    folder.display()
                );
            } else {
                assert!(
                    actual == expected,
                    "{storage:?} {}: the same bits",
                    folder.display()
                );
            }
        }
        checked.push(config.model_type);
    }
    assert!(
        checked.iter().any(|model_type| model_type == "llama"),
        "{checked:?}"
    );
    println!("the same from gguf: {}", checked.join(", "));
}

/// Mean over positions of the Kullback-Leibler divergence in nats of the second from the first, and the share of
/// positions with the same most likely token.
fn divergence(expected: &[f32], actual: &[f32], vocab_size: usize) -> (f64, f64) {
    let log_softmax = |logits: &[f32]| -> Vec<f64> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&x| f64::from(x - largest).exp()).sum();
        logits
            .iter()
            .map(|&x| f64::from(x - largest) - sum.ln())
            .collect()
    };
    let most = |values: &[f64]| (0..values.len()).max_by(|&a, &b| values[a].total_cmp(&values[b]));
    let (mut sum, mut same, mut positions) = (0.0, 0.0, 0.0);
    for (expected, actual) in expected
        .chunks_exact(vocab_size)
        .zip(actual.chunks_exact(vocab_size))
    {
        let (expected, actual) = (log_softmax(expected), log_softmax(actual));
        sum += expected
            .iter()
            .zip(&actual)
            .map(|(p, q)| p.exp() * (p - q))
            .sum::<f64>();
        same += f64::from(u8::from(most(&expected) == most(&actual)));
        positions += 1.0;
    }
    (sum / positions, same / positions)
}

const TEXT: &str = "<|im_start|>user\nWhy is the sky blue, and why are sunsets red?<|im_end|>\n<|im_start|>assistant\n\
    The sky is blue because molecules of the air scatter short waves of sunlight more than long ones. In the evening \
    the light takes a longer way through the air, so that most of the blue is lost on the way and red is left. \
    In 1871 Lord Rayleigh computed that the scattering grows with the fourth power of the frequency.<|im_end|>\n";

#[test]
fn real_models_differ_by_the_error_of_their_quantiser() {
    let Some(models) = std::env::var_os("EAGLET_REAL_DIR").map(|folder| Path::new(&folder).join("models"))
    else {
        println!("skipped: EAGLET_REAL_DIR names no folder with models/smollm2-135m");
        return;
    };
    let folder = models.join("smollm2-135m");
    let tokenizer = ChatTokenizer::load(&folder).unwrap_or_else(|error| panic!("{error}"));
    let row = row(tokenizer.encode(TEXT).expect("it encodes"));
    let vocab_size = VerifierConfig::read(&folder).expect("a configuration").vocab_size;
    let logits = |path: &Path| {
        load(path)
            .logits(&row, &mut Alone)
            .unwrap_or_else(|error| panic!("{error}"))
            .1
    };
    let expected = logits(&folder);
    for (storage, most) in [
        (Storage::Bf16, 0.0),
        (Storage::Q8_0, 2e-3),
        (Storage::Q6_K, 2e-2),
        (Storage::Q4_1, 0.3),
        (Storage::Q4_K, 0.3),
        (Storage::Q4_0, 0.7),
    ] {
        let (_kept, file) = written(&convert(&folder, storage).bytes());
        let bytes = ModelFiles::open(&file)
            .expect("it opens")
            .weights()
            .expect("weights")
            .bytes();
        let (nats, same) = divergence(&expected, &logits(&file), vocab_size);
        println!(
            "{storage:?}: {nats:.5} nats, {:.1} % the same token, {} MB",
            100.0 * same,
            bytes / 1_000_000
        );
        assert!(nats <= most, "{storage:?}: {nats} nats");
    }
    for entry in std::fs::read_dir(&models).expect("a folder") {
        let file = entry.expect("an entry").path();
        let name = file
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if name.starts_with("SmolLM2-135M-Instruct.") && name.ends_with(".gguf") {
            let (nats, same) = divergence(&expected, &logits(&file), vocab_size);
            println!("{name}: {nats:.5} nats, {:.1} % the same token", 100.0 * same);
            assert!(nats <= 0.5, "{name}: {nats} nats");
        }
    }
}

/// Values of a tensor of i64.
fn whole_numbers(weights: &Weights, name: &str) -> Vec<u32> {
    let view = weights.tensor(name).expect("the peer's file is whole");
    let (numbers, _) = view.bytes().as_chunks::<8>();
    let numbers = numbers
        .iter()
        .map(|&number| u32::try_from(i64::from_le_bytes(number)));
    numbers.collect::<Result<_, _>>().expect("ids and positions")
}

#[test]
fn real_files_of_llama_cpp_compute_as_in_transformers() {
    let Some(models) = std::env::var_os("EAGLET_REAL_DIR").map(|folder| Path::new(&folder).join("models"))
    else {
        println!("skipped: EAGLET_REAL_DIR names no folder with models/*.peer.safetensors");
        return;
    };
    for entry in std::fs::read_dir(&models).expect("a folder") {
        let peer = entry.expect("an entry").path();
        let name = peer
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let Some(stem) = name.strip_suffix(".peer.safetensors") else {
            continue;
        };
        let weights = Weights::open_file(&peer).unwrap_or_else(|error| panic!("{error}"));
        let mut verifier = load(&models.join(format!("{stem}.gguf")));
        let vocab_size = verifier.vocab_size();
        let row = row(whole_numbers(&weights, "token_ids"));
        let (_, logits) = verifier
            .logits(&row, &mut Alone)
            .unwrap_or_else(|error| panic!("{error}"));
        let positions = whole_numbers(&weights, "positions");
        let kept = positions
            .iter()
            .map(|&position| &logits[position as usize * vocab_size..][..vocab_size]);
        let kept: Vec<f32> = kept.flatten().copied().collect();
        let expected = weights.tensor("logits").expect("the peer's file is whole");
        let expected = expected.to_f32().expect("floats");
        let difference = difference(&kept, &expected);
        println!("{stem}: within {difference:.1e} of transformers");
        assert!(difference <= 1e-4, "{stem}: {difference:e}");
    }
}
