//! Which row goes to which verifier, and where its hidden states lie.

use eaglet_runtime::control::{CoordinatorCommand, HeldOutRequest};
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat, Step, Unit};

use super::ledger::UnitState;
use super::seats::Status;
use super::{Command, Engine, Phase};
use crate::journal::Record;

/// Rows a verifier may hold at once: one in work, one behind it so that it never waits for the coordinator.
const LEASES_PER_VERIFIER: usize = 2;

/// The end of a process is known well before this.
const BROKEN_LINK_PATIENCE_MS: u64 = 300;

/// A verifier that works gets this many times the limit before its row is given to another one.
const PATIENCE_WITH_WORK: u64 = 4;

/// An occupant of a draft seat.
type Occupant = (u16, Generation);

/// Where a row's hidden states are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowState {
    /// Nowhere.
    Waiting,
    /// Being computed.
    Leased {
        verifier: u16,
        generation: Generation,
        destination: Occupant,
    },
    /// Sent to the draft seat.
    Sent {
        verifier: u16,
        generation: Generation,
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

    /// Whether it is in the hands of an occupant of a verifier seat.
    fn is_with(self, seat: Seat, occupant: Generation) -> bool {
        matches!(self, Self::Leased { verifier, generation, .. } | Self::Sent { verifier, generation, .. }
            if verifier == seat.index && generation == occupant)
    }
}

/// A row, and since when it is where it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) state: RowState,
    since_ms: u64,
    /// FENCE: what was extracted for an earlier lease holds samples that are not in the row any more.
    valid_from_lease: u64,
}

impl Engine {
    /// The step that the draft replicas are at, or will be at once they have loaded.
    pub(super) fn base_step(&self) -> Step {
        let saved = self.latest_checkpoint().map(|checkpoint| checkpoint.step);
        self.seats
            .active(Role::Draft)
            .filter_map(|seat| self.seats.get(seat).state.map(|(step, _)| step))
            .max()
            .max(saved)
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
        if self.free_verifier().is_none() {
            return; // most of the time all of them are busy
        }
        let mut wanted = Vec::new();
        let last = (base.0 + self.settings.prefetch_steps).min(self.total_steps);
        let stopping = matches!(self.phase, Phase::Closing { .. });
        for step in (base.0..last).map(Step).filter(|_| !stopping) {
            for lane in 0..self.settings.lanes {
                if !self.row_units(step, lane).is_empty() {
                    wanted.push(RowId::Train { step, lane });
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
            if self.row_state(row) != RowState::Waiting {
                continue;
            }
            let Some(to) = self.owner_of(row.lane()) else {
                continue;
            };
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
        self.leases += 1;
        let lease = self.leases;
        let to = (destination.seat, destination.generation);
        self.place_row(
            row,
            RowState::Leased {
                verifier: verifier.index,
                generation,
                destination: to,
            },
        );
        let now_ms = self.now_ms;
        self.seats.get_mut(verifier).leases.insert(row, now_ms);
        match row {
            RowId::Train { step, lane } => {
                self.move_units(step, lane, UnitState::Leased);
                let documents = self
                    .row_units(step, lane)
                    .iter()
                    .filter_map(|&unit| Some((unit, self.samples.get(&unit.sample)?.location)))
                    .collect();
                self.commands.push(Command::Lease {
                    seat: verifier,
                    generation,
                    row,
                    lease,
                    documents,
                    destination,
                });
            }
            RowId::HeldOut { lane } => {
                let request = HeldOutRequest {
                    row,
                    lease,
                    prompts: self.held_out_prompts(lane).cloned().collect(),
                    max_new_tokens: self.settings.max_new_tokens,
                    destination,
                };
                self.send(verifier, CoordinatorCommand::ExtractHeldOut(request));
            }
        }
    }

    /// Moves the units of a row that is not committed yet.
    fn move_units(&mut self, step: Step, lane: u16, to: UnitState) {
        if step < self.committed {
            return; // done again after all replicas were lost: these units are trained for ever
        }
        for unit in self.row_units(step, lane).to_vec() {
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
        destination: Occupant,
        tokens: u64,
    ) {
        self.seats.get_mut(verifier).leases.remove(&row);
        self.extracted_tokens += tokens;
        let verifier = verifier.index;
        let leased = RowState::Leased {
            verifier,
            generation,
            destination,
        };
        if self.row_state(row) == leased {
            self.place_row(
                row,
                RowState::Sent {
                    verifier,
                    generation,
                    destination,
                },
            );
        }
    }

    fn row_state(&self, row: RowId) -> RowState {
        self.rows.get(&row).map_or(RowState::Waiting, |row| row.state)
    }

    fn place_row(&mut self, row: RowId, state: RowState) {
        let valid_from_lease = self.rows.get(&row).map_or(0, |row| row.valid_from_lease);
        let since_ms = self.now_ms;
        self.rows.insert(
            row,
            Row {
                state,
                since_ms,
                valid_from_lease,
            },
        );
    }

    /// A row has other samples than before: what was extracted of it until now is void.
    pub(super) fn void_row(&mut self, row: RowId) {
        self.rows.insert(
            row,
            Row {
                state: RowState::Waiting,
                since_ms: self.now_ms,
                valid_from_lease: self.leases + 1,
            },
        );
    }

    pub(super) fn row_received(&mut self, draft: Seat, generation: Generation, row: RowId, lease: u64) {
        let Some(state) = self
            .rows
            .get(&row)
            .filter(|row| lease >= row.valid_from_lease)
            .map(|row| row.state)
        else {
            return;
        };
        if self.owner_of(row.lane()) != Some(draft) || matches!(state, RowState::Held { .. }) {
            return;
        }
        if let RowState::Leased {
            verifier,
            generation: sender,
            ..
        } = state
            && self.seats.is_current(Seat::verifier(verifier), sender)
        {
            // That the verifier has sent it may never be told.
            self.seats.get_mut(Seat::verifier(verifier)).leases.remove(&row);
        }
        let destination = (draft.index, generation);
        self.place_row(row, RowState::Held { destination });
        if let RowId::Train { step, lane } = row {
            if state == RowState::Waiting {
                // Its lease was given up after the verifier died, and the hidden states arrived all the same.
                self.move_units(step, lane, UnitState::Leased);
            }
            self.move_units(step, lane, UnitState::Extracted);
        }
    }

    pub(super) fn bad_sample(
        &mut self,
        verifier: Seat,
        generation: Generation,
        row: RowId,
        unit: Option<Unit>,
        reason: &str,
    ) {
        self.seats.get_mut(verifier).leases.remove(&row);
        let RowId::Train { step, lane } = row else {
            if self.held_out_refused.insert(row.lane()) {
                self.warn(format!("the {row} is not evaluated: {reason}"));
            }
            return;
        };
        // FENCE: the answer to a lease that was given up since is not heard.
        let state = self.row_state(row);
        if !matches!(state, RowState::Leased { .. }) || !state.is_with(verifier, generation) {
            return;
        }
        let Some(unit) = unit else {
            self.fail(format!(
                "{verifier} refused the {row} without naming one of its samples: {reason}"
            ));
            return;
        };
        if !self.row_units(step, lane).contains(&unit) {
            // The answer to an older lease of the row; the sample was taken out of it when another one said so.
            return;
        }
        if step < self.committed {
            self.fail(format!(
                "sample {} was trained before and is refused now: {reason}; this verifier does not repeat its own \
                 arithmetic: test the memory of its host",
                unit.sample
            ));
            return;
        }
        self.move_units(step, lane, UnitState::Pending);
        self.void_row(row);
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
        if let Some(fact) = self.samples.get(&unit.sample) {
            self.quarantined.insert(unit.sample, (fact.file, fact.line));
        }
        for row in self.plans.steps.get_mut(&step).into_iter().flatten() {
            row.retain(|other| *other != unit);
        }
        if let Err(error) = self.ledger.advance(unit, UnitState::Quarantined) {
            self.fail(format!(
                "the ledger does not add up: {error}; this is a defect of eaglet"
            ));
        }
    }

    pub(super) fn link_broken(
        &mut self,
        draft: Seat,
        from: Seat,
        sender: Generation,
        epoch: Epoch,
        reason: &str,
    ) {
        if !self.seats.is_current(from, sender) {
            return; // its process is gone, and its rows were given back then
        }
        if from.role == Role::Draft {
            let newcomer = self.seats.get_mut(draft);
            if newcomer.status == Status::Loading && newcomer.donor == Some((from.index, sender)) {
                // The state did not arrive whole: it is asked for again.
                newcomer.donor = None;
                newcomer.status = Status::Attached;
            }
            // FENCE: links of an older epoch are gone with it. Most often the sender has just died, and its end is on
            // the way: tick waits for it.
            if epoch == self.epoch && !self.members.is_empty() {
                self.broken_link = Some((from, sender, epoch, self.now_ms));
            }
            return;
        }
        self.warn(format!(
            "the link from {from} to {draft} broke: {reason}; its rows are extracted again"
        ));
        self.give_back(|_, state| {
            state.destination().is_some_and(|(seat, _)| seat == draft.index) && state.is_with(from, sender)
        });
    }

    /// Gives up on rows of which nothing was heard for too long: a message about them was lost.
    pub(super) fn expire_rows(&mut self) {
        let limit_ms = self.settings.step_timeout_ms;
        let now_ms = self.now_ms;
        let overdue: Vec<RowId> = self
            .rows
            .iter()
            .filter(|(_, row)| now_ms > row.since_ms + limit_ms)
            .filter(|(_, row)| match row.state {
                RowState::Waiting | RowState::Held { .. } => false,
                RowState::Sent { .. } => true,
                // Whoever works may just be slow; but one message that is lost must not wait for ever.
                RowState::Leased { verifier, .. } => {
                    !self.seats.get(Seat::verifier(verifier)).is_busy()
                        || now_ms > row.since_ms + PATIENCE_WITH_WORK * limit_ms
                }
            })
            .map(|(&id, _)| id)
            .collect();
        for row in overdue {
            self.warn(format!(
                "the {row} did not arrive within {limit_ms} ms; it is extracted again"
            ));
            self.give_back(|other, _| other == row);
        }
        // An answer may be lost after its row was given back for another reason.
        self.seats
            .expire_leases(now_ms, limit_ms, PATIENCE_WITH_WORK * limit_ms);
    }

    /// Forms the group again if a link between two replicas broke and both are still alive a while later.
    pub(super) fn mend_group(&mut self) {
        let Some((from, sender, epoch, since_ms)) = self.broken_link else {
            return;
        };
        if self.now_ms < since_ms + BROKEN_LINK_PATIENCE_MS {
            return;
        }
        self.broken_link = None;
        if self.seats.is_current(from, sender) && epoch == self.epoch {
            self.warn(format!(
                "a link from {from} broke, and {from} lives; the epoch is formed again"
            ));
            self.restart_epoch();
        }
    }

    /// A verifier could not hand a row over. If its receiver lives, the two cannot reach each other, and a new occupant
    /// of the seat gets a new chance.
    pub(super) fn row_not_sent(
        &mut self,
        verifier: Seat,
        generation: Generation,
        row: RowId,
        destination: Occupant,
        reason: &str,
    ) {
        self.seats.get_mut(verifier).leases.remove(&row);
        let draft = Seat::draft(destination.0);
        // FENCE: since that lease the row may have been leased again, to the same verifier for another draft replica.
        self.give_back(|other, state| {
            other == row && state.is_with(verifier, generation) && state.destination() == Some(destination)
        });
        if self.seats.is_current(draft, destination.1) && self.seats.get(draft).is_active() {
            self.kill(draft, &format!("{verifier} cannot send it the {row}: {reason}"));
        }
    }

    /// Gives back the rows of a rank that is gone.
    pub(super) fn release_rows(&mut self, seat: Seat, generation: Generation) {
        match seat.role {
            Role::Verifier => self.give_back(|_, state| state.is_with(seat, generation)),
            Role::Draft => self.give_back(|_, state| state.destination() == Some((seat.index, generation))),
        }
    }

    pub(super) fn give_back(&mut self, mut which: impl FnMut(RowId, RowState) -> bool) {
        let rows: Vec<RowId> = self
            .rows
            .iter()
            .filter(|&(&id, row)| row.state != RowState::Waiting && which(id, row.state))
            .map(|(&id, _)| id)
            .collect();
        for row in rows {
            self.place_row(row, RowState::Waiting);
            if let RowId::Train { step, lane } = row {
                self.move_units(step, lane, UnitState::Pending);
            }
        }
    }

    /// Whether a row needs nothing more before it can be computed.
    pub(super) fn row_is_held(&self, row: RowId) -> bool {
        matches!(self.row_state(row), RowState::Held { .. })
    }

    /// Held-out prompts of a lane: dealt round, as many as fit its rows together with their answers.
    fn held_out_prompts(&self, lane: u16) -> impl Iterator<Item = &Vec<u32>> {
        let mut room = self.settings.held_out_rows * self.settings.tokens_per_row as usize;
        self.held_out
            .iter()
            .skip(usize::from(lane))
            .step_by(usize::from(self.settings.lanes.max(1)))
            .take_while(move |prompt| {
                let need = prompt.len() + self.settings.max_new_tokens;
                let fits = need <= room;
                room = room.saturating_sub(need);
                fits
            })
    }

    /// The held-out rows of all lanes that have prompts.
    pub(super) fn held_out_rows(&self) -> Vec<RowId> {
        (0..self.settings.lanes)
            .filter(|lane| !self.held_out_refused.contains(lane))
            .filter(|&lane| self.held_out_prompts(lane).next().is_some())
            .map(|lane| RowId::HeldOut { lane })
            .collect()
    }
}
