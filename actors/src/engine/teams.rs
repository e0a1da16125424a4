//! Replicas of the verifier: the ranks that hold its shards work together, as a team.
//!
//! TEAM-1: a team is given rows only while all of its members are there and linked up in its present epoch.
//! TEAM-2: what a team was given is void with its epoch: its rows go back at once, and nothing that its members say about
//! them is heard.
//! TEAM-3: all members of a team are given the same rows in the same order, numbered from 0 in each epoch.
//!
//! A member that is lost costs its team the rows in work; the other members drop them and wait for the next epoch, with
//! their weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};

use eaglet_runtime::control::{Activity, CollectiveId, CoordinatorCommand, Member, Turn};
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat};

use super::repair::Rift;
use super::seats::{SeatState, Status};
use super::{Engine, Phase};

/// A team that works gets this many times the limit for its next row.
const PATIENCE_WITH_WORK: u64 = 4;

/// How far a team is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not all members are there.
    Apart,
    /// They were told to link up.
    Forming { since_ms: u64 },
    /// They are linked up.
    Formed,
}

/// A row that a team works on.
#[derive(Clone, Debug)]
struct Lease {
    row: RowId,
    since_ms: u64,
    /// Seats that have not answered for it.
    unanswered: BTreeSet<u16>,
}

/// A replica of the verifier.
#[derive(Clone, Debug)]
pub(super) struct Team {
    pub(super) epoch: Epoch,
    pub(super) stage: Stage,
    /// Rows in work, by the number of their lease.
    leases: BTreeMap<u64, Lease>,
    /// Work given in this epoch.
    turns: u64,
    /// When it was last seen to come on.
    progress_ms: u64,
    /// What members cannot do together any more: a link, or sums over NCCL.
    rift: Option<Rift>,
    /// Stages whose slices were told the id that they meet by.
    met_by_id: BTreeSet<u16>,
    /// Epochs in a row that broke over NCCL, without a row in between.
    collective_faults: u32,
}

impl Team {
    pub(super) fn rows_in_work(&self) -> usize {
        self.leases.len()
    }

    /// Rows in work, if it is formed.
    fn load(&self) -> Option<usize> {
        (self.stage == Stage::Formed).then(|| self.rows_in_work())
    }

    /// TEAM-3
    fn next_turn(&mut self) -> Turn {
        let turn = Turn {
            epoch: self.epoch,
            number: self.turns,
        };
        self.turns += 1;
        turn
    }
}

/// All teams, by the number of the replica.
#[derive(Clone, Debug, Default)]
pub(super) struct Teams {
    by_replica: BTreeMap<u16, Team>,
    /// Those that are formed, by the rows that they have in work.
    by_load: BTreeSet<(usize, u16)>,
}

/// A team that is being changed: it is filed again when this is dropped.
struct TeamMut<'a> {
    replica: u16,
    load: Option<usize>,
    team: &'a mut Team,
    by_load: &'a mut BTreeSet<(usize, u16)>,
}

impl Deref for TeamMut<'_> {
    type Target = Team;

    fn deref(&self) -> &Team {
        self.team
    }
}

impl DerefMut for TeamMut<'_> {
    fn deref_mut(&mut self) -> &mut Team {
        self.team
    }
}

impl Drop for TeamMut<'_> {
    fn drop(&mut self) {
        let load = self.team.load();
        if load == self.load {
            return;
        }
        if let Some(load) = self.load {
            self.by_load.remove(&(load, self.replica));
        }
        if let Some(load) = load {
            self.by_load.insert((load, self.replica));
        }
    }
}

impl Teams {
    pub(super) fn get(&self, replica: u16) -> Option<&Team> {
        self.by_replica.get(&replica)
    }

    fn get_mut(&mut self, replica: u16) -> Option<TeamMut<'_>> {
        let team = self.by_replica.get_mut(&replica)?;
        Some(TeamMut {
            replica,
            load: team.load(),
            team,
            by_load: &mut self.by_load,
        })
    }

    /// A lease needs no answer any more.
    pub(super) fn forget(&mut self, replica: u16, lease: u64, now_ms: u64) {
        if let Some(mut team) = self.get_mut(replica)
            && team.leases.remove(&lease).is_some()
        {
            team.progress_ms = now_ms;
        }
    }

    /// Does not count some time in which the coordinator itself was held up.
    pub(super) fn excuse(&mut self, held_up_ms: u64) {
        for team in self.by_replica.values_mut() {
            if let Stage::Forming { since_ms } = &mut team.stage {
                *since_ms += held_up_ms;
            }
        }
    }
}

/// A row on its way to a team.
pub(super) struct Handout {
    /// The members with their occupants.
    pub(super) members: Vec<(Seat, Generation)>,
    /// When it is computed.
    pub(super) turn: Turn,
}

impl Engine {
    /// The replica that a verifier seat belongs to.
    pub(super) fn replica_of(&self, seat: Seat) -> u16 {
        seat.index / self.settings.shards()
    }

    /// Seats of a replica in the order of their shards, whether they exist or not.
    pub(super) fn seats_of_replica(&self, replica: u16) -> impl Iterator<Item = Seat> + use<> {
        let shards = self.settings.shards();
        let first = u32::from(replica) * u32::from(shards);
        // Who would lie beyond the last number does not exist.
        (first..first + u32::from(shards))
            .filter_map(|index| u16::try_from(index).ok())
            .map(Seat::verifier)
    }

    /// Replicas of which some seat exists.
    pub(super) fn replicas(&self) -> BTreeSet<u16> {
        self.seats
            .iter()
            .filter(|(seat, _)| seat.role == Role::Verifier)
            .map(|(seat, _)| self.replica_of(seat))
            .collect()
    }

    /// Whether all seats of a replica exist and satisfy something.
    pub(super) fn all_of_replica(&self, replica: u16, are: impl Fn(&SeatState) -> bool) -> bool {
        let shards = usize::from(self.settings.shards());
        self.seats_of_replica(replica)
            .filter(|&seat| self.seats.find(seat).is_some_and(&are))
            .count()
            == shards
    }

    /// What a replica is called.
    fn name_of_replica(&self, replica: u16) -> String {
        if self.settings.shards() == 1 {
            Seat::verifier(replica).to_string()
        } else {
            format!("verifier replica {replica}")
        }
    }

    /// Whether a replica works.
    pub(super) fn is_formed(&self, replica: u16) -> bool {
        let team = self.teams.by_replica.get(&replica);
        team.is_some_and(|team| team.stage == Stage::Formed)
    }

    /// Brings the members of each team together, once all are there.
    pub(super) fn advance_teams(&mut self) {
        if matches!(self.phase, Phase::Leaving | Phase::Finished) {
            return;
        }
        let (first, now_ms) = (Epoch::first_of(self.launch), self.now_ms);
        // A team comes on only when one of its seats changes, or its own stage.
        for replica in self.seats.take_stirred() {
            let team = self.teams.by_replica.entry(replica).or_insert_with(|| Team {
                epoch: first,
                stage: Stage::Apart,
                leases: BTreeMap::new(),
                turns: 0,
                progress_ms: now_ms,
                rift: None,
                met_by_id: BTreeSet::new(),
                collective_faults: 0,
            });
            let (epoch, stage) = (team.epoch, team.stage);
            match stage {
                Stage::Apart => {
                    let here = |state: &SeatState| state.status == Status::Ready && !state.removed;
                    if self.all_of_replica(replica, here) {
                        self.invite_team(replica, epoch);
                    }
                }
                Stage::Forming { .. } => {
                    if self.all_of_replica(replica, |state| state.joined == Some(epoch)) {
                        self.set_stage(replica, Stage::Formed);
                        self.check_team(replica);
                        if self.settings.shards() > 1 {
                            let shards = self.settings.shards();
                            self.notice(format!(
                                "{} is complete: {shards} shards, epoch {epoch}",
                                self.name_of_replica(replica)
                            ));
                        }
                    }
                }
                Stage::Formed => {}
            }
        }
    }

    /// The first work of each epoch: nobody trains on the states of shards that do not fit together.
    fn check_team(&mut self, replica: u16) {
        let Some(turn) = self.teams.get_mut(replica).map(|mut team| team.next_turn()) else {
            return;
        };
        for seat in self.seats_of_replica(replica) {
            self.send(seat, CoordinatorCommand::CheckVerifier { turn });
        }
    }

    fn set_stage(&mut self, replica: u16, stage: Stage) {
        let now_ms = self.now_ms;
        if let Some(mut team) = self.teams.get_mut(replica) {
            team.stage = stage;
            team.progress_ms = now_ms;
        }
        self.seats.stir(replica);
    }

    fn invite_team(&mut self, replica: u16, epoch: Epoch) {
        let seats: Vec<Seat> = self.seats_of_replica(replica).collect();
        let members: Vec<Member> = seats
            .iter()
            .map(|&seat| self.seats.get(seat).member(seat))
            .collect();
        for seat in seats {
            let members = members.clone();
            self.send(seat, CoordinatorCommand::FormTeam { epoch, members });
        }
        self.set_stage(
            replica,
            Stage::Forming {
                since_ms: self.now_ms,
            },
        );
    }

    /// TEAM-2: the present epoch of a team is over.
    pub(super) fn disband(&mut self, replica: u16) {
        let Some(mut team) = self.teams.get_mut(replica) else {
            return;
        };
        if team.stage == Stage::Apart {
            return; // nobody was told of this epoch
        }
        let epoch = team.epoch.next();
        *team = Team {
            epoch,
            stage: Stage::Apart,
            leases: BTreeMap::new(),
            turns: 0,
            progress_ms: self.now_ms,
            rift: None,
            met_by_id: BTreeSet::new(),
            collective_faults: team.collective_faults,
        };
        drop(team);
        self.seats.stir(replica);
        self.give_back(|_, state| state.is_with(replica));
        for seat in self.seats_of_replica(replica) {
            let stays = |state: &SeatState| state.status == Status::Ready && !state.removed;
            if self.seats.find(seat).is_some_and(stays) {
                self.send(seat, CoordinatorCommand::Abandon { epoch });
            }
        }
    }

    /// How many teams work.
    pub(super) fn formed_teams(&self) -> usize {
        self.teams.by_load.len()
    }

    /// A team that can take another row: the one with the fewest in work.
    ///
    /// One row in work for each stage of the pipeline, and one behind them, so that no stage waits for the coordinator.
    pub(super) fn free_team(&self) -> Option<u16> {
        let most = usize::from(self.settings.pipeline) + 1;
        let heard = |state: &SeatState| self.now_ms < state.last_heard_ms + self.settings.suspect_after_ms;
        let mut with_room = self.teams.by_load.range(..(most, 0));
        with_room
            .find(|&&(_, replica)| self.all_of_replica(replica, heard))
            .map(|&(_, replica)| replica)
    }

    /// TEAM-3: the next row of a team. To be called for one that is formed.
    pub(super) fn hand_out(&mut self, replica: u16, lease: u64, row: RowId) -> Option<Handout> {
        let members: Vec<(Seat, Generation)> = self
            .seats_of_replica(replica)
            .map(|seat| (seat, self.seats.get(seat).generation))
            .collect();
        let mut team = self.teams.get_mut(replica)?;
        let turn = team.next_turn();
        let lease_of_all = Lease {
            row,
            since_ms: self.now_ms,
            unanswered: members.iter().map(|(seat, _)| seat.index).collect(),
        };
        team.leases.insert(lease, lease_of_all);
        Some(Handout { members, turn })
    }

    /// A member is done with a row; whether all of them are. TEAM-2: `None` if the lease is over.
    pub(super) fn answered(&mut self, seat: Seat, lease: u64) -> Option<bool> {
        let replica = self.replica_of(seat);
        let mut team = self.teams.get_mut(replica)?;
        let known = team.leases.get_mut(&lease)?;
        if !known.unanswered.remove(&seat.index) {
            return None; // said twice
        }
        let all = known.unanswered.is_empty();
        team.progress_ms = self.now_ms;
        if all {
            team.leases.remove(&lease);
            team.collective_faults = 0;
        }
        Some(all)
    }

    /// Two members cannot reach each other any more. Most often one of them has just died, and its end is on the way.
    pub(super) fn team_link_broken(&mut self, seat: Seat, from: Seat, sender: Generation, epoch: Epoch) {
        let (replica, now_ms) = (self.replica_of(seat), self.now_ms);
        if replica != self.replica_of(from) {
            return;
        }
        let Some(team) = self.teams.by_replica.get_mut(&replica) else {
            return;
        };
        // FENCE: links of an older epoch are gone with it.
        if team.epoch == epoch && team.stage != Stage::Apart {
            team.rift
                .get_or_insert_with(|| Rift::of_link(from, sender, epoch, now_ms));
        }
    }

    /// A member's sums over NCCL failed. Most often another member has just died, as above.
    pub(super) fn team_collective_broken(
        &mut self,
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        reason: &str,
    ) {
        let (replica, now_ms) = (self.replica_of(seat), self.now_ms);
        let Some(team) = self.teams.by_replica.get_mut(&replica) else {
            return;
        };
        // FENCE: collectives of an older epoch are aborted. The others see the same a little later.
        if team.epoch == epoch && team.stage != Stage::Apart {
            team.rift
                .get_or_insert_with(|| Rift::of_collective(seat, generation, epoch, reason, now_ms));
        }
    }

    /// The first slice of a stage has made what the others need to meet it over NCCL: it is passed on once an epoch.
    pub(super) fn team_collective_id(&mut self, seat: Seat, epoch: Epoch, id: &CollectiveId) {
        let (replica, slices) = (self.replica_of(seat), self.settings.tensor.max(1));
        let shard = seat.index % self.settings.shards();
        let (stage, slice) = (shard / slices, shard % slices);
        let Some(team) = self.teams.by_replica.get_mut(&replica) else {
            return;
        };
        // FENCE: an id of an older epoch, the same one again, or somebody else's is not heard.
        let is_present = team.epoch == epoch && team.stage != Stage::Apart;
        if !is_present || slice != 0 || !team.met_by_id.insert(stage) {
            return;
        }
        for beside in 1..slices {
            let id = id.clone();
            let to = Seat::verifier(seat.index + beside);
            self.send(to, CoordinatorCommand::Meet { epoch, id });
        }
    }

    /// Forms teams again whose members could not reach each other and are still alive a while later, and those that do
    /// not come on though nobody works: a message was lost.
    pub(super) fn mend_teams(&mut self) {
        let now_ms = self.now_ms;
        let mut broken = Vec::new();
        for (&replica, team) in &mut self.teams.by_replica {
            if let Some(rift) = team.rift.take_if(|rift| rift.is_due(now_ms)) {
                broken.push((replica, rift));
            }
        }
        for (replica, rift) in broken {
            let absent = self.absent_from_meeting(replica);
            if absent.is_empty() {
                let Some(team) = self.teams.by_replica.get_mut(&replica) else {
                    continue;
                };
                let faults = &mut team.collective_faults;
                if let Some(report) = rift.count(faults, "row", "verifier", "verifier.collective") {
                    self.fail(report);
                    return;
                }
            }
            for seat in absent {
                // NCCL is not to blame for who never came.
                self.kill(seat, "it did not meet the other slices of its verifier over NCCL");
            }
            self.warn(format!(
                "{}; {} is linked up again",
                rift.what,
                self.name_of_replica(replica)
            ));
            self.disband(replica);
        }
        let limit_ms = self.settings.step_timeout_ms;
        let idle: Vec<(u16, RowId, u64)> = self
            .teams
            .by_replica
            .iter()
            .filter_map(|(&replica, team)| {
                let works = self
                    .seats_of_replica(replica)
                    .any(|seat| self.seats.find(seat).is_some_and(SeatState::is_working));
                let patience = if works { PATIENCE_WITH_WORK } else { 1 };
                let since = |lease: &Lease| now_ms.saturating_sub(lease.since_ms.max(team.progress_ms));
                let late = team
                    .leases
                    .values()
                    .find(|lease| since(lease) > patience * limit_ms)?;
                Some((replica, late.row, since(late)))
            })
            .collect();
        for (replica, row, late_ms) in idle {
            self.warn(format!(
                "nothing was heard of the {row} from {} for {late_ms} ms (supervision.step_timeout_s); it is extracted \
                 again",
                self.name_of_replica(replica)
            ));
            self.disband(replica);
        }
    }

    /// Members of a team that is being formed whom others wait for, and who do not come.
    fn absent_from_meeting(&self, replica: u16) -> Vec<Seat> {
        let Some(team) = self.teams.by_replica.get(&replica) else {
            return Vec::new();
        };
        if !matches!(team.stage, Stage::Forming { .. }) {
            return Vec::new();
        }
        let activity = |seat: Seat| self.seats.get(seat).beat.map(|beat| beat.activity);
        let missing = self.seats_of_replica(replica).filter(|&seat| {
            self.seats.get(seat).joined != Some(team.epoch) && activity(seat) != Some(Activity::Meeting)
        });
        missing.collect()
    }

    /// Members that keep the others waiting for their team to form.
    pub(super) fn late_in_teams(&self) -> Vec<Seat> {
        let mut late = Vec::new();
        for (&replica, team) in &self.teams.by_replica {
            let Stage::Forming { since_ms } = team.stage else {
                continue;
            };
            if self.now_ms <= since_ms + self.settings.team_timeout_ms {
                continue;
            }
            let missing: Vec<Seat> = self
                .seats_of_replica(replica)
                .filter(|&seat| self.seats.get(seat).joined != Some(team.epoch))
                .collect();
            late.extend(self.to_blame(missing));
        }
        late
    }
}
