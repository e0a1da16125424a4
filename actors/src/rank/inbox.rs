//! What waits for the compute thread.

use std::collections::VecDeque;
use std::time::Duration;

use crossbeam_channel::{Receiver, RecvTimeoutError, TryRecvError};
use eaglet_runtime::control::CoordinatorCommand;
use eaglet_runtime::ids::Epoch;
use eaglet_runtime::link::BulkEvent;

use super::nccl::Word;

/// What the compute thread takes from its inbox.
pub(super) enum Input {
    /// The coordinator said something.
    Command(CoordinatorCommand),
    /// Something arrived on the bulk plane.
    Bulk(BulkEvent),
    /// Something came of what this rank does over NCCL.
    Sum {
        /// In which epoch.
        epoch: Epoch,
        /// What.
        word: Word,
    },
}

/// The inbox. Whoever waits for one thing in the middle of work puts everything else aside; it comes before what arrives
/// later.
pub(super) struct Inbox {
    arriving: Receiver<Input>,
    aside: VecDeque<Input>,
}

/// Why there is no input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nothing {
    /// None is there yet.
    Yet,
    /// None will come any more.
    Ever,
}

impl Inbox {
    pub(super) fn new(arriving: Receiver<Input>) -> Self {
        Self {
            arriving,
            aside: VecDeque::new(),
        }
    }

    /// The next input; `patience` of zero looks once, `None` waits for ever.
    pub(super) fn next(&mut self, patience: Option<Duration>) -> Result<Input, Nothing> {
        match self.aside.pop_front() {
            Some(input) => Ok(input),
            None => self.arrival(patience),
        }
    }

    /// As [`Self::next`], but only what was not put aside before.
    pub(super) fn arrival(&self, patience: Option<Duration>) -> Result<Input, Nothing> {
        match patience {
            None => self.arriving.recv().map_err(|_| Nothing::Ever),
            Some(Duration::ZERO) => self.arriving.try_recv().map_err(|error| match error {
                TryRecvError::Empty => Nothing::Yet,
                TryRecvError::Disconnected => Nothing::Ever,
            }),
            Some(patience) => self.arriving.recv_timeout(patience).map_err(|error| match error {
                RecvTimeoutError::Timeout => Nothing::Yet,
                RecvTimeoutError::Disconnected => Nothing::Ever,
            }),
        }
    }

    /// Keeps an input for later.
    pub(super) fn put_aside(&mut self, input: Input) {
        self.aside.push_back(input);
    }
}
