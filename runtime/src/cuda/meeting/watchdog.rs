//! A look at what was asked of NCCL, from a thread that asks it for nothing.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::Meeting;
use crate::cuda::nccl::NcclError;
use crate::cuda::stream::Event;
use crate::cuda::sums::SumError;

/// Between two looks.
const INTERVAL: Duration = Duration::from_millis(10);

/// Something that was asked for.
struct Watched {
    number: u64,
    what: &'static str,
    since: Instant,
    deadline: Instant,
    /// Comes when the call has returned.
    done: Option<Event>,
}

#[derive(Default)]
struct State {
    pending: VecDeque<Watched>,
    asked: u64,
    is_over: bool,
}

/// What is pending, in the order in which it was asked for.
#[derive(Default)]
pub(super) struct Watch {
    state: Mutex<State>,
    over: Condvar,
}

impl Watch {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something is about to be asked for; to be called before a call that may hang.
    pub(super) fn asking(&self, what: &'static str, deadline: Instant) -> u64 {
        let mut state = self.state();
        state.asked += 1;
        let number = state.asked;
        state.pending.push_back(Watched {
            number,
            what,
            since: Instant::now(),
            deadline,
            done: None,
        });
        number
    }

    /// The call returned; what was asked for is done with the event, or with the call if there is none.
    pub(super) fn asked(&self, number: u64, done: Option<Event>) {
        let mut state = self.state();
        let Some(place) = state.pending.iter().position(|watched| watched.number == number) else {
            return;
        };
        match done {
            Some(done) => state.pending[place].done = Some(done),
            None => {
                state.pending.remove(place);
            }
        }
    }

    /// How much is pending.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn pending(&self) -> Result<usize, NcclError> {
        let mut state = self.state();
        // On one stream all that is before something that is done is done.
        while let Some(Watched { done: Some(done), .. }) = state.pending.front() {
            if !done.is_done()? {
                break;
            }
            state.pending.pop_front();
        }
        Ok(state.pending.len())
    }

    /// All that was asked for is done.
    pub(super) fn clear(&self) {
        self.state().pending.clear();
    }

    /// What is late: its name, and for how long it was waited for.
    fn late(&self) -> Option<(&'static str, Instant)> {
        let now = Instant::now();
        let state = self.state();
        let late = state.pending.iter().find(|watched| watched.deadline <= now)?;
        Some((late.what, late.since))
    }

    /// Nothing is watched any more.
    pub(super) fn end(&self) {
        self.state().is_over = true;
        self.over.notify_all();
    }

    /// Waits for the next look; whether there is one.
    fn goes_on(&self) -> bool {
        let state = self.state();
        let (state, _) = self
            .over
            .wait_timeout_while(state, INTERVAL, |state| !state.is_over)
            .unwrap_or_else(PoisonError::into_inner);
        !state.is_over
    }
}

/// Looks until the epoch is over or broken.
pub(super) fn run(meeting: &Meeting) {
    while meeting.watch.goes_on() {
        if let Err(error) = look(meeting) {
            meeting.fail(&SumError::Nccl(error));
            return;
        }
    }
}

fn look(meeting: &Meeting) -> Result<(), NcclError> {
    if let Some(communicator) = meeting.communicator() {
        match communicator.is_settled("the communicator") {
            // The end of the epoch is no fault of it.
            Err(NcclError::Aborted { .. }) => return Ok(()),
            other => other?,
        };
    }
    meeting.watch.pending()?;
    match meeting.watch.late() {
        Some((what, since)) => Err(meeting.late(what, since.elapsed())),
        None => Ok(()),
    }
}
