//! Which draft seat computes which lane.
//!
//! LANES: every lane has exactly one owner, an active draft seat. A lane keeps its owner as long as that seat will be filled;
//! then it goes to its home, the seat of the same number, or to the seat with the fewest lanes. Owners decide how fast a
//! step is, never what it computes.

use std::collections::BTreeMap;

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
        let mut loads = self.loads();
        if loads.is_empty() {
            return; // the run is about to end
        }
        for lane in 0..self.settings.lanes {
            let owner = self.owner_of(lane).filter(|seat| loads.contains_key(seat));
            let absent = owner.is_none_or(|seat| !self.seats.get(seat).is_live());
            // A rank that waits without work takes over at once; without one, the owner is back in a moment.
            let spare = (absent && self.was_filled)
                .then(|| {
                    loads
                        .iter()
                        .find(|&(&seat, &lanes)| lanes == 0 && self.is_ready(seat))
                })
                .flatten()
                .map(|(&seat, _)| seat);
            let next = match (owner, spare) {
                (_, Some(spare)) => spare,
                (Some(owner), None) => owner,
                (None, None) => self.least_loaded(&loads, lane),
            };
            if owner != Some(next) {
                self.move_lane(&mut loads, lane, next);
            }
        }
        self.even_out(&mut loads);
        for lane in 0..self.settings.lanes {
            let owner = self.owners[usize::from(lane)];
            if before[usize::from(lane)] != owner {
                self.leave_rows_of_lane(lane);
            }
        }
    }

    /// How many lanes each active draft seat computes.
    fn loads(&self) -> BTreeMap<Seat, usize> {
        let mut loads: BTreeMap<Seat, usize> = self.seats.active(Role::Draft).map(|seat| (seat, 0)).collect();
        for owner in self.owners.iter().flatten() {
            if let Some(lanes) = loads.get_mut(&Seat::draft(*owner)) {
                *lanes += 1;
            }
        }
        loads
    }

    fn is_ready(&self, seat: Seat) -> bool {
        self.seats.get(seat).status == Status::Ready
    }

    fn move_lane(&mut self, loads: &mut BTreeMap<Seat, usize>, lane: u16, to: Seat) {
        let from = self.owners[usize::from(lane)].replace(to.index).map(Seat::draft);
        if let Some(lanes) = from.and_then(|from| loads.get_mut(&from)) {
            *lanes -= 1;
        }
        if let Some(lanes) = loads.get_mut(&to) {
            *lanes += 1;
        }
    }

    /// Who gets a lane that belongs to nobody.
    fn least_loaded(&self, loads: &BTreeMap<Seat, usize>, lane: u16) -> Seat {
        let home = Seat::draft(lane);
        loads
            .iter()
            .min_by_key(|&(&seat, &lanes)| (lanes, seat != home, !self.seats.get(seat).is_live(), seat))
            // The caller has seen that there is one.
            .map_or(home, |(&seat, _)| seat)
    }

    /// Moves lanes to ready seats that have two fewer than another one.
    fn even_out(&mut self, loads: &mut BTreeMap<Seat, usize>) {
        loop {
            let most = loads
                .iter()
                .max_by_key(|&(&seat, &lanes)| (lanes, std::cmp::Reverse(seat)));
            let least = loads
                .iter()
                .filter(|&(&seat, _)| self.is_ready(seat))
                .min_by_key(|&(&seat, &lanes)| (lanes, seat));
            let (Some((&most, &more)), Some((&least, &fewer))) = (most, least) else {
                return;
            };
            if more < fewer + 2 {
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
            self.move_lane(loads, lane, least);
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
