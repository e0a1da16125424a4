//! Samples that come after training has begun, and quarantined ones that are tried again.
//!
//! GROWTH: everything that is taken in is in the journal before it is planned, and how far each file was read follows from
//! the journal alone; so a launch goes on reading where the last one stopped.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use eaglet_runtime::ids::{SampleSeq, Unit};

use super::ledger::UnitState;
use super::{Engine, Growth, Phase, SampleFact, SampleFile, StoredSample};
use crate::journal::{Record, SampleSource};

/// A sample that is quarantined, in some of its passes or all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuarantinedSample {
    /// The sample.
    pub sample: SampleSeq,
    /// The file it came from.
    pub file: String,
    /// Its line.
    pub line: u64,
    /// Which record of that line it is, from 0.
    pub ordinal: u32,
    /// Whether it was refused on arrival, rather than by a verifier.
    pub refused: bool,
    /// Why.
    pub reason: String,
}

/// Why a sample is quarantined, and where it came from.
#[derive(Clone, Debug)]
pub(super) struct Quarantine {
    pub(super) file: u32,
    pub(super) line: u64,
    pub(super) ordinal: u32,
    pub(super) refused: bool,
    pub(super) reason: String,
}

impl Engine {
    /// Whether more samples may come after all are trained.
    pub(super) fn is_open(&self) -> bool {
        self.open
            && self
                .settings
                .step_limit
                .is_none_or(|limit| self.total_steps < limit)
    }

    /// Notes that one more record came from a line; which file that is, and which record of the line.
    pub(super) fn note_source(&mut self, source: &SampleSource) -> (u32, u32) {
        // Samples come file by file, so the last name is nearly always the right one.
        let index = match self.files.iter().rposition(|file| file.name == source.file) {
            Some(index) => index,
            None => {
                self.files.push(SampleFile {
                    name: source.file.clone(),
                    last_line: 0,
                    records_of_last_line: 0,
                });
                self.files.len() - 1
            }
        };
        let file = &mut self.files[index];
        let ordinal = if source.line == file.last_line {
            file.records_of_last_line
        } else {
            0
        };
        // A line that is read again for one of its samples does not set the file back.
        if source.line >= file.last_line {
            file.last_line = source.line;
            file.records_of_last_line = ordinal + 1;
        }
        (index as u32, ordinal)
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

    /// The length of the run changes; the learning rate follows from here on.
    pub(super) fn set_total(&mut self, total_steps: u64) {
        self.total_steps = total_steps;
        self.growth = (self.committed.0 > 0).then_some(Growth {
            grown_at: self.committed.0,
            before: self.last_rate,
        });
    }

    pub(super) fn add_source(&mut self, file: PathBuf) {
        if !self.added_sources.contains(&file) {
            self.added_sources.push(file.clone());
            self.append(Record::SourceAdded { file }, true);
        }
    }

    pub(super) fn close_intake(&mut self) {
        if self.open {
            self.open = false;
            self.notice("no more samples will be read; the run ends when all are trained");
            self.append(Record::Closed, true);
        }
    }

    pub(super) fn retry_sample(&mut self, sample: SampleSeq, stored: Option<StoredSample>) {
        if self.readmit(sample, stored) {
            self.append(Record::Retried { sample, stored }, true);
        }
    }

    /// Makes the quarantined units of a sample pending again; whether there were any that could be.
    pub(super) fn readmit(&mut self, sample: SampleSeq, stored: Option<StoredSample>) -> bool {
        let Some(quarantine) = self.quarantined.get(&sample).cloned() else {
            return false;
        };
        match stored {
            Some(stored) => {
                let fact = SampleFact {
                    location: stored.location,
                    tokens: stored.tokens,
                    file: quarantine.file,
                    line: quarantine.line,
                    ordinal: quarantine.ordinal,
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

    /// Quarantined samples in the order of their arrival.
    pub fn quarantined_samples(&self) -> Vec<QuarantinedSample> {
        self.quarantined
            .iter()
            .map(|(&sample, quarantine)| QuarantinedSample {
                sample,
                file: self.file_name(quarantine.file).to_owned(),
                line: quarantine.line,
                ordinal: quarantine.ordinal,
                refused: quarantine.refused,
                reason: quarantine.reason.clone(),
            })
            .collect()
    }

    /// Per file, the last line from which something was taken in or refused, and how many records that line made.
    pub fn read_so_far(&self) -> BTreeMap<String, (u64, u64)> {
        self.files
            .iter()
            .map(|file| {
                (
                    file.name.clone(),
                    (file.last_line, u64::from(file.records_of_last_line)),
                )
            })
            .collect()
    }

    /// Files that were added to the live run, in order.
    pub fn added_sources(&self) -> impl Iterator<Item = &Path> {
        self.added_sources.iter().map(PathBuf::as_path)
    }

    /// Whether the run waits for more samples when all are trained.
    pub fn waits_for_samples(&self) -> bool {
        self.is_open()
    }

    /// Verifier ids of the draft vocabulary, ascending; empty before intake is complete.
    pub fn vocabulary(&self) -> &[u32] {
        &self.vocabulary
    }

    pub(super) fn file_name(&self, file: u32) -> &str {
        self.files
            .get(file as usize)
            .map_or("", |file| file.name.as_str())
    }
}
