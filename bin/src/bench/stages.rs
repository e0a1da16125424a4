//! Where the time of repeated work goes, by stage and kind of operation, and how near that is to the machine's limit.

use std::io::Write;

use eaglet_runtime::device::{OperationKind, Spent};
use serde::Serialize;

use super::facts::{Limits, Spread};
use crate::table::Table;

/// One stage and kind.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Stage {
    pub(super) stage: &'static str,
    pub(super) kind: &'static str,
    /// Median of the repetitions.
    pub(super) seconds: f64,
    pub(super) gflops_per_s: f64,
    pub(super) gb_per_s: f64,
    /// What the machine's limits of computing and of memory leave as the shortest time, as a share of the time it took.
    pub(super) of_limit: f64,
}

/// Collects repetitions.
#[derive(Debug, Default)]
pub(super) struct Stages {
    repetitions: Vec<Vec<Spent>>,
}

impl Stages {
    pub(super) fn push(&mut self, spent: Vec<Spent>) {
        self.repetitions.push(spent);
    }

    /// Medians, in the order of the first repetition.
    pub(super) fn medians(&self, limits: &Limits) -> Vec<Stage> {
        let Some(first) = self.repetitions.first() else {
            return Vec::new();
        };
        let of = |spent: &Spent| {
            let same = |other: &&Spent| (other.stage, other.kind) == (spent.stage, spent.kind);
            let seconds: Vec<f64> = self
                .repetitions
                .iter()
                .filter_map(|all| all.iter().find(same).map(|found| found.seconds))
                .collect();
            let seconds = Spread::of(&seconds).median.max(1e-12);
            let shortest =
                (spent.flops / limits.gflops / 1e9).max(spent.bytes / limits.memory_gb_per_s / 1e9);
            Stage {
                stage: spent.stage,
                kind: match spent.kind {
                    OperationKind::Product => "product",
                    OperationKind::Attention => "attention",
                    OperationKind::Elementwise => "elementwise",
                    OperationKind::Loss => "softmax, loss",
                    OperationKind::Move => "move",
                    OperationKind::Optimizer => "optimizer",
                },
                seconds,
                gflops_per_s: spent.flops / seconds / 1e9,
                gb_per_s: spent.bytes / seconds / 1e9,
                of_limit: shortest / seconds,
            }
        };
        first.iter().map(of).collect()
    }
}

/// Writes a table; what is left of `total` seconds is a line of its own.
pub(super) fn write(stages: &[Stage], total: f64, out: &mut dyn Write) -> std::io::Result<()> {
    let known: f64 = stages.iter().map(|stage| stage.seconds).sum();
    // A device that runs ahead of who asks took longer while time was kept.
    let total = total.max(known);
    let mut table = Table::new(["stage", "kind", "ms", "share", "GFLOP/s", "GB/s", "of limit"])
        .align_right(&[2, 3, 4, 5, 6]);
    let line = |stage: &str, kind: &str, seconds: f64| {
        [
            stage.to_owned(),
            kind.to_owned(),
            format!("{:.1}", seconds * 1e3),
            format!("{:.1} %", 100.0 * seconds / total),
            String::new(),
            String::new(),
            String::new(),
        ]
    };
    for stage in stages {
        let mut row = line(stage.stage, stage.kind, stage.seconds);
        if stage.gflops_per_s > 0.0 {
            row[4] = format!("{:.0}", stage.gflops_per_s);
        }
        row[5] = format!("{:.1}", stage.gb_per_s);
        row[6] = format!("{:.0} %", 100.0 * stage.of_limit);
        table.push(row);
    }
    table.push(line("between operations", "", (total - known).max(0.0)));
    table.write(out)
}
