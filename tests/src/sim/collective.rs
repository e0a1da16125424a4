//! NCCL as ranks see it: a meeting of all members or of none, sums that need all of them, and no word when one is gone.
//!
//! As with the library, whoever is left waits until it ends its own part, or until its own deadline; only sometimes it is
//! told of an error.

use std::collections::BTreeMap;

use eaglet_runtime::control::CollectiveId;
use eaglet_runtime::ids::Step;

use super::fault::Fault;
use super::invariants::Broken;
use super::rank::{Input, RankId};
use super::verifier::Residual;
use super::weights::{ELEMENTS, Weights, sum};
use super::world::{What, World};

/// Number of a meeting: what an id says.
pub type MeetingId = u64;

/// What a rank hears of its meeting.
#[derive(Clone, Debug)]
pub enum Word {
    /// All are there.
    Met,
    /// They were to be there by now.
    MeetingLate,
    /// The state has gone round.
    HandedOver(Weights),
    /// It was to be there by now.
    HandoverLate,
    /// The mean gradient of a step.
    Summed {
        /// The step.
        step: Step,
        /// Its values.
        values: [f32; ELEMENTS],
    },
    /// It was to be there by now.
    SumLate {
        /// The step.
        step: Step,
    },
    /// What the slices of a stage hold, in their order.
    SlicesSummed {
        /// The row, by its number in the work of the team.
        turn: u64,
        /// What each holds.
        residuals: Vec<Residual>,
    },
    /// It was to be there by now.
    SlicesLate {
        /// The row.
        turn: u64,
    },
    /// The library says that something failed.
    Torn,
}

/// How far a rank is with the meeting of its epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attendance {
    /// The id is awaited.
    Awaited,
    /// The others are.
    Joined(MeetingId),
    /// All are here, and a state goes round.
    Passing(MeetingId),
    /// Work may begin.
    Met(MeetingId),
}

impl Attendance {
    /// The meeting, once it is known.
    pub(super) fn number(self) -> Option<MeetingId> {
        match self {
            Self::Awaited => None,
            Self::Joined(number) | Self::Passing(number) | Self::Met(number) => Some(number),
        }
    }
}

/// Lanes with their gradients.
pub type Lanes = Vec<(u16, [f32; ELEMENTS])>;

/// The members of an epoch.
#[derive(Debug, Default)]
pub struct Meeting {
    present: Vec<RankId>,
    /// Somebody is gone: nothing comes to its end any more.
    is_torn: bool,
    /// Who takes part in the handover of a state, and what the donor gives.
    passing: Vec<RankId>,
    given: Option<Weights>,
    /// Of the present row, what each slice holds.
    slices: BTreeMap<RankId, (u64, Residual)>,
    /// Of the present step, what each member has brought.
    brought: BTreeMap<RankId, (Step, Lanes)>,
}

/// What the control plane carries.
pub fn id_of(meeting: MeetingId) -> CollectiveId {
    let mut bytes = [0; CollectiveId::BYTES];
    bytes[..8].copy_from_slice(&meeting.to_le_bytes());
    CollectiveId::new(&bytes)
}

/// The meeting of an id.
pub fn meeting_of(id: &CollectiveId) -> Option<MeetingId> {
    let bytes = id.bytes()?;
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[..8]);
    Some(MeetingId::from_le_bytes(number))
}

impl World {
    /// A new meeting.
    pub(super) fn make_meeting(&mut self) -> MeetingId {
        self.meetings.push(Meeting::default());
        self.meetings.len() as MeetingId - 1
    }

    fn say_word(&mut self, id: RankId, meeting: MeetingId, word: Word, wait_ms: u64) {
        let input = Input::Collective { meeting, word };
        self.clock.after(wait_ms, What::Word(id, Box::new(input)));
    }

    /// A rank begins to meet the others.
    pub(super) fn join(&mut self, id: RankId, meeting: MeetingId, ranks: usize) {
        let patience_ms = self.plan.settings.form_timeout_ms * 2 / 3;
        self.say_word(id, meeting, Word::MeetingLate, patience_ms);
        let Some(group) = self.meetings.get_mut(meeting as usize) else {
            return;
        };
        group.present.push(id);
        if group.present.len() < ranks || group.is_torn {
            return;
        }
        for id in group.present.clone() {
            let wait_ms = self.dice.between(1, 6);
            self.say_word(id, meeting, Word::Met, wait_ms);
        }
    }

    /// A rank takes part in the handover of a state; the donor gives it.
    pub(super) fn pass_state(&mut self, id: RankId, meeting: MeetingId, gives: Option<Weights>) {
        let patience_ms = self.plan.settings.form_timeout_ms / 4;
        self.say_word(id, meeting, Word::HandoverLate, patience_ms);
        let Some(group) = self.meetings.get_mut(meeting as usize) else {
            return;
        };
        group.passing.push(id);
        group.given = group.given.or(gives);
        if group.passing.len() < group.present.len() || group.is_torn {
            return;
        }
        let Some(weights) = group.given else { return };
        for id in group.present.clone() {
            let wait_ms = self.dice.between(1, 20);
            self.say_word(id, meeting, Word::HandedOver(weights), wait_ms);
        }
    }

    /// A rank brings in its lanes of a step.
    pub(super) fn bring(
        &mut self,
        id: RankId,
        meeting: MeetingId,
        step: Step,
        lanes: Lanes,
        patience_ms: u64,
    ) {
        self.say_word(id, meeting, Word::SumLate { step }, patience_ms);
        let Some(group) = self.meetings.get_mut(meeting as usize) else {
            return;
        };
        group.brought.insert(id, (step, lanes));
        if group.brought.len() < group.present.len() || group.is_torn {
            return;
        }
        let brought = std::mem::take(&mut group.brought);
        let present = group.present.clone();
        if brought.values().any(|(other, _)| *other != step) {
            let what = format!("members of one epoch sum different steps: {brought:?}");
            self.broken.get_or_insert(Broken {
                invariant: "FENCE",
                what,
            });
            return;
        }
        let mut lanes: Lanes = brought.into_values().flat_map(|(_, lanes)| lanes).collect();
        lanes.sort_by_key(|&(lane, _)| lane);
        let gradients: Vec<_> = lanes.into_iter().map(|(_, gradient)| gradient).collect();
        let values = sum(&gradients);
        for id in present {
            let wait_ms = self.dice.between(0, 4);
            self.say_word(id, meeting, Word::Summed { step, values }, wait_ms);
        }
    }

    /// A slice brings in what it holds of a row.
    pub(super) fn bring_slice(
        &mut self,
        id: RankId,
        meeting: MeetingId,
        turn: u64,
        residual: Residual,
        patience_ms: u64,
    ) {
        self.say_word(id, meeting, Word::SlicesLate { turn }, patience_ms);
        let Some(group) = self.meetings.get_mut(meeting as usize) else {
            return;
        };
        group.slices.insert(id, (turn, residual));
        if group.slices.len() < group.present.len() || group.is_torn {
            return;
        }
        let brought = std::mem::take(&mut group.slices);
        let present = group.present.clone();
        if brought.values().any(|&(other, _)| other != turn) {
            self.tear(format!("slices of one stage sum different rows: {brought:?}"));
            return;
        }
        let residuals: Vec<Residual> = brought.into_values().map(|(_, residual)| residual).collect();
        for id in present {
            let wait_ms = self.dice.between(0, 4);
            let residuals = residuals.clone();
            self.say_word(id, meeting, Word::SlicesSummed { turn, residuals }, wait_ms);
        }
    }

    /// A rank ends its part in a meeting: it died, or aborts. Most often nobody is told.
    pub(super) fn leave(&mut self, id: RankId, meeting: MeetingId) {
        let Some(group) = self.meetings.get_mut(meeting as usize) else {
            return;
        };
        group.is_torn = true;
        group.present.retain(|&present| present != id);
        let left = group.present.clone();
        if self.dice.one_in(3) {
            for id in left {
                let wait_ms = self.dice.between(0, 5);
                self.say_word(id, meeting, Word::Torn, wait_ms);
            }
        }
    }

    /// A process that ended is gone from all meetings.
    pub(super) fn leave_all(&mut self, id: RankId) {
        let joined: Vec<MeetingId> = (0..)
            .zip(&self.meetings)
            .filter(|(_, group)| group.present.contains(&id))
            .map(|(meeting, _)| meeting)
            .collect();
        for meeting in joined {
            self.leave(id, meeting);
        }
    }

    /// The library fails at one member, and all of them live; whether there was a meeting.
    pub(super) fn tear_a_meeting(&mut self, id: RankId) -> bool {
        let live = (0..)
            .zip(&self.meetings)
            .find(|(_, group)| group.present.len() > 1 && group.present.contains(&id) && !group.is_torn);
        let Some((meeting, _)) = live else { return false };
        self.meetings[meeting as usize].is_torn = true;
        self.say_word(id, meeting, Word::Torn, 0);
        true
    }

    /// Whether the end of a part never comes to its own end.
    pub(super) fn abort_is_stuck(&mut self) -> bool {
        let is_stuck = !self.calm && self.dice.one_in(self.plan.faults.stuck_abort_one_in);
        if is_stuck {
            self.counts.note(Fault::AbortStuck);
        }
        is_stuck
    }
}
