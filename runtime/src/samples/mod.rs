//! From chats to packed rows: reading, templates, loss masks, the draft vocabulary.
//!
//! The way of a sample: [`Source`] reads a row of a file, [`Conversation`] is its meaning, [`ChatTokenizer`] renders it
//! with the verifier's own template and tokenizer, [`samples_of`] cuts one [`Sample`](crate::row::Sample) with its loss
//! mask out of it per answer, [`SampleStore`] keeps it, [`plan_step`] puts it into a row of a step.
//!
//! Invariants:
//! - A row that cannot be trained is a [`Quarantine`] with its place and reason; it never stops a reader and is never
//!   dropped silently.
//! - The same file, verifier folder, limits and date give the same samples, whatever the number of threads.
//! - Nothing here holds more than one row of a file in memory.

mod clock;
mod conversation;
#[cfg(test)]
pub(crate) mod fixtures;
mod framing;
mod mask;
mod packing;
mod python;
mod quarantine;
mod source;
mod store;
mod template;
mod tokenizer;
mod vocabulary;

pub use conversation::{ChatRole, Conversation, Message};
pub use mask::{MaskedConversation, SampleLimits, Skip, SkippedTurn, samples_of};
pub use packing::plan_step;
pub use quarantine::{Quarantine, Reason};
pub use source::{DEFAULT_ROW_LIMIT_BYTES, Position, Row, Source, SourceError, SourceOptions, Tail};
pub use store::{Location, SampleStore, StoreError};
pub use template::{ChatTemplate, Rendering, TemplateError};
pub use tokenizer::{ChatTokenizer, TokenizerError, explain};
pub use vocabulary::{DraftVocabulary, TokenCounts, VocabularyError};
