//! Samples that come after training has begun, and quarantined ones that are tried again.
//!
//! GROWTH: everything that is taken in is in the journal before it is planned, so replaying the journal takes the same
//! batches.

use std::path::PathBuf;

use eaglet_runtime::ids::{SampleSeq, Unit};

use super::ledger::UnitState;
use super::settings::{Length, Turn};
use super::{Engine, Pace, Phase, SampleFact, StoredSample};
use crate::journal::Record;

impl Engine {
    /// Whether the run waits for more samples when all are trained.
    pub fn is_open(&self) -> bool {
        self.open
            && self
                .settings
                .step_limit
                .is_none_or(|limit| self.total_steps < limit)
    }

    /// The number of a file in `files`.
    pub(super) fn number_of(&mut self, file: &str) -> u32 {
        // Samples come file by file, so the last name is nearly always the right one.
        let known = self.files.iter().rposition(|name| name == file);
        let number = known.unwrap_or_else(|| {
            self.files.push(file.to_owned());
            self.files.len() - 1
        });
        number as u32
    }

    /// Counts the steps again after more was read.
    pub(super) fn grow(&mut self) {
        if !self.prepared || matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let total_steps = self.total_of_all();
        if total_steps == self.total_steps {
            return;
        }
        let more = total_steps.saturating_sub(self.total_steps);
        self.set_total(total_steps);
        if self.phase == (Phase::Closing { drained: false }) {
            self.phase = Phase::Training;
        }
        self.notice(format!(
            "{} samples so far: {more} steps more, {total_steps} in all",
            self.samples.len()
        ));
        self.append(Record::Grown { total_steps }, true);
    }

    /// The number of steps changes; the learning rate follows from here on.
    pub(super) fn set_total(&mut self, total_steps: u64) {
        self.total_steps = total_steps;
        self.pace.turned = self.turn();
    }

    fn turn(&self) -> Option<Turn> {
        (self.committed.0 > 0).then_some(Turn {
            at: self.committed.0,
            rate: self.last_rate,
        })
    }

    /// The length of the run, as far as it is known.
    pub(super) fn length(&self) -> Length {
        match self.settings.step_limit {
            _ if !self.open => Length::Whole(self.total_steps),
            // More than that will not be trained, whatever comes.
            Some(limit) => Length::Whole(limit),
            None => Length::SoFar(self.total_steps),
        }
    }

    /// The length of an open run is known from here on.
    pub(super) fn set_closed(&mut self) {
        self.open = false;
        if self.settings.step_limit.is_none() {
            self.pace = Pace {
                turned: None,
                closed: self.turn(),
            };
        }
    }

    pub(super) fn add_source(&mut self, file: PathBuf) {
        if !self.added_sources.contains(&file) {
            self.added_sources.push(file.clone());
            self.append(Record::SourceAdded { file }, true);
        }
    }

    pub(super) fn close_intake(&mut self) {
        if self.open {
            self.set_closed();
            self.notice("no more samples will be read; the run ends when all are trained");
            self.append(Record::Closed, true);
        }
    }

    pub(super) fn retry_sample(&mut self, sample: SampleSeq, stored: Option<StoredSample>) {
        if self.readmit(sample, stored) {
            self.append(Record::Retried { sample, stored }, true);
            // At once: a run that is about to end would end without it.
            self.grow();
        }
    }

    /// Makes the quarantined units of a sample pending again; whether there were any that could be.
    pub(super) fn readmit(&mut self, sample: SampleSeq, stored: Option<StoredSample>) -> bool {
        let Some(&(file, line)) = self.quarantined.get(&sample) else {
            return false;
        };
        match stored {
            Some(stored) => {
                let fact = SampleFact {
                    location: stored.location,
                    tokens: stored.tokens,
                    file,
                    line,
                };
                self.samples.insert(sample, fact);
            }
            // There is nothing to train.
            None if !self.samples.contains_key(&sample) => return false,
            None => {}
        }
        self.quarantined.remove(&sample);
        for pass in 0..self.settings.passes {
            let unit = Unit { pass, sample };
            if self.ledger.state(unit) == Some(UnitState::Quarantined) && self.ledger.readmit(unit).is_ok() {
                self.plans.unplanned.insert(unit);
            }
        }
        true
    }

    /// Files that were added to the live run, in order.
    pub fn added_sources(&self) -> &[PathBuf] {
        &self.added_sources
    }

    pub(super) fn file_name(&self, file: u32) -> &str {
        self.files.get(file as usize).map_or("", String::as_str)
    }
}
