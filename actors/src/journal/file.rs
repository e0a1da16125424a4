//! The journal's file: `EAGLETJ2`, then records of `length u32 | crc32c u32 | bincode`, all little-endian.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use eaglet_runtime::wire;

use super::Record;

const MAGIC: &[u8; 8] = b"EAGLETJ2";
const HEADER_BYTES: u64 = 8;

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read or written.
    #[error("{path}: cannot {action} the journal: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{path} is no eaglet journal; give run.directory another folder")]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// A record in the middle is damaged.
    #[error(
        "{path}: the record at byte {offset} is corrupt and others follow it ({what}); restore the file from a copy, or start a new run directory"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// A record cannot be encoded.
    #[error("{path}: {source}")]
    Encode {
        /// The file.
        path: PathBuf,
        /// Why.
        source: wire::WireError,
    },
    /// Another coordinator is using the run directory.
    #[error(
        "{path} is in use by another coordinator; end that run first, or give run.directory another folder"
    )]
    InUse {
        /// The file.
        path: PathBuf,
    },
}

/// What a journal held when it was opened.
#[derive(Debug, Default)]
pub struct Replay {
    /// All whole records, in order.
    pub records: Vec<Record>,
    /// Bytes of a torn tail that were cut, or passed over.
    pub cut_bytes: u64,
}

/// An open journal. The file is locked while it lives.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: PathBuf,
}

impl Journal {
    /// Opens or creates a journal, cuts a torn tail and reads the rest.
    ///
    /// # Errors
    /// If the file is locked, foreign, unreadable, or corrupt before its tail.
    pub fn open(path: &Path) -> Result<(Self, Replay), JournalError> {
        let wrong = |action| {
            move |source| JournalError::Io {
                path: path.to_owned(),
                action,
                source,
            }
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(wrong("open"))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => {
                return Err(JournalError::InUse {
                    path: path.to_owned(),
                });
            }
            Err(std::fs::TryLockError::Error(source)) => return Err(wrong("lock")(source)),
        }
        let size = file.metadata().map_err(wrong("inspect"))?.len();
        let mut start = [0; MAGIC.len()];
        let known = size.min(HEADER_BYTES) as usize;
        file.read_exact(&mut start[..known]).map_err(wrong("read"))?;
        if start[..known] != MAGIC[..known] {
            return Err(JournalError::Foreign {
                path: path.to_owned(),
            });
        }
        if size < HEADER_BYTES {
            file.set_len(0).map_err(wrong("cut"))?;
            file.seek(SeekFrom::Start(0)).map_err(wrong("seek in"))?;
            file.write_all(MAGIC).map_err(wrong("write"))?;
            file.sync_all().map_err(wrong("sync"))?;
            let parent = path
                .parent()
                .filter(|p| !p.as_os_str().is_empty())
                .unwrap_or(Path::new("."));
            File::open(parent)
                .and_then(|folder| folder.sync_all())
                .map_err(wrong("sync the folder of"))?;
            return Ok((
                Self {
                    file,
                    path: path.to_owned(),
                },
                Replay::default(),
            ));
        }
        let (records, length) = read_records(path, &file, size)?;
        let cut_bytes = size - length;
        if cut_bytes > 0 {
            file.set_len(length).map_err(wrong("cut"))?;
            file.sync_all().map_err(wrong("sync"))?;
        }
        file.seek(SeekFrom::Start(length)).map_err(wrong("seek in"))?;
        Ok((
            Self {
                file,
                path: path.to_owned(),
            },
            Replay { records, cut_bytes },
        ))
    }

    /// Appends a record, and with `sync` waits until it is on disk. After an error the journal must not be used again.
    ///
    /// # Errors
    /// If the disk is full or fails.
    pub fn append(&mut self, record: &Record, sync: bool) -> Result<(), JournalError> {
        let body = wire::encode(record).map_err(|source| JournalError::Encode {
            path: self.path.clone(),
            source,
        })?;
        let mut frame = Vec::with_capacity(body.len() + 8);
        frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
        frame.extend_from_slice(&crc32c::crc32c(&body).to_le_bytes());
        frame.extend_from_slice(&body);
        self.file
            .write_all(&frame)
            .map_err(|source| self.wrong("write", source))?;
        if sync {
            self.sync()?;
        }
        Ok(())
    }

    /// Waits until all that was appended is on disk.
    ///
    /// # Errors
    /// If the disk fails.
    pub fn sync(&mut self) -> Result<(), JournalError> {
        self.file.sync_data().map_err(|source| self.wrong("sync", source))
    }

    fn wrong(&self, action: &'static str, source: io::Error) -> JournalError {
        JournalError::Io {
            path: self.path.clone(),
            action,
            source,
        }
    }
}

/// Reads a journal that a coordinator may be writing to: without its lock, and passing over a torn tail.
///
/// # Errors
/// If the file is missing, foreign, unreadable, or corrupt before its tail.
pub fn read(path: &Path) -> Result<Replay, JournalError> {
    let wrong = |action| {
        move |source| JournalError::Io {
            path: path.to_owned(),
            action,
            source,
        }
    };
    let mut file = File::open(path).map_err(wrong("open"))?;
    let size = file.metadata().map_err(wrong("inspect"))?.len();
    let mut start = [0; MAGIC.len()];
    let known = size.min(HEADER_BYTES) as usize;
    file.read_exact(&mut start[..known]).map_err(wrong("read"))?;
    if start[..known] != MAGIC[..known] {
        return Err(JournalError::Foreign {
            path: path.to_owned(),
        });
    }
    if size < HEADER_BYTES {
        return Ok(Replay::default());
    }
    let (records, length) = read_records(path, &file, size)?;
    Ok(Replay {
        records,
        cut_bytes: size - length,
    })
}

/// All whole records and the offset behind the last of them.
fn read_records(path: &Path, file: &File, size: u64) -> Result<(Vec<Record>, u64), JournalError> {
    let wrong = |source| JournalError::Io {
        path: path.to_owned(),
        action: "read",
        source,
    };
    let mut reader = BufReader::with_capacity(1 << 20, file);
    let mut records = Vec::new();
    let mut offset = HEADER_BYTES;
    let mut body = Vec::new();
    while size - offset >= 8 {
        let mut head = [0; 8];
        reader.read_exact(&mut head).map_err(wrong)?;
        let [a, b, c, d, e, f, g, h] = head;
        let length = u64::from(u32::from_le_bytes([a, b, c, d]));
        let checksum = u32::from_le_bytes([e, f, g, h]);
        let end = offset + 8 + length;
        if end > size {
            break; // torn: the last record was being written
        }
        body.resize(length as usize, 0);
        reader.read_exact(&mut body).map_err(wrong)?;
        let fault = if crc32c::crc32c(&body) != checksum {
            Some("its checksum differs".to_owned())
        } else {
            match wire::decode(&body) {
                Ok(record) => {
                    records.push(record);
                    None
                }
                Err(error) => Some(error.to_string()),
            }
        };
        match fault {
            None => offset = end,
            // The very last record may hold blocks that never reached the disk, and so may what follows the last one.
            Some(_) if end == size || is_zero_from(file, offset, size).map_err(wrong)? => break,
            Some(what) => {
                return Err(JournalError::Corrupt {
                    path: path.to_owned(),
                    offset,
                    what,
                });
            }
        }
    }
    Ok((records, offset))
}

/// Whether a file holds nothing but zeros from an offset on.
fn is_zero_from(file: &File, mut offset: u64, size: u64) -> io::Result<bool> {
    let mut block = [0; 4096];
    while offset < size {
        let length = block.len().min((size - offset) as usize);
        file.read_exact_at(&mut block[..length], offset)?;
        if block[..length].iter().any(|&byte| byte != 0) {
            return Ok(false);
        }
        offset += length as u64;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_runtime::ids::{SampleSeq, Step, Unit};

    fn record(step: u64) -> Record {
        let rows = vec![vec![Unit {
            pass: 0,
            sample: SampleSeq(step),
        }]];
        Record::Planned {
            step: Step(step),
            rows,
        }
    }

    fn written(path: &Path, count: u64) {
        let (mut journal, _) = Journal::open(path).expect("new journal");
        for step in 0..count {
            journal.append(&record(step), step % 2 == 0).expect("append");
        }
    }

    #[test]
    fn journal_1_a_torn_tail_is_cut_at_every_length() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        written(&path, 3);
        let whole = std::fs::read(&path).expect("readable");
        for end in 0..whole.len() {
            std::fs::write(&path, &whole[..end]).expect("writable");
            let (mut journal, replay) = Journal::open(&path).expect("a torn tail is no error");
            let kept = replay.records.len() as u64;
            assert!(kept < 3);
            assert_eq!(
                replay.records,
                (0..kept).map(record).collect::<Vec<_>>(),
                "cut at {end}"
            );
            journal.append(&record(kept), true).expect("append");
            drop(journal);
            let (_, replay) = Journal::open(&path).expect("whole again");
            assert_eq!(replay.records.len() as u64, kept + 1);
            assert_eq!(replay.cut_bytes, 0);
        }
    }

    #[test]
    fn journal_1_zeros_behind_the_last_record_are_a_torn_tail() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        written(&path, 3);
        let whole = std::fs::read(&path).expect("readable");
        let mut longer = whole.clone();
        longer.resize(whole.len() + 9000, 0);
        std::fs::write(&path, &longer).expect("writable");
        let (_, replay) = Journal::open(&path).expect("zeros at the end are no error");
        assert_eq!((replay.records.len(), replay.cut_bytes), (3, 9000));
        assert_eq!(std::fs::read(&path).expect("readable"), whole);
    }

    #[test]
    fn journal_2_a_corrupt_middle_is_refused_with_its_offset() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        written(&path, 3);
        let mut bytes = std::fs::read(&path).expect("readable");
        bytes[18] ^= 1;
        std::fs::write(&path, &bytes).expect("writable");
        match Journal::open(&path) {
            Err(JournalError::Corrupt { offset: 8, .. }) => {}
            other => panic!("expected a corrupt record at byte 8, got {other:?}"),
        }
    }

    #[test]
    fn a_second_coordinator_is_refused() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        let first = Journal::open(&path).expect("new journal");
        assert!(matches!(Journal::open(&path), Err(JournalError::InUse { .. })));
        drop(first);
        assert!(Journal::open(&path).is_ok());
    }

    #[test]
    fn a_reader_needs_no_lock_and_leaves_a_torn_tail_alone() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        assert!(matches!(read(&path), Err(JournalError::Io { .. })));
        written(&path, 2);
        let (mut journal, _) = Journal::open(&path).expect("whole");
        assert_eq!(read(&path).expect("live").records, [record(0), record(1)]);
        journal.append(&record(2), false).expect("append");
        let whole = std::fs::read(&path).expect("readable");
        for end in 0..=whole.len() {
            std::fs::write(&path, &whole[..end]).expect("writable");
            let seen = read(&path).expect("a torn tail is no error").records;
            let expected: Vec<Record> = (0..seen.len() as u64).map(record).collect();
            assert_eq!(seen, expected, "cut at {end}");
            assert_eq!(std::fs::metadata(&path).expect("there").len(), end as u64);
        }
    }

    #[test]
    fn a_foreign_file_is_refused_and_left_alone() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("journal");
        std::fs::write(&path, b"something else").expect("writable");
        assert!(matches!(Journal::open(&path), Err(JournalError::Foreign { .. })));
        assert_eq!(std::fs::read(&path).expect("readable"), b"something else");
    }
}
