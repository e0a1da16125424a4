//! What the slices of a verifier's stage do together over NCCL: they meet once an epoch of their team, and sum the parts
//! that each has computed, where they were computed.
//!
//! NCCL-1: the slices of a stage meet by the id that the first of them has made for the epoch.
//! NCCL-2: a shard says that it can work when it is linked up, and all slices of its stage have met.
//! NCCL-3: see [`crate::rank::nccl`].

use std::time::{Duration, Instant};

use eaglet_runtime::collective::{Exchange, ShardPeers, SumMode};
use eaglet_runtime::control::{CollectiveId, RankEvent};
use eaglet_runtime::cuda::{SliceShape, SliceSums, SumDevice, SumWord, UniqueId};
use eaglet_runtime::ids::{Epoch, Step};
use eaglet_runtime::verifier::{Interrupted, Peers};

use super::{Context, RankFault};
use crate::faults::{self, Point};
use crate::rank::inbox::Input;
use crate::rank::nccl::{self, ABORT_PATIENCE, STEP_SHARE};
use crate::recipe;

/// What this rank meets and sums with.
pub(super) struct Nccl {
    device: SumDevice,
    mode: SumMode,
    /// An id that came, perhaps before the epoch that it is for.
    id: Option<(Epoch, UniqueId)>,
    part: Option<Part>,
}

/// This rank's part in one epoch.
struct Part {
    sums: SliceSums,
    epoch: Epoch,
    has_met: bool,
}

impl Nccl {
    /// Opens NCCL on the GPU of this process.
    ///
    /// # Errors
    /// If it is not there.
    pub(super) fn open(mode: SumMode) -> Result<Self, RankFault> {
        let device = nccl::open("verifier.collective")?;
        tracing::info!(version = nccl::version(&device), %mode, "slices are summed over NCCL");
        Ok(Self {
            device,
            mode,
            id: None,
            part: None,
        })
    }

    /// Begins an epoch of the slices of this stage, whose seats these are; what comes of it arrives in the inbox.
    ///
    /// # Errors
    /// If the members contradict themselves.
    pub(super) fn begin(
        &mut self,
        context: &Context,
        epoch: Epoch,
        members: Vec<u16>,
    ) -> Result<(), RankFault> {
        let (inputs, control) = (context.wires.inputs.clone(), context.control.clone());
        let shape = SliceShape {
            members,
            own: context.seat.index,
            mode: self.mode,
            meeting_patience: Duration::from_millis(recipe::MEETING_TIMEOUT_MS),
        };
        let sums = SliceSums::begin_epoch(&self.device, shape, move |word| {
            if let SumWord::Broken(reason) = &word {
                // The compute thread may wait for the device, which only the coordinator's word lets go.
                tracing::warn!(%epoch, reason, "the sums of an epoch broke");
                let reason = reason.clone();
                control.say(RankEvent::CollectiveBroken { epoch, reason });
            }
            // The compute thread outlives its parts.
            let _ = inputs.send(Input::Sum { epoch, word });
        })
        .map_err(RankFault::passing)?;
        context.wires.abort_switch.arm(epoch, sums.aborter());
        // NCCL-1
        if let Some((_, id)) = self.id.filter(|(known, _)| *known == epoch) {
            sums.meet(id);
        }
        self.part = Some(Part {
            sums,
            epoch,
            has_met: false,
        });
        Ok(())
    }

    /// Takes the id of an epoch.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn take_id(&mut self, epoch: Epoch, id: &CollectiveId) -> Result<(), RankFault> {
        let id = nccl::id_of(id)?;
        self.id = Some((epoch, id));
        // NCCL-1
        if let Some(part) = self.part.as_ref().filter(|part| part.epoch == epoch) {
            part.sums.meet(id);
        }
        Ok(())
    }

    /// Whether the others have still to come.
    pub(super) fn is_meeting(&self) -> bool {
        self.part.as_ref().is_some_and(|part| !part.has_met)
    }

    /// All slices have met; whether that is the first time.
    pub(super) fn set_met(&mut self) -> bool {
        let part = self.part.as_mut();
        part.is_some_and(|part| !std::mem::replace(&mut part.has_met, true))
    }

    /// What a piece of work sums with, which the coordinator gives so much time.
    pub(super) fn sums(&mut self, limit: Duration) -> Option<&mut SliceSums> {
        let part = self.part.as_mut()?;
        part.sums.set_deadline(Instant::now() + limit.mul_f64(STEP_SHARE));
        Some(&mut part.sums)
    }

    /// Ends the part in an epoch, if there is one. NCCL-3.
    ///
    /// # Errors
    /// If it does not end: the process has to.
    pub(super) fn end(&mut self) -> Result<(), RankFault> {
        match self.part.take() {
            Some(part) => part.sums.end(ABORT_PATIENCE).map_err(RankFault::passing),
            None => Ok(()),
        }
    }
}

/// The other shards for one row: the slices of the stage over NCCL, if that is how they sum, and all else over links.
pub(super) struct TeamPeers<'a, E> {
    pub(super) links: ShardPeers<E>,
    pub(super) sums: Option<&'a mut SliceSums>,
    /// Step of the row, for faults on purpose.
    pub(super) step: Option<Step>,
}

impl<E: Exchange> TeamPeers<'_, E> {
    /// Whether what has come back from the device is what it should be: to be asked before anything is concluded from it.
    ///
    /// # Errors
    /// If an abort or an error of NCCL's may have let it go.
    pub(super) fn settle(&self) -> Result<(), Interrupted> {
        let Some(sums) = &self.sums else { return Ok(()) };
        sums.settle().map_err(|error| Interrupted {
            reason: error.to_string(),
        })
    }
}

impl<E: Exchange> Peers for TeamPeers<'_, E> {
    fn sum(&mut self, values: &mut [f32]) -> Result<(), Interrupted> {
        self.links.sum(values)
    }

    fn slice_sums(&mut self) -> Option<&mut SliceSums> {
        let sums = self.sums.as_deref_mut()?;
        faults::pass(Point::Share, self.step);
        Some(sums)
    }

    fn gather(&mut self, part: &[f32], whole: &mut Vec<f32>) -> Result<(), Interrupted> {
        self.settle()?;
        self.links.gather(part, whole)
    }

    fn pass_on(&mut self, residual: &[f32]) -> Result<(), Interrupted> {
        self.settle()?;
        self.links.pass_on(residual)
    }

    fn take_over(&mut self, residual: &mut [f32]) -> Result<(), Interrupted> {
        self.links.take_over(residual)
    }

    fn announce(&mut self, chosen: &mut [u32]) -> Result<(), Interrupted> {
        self.settle()?;
        self.links.announce(chosen)
    }
}
