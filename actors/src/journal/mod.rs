//! The journal: everything a run must remember, in the order in which it became true.
//!
//! JOURNAL-1: a record is whole or it is not there: each carries its length and a crc32c, and a torn tail is cut when
//! the journal is opened. JOURNAL-2: a corrupt record in the middle is refused with its offset, never skipped.
//! JOURNAL-3: what was appended with `sync` is on disk before `append` returns.

mod book;
mod file;
mod record;

pub use book::{KnownSample, SampleBook, UnitStanding};
pub use file::{Journal, JournalError, Replay, read};
pub use record::{Record, SampleSource};
