//! Why a verifier could not be loaded or a row not be computed.

use std::path::PathBuf;

use super::{ConfigError, Interrupted};
use crate::device::ThreadsError;
use crate::weights::WeightsError;

/// How many problems a message spells out; the rest is counted.
const LISTED_PROBLEMS: usize = 8;

/// Why a verifier could not be loaded or a row not be computed; each names the place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum VerifierError {
    /// Its configuration cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Its weights cannot be read.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Its weights do not fit its configuration: all problems at once.
    #[error("`{folder}` holds no usable verifier, {} problem(s): {}", problems.len(), list(problems))]
    Unusable {
        /// The verifier's folder.
        folder: PathBuf,
        /// Everything that is wrong with it.
        problems: Vec<LayoutProblem>,
    },
    /// The device could not be set up.
    #[error("{0}; ask for fewer")]
    Threads(#[from] ThreadsError),
    /// The layers to capture make no sense for this verifier.
    #[error(
        "aux layers {ids:?} cannot be captured: {reason}; \
         give distinct ascending ids from 1 to {layers}, each naming the layer whose input is captured"
    )]
    AuxLayers {
        /// The ids asked for, or the default ones.
        ids: Vec<u32>,
        /// What is wrong with them.
        reason: String,
        /// Layers of the verifier.
        layers: usize,
    },
    /// Loss mask or document lengths of a row do not agree with its tokens.
    #[error(
        "the row has {tokens} tokens but {masked} mask values and documents of {documents} tokens; pack it again"
    )]
    Row {
        /// Tokens of the row.
        tokens: usize,
        /// Values of its loss mask.
        masked: usize,
        /// Tokens of its documents together.
        documents: usize,
    },
    /// A token id is not in the vocabulary.
    #[error(
        "token {position} of document {document} is {token}, outside the vocabulary of {vocab_size}; \
         tokenise it with the verifier's own tokenizer"
    )]
    Token {
        /// Which document of the row or which prompt, from 0.
        document: usize,
        /// Which token of it, from 0.
        position: usize,
        /// The token id.
        token: u32,
        /// Ids below this exist.
        vocab_size: usize,
    },
    /// There is nothing to continue.
    #[error("prompt {prompt} is empty; give it at least one token")]
    EmptyPrompt {
        /// Which prompt, from 0.
        prompt: usize,
    },
    /// The other shards of the verifier do not answer; the row can be computed again.
    #[error(transparent)]
    Interrupted(#[from] Interrupted),
    /// The hidden states are not what a draft takes them for.
    #[error(
        "the verifier fails its self-check: {what}; nothing can be learnt from such states: \
         check that config.json belongs to these weights, and report it with the name of the model"
    )]
    SelfCheck {
        /// What disagrees.
        what: String,
    },
    /// A document's states overflowed or became NaN.
    #[error(
        "the hidden states of document {document} are not finite where they enter layer {layer}; \
         quarantine the sample, and check the weights if it happens to every sample"
    )]
    NonFinite {
        /// Which document of the row or which prompt, from 0.
        document: usize,
        /// The first layer whose input is not finite; the number of layers for the last output.
        layer: u32,
    },
}

/// Why a tensor of a verifier does not fit.
#[derive(Debug, thiserror::Error)]
pub enum LayoutProblem {
    /// It is missing, of another shape or of another dtype.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// It cannot be cut into so many slices.
    #[error("the verifier cannot be cut into {slices} slices: {reason}; choose another verifier.tensor")]
    Slices {
        /// Slices asked for.
        slices: u16,
        /// Why not.
        reason: String,
    },
    /// It is there, in a layer that is computed, but the computation does not know it.
    #[error(
        "tensor `{tensor}` of `{file}` is not used by model_type `{model_type}`; correct model_type in config.json"
    )]
    Unused {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The family.
        model_type: String,
    },
}

fn list(problems: &[LayoutProblem]) -> String {
    let mut lines: Vec<String> = problems
        .iter()
        .take(LISTED_PROBLEMS)
        .map(ToString::to_string)
        .collect();
    if problems.len() > LISTED_PROBLEMS {
        lines.push(format!("and {} more", problems.len() - LISTED_PROBLEMS));
    }
    lines.join("; ")
}
