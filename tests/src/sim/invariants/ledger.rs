//! LEDGER: `intake = pending + leased + extracted + trained + quarantined`, and what the journal says of intake, training
//! and refusal is what the engine says.

use eaglet_actors::engine::LedgerCounts;

use super::book::Book;
use super::{Checked, broken};

/// The counts add up.
pub fn adds_up(counts: LedgerCounts) -> Checked {
    if counts.adds_up() {
        Ok(())
    } else {
        broken("LEDGER", format!("{counts:?} does not add up"))
    }
}

/// The counts are those of the journal, once all records of an event are appended.
pub fn agrees(counts: LedgerCounts, book: &Book) -> Checked {
    let ours = (counts.intake, counts.trained, counts.quarantined);
    let journal = (book.intake(), book.trained(), book.quarantined());
    if ours == journal {
        Ok(())
    } else {
        broken(
            "LEDGER",
            format!("(intake, trained, quarantined) is {ours:?}, and {journal:?} in the journal"),
        )
    }
}
