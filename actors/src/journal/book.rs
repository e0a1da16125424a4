//! What a journal says about each sample: where it came from, where it lies, where each of its passes stands.
//!
//! A view for people and for the intake of a later launch. It takes records as they are and checks nothing: the engine's
//! replay does that. Memory grows with the number of samples, not with that of steps.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};

use eaglet_runtime::ids::{SampleSeq, Step, Unit};
use eaglet_runtime::samples::Location;

use super::{Record, SampleSource};

/// Where one pass over a sample stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UnitStanding {
    /// It waits for a step.
    #[default]
    Pending,
    /// It is part of a step that is not committed yet.
    Planned(Step),
    /// It is part of a committed step.
    Trained(Step),
    /// A verifier refused it.
    Quarantined {
        /// The step it was planned for.
        step: Step,
        /// Why.
        reason: String,
    },
}

impl fmt::Display for UnitStanding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pending => f.write_str("pending"),
            Self::Planned(step) => write!(f, "in step {step}"),
            Self::Trained(step) => write!(f, "trained in step {step}"),
            Self::Quarantined { .. } => f.write_str("quarantined"),
        }
    }
}

/// A sample that was taken in or refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownSample {
    /// Where it came from.
    pub source: SampleSource,
    /// Which sample of its line it is, from 0.
    pub ordinal: u32,
    /// Where it lies in the sample store; `None` if it was refused on arrival.
    pub location: Option<Location>,
    /// Why it was refused on arrival, if it was.
    pub refused: Option<String>,
    /// Its length; 0 if it was refused.
    pub tokens: u32,
    /// How many of them are trained.
    pub trained_tokens: u32,
    /// Passes that any record names; those that are missing are pending, or quarantined with a refused sample.
    passes: BTreeMap<u32, UnitStanding>,
}

impl KnownSample {
    /// Where a pass stands.
    pub fn standing(&self, pass: u32) -> UnitStanding {
        self.passes.get(&pass).cloned().unwrap_or_default()
    }

    /// Why it is quarantined, with the pass if it is one pass only; `None` if it is not.
    pub fn quarantine(&self) -> Option<String> {
        self.refused.clone().or_else(|| {
            self.passes.iter().find_map(|(pass, standing)| match standing {
                UnitStanding::Quarantined { reason, .. } => Some(format!("in pass {pass}: {reason}")),
                _ => None,
            })
        })
    }
}

/// What was read of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FileMark {
    line: u64,
    records: u32,
}

/// All samples of a run, as its journal knows them.
#[derive(Clone, Debug, Default)]
pub struct SampleBook {
    samples: BTreeMap<SampleSeq, KnownSample>,
    /// Records per file and line.
    lines: HashMap<String, HashMap<u64, u32>>,
    marks: BTreeMap<String, FileMark>,
    added: Vec<PathBuf>,
    prepared: Option<Preparation>,
    closed: bool,
}

/// What training started from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Preparation {
    /// Verifier ids of the draft vocabulary, ascending.
    pub(crate) vocabulary: Vec<u32>,
    /// Held-out prompts.
    pub(crate) held_out: Vec<Vec<u32>>,
}

impl SampleBook {
    /// The book of a journal's records.
    pub fn of(records: &[Record]) -> Self {
        let mut book = Self::default();
        let mut plans = HashMap::new();
        for record in records {
            book.enter(record, &mut plans);
        }
        book
    }

    fn enter(&mut self, record: &Record, plans: &mut HashMap<Step, Vec<Unit>>) {
        match record {
            Record::Accepted {
                sample,
                source,
                location,
                tokens,
                trained_tokens,
            } => {
                let known = self.add(*sample, source);
                (known.tokens, known.trained_tokens) = (*tokens, *trained_tokens);
                known.location = Some(*location);
            }
            Record::Refused {
                sample,
                source,
                reason,
            } => {
                self.add(*sample, source).refused = Some(reason.clone());
            }
            Record::Retried { sample, stored } => {
                let Some(known) = self.samples.get_mut(sample) else {
                    return;
                };
                if let Some(stored) = stored {
                    known.refused = None;
                    known.location = Some(stored.location);
                    (known.tokens, known.trained_tokens) = (stored.tokens, stored.trained_tokens);
                }
                known
                    .passes
                    .retain(|_, standing| !matches!(standing, UnitStanding::Quarantined { .. }));
            }
            Record::Planned { step, rows } => {
                let units: Vec<Unit> = rows.iter().flatten().copied().collect();
                for unit in &units {
                    self.stand(*unit, UnitStanding::Planned(*step));
                }
                plans.insert(*step, units);
            }
            Record::Quarantined { step, unit, reason } => {
                let reason = reason.clone();
                self.stand(*unit, UnitStanding::Quarantined { step: *step, reason });
            }
            Record::Committed { step, .. } => {
                for unit in plans.remove(step).unwrap_or_default() {
                    let known = self.samples.get_mut(&unit.sample);
                    let standing = known.and_then(|known| known.passes.get_mut(&unit.pass));
                    // A unit that was taken out of its row on the way is not trained with it.
                    if let Some(standing) = standing
                        && *standing == UnitStanding::Planned(*step)
                    {
                        *standing = UnitStanding::Trained(*step);
                    }
                }
            }
            Record::SourceAdded { file } => self.added.push(file.clone()),
            Record::Prepared {
                vocabulary, held_out, ..
            } => {
                self.prepared = Some(Preparation {
                    vocabulary: vocabulary.clone(),
                    held_out: held_out.clone(),
                });
            }
            Record::Closed => self.closed = true,
            Record::Launched { .. }
            | Record::Grown { .. }
            | Record::SeatAdded { .. }
            | Record::SeatRemoved { .. }
            | Record::Checkpointed { .. }
            | Record::Sums { .. } => {}
        }
    }

    fn add(&mut self, sample: SampleSeq, source: &SampleSource) -> &mut KnownSample {
        let lines = self.lines.entry(source.file.clone()).or_default();
        let records = lines.entry(source.line).or_default();
        let ordinal = *records;
        *records += 1;
        // Samples that a retry found on an earlier line come late and do not set the mark back.
        let mark = self.marks.entry(source.file.clone()).or_default();
        if source.line >= mark.line {
            *mark = FileMark {
                line: source.line,
                records: *records,
            };
        }
        self.samples.entry(sample).or_insert_with(|| KnownSample {
            source: source.clone(),
            ordinal,
            location: None,
            refused: None,
            tokens: 0,
            trained_tokens: 0,
            passes: BTreeMap::new(),
        })
    }

    fn stand(&mut self, unit: Unit, standing: UnitStanding) {
        if let Some(known) = self.samples.get_mut(&unit.sample) {
            known.passes.insert(unit.pass, standing);
        }
    }

    /// All samples in the order of their numbers.
    pub fn samples(&self) -> impl Iterator<Item = (SampleSeq, &KnownSample)> {
        self.samples.iter().map(|(&sample, known)| (sample, known))
    }

    /// A sample.
    pub fn sample(&self, sample: SampleSeq) -> Option<&KnownSample> {
        self.samples.get(&sample)
    }

    /// Passes that any record names.
    pub fn passes(&self) -> u32 {
        let last = self
            .samples
            .values()
            .filter_map(|known| known.passes.keys().last());
        last.max().map_or(1, |last| last + 1)
    }

    /// The last line of a file that a sample came from, from 1, and how many samples it gave; `None` if none came.
    pub fn read_so_far(&self, file: &Path) -> Option<(u64, u32)> {
        let mark = self.marks.get(&file.display().to_string())?;
        Some((mark.line, mark.records))
    }

    /// How many samples a line gave.
    pub fn records_of(&self, file: &str, line: u64) -> u32 {
        let lines = self.lines.get(file);
        lines.and_then(|lines| lines.get(&line)).copied().unwrap_or(0)
    }

    /// Files that were added to the live run, in order.
    pub fn added_sources(&self) -> &[PathBuf] {
        &self.added
    }

    /// What training started from, once it has.
    pub(crate) fn prepared(&self) -> Option<&Preparation> {
        self.prepared.as_ref()
    }

    /// Whether nothing more is to be read.
    pub fn is_closed(&self) -> bool {
        self.closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{StepReport, StoredSample};
    use eaglet_runtime::digest::Digest;
    use eaglet_runtime::ids::Epoch;

    fn source(file: &str, line: u64) -> SampleSource {
        SampleSource {
            file: file.to_owned(),
            line,
            id: None,
        }
    }

    fn accepted(sample: u64, file: &str, line: u64) -> Record {
        Record::Accepted {
            sample: SampleSeq(sample),
            source: source(file, line),
            location: Location {
                offset: 100 * sample,
                len: 10,
            },
            tokens: 8,
            trained_tokens: 3,
        }
    }

    fn refused(sample: u64, file: &str, line: u64) -> Record {
        Record::Refused {
            sample: SampleSeq(sample),
            source: source(file, line),
            reason: "torn".to_owned(),
        }
    }

    fn unit(pass: u32, sample: u64) -> Unit {
        Unit {
            pass,
            sample: SampleSeq(sample),
        }
    }

    fn planned(step: u64, units: &[Unit]) -> Record {
        Record::Planned {
            step: Step(step),
            rows: units.iter().map(|&unit| vec![unit]).collect(),
        }
    }

    fn committed(step: u64) -> Record {
        Record::Committed {
            step: Step(step),
            epoch: Epoch(1),
            gradient: Digest::of(b"gradient"),
            state: Digest::of(b"state"),
            report: StepReport::default(),
        }
    }

    #[test]
    fn passes_are_followed_from_pending_to_trained_and_back_from_quarantine() {
        let mut records = vec![
            accepted(0, "a", 1),
            accepted(1, "a", 2),
            refused(2, "a", 3),
            planned(0, &[unit(0, 0), unit(0, 1)]),
            Record::Quarantined {
                step: Step(0),
                unit: unit(0, 1),
                reason: "not finite".to_owned(),
            },
            committed(0),
            planned(1, &[unit(1, 0), unit(1, 1)]),
        ];
        let book = SampleBook::of(&records);
        let standing = |book: &SampleBook, pass, sample| {
            let known = book.sample(SampleSeq(sample)).expect("known");
            known.standing(pass).to_string()
        };
        assert_eq!(standing(&book, 0, 0), "trained in step 0");
        assert_eq!(standing(&book, 0, 1), "quarantined");
        assert_eq!(standing(&book, 1, 1), "in step 1");
        assert_eq!(standing(&book, 2, 1), "pending");
        assert_eq!(book.passes(), 2);
        let reasons: Vec<_> = book.samples().map(|(_, known)| known.quarantine()).collect();
        assert_eq!(
            reasons,
            [
                None,
                Some("in pass 0: not finite".to_owned()),
                Some("torn".to_owned())
            ]
        );
        let stored = StoredSample {
            location: Location { offset: 7, len: 9 },
            tokens: 5,
            trained_tokens: 2,
        };
        for (sample, stored) in [(1, None), (2, Some(stored))] {
            let sample = SampleSeq(sample);
            records.push(Record::Retried { sample, stored });
        }
        let book = SampleBook::of(&records);
        assert!(book.samples().all(|(_, known)| known.quarantine().is_none()));
        assert_eq!(standing(&book, 0, 1), "pending");
        let mended = book.sample(SampleSeq(2)).expect("known");
        assert_eq!((mended.location, mended.tokens), (Some(stored.location), 5));
    }

    #[test]
    fn what_was_read_of_a_file_is_its_last_line_and_the_samples_of_that_line() {
        let mut records = vec![
            accepted(0, "a", 1),
            refused(1, "a", 4),
            accepted(2, "b", 1),
            accepted(3, "a", 4),
        ];
        let book = SampleBook::of(&records);
        assert_eq!(book.read_so_far(Path::new("a")), Some((4, 2)));
        assert_eq!(book.read_so_far(Path::new("b")), Some((1, 1)));
        assert_eq!(book.read_so_far(Path::new("c")), None);
        assert_eq!(book.sample(SampleSeq(3)).expect("known").ordinal, 1);
        // A retry found a second sample on the first line.
        records.push(accepted(4, "a", 1));
        let book = SampleBook::of(&records);
        assert_eq!(book.read_so_far(Path::new("a")), Some((4, 2)));
        assert_eq!(book.records_of("a", 1), 2);
        assert_eq!(book.sample(SampleSeq(4)).expect("known").ordinal, 1);
    }
}
