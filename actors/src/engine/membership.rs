//! Ranks that come and go on request, while the run goes on.

use eaglet_runtime::control::CoordinatorCommand;
use eaglet_runtime::ids::{Role, Seat};

use super::seats::Status;
use super::{Command, Engine, Phase, SeatChange};
use crate::journal::Record;

impl Engine {
    /// Carries out a change of the ranks, or says why not.
    pub(super) fn change_seat(&mut self, ticket: u64, change: SeatChange) {
        let answer = if matches!(self.phase, Phase::Preparing | Phase::Training) {
            match change {
                SeatChange::Add { role, threads } => self.add_seat(role, threads),
                SeatChange::Remove { seat } => self.remove_seat(seat),
                SeatChange::Restart { seat } => self.restart_seat(seat),
            }
        } else {
            Err("the run is about to end; launch it again with other [[ranks]]".to_owned())
        };
        self.commands.push(Command::Answer { ticket, answer });
    }

    fn add_seat(&mut self, role: Role, threads: usize) -> Result<String, String> {
        let last = self
            .seats
            .iter()
            .filter(|(seat, _)| seat.role == role)
            .map(|(seat, _)| seat.index)
            .max();
        let index = match last {
            None => 0,
            // The last number is kept free: it stands for nobody.
            Some(last) => last
                .checked_add(1)
                .filter(|&index| index < u16::MAX)
                .ok_or_else(|| {
                    format!("all numbers of {role} seats are used; restart an empty one instead")
                })?,
        };
        let seat = Seat { role, index };
        self.seats.open(seat, self.now_ms);
        self.commands.push(Command::SeatAdded { seat, threads });
        self.append(Record::SeatAdded { seat, threads }, true);
        self.notice(format!("{seat} is added"));
        Ok(match role {
            Role::Verifier => format!("{seat} is starting"),
            Role::Draft => format!("{seat} is starting; it joins at a step boundary once it has loaded"),
        })
    }

    fn remove_seat(&mut self, seat: Seat) -> Result<String, String> {
        self.known(seat)?;
        let state = self.seats.get(seat);
        if !state.is_active() || state.removed {
            return Err(format!(
                "{seat} was removed or given up already; `eaglet ranks restart {seat}` brings it back"
            ));
        }
        let others = self
            .seats
            .active(seat.role)
            .filter(|&other| other != seat && !self.seats.get(other).removed)
            .count();
        if others == 0 {
            return Err(format!(
                "{seat} is the only {} rank, and the run needs one; add another first",
                seat.role
            ));
        }
        self.append(Record::SeatRemoved { seat }, true);
        self.notice(format!("{seat} is to leave"));
        self.seats.get_mut(seat).removed = true;
        let state = self.seats.get(seat);
        if seat.role == Role::Draft && (state.is_live() || self.members.contains(&seat.index)) {
            return Ok(format!(
                "{seat} leaves at the next step boundary; the others take its lanes over"
            ));
        }
        self.dismiss(seat);
        Ok(format!("{seat} leaves now"))
    }

    fn restart_seat(&mut self, seat: Seat) -> Result<String, String> {
        self.known(seat)?;
        let now_ms = self.now_ms;
        let state = self.seats.get(seat);
        if state.is_active() && state.removed {
            self.seats.get_mut(seat).removed = false;
            self.append(Record::SeatAdded { seat, threads: 0 }, true);
        }
        match self.seats.get(seat).status {
            Status::Leaving => Err(format!("{seat} is just leaving; ask again when it is gone")),
            Status::Empty => {
                self.seats.open(seat, now_ms);
                // Its threads stand in the configuration, or in an earlier record.
                self.append(Record::SeatAdded { seat, threads: 0 }, true);
                self.notice(format!("{seat} is tried again"));
                Ok(format!("{seat} is starting"))
            }
            Status::Vacant { .. } => {
                let state = self.seats.get_mut(seat);
                state.status = Status::Vacant { spawn_at_ms: now_ms };
                state.restarts.clear();
                Ok(format!("{seat} is starting"))
            }
            Status::Starting | Status::Attached | Status::Loading | Status::Ready => {
                let state = self.seats.get_mut(seat);
                state.excused = true;
                state.restarts.clear();
                self.kill(seat, "restarted on request");
                Ok(format!("{seat} is restarted"))
            }
        }
    }

    fn known(&self, seat: Seat) -> Result<(), String> {
        if self.seats.find(seat).is_some() {
            return Ok(());
        }
        let seats: Vec<String> = self.seats.iter().map(|(seat, _)| seat.to_string()).collect();
        Err(format!(
            "there is no seat {seat}; the seats are {}",
            seats.join(", ")
        ))
    }

    /// Tells a rank to leave for good.
    pub(super) fn dismiss(&mut self, seat: Seat) {
        let now_ms = self.now_ms;
        let state = self.seats.get_mut(seat);
        let (status, generation) = (state.status, state.generation);
        state.since_ms = now_ms;
        match status {
            Status::Vacant { .. } | Status::Empty => {
                state.status = Status::Empty;
            }
            Status::Starting => {
                state.status = Status::Leaving;
                self.kill(seat, "it was removed");
            }
            Status::Attached | Status::Loading | Status::Ready | Status::Leaving => {
                state.status = Status::Leaving;
                self.send(seat, CoordinatorCommand::Quit);
            }
        }
        self.release_rows(seat, generation);
        self.seats.get_mut(seat).leases.clear();
        if seat.role == Role::Draft {
            self.draft_lost(seat, generation);
        }
    }
}
