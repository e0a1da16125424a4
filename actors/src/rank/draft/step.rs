//! One step of a replica: its lanes' gradients, the sum, the vote, the commit.

use std::collections::VecDeque;
use std::sync::Arc;

use eaglet_runtime::collective::Phase as Half;
use eaglet_runtime::control::{Activity, LaneMetrics, RankEvent};
use eaglet_runtime::device::Floats;
use eaglet_runtime::ids::{RowId, Step};
use eaglet_runtime::link::{BulkKind, BulkMessage, Part};

use super::sum::Sum;
use super::{DraftWorker, Progress, RankDevice, RankFault, is_ahead, not_loaded};
use crate::faults::{self, Damage, Point};
use crate::replica::Replica;

/// How far a step is.
pub(super) enum Phase {
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
    Staged {
        step: Step,
    },
}

impl Phase {
    pub(super) fn activity(&self) -> Activity {
        match self {
            Self::Idle => Activity::Idle,
            Self::Staged { .. } => Activity::AwaitingCommit,
            Self::Computing { .. } => Activity::Computing,
            Self::Reducing { .. } => Activity::Reducing,
        }
    }
}

impl<D: RankDevice> DraftWorker<D> {
    /// Begins a step over all `lanes` that have a row; [`Self::proceed_with_step`] computes those of this seat.
    pub(super) fn begin(&mut self, step: Step, lanes: Vec<u16>) -> Result<(), RankFault> {
        self.context.activity.restart(Activity::Computing);
        faults::reach(Point::Begin, Some(step))?;
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_mut()
            .ok_or_else(|| RankFault::passing("a step began before the group"))?;
        if replica.step() != step {
            return Err(RankFault::passing(format!(
                "step {step} began at step {}",
                replica.step()
            )));
        }
        let own = self.context.seat.index;
        let left: VecDeque<u16> = lanes
            .iter()
            .copied()
            .filter(|&lane| group.owner(lane) == Some(own))
            .collect();
        if let Some(lane) = left
            .iter()
            .find(|&&lane| self.rows.get(RowId::Train { step, lane }).is_none())
        {
            let id = RowId::Train { step, lane: *lane };
            return Err(RankFault::passing(format!("the {id} is not here")));
        }
        let sum = Sum::begin(group, replica, &lanes)?;
        self.phase = Phase::Computing {
            step,
            sum,
            left,
            lanes: Vec::new(),
        };
        Ok(())
    }

    /// Does what can be done without anybody: one more lane, and messages that have found room.
    pub(super) fn proceed_with_step(&mut self) -> Result<Progress, RankFault> {
        if matches!(self.phase, Phase::Computing { .. }) {
            self.compute()?;
            return Ok(Progress::More);
        }
        let Some(group) = &mut self.group else {
            return Ok(Progress::Waits);
        };
        let empty = group.flush().map_err(RankFault::passing)?;
        Ok(if empty { Progress::Waits } else { Progress::Blocked })
    }

    /// Computes the next lane, or starts the sum if there is none left.
    fn compute(&mut self) -> Result<(), RankFault> {
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
        let _step = tracing::info_span!("step", step = step.0, epoch = %self.epoch).entered();
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_mut()
            .ok_or_else(|| RankFault::passing("the group is gone in the middle of a step"))?;
        if let Some(lane) = left.pop_front() {
            // Each lane has the whole time limit of a step.
            self.context.activity.restart(Activity::Computing);
            let id = RowId::Train { step, lane };
            let row = self
                .rows
                .get(id)
                .ok_or_else(|| RankFault::passing(format!("the {id} is gone")))?;
            // While this row is computed the next one is on its way to the device.
            let first = lanes.first().map_or(lane, |metrics| metrics.lane);
            let next = match left.front() {
                Some(&lane) => RowId::Train { step, lane },
                None => RowId::Train {
                    step: Step(step.0 + 1),
                    lane: first,
                },
            };
            replica.send_ahead(row);
            if let Some(next) = self.rows.get(next) {
                replica.send_ahead(next);
            }
            // Segments leave as soon as they are final, while the rest is still computed.
            let mut unsent = None;
            let device = Arc::clone(replica.device());
            let (home, mut brought) = sum.split();
            let on_final = |part, gradient: Floats<'_>| {
                if unsent.is_none() {
                    let gradient = device.gradient(gradient);
                    unsent = brought.contribute(group, step, lane, part, gradient).err();
                }
            };
            let mut metrics = replica
                .gradient(row, home, on_final)
                .map_err(RankFault::passing)?;
            if let Some(fault) = unsent {
                return Err(fault);
            }
            if faults::reach(Point::Computed, Some(step))? == Some(Damage::Nan) {
                replica.damage(sum.home());
            }
            metrics.lane = lane;
            metrics.finite &= replica.is_finite(sum.home().as_deref());
            tracing::debug!(
                lane,
                loss = metrics.loss,
                tokens = metrics.tokens,
                ms = metrics.compute_ms,
                "gradient computed"
            );
            lanes.push(metrics);
        }
        if !left.is_empty() {
            return Ok(());
        }
        sum.start(group, step)?;
        let over_nccl = matches!(sum, Sum::Nccl { .. });
        if let Phase::Computing { step, sum, lanes, .. } = std::mem::replace(&mut self.phase, Phase::Idle) {
            self.phase = Phase::Reducing { step, sum, lanes };
        }
        if over_nccl {
            faults::reach(Point::Reducing, Some(step))?;
        }
        for message in std::mem::take(&mut self.early) {
            self.take_segment(message)?;
        }
        self.stage_if_reduced()
    }

    pub(super) fn take_segment(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let BulkKind::Gradient {
            step: at,
            phase,
            segment,
        } = message.header.kind
        else {
            return Ok(());
        };
        // RANK-2
        if message.header.epoch < self.epoch {
            return Ok(());
        }
        let is_present = message.header.epoch == self.epoch;
        let reduce = match &mut self.phase {
            Phase::Reducing {
                step,
                sum: Sum::Links { reduce, .. },
                ..
            } if is_present && *step == at => reduce,
            // A sum that is finished elsewhere is taken in once this replica has begun to wait for it.
            Phase::Computing {
                step,
                sum: Sum::Links { reduce, .. },
                ..
            } if is_present && *step == at && matches!(phase, Half::Contribution { .. }) => reduce,
            _ => {
                self.keep_for_later(message, at);
                return Ok(());
            }
        };
        let Some(group) = &mut self.group else {
            return Ok(());
        };
        // The link has checked that there is one part.
        let bytes = message
            .parts
            .into_iter()
            .next()
            .map(Part::into_bytes)
            .unwrap_or_default();
        let outgoing = reduce
            .receive(message.header.from.index, phase, segment, bytes)
            .map_err(RankFault::passing)?;
        faults::reach(Point::Reducing, Some(at))?;
        group.post(at, outgoing).map_err(RankFault::passing)
    }

    /// DRAFT-2: peers are at most one step ahead, and an epoch that this replica has not heard of is the newest one.
    fn keep_for_later(&mut self, message: BulkMessage, at: Step) {
        let epoch = message.header.epoch;
        let reached = self.replica.as_ref().map(Replica::<D>::step);
        if epoch == self.epoch && reached.is_some_and(|reached| at != reached && at != reached.next()) {
            tracing::warn!(from = %message.header.from, step = at.0, "a segment of another step was dropped");
            return;
        }
        if epoch > self.epoch {
            self.early.retain(|early| early.header.epoch >= epoch);
        }
        self.early.push(message);
    }

    /// The sum over NCCL is there.
    pub(super) fn note_summed(&mut self) {
        // Who has no lane may hear of it before its turn to wait has come.
        if let Phase::Reducing {
            sum: Sum::Nccl { is_summed },
            ..
        }
        | Phase::Computing {
            sum: Sum::Nccl { is_summed },
            ..
        } = &mut self.phase
        {
            *is_summed = true;
        }
    }

    pub(super) fn stage_if_reduced(&mut self) -> Result<(), RankFault> {
        if !matches!(&self.phase, Phase::Reducing { sum, .. } if sum.is_done()) {
            return Ok(());
        }
        let Phase::Reducing { step, sum, lanes } = std::mem::replace(&mut self.phase, Phase::Idle) else {
            return Ok(());
        };
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_mut()
            .ok_or_else(|| RankFault::passing("the group is gone in the middle of a step"))?;
        let mean = sum.finish(group, replica)?;
        faults::reach(Point::Staged, Some(step))?;
        // Finite parts may have a sum that is not; it must not be applied either.
        let (gradient, finite) = replica.stage(mean);
        let event = RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient,
            finite,
            state: replica.digest(),
            lanes,
        };
        self.phase = Phase::Staged { step };
        self.context.say(event);
        faults::reach(Point::Voted, Some(step))?;
        Ok(())
    }

    pub(super) fn commit(&mut self, step: Step, learning_rate: f64) -> Result<(), RankFault> {
        let _step = tracing::info_span!("step", step = step.0, epoch = %self.epoch).entered();
        self.context.enter(Activity::Applying);
        faults::reach(Point::Commit, Some(step))?;
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Staged { step: staged } if staged == step => {
                replica.apply(learning_rate).map_err(RankFault::passing)?;
            }
            _ => {
                return Err(RankFault::passing(format!(
                    "step {step} is committed and not staged here"
                )));
            }
        }
        let reached = replica.step();
        tracing::debug!(learning_rate, state = %replica.digest(), "step applied");
        self.rows.retain(|row| is_ahead(row, reached));
        self.context.say(RankEvent::Applied {
            step: reached,
            state: replica.digest(),
        });
        faults::reach(Point::Applied, Some(step))?;
        Ok(())
    }
}
