//! JOURNAL: no step is applied before the record that commits it is on disk; no row is extracted before its plan is in the
//! journal, and from no other place of the store than the journal names.

use eaglet_runtime::ids::{RowId, Step, Unit};
use eaglet_runtime::samples::Location;

use super::book::Book;
use super::{Checked, broken};
use crate::sim::disk::Disk;

/// A commit is about to go out.
pub fn commit(disk: &Disk, step: Step) -> Checked {
    if step.0 < disk.steps_synced() {
        return Ok(());
    }
    broken(
        "JOURNAL",
        format!("step {step} is applied before its record is on disk"),
    )
}

/// A row is about to be read from the store.
pub fn lease(book: &Book, disk: &Disk, row: RowId, documents: &[(Unit, Location)]) -> Checked {
    let RowId::Train { step, lane } = row else {
        return Ok(());
    };
    let planned = book
        .plans
        .get(step.0 as usize)
        .and_then(|rows| rows.get(usize::from(lane)));
    if !planned.is_some_and(|units| units.iter().eq(documents.iter().map(|(unit, _)| unit))) {
        return broken(
            "JOURNAL",
            format!("the {row} is extracted as {documents:?}, and planned as {planned:?}"),
        );
    }
    for (unit, location) in documents {
        let fact = book.facts[unit.sample.0 as usize];
        if disk.stored(*location) != Some(fact.content) {
            return broken(
                "JOURNAL",
                format!(
                    "{unit:?} is read at {location:?}, where {:?} lies",
                    disk.stored(*location)
                ),
            );
        }
    }
    Ok(())
}
