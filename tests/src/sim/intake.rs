//! A fake intake: reads the corpus from where the journal ends, and goes on while the run is open.

use std::path::Path;

use eaglet_actors::engine::{Event, Length, Pace, Phase, StoredSample};
use eaglet_actors::journal::{Record, SampleBook, SampleSource};
use eaglet_runtime::ids::Unit;

use super::corpus::{Corpus, Entry};
use super::fault::Fault;
use super::invariants::order::rows_of;
use super::invariants::{Checked, broken};
use super::weights::{Weights, mean, row_content};
use super::world::{What, World};

/// Records that are handed over at once.
const BATCH: usize = 5;

/// How far each file was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Intake {
    /// Per file, the next line and the next of its entries.
    places: Vec<(usize, usize)>,
    /// Whether the engine has to be told that there is more.
    grown: bool,
    /// Whether it was told that nothing more comes.
    closed: bool,
}

impl Intake {
    /// Goes on where the journal says that an earlier launch stopped.
    pub(super) fn resume(records: &[Record], corpus: &Corpus) -> Self {
        let book = SampleBook::of(records);
        let places = corpus
            .files
            .iter()
            .map(|file| match book.read_so_far(Path::new(&file.name)) {
                Some((line, entries)) => (line as usize - 1, entries as usize),
                None => (0, 0),
            })
            .collect();
        Self {
            places,
            grown: true,
            closed: false,
        }
    }

    /// The next entry of a file that can be read; its line, from 1.
    fn next(&mut self, corpus: &Corpus, file: usize, now_ms: u64) -> Option<(u64, Entry)> {
        let (line, entry) = &mut self.places[file];
        loop {
            let here = corpus.files[file].lines.get(*line)?;
            if here.visible_ms > now_ms {
                return None;
            }
            if let Some(&found) = here.entries.get(*entry) {
                *entry += 1;
                return Some((*line as u64 + 1, found));
            }
            (*line, *entry) = (*line + 1, 0);
        }
    }

    fn has_read(&self, corpus: &Corpus, file: usize) -> bool {
        let (line, entry) = self.places[file];
        let lines = &corpus.files[file].lines;
        (line..lines.len()).all(|at| {
            let skipped = if at == line { entry } else { 0 };
            lines[at].entries.len() <= skipped
        })
    }
}

impl World {
    /// Reads some samples, if there are any.
    pub(super) fn read_samples(&mut self, launch: u32) -> Checked {
        if self.launch() != Some(launch) {
            return Ok(());
        }
        let Some(coordinator) = &self.coordinator else {
            return Ok(());
        };
        let prepared = coordinator.engine.is_prepared();
        if prepared && !self.is_read_on() {
            return Ok(()); // all that this run is made of is there
        }
        let known: Vec<bool> = self
            .plan
            .corpus
            .files
            .iter()
            .map(|file| !file.is_added || coordinator.engine.added_sources().contains(&file.path()))
            .collect();
        let mut taken = 0;
        for (file, is_known) in known.into_iter().enumerate() {
            while is_known && taken < BATCH {
                let now_ms = self.clock.now_ms();
                let Some((line, entry)) = self.intake.next(&self.plan.corpus, file, now_ms) else {
                    break;
                };
                taken += 1;
                if prepared {
                    self.intake.grown = true;
                    self.counts.note(Fault::SampleArrived);
                }
                self.take_in(file, line, entry)?;
                if self.launch() != Some(launch) {
                    return Ok(());
                }
            }
        }
        self.disk.sync();
        let wait_ms = match (taken, prepared) {
            (0, false) => {
                self.feed(Event::Prepared {
                    vocabulary: vec![1],
                    coverage: 1.0,
                    held_out: vec![vec![1, 2]; self.plan.held_out as usize],
                })?;
                10
            }
            (0, true) => {
                self.has_read_all()?;
                if self.intake.closed {
                    return Ok(());
                }
                40
            }
            _ => 1,
        };
        self.clock.after(wait_ms, What::Intake(launch));
        Ok(())
    }

    /// Whether files are read beyond what the run starts with.
    fn is_read_on(&self) -> bool {
        self.plan.settings.open && !self.checks.book.closed
    }

    fn has_read_all(&mut self) -> Checked {
        if std::mem::take(&mut self.intake.grown) {
            self.feed(Event::Grown)?;
        }
        let everything = self.plan.corpus.files.len();
        let read = (0..everything).all(|file| {
            self.plan.corpus.files[file].is_added || self.intake.has_read(&self.plan.corpus, file)
        });
        if self.calm && read && self.coordinator.is_some() {
            self.intake.closed = true;
            self.feed(Event::IntakeClosed)?;
        }
        Ok(())
    }

    fn take_in(&mut self, file: usize, line: u64, entry: Entry) -> Checked {
        let source = SampleSource {
            file: self.plan.corpus.files[file].name.clone(),
            line,
            id: None,
        };
        let event = if entry.refused {
            Event::SampleRefused {
                source,
                reason: String::new(),
            }
        } else {
            Event::SampleAccepted {
                source,
                location: self.disk.store(entry.content),
                tokens: entry.tokens,
                trained_tokens: entry.content,
            }
        };
        self.feed(event)
    }

    /// A file is added to the live run, if it is one that grows.
    pub(super) fn add_file(&mut self) -> Checked {
        let prepared = self
            .coordinator
            .as_ref()
            .is_some_and(|coordinator| coordinator.engine.is_prepared());
        let open = prepared && self.is_read_on();
        let added: Vec<_> = self
            .plan
            .corpus
            .files
            .iter()
            .filter(|file| file.is_added)
            .map(|file| file.path())
            .collect();
        let Some(file) = added.get(self.added_files).filter(|_| open).cloned() else {
            return Ok(());
        };
        self.added_files += 1;
        self.counts.note(Fault::SourceAdded);
        self.feed(Event::SourceAdded { file })
    }

    /// A quarantined sample is tried again.
    pub(super) fn retry_a_sample(&mut self) -> Checked {
        let Some(coordinator) = self.coordinator.as_ref().filter(|c| c.engine.is_prepared()) else {
            return Ok(());
        };
        self.late_request |= coordinator.engine.phase() == Phase::Leaving;
        let book = SampleBook::of(self.disk.records());
        let quarantined: Vec<_> = book
            .samples()
            .filter(|(_, known)| known.quarantine().is_some())
            .collect();
        if quarantined.is_empty() {
            return Ok(());
        }
        let (sample, chosen) = quarantined[self.dice.place(quarantined.len())];
        let stored = if chosen.refused.is_some() {
            let entry = self
                .plan
                .corpus
                .files
                .iter()
                .find(|file| file.name == chosen.source.file)
                .and_then(|file| file.lines.get(chosen.source.line as usize - 1))
                .and_then(|line| line.entries.get(chosen.ordinal as usize).copied());
            let Some(entry) = entry.filter(|entry| entry.refused) else {
                return broken(
                    "LEDGER",
                    format!("{chosen:?} is quarantined and is no refused sample"),
                );
            };
            Some(StoredSample {
                location: self.disk.store(entry.content),
                tokens: entry.tokens,
                trained_tokens: entry.content,
            })
        } else {
            None
        };
        self.counts.note(Fault::SampleRetried);
        self.feed(Event::SampleRetried { sample, stored })?;
        self.feed(Event::Grown)
    }

    /// A complete run has taken in all that there is.
    pub(super) fn all_is_read(&self) -> Checked {
        if self.plan.settings.step_limit.is_some() {
            return Ok(());
        }
        let corpus = &self.plan.corpus;
        match (0..corpus.files.len()).find(|&file| {
            !corpus.files[file].is_added && (self.plan.settings.open && !self.intake.has_read(corpus, file))
        }) {
            Some(file) => broken("LIVENESS", format!("file {file} was not read to its end")),
            None => Ok(()),
        }
    }

    /// Whether a complete run must have the weights of the undisturbed one: if it was never longer or otherwise than at its
    /// start. The rates of an open run depend on when it is closed.
    pub(super) fn follows_the_quiet_run(&self) -> bool {
        !self.checks.book.changed && !self.plan.settings.open
    }

    /// The weights of the undisturbed run follow from its samples alone.
    pub(super) fn like_the_quiet_run(&self) -> Checked {
        let book = &self.checks.book;
        if !self.follows_the_quiet_run() {
            return Ok(());
        }
        let settings = &self.plan.settings;
        let mut left: Vec<(Unit, u32)> = Vec::new();
        for pass in 0..settings.passes {
            for (number, fact) in (0..).zip(&book.facts) {
                if fact.location.is_some() {
                    let sample = eaglet_runtime::ids::SampleSeq(number);
                    left.push((Unit { pass, sample }, fact.tokens));
                }
            }
        }
        let mut steps = Vec::new();
        let mut at = 0;
        while at < left.len()
            && settings
                .step_limit
                .is_none_or(|limit| (steps.len() as u64) < limit)
        {
            let rows = rows_of(
                left[at..].iter().copied(),
                settings.lanes,
                settings.tokens_per_row,
            );
            at += rows.iter().map(Vec::len).sum::<usize>();
            steps.push(rows);
        }
        let total = steps.len() as u64;
        let mut weights = Weights::INITIAL;
        for rows in steps {
            let contents: Vec<u64> = (0..)
                .zip(&rows)
                .filter(|(_, row)| !row.is_empty())
                .map(|(lane, row)| row_content(weights.step, lane, row))
                .collect();
            let rate = settings
                .learning_rate
                .at(weights.step.0, Length::Whole(total), Pace::default());
            weights = weights.after(&mean(&contents), rate);
        }
        if book.chain.last() != Some(&weights) {
            return broken(
                "LANES",
                format!(
                    "the run ends with {:?}, and the undisturbed one with {weights:?}",
                    book.chain.last()
                ),
            );
        }
        Ok(())
    }
}
