//! SAME: whoever reaches a step holds the same weights there, and they are the hash chain over the committed rows: each
//! row once, in order, with the learning rate of its record.

use eaglet_actors::journal::Record;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::Step;

use super::book::Book;
use super::{Checked, broken};
use crate::sim::weights::Weights;

/// Somebody says that it has the digest of a step's weights.
pub fn holds(book: &Book, step: Step, digest: Digest, who: &str) -> Checked {
    match book.chain.get(step.0 as usize) {
        Some(weights) if weights.digest() == digest => Ok(()),
        Some(weights) => broken(
            "SAME",
            format!(
                "{who} holds {digest} at step {step} instead of {}",
                weights.digest()
            ),
        ),
        None => broken(
            "SAME",
            format!(
                "{who} is at step {step}, and {} steps are committed",
                book.committed()
            ),
        ),
    }
}

/// A replica holds weights.
pub fn weights(book: &Book, weights: Weights, who: impl FnOnce() -> String) -> Checked {
    if book.chain.get(weights.step.0 as usize) == Some(&weights) {
        return Ok(());
    }
    holds(book, weights.step, weights.digest(), &who())
}

/// The digests of a record that commits a step.
pub fn committed(book: &Book, record: &Record) -> Checked {
    let Record::Committed {
        step,
        gradient,
        state,
        ..
    } = record
    else {
        return Ok(());
    };
    holds(book, *step, *state, "the record that commits it")?;
    let expected = book.gradient(*step).map(|gradient| Digest::of_f32(&gradient));
    if expected != Some(*gradient) {
        return broken(
            "SAME",
            format!("step {step} is committed with the gradient {gradient} instead of {expected:?}"),
        );
    }
    Ok(())
}
