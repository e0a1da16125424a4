//! TEAM: the shards of a verifier work together or not at all.
//!
//! - Epochs of a team only go up, over launches, too, and all members of one are told the same.
//! - A row goes to a team only while all of its members are linked up in its present epoch, and none of them is lost.
//! - All members of a team are given the same in the same order; first of all they compare a few states with the logits.

use std::collections::{BTreeMap, BTreeSet};

use eaglet_runtime::control::{CoordinatorCommand, RankEvent, Turn};
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat};

use super::book::Book;
use super::{Checked, broken};

const NAME: &str = "TEAM";

/// A team, as the messages tell it.
#[derive(Clone, Debug, Default)]
struct Team {
    epoch: Epoch,
    members: Vec<(u16, Generation)>,
    invited: BTreeSet<u16>,
    ready: BTreeSet<u16>,
    /// Whether a member was lost, or they were told to part.
    over: bool,
    /// Rows by their turn, with their leases; the check has none.
    rows: Vec<Option<(RowId, u64)>>,
    /// What each member was given.
    given: BTreeMap<u16, u64>,
}

/// All teams of a launch.
#[derive(Clone, Debug)]
pub struct Teams {
    shards: u16,
    teams: BTreeMap<u16, Team>,
}

impl Teams {
    /// Verifiers of so many shards, none of which is together.
    pub fn new(shards: u16) -> Self {
        Self {
            shards,
            teams: BTreeMap::new(),
        }
    }

    fn team(&mut self, seat: Seat) -> &mut Team {
        self.teams.entry(seat.index / self.shards).or_default()
    }

    /// Somebody who is present said something.
    pub fn heard(&mut self, seat: Seat, generation: Generation, event: &RankEvent) {
        if let (Role::Verifier, RankEvent::GroupReady { epoch }) = (seat.role, event) {
            let team = self.team(seat);
            if team.epoch == *epoch && team.members.contains(&(seat.index, generation)) {
                team.ready.insert(seat.index);
            }
        }
    }

    /// The engine is told that a rank is lost.
    pub fn lost(&mut self, seat: Seat) {
        if seat.role == Role::Verifier {
            self.team(seat).over = true;
        }
    }

    /// A command is about to go out to a rank.
    pub fn told(
        &mut self,
        book: &Book,
        seat: Seat,
        generation: Generation,
        command: &CoordinatorCommand,
    ) -> Checked {
        if seat.role != Role::Verifier {
            return Ok(());
        }
        match command {
            CoordinatorCommand::Abandon { epoch } => {
                let team = self.team(seat);
                if *epoch <= team.epoch {
                    return broken(
                        NAME,
                        format!("{seat} is told to leave for epoch {epoch} in {}", team.epoch),
                    );
                }
                team.over = true;
                Ok(())
            }
            CoordinatorCommand::FormTeam { epoch, members } => {
                let members: Vec<_> = members
                    .iter()
                    .map(|member| (member.seat, member.generation))
                    .collect();
                self.invited(book, seat, generation, *epoch, members)
            }
            CoordinatorCommand::CheckVerifier { turn } => self.given(seat, generation, *turn, None),
            CoordinatorCommand::Extract(extraction) => self.given(
                seat,
                generation,
                extraction.turn,
                Some((extraction.row, extraction.lease)),
            ),
            CoordinatorCommand::ExtractHeldOut(request) => {
                self.given(seat, generation, request.turn, Some((request.row, request.lease)))
            }
            _ => Ok(()),
        }
    }

    fn invited(
        &mut self,
        book: &Book,
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        members: Vec<(u16, Generation)>,
    ) -> Checked {
        let shards = self.shards;
        let team = self.team(seat);
        let first = seat.index / shards * shards;
        if !members.iter().map(|(seat, _)| *seat).eq(first..first + shards) {
            return broken(NAME, format!("{seat} is invited among {members:?}"));
        }
        if epoch > team.epoch || team.members.is_empty() {
            if epoch < Epoch::first_of(book.launches) {
                return broken(NAME, format!("epoch {epoch} of an older launch is formed"));
            }
            *team = Team {
                epoch,
                members,
                ..Team::default()
            };
        } else if epoch < team.epoch || team.members != members || team.over {
            return broken(
                NAME,
                format!("epoch {epoch} is formed as {members:?} after {team:?}"),
            );
        }
        if !team.members.contains(&(seat.index, generation)) || !team.invited.insert(seat.index) {
            return broken(
                NAME,
                format!("{seat} is invited to epoch {epoch} twice, or is another one"),
            );
        }
        Ok(())
    }

    fn given(
        &mut self,
        seat: Seat,
        generation: Generation,
        turn: Turn,
        row: Option<(RowId, u64)>,
    ) -> Checked {
        let shards = usize::from(self.shards);
        let team = self.team(seat);
        if team.over || team.epoch != turn.epoch || team.ready.len() != shards {
            return broken(
                NAME,
                format!("{seat} is given {row:?} in {turn:?}, and its team is {team:?}"),
            );
        }
        if (turn.number == 0) != row.is_none() {
            return broken(NAME, format!("{seat} is given {row:?} in {turn:?}"));
        }
        let given = team.given.entry(seat.index).or_default();
        let place = turn.number as usize;
        if !team.members.contains(&(seat.index, generation)) || *given != turn.number {
            return broken(
                NAME,
                format!("{seat} is given {row:?} in {turn:?} after {given} rows"),
            );
        }
        *given += 1;
        match team.rows.get(place) {
            Some(other) if *other == row => Ok(()),
            Some(other) => broken(
                NAME,
                format!("{seat} is given {row:?} in {turn:?}, and others {other:?}"),
            ),
            None => {
                team.rows.push(row);
                Ok(())
            }
        }
    }
}
