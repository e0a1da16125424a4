//! What outlives a coordinator: the journal, the checkpoints, the sample store.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use eaglet_actors::journal::{Journal, Record};
use eaglet_runtime::ids::Step;
use eaglet_runtime::samples::Location;

use super::dice::Dice;
use super::weights::Weights;

/// One crash in so many goes through a real file.
const REAL_FILE_ONE_IN: u32 = 50;

/// Which part of the records behind the last synced one survives a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// The dice say.
    Any,
    /// So many of them.
    Records(usize),
}

/// The disk of a run directory.
#[derive(Debug)]
pub struct Disk {
    records: Vec<Record>,
    synced: usize,
    /// Records that commit a step, and those of them that are synced.
    commits: (u64, u64),
    checkpoints: BTreeMap<Step, Weights>,
    keep: usize,
    /// What lies in the sample store: where, and which content.
    store: Vec<(Location, u32)>,
}

impl Disk {
    /// An empty run directory that keeps so many checkpoints.
    pub fn new(keep: usize) -> Self {
        Self {
            records: Vec::new(),
            synced: 0,
            commits: (0, 0),
            checkpoints: BTreeMap::new(),
            // A command to write one that comes late or twice knows of an older record.
            keep: keep.max(2),
            store: Vec::new(),
        }
    }

    /// The journal.
    pub fn records(&self) -> &[Record] {
        &self.records
    }

    /// Records that may still be lost.
    pub fn unsynced(&self) -> usize {
        self.records.len() - self.synced
    }

    /// Appends a record.
    pub fn append(&mut self, record: Record, sync: bool) {
        self.commits.0 += u64::from(matches!(record, Record::Committed { .. }));
        self.records.push(record);
        if sync {
            self.sync();
        }
    }

    /// All that was appended is safe.
    pub fn sync(&mut self) {
        self.synced = self.records.len();
        self.commits.1 = self.commits.0;
    }

    /// Steps whose record is safe.
    pub fn steps_synced(&self) -> u64 {
        self.commits.1
    }

    /// The machine goes down: what was not synced may be gone, from any byte on. Returns whether that went through a
    /// real file.
    ///
    /// # Errors
    /// If the journal's own code reads anything but the records that were whole.
    pub fn crash(&mut self, dice: &mut Dice, keep: Keep) -> Result<bool, String> {
        let unsynced = self.unsynced();
        let real = keep == Keep::Any && unsynced > 0 && dice.one_in(REAL_FILE_ONE_IN);
        let kept = match keep {
            Keep::Any if real => self.read_back(dice)?,
            Keep::Any => dice.place(unsynced + 1),
            Keep::Records(count) => count.min(unsynced),
        };
        self.records.truncate(self.synced + kept);
        let commits = |record: &&Record| matches!(record, Record::Committed { .. });
        self.commits.0 = self.records.iter().filter(commits).count() as u64;
        self.sync();
        Ok(real)
    }

    /// The process ends without the machine: all that was written is there.
    pub fn close(&mut self) {
        self.sync();
    }

    /// Writes the journal to a real file, tears its tail at some byte, and reads it back; how many of the records behind
    /// the synced ones are left.
    fn read_back(&self, dice: &mut Dice) -> Result<usize, String> {
        let told = |error: &dyn std::fmt::Display| error.to_string();
        let folder = tempfile::tempdir().map_err(|e| told(&e))?;
        let path = folder.path().join("journal");
        let (mut journal, _) = Journal::open(&path).map_err(|e| told(&e))?;
        let length = || {
            std::fs::metadata(&path)
                .map(|meta| meta.len())
                .map_err(|e| told(&e))
        };
        let mut ends = Vec::new();
        let mut safe = length()?;
        for (index, record) in self.records.iter().enumerate() {
            journal.append(record, false).map_err(|e| told(&e))?;
            if index + 1 == self.synced {
                safe = length()?;
            } else if index >= self.synced {
                ends.push(length()?);
            }
        }
        drop(journal);
        let whole = length()?;
        let cut = match dice.below(4) {
            0 => ends[dice.place(ends.len())],
            _ => dice.between(safe, whole),
        };
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(&path)
            .map_err(|e| told(&e))?;
        file.set_len(cut).map_err(|e| told(&e))?;
        let is_boundary = cut == safe || ends.contains(&cut);
        if is_boundary && dice.one_in(2) {
            // Blocks behind the last record that never reached the disk read as zeros.
            file.set_len(cut + dice.below(64)).map_err(|e| told(&e))?;
        }
        drop(file);
        let (_, replay) = Journal::open(&path).map_err(|e| told(&e))?;
        let expected = self.synced + ends.iter().filter(|&&end| end <= cut).count();
        // A record whose lost bytes were zeros anyway is whole.
        let count = replay.records.len();
        if count < expected || replay.records[..] != self.records[..count] {
            return Err(format!(
                "cut at byte {cut} of {whole}, the journal holds {count} records instead of {expected}"
            ));
        }
        Ok(count - self.synced)
    }

    /// Stores a sample.
    pub fn store(&mut self, content: u32) -> Location {
        let offset = self
            .store
            .last()
            .map_or(64, |(last, _)| last.offset + u64::from(last.len));
        let location = Location {
            offset,
            len: 4 + content % 7,
        };
        self.store.push((location, content));
        location
    }

    /// What lies at a place of the store.
    pub fn stored(&self, location: Location) -> Option<u32> {
        let found = self
            .store
            .binary_search_by_key(&location.offset, |(place, _)| place.offset);
        let (place, content) = self.store[found.ok()?];
        (place == location).then_some(content)
    }

    /// Cuts the store behind the last sample that the journal knows.
    pub fn cut_store(&mut self) {
        let end_of = |location: &Location| location.offset + u64::from(location.len);
        let end = self
            .records
            .iter()
            .filter_map(|record| match record {
                Record::Accepted { location, .. } => Some(end_of(location)),
                Record::Retried { stored, .. } => stored.as_ref().map(|stored| end_of(&stored.location)),
                _ => None,
            })
            .max()
            .unwrap_or(0);
        self.store.retain(|(location, _)| end_of(location) <= end);
    }

    /// Writes a checkpoint, and removes old ones but the one that is recorded in the journal; its folder.
    pub fn save(&mut self, weights: Weights, recorded: Option<Step>) -> PathBuf {
        self.checkpoints.insert(weights.step, weights);
        let surplus = self.checkpoints.len().saturating_sub(self.keep.max(1));
        let oldest: Vec<Step> = self.checkpoints.keys().copied().take(surplus).collect();
        for step in oldest {
            // `latest` points to the one just written, and that one stays.
            if step != weights.step && Some(step) != recorded {
                self.checkpoints.remove(&step);
            }
        }
        PathBuf::from(weights.step.to_string())
    }

    /// Reads a checkpoint, if it is there.
    pub fn load(&self, folder: &Path) -> Option<Weights> {
        let step = folder.to_str()?.parse().ok()?;
        self.checkpoints.get(&Step(step)).copied()
    }

    /// Whether there are checkpoints.
    pub fn has_checkpoints(&self) -> bool {
        !self.checkpoints.is_empty()
    }

    /// Removes a checkpoint, most often the newest.
    pub fn lose_checkpoint(&mut self, dice: &mut Dice) {
        let steps: Vec<Step> = self.checkpoints.keys().copied().collect();
        let lost = match steps.last() {
            Some(&newest) if dice.one_in(2) => newest,
            Some(_) => steps[dice.place(steps.len())],
            None => return,
        };
        self.checkpoints.remove(&lost);
    }
}
