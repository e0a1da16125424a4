//! How many seats stand how, so that no rule has to ask all of them with every event.
//!
//! COUNTED: whoever changes a seat does it through [`SeatMut`], which counts it again when it is let go; so the counts are
//! those of a walk over all seats at any time (`audit`).
//!
//! A rule asks how seats stand, not who they are: of a thousand seats there are a handful of [`Standing`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Role, Seat, Step};

use super::seats::{SeatState, Status};

/// Of a seat, what rules ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Standing {
    role: Role,
    /// Without the time of [`Status::Vacant`].
    status: Status,
    removed: bool,
    // Of a draft only.
    is_member: bool,
    builds_only: bool,
    is_applying: bool,
    joined: Option<Epoch>,
    state: Option<(Step, Digest)>,
}

impl Standing {
    fn is_active(&self) -> bool {
        self.status.is_active()
    }

    /// Whether it holds a state to which nothing is on its way.
    fn is_at_rest(&self) -> bool {
        self.status == Status::Ready && !self.is_applying
    }
}

/// What a seat is counted under.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    standing: Standing,
    spawn_at_ms: Option<u64>,
    joined: Option<Epoch>,
}

impl Mark {
    pub(super) fn of(seat: Seat, state: &SeatState) -> Self {
        let is_draft = seat.role == Role::Draft;
        let (status, spawn_at_ms) = match state.status {
            Status::Vacant { spawn_at_ms } => (Status::Vacant { spawn_at_ms: 0 }, Some(spawn_at_ms)),
            status => (status, None),
        };
        Self {
            standing: Standing {
                role: seat.role,
                status,
                removed: state.removed,
                is_member: is_draft && state.is_member,
                builds_only: is_draft && state.builds_only,
                is_applying: is_draft && state.applying_since_ms.is_some(),
                joined: state.joined.filter(|_| is_draft),
                state: state.state.filter(|_| is_draft),
            },
            spawn_at_ms,
            joined: state.joined,
        }
    }

    /// Whether it is a shard of a verifier that goes on.
    fn stays_in_replica(&self) -> bool {
        self.standing.role == Role::Verifier && self.standing.is_active() && !self.standing.removed
    }
}

/// The counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Census {
    /// Seats of a verifier.
    shards: u16,
    standings: BTreeMap<Standing, usize>,
    /// Vacant seats by the time at which somebody is to be started.
    vacant: BTreeSet<(u64, Seat)>,
    /// Per replica of the verifier, how many of its seats are filled, or will be, and were not asked to leave.
    staying: BTreeMap<u16, u16>,
    /// Replicas of the verifier all of whose seats stay.
    whole: usize,
}

impl Census {
    pub(super) fn new(shards: u16) -> Self {
        Self {
            shards,
            standings: BTreeMap::new(),
            vacant: BTreeSet::new(),
            staying: BTreeMap::new(),
            whole: 0,
        }
    }

    /// A seat that was counted under one mark goes under another one.
    pub(super) fn count(&mut self, seat: Seat, before: Option<Mark>, after: Option<Mark>) {
        for (mark, is_new) in [(before, false), (after, true)] {
            let Some(mark) = mark else { continue };
            let count = self.standings.entry(mark.standing).or_default();
            if is_new {
                *count += 1;
            } else {
                *count -= 1;
                if *count == 0 {
                    self.standings.remove(&mark.standing);
                }
            }
            if let Some(spawn_at_ms) = mark.spawn_at_ms {
                if is_new {
                    self.vacant.insert((spawn_at_ms, seat));
                } else {
                    self.vacant.remove(&(spawn_at_ms, seat));
                }
            }
            if mark.stays_in_replica() {
                self.count_shard(seat, is_new);
            }
        }
    }

    fn count_shard(&mut self, seat: Seat, is_new: bool) {
        let replica = seat.index / self.shards;
        let staying = self.staying.entry(replica).or_default();
        if is_new {
            *staying += 1;
            self.whole += usize::from(*staying == self.shards);
        } else {
            self.whole -= usize::from(*staying == self.shards);
            *staying -= 1;
            if *staying == 0 {
                self.staying.remove(&replica);
            }
        }
    }

    /// The replica of the verifier that a seat belongs to.
    pub(super) fn replica_of(&self, seat: Seat) -> Option<u16> {
        (seat.role == Role::Verifier).then(|| seat.index / self.shards)
    }

    fn any(&self, is: impl Fn(&Standing) -> bool) -> bool {
        self.standings.keys().any(is)
    }

    fn drafts(&self) -> impl Iterator<Item = &Standing> {
        self.standings
            .keys()
            .filter(|standing| standing.role == Role::Draft && standing.is_active())
    }

    /// Whether a draft seat, or a whole verifier, is filled, or will be, and was not asked to leave.
    pub(super) fn somebody_stays(&self, role: Role) -> bool {
        match role {
            Role::Verifier => self.whole > 0,
            Role::Draft => self.drafts().any(|draft| !draft.removed),
        }
    }

    /// Vacant seats whose time has come, ascending.
    pub(super) fn due(&self, now_ms: u64) -> Vec<Seat> {
        let mut due: Vec<Seat> = self
            .vacant
            .iter()
            .take_while(|(spawn_at_ms, _)| *spawn_at_ms <= now_ms)
            .map(|&(_, seat)| seat)
            .collect();
        due.sort_unstable();
        due
    }

    /// Whether a draft has attached and not been told what to load.
    pub(super) fn a_draft_waits_for_a_load(&self) -> bool {
        self.drafts().any(|draft| draft.status == Status::Attached)
    }

    /// The furthest step of any draft.
    pub(super) fn furthest(&self) -> Option<Step> {
        self.drafts()
            .filter_map(|draft| draft.state.map(|(step, _)| step))
            .max()
    }

    /// Whether a draft takes a state right now.
    pub(super) fn somebody_adopts(&self) -> bool {
        self.drafts()
            .any(|draft| draft.status == Status::Loading && !draft.builds_only)
    }

    /// Whether all members of the group have joined an epoch.
    pub(super) fn all_members_joined(&self, epoch: Epoch) -> bool {
        !self.any(|standing| standing.is_member && standing.joined != Some(epoch))
    }

    /// Whether a commit is on its way to a member of the group.
    pub(super) fn a_member_applies(&self) -> bool {
        self.any(|standing| standing.is_member && standing.is_applying)
    }

    /// The state of all members of the group, if all hold the same and nothing is on its way to them. `None` does not say
    /// which of it is not so.
    pub(super) fn common_state(&self) -> Option<(Step, Digest)> {
        let mut members = self.standings.keys().filter(|standing| standing.is_member);
        let first = members.next()?;
        let same = |other: &Standing| other.is_at_rest() && other.state == first.state;
        first.state.filter(|_| first.is_at_rest() && members.all(same))
    }

    /// Whether a draft could join the group at this step boundary.
    pub(super) fn somebody_joins(&self) -> bool {
        // Who still applies a step would be left out again.
        self.drafts().any(|draft| draft.is_at_rest() && !draft.is_member)
    }

    /// Whether a draft was asked to leave and nobody needs its state.
    pub(super) fn somebody_can_leave(&self) -> bool {
        let step = |draft: &Standing| draft.state.map(|(step, _)| step);
        let mut leavers = self.drafts().filter(|draft| draft.removed && !draft.is_applying);
        leavers.any(|leaver| {
            self.drafts()
                .any(|other| !other.removed && other.status == Status::Ready && step(other) >= step(leaver))
        })
    }

    /// Whether any seat is not empty for good.
    pub(super) fn somebody_is_left(&self) -> bool {
        self.any(|standing| standing.status != Status::Empty)
    }
}

/// A seat that is being changed: it is counted again when this is dropped.
pub(super) struct SeatMut<'a> {
    seat: Seat,
    before: Mark,
    state: &'a mut SeatState,
    census: &'a mut Census,
    /// Replicas of the verifier of which a seat has changed.
    stirred: &'a mut BTreeSet<u16>,
}

impl<'a> SeatMut<'a> {
    pub(super) fn new(
        seat: Seat,
        state: &'a mut SeatState,
        census: &'a mut Census,
        stirred: &'a mut BTreeSet<u16>,
    ) -> Self {
        Self {
            seat,
            before: Mark::of(seat, state),
            state,
            census,
            stirred,
        }
    }
}

impl Deref for SeatMut<'_> {
    type Target = SeatState;

    fn deref(&self) -> &SeatState {
        self.state
    }
}

impl DerefMut for SeatMut<'_> {
    fn deref_mut(&mut self) -> &mut SeatState {
        self.state
    }
}

impl Drop for SeatMut<'_> {
    fn drop(&mut self) {
        let after = Mark::of(self.seat, self.state);
        if after == self.before {
            return;
        }
        self.census.count(self.seat, Some(self.before), Some(after));
        self.stirred.extend(self.census.replica_of(self.seat));
    }
}
