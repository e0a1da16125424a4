//! Fetching the files of one model.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::Duration;

use hf_hub::Cache;
use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};

use super::{Hub, HubError, HubModel, Need, Progress, files, place};

/// The Hub answers what a model has within moments.
const ASK_TIMEOUT: Duration = Duration::from_secs(30);
/// So often in a row a download may fail without a byte having come.
const ATTEMPTS: u32 = 6;
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// What the Hub says about a model.
#[derive(serde::Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(serde::Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
}

/// One fetching.
pub(super) struct Download {
    hub: Hub,
    model: HubModel,
    need: Need,
    events: Sender<Progress>,
    api: Api,
}

/// Counts the bytes of one file and tells.
struct Counter<'a> {
    events: &'a Sender<Progress>,
    progress: &'a RefCell<Progress>,
    /// Bytes that were here before this file.
    before: u64,
    /// Bytes of this file that came in this attempt.
    came: &'a RefCell<u64>,
    /// The first count after the beginning is what was here already.
    is_resuming: bool,
}

impl hf_hub::api::Progress for Counter<'_> {
    fn init(&mut self, _: usize, _: &str) {
        self.progress.borrow_mut().done_bytes = self.before;
        self.is_resuming = true;
    }

    fn update(&mut self, bytes: usize) {
        let mut progress = self.progress.borrow_mut();
        progress.done_bytes += bytes as u64;
        progress.pause = None;
        if !self.is_resuming {
            *self.came.borrow_mut() += bytes as u64;
        }
        self.is_resuming = false;
        // Whoever asked may have given up.
        let _ = self.events.send(progress.clone());
    }

    fn finish(&mut self) {}
}

impl Download {
    pub(super) fn new(
        hub: Hub,
        model: HubModel,
        need: Need,
        events: Sender<Progress>,
    ) -> Result<Self, HubError> {
        // It is resumed here and not by the crate, which goes on at the wrong place if nothing came the first time.
        let api = ApiBuilder::from_cache(Cache::new(hub.cache.clone()))
            .with_endpoint(hub.endpoint.clone())
            .with_token(hub.token.clone())
            .with_progress(false)
            .with_retries(0)
            .with_user_agent("eaglet", env!("CARGO_PKG_VERSION"))
            .build();
        let api = api.map_err(|error| HubError::Unreachable {
            model: model.to_string(),
            endpoint: hub.endpoint.clone(),
            reason: reason(&error),
            cache: hub.cache.clone(),
        })?;
        Ok(Self {
            hub,
            model,
            need,
            events,
            api,
        })
    }

    /// Fetches all that is needed.
    pub(super) fn run(self) -> Result<PathBuf, HubError> {
        let listing = match self.list() {
            // The same files are as good without a network.
            Err(error @ HubError::Unreachable { .. }) => {
                return self.hub.cached_snapshot(&self.model, self.need).map_or(Err(error), |path| {
                    tracing::warn!(model = %self.model, "the hub cannot be asked; what is in the cache is used");
                    Ok(path)
                });
            }
            listing => listing?,
        };
        let commit = listing.sha;
        let sizes: BTreeMap<&str, Option<u64>> = listing
            .siblings
            .iter()
            .map(|sibling| (sibling.rfilename.as_str(), sibling.size))
            .collect();
        let snapshot = self.hub.snapshot(&self.model, &commit);
        let repo = self.api.repo(self.model.at(&commit));
        let progress = RefCell::new(Progress {
            file: String::new(),
            done_bytes: 0,
            total_bytes: 0,
            pause: None,
        });
        let mut failed = None;
        let is_there = |name: &str| sizes.contains_key(name);
        let needed = files::needed(&self.model, self.need, is_there, |index| {
            let fetched = self.file(&repo, &snapshot, index, None, &progress);
            fetched.map_err(|error| failed = Some(error)).ok()?;
            std::fs::read(snapshot.join(index)).ok()
        });
        let needed = match (needed, failed) {
            (_, Some(error)) => return Err(error),
            (Ok(needed), None) => needed,
            (Err(lacking), None) => {
                return Err(HubError::Incomplete {
                    model: self.model.to_string(),
                    missing: lacking.missing,
                    remedy: lacking.remedy,
                });
            }
        };
        let size_of = |name: &str| sizes.get(name).copied().flatten();
        *progress.borrow_mut() = Progress {
            file: String::new(),
            done_bytes: 0,
            total_bytes: needed.iter().filter_map(|name| size_of(name)).sum(),
            pause: None,
        };
        for name in &needed {
            self.file(&repo, &snapshot, name, size_of(name), &progress)?;
        }
        if self.model.revision != commit {
            let cached = self.hub.cached(&self.model, &self.model.revision);
            cached.create_ref(&commit).map_err(|source| HubError::Cache {
                path: self.hub.cache.clone(),
                source,
            })?;
        }
        Ok(place(&snapshot, &self.model))
    }

    /// Commit and files of the model.
    fn list(&self) -> Result<Listing, HubError> {
        let (model, endpoint) = (self.model.to_string(), self.hub.endpoint.clone());
        let unreachable = |reason: String| HubError::Unreachable {
            model: model.clone(),
            endpoint: endpoint.clone(),
            reason,
            cache: self.hub.cache.clone(),
        };
        let request = self.api.repo(self.model.at(&self.model.revision)).info_request();
        let request = request
            .query("blobs", "true")
            .config()
            .timeout_global(Some(ASK_TIMEOUT))
            .build();
        let mut response = request.call().map_err(|error| match error {
            ureq::Error::StatusCode(404) => HubError::NotFound {
                model: model.clone(),
                endpoint: endpoint.clone(),
            },
            ureq::Error::StatusCode(status @ (401 | 403)) => HubError::Refused {
                model: model.clone(),
                endpoint: endpoint.clone(),
                status,
                with_token: self.hub.token.is_some(),
            },
            error => unreachable(error.to_string()),
        })?;
        let listing: Listing = response
            .body_mut()
            .read_json()
            .map_err(|error| unreachable(format!("its answer is none of a hub ({error})")))?;
        // It becomes the name of a folder.
        if super::is_name(&listing.sha) {
            Ok(listing)
        } else {
            Err(unreachable("its answer names no commit".to_owned()))
        }
    }

    /// Fetches one file, if it is not there already, in as many attempts as bring it on.
    fn file(
        &self,
        repo: &ApiRepo,
        snapshot: &Path,
        name: &str,
        size: Option<u64>,
        progress: &RefCell<Progress>,
    ) -> Result<(), HubError> {
        let before = progress.borrow().done_bytes;
        name.clone_into(&mut progress.borrow_mut().file);
        let pointer = snapshot.join(name);
        let (mut failures, mut wrong_lengths) = (0, 0);
        loop {
            if let Ok(metadata) = std::fs::metadata(&pointer)
                && size.is_none_or(|size| size == metadata.len())
            {
                progress.borrow_mut().done_bytes = before + metadata.len();
                let _ = self.events.send(progress.borrow().clone());
                return Ok(());
            }
            self.discard(&pointer)?;
            let came = RefCell::new(0);
            let counter = Counter {
                events: &self.events,
                progress,
                before,
                came: &came,
                is_resuming: true,
            };
            let outcome = self.attempt(repo, &pointer, name, counter);
            failures = if *came.borrow() > 0 { 1 } else { failures + 1 };
            match outcome {
                Ok(())
                    if size.is_none_or(|size| {
                        std::fs::metadata(&pointer).is_ok_and(|found| found.len() == size)
                    }) => {}
                // Bytes came, but they bring nothing on.
                Ok(()) => {
                    self.discard(&pointer)?;
                    wrong_lengths += 1;
                    failures = wrong_lengths;
                    self.pause_or_fail(name, "it came with another length", failures, progress)?;
                }
                // What somebody else fetches is found next time.
                Err(ApiError::LockAcquisition(_)) => {
                    failures = 0;
                    self.pause(progress, "another process is fetching it", self.hub.retry_pause);
                }
                Err(ApiError::RequestError(error)) if is_final(&error) => {
                    return Err(self.failed(name, error.to_string()));
                }
                Err(error) => self.pause_or_fail(name, &reason(&error), failures, progress)?,
            }
        }
    }

    /// Makes a snapshot's file of what is in the cache under another commit, or of what had come whole; else fetches the
    /// rest of it.
    fn attempt(
        &self,
        repo: &ApiRepo,
        pointer: &Path,
        name: &str,
        counter: Counter<'_>,
    ) -> Result<(), ApiError> {
        let metadata = self.api.metadata(&repo.url(name))?;
        let blob = self
            .hub
            .cached(&self.model, &self.model.revision)
            .blob_path(metadata.etag());
        let part = blob.with_extension("part");
        let len = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
        let size = metadata.size() as u64;
        if len(&blob) != size || !blob.is_file() {
            if len(&part) < size || size == 0 {
                return repo.download_with_progress(name, counter).map(drop);
            }
            if len(&part) > size {
                std::fs::remove_file(&part)?;
                return repo.download_with_progress(name, counter).map(drop);
            }
            std::fs::rename(&part, &blob)?;
        }
        if let (Some(folder), Some(etag)) = (pointer.parent(), blob.file_name()) {
            std::fs::create_dir_all(folder)?;
            std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), pointer)?;
        }
        Ok(())
    }

    fn failed(&self, file: &str, reason: String) -> HubError {
        HubError::Download {
            model: self.model.to_string(),
            file: file.to_owned(),
            reason,
        }
    }

    fn pause_or_fail(
        &self,
        file: &str,
        why: &str,
        failures: u32,
        progress: &RefCell<Progress>,
    ) -> Result<(), HubError> {
        if failures >= ATTEMPTS {
            return Err(self.failed(file, why.to_owned()));
        }
        let pause = self
            .hub
            .retry_pause
            .saturating_mul(1 << failures.saturating_sub(1))
            .min(LONGEST_PAUSE);
        self.pause(progress, why, pause);
        Ok(())
    }

    fn pause(&self, progress: &RefCell<Progress>, why: &str, pause: Duration) {
        progress.borrow_mut().pause = Some(why.to_owned());
        let _ = self.events.send(progress.borrow().clone());
        std::thread::sleep(pause);
    }

    /// Removes a file of a snapshot that is not what it should be, with what it points to.
    fn discard(&self, pointer: &Path) -> Result<(), HubError> {
        if let Ok(blob) = std::fs::canonicalize(pointer) {
            remove(&blob)?;
        }
        remove(pointer)
    }
}

fn remove(path: &Path) -> Result<(), HubError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(HubError::Cache {
            path: path.to_owned(),
            source,
        }),
        _ => Ok(()),
    }
}

/// Whether asking again is of no use.
fn is_final(error: &ureq::Error) -> bool {
    matches!(error, ureq::Error::StatusCode(400 | 401 | 403 | 404 | 410))
}

/// The innermost reason.
fn reason(error: &ApiError) -> String {
    match error {
        ApiError::RequestError(error) => error.to_string(),
        ApiError::IoError(error) => error.to_string(),
        ApiError::TooManyRetries(error) => reason(error),
        error => error.to_string().to_lowercase(),
    }
}
