//! `eaglet bench gemm`: products `[M, K] x [N, K]ᵀ`, the shape of a linear layer.

use std::io::Write;
use std::str::FromStr;

use anyhow::{Context, Result};
use clap::Args;
use eaglet_runtime::device::{Cpu, Device, Matrix, MatrixMut};
use serde::Serialize;

use super::device::{self, Measured};
use super::facts::{Dtype, Limits, Machine, Spread, load, measured};
use super::train::wave;
use crate::table::Table;

/// `eaglet bench gemm`.
#[derive(Debug, Args)]
pub(crate) struct GemmArgs {
    /// A product of [M, K] by [N, K] transposed; may be repeated. The default are four that drafts and verifiers have.
    #[arg(long = "shape", value_name = "MxKxN")]
    shapes: Vec<Shape>,
    /// What operands of products are rounded to; bf16 needs a unit for it, and is f32 without one.
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Threads; 0 for one per core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// How often each product is measured, after once to warm up.
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Sides of a product.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Shape {
    m: usize,
    k: usize,
    n: usize,
}

/// Elements of an operand at most: 16 GiB.
const MOST_ELEMENTS: usize = 4 << 30;

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let sides: Option<Vec<usize>> = text
            .split('x')
            .map(|side| side.parse().ok().filter(|&side| side > 0))
            .collect();
        let Some(&[m, k, n]) = sides.as_deref() else {
            return Err(format!("{text:?} is not MxKxN, such as 2048x1728x576"));
        };
        for (rows, cols) in [(m, k), (k, n), (m, n)] {
            if rows
                .checked_mul(cols)
                .is_none_or(|elements| elements > MOST_ELEMENTS)
            {
                return Err(format!("a matrix of {rows} x {cols} does not fit into 16 GiB"));
            }
        }
        Ok(Self { m, k, n })
    }
}

#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    limits: Limits,
    cases: Vec<Case>,
}

#[derive(Debug, Serialize)]
struct Case {
    m: usize,
    k: usize,
    n: usize,
    dtype: Dtype,
    kernel: String,
    threads: usize,
    seconds: Spread,
    gflops: Spread,
    cpu_seconds: f64,
}

/// Measures and prints.
///
/// # Errors
/// If threads cannot be started or `out` cannot be written to.
pub(super) fn gemm(arguments: &GemmArgs, out: &mut impl Write) -> Result<()> {
    let load_before = load();
    let device = device::cpu(arguments.dtype, arguments.threads)?;
    let mut report = Report {
        bench: "gemm",
        limits: device.limits()?,
        machine: Machine::look(load_before),
        cases: Vec::new(),
    };
    let usual = [
        "2048x1728x576",
        "2048x2048x8192",
        "512x2048x32000",
        "4096x4096x4096",
    ];
    let shapes = match arguments.shapes.as_slice() {
        [] => usual
            .into_iter()
            .map(str::parse)
            .collect::<Result<Vec<Shape>, String>>()
            .map_err(anyhow::Error::msg)?,
        shapes => shapes.to_vec(),
    };
    for shape in shapes {
        report
            .cases
            .push(case(&device, arguments.dtype, shape, arguments.repeats)?);
    }
    report.machine = Machine::look(load_before);
    super::print(&report, arguments.json, out, Report::write).context("cannot print")
}

fn case(device: &Cpu, dtype: Dtype, Shape { m, k, n }: Shape, repeats: u32) -> Result<Case> {
    let (a, weights) = (wave(m * k, 1), wave(n * k, 2));
    let mut c = vec![0.0; m * n];
    let b = Matrix::new(&weights, n, k).transposed();
    // Weights are packed once, where the kernel has a form of its own for them.
    let packed = device.pack(b);
    let mut product = || {
        let (c, a) = (MatrixMut::new(&mut c, m, n), Matrix::new(&a, m, k));
        match &packed {
            Some(packed) => device.gemm_packed(c, a, packed, 1.0, false),
            None => device.gemm(c, a, b, 1.0, false),
        }
        Ok(())
    };
    product()?;
    let (mut seconds, mut cpu) = (Vec::new(), Vec::new());
    for _ in 0..repeats {
        let (took, ()) = measured(&mut product)?;
        seconds.push(took.wall);
        cpu.push(took.cpu);
    }
    let flops = 2.0 * m as f64 * k as f64 * n as f64;
    let rates: Vec<f64> = seconds.iter().map(|seconds| flops / seconds / 1e9).collect();
    Ok(Case {
        m,
        k,
        n,
        dtype,
        kernel: Measured::kernel(device),
        threads: device.threads(),
        seconds: Spread::of(&seconds),
        gflops: Spread::of(&rates),
        cpu_seconds: Spread::of(&cpu).median,
    })
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}\n{}\n", self.machine, self.limits)?;
        let mut table = Table::new([
            "M x K x N",
            "dtype",
            "threads",
            "GFLOP/s",
            "min",
            "max",
            "of limit",
        ])
        .align_right(&[2, 3, 4, 5, 6]);
        for case in &self.cases {
            let Spread { median, min, max } = case.gflops;
            table.push([
                format!("{} x {} x {}", case.m, case.k, case.n),
                case.kernel.clone(),
                case.threads.to_string(),
                format!("{median:.0}"),
                format!("{min:.0}"),
                format!("{max:.0}"),
                format!("{:.0} %", 100.0 * median / self.limits.gflops),
            ]);
        }
        table.write(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_read_and_refused() {
        assert_eq!("2x30x4".parse(), Ok(Shape { m: 2, k: 30, n: 4 }));
        for wrong in ["", "2x3", "2x3x4x5", "2x0x3", "2x-1x3", "ax2x3"] {
            let error = wrong.parse::<Shape>().expect_err("it is no shape");
            assert!(error.ends_with("is not MxKxN, such as 2048x1728x576"), "{error}");
        }
        for huge in ["1000000x1000000x1", "18446744073709551615x2x1", "2x99999999999x2"] {
            let error = huge.parse::<Shape>().expect_err("it is too large");
            assert!(error.ends_with("does not fit into 16 GiB"), "{error}");
        }
    }
}
