//! A measurement that is stopped by its user still cleans up: it looks here between two looks at its cluster.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use tokio::signal::unix::{SignalKind, signal};

/// Whether the user wants this process to end.
pub(super) struct Interrupt {
    asked: Arc<AtomicBool>,
    /// Listens as long as it lives.
    _runtime: tokio::runtime::Runtime,
}

impl Interrupt {
    /// From now on SIGINT and SIGTERM do not end the process at once.
    ///
    /// # Errors
    /// If the system has no threads or signals to listen with.
    pub(super) fn listen() -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("cannot start a thread that waits for signals")?;
        let asked = Arc::new(AtomicBool::new(false));
        let inside = runtime.enter();
        for kind in [SignalKind::interrupt(), SignalKind::terminate()] {
            let mut signals = signal(kind).context("cannot wait for signals")?;
            let asked = Arc::clone(&asked);
            runtime.spawn(async move {
                signals.recv().await;
                asked.store(true, Ordering::Relaxed);
            });
        }
        drop(inside);
        Ok(Self {
            asked,
            _runtime: runtime,
        })
    }

    /// # Errors
    /// If the user has asked for the end.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(!self.asked.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }
}
