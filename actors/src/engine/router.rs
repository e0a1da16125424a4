//! Which row goes to which verifier, and where its hidden states lie.

use eaglet_runtime::control::{CoordinatorCommand, HeldOutRequest};
use eaglet_runtime::ids::{Generation, Role, RowId, Seat, Step, Unit};

use super::ledger::UnitState;
use super::seats::Status;
use super::{Command, Engine, Phase};
use crate::journal::Record;

/// Rows a verifier may hold at once: one in work, one behind it so that it never waits for the coordinator.
const LEASES_PER_VERIFIER: usize = 2;

/// The end of a process is known well before this.
const BROKEN_LINK_PATIENCE_MS: u64 = 300;

/// Where a row's hidden states are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowState {
    /// Nowhere.
    Waiting,
    /// Being computed.
    Leased {
        verifier: u16,
        generation: Generation,
        destination: Generation,
    },
    /// Sent to the draft seat.
    Sent {
        verifier: u16,
        generation: Generation,
        destination: Generation,
    },
    /// At the draft seat.
    Held { destination: Generation },
}

impl Engine {
    /// The step that the draft replicas are at, or will be at once they have loaded.
    pub(super) fn base_step(&self) -> Step {
        self.draft_seats()
            .filter_map(|seat| self.seats.get(seat).state.map(|(step, _)| step))
            .max()
            .or_else(|| self.latest_checkpoint().map(|checkpoint| checkpoint.step))
            .unwrap_or_default()
    }

    /// Gives rows to verifiers that have room: those of the next step first, then held-out ones, then those ahead.
    pub(super) fn route(&mut self) {
        if !self.prepared || matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let base = self.base_step();
        self.rows
            .retain(|row, _| !matches!(row, RowId::Train { step, .. } if *step < base));
        let mut wanted = Vec::new();
        let last = (base.0 + self.settings.prefetch_steps).min(self.total_steps);
        let stopping = matches!(self.phase, Phase::Closing { .. });
        for step in (base.0..last).map(Step).filter(|_| !stopping) {
            for seat in 0..self.settings.draft_seats {
                if !self.row_units(step, seat).is_empty() {
                    wanted.push(RowId::Train { step, seat });
                }
            }
            if step == base {
                wanted.extend(self.held_out_rows());
            }
        }
        if wanted.is_empty() {
            wanted.extend(self.held_out_rows());
        }
        for row in wanted {
            let state = *self.rows.entry(row).or_insert(RowState::Waiting);
            if state != RowState::Waiting {
                continue;
            }
            let to = Seat::draft(row.seat());
            let draft = self.seats.get(to);
            if !matches!(draft.status, Status::Loading | Status::Ready) {
                continue;
            }
            let destination = draft.member(to);
            let Some(verifier) = self.free_verifier() else {
                return;
            };
            self.lease(row, verifier, destination);
        }
    }

    fn free_verifier(&self) -> Option<Seat> {
        self.seats
            .iter()
            .filter(|(seat, state)| {
                seat.role == Role::Verifier
                    && state.status == Status::Ready
                    && state.leases.len() < LEASES_PER_VERIFIER
                    && self.now_ms < state.last_heard_ms + self.settings.suspect_after_ms
            })
            .min_by_key(|(seat, state)| (state.leases.len(), *seat))
            .map(|(seat, _)| seat)
    }

    fn lease(&mut self, row: RowId, verifier: Seat, destination: eaglet_runtime::control::Member) {
        let generation = self.seats.get(verifier).generation;
        let to = destination.generation;
        self.rows.insert(
            row,
            RowState::Leased {
                verifier: verifier.index,
                generation,
                destination: to,
            },
        );
        self.seats.get_mut(verifier).leases.insert(row);
        match row {
            RowId::Train { step, seat } => {
                self.move_units(step, seat, UnitState::Leased);
                let documents = self
                    .row_units(step, seat)
                    .iter()
                    .filter_map(|&unit| Some((unit, self.samples.get(&unit.sample)?.location)))
                    .collect();
                self.commands.push(Command::Lease {
                    seat: verifier,
                    generation,
                    row,
                    documents,
                    destination,
                });
            }
            RowId::HeldOut { seat } => {
                let request = HeldOutRequest {
                    row,
                    prompts: self.held_out_prompts(seat).cloned().collect(),
                    max_new_tokens: self.settings.max_new_tokens,
                    destination,
                };
                self.send(verifier, CoordinatorCommand::ExtractHeldOut(request));
            }
        }
    }

    /// Moves the units of a row that is not committed yet.
    fn move_units(&mut self, step: Step, seat: u16, to: UnitState) {
        if step < self.committed {
            return; // done again after all replicas were lost: these units are trained for ever
        }
        for unit in self.row_units(step, seat).to_vec() {
            if let Err(error) = self.ledger.advance(unit, to) {
                self.fail(format!(
                    "the ledger does not add up: {error}; this is a defect of eaglet"
                ));
            }
        }
    }

    pub(super) fn row_extracted(
        &mut self,
        verifier: Seat,
        generation: Generation,
        row: RowId,
        destination: Generation,
        tokens: u64,
    ) {
        self.seats.get_mut(verifier).leases.remove(&row);
        self.extracted_tokens += tokens;
        if let Some(state @ RowState::Leased { .. }) = self.rows.get_mut(&row)
            && *state
                == (RowState::Leased {
                    verifier: verifier.index,
                    generation,
                    destination,
                })
        {
            *state = RowState::Sent {
                verifier: verifier.index,
                generation,
                destination,
            };
        }
    }

    pub(super) fn row_received(&mut self, draft: Seat, generation: Generation, row: RowId) {
        let Some(&state) = self.rows.get(&row) else { return };
        if row.seat() != draft.index || matches!(state, RowState::Held { .. }) {
            return;
        }
        self.rows.insert(
            row,
            RowState::Held {
                destination: generation,
            },
        );
        if let RowId::Train { step, seat } = row {
            if state == RowState::Waiting {
                // Its lease was given up after the verifier died, and the hidden states arrived all the same.
                self.move_units(step, seat, UnitState::Leased);
            }
            self.move_units(step, seat, UnitState::Extracted);
        }
    }

    pub(super) fn bad_sample(
        &mut self,
        verifier: Seat,
        _generation: Generation,
        row: RowId,
        unit: Option<Unit>,
        reason: &str,
    ) {
        self.seats.get_mut(verifier).leases.remove(&row);
        let RowId::Train { step, seat } = row else {
            if self.held_out_refused.insert(row.seat()) {
                self.warn(format!("the {row} is not evaluated: {reason}"));
            }
            return;
        };
        if !matches!(self.rows.get(&row), Some(RowState::Leased { .. })) {
            return;
        }
        let Some(unit) = unit else {
            self.fail(format!(
                "{verifier} refused the {row} without naming one of its samples: {reason}"
            ));
            return;
        };
        if !self.row_units(step, seat).contains(&unit) {
            // The answer to an older lease of the row; the sample was taken out of it when another one said so.
            return;
        }
        if step < self.committed {
            self.fail(format!(
                "sample {} was trained before and is refused now: {reason}",
                unit.sample
            ));
            return;
        }
        self.move_units(step, seat, UnitState::Pending);
        self.rows.insert(row, RowState::Waiting);
        self.quarantine(step, unit);
        let place = self
            .samples
            .get(&unit.sample)
            .map(|fact| self.place_of(fact))
            .unwrap_or_default();
        self.warn(format!(
            "quarantined {place} (sample {}, pass {}): {reason}",
            unit.sample, unit.pass
        ));
        self.append(
            Record::Quarantined {
                step,
                unit,
                reason: reason.to_owned(),
            },
            false,
        );
    }

    /// Takes a unit out of its row for good.
    pub(super) fn quarantine(&mut self, step: Step, unit: Unit) {
        for row in self.plans.steps.get_mut(&step).into_iter().flatten() {
            row.retain(|other| *other != unit);
        }
        if let Err(error) = self.ledger.advance(unit, UnitState::Quarantined) {
            self.fail(format!(
                "the ledger does not add up: {error}; this is a defect of eaglet"
            ));
        }
    }

    pub(super) fn link_broken(&mut self, draft: Seat, from: Seat, sender: Generation, reason: &str) {
        if !self.seats.is_current(from, sender) {
            return; // its process is gone, and its rows were given back then
        }
        if from.role == Role::Draft {
            let newcomer = self.seats.get_mut(draft);
            if newcomer.donor == Some((from.index, sender)) {
                // The state did not arrive whole: it is asked for again.
                newcomer.donor = None;
                newcomer.status = Status::Attached;
            }
            // Most often the sender has just died, and its end is on the way: tick waits for it.
            self.broken_link = Some((from, sender, self.now_ms));
            return;
        }
        self.warn(format!(
            "the link from {from} to {draft} broke: {reason}; its rows are extracted again"
        ));
        self.give_back(|row, state| {
            row.seat() == draft.index
                && matches!(state, RowState::Leased { verifier, generation, .. }
                    | RowState::Sent { verifier, generation, .. }
                    if verifier == from.index && generation == sender)
        });
    }

    /// Forms the group again if a link between two replicas broke and both are still alive a while later.
    pub(super) fn mend_group(&mut self) {
        let Some((from, sender, since_ms)) = self.broken_link else {
            return;
        };
        if self.now_ms < since_ms + BROKEN_LINK_PATIENCE_MS {
            return;
        }
        self.broken_link = None;
        if self.seats.is_current(from, sender) {
            self.warn(format!(
                "a link from {from} broke, and {from} lives; the epoch is formed again"
            ));
            self.restart_epoch();
        }
    }

    /// A verifier could not hand a row over. If its receiver lives, the two cannot reach each other, and a new occupant
    /// of the seat gets a new chance.
    pub(super) fn row_not_sent(&mut self, verifier: Seat, row: RowId, destination: Generation, reason: &str) {
        self.seats.get_mut(verifier).leases.remove(&row);
        let draft = Seat::draft(row.seat());
        if self.seats.is_current(draft, destination) {
            self.kill(draft, &format!("{verifier} cannot send it the {row}: {reason}"));
        }
    }

    /// Gives back the rows of a rank that is gone.
    pub(super) fn release_rows(&mut self, seat: Seat, generation: Generation) {
        match seat.role {
            Role::Verifier => self.give_back(|_, state| {
                matches!(state, RowState::Leased { verifier, generation: g, .. }
                    | RowState::Sent { verifier, generation: g, .. }
                    if verifier == seat.index && g == generation)
            }),
            Role::Draft => {
                self.give_back(|row, state| row.seat() == seat.index && state != RowState::Waiting)
            }
        }
    }

    fn give_back(&mut self, mut which: impl FnMut(RowId, RowState) -> bool) {
        let rows: Vec<RowId> = self
            .rows
            .iter()
            .filter(|&(&row, &state)| which(row, state))
            .map(|(&row, _)| row)
            .collect();
        for row in rows {
            self.rows.insert(row, RowState::Waiting);
            if let RowId::Train { step, seat } = row {
                self.move_units(step, seat, UnitState::Pending);
            }
        }
    }

    /// Whether a seat's row needs nothing more before it can be computed.
    pub(super) fn row_is_held(&self, row: RowId) -> bool {
        matches!(self.rows.get(&row), Some(RowState::Held { .. }))
    }

    /// Held-out prompts of a draft seat: dealt round, as many as fit its rows together with their answers.
    fn held_out_prompts(&self, seat: u16) -> impl Iterator<Item = &Vec<u32>> {
        let mut room = self.settings.held_out_rows * self.settings.tokens_per_row as usize;
        self.held_out
            .iter()
            .skip(usize::from(seat))
            .step_by(usize::from(self.settings.draft_seats.max(1)))
            .take_while(move |prompt| {
                let need = prompt.len() + self.settings.max_new_tokens;
                let fits = need <= room;
                room = room.saturating_sub(need);
                fits
            })
    }

    /// The held-out rows of all seats that have prompts.
    pub(super) fn held_out_rows(&self) -> Vec<RowId> {
        (0..self.settings.draft_seats)
            .filter(|seat| !self.held_out_refused.contains(seat))
            .filter(|&seat| self.held_out_prompts(seat).next().is_some())
            .map(|seat| RowId::HeldOut { seat })
            .collect()
    }
}
