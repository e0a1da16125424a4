//! A state on its way from the member that has it to those that need it, before the steps of an epoch.
//!
//! It travels as broadcasts, one a bucket, and all members ask for all of them: who needs nothing receives into one bucket
//! that nobody reads. Pairs of sends and receives would spare those that, but they have nothing else to do until the
//! state has gone round; a broadcast feeds several receivers at the price of one, and takes the connections that the
//! sums take, too.
//!
//! The donor's caller copies a few buckets ahead, and a receiver's caller copies out of a few: both are told when there is
//! room, and when something has come (SUMS-2).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::poster::{Order, Poster, Stop};
use super::{GradientSums, SumError, SumShape, SumWord};
use crate::cuda::meeting::{Meeting, POLL};
use crate::cuda::memory::{Buffer, View, ViewMut};
use crate::cuda::stream::{Event, Stream};

/// Buckets that a donor gives ahead, or that a receiver has not taken.
const AHEAD: usize = 4;

/// What a member does in a handover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Donor,
    Receiver,
    Bystander,
}

/// The handover of one epoch, as one member sees it.
pub(super) struct Passing {
    role: Role,
    root: usize,
    vectors: usize,
    /// Elements of a vector.
    elements: usize,
    bucket_elements: usize,
    patience: Duration,
    /// At the donor: buckets that its caller has given.
    given: AtomicUsize,
    /// At the donor buckets that are sent, at a receiver those that its caller has taken.
    done: AtomicUsize,
    /// At a receiver: what has come, with the number of each bucket.
    arrived: Mutex<VecDeque<(usize, Buffer<f32>)>>,
}

impl Passing {
    /// What the members have agreed on.
    ///
    /// # Errors
    /// If that contradicts itself.
    pub(super) fn of(shape: &SumShape, meeting: &Meeting) -> Result<Option<Self>, SumError> {
        let Some(handover) = &shape.handover else {
            return Ok(None);
        };
        let root = meeting.rank_of(handover.donor);
        let receives = |seat: &u16| *seat != handover.donor && meeting.rank_of(*seat).is_some();
        let is_sound = !handover.receivers.is_empty() && handover.receivers.iter().all(receives);
        let Some(root) = root.filter(|_| is_sound) else {
            return Err(SumError::Handover {
                donor: handover.donor,
                receivers: handover.receivers.clone(),
                members: meeting.seats().to_vec(),
            });
        };
        let role = match shape.own {
            own if own == handover.donor => Role::Donor,
            own if handover.receivers.contains(&own) => Role::Receiver,
            _ => Role::Bystander,
        };
        Ok(Some(Self {
            role,
            root,
            vectors: handover.vectors,
            elements: shape.plan.elements(),
            bucket_elements: shape.plan.bucket_elements(),
            patience: handover.patience,
            given: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            arrived: Mutex::default(),
        }))
    }

    /// Buckets of a vector.
    fn buckets_each(&self) -> usize {
        self.elements.div_ceil(self.bucket_elements)
    }

    fn buckets(&self) -> usize {
        self.vectors * self.buckets_each()
    }

    /// The vector of a bucket, and the elements of it.
    fn place(&self, bucket: usize) -> (usize, Range<usize>) {
        let (vector, place) = (bucket / self.buckets_each(), bucket % self.buckets_each());
        let start = place * self.bucket_elements;
        (vector, start..(start + self.bucket_elements).min(self.elements))
    }
}

impl GradientSums {
    fn passing(
        &self,
        role: Role,
        mut lengths: impl ExactSizeIterator<Item = usize>,
    ) -> Result<&Passing, SumError> {
        let own = self.shared.shape.own;
        let passing = self
            .shared
            .passing
            .as_ref()
            .filter(|passing| passing.role == role);
        let passing = passing.ok_or(SumError::State { own })?;
        let fits = lengths.len() == passing.vectors && lengths.all(|len| len == passing.elements);
        fits.then_some(passing).ok_or(SumError::State { own })
    }

    /// Gives as much of the donor's state as there is room for: to be called when all have met, and whenever
    /// [`SumWord::Room`] is told. `vectors` are `[elements]` each and written by what was launched on `stream` before.
    ///
    /// # Errors
    /// If this is not the donor, the lengths are not the agreed ones, or the device fails.
    pub fn give_state(&mut self, vectors: &[View<'_, f32>], stream: &Stream) -> Result<(), SumError> {
        let passing = self.passing(Role::Donor, vectors.iter().map(|vector| vector.len()))?;
        loop {
            let next = passing.given.load(Ordering::Acquire);
            if next == passing.buckets() || next >= passing.done.load(Ordering::Acquire) + AHEAD {
                return Ok(());
            }
            let (vector, part) = passing.place(next);
            let mut buffer = self.pool.take()?;
            let len = part.len();
            stream.copy(vectors[vector].part(part), buffer.view_mut().part(0..len))?;
            let ready = Event::new(stream.context())?;
            stream.record(&ready)?;
            passing.given.store(next + 1, Ordering::Release);
            self.order(Order::State(buffer, ready))?;
        }
    }

    /// Takes what has arrived of the state: to be called whenever [`SumWord::Arrived`] is told. `vectors` are `[elements]` each;
    /// they are written when it returns, behind what was launched on `stream` before.
    ///
    /// # Errors
    /// If this is no receiver, the lengths are not the agreed ones, or the device fails.
    pub fn take_state(&mut self, vectors: &mut [ViewMut<'_, f32>], stream: &Stream) -> Result<(), SumError> {
        let passing = self.passing(Role::Receiver, vectors.iter().map(|vector| vector.len()))?;
        let arrived = std::mem::take(&mut *passing.arrived.lock().unwrap_or_else(PoisonError::into_inner));
        for (bucket, buffer) in &arrived {
            let (vector, part) = passing.place(*bucket);
            let from = buffer.view().part(0..part.len());
            stream.copy(from, vectors[vector].reborrow().part(part))?;
        }
        stream.synchronize()?;
        for (_, buffer) in arrived {
            self.pool.give(buffer);
            passing.done.fetch_add(1, Ordering::AcqRel);
        }
        Ok(())
    }
}

impl Poster {
    /// Passes the state round. STATE-1: all have met.
    pub(super) fn pass_state(&mut self) -> Result<(), Stop> {
        let shared = Arc::clone(&self.shared);
        let Some(passing) = &shared.passing else {
            return Ok(());
        };
        let deadline = Instant::now() + passing.patience;
        for bucket in 0..passing.buckets() {
            let mut buffer = match passing.role {
                Role::Donor => self.given(passing)?,
                Role::Receiver => {
                    let used = |poster: &Self| poster.under_way.len() + untaken(passing);
                    while used(self) >= AHEAD {
                        self.settle(passing)?;
                        self.listen_for(POLL)?;
                    }
                    self.pool.take()?
                }
                Role::Bystander => match self.landing.take() {
                    Some(landing) => landing,
                    None => self.pool.take()?,
                },
            };
            let len = passing.place(bucket).1.len();
            if let Some(communicator) = &self.communicator {
                let view = buffer.view_mut().part(0..len);
                self.shared.meeting.ask(
                    communicator,
                    "a part of the state",
                    deadline,
                    |communicator, deadline| {
                        communicator.broadcast(&self.stream, view, passing.root, deadline)
                    },
                )?;
            }
            if passing.role == Role::Bystander {
                self.landing = Some(buffer);
                continue;
            }
            let done = Event::new(self.stream.context())?;
            self.stream.record(&done)?;
            self.under_way.push_back((done, bucket, buffer));
            self.settle(passing)?;
        }
        shared.meeting.drain(&self.stream, "the state", deadline)?;
        self.settle(passing)
    }

    /// The next bucket that the donor's caller gives.
    fn given(&mut self, passing: &Passing) -> Result<Buffer<f32>, Stop> {
        loop {
            if let Some((buffer, ready)) = self.given.pop_front() {
                self.stream.wait_for(&ready)?;
                return Ok(buffer);
            }
            self.settle(passing)?;
            self.listen_for(POLL)?;
        }
    }

    /// Takes an order, if one comes soon.
    fn listen_for(&mut self, patience: Duration) -> Result<(), Stop> {
        self.shared.meeting.goes_on("the state")?;
        match self.orders.recv_timeout(patience) {
            Ok(order) => self.note(order),
            Err(RecvTimeoutError::Timeout) => Ok(()),
            Err(RecvTimeoutError::Disconnected) => Err(Stop::Over),
        }
    }

    /// Tells of buckets that have gone their way.
    fn settle(&mut self, passing: &Passing) -> Result<(), Stop> {
        loop {
            match self.orders.try_recv() {
                Ok(order) => self.note(order)?,
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) => return Err(Stop::Over),
            }
        }
        while let Some((done, ..)) = self.under_way.front() {
            if !done.is_done()? {
                break;
            }
            // What an abort or an error of NCCL's has ended looks done, too.
            if let Some(communicator) = &self.communicator {
                communicator.is_settled("a part of the state")?;
            }
            let Some((_, bucket, buffer)) = self.under_way.pop_front() else {
                break;
            };
            if passing.role == Role::Donor {
                self.pool.give(buffer);
                passing.done.fetch_add(1, Ordering::AcqRel);
                self.shared.meeting.tell(SumWord::Room);
            } else {
                let mut arrived = passing.arrived.lock().unwrap_or_else(PoisonError::into_inner);
                arrived.push_back((bucket, buffer));
                drop(arrived);
                self.shared.meeting.tell(SumWord::Arrived);
            }
        }
        Ok(())
    }
}

/// Buckets that have come to a receiver and were not taken.
fn untaken(passing: &Passing) -> usize {
    passing
        .arrived
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .len()
}
