//! What can be wrong with files of hidden states.

use std::path::PathBuf;

use crate::contract::Difference;
use crate::weights::WeightsError;

/// Why hidden states cannot be read or written; each names the place and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum HiddenFileError {
    /// The operating system refused.
    #[error("cannot {verb} `{path}`: {source}; check that it exists, may be used and that the disk has room")]
    Io {
        /// What was tried.
        verb: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// There is nothing in the folder.
    #[error(
        "`{folder}` holds no hs_*.safetensors, nor does a `hidden_states` folder in it; \
         write some with `eaglet extract`, or name the folder that speculators wrote"
    )]
    Empty {
        /// The folder.
        folder: PathBuf,
    },
    /// A file is no safetensors file, or lacks a tensor.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A file holds something else.
    #[error("`{file}` holds no hidden states of this verifier: {what}; extract the sample again")]
    Foreign {
        /// The file.
        file: PathBuf,
        /// What differs.
        what: String,
    },
    /// The contract cannot be read.
    #[error("`{file}` is no contract of hidden states: {reason}; extract into an empty folder again")]
    Contract {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The states were made under another contract.
    #[error("the hidden states in `{folder}` are not what this run needs: {difference}; extract them again")]
    Difference {
        /// The folder.
        folder: PathBuf,
        /// The first field that differs.
        difference: Difference,
    },
}

impl HiddenFileError {
    pub(super) fn io(verb: &'static str, path: &std::path::Path, source: std::io::Error) -> Self {
        Self::Io {
            verb,
            path: path.to_owned(),
            source,
        }
    }
}
