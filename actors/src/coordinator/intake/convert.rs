//! From a row to samples.

use std::collections::HashSet;
use std::sync::Arc;

use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{ChatRole, ChatTokenizer, Conversation, Row, SampleLimits, samples_of};

use super::Verdict;
use crate::config::ClusterConfig;

/// Cuts rows into samples and holds conversations out.
pub(super) struct Converter {
    tokenizer: Arc<ChatTokenizer>,
    limits: SampleLimits,
    prompt_limits: SampleLimits,
    /// Tokens of a row.
    room: usize,
    max_new_tokens: usize,
    /// Every so many conversations one is held out; 0 holds none out.
    held_out_every: u64,
    /// Tokens that held-out prompts and their answers may have together.
    held_out_room: usize,
    held_out_tokens: usize,
    prompts: Vec<Vec<u32>>,
    /// Prompts that are held out for good: no later sample may begin with one of them.
    reserved: HashSet<Vec<u32>>,
    conversations: u64,
}

impl Converter {
    pub(super) fn new(config: &ClusterConfig, tokenizer: Arc<ChatTokenizer>) -> Self {
        let (samples, training) = (&config.samples, &config.training);
        let room = training.tokens_per_row;
        Self {
            tokenizer,
            limits: config.sample_limits(),
            prompt_limits: config.prompt_limits(),
            room,
            max_new_tokens: training.max_new_tokens,
            held_out_every: config.held_out_every(),
            held_out_room: samples.held_out_rows * room * usize::from(config.rows_per_step()),
            held_out_tokens: 0,
            prompts: Vec::new(),
            reserved: HashSet::new(),
            conversations: 0,
        }
    }

    /// Conversations so far, those of earlier launches and those that were held out included.
    pub(super) fn conversations(&self) -> u64 {
        self.conversations
    }

    /// Whether conversations must be counted, also those that are known already.
    pub(super) fn counts_conversations(&self) -> bool {
        self.held_out_every > 0
    }

    /// Counts a row that an earlier launch has dealt with.
    pub(super) fn count(&mut self, row: &Row) {
        self.conversations += u64::from(row.conversation.is_ok());
    }

    /// Takes the prompts that were held out when the preparation was complete; more are not.
    pub(super) fn reserve(&mut self, prompts: &[Vec<u32>]) {
        if self.counts_conversations() {
            self.reserved = prompts.iter().cloned().collect();
        }
        self.held_out_room = 0;
    }

    /// Held-out prompts.
    pub(super) fn prompts(&self) -> Vec<Vec<u32>> {
        self.prompts.clone()
    }

    /// What a new row gives: nothing if its conversation is held out.
    pub(super) fn take(&mut self, row: &Row) -> Vec<Verdict> {
        if let Ok(conversation) = &row.conversation {
            self.conversations += 1;
            if self.held_out_every > 0 && self.conversations.is_multiple_of(self.held_out_every) {
                self.hold_out(conversation);
                return Vec::new();
            }
        }
        let verdicts = self.verdicts(row);
        // After a crash a conversation that was held out at the end of a growing file is seen again, and leaves no other
        // trace than its prompt.
        let first = verdicts.iter().flatten().next();
        if first.is_some_and(|sample| self.reserved.contains(prompt_of(sample))) {
            return Vec::new();
        }
        verdicts
    }

    /// The samples of a row and the reasons for those that are missing, in the order of its answers.
    pub(super) fn verdicts(&self, row: &Row) -> Vec<Verdict> {
        let conversation = match &row.conversation {
            Ok(conversation) => conversation,
            Err(quarantine) => return vec![Err(quarantine.reason.to_string())],
        };
        let masked = match samples_of(conversation, &self.tokenizer, self.limits) {
            Ok(masked) => masked,
            Err(reason) => return vec![Err(reason.to_string())],
        };
        let (mut samples, mut skipped) = (masked.samples.into_iter(), masked.skipped.into_iter().peekable());
        let answers = (1..).zip(&conversation.messages).skip(1);
        let answers = answers.filter(|(_, message)| message.role == ChatRole::Assistant);
        answers
            .filter_map(
                |(number, _)| match skipped.next_if(|skipped| skipped.message == number) {
                    Some(skipped) => Some(Err(skipped.to_string())),
                    None => samples.next().map(|sample| self.fitting(sample)),
                },
            )
            .collect()
    }

    fn fitting(&self, sample: Sample) -> Verdict {
        let (length, room) = (sample.tokens.len(), self.room);
        if length > room {
            return Err(format!(
                "it has {length} tokens and a row has room for {room}; raise training.tokens_per_row"
            ));
        }
        Ok(sample)
    }

    /// Keeps the prompt of the first answer, as long as it leaves room for one.
    pub(super) fn hold_out(&mut self, conversation: &Conversation) {
        match samples_of(conversation, &self.tokenizer, self.prompt_limits) {
            Ok(masked) => {
                let Some(sample) = masked.samples.first() else {
                    return;
                };
                let prompt = prompt_of(sample);
                // No more is kept than all lanes together evaluate.
                let need = prompt.len() + self.max_new_tokens;
                if !prompt.is_empty() && self.held_out_tokens + need <= self.held_out_room {
                    self.held_out_tokens += need;
                    self.prompts.push(prompt.to_vec());
                }
            }
            Err(reason) => tracing::warn!(%reason, "a held-out conversation cannot be used"),
        }
    }
}

/// What comes before the first trained token.
fn prompt_of(sample: &Sample) -> &[u32] {
    let trained = sample.loss_mask.iter().position(|&trained| trained != 0);
    &sample.tokens[..trained.unwrap_or(sample.tokens.len())]
}
