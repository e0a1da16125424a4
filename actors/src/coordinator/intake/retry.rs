//! Quarantined samples again.
//!
//! A sample that was refused on arrival is read again from its line, which somebody may have mended; if it is good now,
//! it takes its old number. What the line gives beyond what the journal knows of comes in as new samples. A sample that a
//! verifier refused is sent to a verifier again as it is.

use std::collections::BTreeMap;
use std::path::Path;

use eaglet_runtime::control::OperatorReply;
use eaglet_runtime::ids::SampleSeq;
use eaglet_runtime::samples::{Row, Source, SourceError, Tail};

use super::reader::{Reader, Stop};
use super::{IntakeItem, Outlet, Verdict, name_of};
use crate::journal::{self, KnownSample, SampleBook, SampleSource};

/// Samples that are still refused and are named in an answer.
const REASONS_SHOWN: usize = 10;

/// Samples that were refused on arrival, by file and line.
type ByLine<'a> = BTreeMap<&'a str, BTreeMap<u64, Vec<(SampleSeq, &'a KnownSample)>>>;

/// What became of the samples that were tried again.
#[derive(Default)]
struct Tally {
    pending: u64,
    new: u64,
    left: Vec<String>,
}

impl Tally {
    fn leave(&mut self, sample: SampleSeq, known: &KnownSample, reason: &str) {
        let source = &known.source;
        self.left.push(format!(
            "sample {sample} ({}:{}): {reason}",
            source.file, source.line
        ));
    }

    fn into_reply(self) -> OperatorReply {
        let mut lines = vec![format!("pending again: {}", self.pending)];
        if self.new > 0 {
            lines.push(format!("new, from the same lines: {}", self.new));
        }
        if !self.left.is_empty() {
            lines.push(format!("not pending again: {}", self.left.len()));
        }
        lines.extend(self.left.iter().take(REASONS_SHOWN).cloned());
        if self.left.len() > REASONS_SHOWN {
            lines.push("see `eaglet samples list` for the others".to_owned());
        }
        let text = lines.join("\n");
        if self.pending + self.new > 0 || self.left.is_empty() {
            OperatorReply::Done(text)
        } else {
            OperatorReply::Refused(text)
        }
    }
}

impl<O: Outlet> Reader<O> {
    /// Tries quarantined samples again; none stands for all.
    pub(super) fn retry(&mut self, wanted: &[SampleSeq]) -> Result<OperatorReply, Stop> {
        // The journal must know all that was read, so that nothing of it comes in a second time.
        self.flush()?;
        let book = match journal::read(&self.journal) {
            Ok(replay) => SampleBook::of(&replay.records),
            Err(error) => return Ok(OperatorReply::Refused(error.to_string())),
        };
        let mut tally = Tally::default();
        let mut by_line = ByLine::new();
        let mut at_verifier = Vec::new();
        for (sample, known) in chosen(&book, wanted, &mut tally) {
            if known.refused.is_some() {
                let lines = by_line.entry(known.source.file.as_str()).or_default();
                lines.entry(known.source.line).or_default().push((sample, known));
            } else {
                at_verifier.push(sample);
            }
        }
        for sample in at_verifier {
            tally.pending += 1;
            self.push_item(IntakeItem::Retried { sample, mended: None });
        }
        for (file, lines) in by_line {
            self.retry_file(&book, file, lines, &mut tally)?;
        }
        self.grow(None)?;
        Ok(tally.into_reply())
    }

    /// Reads lines of a file again.
    fn retry_file(
        &mut self,
        book: &SampleBook,
        file: &str,
        lines: BTreeMap<u64, Vec<(SampleSeq, &KnownSample)>>,
        tally: &mut Tally,
    ) -> Result<(), Stop> {
        let mut lines = lines.into_iter().peekable();
        let tried = Source::open(Path::new(file), self.options(Tail::Final)).and_then(|mut source| {
            let mut row = None;
            while let Some((line, samples)) = lines.peek() {
                let (id, verdicts) = self.read_line(&mut source, &mut row, *line)?;
                let place = SampleSource {
                    file: file.to_owned(),
                    line: *line,
                    id,
                };
                let known_samples = book.records_of(file, *line);
                self.retry_line(place, verdicts, samples, known_samples, tally);
                lines.next();
                if let Err(stop) = self.flush() {
                    return Ok(Err(stop));
                }
            }
            Ok(Ok(()))
        });
        match tried {
            Ok(done) => done,
            Err(error) => {
                for (sample, known) in lines.flat_map(|(_, samples)| samples) {
                    tally.leave(sample, known, &error.to_string());
                }
                Ok(())
            }
        }
    }

    /// What a line gives, and its name. `row` is the row that was read last and not used.
    fn read_line(
        &self,
        source: &mut Source,
        row: &mut Option<Row>,
        line: u64,
    ) -> Result<(Option<String>, Vec<Verdict>), SourceError> {
        if row.as_ref().is_none_or(|row| row.line < line) {
            source.pass_over(line)?;
            *row = source.next_row()?;
        }
        let (mut id, mut verdicts) = (None, Vec::new());
        while let Some(present) = row.take_if(|row| row.line == line) {
            id = id.or_else(|| name_of(&present));
            verdicts.extend(self.converter.verdicts(&present));
            *row = source.next_row()?;
        }
        Ok((id, verdicts))
    }

    fn retry_line(
        &mut self,
        source: SampleSource,
        mut verdicts: Vec<Verdict>,
        samples: &[(SampleSeq, &KnownSample)],
        known_samples: u32,
        tally: &mut Tally,
    ) {
        let count = verdicts.len();
        let beyond = verdicts.split_off(count.min(known_samples as usize));
        for &(sample, known) in samples {
            match verdicts.get_mut(known.ordinal as usize) {
                Some(verdict) => {
                    self.count(verdict);
                    match std::mem::replace(verdict, Err(String::new())) {
                        Ok(mended) => {
                            tally.pending += 1;
                            let mended = Some(mended);
                            self.push_item(IntakeItem::Retried { sample, mended });
                        }
                        Err(reason) => tally.leave(sample, known, &reason),
                    }
                }
                None => tally.leave(sample, known, &format!("its line gives {count} samples now")),
            }
        }
        if !beyond.is_empty() {
            self.note_taken(&source, count as u32);
        }
        for verdict in beyond {
            tally.new += 1;
            self.push(source.clone(), verdict);
        }
    }
}

/// The quarantined ones of the wanted samples; the others are told.
fn chosen<'a>(
    book: &'a SampleBook,
    wanted: &[SampleSeq],
    tally: &mut Tally,
) -> Vec<(SampleSeq, &'a KnownSample)> {
    let quarantined = |known: &KnownSample| known.quarantine().is_some();
    if wanted.is_empty() {
        return book.samples().filter(|(_, known)| quarantined(known)).collect();
    }
    let mut chosen = BTreeMap::new();
    for &sample in wanted {
        match book.sample(sample) {
            Some(known) if quarantined(known) => {
                chosen.insert(sample, known);
            }
            Some(known) => tally.leave(sample, known, "it is not quarantined"),
            None => tally
                .left
                .push(format!("sample {sample}: the run has no such sample")),
        }
    }
    chosen.into_iter().collect()
}
