//! Where every unit (one pass over one sample) stands.
//!
//! LEDGER: `intake = pending + leased + extracted + trained + quarantined`, after every event.
//! ONCE: a unit becomes trained at most once, and leaves that state never.

use std::collections::BTreeMap;

use eaglet_runtime::ids::Unit;
use serde::{Deserialize, Serialize};

/// Where a unit stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitState {
    /// Waits to be given to a verifier.
    Pending,
    /// Given to a verifier.
    Leased,
    /// Its hidden states lie at a draft replica.
    Extracted,
    /// Part of a committed step.
    Trained,
    /// Refused, with a reason in the journal, until somebody asks for another try.
    Quarantined,
}

/// How many units stand where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerCounts {
    /// All units that were ever taken in.
    pub intake: u64,
    /// Waiting.
    pub pending: u64,
    /// At a verifier.
    pub leased: u64,
    /// At a draft replica.
    pub extracted: u64,
    /// Committed.
    pub trained: u64,
    /// Refused.
    pub quarantined: u64,
}

impl LedgerCounts {
    /// LEDGER.
    pub fn adds_up(&self) -> bool {
        self.intake == self.pending + self.leased + self.extracted + self.trained + self.quarantined
    }

    fn of(&mut self, state: UnitState) -> &mut u64 {
        match state {
            UnitState::Pending => &mut self.pending,
            UnitState::Leased => &mut self.leased,
            UnitState::Extracted => &mut self.extracted,
            UnitState::Trained => &mut self.trained,
            UnitState::Quarantined => &mut self.quarantined,
        }
    }
}

/// A transition that the ledger refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sample {} in pass {} cannot become {to:?}: it is {from:?}", unit.sample, unit.pass)]
pub struct LedgerError {
    /// The unit.
    pub unit: Unit,
    /// Where it stands; `None` if it is unknown.
    pub from: Option<UnitState>,
    /// Where it should have gone.
    pub to: UnitState,
}

/// The ledger of all units.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    states: BTreeMap<Unit, UnitState>,
    counts: LedgerCounts,
}

impl Ledger {
    /// Takes a unit in, as pending or as quarantined from the start.
    ///
    /// # Errors
    /// If the unit is known already.
    pub fn take_in(&mut self, unit: Unit, state: UnitState) -> Result<(), LedgerError> {
        if let Some(&from) = self.states.get(&unit) {
            return Err(LedgerError {
                unit,
                from: Some(from),
                to: state,
            });
        }
        self.states.insert(unit, state);
        self.counts.intake += 1;
        *self.counts.of(state) += 1;
        Ok(())
    }

    /// Moves a unit; trained ones stay where they are for ever, quarantined ones until [`Self::readmit`].
    ///
    /// # Errors
    /// If the unit is unknown or stands where no way leads to `to`.
    pub fn advance(&mut self, unit: Unit, to: UnitState) -> Result<(), LedgerError> {
        use UnitState::{Extracted, Leased, Pending, Quarantined, Trained};
        let from = self.states.get(&unit).copied();
        let allowed = match (from, to) {
            (Some(Pending), Leased | Quarantined)
            | (Some(Leased), Pending | Extracted | Quarantined)
            | (Some(Extracted), Pending | Trained | Quarantined) => true,
            (Some(from), to) => from == to && from != Trained,
            (None, _) => false,
        };
        let Some(from) = from.filter(|_| allowed) else {
            return Err(LedgerError { unit, from, to });
        };
        self.states.insert(unit, to);
        *self.counts.of(from) -= 1;
        *self.counts.of(to) += 1;
        Ok(())
    }

    /// Restores from the journal that a unit was trained.
    ///
    /// # Errors
    /// If the unit is unknown, quarantined, or was trained before (ONCE).
    pub fn restore_trained(&mut self, unit: Unit) -> Result<(), LedgerError> {
        for state in [UnitState::Leased, UnitState::Extracted, UnitState::Trained] {
            self.advance(unit, state)?;
        }
        Ok(())
    }

    /// Makes a quarantined unit pending again, on request.
    ///
    /// # Errors
    /// If the unit is not quarantined.
    pub fn readmit(&mut self, unit: Unit) -> Result<(), LedgerError> {
        match self.states.get_mut(&unit) {
            Some(state @ UnitState::Quarantined) => {
                *state = UnitState::Pending;
                self.counts.quarantined -= 1;
                self.counts.pending += 1;
                Ok(())
            }
            other => Err(LedgerError {
                unit,
                from: other.copied(),
                to: UnitState::Pending,
            }),
        }
    }

    /// Where a unit stands.
    pub fn state(&self, unit: Unit) -> Option<UnitState> {
        self.states.get(&unit).copied()
    }

    /// How many units stand where.
    pub fn counts(&self) -> LedgerCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use eaglet_runtime::ids::SampleSeq;
    use proptest::prelude::*;

    fn unit(sample: u64) -> Unit {
        Unit {
            pass: 0,
            sample: SampleSeq(sample),
        }
    }

    #[test]
    fn once_a_trained_unit_never_moves_again() {
        let mut ledger = Ledger::default();
        ledger.take_in(unit(1), UnitState::Pending).expect("new");
        ledger.restore_trained(unit(1)).expect("pending");
        for to in [
            UnitState::Pending,
            UnitState::Leased,
            UnitState::Extracted,
            UnitState::Trained,
        ] {
            assert!(ledger.advance(unit(1), to).is_err(), "{to:?}");
        }
        assert!(ledger.restore_trained(unit(1)).is_err());
        assert!(ledger.take_in(unit(1), UnitState::Pending).is_err());
    }

    proptest! {
        #[test]
        fn ledger_adds_up_whatever_is_tried(moves in prop::collection::vec((0_u64..6, 0_u8..6), 0..200)) {
            use UnitState::{Extracted, Leased, Pending, Quarantined, Trained};
            let mut ledger = Ledger::default();
            let mut trained = std::collections::BTreeSet::new();
            for (sample, action) in moves {
                let unit = unit(sample);
                let to = [Pending, Leased, Extracted, Trained, Quarantined][usize::from(action.min(4))];
                if action == 5 {
                    let _ = ledger.take_in(unit, Pending);
                } else if ledger.advance(unit, to).is_ok() && to == Trained {
                    prop_assert!(trained.insert(unit), "trained twice");
                }
                prop_assert!(ledger.counts().adds_up());
            }
            prop_assert_eq!(ledger.counts().trained, trained.len() as u64);
        }
    }
}
