//! `manifest.json`: length and digest of each file of a checkpoint, written last.
//!
//! A plain `model.safetensors` cannot tell that its weights have changed; with the manifest every file can be checked, also
//! by hand: the digests are those that `xxh128sum` prints. Files that somebody adds later are not looked at.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::CheckpointError;

/// File with the lengths and digests of the others.
pub const MANIFEST_FILE: &str = "manifest.json";

#[derive(Serialize, Deserialize)]
struct Manifest {
    written_by: String,
    files: BTreeMap<String, Entry>,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct Entry {
    bytes: u64,
    xxh3_128: String,
}

impl Entry {
    fn of(file: &mut File) -> std::io::Result<Self> {
        let mut hasher = Xxh3::new();
        let mut buffer = vec![0; 1 << 20];
        let mut bytes = 0;
        loop {
            let count = file.read(&mut buffer)?;
            if count == 0 {
                return Ok(Self {
                    bytes,
                    xxh3_128: format!("{:032x}", hasher.digest128()),
                });
            }
            hasher.update(&buffer[..count]);
            bytes += count as u64;
        }
    }
}

/// Syncs all files of a folder, writes their manifest, and syncs the folder.
///
/// # Errors
/// A file cannot be read or synced; the folder is empty, cannot be written, or holds something else than files.
pub(super) fn seal(folder: &Path) -> Result<(), CheckpointError> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).map_err(|cause| CheckpointError::read(folder, cause))? {
        let path = entry
            .map_err(|cause| CheckpointError::read(folder, cause))?
            .path();
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|name| *name != MANIFEST_FILE && path.is_file()) else {
            return Err(CheckpointError::Foreign {
                path,
                problem: "is no plain file of a checkpoint".to_owned(),
            });
        };
        let mut file = File::open(&path).map_err(|cause| CheckpointError::read(&path, cause))?;
        file.sync_all()
            .map_err(|cause| CheckpointError::write(&path, cause))?;
        let entry = Entry::of(&mut file).map_err(|cause| CheckpointError::read(&path, cause))?;
        files.insert(name.to_owned(), entry);
    }
    if files.is_empty() {
        let problem = "holds no file; a checkpoint is never empty".to_owned();
        return Err(CheckpointError::Foreign {
            path: folder.into(),
            problem,
        });
    }
    let manifest = Manifest {
        written_by: concat!("eaglet ", env!("CARGO_PKG_VERSION")).to_owned(),
        files,
    };
    let path = folder.join(MANIFEST_FILE);
    let failed = |cause| CheckpointError::write(&path, cause);
    let text = serde_json::to_string_pretty(&manifest).map_err(|error| failed(error.into()))?;
    let mut file = File::create(&path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)?;
    file.sync_all().map_err(failed)?;
    sync_folder(folder)
}

/// Reads every file of a checkpoint and compares it with the manifest.
///
/// # Errors
/// The manifest is missing or unreadable, or a file is missing, shorter, longer or altered.
pub fn verify(folder: &Path) -> Result<(), CheckpointError> {
    let path = folder.join(MANIFEST_FILE);
    let text = fs::read(&path).map_err(|cause| CheckpointError::read(&path, cause))?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| CheckpointError::damaged(&path, format!("it is not readable: {error}")))?;
    for (name, expected) in &manifest.files {
        // A name is one component: a manifest must not send us elsewhere.
        let path = folder.join(Path::new(name).file_name().unwrap_or_default());
        let mut file = File::open(&path).map_err(|cause| CheckpointError::read(&path, cause))?;
        let length = file
            .metadata()
            .map_err(|cause| CheckpointError::read(&path, cause))?
            .len();
        if length != expected.bytes {
            let problem = format!(
                "it has {length} bytes where {MANIFEST_FILE} says {}",
                expected.bytes
            );
            return Err(CheckpointError::damaged(&path, problem));
        }
        let found = Entry::of(&mut file).map_err(|cause| CheckpointError::read(&path, cause))?;
        if found != *expected {
            let problem = format!("its digest is not the one in {MANIFEST_FILE}");
            return Err(CheckpointError::damaged(&path, problem));
        }
    }
    Ok(())
}

/// Makes the entries of a folder durable.
pub(super) fn sync_folder(folder: &Path) -> Result<(), CheckpointError> {
    let sync = || File::open(folder)?.sync_all();
    sync().map_err(|cause| CheckpointError::write(folder, cause))
}
