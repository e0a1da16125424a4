//! What draft ranks do together over NCCL: they meet once an epoch, pass a state to those who need one, and sum the gradients
//! of the epoch's steps.
//!
//! NCCL-1: the members of an epoch meet by the id that the one with the lowest seat has made for it; one of another epoch
//! is not used.
//! NCCL-2: a rank says that its group is ready when all members have met and the state has gone round, if one was to, and
//! not before.
//! NCCL-3: see [`crate::rank::nccl`].

use std::time::{Duration, Instant};

use eaglet_runtime::collective::{BucketPlan, SumMode};
use eaglet_runtime::control::{CollectiveId, Handover};
use eaglet_runtime::cuda::{self, GradientSums, SumDevice, SumShape, UniqueId};
use eaglet_runtime::ids::Epoch;

use super::{Context, RankFault};
use crate::rank::inbox::Input;
use crate::rank::nccl::{self, ABORT_PATIENCE, STEP_SHARE};
use crate::recipe;

/// Weights, first and second moments.
const STATE_VECTORS: usize = 3;

/// What this rank meets and sums with.
pub(super) struct Nccl {
    device: SumDevice,
    plan: BucketPlan,
    mode: SumMode,
    /// An id that came, perhaps before the epoch that it is for.
    id: Option<(Epoch, UniqueId)>,
}

/// This rank's part in one epoch.
pub(super) struct Part {
    sums: GradientSums,
    epoch: Epoch,
    /// The state that goes round before the first step.
    handover: Option<Handover>,
    is_ready: bool,
    step_timeout: Duration,
}

impl Nccl {
    /// Opens NCCL on the GPU of this process.
    ///
    /// # Errors
    /// If it is not there.
    pub(super) fn open(mode: SumMode, plan: BucketPlan) -> Result<Self, RankFault> {
        let device = nccl::open("training.collective")?;
        tracing::info!(version = nccl::version(&device), %mode, "gradients are summed over NCCL");
        Ok(Self {
            device,
            plan,
            mode,
            id: None,
        })
    }

    /// Begins an epoch; what comes of it arrives in the inbox.
    ///
    /// # Errors
    /// If the device fails, or the members contradict themselves.
    pub(super) fn begin(
        &mut self,
        context: &Context,
        epoch: Epoch,
        members: &[u16],
        owners: &[u16],
        handover: Option<Handover>,
    ) -> Result<Part, RankFault> {
        let inputs = context.wires.inputs.clone();
        let shape = SumShape {
            members: members.to_vec(),
            own: context.seat.index,
            plan: self.plan.clone(),
            mode: self.mode,
            meeting_patience: Duration::from_millis(recipe::MEETING_TIMEOUT_MS),
            handover: handover.as_ref().map(|handover| cuda::Handover {
                donor: handover.donor,
                receivers: handover.receivers.clone(),
                vectors: STATE_VECTORS,
                patience: Duration::from_millis(recipe::STATE_TIMEOUT_MS),
            }),
        };
        let sums = GradientSums::begin_epoch(&self.device, shape, move |word| {
            // The compute thread outlives its parts.
            let _ = inputs.send(Input::Sum { epoch, word });
        })
        .map_err(RankFault::passing)?;
        context.wires.abort_switch.arm(epoch, sums.aborter());
        // NCCL-1
        if let Some((_, id)) = self.id.filter(|(known, _)| *known == epoch) {
            sums.meet(id);
        }
        let lanes_of = |member: &u16| owners.iter().filter(|owner| *owner == member).count();
        let most_lanes = members.iter().map(lanes_of).max().unwrap_or(1).max(1);
        let lane_timeout = Duration::from_secs(context.config.supervision.step_timeout_s);
        Ok(Part {
            sums,
            epoch,
            handover,
            is_ready: false,
            step_timeout: lane_timeout.saturating_mul(most_lanes as u32).mul_f64(STEP_SHARE),
        })
    }

    /// Takes the id of an epoch; of one that is over it is not heard.
    ///
    /// # Errors
    /// If it is none.
    pub(super) fn take_id(
        &mut self,
        epoch: Epoch,
        id: &CollectiveId,
        part: Option<&Part>,
    ) -> Result<(), RankFault> {
        let id = nccl::id_of(id)?;
        self.id = Some((epoch, id));
        // NCCL-1
        if let Some(part) = part.filter(|part| part.epoch == epoch) {
            part.sums.meet(id);
        }
        Ok(())
    }
}

impl Part {
    /// NCCL-2
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready
    }

    /// Steps may begin.
    pub(super) fn set_ready(&mut self) {
        self.is_ready = true;
    }

    /// The state that goes round before the first step.
    pub(super) fn handover(&self) -> Option<&Handover> {
        self.handover.as_ref()
    }

    /// Begins the sum over some lanes, each with its owner.
    ///
    /// # Errors
    /// If the members have not met, or a lane belongs to nobody.
    pub(super) fn begin_step(&mut self, lanes: Vec<(u16, u16)>) -> Result<(), RankFault> {
        if !self.is_ready {
            return Err(RankFault::passing(
                "a step began before the members were together",
            ));
        }
        self.sums
            .begin(lanes, Instant::now() + self.step_timeout)
            .map_err(RankFault::passing)
    }

    pub(super) fn sums(&mut self) -> &mut GradientSums {
        &mut self.sums
    }

    /// Ends the part. NCCL-3.
    ///
    /// # Errors
    /// If it does not end: the process has to.
    pub(super) fn end(self) -> Result<(), RankFault> {
        self.sums.end(ABORT_PATIENCE).map_err(RankFault::passing)
    }
}
