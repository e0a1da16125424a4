//! How the gradients of a step's lanes become their mean: over links, or over NCCL.

use std::ops::Range;

use eaglet_runtime::collective::SeatOrderedReduce;
use eaglet_runtime::cuda::Gradient;
use eaglet_runtime::ids::Step;

use super::RankFault;
use super::group::Group;

/// The sum of one step.
pub(super) enum Sum {
    /// Segments over the links of the group.
    Links(Box<SeatOrderedReduce>),
    /// Buckets over NCCL.
    Nccl {
        /// Where the mean is written, once all lanes of this seat are brought in.
        target: Vec<f32>,
        /// Whether the mean is there.
        is_summed: bool,
    },
}

impl Sum {
    /// Begins the sum of a gradient of some elements over some lanes.
    ///
    /// # Errors
    /// If a lane belongs to nobody, or the members have not met.
    pub(super) fn begin(group: &mut Group, elements: usize, lanes: &[u16]) -> Result<Self, RankFault> {
        let shape = group.shape(elements, lanes);
        if let Some(part) = group.part() {
            part.begin_step(shape.lanes)?;
            return Ok(Self::Nccl {
                target: Vec::new(),
                is_summed: false,
            });
        }
        let reduce = SeatOrderedReduce::new(shape).map_err(RankFault::passing)?;
        Ok(Self::Links(Box::new(reduce)))
    }

    /// Brings in a stretch of a lane's gradient that is final while the rest is still computed.
    ///
    /// # Errors
    /// If the stretch has no place in the sum.
    pub(super) fn contribute(
        &mut self,
        group: &mut Group,
        step: Step,
        lane: u16,
        part: Range<usize>,
        gradient: &[f32],
    ) -> Result<(), RankFault> {
        match (self, group.part()) {
            (Self::Links(reduce), _) => {
                let outgoing = reduce
                    .contribute_part(lane, part, gradient)
                    .map_err(RankFault::passing)?;
                group.post(step, outgoing).map_err(RankFault::passing)
            }
            (Self::Nccl { .. }, Some(nccl)) => nccl
                .sums()
                .bring(lane, part, Gradient::Host(gradient))
                .map_err(RankFault::passing),
            (Self::Nccl { .. }, None) => Err(RankFault::passing("the group does not sum over NCCL")),
        }
    }

    /// All lanes of this seat are brought in; takes the vector that the mean is written into.
    ///
    /// # Errors
    /// If a lane is missing.
    pub(super) fn start(
        &mut self,
        group: &mut Group,
        step: Step,
        gradient: Vec<f32>,
    ) -> Result<(), RankFault> {
        match self {
            Self::Links(reduce) => {
                let outgoing = reduce.start(gradient).map_err(RankFault::passing)?;
                group.post(step, outgoing).map_err(RankFault::passing)
            }
            Self::Nccl { target, .. } => {
                *target = gradient;
                Ok(())
            }
        }
    }

    /// Whether the mean is there.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Links(reduce) => reduce.is_done(),
            Self::Nccl { is_summed, .. } => *is_summed,
        }
    }

    /// The mean, once it is there.
    ///
    /// # Errors
    /// If it is not.
    pub(super) fn finish(self, group: &mut Group) -> Result<Vec<f32>, RankFault> {
        match (self, group.part()) {
            (Self::Links(reduce), _) => reduce.finish().map_err(RankFault::passing),
            (Self::Nccl { mut target, .. }, Some(nccl)) => {
                nccl.sums().take(&mut target).map_err(RankFault::passing)?;
                Ok(target)
            }
            (Self::Nccl { .. }, None) => Err(RankFault::passing("the group does not sum over NCCL")),
        }
    }
}
