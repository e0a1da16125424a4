//! Models on the Hugging Face Hub, fetched into the cache that they share with Python's huggingface_hub.
//!
//! A model is named `OWNER/NAME`, one GGUF file of it `OWNER/NAME/FILE.gguf`. The variables HF_HOME, HF_HUB_CACHE,
//! HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH and HF_HUB_OFFLINE mean what they mean there. Only the files that are needed are
//! fetched: the shards of the embedding, the head and the final norm where that is all.
//!
//! Invariants:
//! - HUB-1: a file of a snapshot is complete: as long as the Hub says.
//! - HUB-2: what has come stays; a download that was cut goes on where it ended, in this process or a later one.
//! - HUB-3: all files are of one commit, whatever happens to the branch meanwhile.

mod download;
mod error;
mod files;

use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use hf_hub::{Cache, Repo, RepoType};

pub use error::HubError;

use download::Download;

/// The Hub, unless HF_ENDPOINT says otherwise.
const ENDPOINT: &str = "https://huggingface.co";
/// A connection over which nothing comes for so long is dead.
const STALL_TIMEOUT: Duration = Duration::from_secs(120);
/// Pause after a first failure.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A model on the Hub, or one of its files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubModel {
    /// `OWNER/NAME`.
    pub repo: String,
    /// Branch, tag or commit.
    pub revision: String,
    /// The GGUF file that is meant, if one is.
    pub file: Option<String>,
}

impl HubModel {
    /// The model that a text names, if it has the form of a name: `OWNER/NAME` or `OWNER/NAME/FILE.gguf`.
    pub fn parse(text: &str, revision: &str) -> Option<Self> {
        let mut parts = text.splitn(3, '/');
        let (owner, name, file) = (parts.next()?, parts.next()?, parts.next());
        if !Self::is_revision(revision)
            || !is_name(owner)
            || !is_name(name)
            || !file.is_none_or(|file| is_name(file) && file.ends_with(".gguf"))
        {
            return None;
        }
        // Two parts with that ending are a folder and a file.
        if file.is_none() && name.ends_with(".gguf") {
            return None;
        }
        Some(Self {
            repo: format!("{owner}/{name}"),
            revision: revision.to_owned(),
            file: file.map(str::to_owned),
        })
    }

    /// Whether a text can be a branch, tag or commit.
    pub fn is_revision(text: &str) -> bool {
        text.split('/').all(is_name)
    }

    fn at(&self, revision: &str) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned())
    }
}

impl std::fmt::Display for HubModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}@{}", self.repo, self.revision)
    }
}

/// Whether the Hub allows a part of a name.
fn is_name(part: &str) -> bool {
    !part.is_empty()
        && !part.starts_with(['.', '-'])
        && part
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

/// What of a model is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// All of it.
    Whole,
    /// Configuration, tokenizer, and the shards with embedding, head and final norm.
    Frozen,
    /// Configuration and tokenizer.
    Tokenizer,
}

/// How far fetching is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The file that is being fetched.
    pub file: String,
    /// Bytes of all needed files that are known to be needed and are here.
    pub done_bytes: u64,
    /// Bytes of all files that are known to be needed.
    pub total_bytes: u64,
    /// Why there is a pause, if there is one.
    pub pause: Option<String>,
}

/// Where and how models are fetched.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Address of the Hub.
    pub endpoint: String,
    /// Folder with one folder per model.
    pub cache: PathBuf,
    /// Who is asking, if that must be known.
    pub token: Option<String>,
    /// Only what is in the cache may be used.
    pub is_offline: bool,
    /// A connection over which nothing comes for so long is given up.
    pub stall_timeout: Duration,
    /// Pause after a first failure; it doubles with every further one.
    pub retry_pause: Duration,
}

impl Hub {
    /// As the variables of the environment say.
    ///
    /// # Errors
    /// [`HubError::NoHome`].
    pub fn from_env() -> Result<Self, HubError> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// As variables say, which a function looks up; empty ones count as unset.
    ///
    /// # Errors
    /// [`HubError::NoHome`].
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, HubError> {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let path = |name: &str| variable(name).map(PathBuf::from);
        let home = path("HF_HOME")
            .or_else(|| path("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| path("HOME").map(|home| home.join(".cache/huggingface")));
        let cache = path("HF_HUB_CACHE").or_else(|| Some(home.as_ref()?.join("hub")));
        let token_file = path("HF_TOKEN_PATH").or_else(|| Some(home?.join("token")));
        let token = variable("HF_TOKEN").or_else(|| std::fs::read_to_string(token_file?).ok());
        let is_on = |name: &str| {
            variable(name).is_some_and(|value| {
                matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
            })
        };
        Ok(Self {
            endpoint: variable("HF_ENDPOINT")
                .map_or_else(|| ENDPOINT.to_owned(), |url| url.trim_end_matches('/').to_owned()),
            cache: cache.ok_or(HubError::NoHome)?,
            token: token
                .map(|token| token.trim().to_owned())
                .filter(|token| !token.is_empty()),
            is_offline: is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE"),
            stall_timeout: STALL_TIMEOUT,
            retry_pause: RETRY_PAUSE,
        })
    }

    /// Fetches what is needed and not in the cache; returns the snapshot's folder, or the GGUF file in it.
    ///
    /// Blocks until all is there. `progress` hears of every piece.
    ///
    /// # Errors
    /// When the model is not there or may not be had, the network or the disk fails, or no byte comes for
    /// [`Self::stall_timeout`].
    pub fn fetch(
        &self,
        model: &HubModel,
        need: Need,
        mut progress: impl FnMut(&Progress),
    ) -> Result<PathBuf, HubError> {
        if self.is_offline {
            return self.cached_snapshot(model, need);
        }
        let (events, heard) = channel();
        let download = Download::new(self.clone(), model.clone(), need, events)?;
        // A dead connection cannot be told to end; whoever waits for it can.
        let thread = std::thread::Builder::new()
            .name("hub".to_owned())
            .spawn(move || download.run());
        let thread = thread.map_err(|source| HubError::Cache {
            path: self.cache.clone(),
            source,
        })?;
        loop {
            match heard.recv_timeout(self.stall_timeout) {
                Ok(event) => progress(&event),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(HubError::Stalled {
                        model: model.to_string(),
                        idle_s: self.stall_timeout.as_secs(),
                    });
                }
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        thread.join().unwrap_or_else(|_| {
            Err(HubError::Download {
                model: model.to_string(),
                file: "its files".to_owned(),
                reason: "the downloading thread panicked".to_owned(),
            })
        })
    }

    fn cached(&self, model: &HubModel, revision: &str) -> hf_hub::CacheRepo {
        Cache::new(self.cache.clone()).repo(model.at(revision))
    }

    /// Folder of a commit's files.
    fn snapshot(&self, model: &HubModel, commit: &str) -> PathBuf {
        self.cached(model, commit).pointer_path(commit)
    }

    /// The snapshot in the cache, if it has what is needed.
    fn cached_snapshot(&self, model: &HubModel, need: Need) -> Result<PathBuf, HubError> {
        let missing = |missing: String| HubError::Offline {
            model: model.to_string(),
            missing,
            cache: self.cache.clone(),
        };
        let folder = self.cache.join(model.at(&model.revision).folder_name());
        let commit = std::fs::read_to_string(folder.join("refs").join(&model.revision))
            .map_or_else(|_| model.revision.clone(), |commit| commit.trim().to_owned());
        let snapshot = self.snapshot(model, &commit);
        if !is_name(&commit) || !snapshot.is_dir() {
            return Err(missing("file".to_owned()));
        }
        let present = |name: &str| snapshot.join(name).is_file();
        let needed = files::needed(model, need, present, |name| {
            std::fs::read(snapshot.join(name)).ok()
        })
        .map_err(|reason| missing(reason.missing))?;
        match needed.into_iter().find(|name| !present(name)) {
            Some(name) => Err(missing(name)),
            None => Ok(place(&snapshot, model)),
        }
    }
}

/// What a verifier's path becomes.
fn place(snapshot: &Path, model: &HubModel) -> PathBuf {
    match &model.file {
        Some(file) => snapshot.join(file),
        None => snapshot.to_owned(),
    }
}
