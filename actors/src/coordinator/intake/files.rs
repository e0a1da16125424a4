//! One file of conversations and the place up to which it was read; folders in which files appear.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use eaglet_runtime::samples::{Position, Source, SourceError, SourceOptions};

/// What tells whether a file is still as it was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    inode: u64,
    length_bytes: u64,
    modified: (i64, i64),
}

impl Look {
    pub(super) fn at(path: &Path) -> io::Result<Self> {
        std::fs::metadata(path).map(|metadata| Self::of(&metadata))
    }

    fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            length_bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// Samples of a file that were taken: all of the lines before a line, and so many of that line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// The line, from 1; 0 before the first sample.
    pub(super) line: u64,
    /// Samples of that line.
    pub(super) samples: u32,
}

impl Taken {
    /// Whether the `index`-th sample of a line is among them.
    pub(super) fn holds(self, line: u64, index: u32) -> bool {
        line < self.line || (line == self.line && index < self.samples)
    }
}

/// A file that the run reads.
#[derive(Debug)]
pub(super) struct KnownFile {
    pub(super) path: PathBuf,
    /// Whether it is named in `samples.files`.
    pub(super) is_configured: bool,
    /// Whether it has to be read to its end once (more).
    pub(super) is_due: bool,
    /// What was taken of it, in this launch and before.
    pub(super) taken: Taken,
    /// Place behind the last row that was read in this launch.
    pub(super) position: Option<Position>,
    /// Whether it came in this launch and was not read yet.
    pub(super) is_new: bool,
    /// How it looked before it was read the last time.
    look: Option<Look>,
    /// Which file it was when it was opened the last time.
    inode: Option<u64>,
    /// What was said about it last, so that it is not said again.
    pub(super) complaint: Option<String>,
}

impl KnownFile {
    pub(super) fn new(path: PathBuf, is_configured: bool, taken: Taken) -> Self {
        Self {
            path,
            is_configured,
            is_due: true,
            taken,
            position: None,
            is_new: false,
            look: None,
            inode: None,
            complaint: None,
        }
    }

    /// Whether it has changed since it was read. A file that is gone has.
    pub(super) fn has_changed(&self) -> bool {
        self.look.is_none() || Look::at(&self.path).ok() != self.look
    }

    /// Opens it where the last reader of this launch stood, or at its start, and tells which samples of what comes are
    /// taken already. If the file was replaced, or mended in what was read, the place is found again by its line.
    ///
    /// # Errors
    /// If it cannot be read, or holds less than what was read from it.
    pub(super) fn open(&mut self, options: SourceOptions) -> Result<(Source, Taken), SourceError> {
        let look = Look::at(&self.path).ok();
        self.look = look;
        let inode = look.map(|look| look.inode).or(self.inode);
        let is_replaced = self.inode.is_some() && inode != self.inode;
        self.inode = inode;
        let Some(position) = self.position else {
            return Ok((Source::open(&self.path, options)?, self.taken));
        };
        if !is_replaced && self.ends_row_at(position.offset_bytes) {
            match Source::resume(&self.path, position, options) {
                Err(SourceError::Shrunk { .. }) => {}
                Err(error) => return Err(error),
                Ok(source) => return Ok((source, Taken::default())),
            }
        }
        let mut source = Source::open(&self.path, options)?;
        source.pass_over(position.lines + 1)?;
        if source.position().lines < position.lines {
            return Err(SourceError::Shrunk {
                path: self.path.clone(),
                length_bytes: look.map_or(0, |look| look.length_bytes),
                offset_bytes: position.offset_bytes,
            });
        }
        Ok((source, self.taken))
    }

    /// Whether a row can end before an offset.
    fn ends_row_at(&self, offset_bytes: u64) -> bool {
        let Some(before) = offset_bytes.checked_sub(1) else {
            return true;
        };
        let may_be_array = self
            .path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        let mut byte = [0];
        // What cannot be read now is told by whoever opens it next.
        File::open(&self.path).is_ok_and(|file| {
            let is_there = file.read_exact_at(&mut byte, before).is_ok();
            // A last row without its newline is followed by nothing.
            let is_end = || {
                file.metadata()
                    .is_ok_and(|metadata| metadata.len() == offset_bytes)
            };
            is_there && (byte == *b"\n" || (may_be_array && matches!(byte, [b',' | b'[' | b']'])) || is_end())
        })
    }
}

/// Conversations that lie in a folder, sorted by name: no subfolders, and nothing whose name begins with a dot.
///
/// # Errors
/// If the folder cannot be read.
pub(crate) fn files_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_hidden = path
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        let holds_chats = extension.is_some_and(|extension| extension == "jsonl" || extension == "json");
        if holds_chats && !is_hidden && path.is_file() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Whether nobody has written to a file for some time. A file whose age is unknown counts as finished.
pub(super) fn has_rested(path: &Path, time: Duration) -> bool {
    let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified());
    modified.map_or(true, |modified| {
        SystemTime::now()
            .duration_since(modified)
            .map_or(true, |age| age >= time)
    })
}
