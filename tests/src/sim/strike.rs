//! What each fault does when its time has come.

use eaglet_actors::engine::{Event, SeatChange};
use eaglet_runtime::ids::{Role, Seat};

use super::fault::Fault;
use super::invariants::Checked;
use super::network::Path;
use super::rank::{Life, RankId};
use super::world::{What, World};

impl World {
    /// Puts the next fault of a kind into the queue.
    pub(super) fn next_fault(&mut self, fault: Fault, every_ms: u64) {
        let wait_ms = 1 + self.dice.below(2 * every_ms);
        self.clock.after(wait_ms, What::Fault(fault, every_ms));
    }

    /// A fault happens.
    pub(super) fn strike(&mut self, fault: Fault) -> Checked {
        match fault {
            Fault::CoordinatorCrashed => {
                if self.coordinator.is_some() && self.crash_in.is_none() {
                    // Between any two of the commands to come.
                    self.crash_in = Some(self.dice.below(8));
                }
                Ok(())
            }
            Fault::CoordinatorStalled => {
                let until_ms = self.clock.now_ms() + self.dice.between(50, 1500);
                if let Some(coordinator) = &mut self.coordinator {
                    coordinator.stalled_until_ms = until_ms;
                    self.counts.note(fault);
                }
                Ok(())
            }
            Fault::SampleRetried => self.retry_a_sample(),
            Fault::SourceAdded => self.add_file(),
            Fault::SeatAdded | Fault::SeatRemoved | Fault::SeatRestarted => self.change_a_seat(fault),
            Fault::HostLost => self.lose_host(),
            Fault::Drained => {
                if self.coordinator.is_none() {
                    return Ok(());
                }
                self.counts.note(fault);
                self.feed(Event::Drain)
            }
            Fault::Stopped => {
                if self.coordinator.is_some() {
                    self.counts.note(fault);
                    self.kill_all();
                    self.coordinator = None;
                    self.disk.close();
                    let wait_ms = self.dice.between(10, 200);
                    self.clock.after(wait_ms, What::Launch);
                }
                Ok(())
            }
            Fault::CheckpointVanishedLive => {
                if self.disk.has_checkpoints() {
                    self.counts.note(fault);
                    self.disk.lose_checkpoint(&mut self.dice);
                }
                Ok(())
            }
            _ => {
                self.strike_a_rank(fault);
                Ok(())
            }
        }
    }

    fn some_rank(&mut self) -> Option<RankId> {
        let alive: Vec<RankId> = (0..self.ranks.len())
            .filter(|&id| self.ranks[id].is_alive())
            .collect();
        (!alive.is_empty()).then(|| alive[self.dice.place(alive.len())])
    }

    fn strike_a_rank(&mut self, fault: Fault) {
        let Some(id) = self.some_rank() else { return };
        let now_ms = self.clock.now_ms();
        match fault {
            Fault::RankKilled => {
                self.counts.note(fault);
                self.die(id, "killed");
            }
            Fault::RankKilledInside => {
                let effects = self.dice.below(7) as u32;
                self.ranks[id].effects_left.get_or_insert(effects);
            }
            Fault::RankSlow => {
                self.counts.note(fault);
                self.ranks[id].slowness = self.dice.between(2, 120);
            }
            Fault::RankHung => {
                self.counts.note(fault);
                self.ranks[id].stopped_until_ms = now_ms + self.dice.between(30, 1800);
            }
            Fault::RankStuck => {
                self.counts.note(fault);
                self.ranks[id].stuck_until_ms = now_ms + self.dice.between(100, 3000);
            }
            Fault::Partition | Fault::PartitionOneWay => {
                let until_ms = now_ms + self.dice.between(20, 1200);
                let up = fault == Fault::Partition || self.dice.one_in(2);
                let rank = &mut self.ranks[id];
                if rank.life != Life::Up {
                    return;
                }
                self.counts.note(fault);
                if up {
                    rank.up.blocked_until_ms = until_ms;
                }
                if fault == Fault::Partition || !up {
                    rank.down.blocked_until_ms = until_ms;
                }
                if self.dice.one_in(3) {
                    self.clock.at(until_ms, What::StreamBroken(id));
                }
            }
            Fault::PathBlocked => {
                let Some(other) = self.some_rank().filter(|&other| other != id) else {
                    return;
                };
                self.counts.note(fault);
                let until_ms = now_ms + self.dice.between(20, 1200);
                let breaks = self.dice.one_in(2);
                self.paths.push(Path {
                    a: id,
                    b: other,
                    until_ms,
                    breaks,
                });
            }
            Fault::LinkBroken if self.break_a_link(id) => self.counts.note(fault),
            Fault::CollectiveTorn if self.tear_a_meeting(id) => self.counts.note(fault),
            _ => {}
        }
    }

    fn change_a_seat(&mut self, fault: Fault) -> Checked {
        let Some(coordinator) = &self.coordinator else {
            return Ok(());
        };
        let seats: Vec<Seat> = coordinator.occupants.keys().copied().collect();
        let role = self.dice.pick(&[Role::Verifier, Role::Draft]);
        let change = match fault {
            // A cluster of this size is never needed larger.
            Fault::SeatAdded if seats.len() > 9 => return Ok(()),
            Fault::SeatAdded => SeatChange::Add { role, threads: 1 },
            _ if seats.is_empty() => return Ok(()),
            Fault::SeatRemoved => SeatChange::Remove {
                seat: seats[self.dice.place(seats.len())],
            },
            _ => SeatChange::Restart {
                seat: seats[self.dice.place(seats.len())],
            },
        };
        self.counts.note(fault);
        self.tickets += 1;
        let ticket = self.tickets;
        self.feed(Event::ChangeSeat { ticket, change })
    }
}
