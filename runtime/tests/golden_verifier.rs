//! Verifiers against the numbers that transformers computed for them, in f32 on a CPU.
//!
//! Small copies are in `tests/golden/verifiers`; `EAGLET_GOLDEN_DIR` adds a folder with `verifiers/`, `eagle3/` and
//! `specforge/`. A golden verifier holds, for the sequences `a` and `b`: token ids, the residual stream entering each
//! layer and leaving the last, the final norm of the latter, and logits.
#![allow(
    clippy::print_stdout,
    reason = "says what was skipped and how close the numbers are"
)]

mod common;
#[path = "cuda/stack.rs"]
#[allow(dead_code)]
mod stack;

use std::error::Error;
use std::path::Path;

use common::{difference, model_folders, shared_folder};
use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::cuda::{Cuda, Precision};
use eaglet_runtime::device::{Cpu, Device};
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{
    Alone, LayerConfig, MlpConfig, Shard, Verifier, VerifierConfig, VerifierFiles, VerifierOptions,
};
use eaglet_runtime::weights::Weights;

type Outcome = Result<(), Box<dyn Error>>;

/// Models that the repository carries.
const OWN: [&str; 19] = [
    "deepseek_fp8",
    "deepseek_no_query_latent",
    "deepseek_v3",
    "gemma",
    "gemma2",
    "gemma3",
    "gpt_oss",
    "gpt_oss_mxfp4",
    "kimi_k25_int4",
    "llama",
    "llama3_rope",
    "llama_tied",
    "mistral",
    "mixtral",
    "phi3_partial",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3_nope",
];

/// Largest difference over a tensor's largest value.
const TOLERANCE: f32 = 1e-5;
/// Largest error of a tensor with products of bf16, root mean square of the differences over that of the values; 0.022 was
/// measured.
const BF16_TOLERANCE: f32 = 0.03;
/// The same of four elements in five, where tokens go to experts: one whose experts are nearly tied, as those of random
/// routers are, may go to another one, and then its whole row differs.
const BF16_EXPERTS_TOLERANCE: f32 = 0.06;

/// How far numbers are apart, and how far they may be.
#[derive(Clone, Copy)]
struct Measure {
    distance: fn(&[f32], &[f32]) -> f32,
    tolerance: f32,
}

const EXACT: Measure = Measure {
    distance: difference,
    tolerance: TOLERANCE,
};

/// For products of bf16.
fn rounded(config: &VerifierConfig) -> Measure {
    let has_experts = |layer: &LayerConfig| matches!(layer.mlp, MlpConfig::Experts(_));
    match config.blocks.iter().any(has_experts) {
        true => Measure {
            distance: of_four_in_five,
            tolerance: BF16_EXPERTS_TOLERANCE,
        },
        false => Measure {
            distance: root_mean_square,
            tolerance: BF16_TOLERANCE,
        },
    }
}

/// What four differences in five are at most, over the root mean square of the values.
fn of_four_in_five(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let mut apart: Vec<f32> = actual.iter().zip(expected).map(|(a, b)| (a - b).abs()).collect();
    apart.sort_by(f32::total_cmp);
    let squares: f32 = expected.iter().map(|b| b * b).sum();
    apart[apart.len() * 4 / 5] / (squares / expected.len() as f32).sqrt()
}

fn root_mean_square(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let square = |x: f32| f64::from(x) * f64::from(x);
    let apart: f64 = actual.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    let whole: f64 = expected.iter().map(|&b| square(b)).sum();
    (apart / whole).sqrt() as f32
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

fn compare(what: &str, actual: &[f32], expected: &[f32], worst: &mut f32, measure: Measure) -> Outcome {
    let difference = (measure.distance)(actual, expected);
    *worst = worst.max(difference);
    if difference <= measure.tolerance {
        return Ok(());
    }
    Err(format!("{what} differs by {difference:e}").into())
}

/// Compares a loaded verifier's numbers with the golden ones.
fn check_golden(folder: &Path, verifier: &mut Verifier<impl Device>, measure: Measure) -> Outcome {
    let golden = Weights::open_file(folder.join("golden.safetensors"))?;
    let layers = verifier.config().layers;
    let compare = |what: &str, actual: &[f32], expected: &[f32], worst: &mut f32| {
        compare(what, actual, expected, worst, measure)
    };
    let mut worst = 0.0;
    for sequence in ["a", "b"] {
        let row = one_document(tokens(&golden, &format!("{sequence}.token_ids"))?);
        let residuals = verifier.residuals(&row, &mut Alone)?;
        assert_eq!(residuals.len(), layers + 1);
        for (layer, residual) in residuals.iter().enumerate() {
            let name = format!("{sequence}.hidden.{layer}");
            compare(&name, residual, &golden.tensor(&name)?.to_f32()?, &mut worst)?;
        }
        let (normed, logits) = verifier.logits(&row, &mut Alone)?;
        for (part, actual) in [("normed", normed), ("logits", logits)] {
            let name = format!("{sequence}.{part}");
            compare(&name, &actual, &golden.tensor(&name)?.to_f32()?, &mut worst)?;
        }
    }
    println!("{}: within {worst:.1e}", folder.display());
    Ok(())
}

#[test]
fn residual_streams_and_logits_are_those_of_transformers() -> Outcome {
    let (mut checked, mut wrong) = (Vec::new(), Vec::new());
    for folder in model_folders() {
        let outcome =
            load(Cpu::new(2)?, &folder).and_then(|mut verifier| check_golden(&folder, &mut verifier, EXACT));
        if let Err(error) = outcome {
            wrong.push(format!("{}: {error}", folder.display()));
        }
        checked.push(folder.file_name().unwrap_or_default().to_owned());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    for needed in OWN {
        assert!(
            checked.iter().any(|name| name == needed),
            "{needed} was not checked"
        );
    }
    Ok(())
}

fn load<D: Device>(device: D, folder: &Path) -> Result<Verifier<D>, Box<dyn Error>> {
    Ok(Verifier::load_on(device, folder, Some(vec![1]), Shard::WHOLE)?)
}

/// Loads a golden verifier on a GPU, and compares what it holds there with what was said beforehand.
fn load_on_cuda(device: Cuda, folder: &Path) -> Result<Verifier<Cuda>, Box<dyn Error>> {
    let expected = VerifierFiles::open(folder)?.gpu_bytes(Shard::WHOLE, device.products());
    let verifier = load(device, folder)?;
    let holders = verifier.device().holders().0;
    for (name, bytes) in [
        ("weights", expected.weights),
        ("vectors of layers", expected.vectors),
    ] {
        let held = holders.iter().find(|(holder, _)| *holder == name);
        let held = held.map_or(0, |&(_, bytes)| bytes as u64);
        assert_eq!(held, bytes, "{name} of {}", folder.display());
    }
    Ok(verifier)
}

/// The same numbers, with every operation on a GPU or on what stands in for one.
#[test]
fn residual_streams_and_logits_on_cuda_are_those_of_transformers() -> Outcome {
    check_on_cuda(Precision::F32, |_| EXACT)
}

/// Products of bf16 differ by the rounding of their factors, 2^-9 each.
#[test]
fn residual_streams_and_logits_in_bf16_on_cuda_are_near_those_of_transformers() -> Outcome {
    check_on_cuda(Precision::Bf16, rounded)
}

fn check_on_cuda(precision: Precision, measure: fn(&VerifierConfig) -> Measure) -> Outcome {
    let (Some(search), Some(cache)) = (stack::search(), stack::cache()) else {
        return Ok(());
    };
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/verifiers");
    let mut wrong = Vec::new();
    for name in OWN {
        let (folder, device) = (own.join(name), Cuda::new(&search, 0, cache.clone(), precision)?);
        let outcome = load_on_cuda(device, &folder).and_then(|mut verifier| {
            let measure = measure(verifier.config());
            check_golden(&folder, &mut verifier, measure)
        });
        if let Err(error) = outcome {
            wrong.push(format!("{name}: {error}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
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
        ..VerifierOptions::default()
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
    let states = verifier.extract(&row, HiddenDtype::F32, &mut Alone)?;
    let (values, _) = states.bytes.as_chunks::<4>();
    let values: Vec<f32> = values.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect();
    let mut worst = 0.0;
    compare("hidden_states", &values, &expected, &mut worst, EXACT)?;
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
        ..VerifierOptions::default()
    };
    let mut single = Verifier::load(single, options.clone())?;
    let mut sharded = Verifier::load(sharded, options)?;
    assert_eq!(single.digest(), sharded.digest());
    let row = one_document((0..50).map(|i| i * 6).collect());
    assert!(
        single.logits(&row, &mut Alone)? == sharded.logits(&row, &mut Alone)?,
        "the same bits"
    );
    Ok(())
}
