//! The communicator of one epoch: how its members meet, how they ask it for something, and what ends it.
//!
//! Whoever has it asks NCCL from one thread. Another one, the watchdog, looks at what was asked for, and any thread may
//! abort. After a fault nothing is tried again: its owner hears [`SumWord::Broken`], tells its coordinator, and ends; the
//! next epoch makes a new communicator from a new id.
//!
//! - **MEETING-1**: the first fault is told, by whoever sees it, and no other one. The end of the epoch is none.
//! - **MEETING-2**: every meeting and everything that is asked for has a deadline, and its passing is told.
//! - **MEETING-3**: an abort returns in time, or says that the process has to end. Nobody makes a communicator after it.

mod watchdog;

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::driver::Context;
use super::nccl::{Communicator, Nccl, NcclError, Pending, UniqueId};
use super::stream::{Event, Stream};
use super::sums::{SumError, SumWord};
use watchdog::Watch;

/// Collectives that are asked for before the first of them is done. A stream takes about a thousand launches; behind them
/// a call of the driver's waits.
const WINDOW: usize = 64;
/// Between two looks at something that is going on.
pub(super) const POLL: Duration = Duration::from_micros(200);
/// For the end of a value that nobody ended.
pub(super) const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// Who meets.
#[derive(Debug, Clone)]
pub(super) struct Members {
    /// Seats, ascending.
    pub(super) seats: Vec<u16>,
    /// The seat whose part this is.
    pub(super) own: u16,
    /// They have met by then, or the epoch is broken.
    pub(super) patience: Duration,
}

/// One member's part in the communicator of an epoch.
pub(super) struct Meeting {
    seats: Vec<u16>,
    rank: usize,
    patience: Duration,
    watch: Watch,
    tell: Box<dyn Fn(SumWord) + Send + Sync>,
    line: Mutex<Line>,
}

/// The communicator in the course of an epoch.
#[derive(Default)]
struct Line {
    communicator: Option<Arc<Communicator>>,
    /// Nobody may make one, or tell of a fault, any more.
    is_over: bool,
    is_broken: bool,
}

impl Meeting {
    /// A part in a meeting that has not begun; `tell` is called from several threads.
    ///
    /// # Errors
    /// If the members contradict themselves.
    pub(super) fn new(
        members: Members,
        tell: impl Fn(SumWord) + Send + Sync + 'static,
    ) -> Result<Arc<Self>, SumError> {
        let Members { seats, own, patience } = members;
        let ascending = seats.windows(2).all(|pair| pair[0] < pair[1]);
        let rank = seats.iter().position(|&seat| seat == own);
        let Some(rank) = rank.filter(|_| ascending) else {
            return Err(SumError::Shape { own, members: seats });
        };
        Ok(Arc::new(Self {
            seats,
            rank,
            patience,
            watch: Watch::default(),
            tell: Box::new(tell),
            line: Mutex::default(),
        }))
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seats of the members, ascending.
    pub(super) fn seats(&self) -> &[u16] {
        &self.seats
    }

    /// How many members there are.
    pub(super) fn ranks(&self) -> usize {
        self.seats.len()
    }

    /// The own place among them.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// The place of a seat among them.
    pub(super) fn rank_of(&self, seat: u16) -> Option<usize> {
        self.seats.iter().position(|&member| member == seat)
    }

    /// Tells the owner something.
    pub(super) fn tell(&self, word: SumWord) {
        (self.tell)(word);
    }

    /// MEETING-1
    pub(super) fn fail(&self, error: &SumError) {
        let is_first = {
            let mut line = self.line();
            let is_first = !line.is_over && !line.is_broken;
            line.is_broken = true;
            is_first
        };
        if is_first {
            self.tell(SumWord::Broken(error.to_string()));
        }
    }

    /// Whether the epoch is over or broken: nothing more is to be waited for.
    pub(super) fn is_over(&self) -> bool {
        let line = self.line();
        line.is_over || line.is_broken
    }

    /// The communicator, once somebody began to make it.
    pub(super) fn communicator(&self) -> Option<Arc<Communicator>> {
        self.line().communicator.clone()
    }

    /// What something is that was waited for in vain.
    pub(super) fn late(&self, what: &'static str, waited: Duration) -> NcclError {
        NcclError::Late {
            what,
            rank: self.rank,
            ranks: self.ranks(),
            waited_ms: waited.as_millis() as u64,
        }
    }

    /// Meets the other members, if there are any: the one with the lowest seat tells the id, the others wait for it until
    /// the deadline that `await_id` is given.
    ///
    /// # Errors
    /// MEETING-2. [`NcclError::Aborted`] if the epoch is over.
    pub(super) fn meet<E: From<NcclError>>(
        &self,
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        await_id: impl FnOnce(Instant) -> Result<UniqueId, E>,
    ) -> Result<Option<Arc<Communicator>>, E> {
        let ranks = self.ranks();
        if ranks == 1 {
            return Ok(None);
        }
        let deadline = Instant::now() + self.patience;
        let number = self.watch.asking("the meeting", deadline);
        let id = if self.rank == 0 {
            let id = nccl.unique_id()?;
            self.tell(SumWord::Id(id));
            id
        } else {
            await_id(deadline)?
        };
        let communicator = {
            let mut line = self.line();
            if line.is_over {
                return Err(NcclError::Aborted { what: "the meeting" }.into());
            }
            // Returns at once.
            let communicator = Communicator::begin(nccl, context, id, ranks, self.rank)?;
            line.communicator.insert(Arc::new(communicator)).clone()
        };
        communicator.wait_until_ready(deadline)?;
        self.watch.asked(number, None);
        Ok(Some(communicator))
    }

    /// What is said by who waited for the id in vain.
    pub(super) fn id_is_late(&self) -> NcclError {
        self.late("the id of the meeting", self.patience)
    }

    /// Asks for a collective, behind at most [`WINDOW`] others.
    ///
    /// # Errors
    /// As the call, and [`NcclError::Aborted`] if the epoch ends first.
    pub(super) fn ask<'a>(
        &self,
        communicator: &'a Communicator,
        what: &'static str,
        deadline: Instant,
        call: impl FnOnce(&'a Communicator, Instant) -> Result<Pending<'a>, NcclError>,
    ) -> Result<(), NcclError> {
        // The watchdog sees what is late, and the abort that follows ends it.
        while self.watch.pending()? >= WINDOW {
            self.goes_on(what)?;
            std::thread::sleep(POLL);
        }
        let number = self.watch.asking(what, deadline);
        let pending = call(communicator, deadline)?;
        self.watch.asked(number, Some(pending.into_event()));
        Ok(())
    }

    /// Waits until all that was asked of a stream is done, with the collectives in it.
    ///
    /// # Errors
    /// If the device or NCCL failed, or [`NcclError::Aborted`] if the epoch ends first.
    pub(super) fn drain(
        &self,
        stream: &Stream,
        what: &'static str,
        deadline: Instant,
    ) -> Result<(), NcclError> {
        let done = Event::new(stream.context())?;
        stream.record(&done)?;
        self.watch.asking(what, deadline);
        while !done.is_done()? {
            self.goes_on(what)?;
            std::thread::sleep(POLL);
        }
        // An error of NCCL's may look like the end of its work, and so does an abort.
        if let Some(communicator) = self.communicator() {
            communicator.is_settled(what)?;
        }
        self.watch.clear();
        Ok(())
    }

    /// # Errors
    /// [`NcclError::Aborted`] if the epoch is over.
    pub(super) fn goes_on(&self, what: &'static str) -> Result<(), NcclError> {
        if self.is_over() {
            Err(NcclError::Aborted { what })
        } else {
            Ok(())
        }
    }

    /// Marks that were watched go, before the stream that they are in.
    pub(super) fn forget(&self) {
        self.watch.clear();
    }
}

/// Ends the communicator of an epoch from another thread, while its owner computes.
#[derive(Clone)]
pub struct MeetingAborter(pub(super) Arc<Meeting>);

impl MeetingAborter {
    /// Ends the epoch's communicator and whatever it is doing. Doing so twice does no harm. MEETING-3.
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

/// The threads of one member's part.
#[derive(Default)]
pub(super) struct Threads(Vec<Receiver<()>>);

impl Threads {
    /// Starts the watchdog of a meeting.
    pub(super) fn watch(&mut self, name: &str, meeting: &Arc<Meeting>) {
        let meeting = meeting.clone();
        self.run(name, move || watchdog::run(&meeting));
    }

    /// Runs something on a thread of its own; its end is told by a hang-up.
    pub(super) fn run(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        let (running, ended) = mpsc::channel();
        let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            work();
            drop(running);
        });
        if let Err(error) = spawned {
            // The closure is gone, and with it what it would have told: the others see that nothing comes.
            tracing::error!(%error, name, "a thread cannot be started");
        }
        self.0.push(ended);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Aborts the meeting, lets go of what the threads wait for, and waits for their ends. MEETING-3.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if that takes longer than `patience`.
    pub(super) fn end(
        self,
        meeting: &Arc<Meeting>,
        patience: Duration,
        let_go: impl FnOnce(),
    ) -> Result<(), NcclError> {
        let deadline = Instant::now() + patience;
        MeetingAborter(meeting.clone()).abort(patience)?;
        // What the threads still hold may be freed now, and not before.
        let_go();
        for thread in self.0 {
            let rest = deadline.saturating_duration_since(Instant::now());
            if thread.recv_timeout(rest) == Err(RecvTimeoutError::Timeout) {
                return Err(NcclError::AbortStuck {
                    rank: meeting.rank,
                    waited_ms: patience.as_millis() as u64,
                });
            }
        }
        Ok(())
    }
}
