//! Folders of files that can be made again at any time: compiled kernels, packed weights.
//!
//! A file says inside what it was made from, and has a digest of its contents, so that what is torn or foreign is refused
//! and made again. It is written under another name first, so a reader sees all of one or nothing.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Ends the names of files that are being written.
pub(crate) const PARTIAL: &str = "partial";

/// The folder that a variable names, or `eaglet/<below>` in the user's cache folder; none if the user has none.
pub(crate) fn folder(variable: &str, below: &str) -> Option<PathBuf> {
    let named = |variable: &str| std::env::var_os(variable).filter(|path| !path.is_empty());
    let own = |root| Path::new(&root).join("eaglet").join(below);
    named(variable)
        .map(PathBuf::from)
        .or_else(|| named("XDG_CACHE_HOME").map(own))
        .or_else(|| named("HOME").map(|home| own(Path::new(&home).join(".cache").into())))
}

/// Why a file is not taken.
pub(crate) fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.to_owned())
}

/// Writes a file under another name, syncs it and renames it in; it is open for reading then. Nothing is left of one that
/// cannot be written.
pub(crate) fn write_beside(file: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<File> {
    let folder = file.parent().ok_or_else(|| refused("no folder"))?;
    std::fs::create_dir_all(folder)?;
    let partial = file.with_extension(format!("{}.{PARTIAL}", std::process::id()));
    let mut options = OpenOptions::new();
    let opened = options
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(&partial);
    let written = opened.and_then(|mut out| {
        write(&mut out)?;
        out.sync_all()?;
        std::fs::rename(&partial, file)?;
        Ok(out)
    });
    if written.is_err() {
        // Nothing more can be done about what is left of it.
        let _ = std::fs::remove_file(&partial);
    }
    written
}
