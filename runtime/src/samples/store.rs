//! Tokenised samples on disk, so that a restart does not tokenise again and memory does not grow with the dataset.
//!
//! One append-only file. It knows nothing about which of its records count: the journal does, and keeps each record's
//! [`Location`] and the file's length. What lies beyond that length is a torn tail and is cut by [`SampleStore::open_at`].
//!
//! Layout, little-endian: the 8 bytes of [`MAGIC`], then records. A record is `u32` bytes of its body, `u32` crc32c of the
//! body, body. A body is `u32` tokens n, n times `u32` token id, and the loss mask as ⌈n/8⌉ bytes, lowest bit first, unused
//! bits zero.
//!
//! Invariants: a record is never changed; reading allocates no more than the record's length, which is checked against the
//! file first; a record that was not written whole, or rotted, is an error with its offset and never a sample.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::row::Sample;

/// First bytes of the file; the last one is the version of the layout.
const MAGIC: [u8; 8] = *b"eagletS1";
const HEADER_BYTES: usize = 8;

/// Where a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    /// Bytes before it.
    pub offset: u64,
    /// Its bytes.
    pub len: u32,
}

/// Why samples cannot be stored or read back.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The operating system refused.
    #[error("cannot {action} {} at byte {offset}: {source}; check space and permissions of the run directory", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// Why.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{} does not begin as a sample store of this version; move it away or name another run directory", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
    },
    /// The file ends before what the journal knows.
    #[error(
        "{} has {found_bytes} bytes, but the journal knows of {known_bytes}: samples are lost; \
         restore the file or start a new run directory",
        path.display()
    )]
    Short {
        /// The file.
        path: PathBuf,
        /// Its length.
        found_bytes: u64,
        /// The length it should have.
        known_bytes: u64,
    },
    /// A record is not what was written.
    #[error("{}: the record at byte {offset} is corrupt: {detail}; restore the file or start a new run directory", path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Where.
        offset: u64,
        /// What is wrong.
        detail: String,
    },
    /// The sample itself cannot be stored.
    #[error("a sample with {tokens} tokens and {mask} mask entries cannot be stored: {detail}")]
    Sample {
        /// Its tokens.
        tokens: usize,
        /// Entries of its mask.
        mask: usize,
        /// Why.
        detail: &'static str,
    },
}

/// The file of tokenised samples of a run.
#[derive(Debug)]
pub struct SampleStore {
    file: File,
    path: PathBuf,
    end: u64,
    /// Reused between appends.
    record: Vec<u8>,
}

impl SampleStore {
    /// Opens or creates the file; nothing is cut off.
    ///
    /// # Errors
    /// If it cannot be opened or is no sample store.
    pub fn open(path: &Path) -> Result<Self, StoreError> {
        let io_error = |action, source| StoreError::Io {
            action,
            path: path.to_owned(),
            offset: 0,
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(|source| io_error("open", source))?;
        let length = file.metadata().map_err(|source| io_error("open", source))?.len();
        let mut start = [0; HEADER_BYTES];
        let known = (length as usize).min(HEADER_BYTES);
        file.read_exact_at(&mut start[..known], 0)
            .map_err(|source| io_error("read", source))?;
        if start[..known] != MAGIC[..known] {
            return Err(StoreError::Foreign {
                path: path.to_owned(),
            });
        }
        if known < HEADER_BYTES {
            // New, or torn while it was new: the header holds nothing that could be lost.
            file.write_all_at(&MAGIC, 0)
                .map_err(|source| io_error("write", source))?;
            file.sync_all().map_err(|source| io_error("sync", source))?;
            sync_folder_of(path).map_err(|source| io_error("sync the folder of", source))?;
        }
        let end = length.max(HEADER_BYTES as u64);
        Ok(Self {
            file,
            path: path.to_owned(),
            end,
            record: Vec::new(),
        })
    }

    /// Opens a file that somebody else may be writing to, only to read what it holds now.
    ///
    /// # Errors
    /// If it cannot be opened or is no sample store.
    pub fn view(path: &Path) -> Result<Self, StoreError> {
        let io_error = |action, source| StoreError::Io {
            action,
            path: path.to_owned(),
            offset: 0,
            source,
        };
        let file = File::open(path).map_err(|source| io_error("open", source))?;
        let end = file.metadata().map_err(|source| io_error("open", source))?.len();
        let mut start = [0; HEADER_BYTES];
        let known = (end as usize).min(HEADER_BYTES);
        file.read_exact_at(&mut start[..known], 0)
            .map_err(|source| io_error("read", source))?;
        if start[..known] != MAGIC[..known] {
            return Err(StoreError::Foreign {
                path: path.to_owned(),
            });
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            end,
            record: Vec::new(),
        })
    }

    /// Opens the file and cuts it to `known_bytes`, the [`len`](Self::len) that the journal knows; 0 for a new run.
    ///
    /// # Errors
    /// As [`Self::open`], or if the file is shorter than that.
    pub fn open_at(path: &Path, known_bytes: u64) -> Result<Self, StoreError> {
        let mut store = Self::open(path)?;
        let known_bytes = known_bytes.max(HEADER_BYTES as u64);
        if store.end < known_bytes {
            return Err(StoreError::Short {
                path: store.path,
                found_bytes: store.end,
                known_bytes,
            });
        }
        if store.end > known_bytes {
            store
                .file
                .set_len(known_bytes)
                .map_err(|source| store.io_error("cut", known_bytes, source))?;
            store.end = known_bytes;
            store.sync()?;
        }
        Ok(store)
    }

    /// Bytes of the file up to the last record appended.
    #[allow(clippy::len_without_is_empty)] // A store always has its header.
    pub fn len(&self) -> u64 {
        self.end
    }

    /// Appends a sample. It survives a crash of the machine only after [`Self::sync`].
    ///
    /// # Errors
    /// If the disk refuses, in which case the next append takes the same place; or if the sample's mask has another length
    /// or holds anything but 0 and 1.
    pub fn append(&mut self, sample: &Sample) -> Result<Location, StoreError> {
        self.encode(sample)?;
        let location = Location {
            offset: self.end,
            len: self.record.len() as u32,
        };
        self.file
            .write_all_at(&self.record, self.end)
            .map_err(|source| self.io_error("write", self.end, source))?;
        self.end += self.record.len() as u64;
        Ok(location)
    }

    /// Reads a sample back.
    ///
    /// # Errors
    /// If the location is not within the file, or the record there is not the one that was written.
    pub fn read(&self, location: Location) -> Result<Sample, StoreError> {
        let corrupt = |detail: String| StoreError::Corrupt {
            path: self.path.clone(),
            offset: location.offset,
            detail,
        };
        let end = location.offset.checked_add(u64::from(location.len));
        if location.offset < HEADER_BYTES as u64 || end.is_none_or(|end| end > self.end) {
            return Err(corrupt(format!(
                "{} bytes there reach beyond the file's {}",
                location.len, self.end
            )));
        }
        let mut record = vec![0; location.len as usize];
        self.file
            .read_exact_at(&mut record, location.offset)
            .map_err(|source| self.io_error("read", location.offset, source))?;
        decode(&record).map_err(corrupt)
    }

    /// Makes everything appended durable.
    ///
    /// # Errors
    /// If the disk refuses.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.file
            .sync_data()
            .map_err(|source| self.io_error("sync", self.end, source))
    }

    fn io_error(&self, action: &'static str, offset: u64, source: io::Error) -> StoreError {
        StoreError::Io {
            action,
            path: self.path.clone(),
            offset,
            source,
        }
    }

    /// Writes the whole record of a sample into `self.record`.
    fn encode(&mut self, sample: &Sample) -> Result<(), StoreError> {
        let (tokens, mask) = (sample.tokens.len(), sample.loss_mask.len());
        let refuse = |detail| Err(StoreError::Sample { tokens, mask, detail });
        if tokens != mask {
            return refuse("the two must agree");
        }
        if sample.loss_mask.iter().any(|&bit| bit > 1) {
            return refuse("the mask must hold nothing but 0 and 1");
        }
        let body_bytes = 4 + tokens * 4 + tokens.div_ceil(8);
        if body_bytes > u32::MAX as usize - 8 {
            return refuse("it is too long");
        }
        self.record.clear();
        self.record.extend_from_slice(&(body_bytes as u32).to_le_bytes());
        self.record.extend_from_slice(&[0; 4]);
        self.record.extend_from_slice(&(tokens as u32).to_le_bytes());
        for token in &sample.tokens {
            self.record.extend_from_slice(&token.to_le_bytes());
        }
        for bits in sample.loss_mask.chunks(8) {
            self.record.push(
                (0..)
                    .zip(bits)
                    .fold(0, |byte, (place, &bit)| byte | (bit << place)),
            );
        }
        let checksum = crc32c::crc32c(&self.record[8..]);
        self.record[4..8].copy_from_slice(&checksum.to_le_bytes());
        Ok(())
    }
}

/// A new file is only there after a crash if its folder was synced.
fn sync_folder_of(path: &Path) -> io::Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()
}

fn decode(record: &[u8]) -> Result<Sample, String> {
    let torn = || "it is too short".to_owned();
    let (body_bytes, rest) = split_u32(record).ok_or_else(torn)?;
    let (checksum, body) = split_u32(rest).ok_or_else(torn)?;
    if body.len() != body_bytes as usize {
        return Err(format!("it has {} bytes instead of {body_bytes}", body.len()));
    }
    if crc32c::crc32c(body) != checksum {
        return Err("its checksum does not match".to_owned());
    }
    let (count, rest) = split_u32(body).ok_or_else(torn)?;
    let count = count as usize;
    if rest.len() != count * 4 + count.div_ceil(8) {
        return Err(format!("its {} bytes do not hold {count} tokens", rest.len()));
    }
    let (ids, bits) = rest.split_at(count * 4);
    let tokens = ids
        .chunks_exact(4)
        .map(|id| u32::from_le_bytes([id[0], id[1], id[2], id[3]]))
        .collect();
    let loss_mask = (0..count)
        .map(|index| bits[index / 8] >> (index % 8) & 1)
        .collect();
    Ok(Sample { tokens, loss_mask })
}

fn split_u32(bytes: &[u8]) -> Option<(u32, &[u8])> {
    let (first, rest) = bytes.split_first_chunk()?;
    Some((u32::from_le_bytes(*first), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn sample(length: u32) -> Sample {
        Sample {
            tokens: (0..length).map(|index| index * 7919).collect(),
            loss_mask: (0..length).map(|index| u8::from(index % 3 == 1)).collect(),
        }
    }

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("temporary folder")
    }

    #[test]
    fn samples_come_back_also_after_reopening() {
        let folder = folder();
        let path = folder.path().join("samples.bin");
        let mut store = SampleStore::open(&path).expect("creates");
        let lengths = [1, 7, 8, 9, 0, 1000];
        let places: Vec<_> = lengths
            .map(|n| store.append(&sample(n)).expect("appends"))
            .to_vec();
        store.sync().expect("syncs");
        let reopened = SampleStore::open(&path).expect("opens");
        let viewed = SampleStore::view(&path).expect("opens");
        assert_eq!((reopened.len(), viewed.len()), (store.len(), store.len()));
        for (place, length) in places.iter().zip(lengths) {
            assert_eq!(store.read(*place).expect("reads"), sample(length));
            assert_eq!(reopened.read(*place).expect("reads"), sample(length));
            assert_eq!(viewed.read(*place).expect("reads"), sample(length));
        }
        assert_eq!(std::fs::metadata(&path).expect("exists").len(), store.len());
    }

    #[test]
    fn a_torn_tail_is_cut_to_what_the_journal_knows() {
        let folder = folder();
        let path = folder.path().join("samples.bin");
        let mut store = SampleStore::open_at(&path, 0).expect("creates");
        let first = store.append(&sample(20)).expect("appends");
        let known = store.len();
        let whole = store.append(&sample(30)).expect("appends");
        let bytes = std::fs::read(&path).expect("readable");
        for torn in [known as usize, known as usize + 3, bytes.len() - 1, bytes.len()] {
            std::fs::write(&path, &bytes[..torn]).expect("writable");
            let mut store = SampleStore::open_at(&path, known).expect("opens");
            assert_eq!(store.len(), known);
            assert_eq!(store.read(first).expect("reads"), sample(20));
            assert!(matches!(store.read(whole), Err(StoreError::Corrupt { .. })));
            assert_eq!(store.append(&sample(30)).expect("appends"), whole);
            assert_eq!(std::fs::read(&path).expect("readable"), bytes);
        }
        std::fs::write(&path, &bytes[..known as usize - 1]).expect("writable");
        assert!(matches!(
            SampleStore::open_at(&path, known),
            Err(StoreError::Short { .. })
        ));
        // A run that has not stored anything may find a header torn in its first write.
        std::fs::write(&path, &bytes[..5]).expect("writable");
        assert_eq!(SampleStore::open_at(&path, 0).expect("opens").len(), 8);
    }

    #[test]
    fn another_file_is_refused_and_left_alone() {
        let folder = folder();
        let path = folder.path().join("samples.bin");
        for text in ["precious text of somebody", "pre"] {
            std::fs::write(&path, text).expect("writable");
            let error = SampleStore::open_at(&path, 0).expect_err("foreign");
            assert!(matches!(error, StoreError::Foreign { .. }));
            assert_eq!(std::fs::read_to_string(&path).expect("readable"), text);
        }
        let error = SampleStore::open(folder.path())
            .expect_err("a folder")
            .to_string();
        assert!(error.starts_with("cannot open "), "{error}");
    }

    #[test]
    fn a_bad_sample_or_place_is_refused() {
        let folder = folder();
        let mut store = SampleStore::open(&folder.path().join("samples.bin")).expect("creates");
        let place = store.append(&sample(4)).expect("appends");
        assert!(
            store
                .append(&Sample {
                    tokens: vec![1],
                    loss_mask: vec![]
                })
                .is_err()
        );
        assert!(
            store
                .append(&Sample {
                    tokens: vec![1],
                    loss_mask: vec![2]
                })
                .is_err()
        );
        for wrong in [
            Location { offset: 0, len: 8 },
            Location {
                offset: place.offset,
                len: u32::MAX,
            },
            Location {
                offset: u64::MAX,
                len: place.len,
            },
            Location {
                offset: place.offset,
                len: place.len - 1,
            },
            Location {
                offset: place.offset,
                len: 3,
            },
            Location {
                offset: place.offset + 1,
                len: place.len - 1,
            },
        ] {
            let error = store.read(wrong).expect_err("wrong place");
            assert!(matches!(error, StoreError::Corrupt { .. }), "{error}");
        }
        assert_eq!(store.read(place).expect("reads"), sample(4));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_flipped_bit_goes_unnoticed(length in 0_u32..40, byte in 0_usize..1000, bit in 0_u32..8) {
            let folder = folder();
            let path = folder.path().join("samples.bin");
            let mut store = SampleStore::open(&path).expect("creates");
            let place = store.append(&sample(length)).expect("appends");
            let mut bytes = std::fs::read(&path).expect("readable");
            let at = place.offset as usize + byte % place.len as usize;
            bytes[at] ^= 1 << bit;
            std::fs::write(&path, &bytes).expect("writable");
            let error = store.read(place).expect_err("flipped").to_string();
            prop_assert!(error.contains("the record at byte 8 is corrupt"), "{}", error);
        }
    }
}
