//! Sums of gradients over the GPUs of one epoch, bucket by bucket while they are still being computed.
//!
//! Three threads: the caller's, which computes and never waits here; one that asks NCCL for the collectives; and one that
//! watches what was asked for. A call of NCCL's or of the driver's may hang when a peer dies, so only the second thread
//! makes such calls, and the first fault is told by whoever sees it. After a fault nothing is tried again: the caller
//! hears [`SumWord::Broken`], tells its coordinator, and ends this value; the next epoch makes a new one with a new id.
//!
//! Buckets are owned by one thread at a time: they are filled by the caller, move to the second thread when they are
//! whole, and come back as sums.
//!
//! - **SEQUENCE-1, SEQUENCE-2**: see [`BucketPlan`].
//! - **SUMS-1 exact**: in [`SumMode::Exact`] the sum has the bits of [`SeatOrderedReduce`], whatever the membership and
//!   whoever owns which lane: lanes are added in their order, then multiplied by `1 / lanes`.
//! - **SUMS-2 bounded**: a member holds the sum, one bucket that it receives, and of its own lanes what was not sent yet,
//!   which is at most one gradient for each of them.
//! - **SUMS-3 deadlines**: every meeting and every collective has one, and its passing is told. [`GradientSums::end`] and
//!   [`SumsAborter::abort`] return in time, or say that the process has to end.
//!
//! [`SeatOrderedReduce`]: crate::collective::SeatOrderedReduce

mod poster;
mod watchdog;

use std::ops::Range;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::cache::KernelCache;
use super::driver::{Context, CudaError, Driver};
use super::kernels::Kernels;
use super::library::SearchPath;
use super::memory::{Buffer, View, ViewMut};
use super::nccl::{Communicator, Nccl, NcclError, UniqueId};
use super::nvrtc::Nvrtc;
use super::stream::{Event, Stream};
use crate::collective::{BucketPlan, SumMode};
use poster::{Filled, Order, Poster, Step};
use watchdog::Watch;

/// For the end of a value that nobody ended.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

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

    /// NCCL's version, `(major, minor, patch)`.
    pub fn version(&self) -> (u32, u32, u32) {
        self.nccl.version()
    }
}

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
    watch: Watch,
    tell: Box<dyn Fn(SumWord) + Send + Sync>,
    line: Mutex<Line>,
    sums: Mutex<Option<Vec<Buffer<f32>>>>,
}

/// The communicator in the course of an epoch.
#[derive(Default)]
struct Line {
    communicator: Option<Arc<Communicator>>,
    /// Nobody may make one, or tell of a fault, any more.
    is_over: bool,
    is_broken: bool,
}

impl Shared {
    fn line(&self) -> std::sync::MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_over(&self) -> bool {
        self.line().is_over
    }

    /// Tells the first fault, unless the epoch is over.
    fn fail(&self, error: &SumError) {
        let is_first = {
            let mut line = self.line();
            let is_first = !line.is_over && !line.is_broken;
            line.is_broken = true;
            is_first
        };
        if is_first {
            (self.tell)(SumWord::Broken(error.to_string()));
        }
    }

    fn rank_of(&self, seat: u16) -> Option<usize> {
        self.shape.members.iter().position(|&member| member == seat)
    }
}

/// Ends the collectives of an epoch from another thread, while its owner computes.
#[derive(Clone)]
pub struct SumsAborter(Arc<Shared>);

impl SumsAborter {
    /// Ends the epoch's communicator and whatever it is doing. Doing so twice does no harm.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if NCCL does not return in time: the process has to end.
    pub fn abort(&self, patience: Duration) -> Result<(), NcclError> {
        let communicator = {
            let mut line = self.0.line();
            line.is_over = true;
            line.communicator.clone()
        };
        self.0.watch.end();
        match communicator {
            Some(communicator) => communicator.abort(patience),
            None => Ok(()),
        }
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
    threads: Vec<Receiver<()>>,
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
        let ascending = shape.members.windows(2).all(|pair| pair[0] < pair[1]);
        if !ascending || !shape.members.contains(&shape.own) {
            return Err(SumError::Shape {
                own: shape.own,
                members: shape.members,
            });
        }
        let pool = Pool {
            context: device.context.clone(),
            elements: shape.plan.bucket_elements().min(shape.plan.elements()).max(1),
            idle: Arc::default(),
        };
        let carry = Stream::new(&device.context)?;
        let shared = Arc::new(Shared {
            shape,
            watch: Watch::default(),
            tell: Box::new(tell),
            line: Mutex::default(),
            sums: Mutex::default(),
        });
        let (orders, received) = mpsc::channel();
        let poster = Poster::new(device.clone(), shared.clone(), pool.clone(), received)?;
        let watched = shared.clone();
        let threads = vec![
            run("sums", move || poster.run()),
            run("sums-watch", move || watchdog::run(&watched)),
        ];
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
            .map(|&(_, owner)| self.shared.rank_of(owner))
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
    pub fn aborter(&self) -> SumsAborter {
        SumsAborter(self.shared.clone())
    }

    /// Ends the epoch: aborts the communicator and waits for the threads.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if that takes longer than `patience`: the process has to end.
    pub fn end(mut self, patience: Duration) -> Result<(), NcclError> {
        self.stop(patience)
    }

    fn stop(&mut self, patience: Duration) -> Result<(), NcclError> {
        if self.threads.is_empty() {
            return Ok(());
        }
        let deadline = Instant::now() + patience;
        let threads = std::mem::take(&mut self.threads);
        self.aborter().abort(patience)?;
        // What the threads still hold may be freed now, and not before.
        self.orders = None;
        for thread in threads {
            let rest = deadline.saturating_duration_since(Instant::now());
            if thread.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
                let rank = self.shared.rank_of(self.shared.shape.own).unwrap_or_default();
                let waited_ms = patience.as_millis() as u64;
                return Err(NcclError::AbortStuck { rank, waited_ms });
            }
        }
        Ok(())
    }
}

impl Drop for GradientSums {
    fn drop(&mut self) {
        if let Err(error) = self.stop(LAST_PATIENCE) {
            tracing::error!(%error, "the sums of an epoch were left behind");
        }
    }
}

/// Runs something on a thread of its own; the receiver is told of its end by a hang-up.
fn run(name: &str, work: impl FnOnce() + Send + 'static) -> Receiver<()> {
    let (running, ended) = mpsc::channel();
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
        work();
        drop(running);
    });
    if let Err(error) = spawned {
        // The closure is gone, and with it what it would have told: the others see that nothing comes.
        tracing::error!(%error, name, "a thread cannot be started");
    }
    ended
}
