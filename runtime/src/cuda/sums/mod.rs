//! Sums of gradients over the GPUs of one epoch, bucket by bucket while they are still being computed, and before them the
//! state of a healthy member for those who need it.
//!
//! Three threads: the caller's, which computes and never waits here; one that asks NCCL for the collectives; and the
//! watchdog of the `meeting`. A call of NCCL's or of the driver's may hang when a peer dies, so only the
//! second thread makes such calls.
//!
//! Buckets are owned by one thread at a time: they are filled by the caller, move to the second thread when they are
//! whole, and come back as sums.
//!
//! - **SEQUENCE-1, SEQUENCE-2**: see [`BucketPlan`](crate::collective::BucketPlan).
//! - **SUMS-1 exact**: in [`SumMode::Exact`] the sum has the bits of [`SeatOrderedReduce`], whatever the membership and
//!   whoever owns which lane: lanes are added in their order, then multiplied by `1 / lanes`.
//! - **SUMS-2 bounded**: a member holds the sum, one bucket that it receives, and of its own lanes what was not sent yet,
//!   which is at most one gradient for each of them. Of a state it holds a few buckets.
//! - **SUMS-3 deadlines**: MEETING-2 and -3, for [`GradientSums::end`] too.
//! - **STATE-1 order**: all members meet, then the state goes round, then steps begin.
//! - **STATE-2 same bits**: what arrives is what lay at the donor when it was given.
//!
//! [`SeatOrderedReduce`]: crate::collective::SeatOrderedReduce
//! [`SumMode::Exact`]: crate::collective::SumMode::Exact

mod handover;
mod poster;
mod terms;

use std::ops::Range;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cache::KernelCache;
use super::driver::{Context, CudaError, Driver};
use super::kernels::Kernels;
use super::library::SearchPath;
use super::meeting::{LAST_PATIENCE, Meeting, MeetingAborter, Members, Threads};
use super::memory::{Buffer, View, ViewMut};
use super::nccl::{Nccl, NcclError, UniqueId};
use super::nvrtc::Nvrtc;
use super::stream::{Event, Stream};
use handover::Passing;
use poster::{Filled, Order, Poster, Step};

pub use terms::{Gradient, Handover, SumError, SumShape, SumWord};

/// What sums are made with: a GPU, its kernels, NCCL.
#[derive(Debug, Clone)]
pub struct SumDevice {
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    nccl: Arc<Nccl>,
}

impl SumDevice {
    /// Opens the GPU with this number, and NCCL.
    ///
    /// # Errors
    /// If a library or the device is missing, or a kernel does not compile.
    pub fn open(search: &SearchPath, ordinal: usize, cache: KernelCache) -> Result<Self, CudaError> {
        let context = Driver::open(search)?.device(ordinal)?.context()?;
        let kernels = Kernels::new(&context, Nvrtc::open(search)?, cache)?;
        Ok(Self {
            kernels: Arc::new(kernels),
            nccl: Nccl::open(search)?,
            context,
        })
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn kernels(&self) -> Arc<Kernels> {
        self.kernels.clone()
    }

    pub(super) fn nccl(&self) -> &Arc<Nccl> {
        &self.nccl
    }

    /// NCCL's version, `(major, minor, patch)`.
    pub fn version(&self) -> (u32, u32, u32) {
        self.nccl.version()
    }
}

/// Buffers of one bucket's size that nothing uses.
#[derive(Debug, Clone)]
struct Pool {
    context: Arc<Context>,
    elements: usize,
    idle: Arc<Mutex<Vec<Buffer<f32>>>>,
}

impl Pool {
    fn take(&self) -> Result<Buffer<f32>, CudaError> {
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        kept.map_or_else(|| Buffer::new(&self.context, self.elements), Ok)
    }

    fn give(&self, buffer: Buffer<f32>) {
        self.idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(buffer);
    }
}

/// What the threads of one epoch share.
struct Shared {
    shape: SumShape,
    meeting: Arc<Meeting>,
    passing: Option<Passing>,
    sums: Mutex<Option<Vec<Buffer<f32>>>>,
}

/// The lane that is being brought in.
struct Bringing {
    /// Its number among those that are summed.
    turn: usize,
    /// Stretches that have come.
    brought: Vec<Range<usize>>,
    /// Its buckets, each with the elements that are in it.
    filling: Vec<Option<(Buffer<f32>, usize)>>,
}

/// One member's part in the sums of one epoch.
pub struct GradientSums {
    shared: Arc<Shared>,
    pool: Pool,
    /// Copies from the host.
    carry: Stream,
    orders: Option<Sender<Order>>,
    /// Of the present step: the lanes that are summed, with their owners.
    lanes: Vec<(u16, u16)>,
    /// Numbers of this seat's lanes that were not brought in yet.
    left: std::collections::VecDeque<usize>,
    bringing: Option<Bringing>,
    threads: Threads,
}

impl GradientSums {
    /// Begins an epoch; `tell` is called from other threads. A lone member has met at once, and the one with the lowest
    /// seat tells the id; the others need [`Self::meet`].
    ///
    /// # Errors
    /// If the members contradict themselves, or the device gives no stream.
    pub fn begin_epoch(
        device: &SumDevice,
        shape: SumShape,
        tell: impl Fn(SumWord) + Send + Sync + 'static,
    ) -> Result<Self, SumError> {
        let members = Members {
            seats: shape.members.clone(),
            own: shape.own,
            patience: shape.meeting_patience,
        };
        let meeting = Meeting::new(members, tell)?;
        let passing = Passing::of(&shape, &meeting)?;
        let pool = Pool {
            context: device.context.clone(),
            elements: shape.plan.bucket_elements().min(shape.plan.elements()).max(1),
            idle: Arc::default(),
        };
        let carry = Stream::new(&device.context)?;
        let shared = Arc::new(Shared {
            shape,
            meeting,
            passing,
            sums: Mutex::default(),
        });
        let (orders, received) = mpsc::channel();
        let poster = Poster::new(device.clone(), shared.clone(), pool.clone(), received)?;
        let mut threads = Threads::default();
        threads.run("sums", move || poster.run());
        threads.watch("sums-watch", &shared.meeting);
        Ok(Self {
            shared,
            pool,
            carry,
            orders: Some(orders),
            lanes: Vec::new(),
            left: Default::default(),
            bringing: None,
            threads,
        })
    }

    /// Tells the id of this epoch, which another member has made. One that comes twice is ignored.
    pub fn meet(&self, id: UniqueId) {
        // Who has ended has told why.
        let _ = self.order(Order::Meet(id));
    }

    fn order(&self, order: Order) -> Result<(), SumError> {
        let orders = self.orders.as_ref().ok_or(SumError::Ended)?;
        orders.send(order).map_err(|_| SumError::Ended)
    }

    /// Begins the sum over `lanes`, ascending, each with the seat that brings it in. Its collectives are done by `deadline`,
    /// or the epoch is broken.
    ///
    /// # Errors
    /// If there is no lane, an owner is no member, or the last sum was not taken.
    pub fn begin(&mut self, lanes: Vec<(u16, u16)>, deadline: Instant) -> Result<(), SumError> {
        let shape = &self.shared.shape;
        let ascending = lanes.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let roots: Option<Vec<usize>> = lanes
            .iter()
            .map(|&(_, owner)| self.shared.meeting.rank_of(owner))
            .collect();
        let Some(roots) = roots.filter(|roots| ascending && !roots.is_empty()) else {
            let members = shape.members.clone();
            return Err(SumError::Lanes { lanes, members });
        };
        if !self.lanes.is_empty() {
            return Err(SumError::NotDone);
        }
        self.order(Order::Begin(Step { roots, deadline }))?;
        self.left = (0..lanes.len())
            .filter(|&turn| lanes[turn].1 == shape.own)
            .collect();
        self.lanes = lanes;
        Ok(())
    }

    /// Brings in a stretch of the gradient of one of this seat's lanes, which is final. Lanes come one after the other,
    /// ascending; the stretches of one in any order and size.
    ///
    /// # Errors
    /// If the lane or the stretch has no place here, the length is not the agreed one, or the device fails.
    pub fn bring(&mut self, lane: u16, part: Range<usize>, gradient: Gradient<'_>) -> Result<(), SumError> {
        let plan = &self.shared.shape.plan;
        let actual = match gradient {
            Gradient::Host(values) => values.len(),
            Gradient::Device(view, _) => view.len(),
        };
        if actual != plan.elements() {
            let wanted = plan.elements();
            return Err(SumError::Gradient { actual, wanted });
        }
        let turn = self.left.front().copied();
        let turn = turn.filter(|&turn| self.lanes[turn].0 == lane && part.end <= plan.elements());
        let known = self.bringing.as_ref().map_or(&[][..], |lane| &lane.brought);
        let overlaps = |known: &Range<usize>| part.start < known.end && known.start < part.end;
        let Some(turn) = turn.filter(|_| part.start <= part.end && !known.iter().any(overlaps)) else {
            let own = self.shared.shape.own;
            return Err(SumError::Lane { own, lane, part });
        };
        let (pieces, buckets) = (plan.pieces(part.clone()), plan.buckets());
        let bringing = self.bringing.get_or_insert_with(|| Bringing {
            turn,
            brought: Vec::new(),
            filling: (0..buckets).map(|_| None).collect(),
        });
        bringing.brought.push(part);
        let mut whole = Vec::new();
        for piece in pieces {
            let slot = &mut bringing.filling[piece.bucket];
            let (mut buffer, filled) = match slot.take() {
                Some(begun) => begun,
                None => (self.pool.take()?, 0),
            };
            let len = piece.part.len();
            let target = buffer.view_mut().part(piece.at..piece.at + len);
            match gradient {
                Gradient::Host(values) => self.carry.upload(&values[piece.part], target)?,
                Gradient::Device(view, stream) => stream.copy(view.part(piece.part), target)?,
            }
            if filled + len < plan.len_of(piece.bucket) {
                *slot = Some((buffer, filled + len));
                continue;
            }
            let ready = match gradient {
                Gradient::Host(_) => None,
                Gradient::Device(_, stream) => {
                    let event = Event::new(stream.context())?;
                    stream.record(&event)?;
                    Some(event)
                }
            };
            whole.push(Filled {
                turn: bringing.turn,
                bucket: piece.bucket,
                buffer,
                ready,
            });
        }
        let brought: usize = bringing.brought.iter().map(ExactSizeIterator::len).sum();
        if brought == plan.elements() {
            self.left.pop_front();
            self.bringing = None;
        }
        whole
            .into_iter()
            .try_for_each(|filled| self.order(Order::Bucket(filled)))
    }

    /// The sum, once [`SumWord::Summed`] was told: the mean gradient of all lanes, `[elements]`.
    ///
    /// # Errors
    /// If it is not there, the length is not the agreed one, or the device fails.
    pub fn take(&mut self, into: &mut [f32]) -> Result<(), SumError> {
        let actual = into.len();
        self.take_with(actual, |carry, sum, part| carry.download(sum, &mut into[part]))
    }

    /// As [`Self::take`], into the device's memory; done when it returns.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub fn take_device(&mut self, mut into: ViewMut<'_, f32>) -> Result<(), SumError> {
        let actual = into.len();
        self.take_with(actual, |carry, sum, part| {
            carry.copy(sum, into.reborrow().part(part))
        })
    }

    fn take_with(
        &mut self,
        actual: usize,
        mut copy: impl FnMut(&Stream, View<'_, f32>, Range<usize>) -> Result<(), CudaError>,
    ) -> Result<(), SumError> {
        let plan = &self.shared.shape.plan;
        if actual != plan.elements() {
            let wanted = plan.elements();
            return Err(SumError::Gradient { actual, wanted });
        }
        let sums = self
            .shared
            .sums
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let sums = sums.ok_or(SumError::NotDone)?;
        for piece in plan.pieces(0..actual) {
            let sum = sums[piece.bucket].view();
            copy(
                &self.carry,
                sum.part(piece.at..piece.at + piece.part.len()),
                piece.part,
            )?;
        }
        self.carry.synchronize()?;
        sums.into_iter().for_each(|sum| self.pool.give(sum));
        self.lanes.clear();
        Ok(())
    }

    /// What ends the epoch from another thread.
    pub fn aborter(&self) -> MeetingAborter {
        MeetingAborter(self.shared.meeting.clone())
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
        threads.end(&self.shared.meeting, patience, || self.orders = None)
    }
}

impl Drop for GradientSums {
    fn drop(&mut self) {
        if let Err(error) = self.stop(LAST_PATIENCE) {
            tracing::error!(%error, "the sums of an epoch were left behind");
        }
    }
}
