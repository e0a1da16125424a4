//! Machines beside the coordinator's: which of them are there, and what becomes of their seats while they are not.
//!
//! HOSTS-1: nobody is started on a host that is not there.
//! HOSTS-2: a host that stays away for longer than its timeout loses its seats, and gets them back when it joins.

use std::collections::BTreeMap;

use eaglet_runtime::ids::{Role, Seat};

use super::seats::Status;
use super::{Engine, Phase, Settings, WhenExhausted};

/// All hosts that seats are placed on, but the coordinator's own.
pub(super) struct Hosts {
    hosts: BTreeMap<String, HostState>,
    of_seats: BTreeMap<Seat, String>,
}

#[derive(Default)]
struct HostState {
    /// Since when it has not been there, if it is not.
    absent_since_ms: Option<u64>,
    /// Seats that it has lost by staying away.
    closed: Vec<Seat>,
}

impl Hosts {
    /// Nobody is there yet.
    pub(super) fn new(settings: &Settings, now_ms: u64) -> Self {
        let absent = || HostState {
            absent_since_ms: Some(now_ms),
            closed: Vec::new(),
        };
        let of_seats = settings.hosts.clone();
        Self {
            hosts: of_seats.values().map(|host| (host.clone(), absent())).collect(),
            of_seats,
        }
    }

    /// Whether a seat's host is there. A seat without a host is on the coordinator's.
    pub(super) fn is_here(&self, seat: Seat) -> bool {
        let host = self.of_seats.get(&seat).and_then(|host| self.hosts.get(host));
        host.is_none_or(|host| host.absent_since_ms.is_none())
    }

    /// The host of a seat, if it is not the coordinator's.
    pub(super) fn of(&self, seat: Seat) -> Option<&str> {
        self.of_seats.get(&seat).map(String::as_str)
    }

    fn seats_of(&self, host: &str) -> Vec<Seat> {
        let on_it = self.of_seats.iter().filter(|(_, other)| *other == host);
        on_it.map(|(&seat, _)| seat).collect()
    }

    /// Nobody is blamed for time in which the coordinator itself was held up.
    pub(super) fn excuse(&mut self, held_up_ms: u64) {
        for host in self.hosts.values_mut() {
            if let Some(since_ms) = &mut host.absent_since_ms {
                *since_ms += held_up_ms;
            }
        }
    }
}

impl Engine {
    /// A host is there: its seats are filled.
    pub(super) fn host_joined(&mut self, name: &str) {
        let now_ms = self.now_ms;
        let Some(host) = self.hosts.hosts.get_mut(name) else {
            return;
        };
        if host.absent_since_ms.take().is_none() {
            return;
        }
        let closed = std::mem::take(&mut host.closed);
        for &seat in &closed {
            // HOSTS-2. One that was filled again or removed meanwhile is left as it is.
            if self.seats.get(seat).status == Status::Empty {
                self.seats.open(seat, now_ms);
            }
        }
        self.notice(format!("host {name} has joined"));
    }

    /// A host is gone, with all that ran there.
    pub(super) fn host_lost(&mut self, name: &str, cause: &str) {
        let now_ms = self.now_ms;
        let Some(host) = self.hosts.hosts.get_mut(name) else {
            return;
        };
        if host.absent_since_ms.is_some() {
            return;
        }
        host.absent_since_ms = Some(now_ms);
        if !matches!(self.phase, Phase::Leaving | Phase::Finished) {
            self.warn(format!(
                "lost host {name}: {cause}; its ranks are started again when it joins again (`eaglet join`)"
            ));
        }
    }

    /// HOSTS-2: gives the seats up whose hosts have been away for too long.
    pub(super) fn close_absent_hosts(&mut self) {
        if matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let limit_ms = self.settings.host_timeout_ms;
        let late: Vec<String> = self
            .hosts
            .hosts
            .iter()
            .filter(|(_, host)| {
                host.absent_since_ms
                    .is_some_and(|since| since + limit_ms < self.now_ms)
            })
            .map(|(name, _)| name.clone())
            .collect();
        for name in late {
            let vacant = |seat: &Seat| matches!(self.seats.get(*seat).status, Status::Vacant { .. });
            let seats: Vec<Seat> = self.hosts.seats_of(&name).into_iter().filter(vacant).collect();
            if !seats.is_empty() {
                self.close_seats(&name, &seats);
            }
        }
    }

    fn close_seats(&mut self, name: &str, seats: &[Seat]) {
        for &seat in seats {
            self.seats.get_mut(seat).status = Status::Empty;
        }
        if let Some(host) = self.hosts.hosts.get_mut(name) {
            host.closed.extend(seats);
        }
        let seconds = self.settings.host_timeout_ms / 1000;
        let list = seats.iter().map(Seat::to_string).collect::<Vec<_>>().join(", ");
        let story = format!(
            "host {name} has not joined within {seconds} s (supervision.host_timeout_s), and {list} cannot be filled without it"
        );
        let ends_run = |role: Role| {
            let concerned = seats.iter().any(|seat| seat.role == role);
            let stops = self.settings.restarts(role).then == WhenExhausted::Stop;
            concerned && (stops || self.staying(role) == 0)
        };
        if [Role::Verifier, Role::Draft].into_iter().any(ends_run) {
            self.fail(format!(
                "{story}; run `eaglet join` there, on this run's directory, and launch again"
            ));
        } else {
            self.warn(format!(
                "{story}; the run goes on with the others, and takes it in when it joins"
            ));
        }
    }
}
