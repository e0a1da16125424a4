//! Sums of what the slices of a verifier's stage have computed, from GPU to GPU, in the order of the model's work.
//!
//! Unlike gradients, a sum is needed by the very next operation. So the thread that computes asks for it on the stream that it
//! computes on, and nobody waits: the device does, in the order of its work. A member that is gone holds up the device
//! and whoever waits for its results, until another thread aborts ([`MeetingAborter`]).
//!
//! - **SLICES-1 order**: in [`SumMode::Exact`] values are added in the order of the slices, `((v0 + v1) + v2) + …`, as they
//!   are over links.
//! - **SLICES-2 no result of an abort**: what an abort or an error of NCCL's has let go looks done. So nothing that comes
//!   back from the device is used before [`SliceSums::settle`] has said that all of it is what it should be.
//! - **SLICES-3 bounded**: beside the values a member holds one piece of each slice.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use super::kernels::Kernels;
use super::meeting::{LAST_PATIENCE, Meeting, MeetingAborter, Members, Threads};
use super::memory::{Buffer, ViewMut};
use super::nccl::{Communicator, NcclError, UniqueId};
use super::stream::Stream;
use super::sums::{SumDevice, SumError, SumWord};
use crate::collective::SumMode;

/// Elements that are summed at a time: 16 MiB of each slice.
const PIECE_ELEMENTS: usize = 4 << 20;

/// Who sums.
#[derive(Debug, Clone)]
pub struct SliceShape {
    /// Seats of the slices, in their order, which is ascending.
    pub members: Vec<u16>,
    /// The seat whose part this is.
    pub own: u16,
    /// In which order slices are added.
    pub mode: SumMode,
    /// The members have met by then, or the epoch is broken.
    pub meeting_patience: Duration,
}

/// One slice's part in the sums of its stage, for one epoch of its team.
pub struct SliceSums {
    meeting: Arc<Meeting>,
    kernels: Arc<Kernels>,
    mode: SumMode,
    ids: Sender<UniqueId>,
    communicator: Option<Arc<Communicator>>,
    /// What all slices have of a piece, `[slices, elements]`.
    gathered: Option<Buffer<f32>>,
    deadline: Instant,
    threads: Threads,
}

impl SliceSums {
    /// Begins an epoch; `tell` is called from other threads: the id by the first slice, for the others to
    /// [meet](Self::meet) by, then that all have met, or that something broke.
    ///
    /// # Errors
    /// If the members contradict themselves.
    pub fn begin_epoch(
        device: &SumDevice,
        shape: SliceShape,
        tell: impl Fn(SumWord) + Send + Sync + 'static,
    ) -> Result<Self, SumError> {
        let members = Members {
            seats: shape.members,
            own: shape.own,
            patience: shape.meeting_patience,
        };
        let meeting = Meeting::new(members, tell)?;
        let (ids, received) = mpsc::channel();
        let mut threads = Threads::default();
        let (meets, with) = (meeting.clone(), device.clone());
        threads.run("slices-meet", move || meet(&meets, &with, &received));
        threads.watch("slices-watch", &meeting);
        Ok(Self {
            meeting,
            kernels: device.kernels(),
            mode: shape.mode,
            ids,
            communicator: None,
            gathered: None,
            deadline: Instant::now() + shape.meeting_patience,
            threads,
        })
    }

    /// Bytes that a slice holds beside so many values to sum them with those of all `slices`. SLICES-3.
    pub fn scratch_bytes(mode: SumMode, slices: usize, elements: usize) -> usize {
        match mode {
            SumMode::Exact if slices > 1 => slices * elements.min(PIECE_ELEMENTS) * size_of::<f32>(),
            _ => 0,
        }
    }

    /// Tells the id of this epoch, which the first slice has made. One that comes twice is ignored.
    pub fn meet(&self, id: UniqueId) {
        // Who has met, or given up, needs none.
        let _ = self.ids.send(id);
    }

    /// What is asked for from now on is done by `deadline`, or the epoch is broken.
    pub fn set_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }

    /// Replaces `values` by their sum over all slices, behind what was launched on `stream` before. All slices ask for the same
    /// lengths in the same order.
    ///
    /// # Errors
    /// If the device or NCCL failed, or [`NcclError::Aborted`] if the epoch is over.
    pub fn sum(&mut self, mut values: ViewMut<'_, f32>, stream: &Stream) -> Result<(), NcclError> {
        let result = self.try_sum(&mut values, stream);
        if let Err(error) = &result
            && !matches!(error, NcclError::Aborted { .. })
        {
            self.meeting.fail(&SumError::Nccl(error.clone()));
        }
        result
    }

    fn try_sum(&mut self, values: &mut ViewMut<'_, f32>, stream: &Stream) -> Result<(), NcclError> {
        self.meeting.goes_on(WHAT)?;
        if self.meeting.ranks() == 1 {
            return Ok(());
        }
        let communicator = match &self.communicator {
            Some(communicator) => communicator.clone(),
            // The owner was told that all have met.
            None => {
                let met = self.meeting.communicator();
                let met = met.ok_or(NcclError::Aborted { what: WHAT })?;
                self.communicator.insert(met).clone()
            }
        };
        let elements = values.len();
        for start in (0..elements).step_by(PIECE_ELEMENTS) {
            let end = (start + PIECE_ELEMENTS).min(elements);
            let piece = values.reborrow().part(start..end);
            match self.mode {
                SumMode::Exact => self.add_in_order(&communicator, piece, stream)?,
                SumMode::Fast => {
                    self.meeting
                        .ask(&communicator, WHAT, self.deadline, |communicator, deadline| {
                            communicator.all_reduce(stream, piece, deadline)
                        })?;
                }
            }
        }
        Ok(())
    }

    /// SLICES-1
    fn add_in_order(
        &mut self,
        communicator: &Communicator,
        mut piece: ViewMut<'_, f32>,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (len, slices) = (piece.len(), self.meeting.ranks());
        let needed = len * slices;
        if self
            .gathered
            .as_ref()
            .is_none_or(|gathered| gathered.len() < needed)
        {
            // A smaller one may still be read by the stream.
            stream.synchronize()?;
            self.gathered = None;
            self.gathered = Some(Buffer::new(stream.context(), needed)?);
        }
        let Some(gathered) = &mut self.gathered else {
            return Ok(());
        };
        self.meeting
            .ask(communicator, WHAT, self.deadline, |communicator, deadline| {
                communicator.all_gather(
                    stream,
                    piece.view(),
                    gathered.view_mut().part(0..needed),
                    deadline,
                )
            })?;
        let of_slice = |slice: usize| gathered.view().part(slice * len..(slice + 1) * len);
        stream.copy(of_slice(0), piece.reborrow())?;
        for slice in 1..slices {
            self.kernels.add(stream, piece.reborrow(), of_slice(slice))?;
        }
        Ok(())
    }

    /// Whether all sums whose results have come back from the device are what they should be. SLICES-2.
    ///
    /// # Errors
    /// If something failed in NCCL, or [`NcclError::Aborted`] if the epoch is over.
    pub fn settle(&self) -> Result<(), NcclError> {
        self.meeting.goes_on(WHAT)?;
        if let Some(communicator) = &self.communicator {
            communicator.is_settled(WHAT)?;
        }
        Ok(())
    }

    /// What ends the epoch from another thread.
    pub fn aborter(&self) -> MeetingAborter {
        MeetingAborter(self.meeting.clone())
    }

    /// Ends the epoch: aborts the communicator and waits for the threads.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if that takes longer than `patience`: the process has to end.
    pub fn end(mut self, patience: Duration) -> Result<(), NcclError> {
        self.stop(patience)
    }

    fn stop(&mut self, patience: Duration) -> Result<(), NcclError> {
        let threads = std::mem::take(&mut self.threads);
        if threads.is_empty() {
            return Ok(());
        }
        // Who waits for an id hears that none will come.
        let (nobody, _) = mpsc::channel();
        threads.end(&self.meeting, patience, || self.ids = nobody)
    }
}

impl Drop for SliceSums {
    fn drop(&mut self) {
        if let Err(error) = self.stop(LAST_PATIENCE) {
            tracing::error!(%error, "the sums of slices of an epoch were left behind");
        }
        // Marks that were watched lie in the caller's stream, which may go next.
        self.meeting.forget();
    }
}

/// What is said to be late.
const WHAT: &str = "a sum of slices";

fn meet(meeting: &Meeting, device: &SumDevice, ids: &Receiver<UniqueId>) {
    let met = meeting.meet(device.nccl(), device.context(), |deadline| {
        let rest = deadline.saturating_duration_since(Instant::now());
        ids.recv_timeout(rest).map_err(|error| match error {
            RecvTimeoutError::Timeout => meeting.id_is_late(),
            RecvTimeoutError::Disconnected => NcclError::Aborted { what: "the meeting" },
        })
    });
    match met {
        Ok(_) => meeting.tell(SumWord::Met),
        // Somebody ended the epoch.
        Err(NcclError::Aborted { .. }) => {}
        Err(error) => meeting.fail(&SumError::Nccl(error)),
    }
}
