//! What wakes the other side of a queue or a budget.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::EventfdFlags;

use super::error::LinkError;

/// Wakes whoever waits: a thread through its [`Bell`], a task through its waker.
pub(super) type Wake = Box<dyn Fn() + Send + Sync>;

/// A descriptor that rings, so that a thread can wait for it and for its socket at once.
#[derive(Clone)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Bell {
    pub(super) fn new() -> Result<Self, LinkError> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LinkError::system("make an eventfd"))?;
        Ok(Self(Arc::new(fd)))
    }

    /// What rings it.
    pub(super) fn wake(&self) -> Wake {
        let bell = self.clone();
        Box::new(move || {
            // Fails only when the counter is at its maximum, and then the bell rings already.
            let _ = rustix::io::write(&bell.0, &1_u64.to_ne_bytes());
        })
    }

    /// Silences it. What happened before is to be looked for afterwards.
    pub(super) fn hush(&self) {
        // It does not block, and an empty counter is as good as a read one.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
