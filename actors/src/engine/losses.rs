//! What is done about a rank that is lost: its work is given back, its seat filled again or given up.

use eaglet_runtime::ids::{Generation, Role, Seat};

use super::seats::Status;
use super::{Command, Engine, Phase, WhenExhausted};
use crate::journal::Record;

impl Engine {
    /// A rank's process is gone: fence it, give its work back, fill the seat again or give it up.
    pub(super) fn rank_lost(&mut self, seat: Seat, generation: Generation, cause: &str, log_tail: &str) {
        if !self.seats.is_current(seat, generation) {
            return;
        }
        let state = self.seats.get_mut(seat);
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
        self.release_rows(seat, generation);
        let policy = self.settings.restarts(seat.role);
        let now_ms = self.now_ms;
        let state = self.seats.get_mut(seat);
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
        if !removed && !excused {
            let cause = cause.clone();
            self.commands.push(Command::Lost {
                seat,
                generation,
                cause,
            });
        }
        let state = self.seats.get_mut(seat);
        state.vacate(now_ms + backoff_ms, now_ms);
        if removed {
            state.status = Status::Empty;
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
        let state = self.seats.get_mut(seat);
        state.condemned = true;
        state.fault.get_or_insert(reason);
    }

    /// Seats of a role that are filled, or will be, and were not asked to leave.
    fn staying(&self, role: Role) -> usize {
        self.seats
            .active(role)
            .filter(|&seat| !self.seats.get(seat).removed)
            .count()
    }

    /// A run needs a rank of each role: one that was asked to leave stays if nobody else is left, and without anybody
    /// the run is over.
    pub(super) fn keep_roles(&mut self) {
        if matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        for role in [Role::Verifier, Role::Draft] {
            if self.staying(role) > 0 {
                continue;
            }
            let Some(seat) = self.seats.active(role).next() else {
                self.fail(format!(
                    "no {role} rank is left; the causes stand above and in logs/coordinator.log"
                ));
                return;
            };
            self.seats.get_mut(seat).removed = false;
            self.append(Record::SeatAdded { seat, threads: 0 }, true);
            self.warn(format!(
                "{seat} was to leave, and stays: no other {role} rank is left"
            ));
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
            let ranks = if left == 1 { "rank" } else { "ranks" };
            self.warn(format!(
                "{story}; the run goes on with {left} {} {ranks}, and `eaglet ranks restart {seat}` tries it again{words}",
                seat.role
            ));
        }
    }
}
