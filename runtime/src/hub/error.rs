//! Why a model could not be had from the Hub.

use std::path::PathBuf;

/// Why a model could not be had from the Hub; each names the model and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The Hub has no such model, revision or file, or does not show it to this user.
    #[error(
        "`{model}` is no local path, and {endpoint} has no such model or revision; \
         check the spelling, verifier.revision and, if it is private, HF_TOKEN"
    )]
    NotFound {
        /// The model with its revision.
        model: String,
        /// The Hub's address.
        endpoint: String,
    },
    /// The Hub does not let this user have it.
    #[error(
        "{endpoint} refuses `{model}` ({status}) {}; it is private, gated or not there: check the spelling, accept its \
         terms on its page, and set HF_TOKEN to a token that may read it",
        if *with_token { "with the token that was given" } else { "without a token" }
    )]
    Refused {
        /// The model with its revision.
        model: String,
        /// The Hub's address.
        endpoint: String,
        /// HTTP status.
        status: u16,
        /// Whether a token was sent.
        with_token: bool,
    },
    /// The Hub could not be asked.
    #[error(
        "cannot ask {endpoint} for `{model}`: {reason}; check the network and HF_ENDPOINT, \
         or set HF_HUB_OFFLINE=1 if all of it is in {} already",
        cache.display()
    )]
    Unreachable {
        /// The model with its revision.
        model: String,
        /// The Hub's address.
        endpoint: String,
        /// What went wrong.
        reason: String,
        /// Where fetched models are.
        cache: PathBuf,
    },
    /// Nothing may be fetched, and not all is there.
    #[error(
        "HF_HUB_OFFLINE is set and {} has no {missing} of `{model}`; unset it, or fetch the model once with a network",
        cache.display()
    )]
    Offline {
        /// The model with its revision.
        model: String,
        /// What is not there.
        missing: String,
        /// Where fetched models are.
        cache: PathBuf,
    },
    /// The model's repository lacks what is needed.
    #[error("`{model}` on the hub has no {missing}; {remedy}")]
    Incomplete {
        /// The model with its revision.
        model: String,
        /// What is not there.
        missing: String,
        /// What to do.
        remedy: String,
    },
    /// A download failed for good.
    #[error("cannot download {file} of `{model}`: {reason}; launch again to go on where it ended")]
    Download {
        /// The model with its revision.
        model: String,
        /// The file.
        file: String,
        /// What went wrong.
        reason: String,
    },
    /// No byte came for a long time.
    #[error(
        "no byte of `{model}` has come for {idle_s} s; check the network and launch again to go on where it ended"
    )]
    Stalled {
        /// The model with its revision.
        model: String,
        /// So long nothing came.
        idle_s: u64,
    },
    /// The cache cannot be used.
    #[error("cannot use {}: {source}; check its permissions and the disk, or set HF_HOME", path.display())]
    Cache {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// There is no place for the cache.
    #[error("no home folder is known to keep models of the hub in; set HF_HOME")]
    NoHome,
}
