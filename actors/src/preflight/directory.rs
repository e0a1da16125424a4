//! Whether a run directory can be used, and whether what lies in it belongs to the run.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use eaglet_runtime::checkpoint::{CheckpointError, CheckpointFolder};
use rustix::fs::Access;

use super::machine::nearest_existing;
use crate::config::ClusterConfig;
use crate::engine::{Engine, ReplayError, Settings};
use crate::journal::{self, JournalError, Record};
use crate::recipe;

/// Why a run directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It is a file.
    #[error("{directory} is no folder; give run.directory a folder that you can write")]
    NotAFolder {
        /// The directory.
        directory: PathBuf,
    },
    /// It cannot be written, or not be made.
    #[error("{folder} cannot be written; give run.directory a folder that you can write")]
    ReadOnly {
        /// The directory, or the nearest folder above it that is there.
        folder: PathBuf,
    },
    /// Its journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// Its checkpoints.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Its journal is of another run.
    #[error(
        "{directory}: {keys} differ from what its run was started with; set them back, or start a new run directory"
    )]
    OtherRun {
        /// The directory.
        directory: PathBuf,
        /// The keys.
        keys: String,
    },
    /// Its journal cannot be continued.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// Something in it could only be explained by a journal that is not there.
    #[error(
        "{orphan} is there, but the journal of its run is missing or empty; restore {journal} from a copy, or give \
         run.directory another folder"
    )]
    Orphan {
        /// What is there.
        orphan: PathBuf,
        /// The journal that is not.
        journal: PathBuf,
    },
}

/// Looks at a run directory without changing anything. `settings` are those of the run, if they are known.
///
/// # Errors
/// If a launch would refuse it.
pub(crate) fn look(config: &ClusterConfig, settings: Option<Settings>) -> Result<(), DirectoryError> {
    let directory = &config.run.directory;
    can_be_written(directory)?;
    let journal = directory.join("journal");
    if !journal.exists() {
        return refuse_orphans(directory);
    }
    is_free(&journal)?;
    let records = if std::fs::metadata(&journal).is_ok_and(|metadata| metadata.len() == 0) {
        Vec::new()
    } else {
        journal::read(&journal)?.records
    };
    if records.is_empty() {
        return refuse_orphans(directory);
    }
    match settings {
        Some(settings) => engine(settings, &records, config).map(|_| ()),
        None => Ok(()),
    }
}

/// The engine that goes on where the records of a run directory end.
///
/// # Errors
/// If they belong to another run, or contradict each other; keys that differ are named.
pub(crate) fn engine(
    settings: Settings,
    records: &[Record],
    config: &ClusterConfig,
) -> Result<Engine, DirectoryError> {
    Engine::new(settings, records, 0).map_err(|error| explain(error, config))
}

/// Names the keys in which a refused configuration differs from that of the run directory.
fn explain(error: ReplayError, config: &ClusterConfig) -> DirectoryError {
    let directory = &config.run.directory;
    let before = std::fs::read_to_string(directory.join("cluster.toml"))
        .ok()
        .and_then(|text| ClusterConfig::from_resolved(&text).ok());
    let keys = before
        .map(|before| recipe::differing_keys(&before, config))
        .unwrap_or_default();
    match (&error, keys.is_empty()) {
        (ReplayError::OtherRun { .. }, false) => DirectoryError::OtherRun {
            directory: directory.clone(),
            keys: keys.join(", "),
        },
        _ => error.into(),
    }
}

/// A run directory without a journal must not hold what only a journal could explain.
///
/// # Errors
/// If it does, or its checkpoints cannot be read.
pub(crate) fn refuse_orphans(directory: &Path) -> Result<(), DirectoryError> {
    let checkpoints = CheckpointFolder::open(directory.join("checkpoints")).list()?;
    let orphan = match checkpoints.first() {
        Some(checkpoint) => Some(checkpoint.path.clone()),
        None => {
            Some(directory.join("samples.bin")).filter(|store| store.metadata().is_ok_and(|m| m.len() > 64))
        }
    };
    match orphan {
        None => Ok(()),
        Some(orphan) => Err(DirectoryError::Orphan {
            orphan,
            journal: directory.join("journal"),
        }),
    }
}

fn can_be_written(directory: &Path) -> Result<(), DirectoryError> {
    if directory.exists() && !directory.is_dir() {
        return Err(DirectoryError::NotAFolder {
            directory: directory.to_owned(),
        });
    }
    let folder = nearest_existing(directory).unwrap_or_else(|| PathBuf::from("/"));
    let allowed = rustix::fs::access(&folder, Access::WRITE_OK | Access::EXEC_OK).is_ok();
    if allowed && folder.is_dir() {
        Ok(())
    } else {
        Err(DirectoryError::ReadOnly { folder })
    }
}

/// Whether no coordinator holds a journal: its lock is asked for and given back at once.
fn is_free(journal: &Path) -> Result<(), DirectoryError> {
    let wrong = |source| {
        DirectoryError::from(JournalError::Io {
            path: journal.to_owned(),
            action: "open",
            source,
        })
    };
    let file = File::open(journal).map_err(wrong)?;
    match file.try_lock_shared() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(JournalError::InUse {
            path: journal.to_owned(),
        }
        .into()),
        Err(TryLockError::Error(source)) => Err(wrong(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Journal;

    fn config(directory: &Path) -> ClusterConfig {
        let mut config = ClusterConfig::default();
        config.run.directory = directory.to_owned();
        config
    }

    fn refusal(directory: &Path) -> String {
        look(&config(directory), None)
            .expect_err("it cannot be used")
            .to_string()
    }

    #[test]
    fn a_directory_that_is_not_there_yet_is_fine_and_stays_away() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let directory = folder.path().join("runs/a");
        look(&config(&directory), None).expect("it can be made");
        assert!(!folder.path().join("runs").exists());
    }

    #[test]
    fn a_file_in_its_place_is_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("run");
        std::fs::write(&file, "").expect("writable");
        assert!(refusal(&file).contains("is no folder"));
        assert!(refusal(&file.join("below")).contains("cannot be written"));
    }

    #[test]
    fn a_journal_in_use_and_a_foreign_one_are_told() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("journal");
        let (journal, _) = Journal::open(&path).expect("a new journal");
        assert!(refusal(folder.path()).contains("in use by another coordinator"));
        drop(journal);
        look(&config(folder.path()), None).expect("nobody uses it any more");
        std::fs::write(&path, "something else").expect("writable");
        assert!(refusal(folder.path()).contains("is no eaglet journal"));
    }

    #[test]
    fn what_only_a_journal_could_explain_is_not_built_upon() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("samples.bin"), [0; 100]).expect("writable");
        assert!(refusal(folder.path()).contains("samples.bin is there, but the journal"));
    }
}
