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
    /// The state that goes from one of them to others once they have met.
    pub handover: Option<Handover>,
}

/// Vectors of one member that others need, each as long as a gradient.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handover {
    /// The seat that has them.
    pub donor: u16,
    /// The seats that need them.
    pub receivers: Vec<u16>,
    /// How many vectors.
    pub vectors: usize,
    /// They are there so long after the meeting, or the epoch is broken.
    pub patience: Duration,
}

/// What a part in a communicator has to tell while its owner does something else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SumWord {
    /// The id that the others need; told by the member with the lowest seat.
    Id(UniqueId),
    /// All members have met: steps may begin, unless a state has to go round first.
    Met,
    /// The donor can give more of its state.
    Room,
    /// A part of the state has arrived at a receiver.
    Arrived,
    /// The state has gone round: steps may begin.
    HandedOver,
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
    /// The donor or a receiver of a state is no member, one is both, or there is none.
    #[error("a state cannot go from seat {donor} to seats {receivers:?} of {members:?}")]
    Handover {
        /// Who was to give.
        donor: u16,
        /// Who was to receive.
        receivers: Vec<u16>,
        /// The members.
        members: Vec<u16>,
    },
    /// A state is given or taken by somebody else, in another number of vectors, or of another length.
    #[error("seat {own} has no part in the handover of such a state")]
    State {
        /// This seat.
        own: u16,
    },
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
