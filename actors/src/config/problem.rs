//! What is wrong with a cluster's configuration, and where.
//!
//! Problems are collected, not returned one by one: whoever waits for a cluster wants to mend its file once.

use std::fmt;

/// Where a value came from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// A line of the cluster file.
    File {
        /// The file as it was named.
        name: String,
        /// Line, from 1; 0 for the file as a whole.
        line: usize,
    },
    /// An environment variable.
    Variable(String),
    /// A `--set` flag, as it was written.
    Flag(String),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { name, line: 0 } => f.write_str(name),
            Self::File { name, line } => write!(f, "{name}:{line}"),
            Self::Variable(name) => f.write_str(name),
            Self::Flag(text) => write!(f, "--set {text}"),
        }
    }
}

/// One thing that is wrong; displayed as `place: message`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What, and the remedy.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Everything that is wrong with a configuration, one problem a line, file first and in its order.
#[derive(Debug, PartialEq, Eq)]
pub struct ConfigError {
    pub(super) problems: Vec<Problem>,
}

impl ConfigError {
    /// Sorts the problems; `None` if there are none.
    pub(crate) fn from_problems(mut problems: Vec<Problem>) -> Option<Self> {
        problems.sort();
        problems.dedup();
        (!problems.is_empty()).then_some(Self { problems })
    }

    /// The problems; at least one.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, problem) in self.problems.iter().enumerate() {
            if index > 0 {
                f.write_str("\n")?;
            }
            write!(f, "{problem}")?;
        }
        Ok(())
    }
}

impl std::error::Error for ConfigError {}
