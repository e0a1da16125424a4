//! What can go wrong with a checkpoint, each with its place and remedy in one line.

use std::io;
use std::path::{Path, PathBuf};

use super::config_json::ConfigError;

/// A checkpoint that cannot be written, read or trusted.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused a write.
    #[error("cannot write {}: {cause}; {remedy}", path.display())]
    Write {
        /// File or folder that was to be written.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
        /// What to do about it.
        remedy: &'static str,
    },
    /// The operating system refused a read.
    #[error("cannot read {}: {cause}", path.display())]
    Read {
        /// File or folder that was to be read.
        path: PathBuf,
        /// What the operating system said.
        cause: io::Error,
    },
    /// A `config.json` says something that no draft of ours can be.
    #[error("{}: {error}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Key and problem.
        error: ConfigError,
    },
    /// A tensor is missing, unknown, or of another shape, dtype or content than it must be.
    #[error("{}: tensor `{tensor}` {problem}", path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// What is wrong with it and what to do.
        problem: String,
    },
    /// The file is cut short or its bits have changed since it was written.
    #[error("{} is damaged: {problem}; use an earlier checkpoint", path.display())]
    Damaged {
        /// File or folder.
        path: PathBuf,
        /// How it shows.
        problem: String,
    },
    /// The file is whole, but belongs to something else.
    #[error("{} {problem}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is and what to do.
        problem: String,
    },
    /// There are checkpoints, but not one can be used. Starting from scratch is left to the user.
    #[error(
        "none of the {count} checkpoints in {} can be used (newest: {newest}); move them away to start from scratch",
        folder.display()
    )]
    NoneValid {
        /// The folder of checkpoints.
        folder: PathBuf,
        /// How many there are.
        count: usize,
        /// What is wrong with the newest.
        newest: Box<CheckpointError>,
    },
    /// A name that a checkpoint cannot have.
    #[error("`{name}` cannot name a checkpoint: {problem}")]
    Name {
        /// The name.
        name: String,
        /// Why not, and what names look like.
        problem: &'static str,
    },
}

impl CheckpointError {
    /// A failed write, with the remedy that its kind suggests.
    /// A file or folder that could not be written.
    pub fn write(path: impl Into<PathBuf>, cause: io::Error) -> Self {
        let remedy = match cause.kind() {
            io::ErrorKind::StorageFull => {
                "free space on that file system or choose another checkpoint folder"
            }
            io::ErrorKind::QuotaExceeded => "raise the quota or choose another checkpoint folder",
            io::ErrorKind::ReadOnlyFilesystem => "mount it read-write or choose another checkpoint folder",
            io::ErrorKind::PermissionDenied => {
                "give this process's user the permission to write there or choose another checkpoint folder"
            }
            io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                "a file stands where a folder is needed: move it away or choose another checkpoint folder"
            }
            _ => "check that file system or choose another checkpoint folder",
        };
        Self::Write {
            path: path.into(),
            cause,
            remedy,
        }
    }

    pub(super) fn read(path: impl Into<PathBuf>, cause: io::Error) -> Self {
        Self::Read {
            path: path.into(),
            cause,
        }
    }

    pub(super) fn damaged(path: impl Into<PathBuf>, problem: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.into(),
            problem: problem.into(),
        }
    }

    pub(super) fn tensor(path: &Path, tensor: &str, problem: impl Into<String>) -> Self {
        Self::Tensor {
            path: path.into(),
            tensor: tensor.into(),
            problem: problem.into(),
        }
    }
}
