//! What the members of an epoch agree on, what is told, and what goes wrong.

use std::ops::Range;
use std::time::Duration;

use crate::collective::{BucketPlan, SumMode};
use crate::cuda::driver::CudaError;
use crate::cuda::memory::View;
use crate::cuda::nccl::{NcclError, UniqueId};
use crate::cuda::stream::Stream;

/// What all members of an epoch agree on.
#[derive(Debug, Clone)]
pub struct SumShape {
    /// Seats of the members, ascending.
    pub members: Vec<u16>,
    /// The seat whose part this is.
    pub own: u16,
    /// The buckets of a gradient.
    pub plan: BucketPlan,
    /// In which order lanes are added.
    pub mode: SumMode,
    /// The members have met by then, or the epoch is broken.
    pub meeting_patience: Duration,
}

/// What a value has to tell while its owner does something else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SumWord {
    /// The id that the others need; told by the member with the lowest seat.
    Id(UniqueId),
    /// All members have met: steps may begin.
    Met,
    /// The sum of the present step is there.
    Summed,
    /// Something failed or is late; nothing more will come. Why, in one line.
    Broken(String),
}

/// Why a sum cannot go on.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SumError {
    /// The members contradict themselves.
    #[error("seat {own} cannot sum over seats {members:?}")]
    Shape {
        /// The seat.
        own: u16,
        /// The members.
        members: Vec<u16>,
    },
    /// No lane is summed, they are not ascending, or an owner is no member.
    #[error("lanes {lanes:?} cannot be summed over seats {members:?}")]
    Lanes {
        /// Lanes with their owners.
        lanes: Vec<(u16, u16)>,
        /// The members.
        members: Vec<u16>,
    },
    /// A lane was brought in that is not this seat's, out of its order, or a stretch of it for the second time.
    #[error("seat {own} cannot bring in elements {part:?} of lane {lane} now")]
    Lane {
        /// This seat.
        own: u16,
        /// The lane.
        lane: u16,
        /// The stretch.
        part: Range<usize>,
    },
    /// A vector has another length than agreed.
    #[error("the gradient has {actual} elements instead of {wanted}")]
    Gradient {
        /// Its length.
        actual: usize,
        /// The length agreed on.
        wanted: usize,
    },
    /// The result was asked for before it was told, or a step began before the last one was over.
    #[error("the sum is not done")]
    NotDone,
    /// The threads of this epoch have ended.
    #[error("the sums of this epoch have ended")]
    Ended,
    /// NCCL or the device.
    #[error(transparent)]
    Nccl(#[from] NcclError),
}

impl From<CudaError> for SumError {
    fn from(error: CudaError) -> Self {
        Self::Nccl(error.into())
    }
}

/// A stretch of a gradient, where it lies.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// On the host, `[elements]`.
    Host(&'a [f32]),
    /// On the device, `[elements]`, written by what was launched on this stream before.
    Device(View<'a, f32>, &'a Stream),
}
