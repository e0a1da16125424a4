//! How the gradients of a step's lanes become their mean: over links, or over NCCL.

use std::ops::Range;

use eaglet_runtime::collective::SeatOrderedReduce;
use eaglet_runtime::cuda::Gradient;
use eaglet_runtime::ids::Step;

use super::RankFault;
use super::group::Group;
use crate::rank::RankDevice;
use crate::replica::Replica;

/// The sum of one step.
pub(super) enum Sum {
    /// Segments over the links of the group.
    Links {
        reduce: Box<SeatOrderedReduce>,
        /// The gradient of the lane that is computed, on the host; the sum has it once all lanes are brought in.
        home: Vec<f32>,
    },
    /// Buckets over NCCL, from and to where the device computes.
    Nccl {
        /// Whether the mean is there.
        is_summed: bool,
    },
}

impl Sum {
    /// Begins the sum of a replica's gradients over some lanes.
    ///
    /// # Errors
    /// If a lane belongs to nobody, or the members have not met.
    pub(super) fn begin<D: RankDevice>(
        group: &mut Group,
        replica: &mut Replica<D>,
        lanes: &[u16],
    ) -> Result<Self, RankFault> {
        let shape = group.shape(replica.elements(), lanes);
        if let Some(part) = group.part() {
            part.begin_step(shape.lanes)?;
            return Ok(Self::Nccl { is_summed: false });
        }
        Ok(Self::Links {
            reduce: Box::new(SeatOrderedReduce::new(shape).map_err(RankFault::passing)?),
            home: replica.take_gradient(),
        })
    }

    /// The vector that gradients are computed into, if they have to be on the host.
    pub(super) fn home(&mut self) -> Option<&mut [f32]> {
        match self {
            Self::Links { home, .. } => Some(home),
            Self::Nccl { .. } => None,
        }
    }

    /// What [`Self::home`] lends while stretches are brought in, apart from the rest.
    pub(super) fn split(&mut self) -> (Option<&mut [f32]>, Brought<'_>) {
        match self {
            Self::Links { reduce, home } => (Some(home), Brought::Links(reduce)),
            Self::Nccl { .. } => (None, Brought::Nccl),
        }
    }

    /// All lanes of this seat are brought in.
    ///
    /// # Errors
    /// If a lane is missing.
    pub(super) fn start(&mut self, group: &mut Group, step: Step) -> Result<(), RankFault> {
        match self {
            Self::Links { reduce, home } => {
                let outgoing = reduce.start(std::mem::take(home)).map_err(RankFault::passing)?;
                group.post(step, outgoing).map_err(RankFault::passing)
            }
            Self::Nccl { .. } => Ok(()),
        }
    }

    /// Whether the mean is there.
    pub(super) fn is_done(&self) -> bool {
        match self {
            Self::Links { reduce, .. } => reduce.is_done(),
            Self::Nccl { is_summed } => *is_summed,
        }
    }

    /// The mean, once it is there: on the host, or in the replica's room for it.
    ///
    /// # Errors
    /// If it is not.
    pub(super) fn finish<D: RankDevice>(
        self,
        group: &mut Group,
        replica: &mut Replica<D>,
    ) -> Result<Option<Vec<f32>>, RankFault> {
        match (self, group.part()) {
            (Self::Links { reduce, .. }, _) => reduce.finish().map(Some).map_err(RankFault::passing),
            (Self::Nccl { .. }, Some(part)) => {
                let room = replica
                    .gradient_room()
                    .into_gpu()
                    .ok_or_else(|| RankFault::permanent("sums over NCCL need a replica on a GPU"))?;
                part.sums().take_device(room).map_err(RankFault::passing)?;
                Ok(None)
            }
            (Self::Nccl { .. }, None) => Err(no_nccl()),
        }
    }
}

/// Where stretches of a lane's gradient go that are final while the rest is still computed.
pub(super) enum Brought<'a> {
    Links(&'a mut SeatOrderedReduce),
    Nccl,
}

impl Brought<'_> {
    /// Brings in a stretch.
    ///
    /// # Errors
    /// If it has no place in the sum.
    pub(super) fn contribute(
        &mut self,
        group: &mut Group,
        step: Step,
        lane: u16,
        part: Range<usize>,
        gradient: Gradient<'_>,
    ) -> Result<(), RankFault> {
        match (self, gradient) {
            (Self::Links(reduce), Gradient::Host(gradient)) => {
                let outgoing = reduce
                    .contribute_part(lane, part, gradient)
                    .map_err(RankFault::passing)?;
                group.post(step, outgoing).map_err(RankFault::passing)
            }
            (Self::Links(_), Gradient::Device(..)) => Err(RankFault::passing(
                "links carry what is on the host, and this gradient is not",
            )),
            (Self::Nccl, gradient) => group
                .part()
                .ok_or_else(no_nccl)?
                .sums()
                .bring(lane, part, gradient)
                .map_err(RankFault::passing),
        }
    }
}

fn no_nccl() -> RankFault {
    RankFault::passing("the group does not sum over NCCL")
}
