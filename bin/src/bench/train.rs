//! `eaglet bench train`: a draft's step on random states, all of whose tokens are trained.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use eaglet_runtime::device::{Buffer, Device, Timed};
use eaglet_runtime::draft::{
    Draft, DraftBatch, DraftSpec, FrozenWeights, LayerKind, RowLoad, TrainingSpec, init_parameters,
};
use eaglet_runtime::optimizer::{AdamW, AdamWSpec};
use eaglet_runtime::rope::Rope;
use serde::Serialize;

use super::device::{self, Measured, Place};
use super::facts::{Dtype, Limits, Machine, Spread, load, on_device, peak_bytes, repeated};
use super::picture;
use super::stages::{self, Stage};

/// `eaglet bench train`. The defaults are a draft for SmolLM2-135M.
#[derive(Clone, Debug, Args, Serialize)]
pub(crate) struct TrainArgs {
    /// Width of the verifier and the draft.
    #[arg(long, default_value_t = 576, value_parser = side)]
    hidden: usize,
    /// Width of the MLP.
    #[arg(long, default_value_t = 1536, value_parser = side)]
    intermediate: usize,
    /// Query heads.
    #[arg(long, default_value_t = 9, value_parser = side)]
    heads: usize,
    /// Key and value heads.
    #[arg(long, default_value_t = 3, value_parser = side)]
    kv_heads: usize,
    /// Width of a head.
    #[arg(long, default_value_t = 64, value_parser = side)]
    head_dim: usize,
    /// Tokens of the verifier.
    #[arg(long, default_value_t = 49152, value_parser = side)]
    vocab: usize,
    /// Tokens of the draft.
    #[arg(long, default_value_t = 8192, value_parser = side)]
    draft_vocab: usize,
    /// Tokens of the row.
    #[arg(long, default_value_t = 1024, value_parser = side)]
    tokens: usize,
    /// Documents that share the row.
    #[arg(long, default_value_t = 1, value_parser = side)]
    documents: usize,
    /// Steps of training-time test.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    ttt_steps: u16,
    /// Layer of the draft.
    #[arg(long, value_enum, default_value_t = Layer::Llama)]
    layer: Layer,
    /// What operands of products are rounded to; bf16 needs a unit for it, and is f32 without one.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Where to compute: cpu, or cuda:N.
    #[arg(long, default_value_t = Place::Cpu)]
    device: Place,
    /// Threads of the CPU; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// How often a step is measured, after one to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Draw where the time goes as an SVG picture.
    #[arg(long, value_name = "FILE")]
    #[serde(skip)]
    picture: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    #[serde(skip)]
    json: bool,
}

/// A side of something: at least 1, and nothing that no machine can hold.
pub(super) fn side(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(side @ 1..=1_048_576) => Ok(side),
        _ => Err("it must be between 1 and 1048576".to_owned()),
    }
}

#[derive(Clone, Copy, Debug, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Layer {
    Llama,
    Qwen3,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    bench: &'static str,
    shape: &'a TrainArgs,
    machine: Machine,
    limits: Limits,
    dtype: Dtype,
    kernel: String,
    parameters: usize,
    tokens_per_s: Spread,
    step_seconds: Spread,
    cpu_seconds_per_step: f64,
    peak_bytes: u64,
    /// Of a GPU's memory.
    device_bytes: Option<u64>,
    flops_per_token: f64,
    gflops_per_s: f64,
    stages: Vec<Stage>,
}

/// Numbers between -1 and 1 without any order to see, the same ones for the same seed.
pub(super) fn wave(length: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..length).map(|_| next()).collect()
}

/// Measures and prints.
///
/// # Errors
/// If the shape makes no draft, the device is not there or `out` cannot be written to.
pub(super) fn train(arguments: &TrainArgs, out: &mut impl Write) -> Result<()> {
    match arguments.device {
        Place::Cpu => train_on(device::cpu(arguments.dtype, arguments.threads)?, arguments, out),
        Place::Cuda(number) => train_on(device::cuda(arguments.dtype, number)?, arguments, out),
    }
}

fn train_on(device: impl Measured, arguments: &TrainArgs, out: &mut impl Write) -> Result<()> {
    let load_before = load();
    let spec = arguments.spec();
    let batch = arguments.batch()?;
    let device = Arc::new(Timed::new(device));
    let training = TrainingSpec {
        ttt_steps: usize::from(arguments.ttt_steps),
        step_loss_decay: 1.0,
    };
    let mut draft = Draft::new(spec.clone(), training, frozen(&spec), Arc::clone(&device))?;
    let initial = init_parameters(draft.layout(), 1);
    let mut parameters = device.place(initial.into(), "parameters");
    let mut gradient = Buffer::default();
    device.fit(&mut gradient, "gradient", parameters.len());
    let mut optimizer = AdamW::new(AdamWSpec::default(), &*device, parameters.len());
    let mut step = || -> Result<()> {
        let metrics = draft.gradient(&parameters, &batch, &mut gradient)?;
        ensure!(metrics.loss.is_finite(), "the loss is {}", metrics.loss);
        optimizer.update(&*device, &mut parameters, &gradient, 1e-4)?;
        device.finish();
        Ok(())
    };
    step()?;
    let (took, stages) = repeated(device.watch(), !device.is_host(), arguments.repeats, &mut step)?;
    let seconds: Vec<f64> = took.iter().map(|took| took.wall).collect();
    let cpu: Vec<f64> = took.iter().map(|took| took.cpu).collect();
    let rates: Vec<f64> = seconds
        .iter()
        .map(|seconds| batch.len() as f64 / seconds)
        .collect();
    // Looking for the limits takes memory of its own.
    let peak_bytes = peak_bytes();
    let device_bytes = device.within().held_bytes();
    let limits = device.within().limits()?;
    let cost = spec.row_cost(&RowLoad {
        positions: batch.len(),
        active: batch.len(),
        steps: training.ttt_steps,
        visible: (batch.len() / arguments.documents) as f64 / 2.0,
    });
    let step_seconds = Spread::of(&seconds);
    let report = Report {
        bench: "train",
        shape: arguments,
        machine: Machine::look(load_before),
        dtype: arguments.dtype,
        kernel: device.within().kernel(),
        parameters: parameters.len(),
        tokens_per_s: Spread::of(&rates),
        step_seconds,
        cpu_seconds_per_step: Spread::of(&cpu).median,
        peak_bytes,
        device_bytes,
        flops_per_token: cost.flops / batch.len() as f64,
        gflops_per_s: cost.flops / step_seconds.median / 1e9,
        stages: stages.medians(&limits),
        limits,
    };
    if let Some(path) = &arguments.picture {
        let title = format!(
            "a training step, {} tokens of width {}, {}",
            arguments.tokens, arguments.hidden, report.limits.of
        );
        picture::write(path, &title, &report.stages, report.step_seconds.median)?;
    }
    super::print(&report, arguments.json, out, Report::write).context("cannot print")
}

impl TrainArgs {
    fn spec(&self) -> DraftSpec {
        DraftSpec {
            layer: match self.layer {
                Layer::Llama => LayerKind::Llama,
                Layer::Qwen3 => LayerKind::Qwen3,
            },
            hidden_size: self.hidden,
            intermediate_size: self.intermediate,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            vocab_size: self.vocab,
            draft_vocab_size: self.draft_vocab,
            aux_layers: 3,
            rms_norm_eps: 1e-5,
            rope: Rope::new(100_000.0, self.head_dim),
            sliding_window: None,
            norm_before_residual: true,
            norm_before_fc: true,
            fc_norm: false,
            norm_output: true,
        }
    }

    fn batch(&self) -> Result<DraftBatch> {
        let (tokens, documents) = (self.tokens, self.documents);
        ensure!(
            documents <= tokens,
            "--documents {documents}: a row of {tokens} tokens has no room for them"
        );
        let cut = |document: usize| tokens * document / documents;
        let documents: Vec<_> = (0..documents).map(|d| cut(d)..cut(d + 1)).collect();
        Ok(DraftBatch {
            sent: None,
            tokens: (0..tokens).map(|i| (i * 7919 % self.vocab) as u32).collect(),
            hidden: wave(tokens * 3 * self.hidden, 1),
            last_hidden: wave(tokens * self.hidden, 2),
            loss_mask: vec![1; tokens],
            position_ids: documents
                .iter()
                .flat_map(|document| 1..=document.len() as u32)
                .collect(),
            documents,
        })
    }
}

fn frozen(spec: &DraftSpec) -> FrozenWeights {
    let small = |length: usize, seed: u32| -> Arc<[f32]> {
        wave(length, seed).iter().map(|value| value * 0.1).collect()
    };
    let head = small(spec.draft_vocab_size * spec.hidden_size, 3);
    FrozenWeights {
        embed: small(spec.vocab_size * spec.hidden_size, 4),
        verifier_head: Arc::clone(&head),
        verifier_norm: vec![1.0; spec.hidden_size].into(),
        verifier_norm_eps: 1e-5,
        lm_head: head,
    }
}

impl Report<'_> {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}\n{}", self.machine, self.limits)?;
        let Spread { median, min, max } = self.tokens_per_s;
        writeln!(
            out,
            "{:.1} M parameters, {} tokens in {} documents, {} TTT steps, {}\n\n\
             {median:.0} tokens/s ({min:.0} to {max:.0}); {:.0} MFLOP per token, {:.0} GFLOP/s, {:.0} % of the limit; \
             {:.0} MB at most{}\n",
            self.parameters as f64 / 1e6,
            self.shape.tokens,
            self.shape.documents,
            self.shape.ttt_steps,
            self.kernel,
            self.flops_per_token / 1e6,
            self.gflops_per_s,
            100.0 * self.gflops_per_s / self.limits.gflops,
            self.peak_bytes as f64 / 1e6,
            on_device(self.device_bytes),
        )?;
        stages::write(&self.stages, self.step_seconds.median, out)
    }
}
