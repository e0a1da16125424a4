//! The threads that drive all network links of a process.

use std::cell::Cell;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use hyper::rt::Executor;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::task::JoinSet;

use super::system;
use crate::link::error::LinkError;

/// One for what goes out and one for what comes in: each moves a few GB/s.
const THREADS: usize = 2;

/// How long the end of the last link waits for the threads.
const PATIENCE: Duration = Duration::from_secs(1);

/// Those of the links that there are.
static CURRENT: Mutex<Weak<Workers>> = Mutex::new(Weak::new());

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// The threads. They end with the last link and listener that hold this.
pub(super) struct Workers(Option<Runtime>);

impl Workers {
    pub(super) fn get() -> Result<Arc<Self>, LinkError> {
        let mut current = CURRENT.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(workers) = current.upgrade() {
            return Ok(workers);
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("link-network")
            .on_thread_start(|| IS_WORKER.set(true))
            .enable_io()
            .enable_time()
            .build()
            .map_err(system("start the threads of network links"))?;
        let workers = Arc::new(Self(Some(runtime)));
        *current = Arc::downgrade(&workers);
        Ok(workers)
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = &self.0 {
            runtime.spawn(task);
        }
    }

    /// Does something that needs a runtime around it.
    pub(super) fn within<T>(&self, work: impl FnOnce() -> T) -> T {
        let _inside = self.0.as_ref().map(Runtime::enter);
        work()
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let Some(runtime) = self.0.take() else { return };
        if Handle::try_current().is_ok() {
            // A thread that drives tasks, these or others, must not wait for threads.
            runtime.shutdown_background();
        } else {
            runtime.shutdown_timeout(PATIENCE);
        }
    }
}

/// The tasks of one connection, which are cancelled together: none keeps its socket open when the link is over.
#[derive(Clone, Default)]
pub(super) struct Tasks(Arc<Mutex<JoinSet<()>>>);

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Tasks {
    fn execute(&self, task: F) {
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Those that have ended are forgotten.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }
}

impl Tasks {
    /// Cancels them.
    pub(super) fn cancel(&self) {
        drop(self.take());
    }

    /// Cancels them and waits until they are gone.
    pub(super) async fn end(&self) {
        self.take().shutdown().await;
    }

    fn take(&self) -> JoinSet<()> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// L-2: whether this thread drives links. It must not wait for one.
pub(super) fn is_worker() -> bool {
    IS_WORKER.get()
}
