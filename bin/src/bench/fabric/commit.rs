//! What a step costs between the last gradient and the commit: the engine's decision about the votes, and the record on
//! disk.

use anyhow::{Context, Result};
use serde::Serialize;

use super::{FabricArgs, Plan};
use crate::bench::facts::Spread;
use crate::bench::model::{Model, Shape};

/// Times at one number of draft ranks.
#[derive(Debug, Serialize)]
pub(super) struct Commit {
    pub(super) draft_ranks: u16,
    /// All votes of a step, from the first to the decision.
    pub(super) votes_ms: Spread,
    /// Its records, the last of them synced.
    pub(super) journal_ms: Spread,
    pub(super) total_ms: Spread,
    pub(super) journal_bytes: u64,
}

pub(super) fn measure(draft_ranks: u16, arguments: &FabricArgs, plan: &Plan<'_>) -> Result<Commit> {
    let folder = tempfile::tempdir_in(&arguments.directory)
        .with_context(|| format!("cannot make a folder in {}", arguments.directory.display()))?;
    let shape = Shape {
        verifiers: 1,
        drafts: draft_ranks,
        steps: arguments.steps,
    };
    let mut model = Model::start(shape, Some(&folder.path().join("journal")))?;
    let steps = model.run(plan.interrupt)?;
    let of = |what: fn(&crate::bench::model::StepCost) -> f64| {
        Spread::of(&steps.iter().map(what).collect::<Vec<_>>())
    };
    Ok(Commit {
        draft_ranks,
        votes_ms: of(|step| step.votes_ms),
        journal_ms: of(|step| step.journal_ms),
        total_ms: of(|step| step.votes_ms + step.journal_ms),
        journal_bytes: steps.iter().map(|step| step.journal_bytes).sum::<u64>() / steps.len().max(1) as u64,
    })
}
