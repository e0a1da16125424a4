//! When the draft replicas form an epoch: the owners of all lanes, all at the same step with the same digest.
//!
//! A replica without a state takes it from a healthy peer; only if nobody has one, from the latest checkpoint, and the
//! journal's steps after it are then done again with the same batches. A replica that joins a running group builds its
//! model first, and takes its state at the next step boundary.
//!
//! HANDOVER: over links a replica takes its state before it is invited. Over NCCL it is invited without one: all meet, the
//! donor's state goes round, and the epoch is formed when those who needed it hold that very state. Until then they
//! count as holding none, whatever they held before.

use eaglet_runtime::control::{Activity, CollectiveId, CoordinatorCommand, DraftOrigin, Handover};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};

use super::seats::{SeatState, Status};
use super::steps::StepPhase;
use super::{Engine, Phase};

/// Wait before a state that could not be sent is sent again.
const STATE_RETRY_MS: u64 = 500;

impl Engine {
    /// Members of the present epoch, from their invitation on.
    pub(super) fn members(&self) -> impl Iterator<Item = Seat> + use<> {
        self.members.clone().into_iter().map(Seat::draft)
    }

    /// Whether a draft seat is one of them.
    pub(super) fn is_member(&self, seat: Seat) -> bool {
        // Ascending.
        self.members.binary_search(&seat.index).is_ok()
    }

    fn enroll(&mut self, members: Vec<u16>) {
        for before in std::mem::replace(&mut self.members, members) {
            self.seats.get_mut(Seat::draft(before)).is_member = false;
        }
        for &index in &self.members {
            self.seats.get_mut(Seat::draft(index)).is_member = true;
        }
    }

    /// A draft replica is gone: if it was a member, what belongs to the present epoch is void.
    pub(super) fn draft_lost(&mut self, seat: Seat, generation: Generation) {
        let orphans: Vec<Seat> = self
            .seats
            .iter()
            .filter(|(_, state)| {
                // Who has left since, or is about to, needs no state any more.
                state.status == Status::Loading && state.donor == Some((seat.index, generation))
            })
            .map(|(seat, _)| seat)
            .collect();
        for orphan in orphans {
            // Its donor died: it needs another one.
            let mut state = self.seats.get_mut(orphan);
            state.donor = None;
            state.status = Status::Attached;
        }
        if self.is_member(seat) {
            self.restart_epoch();
        }
    }

    /// Drops the step in flight; the group is to be formed again.
    pub(super) fn restart_epoch(&mut self) {
        self.epoch = self.epoch.next();
        self.formed = false;
        self.has_id = false;
        self.enroll(Vec::new());
        self.handover = None;
        self.step_phase = StepPhase::Idle;
        let epoch = self.epoch;
        let ready: Vec<Seat> = self
            .seats
            .active(Role::Draft)
            .filter(|&seat| self.seats.get(seat).status == Status::Ready)
            .collect();
        for seat in ready {
            self.send(seat, CoordinatorCommand::Abandon { epoch });
        }
    }

    pub(super) fn draft_ready(&mut self, seat: Seat, load: u32, step: Step, digest: Digest) {
        // FENCE: an answer to an earlier load, or the same one again, is not heard.
        let state = self.seats.get(seat);
        if state.status != Status::Loading || state.loads != load {
            return;
        }
        let is_state = !state.builds_only;
        if let Some(known) = self
            .latest_checkpoint()
            .filter(|known| is_state && known.step == step && known.state != digest)
        {
            let folder = known.folder.display().to_string();
            self.fail(format!(
                "the state of step {step} in {folder} is not the one that this run saved; put the right checkpoint back"
            ));
            return;
        }
        let now_ms = self.now_ms;
        let mut state = self.seats.get_mut(seat);
        state.status = Status::Ready;
        state.since_ms = now_ms;
        state.donor = None;
        // Who only built its model holds nothing that counts.
        state.state = is_state.then_some((step, digest));
    }

    /// A donor says that its state did not get through: it is asked for again.
    pub(super) fn state_not_sent(
        &mut self,
        donor: Seat,
        generation: Generation,
        to: (u16, Generation),
        reason: &str,
    ) {
        let seat = Seat::draft(to.0);
        if !self.seats.is_current(seat, to.1) {
            return;
        }
        let now_ms = self.now_ms;
        let mut state = self.seats.get_mut(seat);
        if state.donor == Some((donor.index, generation)) && state.status == Status::Loading {
            state.donor = None;
            state.status = Status::Attached;
            // What failed at once would fail at once again.
            state.heal_after_ms = now_ms + STATE_RETRY_MS;
            drop(state);
            self.warn(format!(
                "{donor} could not send its state to {seat}: {reason}; it is sent again"
            ));
        }
    }

    pub(super) fn group_ready(&mut self, seat: Seat, epoch: Epoch) {
        // HANDOVER
        if !self.takes_state(seat, epoch) {
            self.seats.get_mut(seat).joined = Some(epoch);
        }
    }

    /// Whether the present epoch has a state for a seat.
    fn takes_state(&self, seat: Seat, epoch: Epoch) -> bool {
        let takes = |handover: &Handover| handover.receivers.contains(&seat.index);
        seat.role == Role::Draft && epoch == self.epoch && self.handover.as_ref().is_some_and(takes)
    }

    /// A member holds the state that went round.
    pub(super) fn state_taken(&mut self, seat: Seat, epoch: Epoch, step: Step, digest: Digest) {
        // FENCE: states of an older epoch, those that nobody was to take, and what is said twice, after steps perhaps, are none.
        let occupant = self.seats.get(seat);
        let is_news = occupant.status == Status::Ready && occupant.joined != Some(epoch);
        if !self.takes_state(seat, epoch) || !is_news {
            return;
        }
        let given = self
            .handover
            .as_ref()
            .map(|handover| (handover.step, handover.state));
        if given != Some((step, digest)) {
            self.seats.get_mut(seat).status = Status::Loading;
            self.kill(seat, "the state that it has taken is not the one that was given");
            return;
        }
        let mut state = self.seats.get_mut(seat);
        state.state = given;
        state.joined = Some(epoch);
    }

    /// The first member has made what the others need to meet it: it is passed on once an epoch.
    pub(super) fn collective_id(&mut self, seat: Seat, epoch: Epoch, id: &CollectiveId) {
        if seat.role == Role::Verifier {
            self.team_collective_id(seat, epoch, id);
            return;
        }
        // FENCE: an id of an older epoch, the same one again, or somebody else's is not heard.
        let is_first = self.members().next() == Some(seat);
        if epoch != self.epoch || !is_first || self.has_id {
            return;
        }
        self.has_id = true;
        for member in self.members().skip(1) {
            let id = id.clone();
            self.send(member, CoordinatorCommand::Meet { epoch, id });
        }
    }

    /// Gives states to those without one, and forms the epoch once all who are needed agree.
    pub(super) fn advance_group(&mut self) {
        if !self.prepared || matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        self.heal();
        if self.formed {
            return;
        }
        if self.members.is_empty() {
            self.remove_leavers();
            self.assign_lanes();
            self.invite();
        }
        let epoch = self.epoch;
        if !self.members.is_empty() && self.seats.census().all_members_joined(epoch) {
            self.formed = true;
            self.was_filled = true;
            self.step_phase = StepPhase::Idle;
            let step = self.common_state().map_or(self.committed, |(step, _)| step);
            let count = self.members.len();
            let replicas = if count == 1 { "replica" } else { "replicas" };
            self.notice(format!("epoch {epoch}: {count} draft {replicas} at step {step}"));
        }
    }

    /// Invites the owners of all lanes, and whoever else is at the same state, once all owners are.
    fn invite(&mut self) {
        let owners: Option<Vec<u16>> = self.owners.iter().copied().collect();
        let Some(owners) = owners else { return };
        // Who takes a state right now is waited for: it would be behind again a step later.
        if self.seats.census().somebody_adopts() {
            return;
        }
        let common = if self.settings.broadcasts_state {
            self.state_of_most(&owners)
        } else {
            self.agreed_state(owners.iter().copied().map(Seat::draft))
        };
        let Some(common) = common else { return };
        // SAME: whoever is ready at this step with other weights was spoilt on the way.
        let spoilt: Vec<Seat> = self
            .seats
            .active(Role::Draft)
            .filter(|&seat| {
                let state = self.seats.get(seat);
                let at = state.state.filter(|_| state.status == Status::Ready);
                at.is_some_and(|(step, digest)| step == common.0 && digest != common.1)
            })
            .collect();
        for seat in spoilt {
            self.seats.get_mut(seat).state = None;
            self.seats.get_mut(seat).status = Status::Loading;
            self.kill(seat, "its weights are not those of the others at the same step");
        }
        let broadcasts = self.settings.broadcasts_state;
        let here: Vec<Seat> = self
            .seats
            .active(Role::Draft)
            .filter(|&seat| {
                let state = self.seats.get(seat);
                state.status == Status::Ready
                    && state.applying_since_ms.is_none()
                    && (broadcasts || state.state == Some(common))
            })
            .collect();
        self.hand_over(&here, common);
        self.enroll(here.iter().map(|seat| seat.index).collect());
        self.forming_since_ms = self.now_ms;
        let epoch = self.epoch;
        let members: Vec<_> = here
            .iter()
            .map(|&seat| self.seats.get(seat).member(seat))
            .collect();
        for seat in here {
            self.send(
                seat,
                CoordinatorCommand::FormGroup {
                    epoch,
                    members: members.clone(),
                    owners: owners.clone(),
                    handover: self.handover.clone(),
                },
            );
        }
    }

    /// HANDOVER: the latest state that some replica holds, once the owners of all lanes are there to meet.
    fn state_of_most(&mut self, owners: &[u16]) -> Option<(Step, Digest)> {
        let owners = || owners.iter().copied().map(Seat::draft);
        let is_free = |seat: Seat| {
            let state = self.seats.get(seat);
            state.status == Status::Ready && state.applying_since_ms.is_none()
        };
        let (step, best) = self.best_state()?;
        if !is_free(best) || !owners().all(is_free) {
            return None;
        }
        let at_step = |seat: &Seat| self.seats.get(*seat).state.is_some_and(|(at, _)| at == step);
        let holders: Vec<Seat> = owners().filter(at_step).collect();
        if holders.is_empty() {
            return self.seats.get(best).state;
        }
        self.agreed_state(holders.into_iter())
    }

    /// HANDOVER: decides whose state goes to whom among those who are invited.
    fn hand_over(&mut self, here: &[Seat], common: (Step, Digest)) {
        let (holders, receivers): (Vec<Seat>, Vec<Seat>) = here
            .iter()
            .partition(|&&seat| self.seats.get(seat).state == Some(common));
        for &seat in &receivers {
            self.seats.get_mut(seat).state = None;
        }
        let donor = holders.first().filter(|_| !receivers.is_empty());
        self.handover = donor.map(|donor| Handover {
            donor: donor.index,
            receivers: receivers.iter().map(|seat| seat.index).collect(),
            step: common.0,
            state: common.1,
        });
    }

    /// Members that keep the others waiting for the epoch to form.
    pub(super) fn late_in_forming(&self) -> Vec<Seat> {
        if self.formed || self.now_ms <= self.forming_since_ms + self.settings.form_timeout_ms {
            return Vec::new();
        }
        let missing = self
            .members()
            .filter(|&seat| self.seats.get(seat).joined != Some(self.epoch))
            .collect();
        self.to_blame(missing)
    }

    /// Of members that are not there in time, those that are the cause.
    pub(super) fn to_blame(&self, missing: Vec<Seat>) -> Vec<Seat> {
        let waits = |seat: &Seat| {
            let beat = self.seats.get(*seat).beat;
            beat.is_some_and(|beat| beat.activity == Activity::Meeting)
        };
        // Whoever waits for another one to meet it is not the cause, as long as there is another one.
        let late: Vec<Seat> = missing.iter().copied().filter(|seat| !waits(seat)).collect();
        if late.is_empty() { missing } else { late }
    }

    /// The state that all members hold, if they do and nothing is on its way to them.
    pub(super) fn common_state(&mut self) -> Option<(Step, Digest)> {
        let common = self.seats.census().common_state();
        if common.is_some() {
            return common;
        }
        // Who differs first decides what is done.
        let members: Vec<Seat> = self.members().collect();
        self.agreed_state(members.into_iter())
    }

    fn agreed_state(&mut self, seats: impl Iterator<Item = Seat>) -> Option<(Step, Digest)> {
        let mut common = None;
        for seat in seats {
            let state = self.seats.get(seat);
            if state.status != Status::Ready || state.applying_since_ms.is_some() {
                return None;
            }
            let here = state.state?;
            match common {
                None => common = Some(here),
                Some(other) if other == here => {}
                Some((step, _)) if step != here.0 => return None,
                Some(_) => {
                    self.dissolve("draft replicas hold different weights at the same step");
                    return None;
                }
            }
        }
        common
    }

    /// SAME is violated and nobody can tell who is right: all replicas go back to the latest checkpoint.
    pub(super) fn dissolve(&mut self, why: &str) {
        self.warn(format!(
            "{why}; all of them are started again from the latest checkpoint"
        ));
        let seats: Vec<Seat> = self.seats.active(Role::Draft).collect();
        for seat in seats {
            let mut state = self.seats.get_mut(seat);
            state.state = None;
            if state.status == Status::Ready {
                state.status = Status::Loading;
            }
            let is_live = state.is_live();
            drop(state);
            if is_live {
                self.kill(seat, why);
            }
        }
    }

    /// Whether somebody could join at this step boundary, or wants to leave and can.
    pub(super) fn membership_changes(&self) -> bool {
        let census = self.seats.census();
        census.somebody_joins() || census.somebody_can_leave()
    }

    /// Whether a draft rank was asked to leave and nobody needs its state.
    pub(super) fn can_leave(&self, seat: Seat) -> bool {
        let reached = |seat: &SeatState| seat.state.map(|(step, _)| step);
        let leaver = self.seats.get(seat);
        leaver.removed
            && leaver.applying_since_ms.is_none()
            && self.seats.active(Role::Draft).any(|other| {
                let state = self.seats.get(other);
                !state.removed && state.status == Status::Ready && reached(state) >= reached(leaver)
            })
    }

    /// Lets go of draft ranks that were asked to leave; called between two epochs.
    fn remove_leavers(&mut self) {
        let leavers: Vec<Seat> = self
            .seats
            .active(Role::Draft)
            .filter(|&seat| self.can_leave(seat))
            .collect();
        for seat in leavers {
            self.dismiss(seat);
        }
    }

    fn heal(&mut self) {
        let is_settled = self.formed || !self.members.is_empty();
        if is_settled && !self.seats.census().a_draft_waits_for_a_load() {
            return;
        }
        let seats: Vec<Seat> = self.seats.active(Role::Draft).collect();
        let saved = self.latest_checkpoint().map(|known| known.step);
        let best = self.best_state();
        let broadcasts = self.settings.broadcasts_state;
        for seat in seats {
            let state = self.seats.get(seat);
            let behind = !self.formed
                && self.members.is_empty()
                && state.status == Status::Ready
                && state.applying_since_ms.is_none()
                && match (state.state, best) {
                    // HANDOVER
                    (_, Some(_)) if broadcasts => false,
                    (Some((step, _)), Some((top, _))) => step < top,
                    (Some((step, _)), None) => saved.is_some_and(|saved| step < saved),
                    (None, _) => true,
                };
            let waits = self.now_ms < state.heal_after_ms;
            if waits || state.status != Status::Attached && !behind {
                continue;
            }
            // A running group is not held up: the newcomer builds its model, and takes a state at the next boundary.
            let builds_only = is_settled || broadcasts && best.is_some();
            let origin = match best {
                _ if builds_only => DraftOrigin::Later,
                Some((_, donor)) if donor != seat => {
                    let to = self.seats.get(seat).member(seat);
                    let from = self.seats.get(donor).member(donor);
                    self.seats.get_mut(seat).donor = Some((donor.index, from.generation));
                    self.send(donor, CoordinatorCommand::SendState { to });
                    DraftOrigin::Peer(from)
                }
                _ => match self.latest_checkpoint() {
                    Some(checkpoint) => DraftOrigin::Checkpoint(checkpoint.folder.clone()),
                    None => DraftOrigin::Initial,
                },
            };
            let now_ms = self.now_ms;
            let mut state = self.seats.get_mut(seat);
            state.status = Status::Loading;
            state.since_ms = now_ms;
            state.state = None;
            state.joined = None;
            state.builds_only = builds_only;
            state.loads += 1;
            let load = state.loads;
            drop(state);
            let vocabulary = self.vocabulary.clone();
            let contract = self.settings.contract.clone();
            self.send(
                seat,
                CoordinatorCommand::LoadDraft {
                    load,
                    vocabulary,
                    contract,
                    origin,
                },
            );
        }
    }

    /// The latest step that a replica holds a state of, and the first of those who do.
    fn best_state(&self) -> Option<(Step, Seat)> {
        // Steps before the latest checkpoint are not done again: whoever is left behind it reads it, too.
        let saved = self.latest_checkpoint().map(|known| known.step);
        self.seats
            .active(Role::Draft)
            .filter(|&seat| self.seats.get(seat).status == Status::Ready)
            .filter_map(|seat| self.seats.get(seat).state.map(|(step, _)| (step, seat)))
            .filter(|&(step, _)| saved.is_none_or(|saved| step >= saved))
            .max_by_key(|&(step, seat)| (step, std::cmp::Reverse(seat)))
    }
}
