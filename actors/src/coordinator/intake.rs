//! Reads the sample files, cuts conversations into samples, counts the draft vocabulary.
//!
//! A bad row or answer is told to the engine, which quarantines it; it never stops a run. A file that cannot be read
//! does, with its name.

use std::path::Path;
use std::sync::Arc;

use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{
    ChatTokenizer, Conversation, DraftVocabulary, SampleLimits, Source, SourceOptions, TokenCounts,
    samples_of,
};
use ractor::{Actor, ActorProcessingErr, ActorRef};

use super::cluster::{ClusterMessage, IntakeItem};
use crate::config::{ClusterConfig, TooLong};
use crate::engine::Event;
use crate::journal::SampleSource;

/// Samples handed over at once.
const BATCH: usize = 64;

/// The actor; its work is one pass over the files.
pub(super) struct Intake;

/// What it is made from.
pub(super) struct IntakeArguments {
    pub(super) config: ClusterConfig,
    pub(super) tokenizer: Arc<ChatTokenizer>,
    pub(super) verifier_vocab_size: usize,
    /// Samples that an earlier launch has taken in, in this very order.
    pub(super) already_in: u64,
    pub(super) cluster: ActorRef<ClusterMessage>,
}

/// Its only message: begin.
pub(super) struct Begin;

impl Actor for Intake {
    type Msg = Begin;
    type State = Option<IntakeArguments>;
    type Arguments = IntakeArguments;

    async fn pre_start(
        &self,
        myself: ActorRef<Begin>,
        arguments: IntakeArguments,
    ) -> Result<Self::State, ActorProcessingErr> {
        myself.cast(Begin)?;
        Ok(Some(arguments))
    }

    async fn handle(
        &self,
        myself: ActorRef<Begin>,
        _: Begin,
        state: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        let Some(arguments) = state.take() else {
            return Ok(());
        };
        let cluster = arguments.cluster.clone();
        let handle = tokio::runtime::Handle::current();
        let result = tokio::task::spawn_blocking(move || Reader::new(arguments, handle).run()).await?;
        let event = result.unwrap_or_else(|report| Event::Broken { report });
        cluster.cast(ClusterMessage::Event(event))?;
        myself.stop(None);
        Ok(())
    }
}

struct Reader {
    arguments: IntakeArguments,
    runtime: tokio::runtime::Handle,
    counts: TokenCounts,
    batch: Vec<IntakeItem>,
    held_out: Vec<Vec<u32>>,
    held_out_tokens: usize,
    conversations: u64,
    refused: u64,
}

impl Reader {
    fn new(arguments: IntakeArguments, runtime: tokio::runtime::Handle) -> Self {
        Self {
            arguments,
            runtime,
            counts: TokenCounts::new(),
            batch: Vec::new(),
            held_out: Vec::new(),
            held_out_tokens: 0,
            conversations: 0,
            refused: 0,
        }
    }

    fn run(mut self) -> Result<Event, String> {
        let samples = self.arguments.config.samples.clone();
        for file in &samples.held_out {
            self.read(file, |reader, _, conversation| {
                reader.hold_out(conversation);
                Ok(())
            })?;
        }
        for file in &samples.files {
            self.read(file, Self::take)?;
        }
        self.hand_over()?;
        if self.counts.total() == 0 {
            let names: Vec<_> = samples
                .files
                .iter()
                .map(|file| file.display().to_string())
                .collect();
            return Err(format!(
                "{}: no sample can be trained ({} conversations were read, {} rows or answers quarantined); \
                 name other files in samples.files",
                names.join(", "),
                self.conversations,
                self.refused,
            ));
        }
        let size = self
            .arguments
            .config
            .draft
            .draft_vocab_size(self.arguments.verifier_vocab_size);
        let vocabulary = DraftVocabulary::from_counts(&self.counts, size, self.arguments.verifier_vocab_size)
            .map_err(|error| format!("draft.vocab_size: {error}"))?;
        Ok(Event::Prepared {
            coverage: vocabulary.coverage(&self.counts).unwrap_or(0.0),
            vocabulary: vocabulary.ids().to_vec(),
            held_out: self.held_out,
        })
    }

    fn read(
        &mut self,
        file: &Path,
        mut take: impl FnMut(&mut Self, SampleSource, &Conversation) -> Result<(), String>,
    ) -> Result<(), String> {
        let options = SourceOptions {
            row_limit_bytes: self.arguments.config.samples.max_line_bytes,
            ..SourceOptions::default()
        };
        let mut source = Source::open(file, options).map_err(|error| error.to_string())?;
        while let Some(row) = source.next_row().map_err(|error| error.to_string())? {
            let _sample = tracing::info_span!("sample", file = %file.display(), line = row.line).entered();
            let place = |id: Option<String>| SampleSource {
                file: file.display().to_string(),
                line: row.line,
                id,
            };
            match &row.conversation {
                Ok(conversation) => take(self, place(conversation.id.clone()), conversation)?,
                Err(quarantine) => {
                    self.push(place(quarantine.id.clone()), Err(quarantine.reason.to_string()))?;
                }
            }
        }
        Ok(())
    }

    fn take(&mut self, source: SampleSource, conversation: &Conversation) -> Result<(), String> {
        self.conversations += 1;
        let samples = &self.arguments.config.samples;
        if samples.held_out.is_empty()
            && samples.held_out_every > 0
            && self.conversations.is_multiple_of(samples.held_out_every)
        {
            self.hold_out(conversation);
            return Ok(());
        }
        let room = self.arguments.config.training.tokens_per_row;
        let whole = samples.too_long == TooLong::Quarantine;
        let limits = SampleLimits {
            max_tokens: if whole { usize::MAX } else { room },
            min_trained_tokens: samples.min_trained_tokens,
        };
        match samples_of(conversation, &self.arguments.tokenizer, limits) {
            Ok(masked) => {
                for skipped in &masked.skipped {
                    self.push(source.clone(), Err(skipped.to_string()))?;
                }
                for sample in masked.samples {
                    if sample.tokens.len() > room {
                        let reason = format!(
                            "it has {} tokens and a row has room for {room}; raise training.tokens_per_row",
                            sample.tokens.len()
                        );
                        self.push(source.clone(), Err(reason))?;
                        continue;
                    }
                    self.counts.add(&sample);
                    self.push(source.clone(), Ok(sample))?;
                }
            }
            Err(reason) => self.push(source, Err(reason.to_string()))?,
        }
        Ok(())
    }

    /// The prompt of the first answer, as long as it leaves room for one.
    fn hold_out(&mut self, conversation: &Conversation) {
        let training = &self.arguments.config.training;
        let limits = SampleLimits {
            max_tokens: training
                .tokens_per_row
                .saturating_sub(training.max_new_tokens)
                .max(2),
            min_trained_tokens: 1,
        };
        match samples_of(conversation, &self.arguments.tokenizer, limits) {
            Ok(masked) => {
                if let Some(Sample {
                    mut tokens,
                    loss_mask,
                }) = masked.samples.into_iter().next()
                {
                    let prompt = loss_mask
                        .iter()
                        .position(|&trained| trained != 0)
                        .unwrap_or(tokens.len());
                    tokens.truncate(prompt);
                    // No more is kept than all lanes together evaluate.
                    let config = &self.arguments.config;
                    let need = tokens.len() + config.training.max_new_tokens;
                    let room = config.samples.held_out_rows
                        * config.training.tokens_per_row
                        * usize::from(config.rows_per_step());
                    if !tokens.is_empty() && self.held_out_tokens + need <= room {
                        self.held_out_tokens += need;
                        self.held_out.push(tokens);
                    }
                }
            }
            Err(reason) => tracing::warn!(%reason, "a held-out conversation cannot be used"),
        }
    }

    fn push(&mut self, source: SampleSource, verdict: Result<Sample, String>) -> Result<(), String> {
        self.refused += u64::from(verdict.is_err());
        if self.arguments.already_in > 0 {
            self.arguments.already_in -= 1;
            return Ok(());
        }
        self.batch.push(IntakeItem { source, verdict });
        if self.batch.len() >= BATCH {
            self.hand_over()
        } else {
            Ok(())
        }
    }

    fn hand_over(&mut self) -> Result<(), String> {
        let batch = std::mem::take(&mut self.batch);
        if batch.is_empty() {
            return Ok(());
        }
        let cluster = &self.arguments.cluster;
        self.runtime
            .block_on(async { ractor::call!(cluster, ClusterMessage::Intake, batch) })
            .map_err(|error| format!("the coordinator does not take samples any more: {error}"))
    }
}
