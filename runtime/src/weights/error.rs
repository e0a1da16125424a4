//! What can be wrong with a folder of weights.

use std::path::PathBuf;

use super::Encoding;
use crate::gguf::GgufError;

/// Why weights could not be read; each names the place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum WeightsError {
    /// The GGUF file cannot be used.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// The folder is not there.
    #[error(
        "there is no folder `{folder}`; give the folder that holds config.json and the safetensors files"
    )]
    FolderMissing {
        /// The folder asked for.
        folder: PathBuf,
    },
    /// The folder holds no weights in a known layout.
    #[error(
        "`{folder}` holds neither model.safetensors nor model.safetensors.index.json; \
         download the safetensors files of the model into it"
    )]
    NoWeights {
        /// The folder asked for.
        folder: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot read `{file}`: {source}; check that it exists and may be read")]
    Read {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The list of shards cannot be used.
    #[error("`{file}` is no index of shards: {reason}; download it again")]
    Index {
        /// The index file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Shards that the index names are not there.
    #[error("`{index}` names shards that are not beside it: `{shards}`; download them into the same folder")]
    ShardMissing {
        /// The index file.
        index: PathBuf,
        /// File names of the missing shards.
        shards: String,
    },
    /// A shard lacks a tensor that the index places there.
    #[error(
        "`{index}` places tensor `{tensor}` in `{shard}`, which does not hold it; \
         index and shards are of different models: download both again"
    )]
    NotInShard {
        /// The index file.
        index: PathBuf,
        /// File name of the shard.
        shard: String,
        /// The tensor looked for.
        tensor: String,
    },
    /// A tensor lies in a shard that cannot be used.
    #[error("tensor `{tensor}` lies in `{file}`, which is missing or damaged; download that file again")]
    Absent {
        /// The tensor looked for.
        tensor: String,
        /// The shard.
        file: PathBuf,
    },
    /// The file ends before its contents do.
    #[error("`{file}` is truncated: {reason}; download it again")]
    Truncated {
        /// The file.
        file: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// The file has another format or a damaged header.
    #[error(
        "`{file}` is no safetensors file: {reason}; download it again or convert the model to safetensors"
    )]
    NotSafetensors {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No tensor has this name.
    #[error(
        "`{folder}` has no tensor `{tensor}`{}; the weights must belong to the model that config.json describes",
        nearest.as_ref().map(|name| format!(" (the nearest name is `{name}`)")).unwrap_or_default()
    )]
    TensorMissing {
        /// The folder of the weights.
        folder: PathBuf,
        /// The name looked for.
        tensor: String,
        /// The most similar name that is there.
        nearest: Option<String>,
    },
    /// A tensor has another shape than its use needs.
    #[error(
        "tensor `{tensor}` of `{file}` has shape {actual:?} where {expected:?} is needed; \
         config.json and weights must be of the same model"
    )]
    WrongShape {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The shape that is needed.
        expected: Vec<usize>,
        /// The shape that is there.
        actual: Vec<usize>,
    },
    /// A tensor has elements that cannot be read as floats.
    #[error("tensor `{tensor}` of `{file}` is stored as {encoding}; convert it to bf16, f16 or f32")]
    UnsupportedEncoding {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// How its elements are stored.
        encoding: Encoding,
    },
    /// A row was asked for that the tensor does not have.
    #[error(
        "tensor `{tensor}` of `{file}` has {rows} rows; row {row} does not exist: ids must be below {rows}"
    )]
    RowOutOfRange {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// The row asked for.
        row: usize,
        /// How many there are.
        rows: usize,
    },
}
