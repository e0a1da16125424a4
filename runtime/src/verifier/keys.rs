//! Typed access to a JSON object that collects every problem instead of stopping at the first.

use std::cell::RefCell;
use std::fmt;

use serde_json::{Map, Value};

/// What is wrong with one key of a config.json.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyProblem {
    /// It is not there.
    Missing {
        /// The key.
        key: String,
        /// What belongs there.
        expected: &'static str,
    },
    /// It holds another type.
    WrongType {
        /// The key.
        key: String,
        /// What belongs there.
        expected: &'static str,
        /// The JSON that is there.
        found: String,
    },
    /// It holds a value that eaglet cannot compute.
    Unsupported {
        /// The key.
        key: String,
        /// The JSON that is there.
        found: String,
        /// What can be computed.
        supported: String,
    },
    /// It contradicts another key.
    Inconsistent {
        /// The key.
        key: String,
        /// How.
        reason: String,
    },
}

impl fmt::Display for KeyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { key, expected } => write!(f, "key `{key}` is missing; add {expected}"),
            Self::WrongType { key, expected, found } => {
                write!(f, "key `{key}` is {found}; it must be {expected}")
            }
            Self::Unsupported {
                key,
                found,
                supported,
            } => {
                write!(
                    f,
                    "key `{key}` is {found}, which is not supported; supported: {supported}"
                )
            }
            Self::Inconsistent { key, reason } => write!(f, "key `{key}` {reason}"),
        }
    }
}

/// No size or number of parts of a model comes near; it keeps products of them from overflowing.
const MAX_COUNT: u64 = 1 << 26;
/// What belongs where things are counted.
const COUNT: &str = "a whole number from 1 to 2^26";

/// A whole number up to [`MAX_COUNT`].
fn size(value: &Value) -> Option<usize> {
    let size = value.as_u64().filter(|&size| size <= MAX_COUNT)?;
    usize::try_from(size).ok()
}

/// A JSON object under its path from the file's root.
pub(super) struct Keys<'a> {
    map: &'a Map<String, Value>,
    path: String,
    problems: &'a RefCell<Vec<KeyProblem>>,
}

impl<'a> Keys<'a> {
    /// The root object of a file.
    pub(super) fn root(map: &'a Map<String, Value>, problems: &'a RefCell<Vec<KeyProblem>>) -> Self {
        Self {
            map,
            path: String::new(),
            problems,
        }
    }

    /// Notes a problem.
    pub(super) fn report(&self, problem: KeyProblem) {
        self.problems.borrow_mut().push(problem);
    }

    /// Notes that a key's value cannot be computed.
    pub(super) fn unsupported(&self, key: &str, supported: impl Into<String>) {
        let found = self.map.get(key).map(abbreviate).unwrap_or_default();
        self.report(KeyProblem::Unsupported {
            key: self.full(key),
            found,
            supported: supported.into(),
        });
    }

    /// Notes that a key contradicts another.
    pub(super) fn inconsistent(&self, key: &str, reason: impl Into<String>) {
        self.report(KeyProblem::Inconsistent {
            key: self.full(key),
            reason: reason.into(),
        });
    }

    /// The names of all keys.
    pub(super) fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    fn full(&self, key: &str) -> String {
        if self.path.is_empty() {
            key.to_owned()
        } else {
            format!("{}.{key}", self.path)
        }
    }

    /// The value of a key; null counts as absent, as it does in the files of transformers.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn typed<T>(&self, key: &str, expected: &'static str, read: impl Fn(&Value) -> Option<T>) -> Option<T> {
        let value = self.get(key)?;
        let typed = read(value);
        if typed.is_none() {
            let found = abbreviate(value);
            self.report(KeyProblem::WrongType {
                key: self.full(key),
                expected,
                found,
            });
        }
        typed
    }

    /// A whole number above 0 and up to [`MAX_COUNT`], if there.
    pub(super) fn count(&self, key: &str) -> Option<usize> {
        self.typed(key, COUNT, |value| size(value).filter(|&count| count > 0))
    }

    /// A whole number, if there.
    pub(super) fn index(&self, key: &str) -> Option<usize> {
        self.typed(key, "a whole number up to 2^26", size)
    }

    /// A list of whole numbers, if there.
    pub(super) fn indices(&self, key: &str) -> Option<Vec<usize>> {
        self.typed(key, "a list of whole numbers", |value| {
            let values = value.as_array()?.iter();
            values
                .map(|value| value.as_u64().and_then(|index| usize::try_from(index).ok()))
                .collect()
        })
    }

    /// A list of texts, if there.
    pub(super) fn texts(&self, key: &str) -> Option<Vec<String>> {
        self.typed(key, "a list of texts", |value| {
            let values = value.as_array()?.iter();
            values.map(|value| value.as_str().map(str::to_owned)).collect()
        })
    }

    /// A finite number above 0, if there.
    pub(super) fn positive(&self, key: &str) -> Option<f64> {
        self.typed(key, "a number above 0", |value| {
            value.as_f64().filter(|&x| x > 0.0 && x.is_finite())
        })
    }

    /// True or false, if there.
    pub(super) fn flag(&self, key: &str) -> Option<bool> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A text, if there.
    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        let value = self.get(key)?;
        self.typed(key, "a text", |value| value.as_str().map(drop));
        value.as_str()
    }

    /// An object, if there.
    pub(super) fn object(&self, key: &str) -> Option<Keys<'a>> {
        let value = self.get(key)?;
        self.typed(key, "an object", |value| value.as_object().map(drop));
        value.as_object().map(|map| Keys {
            map,
            path: self.full(key),
            problems: self.problems,
        })
    }

    /// One token id or a list of them; empty if absent.
    pub(super) fn token_ids(&self, key: &str) -> Vec<u32> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        self.typed(key, "a token id or a list of token ids", |value| match value {
            Value::Array(values) => values.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        })
        .unwrap_or_default()
    }

    /// A whole number above 0 that must be there; 1 stands in for it once the problem is noted.
    pub(super) fn required_count(&self, key: &str) -> usize {
        self.required(key, COUNT)
            .and_then(|()| self.count(key))
            .unwrap_or(1)
    }

    /// A number above 0 that must be there; 1 stands in for it once the problem is noted.
    pub(super) fn required_positive(&self, key: &str) -> f64 {
        self.required(key, "a number above 0")
            .and_then(|()| self.positive(key))
            .unwrap_or(1.0)
    }

    fn required(&self, key: &str, expected: &'static str) -> Option<()> {
        if self.get(key).is_none() {
            self.report(KeyProblem::Missing {
                key: self.full(key),
                expected,
            });
            return None;
        }
        Some(())
    }
}

/// JSON on one line, cut where it gets long.
fn abbreviate(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}
