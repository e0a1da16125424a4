//! LIVENESS: once all faults have stopped and nothing more is asked for, the run completes within a bounded time, with all
//! that there is to train, or it has failed for a reason that the schedule gave it.

use std::collections::BTreeMap;

use eaglet_actors::engine::{Outcome, Settings};
use eaglet_runtime::ids::Seat;

use super::book::{Book, Standing};
use super::{Checked, broken};
use crate::sim::disk::Disk;
use crate::sim::fault::{Fault, FaultCounts};
use crate::sim::plan::Faults;

const NAME: &str = "LIVENESS";

/// Longest time from the end of all faults to the end of the run.
pub const PATIENCE_MS: u64 = 40_000;

/// A step is done again so often before a run is given up.
const DISPUTES: u64 = 4;

/// What may excuse a failure.
#[derive(Clone, Debug, Default)]
pub struct Liveness {
    /// Losses of each seat in this launch, on request or not.
    losses: BTreeMap<Seat, Vec<u64>>,
}

/// What comes after a run has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// Launching it again would end the same way.
    Over,
    /// It is launched again without any more faults, and must complete.
    LaunchAgain,
}

impl Liveness {
    /// A new launch.
    pub fn launched(&mut self) {
        self.losses.clear();
    }

    /// The engine is told that a rank is lost.
    pub fn lost(&mut self, seat: Seat, now_ms: u64) {
        self.losses.entry(seat).or_default().push(now_ms);
    }

    /// Whether some seat was lost more often within the window than its policy allows.
    fn exhausted(&self, settings: &Settings) -> bool {
        self.losses.iter().any(|(seat, times)| {
            let policy = settings.restarts(seat.role);
            let many = policy.max_restarts as usize;
            times
                .windows(many.saturating_add(1))
                .any(|window| window[many] - window[0] <= policy.window_ms)
        })
    }

    /// The run has failed: whether the schedule gave it that reason.
    ///
    /// # Errors
    /// If it did not.
    pub fn failed(
        &self,
        report: &str,
        book: &Book,
        settings: &Settings,
        faults: &Faults,
        counts: &FaultCounts,
    ) -> Result<AfterFailure, super::Broken> {
        let says = |text: &str| report.contains(text);
        let refusals = counts.of(Fault::SampleRefused) > 0;
        let disputes = counts.of(Fault::Disagreement) + counts.of(Fault::NotFinite);
        // Who cannot read its checkpoint is not started again.
        let vanished = counts.of(Fault::CheckpointVanishedLive) > 0;
        let (excused, after) =
            if says("is not started again") || says("rank is left") || says("replica is left") {
                (vanished || self.exhausted(settings), AfterFailure::LaunchAgain)
            } else if says("is not finite") {
                let after = if faults.never_finite_one_in > 0 {
                    AfterFailure::Over
                } else {
                    AfterFailure::LaunchAgain
                };
                (disputes >= DISPUTES, after)
            } else if says("disagree on the gradient") {
                (disputes >= DISPUTES, AfterFailure::LaunchAgain)
            } else if says("times in a row without a step") || says("times in a row without a row") {
                let torn = counts.of(Fault::CollectiveTorn) + counts.of(Fault::MessageLost);
                (torn > 0, AfterFailure::LaunchAgain)
            } else if says("refused every sample of step") {
                let step = book.plans.get(book.committed().0 as usize);
                let empty = book
                    .plans
                    .iter()
                    .skip(book.committed().0 as usize)
                    .any(|rows| rows.iter().all(Vec::is_empty));
                let after = if says("no other is left") {
                    AfterFailure::Over
                } else {
                    AfterFailure::LaunchAgain
                };
                (refusals && step.is_some() && empty, after)
            } else if says("has not joined within") {
                (!settings.hosts.is_empty(), AfterFailure::LaunchAgain)
            } else if says("there is nothing to train") {
                (book.intake() == book.quarantined(), AfterFailure::Over)
            } else if says("checkpoint is not there") {
                (vanished, AfterFailure::LaunchAgain)
            } else if says("was trained before and is refused now") {
                let refused = faults.refuse_one_in > 0 && counts.of(Fault::SampleRefused) > 0;
                (refused, AfterFailure::LaunchAgain)
            } else {
                (false, AfterFailure::Over)
            };
        if excused {
            return Ok(after);
        }
        broken(
            NAME,
            format!("the run failed, and nothing in the schedule explains it: {report}"),
        )?;
        Ok(after)
    }
}

/// The run says that it is complete.
pub fn completed(
    outcome: &Outcome,
    book: &Book,
    disk: &Disk,
    settings: &Settings,
    counts: &FaultCounts,
) -> Checked {
    let Outcome::Completed { checkpoint, .. } = outcome else {
        return Ok(());
    };
    let reached = book.committed();
    let at_limit = settings.step_limit.is_some_and(|limit| reached.0 >= limit);
    let open = (0..book.facts.len() as u64)
        .flat_map(|sample| (0..settings.passes).map(move |pass| (sample, pass)))
        .map(|(sample, pass)| eaglet_runtime::ids::Unit {
            pass,
            sample: eaglet_runtime::ids::SampleSeq(sample),
        })
        .find(|&unit| book.standing(unit) == Some(Standing::Open));
    if let Some(unit) = open.filter(|_| !at_limit) {
        return broken(NAME, format!("the run is complete, and {unit:?} is not trained"));
    }
    let saved = checkpoint.as_ref().and_then(|folder| disk.load(folder));
    let vanished = saved.is_none() && counts.of(Fault::CheckpointVanishedLive) > 0;
    if !vanished && saved != book.chain.last().copied() {
        return broken(
            NAME,
            format!(
                "the run is complete at step {reached}, and its checkpoint {checkpoint:?} holds {saved:?}"
            ),
        );
    }
    Ok(())
}
