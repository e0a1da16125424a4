//! What is done about a rank that is lost: its work is given back, its seat filled again or given up.

use eaglet_runtime::ids::{Generation, Role, Seat};

use super::seats::{SeatState, Status};
use super::{Command, Engine, Phase, WhenExhausted};
use crate::journal::Record;

impl Engine {
    /// A rank's process is gone: fence it, give its work back, fill the seat again or give it up.
    pub(super) fn rank_lost(&mut self, seat: Seat, generation: Generation, cause: &str, log_tail: &str) {
        if !self.seats.is_current(seat, generation) {
            return;
        }
        let mut state = self.seats.get_mut(seat);
        if matches!(self.phase, Phase::Leaving | Phase::Finished) || state.status == Status::Leaving {
            state.status = Status::Empty;
            state.pid = 0;
            return;
        }
        let cause = match state.fault.take() {
            Some(fault) if !cause.starts_with(&fault) => format!("{fault} ({cause})"),
            _ => cause.to_owned(),
        };
        let excused = std::mem::take(&mut state.excused);
        let (removed, condemned) = (state.removed, state.condemned);
        let policy = self.settings.restarts(seat.role);
        let now_ms = self.now_ms;
        while state
            .restarts
            .front()
            .is_some_and(|&at| at + policy.window_ms < now_ms)
        {
            state.restarts.pop_front();
        }
        if state.restarts.is_empty() {
            state.first_cause = None;
        }
        let recent = state.restarts.len() as u32;
        let backoff_ms = if excused { 0 } else { policy.backoff_ms(recent) };
        let exhausted = !excused && recent >= policy.max_restarts;
        if !excused {
            state.restarts.push_back(now_ms);
            state.first_cause.get_or_insert_with(|| cause.clone());
        }
        state.restarts_total += 1;
        drop(state);
        if !removed && !excused {
            let cause = cause.clone();
            self.commands.push(Command::Lost {
                seat,
                generation,
                cause,
            });
        }
        self.seats.get_mut(seat).vacate(now_ms + backoff_ms, now_ms);
        self.release_rows(seat, generation);
        if removed {
            self.seats.get_mut(seat).status = Status::Empty;
            self.notice(format!("{seat} is gone as asked"));
        } else if condemned {
            // The rank itself has said what is wrong.
            self.give_up(seat, &format!("{seat}: {cause}"), "");
        } else if exhausted {
            let first = self
                .seats
                .get(seat)
                .first_cause
                .clone()
                .unwrap_or_else(|| cause.clone());
            let last = if first == cause {
                String::new()
            } else {
                format!("; last cause: {cause}")
            };
            let story = format!(
                "{seat} was lost {} times in {} s and is not started again; first cause: {first}{last}",
                recent + 1,
                policy.window_ms / 1000,
            );
            self.give_up(seat, &story, log_tail);
        } else {
            let wait = if backoff_ms > 0 {
                format!(" in {backoff_ms} ms")
            } else {
                String::new()
            };
            self.warn(format!(
                "lost {seat} (generation {generation}): {cause}; starting it again{wait}"
            ));
        }
        if seat.role == Role::Draft {
            self.draft_lost(seat, generation);
        }
    }

    /// A rank that a restart cannot help.
    pub(super) fn condemn(&mut self, seat: Seat, reason: String) {
        self.kill(seat, &reason);
        let mut state = self.seats.get_mut(seat);
        state.condemned = true;
        state.fault.get_or_insert(reason);
    }

    /// Draft seats, or whole replicas of the verifier, that are filled, or will be, and were not asked to leave.
    pub(super) fn staying(&self, role: Role) -> usize {
        let stays = |state: &SeatState| state.is_active() && !state.removed;
        match role {
            Role::Draft => self
                .seats
                .active(role)
                .filter(|&seat| stays(self.seats.get(seat)))
                .count(),
            Role::Verifier => self
                .replicas()
                .into_iter()
                .filter(|&replica| self.all_of_replica(replica, stays))
                .count(),
        }
    }

    /// Seats that could do the work of a role if they were not asked to leave.
    fn last_resort(&self, role: Role) -> Option<Vec<Seat>> {
        match role {
            Role::Draft => self.seats.active(role).next().map(|seat| vec![seat]),
            Role::Verifier => self
                .replicas()
                .into_iter()
                .find(|&replica| self.all_of_replica(replica, SeatState::is_active))
                .map(|replica| self.seats_of_replica(replica).collect()),
        }
    }

    /// A run needs a draft rank and a whole verifier: one that was asked to leave stays if nobody else is left, and
    /// without anybody the run is over.
    pub(super) fn keep_roles(&mut self) {
        if matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        for role in [Role::Verifier, Role::Draft] {
            if self.seats.census().somebody_stays(role) {
                continue;
            }
            let Some(seats) = self.last_resort(role) else {
                let what = self.name_of_role(role);
                self.fail(format!(
                    "no {what} is left; the causes stand above and in logs/coordinator.log"
                ));
                return;
            };
            for seat in seats {
                self.seats.get_mut(seat).removed = false;
                self.append(Record::SeatAdded { seat, threads: 0 }, true);
                self.warn(format!(
                    "{seat} was to leave, and stays: no other {role} rank is left"
                ));
            }
        }
    }

    /// What a run needs one of.
    pub(super) fn name_of_role(&self, role: Role) -> String {
        match role {
            Role::Verifier if self.settings.shards() > 1 => "whole verifier replica".to_owned(),
            role => format!("{role} rank"),
        }
    }

    /// A seat stays empty from now on: the others go on, if they may and there are any.
    fn give_up(&mut self, seat: Seat, story: &str, log_tail: &str) {
        self.seats.get_mut(seat).status = Status::Empty;
        let words = if log_tail.is_empty() {
            String::new()
        } else {
            format!("\nits last words:\n{log_tail}")
        };
        let left = self.staying(seat.role);
        if self.settings.restarts(seat.role).then == WhenExhausted::Stop || left == 0 {
            self.fail(format!("{story}{words}"));
        } else {
            let (what, s) = (self.name_of_role(seat.role), if left == 1 { "" } else { "s" });
            self.warn(format!(
                "{story}; the run goes on with {left} {what}{s}, and `eaglet ranks restart {seat}` tries it again{words}"
            ));
        }
    }
}
