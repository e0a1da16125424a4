//! Every key of `cluster.toml` with its type and range: the one list that readers, suggestions and documents share.
//!
//! Invariant (tested): it has exactly the fields of the structs in `sections`, in their order.

use std::net::{IpAddr, SocketAddr};

use config::{Value, ValueKind};
use toml_edit::Value as Toml;

/// What a key may hold.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// Any text that is not empty.
    Text,
    /// A text that can name a folder: letters, digits, `.`, `_`, `-`.
    Name,
    /// An IP address and a port.
    Address,
    /// An IP address.
    Ip,
    /// One of some words.
    Choice(&'static [&'static str]),
    /// `true` or `false`.
    Bool,
    /// A whole number between two others.
    Integer(i64, i64),
    /// A number between two others, both allowed.
    Float(f64, f64),
    /// A number between two others, of which the lower is not allowed.
    FloatAbove(f64, f64),
    /// A number from the first, allowed, to the second, not allowed.
    FloatBelow(f64, f64),
    /// A list of texts.
    Texts,
    /// A list of whole numbers between two others.
    Integers(i64, i64),
}

/// A key of `cluster.toml`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key {
    /// Section and name, as in `training.ttt_steps`.
    pub(crate) path: &'static str,
    /// What it may hold.
    pub(crate) kind: Kind,
}

const fn key(path: &'static str, kind: Kind) -> Key {
    Key { path, kind }
}

const COUNT: Kind = Kind::Integer(1, 1 << 31);
const COUNT_OR_ZERO: Kind = Kind::Integer(0, 1 << 31);
const PRODUCTS: Kind = Kind::Choice(&["f32", "bf16"]);
const TIME_MS: Kind = Kind::Integer(1, 86_400_000);
const TIME_S: Kind = Kind::Integer(1, 604_800);

/// All keys, in the order of the file.
pub(crate) const KEYS: &[Key] = &[
    key("run.name", Kind::Name),
    key("run.directory", Kind::Text),
    key("run.seed", Kind::Integer(0, i64::MAX)),
    key("run.listen", Kind::Address),
    key("run.extract_to", Kind::Text),
    key("verifier.path", Kind::Text),
    key("verifier.revision", Kind::Text),
    key("verifier.name", Kind::Text),
    key("verifier.aux_layers", Kind::Integers(0, 4096)),
    key("verifier.hidden_dtype", Kind::Choice(&["bf16", "f32"])),
    key("verifier.products", PRODUCTS),
    key("verifier.pipeline", Kind::Integer(1, 1024)),
    key("verifier.tensor", Kind::Integer(1, 1024)),
    key("verifier.collective", Kind::Choice(&["links", "nccl"])),
    key("verifier.sums", Kind::Choice(&["exact", "fast"])),
    key("draft.arch", Kind::Choice(&["llama", "qwen3"])),
    key("draft.vocab_size", COUNT_OR_ZERO),
    key("draft.intermediate_size", COUNT),
    key("draft.heads", COUNT),
    key("draft.kv_heads", COUNT),
    key("draft.head_dim", Kind::Integer(2, 4096)),
    key("draft.norm_before_residual", Kind::Bool),
    key("draft.norm_before_fc", Kind::Bool),
    key("draft.fc_norm", Kind::Bool),
    key("draft.norm_output", Kind::Bool),
    key("draft.sliding_window", COUNT_OR_ZERO),
    key("draft.products", PRODUCTS),
    key("training.ttt_steps", Kind::Integer(1, 16)),
    key("training.step_loss_decay", Kind::FloatAbove(0.0, 1.0)),
    key("training.passes", COUNT),
    key("training.steps", Kind::Integer(1, i64::MAX)),
    key("training.tokens_per_row", Kind::Integer(8, 1 << 20)),
    key("training.rows_per_step", Kind::Integer(1, 4096)),
    key("training.collective", Kind::Choice(&["links", "nccl"])),
    key("training.sums", Kind::Choice(&["exact", "fast"])),
    key("training.learning_rate", Kind::FloatAbove(0.0, 1.0)),
    key("training.beta1", Kind::FloatBelow(0.0, 1.0)),
    key("training.beta2", Kind::FloatBelow(0.0, 1.0)),
    key("training.eps", Kind::FloatAbove(0.0, 1.0)),
    key("training.weight_decay", Kind::Float(0.0, 1.0)),
    key("training.clip_norm", Kind::Float(0.0, 1e6)),
    key(
        "training.schedule",
        Kind::Choice(&["linear", "cosine", "constant"]),
    ),
    key("training.warmup_ratio", Kind::FloatBelow(0.0, 1.0)),
    key("training.decay_ratio", Kind::Float(0.0, 1.0)),
    key("training.evaluate_every_steps", COUNT_OR_ZERO),
    key("training.max_new_tokens", Kind::Integer(1, 1 << 20)),
    key("samples.files", Kind::Texts),
    key("samples.watch", Kind::Texts),
    key("samples.follow", Kind::Bool),
    key("samples.open", Kind::Bool),
    key("samples.poll_interval_ms", TIME_MS),
    key("samples.hidden_states", Kind::Text),
    key("samples.held_out", Kind::Texts),
    key("samples.held_out_every", COUNT_OR_ZERO),
    key("samples.held_out_rows", Kind::Integer(0, 1 << 16)),
    key("samples.max_line_bytes", Kind::Integer(64, 1 << 31)),
    key("samples.min_trained_tokens", COUNT),
    key("samples.too_long", Kind::Choice(&["truncate", "quarantine"])),
    key("checkpoints.every_steps", COUNT_OR_ZERO),
    key("checkpoints.keep", Kind::Integer(1, 10_000)),
    key("supervision.beat_interval_ms", TIME_MS),
    key("supervision.suspect_after_ms", TIME_MS),
    key("supervision.dead_after_ms", TIME_MS),
    key("supervision.coordinator_lease_ms", TIME_MS),
    key("supervision.load_timeout_s", TIME_S),
    key("supervision.step_timeout_s", TIME_S),
    key("supervision.drain_timeout_s", TIME_S),
    key("supervision.host_timeout_s", TIME_S),
    key("verifier_restarts.max", Kind::Integer(0, 1_000_000)),
    key("verifier_restarts.window_s", TIME_S),
    key("verifier_restarts.backoff_initial_ms", TIME_MS),
    key("verifier_restarts.backoff_max_ms", TIME_MS),
    key("verifier_restarts.then", Kind::Choice(&["continue", "stop"])),
    key("draft_restarts.max", Kind::Integer(0, 1_000_000)),
    key("draft_restarts.window_s", TIME_S),
    key("draft_restarts.backoff_initial_ms", TIME_MS),
    key("draft_restarts.backoff_max_ms", TIME_MS),
    key("draft_restarts.then", Kind::Choice(&["continue", "stop"])),
    key("hosts.name", Kind::Name),
    key("hosts.address", Kind::Ip),
    key("hosts.start", Kind::Texts),
    key("ranks.role", Kind::Choice(&["verifier", "draft"])),
    key("ranks.seat", Kind::Integer(0, 65_535)),
    key("ranks.device", Kind::Text),
    key("ranks.host", Kind::Text),
    key("ranks.threads", Kind::Integer(0, 4096)),
];

/// Keys of earlier versions, and what to do instead.
const GONE: &[(&str, &str)] = &[(
    "ranks.shard",
    "remove it, and set verifier.pipeline and verifier.tensor: which part a verifier rank holds follows from its seat",
)];

/// What to do about a key of an earlier version.
pub(crate) fn remedy_for_gone(path: &str) -> Option<&'static str> {
    let gone = GONE.iter().find(|(gone, _)| *gone == path)?;
    Some(gone.1)
}

/// The key at a path without list indices.
pub(crate) fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// Sections that are lists of tables.
pub(crate) const LISTS: [&str; 2] = ["hosts", "ranks"];

/// The list of this name, if there is one.
pub(crate) fn list_named(name: &str) -> Option<&'static str> {
    LISTS.into_iter().find(|&list| list == name)
}

/// What an element of a list is called, and a key that it has.
pub(crate) fn example(list: &str) -> (&'static str, &'static str) {
    match list {
        "hosts" => ("host", "address"),
        _ => ("rank", "threads"),
    }
}

/// Names of the sections, in the order of the file.
pub(crate) fn sections() -> Vec<&'static str> {
    let mut sections: Vec<_> = KEYS.iter().map(|key| split(key.path).0).collect();
    sections.dedup();
    sections
}

/// Section and name of a path.
pub(crate) fn split(path: &str) -> (&str, &str) {
    path.split_once('.').unwrap_or((path, ""))
}

/// The key that somebody who wrote `path` probably meant: the same name in another section, else the nearest spelling.
pub(crate) fn nearest_key(path: &str) -> Option<&'static str> {
    let (section, name) = split(path);
    if let Some(key) = KEYS.iter().find(|key| split(key.path).1 == name) {
        return Some(key.path);
    }
    // Within the section a name may be farther off than across sections.
    let distance = |key: &Key| {
        let (other, known) = split(key.path);
        strsim::damerau_levenshtein(name, known) + usize::from(other != section)
    };
    let nearest = KEYS.iter().min_by_key(|key| distance(key))?;
    (distance(nearest) <= 1 + name.len() / 4).then_some(nearest.path)
}

/// The word nearest to another, if it is near.
pub(crate) fn nearest_word(word: &str, words: &[&'static str]) -> Option<&'static str> {
    let distance = |known: &&&'static str| strsim::damerau_levenshtein(word, known);
    words
        .iter()
        .min_by_key(distance)
        .filter(|known| distance(known) <= 1 + word.len() / 4)
        .copied()
}

impl Kind {
    /// Whether a value outside a file may be written without quotes.
    pub(crate) const fn is_text(self) -> bool {
        matches!(
            self,
            Self::Text | Self::Name | Self::Address | Self::Ip | Self::Choice(_)
        )
    }

    /// What is expected, in words.
    fn expectation(self) -> String {
        match self {
            Self::Text => "a text in quotes".to_owned(),
            Self::Name => {
                "a text of letters, digits, `.`, `_` and `-` that starts with a letter or digit".to_owned()
            }
            Self::Address => "an address and a port, like \"127.0.0.1:0\"".to_owned(),
            Self::Ip => "an IP address, like \"10.0.0.2\"".to_owned(),
            Self::Choice(words) => {
                format!(
                    "one of {}",
                    words
                        .iter()
                        .map(|w| format!("\"{w}\""))
                        .collect::<Vec<_>>()
                        .join(", ")
                )
            }
            Self::Bool => "true or false".to_owned(),
            Self::Integer(low, high) => format!("a whole number, {}", range(low, high)),
            Self::Float(low, high) => format!("a number from {low} to {high}"),
            Self::FloatAbove(low, high) => format!("a number above {low} and up to {high}"),
            Self::FloatBelow(low, high) => format!("a number from {low} to below {high}"),
            Self::Texts => "a list of texts, like [\"a\", \"b\"]".to_owned(),
            Self::Integers(low, high) => format!("a list of whole numbers, each {}", range(low, high)),
        }
    }

    /// Converts a TOML value, or says what is expected instead of it.
    pub(crate) fn convert(self, path: &str, toml: &Toml) -> Result<Value, String> {
        let refuse = || {
            let hint = match (self, toml.as_str()) {
                (Self::Choice(words), Some(text)) => nearest_word(text, words)
                    .map(|word| format!("; did you mean \"{word}\"?"))
                    .unwrap_or_default(),
                _ => String::new(),
            };
            let found = toml.to_string();
            format!(
                "{path} must be {}, found {}{hint}",
                self.expectation(),
                found.trim()
            )
        };
        let kind = match self {
            Self::Text => toml.as_str().filter(|text| !text.is_empty()).map(text),
            Self::Name => toml.as_str().filter(|text| is_name(text)).map(text),
            Self::Address => toml
                .as_str()
                .filter(|text| text.parse::<SocketAddr>().is_ok())
                .map(text),
            Self::Ip => toml
                .as_str()
                .filter(|text| text.parse::<IpAddr>().is_ok())
                .map(text),
            Self::Choice(words) => toml.as_str().filter(|text| words.contains(text)).map(text),
            Self::Bool => toml.as_bool().map(ValueKind::Boolean),
            Self::Integer(low, high) => integer(toml, low, high),
            Self::Float(low, high) => float(toml, |x| x >= low && x <= high),
            Self::FloatAbove(low, high) => float(toml, |x| x > low && x <= high),
            Self::FloatBelow(low, high) => float(toml, |x| x >= low && x < high),
            Self::Texts => list(toml, |item| {
                item.as_str().filter(|text| !text.is_empty()).map(text)
            }),
            Self::Integers(low, high) => list(toml, |item| integer(item, low, high)),
        };
        kind.map(|kind| Value::new(None, kind)).ok_or_else(refuse)
    }
}

/// A range in words; ends that nobody reaches are left out.
fn range(low: i64, high: i64) -> String {
    if high == i64::MAX {
        format!("at least {low}")
    } else {
        format!("{low} to {high}")
    }
}

fn text(text: &str) -> ValueKind {
    ValueKind::String(text.to_owned())
}

/// Whether a text can name a folder: letters, digits, `.`, `_`, `-`, of which the first is a letter or digit.
pub(crate) fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-'))
}

fn integer(toml: &Toml, low: i64, high: i64) -> Option<ValueKind> {
    toml.as_integer()
        .filter(|n| (low..=high).contains(n))
        .map(ValueKind::I64)
}

fn float(toml: &Toml, allowed: impl Fn(f64) -> bool) -> Option<ValueKind> {
    let number = toml.as_float().or_else(|| toml.as_integer().map(|n| n as f64))?;
    (number.is_finite() && allowed(number)).then_some(ValueKind::Float(number))
}

fn list(toml: &Toml, item: impl Fn(&Toml) -> Option<ValueKind>) -> Option<ValueKind> {
    let items = toml
        .as_array()?
        .iter()
        .map(|toml| item(toml).map(|kind| Value::new(None, kind)));
    items.collect::<Option<Vec<_>>>().map(ValueKind::Array)
}
