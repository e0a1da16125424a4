//! Intake, and the rows of coming steps.
//!
//! ORDER: rows are filled in the order (pass, sample), and a plan is in the journal before anything is done for it.

use std::collections::{BTreeMap, BTreeSet};

use eaglet_runtime::ids::{RowId, SampleSeq, Step, Unit};
use eaglet_runtime::samples::{Location, plan_step};

use super::ledger::UnitState;
use super::{Engine, Phase, SampleFact};
use crate::journal::{Record, SampleSource};

/// Refused rows and answers that are told one by one.
const REFUSALS_SHOWN: u64 = 5;

/// So many steps in a row whose samples are all refused end the run.
const REFUSED_STEPS: u32 = 3;

/// Units that wait for a row, and the rows that were decided.
#[derive(Debug, Default)]
pub(super) struct Plans {
    /// Per step, the units of each lane's row.
    pub(super) steps: BTreeMap<Step, Vec<Vec<Unit>>>,
    /// Units that are in no row yet.
    pub(super) unplanned: BTreeSet<Unit>,
    /// The first step without rows.
    pub(super) next: Step,
}

impl Engine {
    pub(super) fn accept_sample(
        &mut self,
        source: SampleSource,
        location: Location,
        tokens: u32,
        trained_tokens: u32,
    ) {
        let sample = self.next_sample;
        self.admit_sample(sample, &source, location, tokens);
        self.append(
            Record::Accepted {
                sample,
                source,
                location,
                tokens,
                trained_tokens,
            },
            false,
        );
    }

    pub(super) fn refuse_sample(&mut self, source: SampleSource, reason: String) {
        let sample = self.next_sample;
        self.turn_away_sample(sample, &source);
        let name = source
            .id
            .as_ref()
            .map(|id| format!(" ({})", id.escape_debug()))
            .unwrap_or_default();
        let text = format!("quarantined {}:{}{name}: {reason}", source.file, source.line);
        if self.refused() > REFUSALS_SHOWN {
            self.warn_quietly(text);
        } else {
            self.warn(text);
        }
        self.append(
            Record::Refused {
                sample,
                source,
                reason,
            },
            false,
        );
    }

    pub(super) fn admit_sample(
        &mut self,
        sample: SampleSeq,
        source: &SampleSource,
        location: Location,
        tokens: u32,
    ) {
        let file = self.number_of(&source.file);
        self.samples.insert(
            sample,
            SampleFact {
                location,
                tokens,
                file,
                line: source.line,
            },
        );
        self.next_sample = sample.next();
        for pass in 0..self.settings.passes {
            let unit = Unit { pass, sample };
            // Sample numbers are never given twice, so the unit is new.
            if self.ledger.take_in(unit, UnitState::Pending).is_ok() {
                self.plans.unplanned.insert(unit);
            }
        }
    }

    /// Rows and answers that were refused on arrival, or since.
    fn refused(&self) -> u64 {
        self.ledger.counts().quarantined / u64::from(self.settings.passes.max(1))
    }

    pub(super) fn turn_away_sample(&mut self, sample: SampleSeq, source: &SampleSource) {
        let file = self.number_of(&source.file);
        self.quarantined.insert(sample, (file, source.line));
        self.next_sample = sample.next();
        for pass in 0..self.settings.passes {
            // As above: the unit is new.
            let _ = self.ledger.take_in(Unit { pass, sample }, UnitState::Quarantined);
        }
    }

    pub(super) fn finish_preparing(&mut self, vocabulary: Vec<u32>, coverage: f64, held_out: Vec<Vec<u32>>) {
        if self.prepared {
            return;
        }
        let total_steps = self.total_of_all();
        if total_steps == 0 {
            let counts = self.ledger.counts();
            self.fail(format!(
                "there is nothing to train: {} samples were read and {} of them quarantined; \
                 see samples.files in cluster.toml and the reasons above",
                counts.intake / u64::from(self.settings.passes.max(1)),
                counts.quarantined / u64::from(self.settings.passes.max(1)),
            ));
            return;
        }
        self.vocabulary = vocabulary.clone();
        self.held_out = held_out.clone();
        self.rows.ask(self.deal_held_out());
        self.total_steps = total_steps;
        self.prepared = true;
        if self.phase == Phase::Preparing {
            self.phase = Phase::Training;
        }
        self.notice(format!(
            "{} samples, {total_steps} steps in {} lanes of {} tokens; draft vocabulary of {} covers {:.2} % of the \
             trained tokens",
            self.samples.len(),
            self.settings.lanes,
            self.settings.tokens_per_row,
            vocabulary.len(),
            100.0 * coverage,
        ));
        if self.refused() > REFUSALS_SHOWN {
            self.warn(format!(
                "{} rows and answers are quarantined; each stands with its reason in the coordinator's log",
                self.refused()
            ));
        }
        if self.held_out.is_empty() {
            self.notice(
                "no held-out prompt: acceptance is not measured (samples.held_out, samples.held_out_every)",
            );
        } else if !self.rows.has_parts() {
            self.warn(
                "no held-out prompt fits with its answer: acceptance is not measured (training.max_new_tokens, \
                 training.tokens_per_row, samples.held_out_rows)",
            );
        }
        self.append(
            Record::Prepared {
                vocabulary,
                held_out,
                total_steps,
            },
            true,
        );
    }

    /// Steps of the whole run if nothing more comes.
    pub(super) fn total_of_all(&self) -> u64 {
        let lengths: Vec<(Unit, u32)> = self.lengths(&self.plans.unplanned).collect();
        let mut left = lengths.as_slice();
        let mut steps = self.plans.next.0;
        // A step takes the first units, without gaps.
        while let Some(rows) = self.plan_from(left.iter().copied()) {
            left = &left[rows.iter().map(Vec::len).sum()..];
            steps += 1;
        }
        self.settings.step_limit.map_or(steps, |limit| limit.min(steps))
    }

    fn lengths<'a>(&'a self, units: &'a BTreeSet<Unit>) -> impl Iterator<Item = (Unit, u32)> + 'a {
        units
            .iter()
            .filter_map(|&unit| Some((unit, self.samples.get(&unit.sample)?.tokens)))
    }

    fn plan_from(&self, lengths: impl Iterator<Item = (Unit, u32)>) -> Option<Vec<Vec<Unit>>> {
        plan_step(
            lengths,
            usize::from(self.settings.lanes),
            self.settings.tokens_per_row,
            false,
        )
    }

    /// Decides rows as far ahead as they are extracted.
    pub(super) fn plan_ahead(&mut self) {
        if self.phase != Phase::Training || !self.prepared {
            return;
        }
        let horizon = (self.committed.0 + self.settings.prefetch_steps).min(self.total_steps);
        while self.plans.next.0 < horizon {
            let Some(rows) = self.plan_from(self.lengths(&self.plans.unplanned)) else {
                self.correct_total(self.plans.next.0);
                return;
            };
            let step = self.plans.next;
            self.adopt_plan(step, rows.clone());
            self.append(Record::Planned { step, rows }, false);
        }
    }

    /// Takes a plan over: of the next step, or of one whose samples were all refused, which then gets those of the last step
    /// that is planned, or new ones.
    pub(super) fn adopt_plan(&mut self, step: Step, rows: Vec<Vec<Unit>>) {
        for unit in rows.iter().flatten() {
            self.plans.unplanned.remove(unit);
        }
        if step == self.plans.next {
            self.plans.next = step.next();
        } else if let Some((&last, units)) = self.plans.steps.last_key_value()
            && last > step
            && *units == rows
        {
            self.plans.steps.remove(&last);
            self.plans.next = last;
            self.count_plan(last);
        }
        self.plans.steps.insert(step, rows);
        self.count_plan(step);
    }

    /// The plan of a step has changed: which of its rows have units is counted again.
    pub(super) fn count_plan(&mut self, step: Step) {
        let Some(rows) = self.plans.steps.get(&step) else {
            self.rows.unplan(step);
            return;
        };
        let with_units = (0..).zip(rows).filter(|(_, row)| !row.is_empty());
        self.rows.plan(step, with_units.map(|(lane, _)| lane));
    }

    /// The verifier refused every sample of a step: it gets other ones. If that happens again and again, the verifier is
    /// to blame, not the samples.
    pub(super) fn plan_again(&mut self, step: Step) {
        self.refused_steps += 1;
        if self.refused_steps >= REFUSED_STEPS {
            self.fail(format!(
                "the verifier refused every sample of step {step}, {} times in a row with other samples; look at its \
                 weights, at verifier.path, and at the reasons above",
                self.refused_steps
            ));
            return;
        }
        let last = self
            .plans
            .steps
            .last_key_value()
            .filter(|(last, _)| **last > step)
            .map(|(&last, rows)| (last, rows.clone()));
        let rows = match (self.plan_from(self.lengths(&self.plans.unplanned)), last) {
            (Some(rows), _) => rows,
            (None, Some((last, rows))) => {
                for lane in 0..self.settings.lanes {
                    let row = RowId::Train { step: last, lane };
                    self.give_back(|other, _| other == row);
                    self.void_row(row);
                }
                rows
            }
            (None, None) => {
                if step.0 == 0 && !self.is_open() {
                    self.fail(format!(
                        "the verifier refused every sample of step {step}, and no other is left; look at its weights, at \
                         verifier.path, and at the reasons above"
                    ));
                    return;
                }
                // Nothing is left to train: the run ends, or waits, one step earlier.
                self.plans.steps.remove(&step);
                self.plans.next = step;
                self.count_plan(step);
                self.correct_total(step.0);
                return;
            }
        };
        self.warn(format!(
            "the verifier refused every sample of step {step}; the step gets other ones"
        ));
        self.adopt_plan(step, rows.clone());
        for lane in 0..self.settings.lanes {
            self.void_row(RowId::Train { step, lane });
        }
        self.append(Record::Planned { step, rows }, false);
        self.correct_total(self.total_of_all());
    }

    /// The run turns out to have another length than was counted.
    fn correct_total(&mut self, total_steps: u64) {
        if total_steps != self.total_steps {
            self.set_total(total_steps);
            self.append(Record::Grown { total_steps }, false);
        }
    }

    /// File and line of a sample.
    pub(super) fn place_of(&self, fact: &SampleFact) -> String {
        format!("{}:{}", self.file_name(fact.file), fact.line)
    }

    /// The units of a lane's row.
    pub(super) fn row_units(&self, step: Step, lane: u16) -> &[Unit] {
        self.plans
            .steps
            .get(&step)
            .and_then(|rows| rows.get(usize::from(lane)))
            .map_or(&[], Vec::as_slice)
    }
}
