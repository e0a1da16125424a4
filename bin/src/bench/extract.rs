//! `eaglet bench extract`: hidden states of random tokens from a real verifier.

use std::io::Write;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::Args;
use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::device::Timed;
use eaglet_runtime::row::PackedRow;
use eaglet_runtime::verifier::{Alone, Shard, Verifier};
use serde::Serialize;

use super::facts::{Dtype, Limits, Machine, Spread, kernel, load, measured, peak_bytes};
use super::picture;
use super::stages::{self, Stage, Stages};
use super::train::side;

/// `eaglet bench extract`.
#[derive(Debug, Args)]
pub(crate) struct ExtractArgs {
    /// Folder or .gguf file of the verifier.
    #[arg(long, value_name = "PATH")]
    verifier: PathBuf,
    /// Tokens of the row.
    #[arg(long, default_value_t = 1024, value_parser = side)]
    tokens: usize,
    /// Documents that share the row.
    #[arg(long, default_value_t = 4, value_parser = side)]
    documents: usize,
    /// What operands of products are rounded to; bf16 needs a unit for it, and is f32 without one.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// How often a row is measured, after one to warm up.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Draw where the time goes as an SVG picture.
    #[arg(long, value_name = "FILE")]
    picture: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    limits: Limits,
    verifier: String,
    layers: usize,
    dtype: Dtype,
    kernel: &'static str,
    tokens: usize,
    documents: usize,
    tokens_per_s: Spread,
    row_seconds: Spread,
    cpu_seconds_per_row: f64,
    peak_bytes: u64,
    stages: Vec<Stage>,
}

/// Measures and prints.
///
/// # Errors
/// If the verifier cannot be loaded, threads cannot be started or `out` cannot be written to.
pub(super) fn extract(arguments: &ExtractArgs, out: &mut impl Write) -> Result<()> {
    let load_before = load();
    let (tokens, documents) = (arguments.tokens, arguments.documents);
    ensure!(
        documents <= tokens,
        "--documents {documents}: a row of {tokens} tokens has no room for them"
    );
    let device = Timed::new(arguments.dtype.device(arguments.threads)?);
    let mut verifier = Verifier::load_on(device, &arguments.verifier, None, Shard::WHOLE)?;
    let cut = |document: usize| (tokens * document / documents) as u32;
    let row = PackedRow {
        tokens: (0..tokens)
            .map(|i| (i * 7919 % verifier.vocab_size()) as u32)
            .collect(),
        loss_mask: vec![1; tokens],
        document_lengths: (0..documents).map(|d| cut(d + 1) - cut(d)).collect(),
    };
    let mut extract = || {
        verifier.extract(&row, HiddenDtype::Bf16, &mut Alone)?;
        Ok(verifier.device().take())
    };
    extract()?;
    let (mut seconds, mut cpu, mut stages) = (Vec::new(), Vec::new(), Stages::default());
    for _ in 0..arguments.repeats {
        let (took, spent) = measured(&mut extract)?;
        seconds.push(took.wall);
        cpu.push(took.cpu);
        stages.push(spent);
    }
    // Looking for the limits takes memory of its own.
    let peak_bytes = peak_bytes();
    let limits = Limits::measure(arguments.threads)?;
    let rates: Vec<f64> = seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
    let report = Report {
        bench: "extract",
        machine: Machine::look(load_before),
        verifier: arguments.verifier.display().to_string(),
        layers: verifier.config().layers,
        dtype: arguments.dtype,
        kernel: kernel(verifier.device().within()),
        tokens,
        documents,
        tokens_per_s: Spread::of(&rates),
        row_seconds: Spread::of(&seconds),
        cpu_seconds_per_row: Spread::of(&cpu).median,
        peak_bytes,
        stages: stages.medians(&limits),
        limits,
    };
    if let Some(path) = &arguments.picture {
        let title = format!(
            "hidden states of {tokens} tokens, {} layers, {} threads",
            report.layers, report.limits.threads
        );
        picture::write(path, &title, &report.stages, report.row_seconds.median)?;
    }
    super::print(&report, arguments.json, out, Report::write).context("cannot print")
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}\n{}", self.machine, self.limits)?;
        let Spread { median, min, max } = self.tokens_per_s;
        writeln!(
            out,
            "{}, {} layers, {} tokens in {} documents, {}\n\n\
             {median:.0} tokens/s ({min:.0} to {max:.0}); {:.0} MB at most, mapped weights included\n",
            self.verifier,
            self.layers,
            self.tokens,
            self.documents,
            self.kernel,
            self.peak_bytes as f64 / 1e6,
        )?;
        stages::write(&self.stages, self.row_seconds.median, out)
    }
}
