//! COUNTED: what the engine keeps counted, against a walk over all that is counted. For tests: after each event of every
//! schedule.

use std::collections::BTreeSet;

use eaglet_runtime::ids::{Role, RowId, Step};

use super::Engine;
use super::census::{Census, Mark};
use super::rows::{Part, RowState, Rows};
use super::seats::{SeatState, Status};
use super::teams::Stage;

/// Says what differs, and how.
fn same<T: PartialEq + std::fmt::Debug>(what: &str, counted: T, walked: T) -> Result<(), String> {
    if counted == walked {
        Ok(())
    } else {
        Err(format!("{what}: {counted:?} by the counts, {walked:?} by a walk"))
    }
}

impl Engine {
    /// Walks over all seats, rows and teams, counts them anew, and asks each rule of all of them.
    ///
    /// # Errors
    /// If COUNTED does not hold, or a rule decides otherwise by the counts; with both answers.
    pub fn audit(&self) -> Result<(), String> {
        self.audit_seats()?;
        self.audit_group()?;
        self.audit_teams()?;
        self.audit_rows()
    }

    fn audit_seats(&self) -> Result<(), String> {
        let census = self.seats.census();
        let mut walked = Census::new(self.settings.shards());
        for (seat, state) in self.seats.iter() {
            walked.count(seat, None, Some(Mark::of(seat, state)));
        }
        same("seats", census, &walked)?;
        for role in [Role::Verifier, Role::Draft] {
            let stays = self.staying(role) > 0;
            same("somebody stays", census.somebody_stays(role), stays)?;
        }
        let is_due = |state: &SeatState| matches!(state.status, Status::Vacant { spawn_at_ms } if spawn_at_ms <= self.now_ms);
        let due = self.seats.iter().filter(|(_, state)| is_due(state));
        same(
            "due",
            census.due(self.now_ms),
            due.map(|(seat, _)| seat).collect(),
        )?;
        let is_left = self.seats.iter().any(|(_, state)| state.status != Status::Empty);
        same("somebody is left", census.somebody_is_left(), is_left)
    }

    fn audit_group(&self) -> Result<(), String> {
        let census = self.seats.census();
        let drafts = || {
            let drafts = self.seats.active(Role::Draft);
            drafts.map(|seat| (seat, self.seats.get(seat)))
        };
        let members = || self.members().map(|seat| self.seats.get(seat));
        let flagged = self.seats.iter().filter(|(_, state)| state.is_member);
        same(
            "members",
            self.members().collect(),
            flagged.map(|(seat, _)| seat).collect::<Vec<_>>(),
        )?;
        let waits = drafts().any(|(_, state)| state.status == Status::Attached);
        same(
            "a draft waits for a load",
            census.a_draft_waits_for_a_load(),
            waits,
        )?;
        let furthest = drafts()
            .filter_map(|(_, state)| state.state.map(|(step, _)| step))
            .max();
        same("the furthest step", census.furthest(), furthest)?;
        let adopts = drafts().any(|(_, state)| state.status == Status::Loading && !state.builds_only);
        same("somebody adopts", census.somebody_adopts(), adopts)?;
        let joined = members().all(|state| state.joined == Some(self.epoch));
        same(
            "all members joined",
            census.all_members_joined(self.epoch),
            joined,
        )?;
        let applies = members().any(|state| state.applying_since_ms.is_some());
        same("a member applies", census.a_member_applies(), applies)?;
        let at_rest = |state: &SeatState| state.status == Status::Ready && state.applying_since_ms.is_none();
        let first = members().next().and_then(|state| state.state);
        let common = first.filter(|_| members().all(|state| at_rest(state) && state.state == first));
        same("the common state", census.common_state(), common)?;
        let joins = drafts().any(|(seat, state)| at_rest(state) && !self.is_member(seat));
        same("somebody joins", census.somebody_joins(), joins)?;
        let leaves = drafts().any(|(seat, _)| self.can_leave(seat));
        same("somebody can leave", census.somebody_can_leave(), leaves)
    }

    fn audit_teams(&self) -> Result<(), String> {
        let replicas = self.replicas();
        let count = replicas
            .iter()
            .filter(|&&replica| self.is_formed(replica))
            .count();
        same("formed teams", self.formed_teams(), count)?;
        let most = usize::from(self.settings.pipeline) + 1;
        let heard = |state: &SeatState| self.now_ms < state.last_heard_ms + self.settings.suspect_after_ms;
        let mut best: Option<(usize, u16)> = None;
        for replica in self.replicas() {
            let Some(team) = self.teams.get(replica) else {
                continue;
            };
            let load = team.rows_in_work();
            let is_better = load < best.map_or(most, |(load, _)| load);
            if team.stage == Stage::Formed && is_better && self.all_of_replica(replica, heard) {
                best = Some((load, replica));
            }
        }
        same(
            "the free team",
            self.free_team(),
            best.map(|(_, replica)| replica),
        )?;
        for replica in self.replicas() {
            if self.seats.is_stirred(replica) {
                continue; // is looked at with the next event
            }
            let here = |state: &SeatState| state.status == Status::Ready && !state.removed;
            let comes_on = match self.teams.get(replica) {
                None => true,
                Some(team) => match team.stage {
                    Stage::Apart => self.all_of_replica(replica, here),
                    Stage::Forming { .. } => {
                        self.all_of_replica(replica, |state| state.joined == Some(team.epoch))
                    }
                    Stage::Formed => false,
                },
            };
            same("a team that nobody looks at comes on", false, comes_on)?;
        }
        Ok(())
    }

    fn audit_rows(&self) -> Result<(), String> {
        let mut walked = Rows::default();
        for (id, row) in self.rows.iter() {
            walked.put(id, *row);
        }
        for (&step, rows) in &self.plans.steps {
            let with_units = (0..).zip(rows).filter(|(_, row)| !row.is_empty());
            walked.plan(step, with_units.map(|(lane, _)| lane));
        }
        let dealt = self.deal_held_out();
        let asked: BTreeSet<Part> = self.rows.parts().collect();
        if !asked.is_subset(&dealt) {
            return same("parts of the held-out prompts", asked, dealt);
        }
        walked.ask(asked.clone());
        same("rows", self.rows.counts(), walked.counts())?;

        let held = |row: RowId| self.rows.state(row).is_held();
        for (&step, rows) in &self.plans.steps {
            let mut lanes = (0..).zip(rows).filter(|(_, row)| !row.is_empty());
            let all = lanes.all(|(lane, _)| held(RowId::Train { step, lane }));
            same("all rows of a step are held", self.rows.all_held(step), all)?;
        }
        let mut parts = asked.iter();
        let all = parts.all(|&(part, lane)| held(RowId::HeldOut { lane, part }));
        same("all parts are held", self.rows.all_parts_held(), all)?;
        let is_part = |id: RowId| matches!(id, RowId::HeldOut { .. });
        let in_work = self
            .rows
            .iter()
            .filter(|(id, row)| is_part(*id) && row.state.is_leased());
        same("parts in work", self.rows.parts_in_work(), in_work.count())?;

        // What verifiers are asked for is what waits, in order.
        for step in self.steps_ahead().map(Step) {
            let waits = |&lane: &u16| {
                let row = RowId::Train { step, lane };
                !self.row_units(step, lane).is_empty() && self.rows.state(row) == RowState::Waiting
            };
            let walked: Vec<u16> = (0..self.settings.lanes).filter(waits).collect();
            let next = |from: Option<u16>| from.and_then(|from| self.rows.next_waiting(step, from));
            let counted = std::iter::successors(next(Some(0)), |lane| next(lane.checked_add(1)));
            same("rows that wait", counted.collect(), walked)?;
        }
        Ok(())
    }
}
