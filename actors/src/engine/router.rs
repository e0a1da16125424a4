//! Which row goes to which verifier, and where its hidden states lie.

use std::collections::BTreeSet;
use std::ops::{ControlFlow, Range};

use eaglet_runtime::control::{CoordinatorCommand, HeldOutRequest, Member};
use eaglet_runtime::ids::{Generation, Role, RowId, Seat, Step, Unit};

use super::ledger::UnitState;
use super::rows::{Part, Row, RowState};
use super::seats::Status;
use super::teams::Handout;
use super::{Command, Engine, Phase};
use crate::journal::Record;

/// Prompts that are answered together at most: while a verifier answers them it extracts no row.
const PROMPTS_PER_PART: usize = 8;

/// As long as there are rows to extract, so many are given out between two parts of held-out prompts.
const ROWS_BETWEEN_PARTS: u32 = 16;

impl Engine {
    /// The step that the draft replicas are at, or will be at once they have loaded.
    pub(super) fn base_step(&self) -> Step {
        let saved = self.latest_checkpoint().map(|checkpoint| checkpoint.step);
        self.seats.census().furthest().max(saved).unwrap_or_default()
    }

    /// Steps whose rows are extracted now.
    pub(super) fn steps_ahead(&self) -> Range<u64> {
        let base = self.base_step().0;
        match self.phase {
            Phase::Closing { .. } => base..base,
            _ => base..(base + self.settings.prefetch_steps).min(self.total_steps),
        }
    }

    /// Gives rows to replicas of the verifier that have room: those of the next step first, then those ahead, then held-out
    /// ones. A part of the held-out prompts takes long, so it waits until rows are ahead; but not for ever, and as long as
    /// there is something to train one replica of several is left to it.
    pub(super) fn route(&mut self) {
        if !self.prepared || matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let steps = self.steps_ahead();
        let base = steps.start;
        self.rows.forget_before(Step(base));
        // Rows ahead do not keep a part waiting for ever.
        let is_due = !steps.is_empty() && self.rows_since_part >= ROWS_BETWEEN_PARTS;
        let most = match self.rows.has_units(steps.clone()) || is_due && self.rows.has_parts() {
            // Nothing is left to train: all may answer.
            false => usize::MAX,
            true => self.formed_teams().saturating_sub(1).max(1),
        };
        let mut parts = most.saturating_sub(self.rows.parts_in_work());
        for step in steps.map(Step) {
            let mut from = Some(0);
            while let Some(lane) = from.and_then(|from| self.rows.next_waiting(step, from)) {
                if self.offer(RowId::Train { step, lane }).is_break() {
                    return;
                }
                from = lane.checked_add(1);
            }
            if step.0 == base && is_due && self.offer_parts(&mut parts).is_break() {
                return;
            }
        }
        let _ = self.offer_parts(&mut parts);
    }

    /// Gives out so many parts of the held-out prompts; breaks if no verifier has room for more.
    fn offer_parts(&mut self, parts: &mut usize) -> ControlFlow<()> {
        let mut from = Some((0, 0));
        while *parts > 0
            && let Some((part, lane)) = from.and_then(|from| self.rows.next_waiting_part(from))
        {
            if self.offer(RowId::HeldOut { lane, part })? {
                *parts -= 1;
            }
            from = match lane.checked_add(1) {
                Some(lane) => Some((part, lane)),
                None => part.checked_add(1).map(|part| (part, 0)),
            };
        }
        ControlFlow::Continue(())
    }

    /// Gives a row out that waits, if its draft seat can take it; whether it did. Breaks if no verifier has room.
    fn offer(&mut self, row: RowId) -> ControlFlow<(), bool> {
        let Some(replica) = self.free_team() else {
            return ControlFlow::Break(());
        };
        let Some(to) = self.owner_of(row.lane()) else {
            return ControlFlow::Continue(false);
        };
        let draft = self.seats.get(to);
        if !matches!(draft.status, Status::Loading | Status::Ready) {
            return ControlFlow::Continue(false);
        }
        let destination = draft.member(to);
        self.lease(row, replica, destination);
        self.rows_since_part = match row {
            RowId::HeldOut { .. } => 0,
            RowId::Train { .. } => self.rows_since_part.saturating_add(1),
        };
        ControlFlow::Continue(true)
    }

    fn lease(&mut self, row: RowId, replica: u16, destination: Member) {
        self.leases += 1;
        let lease = self.leases;
        // The caller has seen that the team is formed.
        let Some(Handout { members, turn }) = self.hand_out(replica, lease, row) else {
            return;
        };
        self.place_row(
            row,
            RowState::Leased {
                replica,
                lease,
                destination: (destination.seat, destination.generation),
            },
        );
        match row {
            RowId::Train { step, lane } => {
                self.move_units(step, lane, UnitState::Leased);
                let documents = self
                    .row_units(step, lane)
                    .iter()
                    .filter_map(|&unit| Some((unit, self.samples.get(&unit.sample)?.location)))
                    .collect();
                self.commands.push(Command::Lease {
                    members,
                    row,
                    lease,
                    turn,
                    documents,
                    destination,
                });
            }
            RowId::HeldOut { lane, part } => {
                let request = HeldOutRequest {
                    row,
                    lease,
                    turn,
                    prompts: self.prompts_of_part(lane, part).cloned().collect(),
                    max_new_tokens: self.settings.max_new_tokens,
                    destination,
                };
                for (seat, _) in members {
                    self.send(seat, CoordinatorCommand::ExtractHeldOut(request.clone()));
                }
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

    pub(super) fn row_extracted(&mut self, seat: Seat, row: RowId, lease: u64, tokens: u64) {
        // Each shard says so of the same tokens.
        if seat.index.is_multiple_of(self.settings.shards()) {
            self.extracted_tokens += tokens;
        }
        let all = self.answered(seat, lease) == Some(true);
        if let RowState::Leased {
            replica,
            lease: present,
            destination,
        } = self.rows.state(row)
            && all
            && present == lease
        {
            self.place_row(
                row,
                RowState::Sent {
                    replica,
                    lease,
                    destination,
                },
            );
        }
    }

    fn place_row(&mut self, row: RowId, state: RowState) {
        let valid_from_lease = self.rows.get(row).map_or(0, |row| row.valid_from_lease);
        let since_ms = self.now_ms;
        self.rows.put(
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
        self.rows.put(
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
            .get(row)
            .filter(|row| lease >= row.valid_from_lease)
            .map(|row| row.state)
        else {
            return;
        };
        if self.owner_of(row.lane()) != Some(draft) || matches!(state, RowState::Held { .. }) {
            return;
        }
        if let RowState::Leased { replica, .. } = state {
            // That the verifier has sent it may never be told.
            self.teams.forget(replica, lease, self.now_ms);
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
        (row, lease): (RowId, u64),
        unit: Option<Unit>,
        reason: &str,
    ) {
        // FENCE: the answer to a lease that is over is not heard; each shard that sees what is wrong says so.
        let is_present = self.rows.state(row).lease() == Some(lease);
        if self.answered(verifier, lease).is_none() || !is_present {
            return;
        }
        let (step, lane) = match row {
            RowId::Train { step, lane } => (step, lane),
            RowId::HeldOut { lane, part } => {
                self.give_back(|other, _| other == row);
                if self.rows.refuse(lane, part) {
                    self.warn(format!("the {row} is not evaluated: {reason}"));
                }
                return;
            }
        };
        let unit = unit.filter(|unit| self.row_units(step, lane).contains(unit));
        let Some(unit) = unit else {
            self.fail(format!(
                "{verifier} refused the {row} without naming one of its samples: {reason}"
            ));
            return;
        };
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
        self.count_plan(step);
        if let Err(error) = self.ledger.advance(unit, UnitState::Quarantined) {
            self.fail(format!(
                "the ledger does not add up: {error}; this is a defect of eaglet"
            ));
        }
    }

    /// Gives back the rows of a rank that is gone.
    pub(super) fn release_rows(&mut self, seat: Seat, generation: Generation) {
        match seat.role {
            Role::Verifier => self.disband(self.replica_of(seat)),
            Role::Draft => self.give_back(|_, state| state.destination() == Some((seat.index, generation))),
        }
    }

    pub(super) fn give_back(&mut self, mut which: impl FnMut(RowId, RowState) -> bool) {
        let rows: Vec<RowId> = self
            .rows
            .iter()
            .filter(|&(id, row)| row.state != RowState::Waiting && which(id, row.state))
            .map(|(id, _)| id)
            .collect();
        for row in rows {
            self.place_row(row, RowState::Waiting);
            if let RowId::Train { step, lane } = row {
                self.move_units(step, lane, UnitState::Pending);
            }
        }
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

    fn prompts_of_part(&self, lane: u16, part: u16) -> impl Iterator<Item = &Vec<u32>> {
        self.held_out_prompts(lane)
            .skip(usize::from(part) * PROMPTS_PER_PART)
            .take(PROMPTS_PER_PART)
    }

    /// The held-out rows of all lanes that have prompts: the first part of each lane, then the second ones.
    pub(super) fn deal_held_out(&self) -> BTreeSet<Part> {
        let parts = |lane| self.held_out_prompts(lane).count().div_ceil(PROMPTS_PER_PART);
        (0..self
            .settings
            .lanes
            .min(self.held_out.len().try_into().unwrap_or(u16::MAX)))
            .flat_map(|lane| {
                let parts = u16::try_from(parts(lane)).unwrap_or(u16::MAX);
                (0..parts).map(move |part| (part, lane))
            })
            .collect()
    }
}
