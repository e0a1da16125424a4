//! What the compute thread does, readable from the control thread at any time.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use eaglet_runtime::control::Activity;

/// A shared note of the present activity.
#[derive(Clone)]
pub(super) struct ActivityGauge(Arc<Mutex<(Activity, Instant)>>);

impl Default for ActivityGauge {
    fn default() -> Self {
        Self(Arc::new(Mutex::new((Activity::Idle, Instant::now()))))
    }
}

impl ActivityGauge {
    /// Notes that another activity begins.
    pub(super) fn enter(&self, activity: Activity) {
        let mut note = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if note.0 != activity {
            *note = (activity, Instant::now());
        }
    }

    /// Notes that an activity begins, even if it is the same again.
    pub(super) fn restart(&self, activity: Activity) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (activity, Instant::now());
    }

    /// The activity, and for how long.
    pub(super) fn read(&self) -> (Activity, u64) {
        let note = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (note.0, note.1.elapsed().as_millis() as u64)
    }
}
