//! `eaglet bench extract`: hidden states of random tokens from a real verifier.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use clap::Args;
use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::device::{Device, Timed};
use eaglet_runtime::row::PackedRow;
use eaglet_runtime::verifier::{Alone, Shard, Verifier};
use serde::Serialize;

use super::device::{self, Measured, Place};
use super::facts::{Dtype, Limits, Machine, Spread, load, on_device, peak_bytes, repeated};
use super::picture;
use super::stages::{self, Stage};
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
    /// Where to compute: cpu, or cuda:N.
    #[arg(long, default_value_t = Place::Cpu)]
    device: Place,
    /// Threads of the CPU; 0 for one per core.
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
    kernel: String,
    tokens: usize,
    documents: usize,
    tokens_per_s: Spread,
    row_seconds: Spread,
    cpu_seconds_per_row: f64,
    peak_bytes: u64,
    /// Of a GPU's memory.
    device_bytes: Option<u64>,
    stages: Vec<Stage>,
}

/// Measures and prints.
///
/// # Errors
/// If the verifier cannot be loaded, the device is not there or `out` cannot be written to.
pub(super) fn extract(arguments: &ExtractArgs, out: &mut impl Write) -> Result<()> {
    match arguments.device {
        Place::Cpu => extract_on(device::cpu(arguments.dtype, arguments.threads)?, arguments, out),
        Place::Cuda(number) => extract_on(device::cuda(arguments.dtype, number)?, arguments, out),
    }
}

fn extract_on(device: impl Measured, arguments: &ExtractArgs, out: &mut impl Write) -> Result<()> {
    let load_before = load();
    let (tokens, documents) = (arguments.tokens, arguments.documents);
    ensure!(
        documents <= tokens,
        "--documents {documents}: a row of {tokens} tokens has no room for them"
    );
    let device = Timed::new(device);
    let (watch, runs_ahead) = (Arc::clone(device.watch()), !device.is_host());
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
        Ok(())
    };
    extract()?;
    let (took, stages) = repeated(&watch, runs_ahead, arguments.repeats, &mut extract)?;
    let seconds: Vec<f64> = took.iter().map(|took| took.wall).collect();
    let cpu: Vec<f64> = took.iter().map(|took| took.cpu).collect();
    // Looking for the limits takes memory of its own.
    let peak_bytes = peak_bytes();
    let device = verifier.device();
    let device_bytes = device.within().held_bytes();
    let limits = device.within().limits()?;
    let rates: Vec<f64> = seconds.iter().map(|seconds| tokens as f64 / seconds).collect();
    let report = Report {
        bench: "extract",
        machine: Machine::look(load_before),
        verifier: arguments.verifier.display().to_string(),
        layers: verifier.config().layers,
        dtype: arguments.dtype,
        kernel: device.within().kernel(),
        tokens,
        documents,
        tokens_per_s: Spread::of(&rates),
        row_seconds: Spread::of(&seconds),
        cpu_seconds_per_row: Spread::of(&cpu).median,
        peak_bytes,
        device_bytes,
        stages: stages.medians(&limits),
        limits,
    };
    if let Some(path) = &arguments.picture {
        let title = format!(
            "hidden states of {tokens} tokens, {} layers, {}",
            report.layers, report.limits.of
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
             {median:.0} tokens/s ({min:.0} to {max:.0}); {:.0} MB at most, mapped weights included{}\n",
            self.verifier,
            self.layers,
            self.tokens,
            self.documents,
            self.kernel,
            self.peak_bytes as f64 / 1e6,
            on_device(self.device_bytes),
        )?;
        stages::write(&self.stages, self.row_seconds.median, out)
    }
}
