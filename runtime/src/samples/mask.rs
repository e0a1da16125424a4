//! One sample per answer, with the mask of what is trained.
//!
//! The mask comes from rendering and comparing, never from searching for marks: the messages before an answer are rendered
//! with a generation prompt, the messages up to it without one, and what the second has beyond the first is trained. This is
//! the boundary rule of speculators 0.9. Where a model's generation prompt differs from what it later writes into the history
//! (an opened thought, or tokens that grow together across the boundary), the boundary falls back to the first token that
//! differs, provided that the history before the generation prompt is the same.
//!
//! Invariants: mask and tokens have the same length; the mask is zeros followed by ones; a sample has at most `max_tokens`
//! tokens, at least one of them trained.

use std::fmt;

use super::conversation::{ChatRole, Conversation};
use super::quarantine::Reason;
use super::template::Rendering;
use super::tokenizer::ChatTokenizer;
use crate::row::Sample;

/// Prompts longer than the limit by this many tokens stay too long when text is appended to them: appending can only merge
/// the few tokens at their end.
const CERTAINLY_LONGER_TOKENS: usize = 64;

/// How long samples may be and how much of them must be trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleLimits {
    /// Longer samples are cut at their end; an answer whose prompt alone is as long is skipped.
    pub max_tokens: usize,
    /// Answers of which fewer tokens are left to train are skipped. At least one is always required.
    pub min_trained_tokens: usize,
}

impl Default for SampleLimits {
    /// No limits.
    fn default() -> Self {
        Self {
            max_tokens: usize::MAX,
            min_trained_tokens: 1,
        }
    }
}

/// Why an answer gives no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// What comes before it fills the longest sample.
    PromptTooLong {
        /// Tokens before the answer; a lower bound if it was not worth counting.
        prompt_tokens: usize,
        /// The limit.
        max_tokens: usize,
    },
    /// Too little of it is left to train.
    TooFewTrained {
        /// Tokens left to train.
        trained_tokens: usize,
        /// The limit.
        min_trained_tokens: usize,
    },
}

impl fmt::Display for Skip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PromptTooLong {
                prompt_tokens,
                max_tokens,
            } => {
                write!(
                    f,
                    "its prompt of {prompt_tokens} tokens fills a sample of {max_tokens}"
                )
            }
            Self::TooFewTrained {
                trained_tokens,
                min_trained_tokens,
            } => {
                write!(
                    f,
                    "only {trained_tokens} tokens of it are left to train, fewer than {min_trained_tokens}"
                )
            }
        }
    }
}

/// An answer that gives no sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkippedTurn {
    /// The message with the answer, from 1.
    pub message: usize,
    /// Why it is skipped.
    pub skip: Skip,
}

impl fmt::Display for SkippedTurn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {}: {}", self.message, self.skip)
    }
}

/// The samples of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaskedConversation {
    /// One per answer, in order; never empty.
    pub samples: Vec<Sample>,
    /// The answers that give none.
    pub skipped: Vec<SkippedTurn>,
    /// How many of `samples` were cut at `max_tokens`.
    pub cut_samples: usize,
}

/// Cuts a conversation into samples, one per answer to an earlier message.
///
/// # Errors
/// With the reason for quarantine: the template or tokenizer refuses the conversation, the two renderings disagree about the
/// history, or no answer is left to train.
pub fn samples_of(
    conversation: &Conversation,
    tokenizer: &ChatTokenizer,
    limits: SampleLimits,
) -> Result<MaskedConversation, Reason> {
    let mut cutter = Cutter {
        rendering: tokenizer.template().begin(conversation),
        tokenizer,
        limits,
        too_long: None,
    };
    let mut masked = MaskedConversation {
        samples: Vec::new(),
        skipped: Vec::new(),
        cut_samples: 0,
    };
    // The first message answers nothing: it is context only.
    for (index, message) in conversation.messages.iter().enumerate().skip(1) {
        if message.role != ChatRole::Assistant {
            continue;
        }
        match cutter.cut(index)? {
            Ok(cut) => {
                masked.cut_samples += usize::from(cut.was_longer);
                masked.samples.push(cut.sample);
            }
            Err(skip) => masked.skipped.push(SkippedTurn {
                message: index + 1,
                skip,
            }),
        }
    }
    if masked.samples.is_empty() {
        let first = masked.skipped.first().ok_or(Reason::NoAnswer)?;
        return Err(Reason::NothingTrained {
            first: first.to_string(),
        });
    }
    Ok(masked)
}

/// A sample, and whether the conversation went on beyond it.
struct Cut {
    sample: Sample,
    was_longer: bool,
}

struct Cutter<'a> {
    rendering: Rendering<'a>,
    tokenizer: &'a ChatTokenizer,
    limits: SampleLimits,
    /// The last prompt that was certainly too long, with its tokens.
    too_long: Option<(String, usize)>,
}

impl Cutter<'_> {
    fn render(&self, messages: usize, add_generation_prompt: bool) -> Result<String, Reason> {
        self.rendering
            .render(messages, add_generation_prompt)
            .map_err(|error| Reason::Template {
                detail: error.to_string(),
            })
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, Reason> {
        self.tokenizer.encode(text).map_err(|error| Reason::Tokenizer {
            detail: error.to_string(),
        })
    }

    /// The sample of the answer at `index`.
    fn cut(&mut self, index: usize) -> Result<Result<Cut, Skip>, Reason> {
        let SampleLimits {
            max_tokens,
            min_trained_tokens,
        } = self.limits;
        let prompt_text = self.render(index, true)?;
        // Without this, a row of many short turns would be tokenised once per turn for nothing. Templates that shorten
        // the history do not keep the prefix and are looked at again: a later prompt may fit.
        if let Some((text, prompt_tokens)) = &self.too_long
            && prompt_text.starts_with(text.as_str())
        {
            return Ok(Err(Skip::PromptTooLong {
                prompt_tokens: *prompt_tokens,
                max_tokens,
            }));
        }
        let prompt = self.encode(&prompt_text)?;
        if prompt.len() >= max_tokens {
            if prompt.len() - max_tokens >= CERTAINLY_LONGER_TOKENS {
                self.too_long = Some((prompt_text, prompt.len()));
            }
            return Ok(Err(Skip::PromptTooLong {
                prompt_tokens: prompt.len(),
                max_tokens,
            }));
        }
        let mut tokens = self.encode(&self.render(index + 1, false)?)?;
        let boundary = self.boundary(index, &prompt, &tokens)?;
        let was_longer = tokens.len() > max_tokens;
        tokens.truncate(max_tokens);
        let trained_tokens = tokens.len().saturating_sub(boundary);
        if trained_tokens < min_trained_tokens.max(1) {
            return Ok(Err(Skip::TooFewTrained {
                trained_tokens,
                min_trained_tokens: min_trained_tokens.max(1),
            }));
        }
        let mut loss_mask = vec![0; boundary];
        loss_mask.resize(tokens.len(), 1);
        Ok(Ok(Cut {
            sample: Sample { tokens, loss_mask },
            was_longer,
        }))
    }

    /// The first trained token of `whole`.
    fn boundary(&self, index: usize, prompt: &[u32], whole: &[u32]) -> Result<usize, Reason> {
        if whole.starts_with(prompt) {
            return Ok(prompt.len());
        }
        let history = self.encode(&self.render(index, false)?)?;
        let common = common_prefix(prompt, whole);
        if whole.starts_with(&history) && common >= history.len() {
            return Ok(common);
        }
        let token = common.min(common_prefix(&history, whole));
        Err(Reason::UnstableBoundary {
            message: index + 1,
            token,
        })
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::fixtures::{CHATML, tokenizer};
    use super::*;

    fn conversation(messages: Value) -> Conversation {
        Conversation::from_json(json!({ "messages": messages })).expect("well formed")
    }

    fn user(text: &str) -> Value {
        json!({"role": "user", "content": text})
    }

    fn answer(text: &str) -> Value {
        json!({"role": "assistant", "content": text})
    }

    /// Context and trained text of every sample.
    fn split(masked: &MaskedConversation, tokenizer: &ChatTokenizer) -> Vec<(String, String)> {
        masked
            .samples
            .iter()
            .map(|sample| {
                assert_eq!(sample.tokens.len(), sample.loss_mask.len());
                let boundary = sample.loss_mask.iter().filter(|&&bit| bit == 0).count();
                assert!(sample.loss_mask[boundary..].iter().all(|&bit| bit == 1));
                let decode = |tokens: &[u32]| tokenizer.decode(tokens).expect("decodes");
                (
                    decode(&sample.tokens[..boundary]),
                    decode(&sample.tokens[boundary..]),
                )
            })
            .collect()
    }

    #[test]
    fn every_answer_is_a_sample_of_its_own() {
        let tokenizer = tokenizer(CHATML);
        let chat = conversation(json!([
            answer("hi"),
            user("a"),
            answer("b"),
            user("c"),
            answer("d"),
            user("e")
        ]));
        let masked = samples_of(&chat, &tokenizer, SampleLimits::default()).expect("masks");
        let before =
            "<|im_start|>assistant\nhi<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(
            split(&masked, &tokenizer),
            [
                (before.to_owned(), "b<|im_end|>\n".to_owned()),
                (
                    format!("{before}b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"),
                    "d<|im_end|>\n".to_owned()
                ),
            ]
        );
        assert!(masked.skipped.is_empty());
        assert_eq!(masked.cut_samples, 0);
    }

    #[test]
    fn tokens_that_grow_together_across_the_boundary_are_trained() {
        // The fixture merges two newlines: the prompt's last one and the answer's first become one token.
        let tokenizer = tokenizer(CHATML);
        let chat = conversation(json!([user("a"), answer("\n\nb")]));
        let masked = samples_of(&chat, &tokenizer, SampleLimits::default()).expect("masks");
        let (context, trained) = split(&masked, &tokenizer).remove(0);
        assert!(context.ends_with("<|im_start|>assistant"), "{context}");
        assert_eq!(trained, "\n\n\nb<|im_end|>\n");
    }

    #[test]
    fn lengths_cut_at_the_end_and_skip_what_has_no_room() {
        let tokenizer = tokenizer(CHATML);
        let chat = conversation(json!([user("a"), answer("bcd"), user("e"), answer("f")]));
        let whole = samples_of(&chat, &tokenizer, SampleLimits::default()).expect("masks");
        let first = &whole.samples[0];
        let boundary = first.loss_mask.iter().filter(|&&bit| bit == 0).count();
        let limits = |max_tokens, min_trained_tokens| SampleLimits {
            max_tokens,
            min_trained_tokens,
        };

        let cut = samples_of(&chat, &tokenizer, limits(boundary + 2, 1)).expect("masks");
        assert_eq!(cut.samples.len(), 1);
        assert_eq!(cut.samples[0].tokens, first.tokens[..boundary + 2]);
        assert_eq!(cut.cut_samples, 1);
        let second_prompt = whole.samples[1].loss_mask.iter().filter(|&&bit| bit == 0).count();
        let skip = Skip::PromptTooLong {
            prompt_tokens: second_prompt,
            max_tokens: boundary + 2,
        };
        assert_eq!(cut.skipped, [SkippedTurn { message: 4, skip }]);

        let exact = samples_of(&chat, &tokenizer, limits(first.tokens.len(), 1)).expect("masks");
        assert_eq!((exact.samples[0].clone(), exact.cut_samples), (first.clone(), 0));

        let refused = samples_of(&chat, &tokenizer, limits(boundary, 1)).expect_err("no room");
        assert_eq!(
            refused.to_string(),
            format!(
                "no answer is left to train: message 2: its prompt of {boundary} tokens fills a sample of {boundary}"
            )
        );
        let refused = samples_of(&chat, &tokenizer, limits(boundary + 2, 3)).expect_err("too few");
        assert_eq!(
            refused.to_string(),
            "no answer is left to train: message 2: only 2 tokens of it are left to train, fewer than 3"
        );
        let some = samples_of(&chat, &tokenizer, limits(usize::MAX, 4)).expect("masks");
        assert_eq!((some.samples.len(), some.skipped.len()), (1, 1));
    }

    #[test]
    fn a_long_row_of_turns_is_not_tokenised_for_nothing_and_still_counted() {
        let tokenizer = tokenizer(CHATML);
        let turns: Vec<Value> = (0..40)
            .flat_map(|_| [user("some words"), answer("other words")])
            .collect();
        let limits = SampleLimits {
            max_tokens: 120,
            min_trained_tokens: 1,
        };
        let masked = samples_of(&conversation(json!(turns)), &tokenizer, limits).expect("masks");
        assert_eq!(masked.samples.len() + masked.skipped.len(), 40);
        let all =
            samples_of(&conversation(json!(turns)), &tokenizer, SampleLimits::default()).expect("masks");
        for (sample, whole) in masked.samples.iter().zip(&all.samples) {
            assert_eq!(sample.tokens[..], whole.tokens[..sample.tokens.len()]);
        }
        let fitting = all
            .samples
            .iter()
            .filter(|sample| sample.loss_mask[..120.min(sample.tokens.len())].contains(&1));
        assert_eq!(masked.samples.len(), fitting.count());
    }

    #[test]
    fn a_scaffold_in_the_generation_prompt_falls_back_to_the_first_difference() {
        // The prompt opens a thought; the recorded answer has another one.
        let template = "{% for m in messages %}<|im_start|>{{ m.role }}|{{ m.content }}<|im_end|>{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>assistant|<think>{% endif %}";
        let tokenizer = tokenizer(template);
        let chat = conversation(json!([user("a"), answer("<tool>b")]));
        let masked = samples_of(&chat, &tokenizer, SampleLimits::default()).expect("masks");
        let (context, trained) = split(&masked, &tokenizer).remove(0);
        assert_eq!(context, "<|im_start|>user|a<|im_end|><|im_start|>assistant|<t");
        assert_eq!(trained, "ool>b<|im_end|>");
    }

    #[test]
    fn a_history_that_changes_with_the_answer_is_refused() {
        let template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}";
        let tokenizer = tokenizer(template);
        let chat = conversation(json!([user("a"), answer("b")]));
        let reason = samples_of(&chat, &tokenizer, SampleLimits::default()).expect_err("unstable");
        assert_eq!(reason, Reason::UnstableBoundary { message: 2, token: 0 });
        assert!(!reason.to_string().contains('\n'));
    }

    #[test]
    fn what_the_template_raises_is_the_reason() {
        let tokenizer = tokenizer("{{ raise_exception('no ' + messages[0].role) }}");
        let chat = conversation(json!([user("a"), answer("b")]));
        let reason = samples_of(&chat, &tokenizer, SampleLimits::default()).expect_err("raises");
        assert_eq!(
            reason.to_string(),
            "the chat template refuses it: no user (line 1 of the template)"
        );
    }
}
