//! Which draft seat computes which lane.
//!
//! LANES: every lane has exactly one owner, an active draft seat. A lane keeps its owner as long as that seat will be filled;
//! then it goes to its home, the seat of the same number, or to the seat with the fewest lanes. Owners decide how fast a
//! step is, never what it computes.

use eaglet_runtime::ids::{Role, RowId, Seat};

use super::Engine;
use super::seats::Status;

impl Engine {
    /// The draft seat that computes a lane.
    pub(super) fn owner_of(&self, lane: u16) -> Option<Seat> {
        self.owners
            .get(usize::from(lane))
            .copied()
            .flatten()
            .map(Seat::draft)
    }

    /// Lanes of a draft seat, ascending.
    pub(super) fn lanes_of(&self, seat: Seat) -> impl Iterator<Item = u16> {
        (0..)
            .zip(&self.owners)
            .filter(move |(_, owner)| seat == Seat::draft(owner.unwrap_or(u16::MAX)) && owner.is_some())
            .map(|(lane, _)| lane)
    }

    /// Gives lanes without an owner to somebody, and evens the load out among those who are ready.
    pub(super) fn assign_lanes(&mut self) {
        let before = self.owners.clone();
        let active: Vec<Seat> = self.seats.active(Role::Draft).collect();
        if active.is_empty() {
            return; // the run is about to end
        }
        for lane in 0..self.settings.lanes {
            let owner = self.owner_of(lane).filter(|seat| active.contains(seat));
            let absent = owner.is_none_or(|seat| !self.seats.get(seat).is_live());
            let spare = active.iter().copied().find(|&seat| {
                self.seats.get(seat).status == Status::Ready && self.lanes_of(seat).next().is_none()
            });
            let next = match (owner, spare) {
                // A rank that waits without work takes over at once; without one, the owner is back in a moment.
                (_, Some(spare)) if absent && self.was_filled => spare,
                (Some(owner), _) => owner,
                (None, _) => self.least_loaded(&active, lane),
            };
            self.owners[usize::from(lane)] = Some(next.index);
        }
        self.even_out(&active);
        for lane in 0..self.settings.lanes {
            let owner = self.owners[usize::from(lane)];
            if before[usize::from(lane)] != owner {
                self.leave_rows_of_lane(lane);
            }
        }
    }

    fn least_loaded(&self, active: &[Seat], lane: u16) -> Seat {
        let load = |seat: Seat| self.lanes_of(seat).filter(|&other| other != lane).count();
        let home = Seat::draft(lane);
        active
            .iter()
            .copied()
            .min_by_key(|&seat| (load(seat), seat != home, !self.seats.get(seat).is_live(), seat))
            // The caller has seen that there is one.
            .unwrap_or(home)
    }

    /// Moves lanes to ready seats that have two fewer than another one.
    fn even_out(&mut self, active: &[Seat]) {
        loop {
            let load = |seat: &Seat| self.lanes_of(*seat).count();
            let most = active
                .iter()
                .copied()
                .max_by_key(|seat| (load(seat), std::cmp::Reverse(*seat)));
            let least = active
                .iter()
                .copied()
                .filter(|&seat| self.seats.get(seat).status == Status::Ready)
                .min_by_key(|seat| (load(seat), *seat));
            let (Some(most), Some(least)) = (most, least) else {
                return;
            };
            if load(&most) < load(&least) + 2 {
                return;
            }
            // Towards its home, else one that is not at home, else any.
            let lanes: Vec<u16> = self.lanes_of(most).collect();
            let lane = lanes
                .iter()
                .find(|&&lane| lane == least.index)
                .or_else(|| lanes.iter().rfind(|&&lane| lane != most.index))
                .or(lanes.last());
            let Some(&lane) = lane else { return };
            self.owners[usize::from(lane)] = Some(least.index);
        }
    }

    /// Rows that lie at, or are on their way to, somebody else than their lane's owner are extracted again for the owner.
    fn leave_rows_of_lane(&mut self, lane: u16) {
        let owner = self.owner_of(lane);
        self.give_back(|row: RowId, state| {
            row.lane() == lane
                && state
                    .destination()
                    .is_some_and(|(seat, _)| Some(Seat::draft(seat)) != owner)
        });
    }
}
