//! Rows, where their hidden states are, and how many of a step are where.
//!
//! COUNTED: every change goes through this file, which keeps what rules ask for with each event beside the rows; it is what a
//! walk over them would find (`audit`).

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use eaglet_runtime::ids::{Generation, RowId, Step};

/// An occupant of a draft seat.
pub(super) type Occupant = (u16, Generation);

/// Where a row's hidden states are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowState {
    /// Nowhere.
    Waiting,
    /// Being computed by a replica of the verifier.
    Leased {
        replica: u16,
        lease: u64,
        destination: Occupant,
    },
    /// All of it is sent to the draft seat.
    Sent {
        replica: u16,
        lease: u64,
        destination: Occupant,
    },
    /// At the draft seat.
    Held { destination: Occupant },
}

impl RowState {
    /// The draft seat that has it, or will have it.
    pub(super) fn destination(self) -> Option<Occupant> {
        match self {
            Self::Waiting => None,
            Self::Leased { destination, .. }
            | Self::Sent { destination, .. }
            | Self::Held { destination } => Some(destination),
        }
    }

    /// Whether it is in the hands of a replica of the verifier.
    pub(super) fn is_with(self, team: u16) -> bool {
        matches!(self, Self::Leased { replica, .. } | Self::Sent { replica, .. } if replica == team)
    }

    /// The lease under which it is computed.
    pub(super) fn lease(self) -> Option<u64> {
        match self {
            Self::Leased { lease, .. } | Self::Sent { lease, .. } => Some(lease),
            Self::Waiting | Self::Held { .. } => None,
        }
    }

    pub(super) fn is_held(self) -> bool {
        matches!(self, Self::Held { .. })
    }

    pub(super) fn is_leased(self) -> bool {
        matches!(self, Self::Leased { .. })
    }
}

/// A row, and since when it is where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) state: RowState,
    pub(super) since_ms: u64,
    /// FENCE: what was extracted for an earlier lease holds samples that are not in the row any more.
    pub(super) valid_from_lease: u64,
}

/// A part of the held-out prompts in the order in which they are given out: the part, and its lane.
pub(super) type Part = (u16, u16);

/// The rows of a step that have units.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct StepRows {
    lanes: BTreeSet<u16>,
    waiting: BTreeSet<u16>,
    held: usize,
}

/// The held-out rows that are evaluated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Parts {
    asked: BTreeSet<Part>,
    waiting: BTreeSet<Part>,
    held: usize,
    /// Of all that ever were.
    leased: usize,
}

/// Keeps a row among those that wait, as long as it does.
fn file<T: Ord>(waiting: &mut BTreeSet<T>, row: T, state: RowState) {
    if state == RowState::Waiting {
        waiting.insert(row);
    } else {
        waiting.remove(&row);
    }
}

/// All rows.
#[derive(Debug, Default)]
pub(super) struct Rows {
    rows: BTreeMap<RowId, Row>,
    /// Of each planned step.
    steps: BTreeMap<Step, StepRows>,
    parts: Parts,
}

impl Rows {
    pub(super) fn get(&self, row: RowId) -> Option<&Row> {
        self.rows.get(&row)
    }

    pub(super) fn state(&self, row: RowId) -> RowState {
        self.rows.get(&row).map_or(RowState::Waiting, |row| row.state)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (RowId, &Row)> {
        self.rows.iter().map(|(&id, row)| (id, row))
    }

    pub(super) fn put(&mut self, id: RowId, row: Row) {
        let before = self.rows.insert(id, row);
        self.count(id, before.map_or(RowState::Waiting, |row| row.state), row.state);
    }

    /// Forgets the rows of steps that are over.
    pub(super) fn forget_before(&mut self, base: Step) {
        while let Some(entry) = self.rows.first_entry()
            && let RowId::Train { step, .. } = *entry.key()
            && step < base
        {
            let (id, row) = entry.remove_entry();
            self.count(id, row.state, RowState::Waiting);
        }
    }

    fn count(&mut self, id: RowId, before: RowState, after: RowState) {
        match id {
            RowId::Train { step, lane } => {
                if let Some(rows) = self.steps.get_mut(&step)
                    && rows.lanes.contains(&lane)
                {
                    file(&mut rows.waiting, lane, after);
                    rows.held -= usize::from(before.is_held());
                    rows.held += usize::from(after.is_held());
                }
            }
            RowId::HeldOut { lane, part } => {
                let parts = &mut self.parts;
                parts.leased -= usize::from(before.is_leased());
                parts.leased += usize::from(after.is_leased());
                if parts.asked.contains(&(part, lane)) {
                    file(&mut parts.waiting, (part, lane), after);
                    parts.held -= usize::from(before.is_held());
                    parts.held += usize::from(after.is_held());
                }
            }
        }
    }

    /// The lanes of a step whose rows have units: a plan was made or changed.
    pub(super) fn plan(&mut self, step: Step, lanes: impl Iterator<Item = u16>) {
        let mut rows = StepRows::default();
        for lane in lanes {
            rows.lanes.insert(lane);
            match self.state(RowId::Train { step, lane }) {
                RowState::Waiting => {
                    rows.waiting.insert(lane);
                }
                state => rows.held += usize::from(state.is_held()),
            }
        }
        self.steps.insert(step, rows);
    }

    /// A step has no plan any more.
    pub(super) fn unplan(&mut self, step: Step) {
        self.steps.remove(&step);
    }

    /// Steps before another one have no plan any more.
    pub(super) fn unplan_before(&mut self, keep: Step) {
        self.steps = self.steps.split_off(&keep);
    }

    /// The held-out rows that are to be evaluated.
    pub(super) fn ask(&mut self, asked: BTreeSet<Part>) {
        let state = |&(part, lane): &Part| self.state(RowId::HeldOut { lane, part });
        let is_waiting = |part: &Part| state(part) == RowState::Waiting;
        self.parts = Parts {
            waiting: asked.iter().copied().filter(is_waiting).collect(),
            held: asked.iter().filter(|part| state(part).is_held()).count(),
            leased: self.parts.leased,
            asked,
        };
    }

    /// A held-out row is not evaluated; whether it was to be until now.
    pub(super) fn refuse(&mut self, lane: u16, part: u16) -> bool {
        let is_held = self.state(RowId::HeldOut { lane, part }).is_held();
        let parts = &mut self.parts;
        let was_asked = parts.asked.remove(&(part, lane));
        parts.waiting.remove(&(part, lane));
        parts.held -= usize::from(was_asked && is_held);
        was_asked
    }

    /// The lanes of a step whose rows have units.
    pub(super) fn lanes(&self, step: Step) -> impl Iterator<Item = u16> {
        self.steps
            .get(&step)
            .into_iter()
            .flat_map(|rows| rows.lanes.iter().copied())
    }

    /// Whether there is something to train in some steps.
    pub(super) fn has_units(&self, mut steps: Range<u64>) -> bool {
        steps.any(|step| self.lanes(Step(step)).next().is_some())
    }

    /// The first lane of a step, of a number or above, whose row waits for a verifier.
    pub(super) fn next_waiting(&self, step: Step, from: u16) -> Option<u16> {
        self.steps.get(&step)?.waiting.range(from..).next().copied()
    }

    /// Whether all rows of a step lie where they are computed.
    pub(super) fn all_held(&self, step: Step) -> bool {
        self.steps
            .get(&step)
            .is_none_or(|rows| rows.held == rows.lanes.len())
    }

    /// Parts of the held-out prompts in the order in which they are given out.
    pub(super) fn parts(&self) -> impl Iterator<Item = Part> {
        self.parts.asked.iter().copied()
    }

    /// Whether there is a part of the held-out prompts.
    pub(super) fn has_parts(&self) -> bool {
        !self.parts.asked.is_empty()
    }

    /// Whether each part of the held-out prompts is answered.
    pub(super) fn all_parts_held(&self) -> bool {
        self.parts.held == self.parts.asked.len()
    }

    /// The first part of the held-out prompts, that one or after it, that waits for a verifier.
    pub(super) fn next_waiting_part(&self, from: Part) -> Option<Part> {
        self.parts.waiting.range(from..).next().copied()
    }

    /// All that is counted, to be compared.
    pub(super) fn counts(&self) -> impl PartialEq + std::fmt::Debug {
        (&self.steps, &self.parts)
    }

    /// Parts of the held-out prompts that verifiers work on.
    pub(super) fn parts_in_work(&self) -> usize {
        self.parts.leased
    }
}
