//! ONCE: a unit is in at most one committed step, and a trained one is never refused afterwards. That the weights hold
//! each committed row exactly once is SAME: their digest is a hash chain over just these rows.

use eaglet_runtime::ids::{Step, Unit};

use super::book::{Book, Standing};
use super::{Checked, broken};

/// A step is about to be committed.
pub fn committed(book: &Book, step: Step) -> Checked {
    if step != book.committed() {
        return broken(
            "ONCE",
            format!("step {step} is committed after step {}", book.committed()),
        );
    }
    for &unit in book.plans.get(step.0 as usize).into_iter().flatten().flatten() {
        if book.standing(unit) != Some(Standing::Open) {
            return broken(
                "ONCE",
                format!(
                    "{unit:?} is committed with step {step} and was {:?} before",
                    book.standing(unit)
                ),
            );
        }
    }
    Ok(())
}

/// A unit is about to be refused.
pub fn quarantined(book: &Book, step: Step, unit: Unit) -> Checked {
    let planned = book
        .plans
        .get(step.0 as usize)
        .is_some_and(|rows| rows.iter().flatten().any(|&other| other == unit));
    if book.standing(unit) != Some(Standing::Open) || !planned {
        return broken(
            "ONCE",
            format!(
                "{unit:?} of step {step} is refused; it was {:?}, planned there: {planned}",
                book.standing(unit)
            ),
        );
    }
    Ok(())
}
