//! Ranks that come and go on request, while the run goes on.

use eaglet_runtime::control::CoordinatorCommand;
use eaglet_runtime::ids::{Role, Seat};

use super::seats::{SeatState, Status};
use super::{Command, Engine, Phase, SeatChange};
use crate::journal::Record;

impl Engine {
    /// Carries out a change of the ranks, or says why not.
    pub(super) fn change_seat(&mut self, ticket: u64, change: SeatChange) {
        let answer = if matches!(self.phase, Phase::Preparing | Phase::Training) {
            match change {
                SeatChange::Add { role, threads } => self.add_seats(role, threads),
                SeatChange::Remove { seat } => self.remove_seat(seat),
                SeatChange::Restart { seat } => self.restart_seat(seat),
            }
        } else {
            Err("the run is about to end; launch it again with other [[ranks]]".to_owned())
        };
        self.commands.push(Command::Answer { ticket, answer });
    }

    fn add_seats(&mut self, role: Role, threads: usize) -> Result<String, String> {
        let count = match role {
            Role::Verifier => self.settings.shards(),
            Role::Draft => 1,
        };
        let last = self
            .seats
            .iter()
            .filter(|(seat, _)| seat.role == role)
            .map(|(seat, _)| seat.index)
            .max();
        // The last number is kept free: it stands for nobody.
        let indices: Option<Vec<u16>> = (0..count)
            .map(|place| {
                let first = last.map_or(Some(0), |last| (last / count + 1).checked_mul(count))?;
                first.checked_add(place).filter(|&index| index < u16::MAX)
            })
            .collect();
        let Some(indices) = indices else {
            return Err(format!(
                "all numbers of {role} seats are used; restart an empty one instead"
            ));
        };
        let seats: Vec<Seat> = indices.into_iter().map(|index| Seat { role, index }).collect();
        for &seat in &seats {
            self.seats.open(seat, self.now_ms);
            self.commands.push(Command::SeatAdded { seat, threads });
            self.notice(format!("{seat} is added"));
        }
        self.append_all(&seats, |seat| Record::SeatAdded { seat, threads });
        let names = list(&seats);
        Ok(match (role, &seats[..]) {
            (Role::Draft, _) => {
                format!("{names} is starting; it joins at a step boundary once it has loaded")
            }
            (Role::Verifier, [_]) => format!("{names} is starting"),
            (Role::Verifier, _) => {
                format!("{names} are starting; they take rows once all of them have loaded")
            }
        })
    }

    /// Records of several seats that belong together. A tail that is torn between them leaves a replica of the verifier
    /// that is not whole, and such a one is empty at the next launch.
    fn append_all(&mut self, seats: &[Seat], record: impl Fn(Seat) -> Record) {
        for (index, &seat) in seats.iter().enumerate() {
            self.append(record(seat), index + 1 == seats.len());
        }
    }

    fn remove_seat(&mut self, seat: Seat) -> Result<String, String> {
        self.known(seat)?;
        let stays = |state: &SeatState| state.is_active() && !state.removed;
        if !stays(self.seats.get(seat)) {
            return Err(format!(
                "{seat} was removed or given up already; `eaglet ranks restart {seat}` brings it back"
            ));
        }
        let (whole, leavers) = match seat.role {
            Role::Draft => (true, vec![seat]),
            Role::Verifier => {
                let replica = self.replica_of(seat);
                let seats = self.seats_of_replica(replica);
                let here = |seat: &Seat| self.seats.find(*seat).is_some_and(stays);
                (self.all_of_replica(replica, stays), seats.filter(here).collect())
            }
        };
        if self.staying(seat.role) == usize::from(whole) {
            let part = if leavers.len() > 1 { "part of " } else { "" };
            return Err(format!(
                "{seat} is {part}the only {}, and the run needs one; add another first",
                self.name_of_role(seat.role)
            ));
        }
        self.append_all(&leavers, |seat| Record::SeatRemoved { seat });
        for &seat in &leavers {
            self.notice(format!("{seat} is to leave"));
            self.seats.get_mut(seat).removed = true;
        }
        let state = self.seats.get(seat);
        if seat.role == Role::Draft && (state.is_live() || self.is_member(seat)) {
            return Ok(format!(
                "{seat} leaves at the next step boundary; the others take its lanes over"
            ));
        }
        for &seat in &leavers {
            self.dismiss(seat);
        }
        Ok(match &leavers[..] {
            [_] => format!("{seat} leaves now"),
            _ => format!("{} leave now: they are one verifier", list(&leavers)),
        })
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
            Status::Empty => self.reopen(seat),
            Status::Vacant { .. } => {
                let mut state = self.seats.get_mut(seat);
                state.status = Status::Vacant { spawn_at_ms: now_ms };
                state.restarts.clear();
                Ok(format!("{seat} is starting"))
            }
            Status::Starting | Status::Attached | Status::Loading | Status::Ready => {
                let mut state = self.seats.get_mut(seat);
                state.excused = true;
                state.restarts.clear();
                drop(state);
                self.kill(seat, "restarted on request");
                Ok(format!("{seat} is restarted"))
            }
        }
    }

    /// Fills a seat again that is empty for good, and those without which it would be of no use.
    fn reopen(&mut self, seat: Seat) -> Result<String, String> {
        let together: Vec<Seat> = match seat.role {
            Role::Draft => vec![seat],
            Role::Verifier => self.seats_of_replica(self.replica_of(seat)).collect(),
        };
        let status = |seat: &Seat| self.seats.find(*seat).map(|state| state.status);
        if let Some(leaving) = together.iter().find(|seat| status(seat) == Some(Status::Leaving)) {
            return Err(format!("{leaving} is just leaving; ask again when it is gone"));
        }
        if let Some(missing) = together.iter().find(|seat| status(seat).is_none()) {
            return Err(format!(
                "{seat} is of no use without {missing}, which is no seat of this cluster any more: a verifier has {}                  shards (verifier.pipeline, verifier.tensor)",
                self.settings.shards()
            ));
        }
        let empty: Vec<Seat> = together
            .into_iter()
            .filter(|seat| status(seat) == Some(Status::Empty))
            .collect();
        for &seat in &empty {
            self.seats.open(seat, self.now_ms);
            self.notice(format!("{seat} is tried again"));
        }
        // Its threads stand in the configuration, or in an earlier record.
        self.append_all(&empty, |seat| Record::SeatAdded { seat, threads: 0 });
        let verb = if empty.len() == 1 { "is" } else { "are" };
        Ok(format!("{} {verb} starting", list(&empty)))
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
        let mut state = self.seats.get_mut(seat);
        let (status, generation) = (state.status, state.generation);
        state.since_ms = now_ms;
        state.status = match status {
            Status::Vacant { .. } | Status::Empty => Status::Empty,
            _ => Status::Leaving,
        };
        drop(state);
        match status {
            Status::Vacant { .. } | Status::Empty => {}
            Status::Starting => self.kill(seat, "it was removed"),
            Status::Attached | Status::Loading | Status::Ready | Status::Leaving => {
                self.send(seat, CoordinatorCommand::Quit);
            }
        }
        self.release_rows(seat, generation);
        if seat.role == Role::Draft {
            self.draft_lost(seat, generation);
        }
    }
}

/// Seats in words.
fn list(seats: &[Seat]) -> String {
    let names: Vec<String> = seats.iter().map(Seat::to_string).collect();
    match names.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} and {last}", others.join(", ")),
        None => String::new(),
    }
}
