//! ORDER: the rows of a step are the first units that no step has, in the order (pass, sample), each in the first lane with
//! room, up to the first that fits nowhere. So they depend on the journal's records and on nothing else.

use eaglet_runtime::ids::{Step, Unit};

use super::book::Book;
use super::{Checked, broken};

/// A step is about to be planned.
pub fn planned(book: &Book, step: Step, rows: &[Vec<Unit>]) -> Checked {
    if step.0 != book.plans.len() as u64 {
        return broken(
            "ORDER",
            format!("step {step} is planned after {}", book.plans.len()),
        );
    }
    let expected = rows_of(
        book.unplanned
            .iter()
            .map(|&unit| (unit, book.facts[unit.sample.0 as usize].tokens)),
        book.lanes,
        book.tokens_per_row,
    );
    if rows != expected || expected.iter().all(Vec::is_empty) {
        return broken(
            "ORDER",
            format!("step {step} is planned as {rows:?} instead of {expected:?}"),
        );
    }
    Ok(())
}

/// The rows of the next step.
pub fn rows_of(units: impl Iterator<Item = (Unit, u32)>, lanes: u16, tokens_per_row: u32) -> Vec<Vec<Unit>> {
    let mut rows = vec![Vec::new(); usize::from(lanes)];
    let mut used = vec![0; usize::from(lanes)];
    for (unit, tokens) in units {
        match (0..rows.len()).find(|&lane| used[lane] + tokens <= tokens_per_row) {
            Some(lane) => {
                used[lane] += tokens;
                rows[lane].push(unit);
            }
            None => break,
        }
    }
    rows
}
