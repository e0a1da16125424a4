//! `eaglet extract`: a cluster that writes hidden states to files.
//!
//! It is a run like any other, with a rank in the draft's place that writes what a draft would be trained on. So it survives
//! what a training run survives, cuts large verifiers as a training run does, and goes on where it was stopped.

use std::path::Path;

use eaglet_actors::config::Survey;
use eaglet_runtime::ids::Role;

use crate::run;

/// Steps between checkpoints: what is written again after a crash.
const CHECKPOINT_STEPS: u64 = 20;
/// Rows of a step for each verifier, so that none waits for another at the end of each step.
const ROWS_PER_VERIFIER: u16 = 4;

/// The configuration of an extraction to a folder: that of the cluster file, without what only training needs.
pub(crate) fn survey(cluster: &Path, sets: &[String], out: &Path) -> Survey {
    let out = std::path::absolute(out).unwrap_or_else(|_| out.to_owned());
    let mut all = vec![
        set("run.extract_to", &out),
        set("run.directory", &out.join("run")),
        "samples.held_out=[]".to_owned(),
        "samples.held_out_every=0".to_owned(),
        "draft.vocab_size=0".to_owned(),
        "training.passes=1".to_owned(),
    ];
    // What the user sets wins.
    all.extend(sets.iter().cloned());
    let mut survey = run::survey(cluster, &all);
    let config = &mut survey.config;
    config.training.steps = None;
    config.training.evaluate_every_steps = 0;
    config.checkpoints.every_steps = CHECKPOINT_STEPS;
    let mut has_sink = false;
    config
        .ranks
        .retain(|rank| rank.role != Role::Draft || !std::mem::replace(&mut has_sink, true));
    let verifiers = config
        .ranks
        .iter()
        .filter(|rank| rank.role == Role::Verifier)
        .count();
    let rows = u16::try_from(verifiers)
        .unwrap_or(u16::MAX)
        .saturating_mul(ROWS_PER_VERIFIER);
    config.training.rows_per_step = Some(rows.max(1));
    survey
}

/// A `--set` of a path.
fn set(key: &str, path: &Path) -> String {
    format!("{key}={:?}", path.display().to_string())
}
