//! The queue of a sender: callers fill it as far as its limits allow, the writer of its transport empties it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::bell::Wake;
use super::error::LinkError;
use super::message::Encoded;

pub(super) struct Outbox {
    max_messages: usize,
    max_bytes: u64,
    queue: Mutex<Queue>,
    /// Told when the queue shrinks, when everything was taken and when the link ends.
    changed: Condvar,
    closing: AtomicBool,
    /// Wakes the writer.
    wake: Wake,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Encoded>,
    /// Messages and bytes of `waiting` and of what the writer has not let go.
    held_messages: usize,
    held_bytes: u64,
    /// What the receiver has not taken over of messages that the writer has let go.
    under_way: usize,
    ended: Option<LinkError>,
}

/// Why the outbox does not take a message.
pub(super) enum NotTaken {
    /// There was no room in time.
    Full,
    /// The link has ended.
    Ended(LinkError),
}

impl Outbox {
    pub(super) fn new(max_messages: usize, max_bytes: u64, wake: Wake) -> Arc<Self> {
        Arc::new(Self {
            max_messages,
            max_bytes,
            queue: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            wake,
        })
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a change until `deadline`; says whether there is time left.
    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, deadline: Instant) -> (MutexGuard<'a, Queue>, bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (queue, false);
        }
        let (queue, _) = self
            .changed
            .wait_timeout(queue, left)
            .unwrap_or_else(PoisonError::into_inner);
        (queue, true)
    }

    /// L-1: takes a message when there is room; one always is when nothing is held.
    pub(super) fn push(&self, message: Encoded, timeout: Duration) -> Result<(), NotTaken> {
        let deadline = Instant::now() + timeout;
        let mut queue = self.queue();
        loop {
            if let Some(error) = &queue.ended {
                return Err(NotTaken::Ended(error.clone()));
            }
            let bytes = queue.held_bytes.saturating_add(message.message_bytes);
            let fits = queue.held_messages < self.max_messages && bytes <= self.max_bytes;
            if fits || queue.held_messages == 0 {
                break;
            }
            let in_time;
            (queue, in_time) = self.wait(queue, deadline);
            if !in_time {
                return Err(NotTaken::Full);
            }
        }
        queue.held_messages += 1;
        queue.held_bytes += message.message_bytes;
        queue.waiting.push_back(message);
        drop(queue);
        (self.wake)();
        Ok(())
    }

    /// Waits until the receiver has everything; says whether it has in time.
    pub(super) fn drain(&self, timeout: Duration) -> Result<bool, LinkError> {
        let deadline = Instant::now() + timeout;
        let mut queue = self.queue();
        loop {
            if let Some(error) = &queue.ended {
                return Err(error.clone());
            }
            if queue.held_messages == 0 && queue.under_way == 0 {
                return Ok(true);
            }
            let in_time;
            (queue, in_time) = self.wait(queue, deadline);
            if !in_time {
                return Ok(false);
            }
        }
    }

    pub(super) fn ended(&self) -> Option<LinkError> {
        self.queue().ended.clone()
    }

    pub(super) fn held_bytes(&self) -> u64 {
        self.queue().held_bytes
    }

    /// Tells the writer to end the link.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        (self.wake)();
    }

    /// Waits until the link has ended; at most until `timeout`.
    pub(super) fn wait_for_end(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let mut queue = self.queue();
        let mut in_time = true;
        while queue.ended.is_none() && in_time {
            (queue, in_time) = self.wait(queue, deadline);
        }
    }

    /// Whether the writer is to end the link.
    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Acquire)
    }

    /// The message that the writer is to send next.
    pub(super) fn next(&self) -> Option<Encoded> {
        self.queue().waiting.pop_front()
    }

    /// The writer needs the parts of a message no more.
    pub(super) fn let_go(&self, message_bytes: u64) {
        let mut queue = self.queue();
        queue.held_messages -= 1;
        queue.held_bytes -= message_bytes;
        drop(queue);
        self.changed.notify_all();
    }

    /// Something more is with the receiver that it has not taken over.
    pub(super) fn lent(&self) {
        self.queue().under_way += 1;
    }

    /// The receiver has taken so much of it over.
    pub(super) fn taken(&self, count: usize) {
        self.queue().under_way -= count;
        self.changed.notify_all();
    }

    /// The link has ended; what was in the queue is dropped. The first reason counts.
    pub(super) fn end(&self, error: &LinkError) {
        let dropped = {
            let mut queue = self.queue();
            let ended = queue.ended.clone().or_else(|| Some(error.clone()));
            std::mem::replace(
                &mut *queue,
                Queue {
                    ended,
                    ..Queue::default()
                },
            )
        };
        self.changed.notify_all();
        drop(dropped);
    }
}
