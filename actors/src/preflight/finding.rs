//! What is wrong, or doubtful, with a cluster that is about to be launched.

use std::fmt;

use serde::Serialize;

use crate::config::Survey;

/// What a finding is about; the words are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Topic {
    /// A key of the cluster file, or what overrides it.
    Config,
    /// The run directory.
    RunDirectory,
    /// The address that ranks call.
    Port,
    /// The verifier's configuration or its files as a whole.
    Verifier,
    /// One of the verifier's tensors.
    Tensors,
    /// The verifier's tokenizer.
    Tokenizer,
    /// The layers whose states are captured.
    Layers,
    /// The shape of the draft.
    Draft,
    /// What is trained on.
    Samples,
    /// Files of hidden states.
    HiddenStates,
    /// What is evaluated on.
    HeldOut,
    /// The draft's vocabulary.
    Vocabulary,
    /// Where ranks compute.
    Device,
    /// Memory of a host or a GPU.
    Memory,
    /// Room on the disk of the run directory.
    Disk,
}

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A launch refuses it.
    Fatal,
    /// A launch would start and go badly.
    Problem,
    /// A launch goes well, and may give something else than was wanted.
    Warning,
}

/// One thing that was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about.
    pub topic: Topic,
    /// Where it can be mended: line of the cluster file, variable, flag.
    pub place: String,
    /// What is wrong, and the remedy.
    pub message: String,
    /// How bad it is.
    #[serde(skip)]
    pub severity: Severity,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.message)
    }
}

/// Collects what is found.
pub(crate) struct Findings<'a> {
    survey: &'a Survey,
    found: Vec<Finding>,
}

impl<'a> Findings<'a> {
    /// A collector that begins with the problems of the configuration.
    pub(crate) fn new(survey: &'a Survey) -> Self {
        let found = survey.problems.iter().map(|problem| Finding {
            topic: Topic::Config,
            place: problem.place.to_string(),
            message: problem.message.clone(),
            severity: Severity::Fatal,
        });
        Self {
            survey,
            found: found.collect(),
        }
    }

    /// What was read of the cluster file.
    pub(crate) fn survey(&self) -> &'a Survey {
        self.survey
    }

    /// Adds a finding at a key. What a problem of the same key explains already is not said twice.
    pub(crate) fn add(&mut self, severity: Severity, topic: Topic, key: &str, message: impl Into<String>) {
        let is_known = |problem: &&crate::config::Problem| {
            problem
                .message
                .strip_prefix(key)
                .is_some_and(|rest| rest.starts_with([':', ' ']))
        };
        if severity == Severity::Fatal && self.survey.problems.iter().any(|problem| is_known(&problem)) {
            return;
        }
        let finding = Finding {
            topic,
            place: self.survey.place(key).to_string(),
            message: message.into(),
            severity,
        };
        // One damaged file is met by all who read it.
        let says_the_same =
            |known: &Finding| (&known.place, &known.message) == (&finding.place, &finding.message);
        if !self.found.iter().any(says_the_same) {
            self.found.push(finding);
        }
    }

    /// Whether something was found that a launch refuses.
    pub(crate) fn has_fatal(&self) -> bool {
        self.found
            .iter()
            .any(|finding| finding.severity == Severity::Fatal)
    }

    /// All findings, in the order in which they were found.
    pub(crate) fn into_vec(self) -> Vec<Finding> {
        self.found
    }
}
