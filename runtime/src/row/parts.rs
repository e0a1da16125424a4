//! The hidden states of a row that come in parts: each stage of a verifier captures its own layers.
//!
//! Invariants:
//! - PARTS-1: a row is put together of parts of one extraction only, and only when every state is there once.

use super::{HiddenRow, HiddenStates, PackedRow};

/// A part that does not go with the others.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// It holds the states of other tokens.
    #[error("states {first} to {last} belong to other tokens than the states before them")]
    Content {
        /// Its first state.
        first: usize,
        /// Its last state.
        last: usize,
    },
    /// It is cut otherwise.
    #[error("states {first} to {last} overlap with others, or are of another width or element type")]
    Cut {
        /// Its first state.
        first: usize,
        /// Its last state.
        last: usize,
    },
}

/// Parts of one row, of one extraction.
#[derive(Clone, Debug)]
pub struct RowParts {
    content: PackedRow,
    /// By their first state, ascending.
    parts: Vec<(usize, HiddenStates)>,
}

impl RowParts {
    /// A row of which nothing has come yet.
    pub fn new(content: PackedRow) -> Self {
        Self {
            content,
            parts: Vec::new(),
        }
    }

    /// Takes the states from `first` on in; one that is here already is dropped.
    ///
    /// # Errors
    /// If it does not go with what is here, which then stays as it was.
    pub fn add(&mut self, content: &PackedRow, first: usize, hidden: HiddenStates) -> Result<(), PartError> {
        let end = first + hidden.states;
        let last = end.saturating_sub(1);
        if *content != self.content || hidden.states > 0 && hidden.tokens() != content.len() {
            return Err(PartError::Content { first, last });
        }
        if hidden.states == 0 {
            return Ok(());
        }
        let place = self.parts.partition_point(|(start, _)| *start < first);
        if let Some((start, known)) = self.parts.get(place)
            && (*start, known.states, known.hidden, known.dtype)
                == (first, hidden.states, hidden.hidden, hidden.dtype)
        {
            return Ok(());
        }
        let before = place.checked_sub(1).map(|place| &self.parts[place]);
        let overlaps = before.is_some_and(|(start, part)| start + part.states > first)
            || self.parts.get(place).is_some_and(|(start, _)| *start < end);
        let differs = self
            .parts
            .first()
            .is_some_and(|(_, part)| (part.hidden, part.dtype) != (hidden.hidden, hidden.dtype));
        if overlaps || differs {
            return Err(PartError::Cut { first, last });
        }
        self.parts.insert(place, (first, hidden));
        Ok(())
    }

    /// Whether all of `states` are here.
    pub fn is_whole(&self, states: usize) -> bool {
        // They do not overlap.
        self.parts.iter().map(|(_, part)| part.states).sum::<usize>() == states
            && self
                .parts
                .last()
                .is_some_and(|(start, part)| start + part.states == states)
    }

    /// The row with all of its `states`, or the parts again if some are missing.
    ///
    /// # Errors
    /// If states are missing.
    pub fn join(mut self, states: usize) -> Result<HiddenRow, Self> {
        if !self.is_whole(states) {
            return Err(self);
        }
        if self.parts.len() == 1
            && let Some((_, hidden)) = self.parts.pop()
        {
            return Ok(HiddenRow {
                row: self.content,
                hidden,
            });
        }
        let (dtype, width) = self
            .parts
            .first()
            .map(|(_, part)| (part.dtype, part.hidden))
            .unwrap_or((crate::contract::HiddenDtype::F32, 0));
        let mut bytes = Vec::with_capacity(self.parts.iter().map(|(_, part)| part.bytes.len()).sum());
        for token in 0..self.content.len() {
            for (_, part) in &self.parts {
                let stride = part.states * width * dtype.bytes();
                bytes.extend_from_slice(&part.bytes[token * stride..(token + 1) * stride]);
            }
        }
        Ok(HiddenRow {
            row: self.content,
            hidden: HiddenStates {
                dtype,
                states,
                hidden: width,
                bytes: bytes.into(),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::HiddenDtype;
    use crate::row::Sample;

    const STATES: usize = 4;

    fn content(tokens: usize) -> PackedRow {
        let mut row = PackedRow::default();
        row.push(&Sample {
            tokens: (0..tokens as u32).collect(),
            loss_mask: vec![1; tokens],
        });
        row
    }

    fn states(tokens: usize, range: std::ops::Range<usize>) -> HiddenStates {
        let mut hidden = HiddenStates::zeros(HiddenDtype::Bf16, tokens, range.len(), 2);
        for token in 0..tokens {
            for state in range.clone() {
                hidden.set(token, state - range.start, &[token as f32, state as f32]);
            }
        }
        hidden.share()
    }

    /// PARTS-1, in every order, each of them twice.
    #[test]
    fn parts_make_a_row_in_every_order() {
        let whole = HiddenRow {
            row: content(3),
            hidden: states(3, 0..STATES),
        };
        #[allow(clippy::single_range_in_vec_init, reason = "the whole is a cut into one part")]
        let cuts: [&[std::ops::Range<usize>]; 3] = [&[0..1, 1..3, 3..4], &[0..4], &[0..3, 3..4]];
        for cut in cuts {
            for first in 0..cut.len() {
                let mut parts = RowParts::new(content(3));
                for turn in 0..2 * cut.len() {
                    let range = cut[(first + turn) % cut.len()].clone();
                    assert_eq!(parts.is_whole(STATES), turn >= cut.len());
                    let part = states(3, range.clone());
                    assert_eq!(parts.add(&content(3), range.start, part), Ok(()));
                }
                assert_eq!(parts.join(STATES).expect("all are here"), whole);
            }
        }
    }

    #[test]
    fn what_does_not_go_together_is_refused_and_changes_nothing() {
        let mut parts = RowParts::new(content(3));
        assert_eq!(parts.add(&content(3), 1, states(3, 1..3)), Ok(()));
        // A stage that captures nothing.
        assert_eq!(parts.add(&content(3), 2, states(3, 2..2)), Ok(()));
        let refused = |parts: &mut RowParts, content: &PackedRow, first, hidden| {
            parts.add(content, first, hidden).expect_err("it does not fit")
        };
        for (first, end) in [(0, 2), (0, 4), (2, 3), (2, 4), (1, 2)] {
            assert_eq!(
                refused(&mut parts, &content(3), first, states(3, first..end)),
                PartError::Cut { first, last: end - 1 }
            );
        }
        assert_eq!(
            refused(&mut parts, &content(4), 3, states(4, 3..4)),
            PartError::Content { first: 3, last: 3 }
        );
        let wide = HiddenStates::zeros(HiddenDtype::Bf16, 3, 1, 5).share();
        assert_eq!(
            refused(&mut parts, &content(3), 3, wide),
            PartError::Cut { first: 3, last: 3 }
        );
        let Err(mut parts) = parts.join(STATES) else {
            panic!("states are missing")
        };
        for (first, end) in [(3, 4), (0, 1)] {
            assert!(!parts.is_whole(STATES));
            assert_eq!(parts.add(&content(3), first, states(3, first..end)), Ok(()));
        }
        assert!(parts.join(STATES).is_ok());
    }
}
