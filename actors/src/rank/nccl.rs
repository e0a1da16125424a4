//! What ranks of both roles do alike over NCCL.
//!
//! NCCL-3: an epoch that the coordinator calls over is aborted at once, whatever the compute thread is busy with. A part
//! that does not end ends the process.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use eaglet_runtime::control::{CollectiveId, CoordinatorCommand};
use eaglet_runtime::cuda::{KernelCache, MeetingAborter, SearchPath, SumDevice, SumWord, UniqueId};
use eaglet_runtime::ids::Epoch;

use super::RankFault;

/// Longest wait for the end of an epoch's collectives.
pub(super) const ABORT_PATIENCE: Duration = Duration::from_secs(10);

/// Part of the coordinator's limit for a piece of work in which its collectives are done, or broken: at the limit it would
/// end all who wait, and not only who hangs.
pub(super) const STEP_SHARE: f64 = 0.9;

/// What a part in an epoch has to tell.
pub(super) type Word = SumWord;

/// Ends what a rank does over NCCL when the coordinator says so; shared with the thread that hears it.
#[derive(Clone, Default)]
pub(super) struct AbortSwitch(Arc<Mutex<Option<(Epoch, MeetingAborter)>>>);

impl AbortSwitch {
    /// Makes what belongs to an epoch end with it.
    pub(super) fn arm(&self, epoch: Epoch, aborter: MeetingAborter) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((epoch, aborter));
    }

    /// Takes note of a command; NCCL-3. Returns at once.
    pub(super) fn hear(&self, command: &CoordinatorCommand) {
        let ends = |armed: Epoch| match command {
            CoordinatorCommand::Abandon { epoch }
            | CoordinatorCommand::FormGroup { epoch, .. }
            | CoordinatorCommand::FormTeam { epoch, .. } => armed < *epoch,
            // Who computes on a GPU that waits for another one would not hear of it.
            CoordinatorCommand::Quit => true,
            _ => false,
        };
        let mut armed = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, aborter)) = armed.take_if(|(epoch, _)| ends(*epoch)) else {
            return;
        };
        std::thread::spawn(move || {
            if let Err(error) = aborter.abort(ABORT_PATIENCE) {
                // The compute thread sees the same when it ends the epoch.
                tracing::warn!(%error, "an abort is late");
            }
        });
    }
}

/// Opens NCCL on the GPU of this process, for a key of the configuration that asks for it.
///
/// # Errors
/// If it is not there.
pub(super) fn open(key: &str) -> Result<SumDevice, RankFault> {
    SumDevice::open(&SearchPath::here(), 0, KernelCache::here()).map_err(|error| {
        RankFault::permanent(format!(
            "{key} = \"nccl\": {error}; `eaglet check` says what is missing, and \"links\" needs nothing"
        ))
    })
}

/// What NCCL calls itself.
pub(super) fn version(device: &SumDevice) -> String {
    let (major, minor, patch) = device.version();
    format!("{major}.{minor}.{patch}")
}

/// The id that the control plane has carried.
///
/// # Errors
/// If it is none.
pub(super) fn id_of(id: &CollectiveId) -> Result<UniqueId, RankFault> {
    let bytes = id.bytes();
    bytes
        .map(UniqueId)
        .ok_or_else(|| RankFault::passing("an id of another length came"))
}
