//! A machine beside the coordinator's, which joins, is lost and comes back: HOSTS.

use eaglet_actors::engine::Event;
use eaglet_runtime::ids::Seat;

use super::fault::Fault;
use super::invariants::{Checked, broken};
use super::world::{What, World};

/// What it is called.
pub(super) const HOST: &str = "b";
/// A host that is not late joins within this, which is less than its timeout.
const SOON_MS: u64 = 400;
/// One that is late, or was lost, within this, which may be more.
const LATE_MS: u64 = 2500;

impl World {
    /// A launch: the host has not joined it.
    pub(super) fn await_host(&mut self, launch: u32) {
        self.host_is_here = false;
        if self.plan.settings.hosts.is_empty() {
            return;
        }
        let late = !self.calm && self.dice.one_in(6);
        let wait_ms = self.dice.between(0, if late { LATE_MS } else { SOON_MS });
        self.clock.after(wait_ms, What::HostJoins(launch));
    }

    pub(super) fn host_joins(&mut self, launch: u32) -> Checked {
        if self.launch() != Some(launch) || self.host_is_here {
            return Ok(());
        }
        self.host_is_here = true;
        self.feed(Event::HostJoined {
            host: HOST.to_owned(),
        })
    }

    /// The host is lost: its ranks end themselves sooner or later, and it comes back.
    pub(super) fn lose_host(&mut self) -> Checked {
        let Some(launch) = self.launch().filter(|_| self.host_is_here) else {
            return Ok(());
        };
        self.counts.note(Fault::HostLost);
        self.host_is_here = false;
        for id in 0..self.ranks.len() {
            let rank = &self.ranks[id];
            if rank.launch == launch && rank.is_alive() && self.is_away(rank.seat) {
                let wait_ms = self.dice.below(self.plan.lease_ms);
                self.clock.after(wait_ms, What::End(id, "its host was lost"));
            }
        }
        let wait_ms = self.dice.between(1, LATE_MS);
        self.clock.after(wait_ms, What::HostJoins(launch));
        self.feed(Event::HostLost {
            host: HOST.to_owned(),
            cause: "its link ended".to_owned(),
        })
    }

    /// HOSTS-1: nobody is started on a host that is not there.
    pub(super) fn check_host_of(&self, seat: Seat) -> Checked {
        if self.is_away(seat) {
            return broken("HOSTS", format!("{seat} is started on a host that is not there"));
        }
        Ok(())
    }

    fn is_away(&self, seat: Seat) -> bool {
        self.plan.settings.hosts.contains_key(&seat) && !self.host_is_here
    }
}
