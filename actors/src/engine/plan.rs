//! Intake, and the rows of coming steps.
//!
//! ORDER: rows are filled in the order (pass, sample), and a plan is in the journal before anything is done for it.

use std::collections::{BTreeMap, BTreeSet};

use eaglet_runtime::ids::{SampleSeq, Step, Unit};
use eaglet_runtime::samples::{Location, plan_step};

use super::ledger::UnitState;
use super::{Engine, Phase, SampleFact};
use crate::journal::{Record, SampleSource};

/// Refused rows and answers that are told one by one.
const REFUSALS_SHOWN: u64 = 5;

/// Units that wait for a row, and the rows that were decided.
#[derive(Debug, Default)]
pub(super) struct Plans {
    /// Per step, the units of each draft seat's row.
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
        self.turn_away_sample(sample);
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
        // Samples come file by file, so the last name is nearly always the right one.
        let file = match self.files.iter().rposition(|name| *name == source.file) {
            Some(index) => index,
            None => {
                self.files.push(source.file.clone());
                self.files.len() - 1
            }
        } as u32;
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

    pub(super) fn turn_away_sample(&mut self, sample: SampleSeq) {
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
        let possible = self.count_steps();
        let total_steps = self
            .settings
            .step_limit
            .map_or(possible, |limit| limit.min(possible));
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
        self.total_steps = total_steps;
        self.prepared = true;
        if self.phase == Phase::Preparing {
            self.phase = Phase::Training;
        }
        self.notice(format!(
            "{} samples make {possible} steps, {total_steps} will be trained; draft vocabulary of {} covers {:.2} % \
             of the trained tokens",
            self.samples.len(),
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
        } else if self.held_out_rows().is_empty() {
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

    fn count_steps(&self) -> u64 {
        let mut left = self.plans.unplanned.clone();
        let mut steps = 0;
        while let Some(rows) = self.plan_from(&left) {
            let before = left.len();
            for unit in rows.iter().flatten() {
                left.remove(unit);
            }
            if left.len() == before {
                break;
            }
            steps += 1;
        }
        steps
    }

    fn plan_from(&self, units: &BTreeSet<Unit>) -> Option<Vec<Vec<Unit>>> {
        let lengths = units
            .iter()
            .filter_map(|&unit| Some((unit, self.samples.get(&unit.sample)?.tokens)));
        let rows = plan_step(
            lengths,
            usize::from(self.settings.draft_seats),
            self.settings.tokens_per_row,
            false,
        )?;
        rows.iter().any(|row| !row.is_empty()).then_some(rows)
    }

    /// Decides rows as far ahead as they are extracted.
    pub(super) fn plan_ahead(&mut self) {
        if self.phase != Phase::Training || !self.prepared {
            return;
        }
        let horizon = (self.committed.0 + self.settings.prefetch_steps).min(self.total_steps);
        while self.plans.next.0 < horizon {
            let Some(rows) = self.plan_from(&self.plans.unplanned) else {
                self.total_steps = self.plans.next.0;
                return;
            };
            let step = self.plans.next;
            self.adopt_plan(step, rows.clone());
            self.append(Record::Planned { step, rows }, false);
        }
    }

    pub(super) fn adopt_plan(&mut self, step: Step, rows: Vec<Vec<Unit>>) {
        for unit in rows.iter().flatten() {
            self.plans.unplanned.remove(unit);
        }
        self.plans.steps.insert(step, rows);
        self.plans.next = step.next();
    }

    /// File and line of a sample.
    pub(super) fn place_of(&self, fact: &SampleFact) -> String {
        let file = self.files.get(fact.file as usize).map_or("", String::as_str);
        format!("{file}:{}", fact.line)
    }

    /// The units of a draft seat's row.
    pub(super) fn row_units(&self, step: Step, seat: u16) -> &[Unit] {
        self.plans
            .steps
            .get(&step)
            .and_then(|rows| rows.get(usize::from(seat)))
            .map_or(&[], Vec::as_slice)
    }
}
