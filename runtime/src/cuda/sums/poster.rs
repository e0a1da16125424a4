//! The thread that asks NCCL for collectives, all of them in the order of SEQUENCE-1.

use std::collections::{HashMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use super::{Pool, Shared, SumDevice, SumError, SumWord};
use crate::collective::{SumMode, Turn};
use crate::cuda::driver::CudaError;
use crate::cuda::memory::{Buffer, View, ViewMut};
use crate::cuda::nccl::{Communicator, NcclError, Pending, UniqueId};
use crate::cuda::stream::{Event, Stream};

/// What the caller wants.
pub(super) enum Order {
    /// The id of the epoch is known.
    Meet(UniqueId),
    /// A step begins.
    Begin(Step),
    /// A bucket of one of this member's lanes is whole.
    Bucket(Filled),
    /// The next bucket of this member's state, there when the mark is done.
    State(Buffer<f32>, Event),
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
pub(super) enum Stop {
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
    pub(super) shared: Arc<Shared>,
    pub(super) pool: Pool,
    pub(super) orders: Receiver<Order>,
    pub(super) stream: Stream,
    rank: usize,
    pub(super) communicator: Option<Arc<Communicator>>,
    /// The step that was begun and is not summed.
    step: Option<Step>,
    /// Whole buckets of own lanes whose turn has not come, by lane and bucket. In fast mode the sum of those that came
    /// stands under the last of them.
    filled: HashMap<(usize, usize), Buffer<f32>>,
    /// Buckets that the stream still reads.
    retiring: VecDeque<(Event, Buffer<f32>)>,
    /// Where lanes of others arrive. The stream orders its uses.
    pub(super) landing: Option<Buffer<f32>>,
    /// Buckets of the own state that were given and not asked for.
    pub(super) given: VecDeque<(Buffer<f32>, Event)>,
    /// Buckets of the state that are under way. They stay here when an epoch breaks.
    pub(super) under_way: VecDeque<(Event, usize, Buffer<f32>)>,
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
            rank: shared.meeting.rank(),
            device,
            shared,
            pool,
            orders,
            communicator: None,
            step: None,
            filled: HashMap::new(),
            retiring: VecDeque::new(),
            landing: None,
            given: VecDeque::new(),
            under_way: VecDeque::new(),
        })
    }

    pub(super) fn run(mut self) {
        let mut held = Vec::new();
        if let Err(Stop::Broken(error)) = self.serve(&mut held) {
            self.shared.meeting.fail(&error);
        }
        // Collectives may still write into buffers: nothing is freed before the communicator is aborted and the orders
        // end.
        while self.orders.recv().is_ok() {}
        // Its marks go before the stream that they are in.
        self.shared.meeting.forget();
    }

    fn serve(&mut self, held: &mut Vec<Option<Buffer<f32>>>) -> Result<(), Stop> {
        self.meet()?;
        self.shared.meeting.tell(SumWord::Met);
        if self.shared.passing.is_some() {
            // STATE-1
            self.pass_state()?;
            self.shared.meeting.tell(SumWord::HandedOver);
        }
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
            self.shared.meeting.tell(SumWord::Summed);
        }
    }

    /// Meets the other members, if there are any.
    fn meet(&mut self) -> Result<(), Stop> {
        let (meeting, device) = (self.shared.clone(), self.device.clone());
        let meeting = &meeting.meeting;
        self.communicator = meeting.meet(&device.nccl, &device.context, |deadline| {
            loop {
                let rest = deadline.saturating_duration_since(Instant::now());
                match self.orders.recv_timeout(rest) {
                    Ok(Order::Meet(id)) => return Ok(id),
                    Ok(other) => self.note(other)?,
                    Err(RecvTimeoutError::Disconnected) => return Err(Stop::Over),
                    Err(RecvTimeoutError::Timeout) => return Err(meeting.id_is_late().into()),
                }
            }
        })?;
        Ok(())
    }

    /// Waits for an order. It comes from this process's own work, so there is no deadline: who computes is watched by
    /// those who gave it the work.
    fn listen(&mut self) -> Result<(), Stop> {
        let order = self.orders.recv().map_err(|_| Stop::Over)?;
        self.note(order)
    }

    pub(super) fn note(&mut self, order: Order) -> Result<(), Stop> {
        match order {
            // The id is known, and no other one will do.
            Order::Meet(_) => Ok(()),
            Order::Begin(step) => {
                self.step = Some(step);
                Ok(())
            }
            Order::Bucket(filled) => self.note_bucket(filled),
            Order::State(buffer, ready) => {
                self.given.push_back((buffer, ready));
                Ok(())
            }
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
        match &self.communicator {
            Some(communicator) => Ok(self.shared.meeting.ask(communicator, what, step.deadline, call)?),
            None => Ok(()),
        }
    }

    /// Waits until all that was asked of the stream is done.
    fn drain(&mut self, deadline: Instant) -> Result<(), Stop> {
        self.shared.meeting.drain(&self.stream, "the sum", deadline)?;
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
