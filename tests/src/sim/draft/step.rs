//! One step of a fake replica: its lanes' gradients, the sum, the vote, the commit.

use std::collections::VecDeque;

use eaglet_runtime::collective::{Outgoing, Phase as Half, ReduceShape, SeatOrderedReduce};
use eaglet_runtime::control::{Activity, LaneMetrics, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, RowId, Step};

use super::{Draft, Group, is_ahead, not_loaded};
use crate::sim::collective::{Attendance, Lanes, MeetingId};
use crate::sim::fault::Fault;
use crate::sim::network::{LinkKind, Load, Parcel};
use crate::sim::rank::{RankFault, RankId};
use crate::sim::weights::{ELEMENTS, gradient_of};
use crate::sim::world::World;

/// Longest time that the gradient of a lane takes.
const LANE_MS: u64 = 6;

/// How far a step is.
#[derive(Default)]
pub(super) enum Phase {
    #[default]
    Idle,
    /// Gradients of this seat's lanes are computed, one after the other.
    Computing {
        step: Step,
        sum: Sum,
        left: VecDeque<u16>,
        lanes: Vec<LaneMetrics>,
    },
    /// The sum is awaited.
    Reducing {
        step: Step,
        sum: Sum,
        lanes: Vec<LaneMetrics>,
    },
    /// The vote is given.
    Staged { step: Step, gradient: Vec<f32> },
}

/// What becomes of the gradients of lanes.
pub(super) enum Sum {
    /// Segments over links.
    Links(Box<SeatOrderedReduce>),
    /// All at once over NCCL.
    Nccl(MeetingId, Lanes),
}

impl Phase {
    /// Whether the sum of a step is awaited.
    pub(super) fn awaits(&self, at: Step) -> bool {
        matches!(self, Self::Reducing { step, .. } if *step == at)
    }

    pub(super) fn activity(&self) -> Activity {
        match self {
            Self::Idle => Activity::Idle,
            Self::Staged { .. } => Activity::AwaitingCommit,
            Self::Computing { .. } => Activity::Computing,
            Self::Reducing { .. } => Activity::Reducing,
        }
    }

    /// The work that needs no input, by the time that it takes at most.
    pub(super) fn work_ms(&self) -> Option<u64> {
        match self {
            Self::Computing { left, .. } => Some(if left.is_empty() { 0 } else { LANE_MS }),
            _ => None,
        }
    }
}

impl Draft {
    pub(super) fn begin(
        &mut self,
        world: &mut World,
        id: RankId,
        step: Step,
        lanes: &[u16],
    ) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_ref()
            .ok_or_else(|| RankFault::passing("a step began before the group"))?;
        if weights.step != step {
            return Err(RankFault::passing(format!(
                "step {step} began at step {}",
                weights.step
            )));
        }
        let own = world.ranks[id].seat.index;
        let left: VecDeque<u16> = lanes
            .iter()
            .copied()
            .filter(|&lane| group.owner(lane) == Some(own))
            .collect();
        if let Some(&lane) = left
            .iter()
            .find(|&&lane| !self.rows.contains_key(&RowId::Train { step, lane }))
        {
            let row = RowId::Train { step, lane };
            return Err(RankFault::passing(format!("the {row} is not here")));
        }
        let meeting = match group.meeting {
            Some(Attendance::Met(meeting)) => Some(meeting),
            Some(_) => return Err(RankFault::passing("a step began before the members have met")),
            None => None,
        };
        let shape = ReduceShape {
            elements: ELEMENTS,
            members: group.members.iter().map(|&(seat, _)| seat).collect(),
            own,
            lanes: lanes
                .iter()
                .map(|&lane| (lane, group.owner(lane).unwrap_or(u16::MAX)))
                .collect(),
        };
        let reduce = SeatOrderedReduce::new(shape).map_err(RankFault::passing)?;
        let sum = match meeting {
            Some(meeting) => Sum::Nccl(meeting, Lanes::new()),
            None => Sum::Links(Box::new(reduce)),
        };
        self.phase = Phase::Computing {
            step,
            sum,
            left,
            lanes: Vec::new(),
        };
        Ok(())
    }

    /// Computes the next lane, and starts the sum if there is none left.
    pub(super) fn compute(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        let Phase::Computing {
            step,
            sum,
            left,
            lanes,
        } = &mut self.phase
        else {
            return Ok(());
        };
        let step = *step;
        let group = self
            .group
            .as_ref()
            .ok_or_else(|| RankFault::passing("the group is gone in the middle of a step"))?;
        if let Some(lane) = left.pop_front() {
            let row = RowId::Train { step, lane };
            let (_, content) = *self
                .rows
                .get(&row)
                .ok_or_else(|| RankFault::passing(format!("the {row} is gone")))?;
            let mut gradient = gradient_of(content);
            if world.spoils(content) {
                gradient[0] = f32::NAN;
            }
            lanes.push(LaneMetrics {
                lane,
                finite: is_finite(&gradient),
                tokens: 1,
                ..LaneMetrics::default()
            });
            match sum {
                Sum::Links(reduce) => {
                    let outgoing = reduce.contribute(lane, &gradient).map_err(RankFault::passing)?;
                    post(world, id, group, self.epoch, step, outgoing);
                }
                Sum::Nccl(_, brought) => brought.push((lane, gradient)),
            }
        }
        if !left.is_empty() {
            return Ok(());
        }
        match sum {
            Sum::Links(reduce) => {
                let outgoing = reduce.start(vec![0.0; ELEMENTS]).map_err(RankFault::passing)?;
                post(world, id, group, self.epoch, step, outgoing);
            }
            Sum::Nccl(meeting, brought) => {
                let lanes_of = |seat: u16| group.owners.iter().filter(|&&owner| owner == seat).count() as u64;
                let most = group.members.iter().map(|&(seat, _)| lanes_of(seat)).max();
                let patience_ms = world.plan.settings.step_timeout_ms * most.unwrap_or(1).max(1) * 9 / 10;
                if world.has_effect(id) {
                    world.bring(id, *meeting, step, std::mem::take(brought), patience_ms);
                }
            }
        }
        if let Phase::Computing { step, sum, lanes, .. } = std::mem::take(&mut self.phase) {
            self.phase = Phase::Reducing { step, sum, lanes };
        }
        for parcel in std::mem::take(&mut self.early) {
            self.take_segment(world, id, parcel)?;
        }
        self.stage_if_reduced(world, id)
    }

    pub(super) fn take_segment(
        &mut self,
        world: &mut World,
        id: RankId,
        parcel: Parcel,
    ) -> Result<(), RankFault> {
        let Load::Segment {
            step: at,
            phase,
            segment,
            ref bytes,
        } = parcel.load
        else {
            return Ok(());
        };
        if parcel.epoch < self.epoch {
            return Ok(());
        }
        let is_present = parcel.epoch == self.epoch;
        let reduce = match &mut self.phase {
            Phase::Reducing {
                step,
                sum: Sum::Links(reduce),
                ..
            } if is_present && *step == at => reduce,
            // A sum that is finished elsewhere is taken in once this replica has begun to wait for it.
            Phase::Computing {
                step,
                sum: Sum::Links(reduce),
                ..
            } if is_present && *step == at && matches!(phase, Half::Contribution { .. }) => reduce,
            _ => {
                self.keep_for_later(parcel, at);
                return Ok(());
            }
        };
        let Some(group) = &self.group else { return Ok(()) };
        let from = world.ranks[parcel.from].seat.index;
        let outgoing = reduce
            .receive(from, phase, segment, bytes.clone())
            .map_err(RankFault::passing)?;
        post(world, id, group, self.epoch, at, outgoing);
        Ok(())
    }

    fn keep_for_later(&mut self, parcel: Parcel, at: Step) {
        let reached = self.replica.map(|weights| weights.step);
        if parcel.epoch == self.epoch && reached.is_some_and(|reached| at != reached && at != reached.next())
        {
            return;
        }
        if parcel.epoch > self.epoch {
            self.early.retain(|early| early.epoch >= parcel.epoch);
        }
        self.early.push(parcel);
    }

    pub(super) fn stage_if_reduced(&mut self, world: &mut World, id: RankId) -> Result<(), RankFault> {
        let is_done = |sum: &Sum| matches!(sum, Sum::Links(reduce) if reduce.is_done());
        if !matches!(&self.phase, Phase::Reducing { sum, .. } if is_done(sum)) {
            return Ok(());
        }
        let Phase::Reducing { step, sum, lanes } = std::mem::take(&mut self.phase) else {
            return Ok(());
        };
        let Sum::Links(reduce) = sum else { return Ok(()) };
        let gradient = reduce.finish().map_err(RankFault::passing)?;
        self.stage(world, id, step, lanes, gradient)
    }

    /// The sum of a step came over NCCL.
    pub(super) fn take_sum(
        &mut self,
        world: &mut World,
        id: RankId,
        at: Step,
        gradient: Vec<f32>,
    ) -> Result<(), RankFault> {
        if !self.phase.awaits(at) {
            return Ok(());
        }
        let Phase::Reducing { step, lanes, .. } = std::mem::take(&mut self.phase) else {
            return Ok(());
        };
        self.stage(world, id, step, lanes, gradient)
    }

    /// Votes for a mean gradient.
    fn stage(
        &mut self,
        world: &mut World,
        id: RankId,
        step: Step,
        lanes: Vec<LaneMetrics>,
        mut gradient: Vec<f32>,
    ) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let alone = self.group.as_ref().is_none_or(|group| group.members.len() < 2);
        if !alone && !world.calm && world.dice.one_in(world.plan.faults.disagree_one_in) {
            // A bit of its memory flipped. Alone nobody would see it.
            world.counts.note(Fault::Disagreement);
            gradient[0] += 1.0 + id as f32;
        }
        let event = RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient: Digest::of_f32(&gradient),
            finite: is_finite(&gradient),
            state: weights.digest(),
            lanes,
        };
        self.phase = Phase::Staged { step, gradient };
        world.say(id, event);
        Ok(())
    }

    pub(super) fn commit(
        &mut self,
        world: &mut World,
        id: RankId,
        step: Step,
        learning_rate: f64,
    ) -> Result<(), RankFault> {
        let weights = self.replica.ok_or_else(not_loaded)?;
        let weights = match std::mem::take(&mut self.phase) {
            Phase::Staged {
                step: staged,
                gradient,
            } if staged == step => weights.after(&gradient, learning_rate),
            _ => {
                return Err(RankFault::passing(format!(
                    "step {step} is committed and not staged here"
                )));
            }
        };
        self.replica = Some(weights);
        world.holds(id, weights);
        self.retain_rows(|row| is_ahead(row, weights.step));
        world.say(
            id,
            RankEvent::Applied {
                step: weights.step,
                state: weights.digest(),
            },
        );
        Ok(())
    }
}

fn post(world: &mut World, id: RankId, group: &Group, epoch: Epoch, step: Step, outgoing: Vec<Outgoing>) {
    for Outgoing {
        to_seat,
        phase,
        segment,
        bytes,
    } in outgoing
    {
        let Some(&(_, to)) = group.members.iter().find(|(seat, _)| *seat == to_seat) else {
            continue;
        };
        let load = Load::Segment {
            step,
            phase,
            segment,
            bytes,
        };
        // A link that has ended is left to the coordinator.
        let _ = world.send_over(id, to, LinkKind::Group, epoch, load);
    }
}

fn is_finite(values: &[f32]) -> bool {
    values.iter().all(|value| value.is_finite())
}
