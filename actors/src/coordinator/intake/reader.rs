//! Reads the files that are due, and tells the engine and people of it.

use std::collections::{BTreeMap, HashSet};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use eaglet_runtime::samples::{
    ChatTokenizer, DraftVocabulary, Source, SourceError, SourceOptions, Tail, TokenCounts,
};

use super::convert::Converter;
use super::files::{KnownFile, Taken};
use super::{IntakeItem, IntakeRequest, Outlet, Reply, Verdict, name_of};
use crate::config::ClusterConfig;
use crate::engine::{Event, Notice};
use crate::journal::{SampleBook, SampleSource};
use crate::preflight::ENOUGH_COVERAGE;

/// Samples handed over at once.
const BATCH: usize = 64;
/// The engine counts the steps anew after so many samples of one file.
const GROWTH: u64 = 4096;
/// People are told of growth at most this often; the rest is only in the log.
const NOTICE_INTERVAL: Duration = Duration::from_secs(10);

/// Why the intake ends.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    /// Nobody takes samples any more.
    Gone,
    /// The run cannot go on; why, and what to do.
    Broken(String),
}

/// Whether more is taken.
pub(super) enum Door {
    Open,
    /// What there is is read to its end; then these are answered.
    Closing(Vec<Reply>),
    Closed,
}

/// The intake's thread.
pub(super) struct Reader<O> {
    pub(super) config: ClusterConfig,
    pub(super) journal: PathBuf,
    pub(super) converter: Converter,
    pub(super) outlet: O,
    pub(super) requests: Receiver<IntakeRequest>,
    verifier_vocab_size: usize,
    /// Files of `samples.held_out`, and what earlier launches have refused of them.
    held_out: Vec<(PathBuf, Taken)>,
    /// In the order in which they came.
    pub(super) files: Vec<KnownFile>,
    /// Paths of `files`.
    pub(super) known: HashSet<PathBuf>,
    /// Watched folders that cannot be read, and why.
    pub(super) folder_complaints: BTreeMap<PathBuf, String>,
    batch: Vec<IntakeItem>,
    /// Trained tokens of all samples, then of those that came after the preparation.
    pub(super) counts: TokenCounts,
    vocabulary: Option<DraftVocabulary>,
    /// Samples that the engine has not counted into its steps.
    uncounted: u64,
    refused: u64,
    pub(super) door: Door,
    noticed: Option<Instant>,
}

impl<O: Outlet> Reader<O> {
    pub(super) fn new(
        config: ClusterConfig,
        tokenizer: Arc<ChatTokenizer>,
        verifier_vocab_size: usize,
        book: &SampleBook,
        journal: PathBuf,
        requests: Receiver<IntakeRequest>,
        outlet: O,
    ) -> Self {
        let mut converter = Converter::new(&config, tokenizer);
        let mut vocabulary = None;
        if let Some(preparation) = book.prepared() {
            converter.reserve(&preparation.held_out);
            // Ids that the journal holds were made by this very type.
            vocabulary = DraftVocabulary::from_ids(preparation.vocabulary.clone(), verifier_vocab_size).ok();
        }
        let taken = |file: &Path| {
            book.read_so_far(file)
                .map_or(Taken::default(), |(line, samples)| Taken { line, samples })
        };
        let mut files: Vec<KnownFile> = Vec::new();
        for file in &config.samples.files {
            let mut known = KnownFile::new(file.clone(), true, taken(file));
            // They were read to their end before the preparation was complete.
            known.is_due = book.prepared().is_none() || config.samples.follow;
            files.push(known);
        }
        for file in book.added_sources() {
            match files.iter_mut().find(|known| known.path == *file) {
                Some(known) => known.is_due = true,
                None => files.push(KnownFile::new(file.clone(), false, taken(file))),
            }
        }
        if book.is_closed() {
            files.iter_mut().for_each(|file| file.is_due = false);
        }
        Self {
            held_out: config
                .samples
                .held_out
                .iter()
                .map(|file| (file.clone(), taken(file)))
                .collect(),
            known: files.iter().map(|file| file.path.clone()).collect(),
            config,
            journal,
            converter,
            outlet,
            requests,
            verifier_vocab_size,
            files,
            folder_complaints: BTreeMap::new(),
            batch: Vec::new(),
            counts: TokenCounts::new(),
            vocabulary,
            uncounted: 0,
            refused: 0,
            door: if book.is_closed() {
                Door::Closed
            } else {
                Door::Open
            },
            noticed: None,
        }
    }

    /// Works until the run is over.
    pub(super) fn run(mut self) -> Stop {
        match self.work() {
            Ok(never) => match never {},
            Err(stop) => stop,
        }
    }

    fn work(&mut self) -> Result<Infallible, Stop> {
        if self.is_prepared() {
            self.catch_up()?;
        } else {
            for (file, taken) in std::mem::take(&mut self.held_out) {
                self.read_held_out(&file, taken)?;
            }
        }
        self.watch(true)?;
        loop {
            self.read_due()?;
            let is_closing = matches!(self.door, Door::Closing(_));
            if is_closing {
                self.look_once_more()?;
            }
            if !self.is_prepared() {
                self.prepare()?;
            }
            if is_closing {
                self.close()?;
            }
            self.wait()?;
        }
    }

    fn is_prepared(&self) -> bool {
        self.vocabulary.is_some()
    }

    pub(super) fn options(&self, tail: Tail) -> SourceOptions {
        SourceOptions {
            row_limit_bytes: self.config.samples.max_line_bytes,
            tail,
        }
    }

    /// Reads all files that are due, also those that become so meanwhile.
    pub(super) fn read_due(&mut self) -> Result<(), Stop> {
        while let Some(index) = self.files.iter().position(|file| file.is_due) {
            let is_new = std::mem::take(&mut self.files[index].is_new);
            self.files[index].is_due = false;
            match self.read(index) {
                Ok(()) => self.files[index].complaint = None,
                Err(Trouble::Stop(stop)) => return Err(stop),
                Err(Trouble::File(error)) => self.complain(index, &error)?,
            }
            self.flush()?;
            // Whoever added a file hears of it, even if it holds nothing.
            if self.uncounted > 0 || is_new {
                self.grow(Some(index))?;
            }
        }
        Ok(())
    }

    /// Reads a file behind what was taken of it.
    fn read(&mut self, index: usize) -> Result<(), Trouble> {
        let tail = if self.config.samples.follow && matches!(self.door, Door::Open) {
            Tail::MayGrow
        } else {
            Tail::Final
        };
        let options = self.options(tail);
        let (mut source, taken) = self.files[index].open(options)?;
        let is_known_ground = self.is_prepared() && self.files[index].position.is_none();
        if is_known_ground {
            // Their samples have been counted, and so have their conversations.
            source.pass_over(taken.line)?;
        }
        self.files[index].position = Some(source.position());
        let file = self.files[index].path.display().to_string();
        let (mut line, mut samples) = (0, 0);
        while let Some(row) = source.next_row()? {
            let _sample = tracing::info_span!("sample", file, line = row.line).entered();
            if row.line != line {
                (line, samples) = (row.line, 0);
            }
            let id = name_of(&row);
            let verdicts = if is_known_ground && line == taken.line {
                self.converter.verdicts(&row)
            } else {
                self.converter.take(&row)
            };
            for verdict in verdicts {
                let is_taken = taken.holds(line, samples);
                samples += 1;
                if is_taken {
                    if !self.is_prepared() {
                        self.count(&verdict);
                    }
                    continue;
                }
                let id = id.clone();
                let file = file.clone();
                self.push(SampleSource { file, line, id }, verdict);
                self.files[index].taken = Taken { line, samples };
            }
            self.files[index].position = Some(source.position());
            if self.batch.len() >= BATCH {
                self.flush()?;
                if self.uncounted >= GROWTH {
                    self.grow(None)?;
                }
                self.take_waiting()?;
            }
        }
        self.files[index].position = Some(source.position());
        Ok(())
    }

    /// Counts the conversations that earlier launches have read, so that the right ones are held out.
    fn catch_up(&mut self) -> Result<(), Stop> {
        if !self.converter.counts_conversations() || matches!(self.door, Door::Closed) {
            return Ok(());
        }
        for index in 0..self.files.len() {
            let (path, taken) = (self.files[index].path.clone(), self.files[index].taken);
            let whole = !self.files[index].is_due;
            let counted = Source::open(&path, self.options(Tail::Final)).and_then(|mut source| {
                while let Some(row) = source.next_row()? {
                    if !whole && row.line > taken.line {
                        break;
                    }
                    self.converter.count(&row);
                }
                Ok(())
            });
            if let Err(error) = counted {
                tracing::warn!(%error, "the conversations of a file are not counted");
            }
            self.take_waiting()?;
        }
        Ok(())
    }

    /// Holds a file out. Rows that cannot be read are quarantined as those of any other file.
    fn read_held_out(&mut self, file: &Path, taken: Taken) -> Result<(), Stop> {
        let broken = |error: SourceError| Stop::Broken(error.to_string());
        let mut source = Source::open(file, self.options(Tail::Final)).map_err(broken)?;
        let (mut line, mut samples) = (0, 0);
        while let Some(row) = source.next_row().map_err(broken)? {
            let file = file.display().to_string();
            let _sample = tracing::info_span!("sample", file, line = row.line).entered();
            if row.line != line {
                (line, samples) = (row.line, 0);
            }
            match row.conversation {
                Ok(conversation) => self.converter.hold_out(&conversation),
                Err(quarantine) => {
                    if !taken.holds(line, samples) {
                        let id = quarantine.id;
                        self.push(
                            SampleSource { file, line, id },
                            Err(quarantine.reason.to_string()),
                        );
                    }
                    samples += 1;
                }
            }
        }
        self.flush()
    }

    /// Tells what training starts from, once there is something to train.
    fn prepare(&mut self) -> Result<(), Stop> {
        if self.counts.total() == 0 {
            if self.config.samples.is_open() && matches!(self.door, Door::Open) {
                return Ok(());
            }
            let names = self.files.iter().map(|file| file.path.display().to_string());
            return Err(Stop::Broken(format!(
                "{}: no sample can be trained ({} conversations were read, {} rows or answers quarantined); \
                 name other files in samples.files",
                names.collect::<Vec<_>>().join(", "),
                self.converter.conversations(),
                self.refused,
            )));
        }
        let verifier = self.verifier_vocab_size;
        let size = self.config.draft.draft_vocab_size(verifier);
        let vocabulary = DraftVocabulary::from_counts(&self.counts, size, verifier)
            .map_err(|error| Stop::Broken(format!("draft.vocab_size: {error}")))?;
        let prepared = Event::Prepared {
            coverage: vocabulary.coverage(&self.counts).unwrap_or(0.0),
            vocabulary: vocabulary.ids().to_vec(),
            held_out: self.converter.prompts(),
        };
        let prompts = self.converter.prompts();
        self.converter.reserve(&prompts);
        self.counts = TokenCounts::new();
        self.uncounted = 0;
        self.vocabulary = Some(vocabulary);
        self.outlet.tell(prepared)
    }

    /// Tells the engine that there is more to train, and people how much of it the draft can propose.
    pub(super) fn grow(&mut self, file: Option<usize>) -> Result<(), Stop> {
        self.flush()?;
        let more = std::mem::take(&mut self.uncounted);
        let Some(vocabulary) = &self.vocabulary else {
            return Ok(());
        };
        let coverage = vocabulary.coverage(&self.counts);
        self.outlet.tell(Event::Grown)?;
        let from = file.map_or(String::new(), |index| {
            format!(" from {}", self.files[index].path.display())
        });
        let mut text = format!("more samples{from}: {more}");
        let mut warning = false;
        if let Some(coverage) = coverage {
            let percent = 100.0 * coverage;
            text.push_str(&format!(
                "; the draft vocabulary covers {percent:.2} % of the trained tokens that came after the preparation"
            ));
            warning = coverage < ENOUGH_COVERAGE;
        }
        if warning {
            text.push_str(
                "; the draft can never propose the others: raise draft.vocab_size in a new run, or start it with \
                 representative samples",
            );
        }
        let quiet = self.noticed.is_some_and(|at| at.elapsed() < NOTICE_INTERVAL);
        if !quiet {
            self.noticed = Some(Instant::now());
        }
        self.outlet.notice(Notice { warning, quiet, text });
        Ok(())
    }

    fn complain(&mut self, index: usize, error: &SourceError) -> Result<(), Stop> {
        let file = &mut self.files[index];
        if file.is_configured && self.vocabulary.is_none() {
            return Err(Stop::Broken(error.to_string()));
        }
        let complaint = error.to_string();
        if file.complaint.as_ref() != Some(&complaint) {
            file.complaint = Some(complaint.clone());
            self.warn(format!("{complaint}; the run goes on without it"));
        }
        Ok(())
    }

    pub(super) fn warn(&mut self, text: String) {
        self.outlet.notice(Notice {
            warning: true,
            quiet: false,
            text,
        });
    }

    pub(super) fn count(&mut self, verdict: &Verdict) {
        if let Ok(sample) = verdict {
            self.counts.add(sample);
        }
    }

    /// Puts a new sample into the batch.
    pub(super) fn push(&mut self, source: SampleSource, verdict: Verdict) {
        self.count(&verdict);
        self.refused += u64::from(verdict.is_err());
        self.uncounted += 1;
        self.push_item(IntakeItem::Arrived { source, verdict });
    }

    pub(super) fn push_item(&mut self, item: IntakeItem) {
        self.batch.push(item);
    }

    /// Notes that more was taken of the last line that gave a sample.
    pub(super) fn note_taken(&mut self, source: &SampleSource, samples: u32) {
        let is_it = |file: &&mut KnownFile| file.path.display().to_string() == source.file;
        if let Some(file) = self.files.iter_mut().find(is_it)
            && file.taken.line == source.line
        {
            file.taken.samples = samples;
        }
    }

    /// Hands the batch over.
    pub(super) fn flush(&mut self) -> Result<(), Stop> {
        let batch = std::mem::take(&mut self.batch);
        if batch.is_empty() {
            return Ok(());
        }
        self.outlet.hand_over(batch)
    }
}

/// What keeps a file from being read.
enum Trouble {
    File(SourceError),
    Stop(Stop),
}

impl From<SourceError> for Trouble {
    fn from(error: SourceError) -> Self {
        Self::File(error)
    }
}

impl From<Stop> for Trouble {
    fn from(stop: Stop) -> Self {
        Self::Stop(stop)
    }
}
