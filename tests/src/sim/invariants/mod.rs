//! What must hold whatever happens. Each invariant has a file, and its name stands in every report of a violation.
//!
//! They are checked against [`book::Book`], which reads the journal's records on its own, and never against what the
//! engine believes.

pub mod book;
pub mod bound;
pub mod counted;
pub mod fence;
pub mod journal;
pub mod lanes;
pub mod ledger;
pub mod liveness;
pub mod members;
pub mod once;
pub mod order;
pub mod same;
pub mod team;

use eaglet_actors::engine::Settings;
use eaglet_actors::journal::Record;
use eaglet_runtime::control::CoordinatorCommand;
use eaglet_runtime::ids::{Generation, Seat};

use self::book::Book;
use self::fence::Fence;
use self::liveness::Liveness;
use self::team::Teams;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Its name.
    pub invariant: &'static str,
    /// What was seen.
    pub what: String,
}

/// Whether an invariant holds.
pub type Checked = Result<(), Broken>;

/// A broken invariant.
pub fn broken(invariant: &'static str, what: impl Into<String>) -> Checked {
    Err(Broken {
        invariant,
        what: what.into(),
    })
}

/// What is remembered to check all invariants.
pub struct Checks {
    /// The journal, read independently.
    pub book: Book,
    /// Of the present launch.
    pub fence: Fence,
    /// Of the present launch.
    pub team: Teams,
    /// Reasons for which a run may fail.
    pub liveness: Liveness,
}

impl Checks {
    /// Before anything has happened.
    pub fn new(settings: &Settings) -> Self {
        Self {
            book: Book::new(settings),
            fence: Fence::default(),
            team: Teams::new(settings.shards()),
            liveness: Liveness::default(),
        }
    }

    /// A record was appended.
    pub fn appended(&mut self, record: &Record) -> Checked {
        match record {
            Record::Planned { step, rows } => order::planned(&self.book, *step, rows)?,
            Record::Quarantined { step, unit, .. } => once::quarantined(&self.book, *step, *unit)?,
            Record::Committed { step, .. } => {
                once::committed(&self.book, *step)?;
                same::committed(&self.book, record)?;
                fence::committed(&self.fence, record)?;
            }
            Record::Checkpointed { step, state, .. } => {
                same::holds(&self.book, *step, *state, "a checkpoint")?
            }
            _ => {}
        }
        self.book.read(record)
    }

    /// A command is about to go out to a rank.
    pub fn told(&mut self, seat: Seat, generation: Generation, command: &CoordinatorCommand) -> Checked {
        self.fence.told(&self.book, seat, generation, command)?;
        self.team.told(&self.book, seat, generation, command)
    }

    /// The coordinator crashed; the journal was cut to these records.
    pub fn cut(&mut self, settings: &Settings, records: &[Record]) -> Checked {
        let before = (self.book.committed(), self.book.launches);
        let mut book = Book::new(settings);
        for record in records {
            book.read(record)?;
        }
        if (book.committed(), book.launches) != before {
            return broken(
                "JOURNAL",
                format!(
                    "a crash took synced records back: {:?} became {:?}",
                    before,
                    (book.committed(), book.launches)
                ),
            );
        }
        self.book = book;
        Ok(())
    }

    /// A launch begins.
    pub fn launched(&mut self) {
        self.book.refill_seats();
        self.fence = Fence::default();
        self.team = Teams::new(self.book.shards);
        self.liveness.launched();
    }
}
