//! Verifiers against the numbers that transformers computed for them, in f32 on a CPU.
//!
//! Small copies are in `tests/golden/verifiers`; `EAGLET_GOLDEN_DIR` adds a folder with `verifiers/`, `eagle3/` and
//! `specforge/`. A golden verifier holds, for the sequences `a` and `b`: token ids, the residual stream entering each
//! layer and leaving the last, the final norm of the latter, and logits.
#![allow(
    clippy::print_stdout,
    reason = "says what was skipped and how close the numbers are"
)]

use std::error::Error;
use std::path::{Path, PathBuf};

use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{ConfigError, Verifier, VerifierConfig, VerifierOptions};
use eaglet_runtime::weights::Weights;

type Outcome = Result<(), Box<dyn Error>>;

/// Largest difference over a tensor's largest value.
const TOLERANCE: f32 = 1e-5;

fn own_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/verifiers")
}

fn shared_folder(part: &str) -> Option<PathBuf> {
    let folder = Path::new(&std::env::var_os("EAGLET_GOLDEN_DIR")?).join(part);
    folder.is_dir().then_some(folder)
}

fn tokens(golden: &Weights, name: &str) -> Result<Vec<u32>, Box<dyn Error>> {
    let view = golden.tensor(name)?;
    let (ids, _) = view.bytes().as_chunks::<8>();
    Ok(ids
        .iter()
        .map(|&id| u32::try_from(i64::from_le_bytes(id)))
        .collect::<Result<_, _>>()?)
}

fn one_document(tokens: Vec<u32>) -> PackedRow {
    let mut row = PackedRow::default();
    row.push(&Sample {
        loss_mask: vec![1; tokens.len()],
        tokens,
    });
    row
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

fn compare(what: &str, actual: &[f32], expected: &[f32], worst: &mut f32) {
    let difference = difference(actual, expected);
    assert!(difference <= TOLERANCE, "{what} differs by {difference:e}");
    *worst = worst.max(difference);
}

fn check_golden(folder: &Path, config: &VerifierConfig) -> Outcome {
    let golden = Weights::open_file(folder.join("golden.safetensors"))?;
    let options = VerifierOptions {
        threads: 2,
        aux_layers: Some(vec![1]),
    };
    let mut verifier = Verifier::load(folder, options)?;
    let mut worst = 0.0;
    for sequence in ["a", "b"] {
        let row = one_document(tokens(&golden, &format!("{sequence}.token_ids"))?);
        let residuals = verifier.residuals(&row)?;
        assert_eq!(residuals.len(), config.layers + 1);
        for (layer, residual) in residuals.iter().enumerate() {
            let name = format!("{sequence}.hidden.{layer}");
            compare(&name, residual, &golden.tensor(&name)?.to_f32()?, &mut worst);
        }
        let (normed, logits) = verifier.logits(&row)?;
        for (part, actual) in [("normed", normed), ("logits", logits)] {
            let name = format!("{sequence}.{part}");
            compare(&name, &actual, &golden.tensor(&name)?.to_f32()?, &mut worst);
        }
    }
    println!("{}: within {worst:.1e}", folder.display());
    Ok(())
}

#[test]
fn residual_streams_and_logits_are_those_of_transformers() -> Outcome {
    let mut checked = Vec::new();
    for family in [Some(own_folder()), shared_folder("verifiers")]
        .into_iter()
        .flatten()
    {
        for entry in std::fs::read_dir(family)? {
            let folder = entry?.path();
            match VerifierConfig::read(&folder) {
                Ok(config) => {
                    check_golden(&folder, &config)?;
                    checked.push(folder.file_name().unwrap_or_default().to_owned());
                }
                Err(reason @ ConfigError::UnknownModelType { .. }) => println!("skipped: {reason}"),
                Err(other) => return Err(other.into()),
            }
        }
    }
    for needed in ["llama", "llama_tied"] {
        assert!(
            checked.iter().any(|name| name == needed),
            "{needed} was not checked"
        );
    }
    Ok(())
}

#[test]
fn captured_states_are_those_the_trainers_were_given() -> Outcome {
    let Some(folder) = shared_folder("eagle3") else {
        println!("skipped: EAGLET_GOLDEN_DIR has no eagle3 folder");
        return Ok(());
    };
    let options = VerifierOptions {
        threads: 2,
        aux_layers: Some(vec![2, 3, 5]),
    };
    let mut verifier = Verifier::load(folder.join("verifier"), options)?;
    let samples = Weights::open_file(folder.join("default/samples.safetensors"))?;
    let mut row = PackedRow::default();
    let mut expected = Vec::new();
    for index in 0..3 {
        let tokens = tokens(&samples, &format!("{index}.token_ids"))?;
        row.push(&Sample {
            loss_mask: vec![1; tokens.len()],
            tokens,
        });
        expected.extend_from_slice(&samples.tensor(&format!("{index}.hidden_states"))?.to_f32()?);
    }
    let states = verifier.extract(&row, HiddenDtype::F32)?;
    let (values, _) = states.bytes.as_chunks::<4>();
    let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let mut worst = 0.0;
    compare("hidden_states", &values, &expected, &mut worst);
    println!("within {worst:.1e}");
    Ok(())
}

#[test]
fn a_sharded_verifier_equals_the_one_in_a_single_file() -> Outcome {
    let (Some(single), Some(sharded)) = (
        shared_folder("eagle3/verifier"),
        shared_folder("specforge/verifier"),
    ) else {
        println!("skipped: EAGLET_GOLDEN_DIR has no verifiers of the trainers");
        return Ok(());
    };
    let options = VerifierOptions {
        threads: 1,
        aux_layers: Some(vec![2, 3, 5]),
    };
    let mut single = Verifier::load(single, options.clone())?;
    let mut sharded = Verifier::load(sharded, options)?;
    assert_eq!(single.digest(), sharded.digest());
    let row = one_document((0..50).map(|i| i * 6).collect());
    assert!(single.logits(&row)? == sharded.logits(&row)?, "the same bits");
    Ok(())
}
