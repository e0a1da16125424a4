//! Why a row of a file, or an answer in it, is not trained.
//!
//! A quarantined row keeps its place (file, line, id), so that a person can find and mend it.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A row that is not trained, with its place and the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quarantine {
    /// The file it stands in.
    pub file: PathBuf,
    /// The line it starts on, from 1.
    pub line: u64,
    /// Its own `id`, if it has one and could be read.
    pub id: Option<String>,
    /// Why it is not trained.
    pub reason: Reason,
}

impl fmt::Display for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.file.display(), self.line)?;
        if let Some(id) = &self.id {
            write!(f, " (conversation {id})")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// Why a row is not trained. Messages are counted from 1, as a reader of the file would.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Reason {
    /// The row is larger than the reader's limit.
    #[error("the row is longer than {limit_bytes} bytes; split the conversation or raise the limit")]
    RowTooLong {
        /// The limit.
        limit_bytes: u64,
    },
    /// The row is no UTF-8 text.
    #[error("the row is no UTF-8 text: byte {byte} of it is invalid")]
    NotUtf8 {
        /// Offset within the row of the first bad byte.
        byte: u64,
    },
    /// The row is torn or otherwise no JSON.
    #[error("the row is no whole JSON value: {detail}")]
    NotJson {
        /// What the parser says.
        detail: String,
    },
    /// The row has none of the known shapes.
    #[error("{detail}")]
    Shape {
        /// What is wrong, and where within the row.
        detail: String,
    },
    /// A message has a role that no template knows.
    #[error("message {message} has the unknown role `{role}`; use system, user, assistant or tool")]
    UnknownRole {
        /// Which message.
        message: usize,
        /// Its role.
        role: String,
    },
    /// The list of messages is empty.
    #[error("the conversation has no messages")]
    Empty,
    /// No message is an answer to an earlier one.
    #[error("no message is an assistant's answer to an earlier message")]
    NoAnswer,
    /// The verifier's chat template refused the conversation.
    #[error("the chat template refuses it: {detail}")]
    Template {
        /// What the template says.
        detail: String,
    },
    /// The tokenizer refused the rendered text.
    #[error("the tokenizer refuses it: {detail}")]
    Tokenizer {
        /// What the tokenizer says.
        detail: String,
    },
    /// The prompt and the whole conversation render to different histories, so no loss mask can be derived.
    #[error(
        "with and without the answer in message {message} the chat template renders different histories \
         (tokens differ from {token}); no loss mask can be derived"
    )]
    UnstableBoundary {
        /// The message with the answer.
        message: usize,
        /// The first token that differs.
        token: usize,
    },
    /// Every answer was skipped; the first one's reason.
    #[error("no answer is left to train: {first}")]
    NothingTrained {
        /// Why the first answer was skipped.
        first: String,
    },
}

impl Reason {
    /// A short name of the kind of reason, for counting.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::RowTooLong { .. } => "row too long",
            Self::NotUtf8 { .. } => "not UTF-8",
            Self::NotJson { .. } => "not JSON",
            Self::Shape { .. } => "unknown shape",
            Self::UnknownRole { .. } => "unknown role",
            Self::Empty => "empty",
            Self::NoAnswer => "no answer",
            Self::Template { .. } => "template",
            Self::Tokenizer { .. } => "tokenizer",
            Self::UnstableBoundary { .. } => "unstable boundary",
            Self::NothingTrained { .. } => "nothing trained",
        }
    }
}
