//! ORDER: the rows of a step are the first units that no step has, in the order (pass, sample), each in the first lane with
//! room, up to the first that fits nowhere. So they depend on the journal's records and on nothing else. A step of which every
//! sample was refused is planned again by the same rule, or takes over the last plan if no unit is left.

use eaglet_runtime::ids::{Step, Unit};

use super::book::Book;
use super::{Checked, broken};

/// A step is about to be planned.
pub fn planned(book: &Book, step: Step, rows: &[Vec<Unit>]) -> Checked {
    let known = book.plans.get(step.0 as usize);
    let again = known.is_some_and(|rows| step >= book.committed() && rows.iter().all(Vec::is_empty));
    if again && book.unplanned.is_empty() {
        // The samples of the last step that is planned move here.
        let last = book.plans.last().filter(|_| step.0 + 1 < book.plans.len() as u64);
        return match last {
            Some(last) if last == rows => Ok(()),
            _ => broken(
                "ORDER",
                format!("step {step} is planned again as {rows:?} instead of {last:?}"),
            ),
        };
    }
    if step.0 != book.plans.len() as u64 && !again {
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
