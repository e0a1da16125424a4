//! What can be wrong with a GGUF file.

use std::path::PathBuf;

use super::architecture::Architecture;
use super::pre_tokenizer::PreTokenizer;

/// Why a GGUF file cannot be used; each names the file, the place in it and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused.
    #[error("cannot read `{file}`: {source}; check that it exists and may be read")]
    Read {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// It is another format or an unsupported version.
    #[error(
        "`{file}` is no GGUF file of version 2 or 3: {reason}; download it again or convert the model again"
    )]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What is there instead.
        reason: String,
    },
    /// It ends before its contents do.
    #[error("`{file}` is truncated: it ends within {place}; download it again")]
    Truncated {
        /// The file.
        file: PathBuf,
        /// What is cut.
        place: String,
    },
    /// Something in it cannot be.
    #[error("`{file}` is damaged: {place} {reason}; download it again")]
    Damaged {
        /// The file.
        file: PathBuf,
        /// Where.
        place: String,
        /// What is wrong.
        reason: String,
    },
    /// A file of a model in several files is not usable with the others.
    #[error("`{file}` is part of a model in several files: {reason}")]
    Split {
        /// The file.
        file: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A metadata key is missing, ill-typed, or has a value that cannot be used.
    #[error("`{file}`: metadata key `{key}` {reason}; convert the model again with a current llama.cpp")]
    Key {
        /// The file.
        file: PathBuf,
        /// The key.
        key: String,
        /// What is wrong.
        reason: String,
    },
    /// The architecture's tensors cannot be named.
    #[error(
        "`{file}`: architecture `{architecture}` is not read from GGUF; read are: {}; \
         use the model's safetensors files",
        Architecture::names()
    )]
    UnknownArchitecture {
        /// The file.
        file: PathBuf,
        /// Its `general.architecture`.
        architecture: String,
    },
    /// The tokenizer cannot be rebuilt.
    #[error(
        "`{file}`: tokenizer.ggml.model `{model}` is not read from GGUF; read are: gpt2, llama; \
         use the model's safetensors files and tokenizer.json"
    )]
    UnknownTokenizer {
        /// The file.
        file: PathBuf,
        /// Its `tokenizer.ggml.model`.
        model: String,
    },
    /// The way texts are split before they are merged to tokens is not known.
    #[error(
        "`{file}`: tokenizer.ggml.pre `{pre_tokenizer}` is not known; known are: {}; \
         use the model's safetensors files and tokenizer.json",
        PreTokenizer::names()
    )]
    UnknownPreTokenizer {
        /// The file.
        file: PathBuf,
        /// Its `tokenizer.ggml.pre`; empty if it has none.
        pre_tokenizer: String,
    },
}
