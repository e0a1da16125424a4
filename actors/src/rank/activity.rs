//! What the compute thread does, readable from the control thread at any time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use eaglet_runtime::control::Activity;

/// A shared note of the present activity.
#[derive(Clone)]
pub(super) struct ActivityGauge(Arc<Mutex<Note>>);

struct Note {
    activity: Activity,
    since: Instant,
    /// Spent on rows and steps before the present activity.
    busy: Duration,
    /// Spent waiting for peers before the present activity.
    waiting: Duration,
    /// Spent waiting for input before the present activity.
    idle: Duration,
}

/// What a gauge shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) activity: Activity,
    /// For how long it has been doing that.
    pub(super) age_ms: u64,
    /// Spent on rows and steps since the start.
    pub(super) busy_ms: u64,
    /// Spent waiting for peers in the middle of work since the start.
    pub(super) waiting_ms: u64,
    /// Spent waiting for input since the start.
    pub(super) idle_ms: u64,
}

impl Note {
    /// Busy, waiting for peers, waiting for input.
    fn times(&self) -> [Duration; 3] {
        let elapsed = self.since.elapsed();
        let mut times = [self.busy, self.waiting, self.idle];
        match self.activity {
            // What is done once says nothing about how busy a rank is.
            Activity::Loading => {}
            activity if activity.is_work() => times[0] += elapsed,
            activity if activity.is_waiting() => times[1] += elapsed,
            _ => times[2] += elapsed,
        }
        times
    }

    fn begin(&mut self, activity: Activity) {
        let [busy, waiting, idle] = self.times();
        *self = Self {
            activity,
            since: Instant::now(),
            busy,
            waiting,
            idle,
        };
    }
}

impl Default for ActivityGauge {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Note {
            activity: Activity::Idle,
            since: Instant::now(),
            busy: Duration::ZERO,
            waiting: Duration::ZERO,
            idle: Duration::ZERO,
        })))
    }
}

impl ActivityGauge {
    /// Notes that another activity begins.
    pub(super) fn enter(&self, activity: Activity) {
        let mut note = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if note.activity != activity {
            note.begin(activity);
        }
    }

    /// Notes that an activity begins, even if it is the same again.
    pub(super) fn restart(&self, activity: Activity) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .begin(activity);
    }

    /// The activity, and what was spent so far.
    pub(super) fn read(&self) -> Reading {
        let note = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [busy, waiting, idle] = note.times();
        Reading {
            activity: note.activity,
            age_ms: note.since.elapsed().as_millis() as u64,
            busy_ms: busy.as_millis() as u64,
            waiting_ms: waiting.as_millis() as u64,
            idle_ms: idle.as_millis() as u64,
        }
    }
}
