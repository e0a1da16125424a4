//! Who sits where, since when, and what was last heard of them.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use eaglet_runtime::control::{Activity, Beat, BulkAddress, CoordinatorCommand, Member};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};

use super::census::{Census, Mark, SeatMut};
use super::{Command, Engine, Outcome, Phase, Settings};

/// What a seat's occupant is up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Status {
    /// Nobody; somebody will be started.
    Vacant { spawn_at_ms: u64 },
    /// A process was started and has not attached.
    Starting,
    /// Attached, not told to load yet.
    Attached,
    /// Loading weights or taking a state.
    Loading,
    /// Working.
    Ready,
    /// Told to leave for good; its process may still be there.
    Leaving,
    /// Nobody, for good: removed, given up, or the run is over.
    Empty,
}

impl Status {
    /// Whether the seat is filled, or will be.
    pub(super) fn is_active(self) -> bool {
        !matches!(self, Self::Leaving | Self::Empty)
    }
}

/// What is known of a seat.
#[derive(Clone, Debug)]
pub(super) struct SeatState {
    pub(super) generation: Generation,
    pub(super) status: Status,
    pub(super) since_ms: u64,
    pub(super) last_heard_ms: u64,
    pub(super) beat: Option<Beat>,
    pub(super) pid: u32,
    pub(super) bulk: BulkAddress,
    /// When it was started again, within the restart window.
    pub(super) restarts: VecDeque<u64>,
    pub(super) restarts_total: u32,
    /// What a rank said was wrong with it, before its process ended.
    pub(super) fault: Option<String>,
    /// What is wrong would be wrong again after a restart.
    pub(super) condemned: bool,
    /// Draft only: the state it holds.
    pub(super) state: Option<(Step, Digest)>,
    /// Draft only: since when a commit is on its way to it.
    pub(super) applying_since_ms: Option<u64>,
    /// Draft only: how often it was told to load.
    pub(super) loads: u32,
    /// Draft only: it builds its model beside a running group, or before the one that has its state; its own is none.
    pub(super) builds_only: bool,
    /// Draft only: it is given no state before this.
    pub(super) heal_after_ms: u64,
    /// Draft only: who its state comes from.
    pub(super) donor: Option<(u16, Generation)>,
    /// Its rank is to leave at the next step boundary.
    pub(super) removed: bool,
    /// Its rank was killed on request: that is no loss to count.
    pub(super) excused: bool,
    /// What the first loss within the restart window was put down to.
    pub(super) first_cause: Option<String>,
    /// The epoch of its group or team that it has joined.
    pub(super) joined: Option<Epoch>,
    /// Draft only: it is one of the members of the present epoch, from its invitation on.
    pub(super) is_member: bool,
}

impl SeatState {
    fn vacant(now_ms: u64) -> Self {
        Self {
            generation: Generation::default(),
            status: Status::Vacant { spawn_at_ms: now_ms },
            since_ms: now_ms,
            last_heard_ms: now_ms,
            beat: None,
            pid: 0,
            bulk: BulkAddress::default(),
            restarts: VecDeque::new(),
            restarts_total: 0,
            fault: None,
            condemned: false,
            state: None,
            applying_since_ms: None,
            loads: 0,
            builds_only: false,
            heal_after_ms: 0,
            donor: None,
            removed: false,
            excused: false,
            first_cause: None,
            joined: None,
            is_member: false,
        }
    }

    /// Whether the seat is filled, or will be.
    pub(super) fn is_active(&self) -> bool {
        self.status.is_active()
    }

    /// Whether its process has attached and goes on.
    pub(super) fn is_live(&self) -> bool {
        matches!(self.status, Status::Attached | Status::Loading | Status::Ready)
    }

    /// Whether its last beat told of work of its own.
    pub(super) fn is_working(&self) -> bool {
        self.beat.is_some_and(|beat| beat.activity.is_work())
    }

    pub(super) fn member(&self, seat: Seat) -> Member {
        Member {
            seat: seat.index,
            generation: self.generation,
            bulk: self.bulk.clone(),
        }
    }

    pub(super) fn vacate(&mut self, spawn_at_ms: u64, now_ms: u64) {
        self.generation = self.generation.next();
        self.status = Status::Vacant { spawn_at_ms };
        self.since_ms = now_ms;
        self.beat = None;
        self.pid = 0;
        self.fault = None;
        self.condemned = false;
        self.state = None;
        self.applying_since_ms = None;
        self.loads = 0;
        self.builds_only = false;
        self.heal_after_ms = 0;
        self.donor = None;
        self.removed = false;
        self.joined = None;
    }
}

/// All seats.
pub(super) struct Seats {
    seats: BTreeMap<Seat, SeatState>,
    census: Census,
    /// Replicas of the verifier that have changed since their teams were looked at.
    stirred: BTreeSet<u16>,
    last_tick_ms: u64,
}

impl Seats {
    pub(super) fn new(settings: &Settings, now_ms: u64) -> Self {
        let mut seats = Self {
            seats: BTreeMap::new(),
            census: Census::new(settings.shards()),
            stirred: BTreeSet::new(),
            last_tick_ms: now_ms,
        };
        for &seat in &settings.seats {
            seats.open(seat, now_ms);
        }
        seats
    }

    /// How many seats stand how.
    pub(super) fn census(&self) -> &Census {
        &self.census
    }

    /// Makes a seat, or one that is empty for good available again.
    pub(super) fn open(&mut self, seat: Seat, now_ms: u64) {
        match self.seats.entry(seat) {
            Entry::Vacant(entry) => {
                let state = entry.insert(SeatState::vacant(now_ms));
                self.census.count(seat, None, Some(Mark::of(seat, state)));
                self.stirred.extend(self.census.replica_of(seat));
            }
            Entry::Occupied(_) => {
                let mut state = self.get_mut(seat);
                if state.status == Status::Empty {
                    state.vacate(now_ms, now_ms);
                    state.restarts.clear();
                    state.first_cause = None;
                }
            }
        }
    }

    /// A replica's team is to be looked at again.
    pub(super) fn stir(&mut self, replica: u16) {
        self.stirred.insert(replica);
    }

    /// Replicas that have changed since this was last asked, ascending.
    pub(super) fn take_stirred(&mut self) -> BTreeSet<u16> {
        std::mem::take(&mut self.stirred)
    }

    /// Whether a replica's team is to be looked at again.
    pub(super) fn is_stirred(&self, replica: u16) -> bool {
        self.stirred.contains(&replica)
    }

    /// Seats of a role that are filled, or will be.
    pub(super) fn active(&self, role: Role) -> impl Iterator<Item = Seat> {
        self.iter()
            .filter(move |(seat, state)| seat.role == role && state.is_active())
            .map(|(seat, _)| seat)
    }

    pub(super) fn find(&self, seat: Seat) -> Option<&SeatState> {
        self.seats.get(&seat)
    }

    pub(super) fn get(&self, seat: Seat) -> &SeatState {
        // Seats are never taken out of the map, and every caller got its seat from it.
        &self.seats[&seat]
    }

    pub(super) fn get_mut(&mut self, seat: Seat) -> SeatMut<'_> {
        let state = self
            .seats
            .get_mut(&seat)
            .expect("seats are never taken out of the map they came from");
        SeatMut::new(seat, state, &mut self.census, &mut self.stirred)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Seat, &SeatState)> {
        self.seats.iter().map(|(&seat, state)| (seat, state))
    }

    pub(super) fn is_current(&self, seat: Seat, generation: Generation) -> bool {
        self.seats.get(&seat).is_some_and(|state| {
            state.generation == generation && !matches!(state.status, Status::Vacant { .. } | Status::Empty)
        })
    }

    pub(super) fn attached(
        &mut self,
        seat: Seat,
        generation: Generation,
        pid: u32,
        bulk: BulkAddress,
        now_ms: u64,
    ) {
        if self.is_current(seat, generation) {
            let mut state = self.get_mut(seat);
            if state.status == Status::Starting {
                state.status = Status::Attached;
                state.since_ms = now_ms;
                state.last_heard_ms = now_ms;
                state.pid = pid;
                state.bulk = bulk;
            }
        }
    }

    pub(super) fn beat(&mut self, seat: Seat, beat: Beat, now_ms: u64) {
        let mut state = self.get_mut(seat);
        state.last_heard_ms = now_ms;
        state.beat = Some(beat);
    }

    pub(super) fn fault(&mut self, seat: Seat, reason: String) {
        self.get_mut(seat).fault.get_or_insert(reason);
    }
}

/// Whether a rank's compute thread has been at one thing for too long, though its beats still come.
fn stuck(state: &SeatState, settings: &Settings) -> Option<String> {
    let beat = state
        .beat
        .filter(|_| matches!(state.status, Status::Loading | Status::Ready))?;
    let limit_ms = match beat.activity {
        // It waits for somebody else.
        Activity::Idle
        | Activity::Meeting
        | Activity::Reducing
        | Activity::AwaitingPeers
        | Activity::AwaitingCommit => {
            return None;
        }
        Activity::Loading => settings.load_timeout_ms,
        _ => settings.step_timeout_ms,
    };
    (beat.activity_age_ms > limit_ms)
        .then(|| format!("it has been {:?} for {} ms", beat.activity, beat.activity_age_ms).to_lowercase())
}

impl Engine {
    /// Starts processes for vacant seats whose time has come.
    pub(super) fn respawn(&mut self) {
        if matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let now_ms = self.now_ms;
        for seat in self.seats.census().due(now_ms) {
            // HOSTS-1
            if !self.hosts.is_here(seat) {
                continue;
            }
            let mut state = self.seats.get_mut(seat);
            state.status = Status::Starting;
            state.since_ms = now_ms;
            let generation = state.generation;
            drop(state);
            self.commands.push(Command::Spawn { seat, generation });
        }
    }

    /// First commands for a rank that has attached.
    pub(super) fn welcome(&mut self, seat: Seat, generation: Generation) {
        if !self.seats.is_current(seat, generation) || seat.role != Role::Verifier {
            return; // a draft waits until its vocabulary is known, see `group`
        }
        if self.seats.get(seat).status == Status::Attached {
            self.seats.get_mut(seat).status = Status::Loading;
            self.send(seat, CoordinatorCommand::LoadVerifier);
        }
    }

    pub(super) fn verifier_ready(&mut self, seat: Seat, contract: &eaglet_runtime::contract::Contract) {
        if let Some(difference) = self.settings.contract.difference(contract) {
            self.condemn(
                seat,
                format!(
                    "it would hand out other hidden states than this run is made for: {difference}; start a new run \
                     directory for another verifier"
                ),
            );
            return;
        }
        let now_ms = self.now_ms;
        let mut state = self.seats.get_mut(seat);
        if state.status == Status::Loading {
            state.status = Status::Ready;
            state.since_ms = now_ms;
        }
    }

    /// Looks for ranks that are silent or late.
    pub(super) fn tick(&mut self) {
        let now_ms = self.now_ms;
        let since_last_ms = now_ms - self.seats.last_tick_ms;
        self.seats.last_tick_ms = now_ms;
        // If the coordinator itself was held up, beats wait in its queues: nobody is blamed for that time.
        let held_up_ms = since_last_ms.saturating_sub(self.settings.dead_after_ms / 4);
        let mut late = Vec::new();
        // Times that move are nothing that the census counts.
        for (&seat, state) in &mut self.seats.seats {
            if held_up_ms > 0 {
                state.last_heard_ms += held_up_ms;
                state.since_ms += held_up_ms;
            }
            let silent_ms = now_ms.saturating_sub(state.last_heard_ms);
            let here_ms = now_ms.saturating_sub(state.since_ms);
            let reason = match state.status {
                Status::Vacant { .. } | Status::Empty => None,
                Status::Leaving => (here_ms > self.settings.leave_timeout_ms)
                    .then(|| format!("it did not leave within {here_ms} ms")),
                Status::Starting => (here_ms > self.settings.attach_timeout_ms)
                    .then(|| format!("it did not attach within {here_ms} ms")),
                _ if silent_ms > self.settings.dead_after_ms => {
                    Some(format!("no sign of life for {silent_ms} ms"))
                }
                Status::Loading => (here_ms > self.settings.load_timeout_ms)
                    .then(|| format!("it did not finish loading within {here_ms} ms")),
                Status::Attached | Status::Ready => None,
            };
            if let Some(since_ms) = &mut state.applying_since_ms {
                *since_ms += held_up_ms;
            }
            let reason = reason.or_else(|| stuck(state, &self.settings));
            if let Some(reason) = reason {
                late.push((seat, reason));
            }
        }
        self.step_phase.excuse(held_up_ms);
        self.forming_since_ms += held_up_ms;
        self.teams.excuse(held_up_ms);
        self.hosts.excuse(held_up_ms);
        let limit_ms = self.settings.step_timeout_ms;
        for seat in self.late_in_step() {
            late.push((
                seat,
                format!("it keeps a step waiting for more than {limit_ms} ms (supervision.step_timeout_s)"),
            ));
        }
        for seat in self.late_in_forming() {
            let limit_ms = self.settings.form_timeout_ms;
            late.push((
                seat,
                format!("it did not link up with the other draft ranks within {limit_ms} ms"),
            ));
        }
        for seat in self.late_in_teams() {
            let limit_ms = self.settings.team_timeout_ms;
            late.push((
                seat,
                format!("it did not link up with the other shards of its verifier within {limit_ms} ms"),
            ));
        }
        for (seat, reason) in late {
            // Killed once; a second kill of the same process does no harm.
            self.kill(seat, &reason);
        }
    }

    /// Tells every rank to leave.
    pub(super) fn start_leaving(&mut self) {
        self.phase = Phase::Leaving;
        self.leaving_since_ms = self.now_ms;
        let seats: Vec<(Seat, Status)> = self.seats.iter().map(|(seat, s)| (seat, s.status)).collect();
        for (seat, status) in seats {
            match status {
                Status::Vacant { .. } => self.seats.get_mut(seat).status = Status::Empty,
                Status::Starting => self.kill(seat, "the run is over"),
                Status::Attached | Status::Loading | Status::Ready => {
                    self.send(seat, CoordinatorCommand::Quit);
                }
                Status::Leaving | Status::Empty => {}
            }
        }
    }

    /// Ends the run once every rank has left, or had time enough to.
    pub(super) fn leave(&mut self) {
        if self.phase != Phase::Leaving {
            return;
        }
        if self.seats.census().somebody_is_left() {
            if self.now_ms < self.leaving_since_ms + self.settings.leave_timeout_ms {
                return;
            }
            let stayed: Vec<Seat> = self
                .seats
                .iter()
                .filter(|(_, s)| s.status != Status::Empty)
                .map(|(seat, _)| seat)
                .collect();
            for seat in stayed {
                self.kill(seat, "it did not leave in time");
            }
        }
        self.phase = Phase::Finished;
        let outcome = self.outcome.take().unwrap_or(Outcome::Failed {
            report: "the run ended without a result; this is a defect of eaglet".to_owned(),
        });
        self.commands.push(Command::Finish(outcome));
    }
}
