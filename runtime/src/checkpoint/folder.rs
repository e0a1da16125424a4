//! The folder of a run's checkpoints.
//!
//! ```text
//! checkpoints/step-000100/  step-000200/  latest -> step-000200  final/
//! ```
//!
//! A checkpoint is written beside, as `.step-000200.partial-PID`, synced, and renamed in; then `latest` is replaced by a
//! rename. So a reader sees a whole checkpoint or none, whenever the writer dies. The writer holds a lock on its partial
//! folder: what carries such a name and is not locked was left by a crash and is removed by the next writer. A process id
//! alone would not tell, since containers give the same ids again and again.
//!
//! There is one writer per folder; any number of readers.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FlockOperation, RenameFlags, flock, renameat_with};

use super::CheckpointError;
use super::manifest::{seal, sync_folder, verify};
use crate::ids::Step;

/// Link to the newest checkpoint.
const LATEST: &str = "latest";
/// Start of the names of numbered checkpoints.
const STEP_PREFIX: &str = "step-";
/// Between the name and the process id of a checkpoint that is being written.
const PARTIAL: &str = ".partial-";

/// A checkpoint under its final name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// Optimizer steps committed when it was written.
    pub step: Step,
    /// Its folder.
    pub path: PathBuf,
}

/// The newest checkpoint that is whole.
#[derive(Debug)]
pub struct Latest {
    /// The checkpoint.
    pub checkpoint: Checkpoint,
    /// What is wrong with newer ones, newest first; empty when all is well.
    pub skipped: Vec<CheckpointError>,
}

/// A run's folder of checkpoints.
#[derive(Debug)]
pub struct CheckpointFolder {
    root: PathBuf,
}

impl CheckpointFolder {
    /// Opens the folder for writing: makes it if missing, and removes what a crashed writer left half-written.
    ///
    /// # Errors
    /// The folder cannot be made, read or written.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self, CheckpointError> {
        let folder = Self { root: root.into() };
        let fresh = !folder.root.exists();
        fs::create_dir_all(&folder.root).map_err(|cause| CheckpointError::write(&folder.root, cause))?;
        if let Some(parent) = folder
            .root
            .parent()
            .filter(|parent| fresh && !parent.as_os_str().is_empty())
        {
            sync_folder(parent)?;
        }
        folder.remove_leftovers()?;
        Ok(folder)
    }

    /// Opens the folder for reading; nothing in it is changed. A missing folder has no checkpoints.
    pub fn open(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Where the checkpoints are.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Writes the checkpoint of a step and lets `latest` point to it. `fill` writes the files into the folder it is given.
    ///
    /// A checkpoint of the same step is replaced at once: a run that fell back redoes its steps.
    ///
    /// # Errors
    /// `fill` fails, or the disk is full, read-only or failing. Nothing half-written stays visible.
    pub fn write(
        &self,
        step: Step,
        fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        let name = step_name(step);
        let path = self.publish(&name, fill)?;
        self.point_latest_to(&name)?;
        Ok(path)
    }

    /// Writes a checkpoint under a name of its own, such as `final`. `latest` stays; [`Self::prune`] spares it.
    ///
    /// # Errors
    /// Those of [`Self::write`]; the name is none.
    pub fn write_named(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        let wrong = |problem| CheckpointError::Name {
            name: name.to_owned(),
            problem,
        };
        if !is_plain(name) {
            return Err(wrong("use letters, digits, `-`, `_` and inner dots"));
        }
        if name == LATEST || name.starts_with(STEP_PREFIX) {
            return Err(wrong("the names of numbered checkpoints are taken"));
        }
        self.publish(name, fill)
    }

    /// The numbered checkpoints, oldest step first. They are complete, but not checked for damage.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn list(&self) -> Result<Vec<Checkpoint>, CheckpointError> {
        let mut checkpoints: Vec<Checkpoint> = self
            .names()?
            .iter()
            .filter_map(|name| {
                Some(Checkpoint {
                    step: parse_step(name)?,
                    path: self.root.join(name),
                })
            })
            .filter(|checkpoint| checkpoint.path.is_dir())
            .collect();
        checkpoints.sort_by_key(|checkpoint| checkpoint.step);
        Ok(checkpoints)
    }

    /// The newest checkpoint whose files match their manifest; damaged ones are passed over with a warning. `None` if
    /// there is no checkpoint at all.
    ///
    /// # Errors
    /// There are checkpoints, but all are damaged; the folder cannot be read.
    pub fn latest_valid(&self) -> Result<Option<Latest>, CheckpointError> {
        let mut checkpoints = self.list()?;
        let count = checkpoints.len();
        let mut skipped = Vec::new();
        while let Some(checkpoint) = checkpoints.pop() {
            match verify(&checkpoint.path) {
                Ok(()) => return Ok(Some(Latest { checkpoint, skipped })),
                Err(error) => {
                    tracing::warn!(step = checkpoint.step.0, %error, "checkpoint passed over");
                    skipped.push(error);
                }
            }
        }
        match skipped.into_iter().next() {
            None => Ok(None),
            Some(newest) => Err(CheckpointError::NoneValid {
                folder: self.root.clone(),
                count,
                newest: Box::new(newest),
            }),
        }
    }

    /// Removes all but the newest `keep` numbered checkpoints, and returns the steps of those removed. The newest,
    /// the one that `latest` points to and the one of step `spared` stay in any case.
    ///
    /// # Errors
    /// A checkpoint cannot be removed; earlier ones may be gone already.
    pub fn prune(&self, keep: usize, spared: Option<Step>) -> Result<Vec<Step>, CheckpointError> {
        let checkpoints = self.list()?;
        let pointed_to = fs::read_link(self.root.join(LATEST)).ok();
        let count = checkpoints.len().saturating_sub(keep.max(1));
        let mut removed = Vec::new();
        for checkpoint in checkpoints.into_iter().take(count) {
            let name = step_name(checkpoint.step);
            if pointed_to.as_deref() == Some(Path::new(&name)) || spared == Some(checkpoint.step) {
                continue;
            }
            // Renamed first, so that a crash in the middle leaves nothing that looks like a checkpoint.
            let doomed = self.partial_path(&name);
            self.remove_leftover(&partial_file_name(&name), &name)?;
            fs::rename(&checkpoint.path, &doomed)
                .and_then(|()| fs::remove_dir_all(&doomed))
                .map_err(|cause| CheckpointError::write(&checkpoint.path, cause))?;
            removed.push(checkpoint.step);
        }
        Ok(removed)
    }

    fn publish(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), CheckpointError>,
    ) -> Result<PathBuf, CheckpointError> {
        // A writer that takes over from one that was killed cleans up after it.
        self.remove_leftovers()?;
        let partial = Partial::create(self.partial_path(name))?;
        fill(&partial.path)?;
        seal(&partial.path)?;
        let target = self.root.join(name);
        partial
            .move_to(&target)
            .map_err(|cause| CheckpointError::write(&target, cause))?;
        sync_folder(&self.root)?;
        Ok(target)
    }

    fn point_latest_to(&self, name: &str) -> Result<(), CheckpointError> {
        let link = self.root.join(LATEST);
        let beside = self.partial_path(LATEST);
        self.remove_leftover(&partial_file_name(LATEST), LATEST)?;
        symlink(name, &beside)
            .and_then(|()| fs::rename(&beside, &link))
            .map_err(|cause| CheckpointError::write(&link, cause))?;
        sync_folder(&self.root)
    }

    /// Removes what writers that are gone have left half-written.
    fn remove_leftovers(&self) -> Result<(), CheckpointError> {
        for name in self.names()? {
            if let Some(inner) = partial_name(&name) {
                self.remove_leftover(&name, inner)?;
            }
        }
        Ok(())
    }

    /// Removes a partial folder that nobody writes to any more, or a link that was never renamed in.
    fn remove_leftover(&self, file_name: &str, inner: &str) -> Result<(), CheckpointError> {
        let path = self.root.join(file_name);
        let failed = |cause| CheckpointError::write(&path, cause);
        let Ok(metadata) = fs::symlink_metadata(&path) else {
            return Ok(());
        };
        if metadata.is_symlink() && inner == LATEST {
            return fs::remove_file(&path).map_err(failed);
        }
        if !metadata.is_dir() {
            return Ok(());
        }
        let folder = File::open(&path).map_err(|cause| CheckpointError::read(&path, cause))?;
        match flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                tracing::info!(path = %path.display(), "half-written checkpoint removed");
                fs::remove_dir_all(&path).map_err(failed)
            }
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(()),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "half-written checkpoint left in place: no locks here");
                Ok(())
            }
        }
    }

    fn partial_path(&self, name: &str) -> PathBuf {
        self.root.join(partial_file_name(name))
    }

    /// Names in the folder; none if it does not exist.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let failed = |cause| CheckpointError::read(&self.root, cause);
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.map_err(failed)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            // What is not UTF-8 is none of ours.
            names.extend(entry.map_err(failed)?.file_name().into_string().ok());
        }
        Ok(names)
    }
}

/// A checkpoint that is being written; removed unless it is moved to its name.
struct Partial {
    path: PathBuf,
    /// Holds the lock.
    _folder: File,
}

impl Partial {
    fn create(path: PathBuf) -> Result<Self, CheckpointError> {
        let failed = |cause| CheckpointError::write(&path, cause);
        fs::create_dir(&path).map_err(failed)?;
        let folder = File::open(&path).map_err(failed)?;
        if let Err(error) = flock(&folder, FlockOperation::NonBlockingLockExclusive) {
            // Some network file systems have no locks: then a later writer leaves the leftovers of a crash in place.
            tracing::debug!(path = %path.display(), %error, "no lock on a checkpoint being written");
        }
        Ok(Self {
            path,
            _folder: folder,
        })
    }

    /// Renames the folder. One that has the name already is exchanged with it, and removed with `self`.
    fn move_to(self, target: &Path) -> io::Result<()> {
        match fs::rename(&self.path, target) {
            Err(error) if target.is_dir() => {
                match renameat_with(CWD, &self.path, CWD, target, RenameFlags::EXCHANGE) {
                    Ok(()) => Ok(()),
                    // No exchange on this file system: for a moment there is neither.
                    Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                        fs::remove_dir_all(target)?;
                        fs::rename(&self.path, target)
                    }
                    Err(_) => Err(error),
                }
            }
            other => other,
        }
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        match fs::remove_dir_all(&self.path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(path = %self.path.display(), %error, "half-written checkpoint not removed");
            }
            _ => {}
        }
    }
}

fn step_name(step: Step) -> String {
    format!("{STEP_PREFIX}{:06}", step.0)
}

/// The step of a folder's name; only names that [`step_name`] would give.
fn parse_step(name: &str) -> Option<Step> {
    let step = Step(name.strip_prefix(STEP_PREFIX)?.parse().ok()?);
    (step_name(step) == name).then_some(step)
}

fn partial_file_name(name: &str) -> String {
    format!(".{name}{PARTIAL}{}", std::process::id())
}

/// The name inside the name of a partial folder or link, if it is one.
fn partial_name(file_name: &str) -> Option<&str> {
    let (name, pid) = file_name.strip_prefix('.')?.rsplit_once(PARTIAL)?;
    (is_plain(name) && pid.parse::<u32>().is_ok()).then_some(name)
}

/// Whether a name is one path component that no tool treats specially.
fn is_plain(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    !name.is_empty()
        && name.len() <= 100
        && name.bytes().all(allowed)
        && !name.starts_with('.')
        && !name.ends_with('.')
}
