//! The thread that asks NCCL for collectives, all of them in the order of SEQUENCE-1.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use super::{Pool, Shared, SumDevice, SumError, SumWord};
use crate::collective::{SumMode, Turn};
use crate::cuda::driver::CudaError;
use crate::cuda::memory::{Buffer, View, ViewMut};
use crate::cuda::nccl::{Communicator, NcclError, Pending, UniqueId};
use crate::cuda::stream::{Event, Stream};

/// Collectives that are asked for before the first of them is done. A stream takes about a thousand launches; behind them
/// a call of the driver's waits.
const WINDOW: usize = 64;
/// Between two looks at something that is going on.
const POLL: Duration = Duration::from_micros(200);

/// What the caller wants.
pub(super) enum Order {
    /// The id of the epoch is known.
    Meet(UniqueId),
    /// A step begins.
    Begin(Step),
    /// A bucket of one of this member's lanes is whole.
    Bucket(Filled),
}

/// A step.
pub(super) struct Step {
    /// Per lane, the rank that brings it in.
    pub(super) roots: Vec<usize>,
    /// When its collectives are done at the latest.
    pub(super) deadline: Instant,
}

/// A bucket of a lane.
pub(super) struct Filled {
    /// Number of the lane among those that are summed.
    pub(super) turn: usize,
    /// The bucket.
    pub(super) bucket: usize,
    /// Its elements.
    pub(super) buffer: Buffer<f32>,
    /// They are there when this is done; now, if there is none.
    pub(super) ready: Option<Event>,
}

/// Why the thread does not go on.
enum Stop {
    /// It is not to.
    Over,
    /// It cannot.
    Broken(SumError),
}

impl<E: Into<SumError>> From<E> for Stop {
    fn from(error: E) -> Self {
        match error.into() {
            // Somebody ended the epoch.
            SumError::Nccl(NcclError::Aborted { .. }) => Self::Over,
            error => Self::Broken(error),
        }
    }
}

/// The thread's state.
pub(super) struct Poster {
    device: SumDevice,
    shared: Arc<Shared>,
    pool: Pool,
    orders: Receiver<Order>,
    stream: Stream,
    rank: usize,
    communicator: Option<Arc<Communicator>>,
    /// The step that was begun and is not summed.
    step: Option<Step>,
    /// Whole buckets of own lanes whose turn has not come, by lane and bucket. In fast mode the sum of those that came
    /// stands under the last of them.
    filled: HashMap<(usize, usize), Buffer<f32>>,
    /// Buckets that the stream still reads.
    retiring: VecDeque<(Event, Buffer<f32>)>,
    /// Where lanes of others arrive. The stream orders its uses.
    landing: Option<Buffer<f32>>,
}

impl Poster {
    pub(super) fn new(
        device: SumDevice,
        shared: Arc<Shared>,
        pool: Pool,
        orders: Receiver<Order>,
    ) -> Result<Self, CudaError> {
        Ok(Self {
            stream: Stream::new(&device.context)?,
            rank: shared.rank_of(shared.shape.own).unwrap_or_default(),
            device,
            shared,
            pool,
            orders,
            communicator: None,
            step: None,
            filled: HashMap::new(),
            retiring: VecDeque::new(),
            landing: None,
        })
    }

    pub(super) fn run(mut self) {
        let mut held = Vec::new();
        if let Err(Stop::Broken(error)) = self.serve(&mut held) {
            self.shared.fail(&error);
        }
        // Collectives may still write into buffers: nothing is freed before the communicator is aborted and the orders
        // end.
        while self.orders.recv().is_ok() {}
        // Its marks go before the stream that they are in.
        self.shared.watch.clear();
    }

    fn serve(&mut self, held: &mut Vec<Option<Buffer<f32>>>) -> Result<(), Stop> {
        self.meet()?;
        (self.shared.tell)(SumWord::Met);
        loop {
            let Some(step) = self.step.take() else {
                self.listen()?;
                continue;
            };
            // What a broken step has summed stays alive as long as the thread.
            held.clear();
            self.sum(&step, held)?;
            let sums: Vec<Buffer<f32>> = held.drain(..).flatten().collect();
            *self.shared.sums.lock().unwrap_or_else(PoisonError::into_inner) = Some(sums);
            (self.shared.tell)(SumWord::Summed);
        }
    }

    /// Meets the other members, if there are any.
    fn meet(&mut self) -> Result<(), Stop> {
        let shape = &self.shared.shape;
        let ranks = shape.members.len();
        if ranks == 1 {
            return Ok(());
        }
        let deadline = Instant::now() + shape.meeting_patience;
        let number = self.shared.watch.asking("the meeting", deadline);
        let id = if self.rank == 0 {
            let id = self.device.nccl.unique_id()?;
            (self.shared.tell)(SumWord::Id(id));
            id
        } else {
            self.await_id(deadline)?
        };
        let communicator = {
            let mut line = self.shared.line();
            if line.is_over {
                return Err(Stop::Over);
            }
            // Returns at once.
            let communicator =
                Communicator::begin(&self.device.nccl, &self.device.context, id, ranks, self.rank)?;
            line.communicator.insert(Arc::new(communicator)).clone()
        };
        communicator.wait_until_ready(deadline)?;
        self.shared.watch.asked(number, None);
        self.communicator = Some(communicator);
        Ok(())
    }

    fn await_id(&mut self, deadline: Instant) -> Result<UniqueId, Stop> {
        loop {
            let rest = deadline.saturating_duration_since(Instant::now());
            match self.orders.recv_timeout(rest) {
                Ok(Order::Meet(id)) => return Ok(id),
                Ok(other) => self.note(other)?,
                Err(RecvTimeoutError::Disconnected) => return Err(Stop::Over),
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Stop::Broken(SumError::Nccl(NcclError::Late {
                        what: "the id of the meeting",
                        rank: self.rank,
                        ranks: self.shared.shape.members.len(),
                        waited_ms: self.shared.shape.meeting_patience.as_millis() as u64,
                    })));
                }
            }
        }
    }

    /// Waits for an order. It comes from this process's own work, so there is no deadline: who computes is watched by
    /// those who gave it the work.
    fn listen(&mut self) -> Result<(), Stop> {
        let order = self.orders.recv().map_err(|_| Stop::Over)?;
        self.note(order)
    }

    fn note(&mut self, order: Order) -> Result<(), Stop> {
        match order {
            // The id is known, and no other one will do.
            Order::Meet(_) => Ok(()),
            Order::Begin(step) => {
                self.step = Some(step);
                Ok(())
            }
            Order::Bucket(filled) => self.note_bucket(filled),
        }
    }

    fn note_bucket(&mut self, filled: Filled) -> Result<(), Stop> {
        let Filled {
            turn,
            bucket,
            mut buffer,
            ready,
        } = filled;
        if let Some(ready) = &ready {
            self.stream.wait_for(ready)?;
        }
        if self.shared.shape.mode == SumMode::Fast {
            // Lanes of one seat come in their order.
            let before = (0..turn)
                .rev()
                .find_map(|earlier| self.filled.remove(&(earlier, bucket)));
            if let Some(mut sum) = before {
                let len = self.shared.shape.plan.len_of(bucket);
                self.add(&mut sum, &buffer, len)?;
                std::mem::swap(&mut sum, &mut buffer);
                self.retire(sum)?;
            }
        }
        self.filled.insert((turn, bucket), buffer);
        Ok(())
    }

    /// A bucket of one of this member's lanes, once it is there.
    fn filled(&mut self, turn: usize, bucket: usize) -> Result<Buffer<f32>, Stop> {
        loop {
            if let Some(buffer) = self.filled.remove(&(turn, bucket)) {
                return Ok(buffer);
            }
            self.listen()?;
        }
    }

    /// Sums a step into `sums`, one buffer a bucket.
    fn sum(&mut self, step: &Step, sums: &mut Vec<Option<Buffer<f32>>>) -> Result<(), Stop> {
        let (mode, lanes) = (self.shared.shape.mode, step.roots.len());
        let factor = 1.0 / lanes as f32;
        sums.resize_with(self.shared.shape.plan.buckets(), || None);
        // SEQUENCE-2: one after the other.
        for turn in self.shared.shape.plan.sequence(mode, lanes) {
            self.recycle()?;
            match turn {
                Turn::Send { lane, bucket } => {
                    self.gather(step, lane, bucket, &mut sums[bucket])?;
                    if lane + 1 == lanes {
                        self.scale(&mut sums[bucket], bucket, factor)?;
                    }
                }
                Turn::Add { bucket } => {
                    let own = step.roots.iter().rposition(|&root| root == self.rank);
                    let len = self.shared.shape.plan.len_of(bucket);
                    let buffer = match own {
                        Some(last) => self.filled(last, bucket)?,
                        None => {
                            let mut nothing = self.pool.take()?;
                            self.stream.zero(nothing.view_mut().part(0..len))?;
                            nothing
                        }
                    };
                    let sum = sums[bucket].insert(buffer);
                    self.reduce(step, sum.view_mut().part(0..len))?;
                    self.scale(&mut sums[bucket], bucket, factor)?;
                }
            }
        }
        self.drain(step.deadline)
    }

    /// All get a bucket of a lane from its owner, and add it to what they have.
    fn gather(
        &mut self,
        step: &Step,
        lane: usize,
        bucket: usize,
        sum: &mut Option<Buffer<f32>>,
    ) -> Result<(), Stop> {
        let root = step.roots[lane];
        let len = self.shared.shape.plan.len_of(bucket);
        let is_own = root == self.rank;
        let mut buffer = match (is_own, self.landing.take()) {
            (true, landing) => {
                self.landing = landing;
                self.filled(lane, bucket)?
            }
            (false, Some(landing)) => landing,
            (false, None) => self.pool.take()?,
        };
        self.broadcast(step, buffer.view_mut().part(0..len), root)?;
        match sum {
            // The first contribution becomes the sum, so that it keeps its bits (zero plus minus zero would not).
            None => *sum = Some(buffer),
            Some(sum) => {
                self.add(sum, &buffer, len)?;
                if is_own {
                    self.retire(buffer)?;
                } else {
                    self.landing = Some(buffer);
                }
            }
        }
        Ok(())
    }

    fn broadcast(&self, step: &Step, buffer: ViewMut<'_, f32>, root: usize) -> Result<(), Stop> {
        self.ask("broadcast", step, |communicator, deadline| {
            communicator.broadcast(&self.stream, buffer, root, deadline)
        })
    }

    fn reduce(&self, step: &Step, buffer: ViewMut<'_, f32>) -> Result<(), Stop> {
        self.ask("all-reduce", step, |communicator, deadline| {
            communicator.all_reduce(&self.stream, buffer, deadline)
        })
    }

    /// Asks for a collective; a lone member needs none.
    fn ask<'a>(
        &'a self,
        what: &'static str,
        step: &Step,
        call: impl FnOnce(&'a Communicator, Instant) -> Result<Pending<'a>, NcclError>,
    ) -> Result<(), Stop> {
        let Some(communicator) = &self.communicator else {
            return Ok(());
        };
        self.await_fewer_than(WINDOW)?;
        let number = self.shared.watch.asking(what, step.deadline);
        let pending = call(communicator, step.deadline)?;
        self.shared.watch.asked(number, Some(pending.into_event()));
        Ok(())
    }

    /// Waits until fewer collectives are pending. The watchdog sees what is late, and the abort that follows ends it.
    fn await_fewer_than(&self, most: usize) -> Result<(), Stop> {
        while self.shared.watch.pending()? >= most {
            if self.shared.is_over() {
                return Err(Stop::Over);
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    /// Waits until all that was asked of the stream is done.
    fn drain(&mut self, deadline: Instant) -> Result<(), Stop> {
        let done = Event::new(&self.device.context)?;
        self.stream.record(&done)?;
        self.shared.watch.asking("the sum", deadline);
        while !done.is_done()? {
            if self.shared.is_over() {
                return Err(Stop::Over);
            }
            std::thread::sleep(POLL);
        }
        // An error of NCCL's may look like the end of its work.
        if let Some(communicator) = &self.communicator {
            communicator.is_settled("the sum")?;
        }
        self.shared.watch.clear();
        self.recycle()
    }

    fn add(&self, sum: &mut Buffer<f32>, more: &Buffer<f32>, len: usize) -> Result<(), CudaError> {
        let more: View<'_, f32> = more.view().part(0..len);
        self.device
            .kernels
            .add(&self.stream, sum.view_mut().part(0..len), more)
    }

    fn scale(&self, sum: &mut Option<Buffer<f32>>, bucket: usize, factor: f32) -> Result<(), CudaError> {
        let len = self.shared.shape.plan.len_of(bucket);
        let Some(sum) = sum else { return Ok(()) };
        let sum = sum.view_mut().part(0..len);
        self.device.kernels.scale(&self.stream, sum, factor)
    }

    /// Gives a buffer back once the stream has read it.
    fn retire(&mut self, buffer: Buffer<f32>) -> Result<(), CudaError> {
        let read = Event::new(&self.device.context)?;
        self.stream.record(&read)?;
        self.retiring.push_back((read, buffer));
        Ok(())
    }

    fn recycle(&mut self) -> Result<(), Stop> {
        while let Some((read, _)) = self.retiring.front() {
            if !read.is_done()? {
                break;
            }
            if let Some((_, buffer)) = self.retiring.pop_front() {
                self.pool.give(buffer);
            }
        }
        // Orders that came meanwhile: their memory counts, and in fast mode they are added.
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.note(order)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Stop::Over),
            }
        }
    }
}
