//! The first samples of a run as its verifier will read them: what they are, what is refused and why.
//!
//! A bounded number of rows is read, shared evenly between the files, and what they hold is extrapolated by the size of
//! the files. Limits are those of the intake.

mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{
    ChatTokenizer, SampleLimits, Skip, Source, SourceOptions, TokenCounts, samples_of,
};
use serde::Serialize;

use self::steps::steps_of;
use crate::config::ClusterConfig;

/// How much is read.
#[derive(Clone, Copy, Debug)]
pub struct SampleBudget {
    /// Rows of all files together.
    pub rows: usize,
    /// Time after which no further row is read.
    pub time: Duration,
}

/// Rows, or answers in them, that are not trained, for one reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The kind of reason.
    pub reason: &'static str,
    /// How many.
    pub count: u64,
    /// The first of them: its place, and the reason in full.
    pub first: String,
}

/// What the first rows hold.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SampleSurvey {
    /// Files that were looked into.
    pub files: u64,
    /// Rows that were read.
    pub rows: u64,
    /// Whether these are all rows of all files.
    pub whole: bool,
    /// Samples in them: one for each answer that can be trained.
    pub samples: u64,
    /// Tokens of the samples.
    pub tokens: u64,
    /// Tokens that are trained.
    pub trained_tokens: u64,
    /// The longest sample before it is cut, in tokens.
    pub longest_tokens: u64,
    /// Where it stands.
    pub longest_place: String,
    /// Samples that are cut at the end of a row.
    pub truncated: u64,
    /// Rows and answers that are put aside, by reason, most frequent first.
    pub refused: Vec<Refusal>,
    /// Prompts that are held out.
    pub held_out_prompts: u64,
    /// Samples that end with a token that ends answers.
    pub stopped: u64,
    /// Samples of all files, by their size.
    pub estimated_samples: u64,
    /// Tokens of all samples of all files.
    pub estimated_tokens: u64,
    /// Tokens of a row as rows are packed.
    pub tokens_per_row: f64,
    /// Share of positions that are unrolled: those with a trained token within the TTT steps.
    pub active_share: f64,
    /// Tokens that a query sees on average.
    pub visible_tokens: f64,
    /// Optimizer steps of the run, if no more samples come.
    pub steps: u64,
    /// Trained tokens, counted; all, and those of every second sample.
    #[serde(skip)]
    pub(crate) counts: [TokenCounts; 2],
    /// Length of each sample, in order.
    #[serde(skip)]
    lengths: Vec<u32>,
    #[serde(skip)]
    sums: Sums,
    #[serde(skip)]
    reasons: BTreeMap<&'static str, (u64, String)>,
}

/// Sums over samples from which averages are made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    positions: u64,
    active: u64,
    visible: f64,
    /// Bytes of the files, and those that were read.
    bytes: u64,
    bytes_read: u64,
}

/// A file that cannot be read at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unreadable {
    /// The key that names it.
    pub(crate) key: String,
    /// What is wrong.
    pub(crate) what: String,
}

/// Reads rows of a run's files until the budget is spent.
pub(crate) struct Reader<'a> {
    config: &'a ClusterConfig,
    tokenizer: &'a ChatTokenizer,
    stop_ids: &'a [u32],
    limits: SampleLimits,
    prompt_limits: SampleLimits,
    deadline: Instant,
    conversations: u64,
    survey: SampleSurvey,
    unreadable: Vec<Unreadable>,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(
        config: &'a ClusterConfig,
        tokenizer: &'a ChatTokenizer,
        stop_ids: &'a [u32],
        budget: SampleBudget,
    ) -> Self {
        Self {
            config,
            tokenizer,
            stop_ids,
            limits: config.sample_limits(),
            prompt_limits: config.prompt_limits(),
            deadline: Instant::now() + budget.time,
            conversations: 0,
            survey: SampleSurvey {
                whole: true,
                ..SampleSurvey::default()
            },
            unreadable: Vec::new(),
        }
    }

    /// Reads the files, each with the key that names it.
    pub(crate) fn read(
        mut self,
        files: &[(String, PathBuf)],
        held_out: &[(String, PathBuf)],
        rows: usize,
    ) -> (SampleSurvey, Vec<Unreadable>) {
        // A quarter of the rows at most for what is held out; what that leaves is for the others.
        let share = (rows / 4 / held_out.len().max(1)).max(1);
        for (key, file) in held_out {
            self.read_file(key, file, share, true);
        }
        for (index, (key, file)) in files.iter().enumerate() {
            let left = rows.saturating_sub(self.survey.rows as usize);
            let share = (left / (files.len() - index)).max(1);
            self.read_file(key, file, share, false);
        }
        self.finish()
    }

    fn read_file(&mut self, key: &str, file: &Path, rows: usize, held_out: bool) {
        let options = SourceOptions {
            row_limit_bytes: self.config.samples.max_line_bytes,
            ..SourceOptions::default()
        };
        if let Err(error) = self.read_rows(file, options, rows, held_out) {
            self.unreadable.push(Unreadable {
                key: key.to_owned(),
                what: error.to_string(),
            });
        }
    }

    fn read_rows(
        &mut self,
        file: &Path,
        options: SourceOptions,
        rows: usize,
        held_out: bool,
    ) -> Result<(), eaglet_runtime::samples::SourceError> {
        let mut source = Source::open(file, options)?;
        let length = std::fs::metadata(file).map_or(0, |metadata| metadata.len());
        let mut is_whole = false;
        for _ in 0..rows {
            if Instant::now() >= self.deadline {
                break;
            }
            let Some(row) = source.next_row()? else {
                is_whole = true;
                break;
            };
            self.survey.rows += 1;
            let place = format!("{}:{}", file.display(), row.line);
            match &row.conversation {
                Err(quarantine) => self.refuse(quarantine.reason.kind(), &place, &quarantine.reason),
                Ok(conversation) if held_out => self.hold_out(conversation, &place),
                Ok(conversation) => {
                    self.conversations += 1;
                    let every = self.config.held_out_every();
                    if every > 0 && self.conversations.is_multiple_of(every) {
                        self.hold_out(conversation, &place);
                    } else {
                        self.take(conversation, &place);
                    }
                }
            }
        }
        is_whole |= source.position().offset_bytes >= length;
        self.survey.files += 1;
        if !held_out {
            self.survey.whole &= is_whole;
            self.survey.sums.bytes += length;
            self.survey.sums.bytes_read += if is_whole {
                length
            } else {
                source.position().offset_bytes
            };
        }
        Ok(())
    }

    fn hold_out(&mut self, conversation: &eaglet_runtime::samples::Conversation, place: &str) {
        match samples_of(conversation, self.tokenizer, self.prompt_limits) {
            Ok(_) => self.survey.held_out_prompts += 1,
            Err(reason) => self.refuse(reason.kind(), place, &reason),
        }
    }

    fn take(&mut self, conversation: &eaglet_runtime::samples::Conversation, place: &str) {
        let masked = match samples_of(conversation, self.tokenizer, self.limits) {
            Ok(masked) => masked,
            Err(reason) => return self.refuse(reason.kind(), place, &reason),
        };
        let room = self.config.training.tokens_per_row;
        let mut is_cut = masked.cut_samples > 0;
        self.survey.truncated += masked.cut_samples as u64;
        for skipped in &masked.skipped {
            let reason = match skipped.skip {
                Skip::PromptTooLong { .. } => {
                    is_cut = true;
                    "prompt too long"
                }
                Skip::TooFewTrained { .. } => "too few trained tokens",
            };
            self.refuse(reason, place, skipped);
        }
        for sample in &masked.samples {
            if sample.tokens.len() > room {
                self.lengthen(sample.tokens.len() as u64, place);
                let text = format!(
                    "it has {} tokens and a row has room for {room}; raise training.tokens_per_row",
                    sample.tokens.len()
                );
                self.refuse("longer than a row", place, &text);
                continue;
            }
            self.count(sample, place);
        }
        if is_cut {
            // How long they are whole is worth a second look, because few are.
            let whole = samples_of(conversation, self.tokenizer, SampleLimits::default());
            let lengths = whole.into_iter().flat_map(|masked| masked.samples);
            let longest = lengths.map(|sample| sample.tokens.len()).max().unwrap_or(0);
            self.lengthen(longest as u64, place);
        }
    }

    fn count(&mut self, sample: &Sample, place: &str) {
        let length = sample.tokens.len();
        let first = sample
            .loss_mask
            .iter()
            .position(|&mask| mask != 0)
            .unwrap_or(length);
        let steps = self.config.training.ttt_steps;
        let window = self.config.draft.window().unwrap_or(usize::MAX);
        let survey = &mut self.survey;
        survey.counts[(survey.samples % 2) as usize].add(sample);
        survey.samples += 1;
        survey.tokens += length as u64;
        survey.trained_tokens += (length - first) as u64;
        survey.lengths.push(length as u32);
        let positions = length.saturating_sub(1);
        survey.sums.positions += positions as u64;
        // A position is unrolled from `steps` tokens before the first trained one on.
        survey.sums.active += (positions - first.saturating_sub(steps).min(positions)) as u64;
        let seen = positions.min(window) as f64;
        survey.sums.visible += seen * (seen + 1.0) / 2.0 + (positions as f64 - seen) * seen;
        let stops = sample
            .tokens
            .iter()
            .zip(&sample.loss_mask)
            .any(|(token, &mask)| mask != 0 && self.stop_ids.contains(token));
        survey.stopped += u64::from(stops);
        self.lengthen(length as u64, place);
    }

    fn lengthen(&mut self, tokens: u64, place: &str) {
        if tokens > self.survey.longest_tokens {
            self.survey.longest_tokens = tokens;
            self.survey.longest_place = place.to_owned();
        }
    }

    fn refuse(&mut self, reason: &'static str, place: &str, text: &impl ToString) {
        let entry = self.survey.reasons.entry(reason);
        let (count, _) = entry.or_insert_with(|| (0, format!("{place}: {}", text.to_string())));
        *count += 1;
    }

    fn finish(mut self) -> (SampleSurvey, Vec<Unreadable>) {
        let survey = &mut self.survey;
        let mut refused: Vec<Refusal> = std::mem::take(&mut survey.reasons)
            .into_iter()
            .map(|(reason, (count, first))| Refusal { reason, count, first })
            .collect();
        refused.sort_by_key(|refusal| std::cmp::Reverse(refusal.count));
        survey.refused = refused;
        let sums = survey.sums;
        let scale = if sums.bytes_read == 0 || survey.whole {
            1.0
        } else {
            sums.bytes as f64 / sums.bytes_read as f64
        };
        let scaled = |count: u64| (count as f64 * scale).round() as u64;
        survey.estimated_samples = scaled(survey.samples);
        survey.estimated_tokens = scaled(survey.tokens);
        let share = |part: f64| part / (sums.positions as f64).max(1.0);
        survey.active_share = share(sums.active as f64);
        survey.visible_tokens = share(sums.visible);
        let training = &self.config.training;
        let lanes = usize::from(self.config.rows_per_step());
        let (steps, tokens_per_row) = steps_of(
            &survey.lengths,
            lanes,
            training.tokens_per_row,
            training.passes,
            scale,
        );
        survey.steps = training.steps.map_or(steps, |limit| limit.min(steps));
        survey.tokens_per_row = tokens_per_row;
        (self.survey, self.unreadable)
    }
}
