//! Communicators over NCCL: made without blocking, watched, and aborted from outside.
//!
//! NCCL recovers from nothing: when a rank dies the others spin, often without an error. So nothing here waits without a
//! deadline. The coordinator's word decides that a peer is gone; every survivor aborts its communicator, and the next
//! epoch makes a new one from a new [`UniqueId`]. Communicators are never shrunk: ranks would change their numbers, and
//! seats may not.
//!
//! COMMUNICATOR-1: no call waits beyond its deadline. COMMUNICATOR-2: nobody uses a communicator after its abort began.

mod error;

use std::ffi::{c_char, c_int, c_void};
use std::path::Path;
use std::sync::{Arc, RwLock, mpsc};
use std::time::{Duration, Instant};

use bytemuck::Pod;
use cudarc::driver::sys::CUstream;
use cudarc::nccl::sys::{ncclConfig_t, ncclDataType_t, ncclRedOp_t};

use super::driver::Context;
use super::library::{LibraryError, SearchPath, functions};
use super::memory::{View, ViewMut};
use super::stream::{Event, Stream};
use error::name;

pub use error::NcclError;

/// A communicator's handle.
type Raw = *mut c_void;

functions! {
    /// NCCL's functions.
    NcclTable of Nccl {
        fn version as "ncclGetVersion" (version: *mut c_int);
        fn unique_id as "ncclGetUniqueId" (id: *mut UniqueId);
        fn init as "ncclCommInitRankConfig" (communicator: *mut Raw, ranks: c_int, id: UniqueId, rank: c_int, config: *mut ncclConfig_t);
        fn async_error as "ncclCommGetAsyncError" (communicator: Raw, error: *mut c_int);
        fn abort as "ncclCommAbort" (communicator: Raw);
        fn all_reduce as "ncclAllReduce" (from: u64, to: u64, count: usize, kind: ncclDataType_t, operation: ncclRedOp_t, communicator: Raw, stream: CUstream);
        fn all_gather as "ncclAllGather" (from: u64, to: u64, count: usize, kind: ncclDataType_t, communicator: Raw, stream: CUstream);
        fn broadcast as "ncclBroadcast" (from: u64, to: u64, count: usize, kind: ncclDataType_t, root: c_int, communicator: Raw, stream: CUstream);
    }
}

/// Still going on.
const IN_PROGRESS: c_int = 7;
/// `NCCL_CONFIG_UNDEF_INT` of nccl.h.
const UNDEFINED: c_int = c_int::MIN;
/// The first word of a configuration, of nccl.h.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
/// The version whose configuration we fill; newer ones take it, older ones read its beginning.
const CONFIG_VERSION: u32 = 22_700;
/// Between two looks at something that is still going on.
const POLL: Duration = Duration::from_micros(50);
/// For the abort of a communicator that nobody aborted.
const LAST_PATIENCE: Duration = Duration::from_secs(10);

/// What ranks need to find each other: made by one of them, sent to the others by the control plane, used once.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

impl std::fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "UniqueId({})", crate::digest::Digest::of(&self.0))
    }
}

type LastError = unsafe extern "C" fn(Raw) -> *const c_char;

/// NCCL, opened.
#[derive(Debug)]
pub struct Nccl {
    table: NcclTable,
    last_error: Option<LastError>,
}

#[allow(unsafe_code)]
impl Nccl {
    /// Opens NCCL.
    ///
    /// # Errors
    /// If it is missing or too old.
    pub fn open(search: &SearchPath) -> Result<Arc<Self>, LibraryError> {
        let table = NcclTable::open(search)?;
        // SAFETY: the signature is that of nccl.h.
        let last_error = unsafe { table.library.function::<LastError>("ncclGetLastError").ok() };
        Ok(Arc::new(Self { table, last_error }))
    }

    /// The file it was opened from.
    pub(super) fn library(&self) -> &super::library::Library {
        &self.table.library
    }

    /// The file it was opened from.
    pub fn path(&self) -> &Path {
        self.table.library.path()
    }

    /// Its version, `(major, minor, patch)`.
    pub fn version(&self) -> (u32, u32, u32) {
        let mut version = 0;
        // SAFETY: writes one integer.
        unsafe { (self.table.version)(&raw mut version) };
        let version = version.unsigned_abs();
        // The encoding since 2.9.
        (version / 10_000, version / 100 % 100, version % 100)
    }

    /// A new id. Ranks meet at the process that made it, which must live until all have met.
    ///
    /// # Errors
    /// If NCCL finds no network interface.
    pub fn unique_id(&self) -> Result<UniqueId, NcclError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        let code = unsafe { (self.table.unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code, std::ptr::null_mut())?;
        Ok(id)
    }

    fn check(&self, call: &'static str, code: c_int, of: Raw) -> Result<(), NcclError> {
        if code == 0 {
            return Ok(());
        }
        let words = self.last_error.and_then(|last_error| {
            // SAFETY: NCCL gives a text of its own, or null; null asks for the thread's last error.
            let text = unsafe { last_error(of) };
            if text.is_null() {
                return None;
            }
            // SAFETY: the text ends with a zero.
            let text = unsafe { std::ffi::CStr::from_ptr(text) }
                .to_string_lossy()
                .into_owned();
            Some(text).filter(|text| !text.is_empty())
        });
        Err(NcclError::Call {
            call,
            code,
            name: name(code),
            detail: words.map_or_else(String::new, |words| format!(": {words}")),
        })
    }
}

/// A type that NCCL knows.
pub trait Collectable: Pod + sealed::Sealed {}
impl Collectable for f32 {}
impl Collectable for u32 {}
impl Collectable for u8 {}

mod sealed {
    use cudarc::nccl::sys::ncclDataType_t;

    pub trait Sealed {
        const KIND: ncclDataType_t;
    }
    impl Sealed for f32 {
        const KIND: ncclDataType_t = ncclDataType_t::ncclFloat32;
    }
    impl Sealed for u32 {
        const KIND: ncclDataType_t = ncclDataType_t::ncclUint32;
    }
    impl Sealed for u8 {
        const KIND: ncclDataType_t = ncclDataType_t::ncclUint8;
    }
}

/// A handle that is passed between threads.
#[derive(Debug, Clone, Copy)]
struct Handle(Raw);

#[allow(unsafe_code)]
// SAFETY: a communicator may be asked and aborted by other threads than the one that uses it.
unsafe impl Send for Handle {}
#[allow(unsafe_code)]
// SAFETY: as above; the lock around it keeps the abort apart from everything else.
unsafe impl Sync for Handle {}

/// One rank of a group that sums, gathers and broadcasts.
#[derive(Debug)]
pub struct Communicator {
    nccl: Arc<Nccl>,
    context: Arc<Context>,
    handle: Arc<RwLock<Option<Handle>>>,
    rank: usize,
    ranks: usize,
}

/// A collective that was asked for.
#[derive(Debug)]
pub struct Pending<'a> {
    communicator: &'a Communicator,
    what: &'static str,
    done: Event,
    since: Instant,
    deadline: Instant,
}

#[allow(unsafe_code)]
impl Communicator {
    /// Begins to meet the other ranks; returns at once. [`Communicator::wait_until_ready`] before anything else.
    ///
    /// # Errors
    /// If NCCL refuses.
    pub fn begin(
        nccl: &Arc<Nccl>,
        context: &Arc<Context>,
        id: UniqueId,
        ranks: usize,
        rank: usize,
    ) -> Result<Self, NcclError> {
        context.bind()?;
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: std::ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the configuration is read before the call returns.
        let code =
            unsafe { (nccl.table.init)(&raw mut raw, ranks as c_int, id, rank as c_int, &raw mut config) };
        if code != IN_PROGRESS {
            nccl.check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
        }
        Ok(Self {
            nccl: nccl.clone(),
            context: context.clone(),
            handle: Arc::new(RwLock::new(Some(Handle(raw)))),
            rank,
            ranks,
        })
    }

    /// This rank's number.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Waits until all ranks have met.
    ///
    /// # Errors
    /// [`NcclError::Late`] at the deadline: then abort.
    pub fn wait_until_ready(&self, deadline: Instant) -> Result<(), NcclError> {
        self.settle("the meeting", deadline)
    }

    /// Does `call` with the communicator, unless it is aborted.
    fn with<R>(&self, what: &'static str, call: impl FnOnce(Raw) -> R) -> Result<R, NcclError> {
        // Who aborts waits for the lock; whoever comes then finds nothing.
        let Ok(handle) = self.handle.try_read() else {
            return Err(NcclError::Aborted { what });
        };
        match *handle {
            Some(Handle(raw)) => Ok(call(raw)),
            None => Err(NcclError::Aborted { what }),
        }
    }

    /// Whether nothing is still going on in NCCL itself.
    ///
    /// # Errors
    /// If something failed in NCCL since it was asked last, or the communicator is aborted.
    pub(super) fn is_settled(&self, what: &'static str) -> Result<bool, NcclError> {
        self.with(what, |raw| {
            let mut state = 0;
            // SAFETY: the communicator is alive, for the abort waits; writes one integer.
            let code = unsafe { (self.nccl.table.async_error)(raw, &raw mut state) };
            self.nccl.check("ncclCommGetAsyncError", code, raw)?;
            if state == IN_PROGRESS {
                return Ok(false);
            }
            self.nccl.check(what, state, raw).map(|()| true)
        })?
    }

    fn settle(&self, what: &'static str, deadline: Instant) -> Result<(), NcclError> {
        let since = Instant::now();
        while !self.is_settled(what)? {
            if Instant::now() >= deadline {
                return Err(self.late(what, since));
            }
            std::thread::sleep(POLL);
        }
        Ok(())
    }

    fn late(&self, what: &'static str, since: Instant) -> NcclError {
        NcclError::Late {
            what,
            rank: self.rank,
            ranks: self.ranks,
            waited_ms: since.elapsed().as_millis() as u64,
        }
    }

    fn start(
        &self,
        stream: &Stream,
        what: &'static str,
        deadline: Instant,
        call: impl FnOnce(Raw) -> c_int,
    ) -> Result<Pending<'_>, NcclError> {
        self.context.bind()?;
        let since = Instant::now();
        self.with(what, |raw| match call(raw) {
            IN_PROGRESS => Ok(()),
            code => self.nccl.check(what, code, raw),
        })??;
        // Not everything is on the stream before NCCL says so, and no other call may come in between.
        self.settle(what, deadline)?;
        let done = Event::new(&self.context)?;
        stream.record(&done)?;
        Ok(Pending {
            communicator: self,
            what,
            done,
            since,
            deadline,
        })
    }

    /// Replaces `buffer` by its sum over all ranks, in NCCL's order: not bit for bit that of seats.
    ///
    /// # Errors
    /// If NCCL refuses, or at the deadline.
    pub fn all_reduce(
        &self,
        stream: &Stream,
        buffer: ViewMut<'_, f32>,
        deadline: Instant,
    ) -> Result<Pending<'_>, NcclError> {
        let (at, count) = (buffer.address(), buffer.len());
        self.start(stream, "all-reduce", deadline, |raw| {
            let (kind, sum) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
            // SAFETY: the buffer has `count` elements; in place is allowed.
            unsafe { (self.nccl.table.all_reduce)(at, at, count, kind, sum, raw, stream.raw()) }
        })
    }

    /// Writes what every rank gives, in the order of ranks: `to` `[ranks, from.len()]`.
    ///
    /// # Errors
    /// If NCCL refuses, or at the deadline.
    ///
    /// # Panics
    /// If the lengths do not fit.
    pub fn all_gather<T: Collectable>(
        &self,
        stream: &Stream,
        from: View<'_, T>,
        to: ViewMut<'_, T>,
        deadline: Instant,
    ) -> Result<Pending<'_>, NcclError> {
        assert_eq!(to.len(), from.len() * self.ranks, "lengths of an all-gather");
        let (source, target, count) = (from.address(), to.address(), from.len());
        self.start(stream, "all-gather", deadline, |raw| {
            // SAFETY: both buffers have the lengths that were checked.
            unsafe { (self.nccl.table.all_gather)(source, target, count, T::KIND, raw, stream.raw()) }
        })
    }

    /// Replaces `buffer` by that of rank `root`.
    ///
    /// # Errors
    /// If NCCL refuses, or at the deadline.
    pub fn broadcast<T: Collectable>(
        &self,
        stream: &Stream,
        buffer: ViewMut<'_, T>,
        root: usize,
        deadline: Instant,
    ) -> Result<Pending<'_>, NcclError> {
        let (at, count) = (buffer.address(), buffer.len());
        self.start(stream, "broadcast", deadline, |raw| {
            // SAFETY: the buffer has `count` elements; in place is allowed.
            unsafe { (self.nccl.table.broadcast)(at, at, count, T::KIND, root as c_int, raw, stream.raw()) }
        })
    }

    /// Ends the communicator and whatever it is doing; may be called by any thread, while others wait for collectives.
    ///
    /// # Errors
    /// [`NcclError::AbortStuck`] if NCCL does not return in time: the process has to end.
    pub fn abort(&self, patience: Duration) -> Result<(), NcclError> {
        let (handle, nccl, context) = (self.handle.clone(), self.nccl.clone(), self.context.clone());
        let (done, waiting) = mpsc::channel();
        // A thread of its own, for nobody may wait for it without a deadline.
        std::thread::spawn(move || {
            let mut handle = match handle.write() {
                Ok(handle) => handle,
                Err(poisoned) => poisoned.into_inner(),
            };
            if let Some(Handle(raw)) = handle.take()
                && context.bind().is_ok()
            {
                // SAFETY: nobody else has the communicator, and nobody will.
                unsafe { (nccl.table.abort)(raw) };
            }
            // Nobody may be left to hear it.
            let _ = done.send(());
        });
        waiting.recv_timeout(patience).map_err(|_| NcclError::AbortStuck {
            rank: self.rank,
            waited_ms: patience.as_millis() as u64,
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let is_there = self.handle.try_read().is_ok_and(|handle| handle.is_some());
        if is_there && let Err(error) = self.abort(LAST_PATIENCE) {
            tracing::error!(%error, "a communicator was left behind");
        }
    }
}

impl Pending<'_> {
    /// The mark behind the collective, for somebody else to watch.
    pub(super) fn into_event(self) -> Event {
        self.done
    }

    /// Whether it is done.
    ///
    /// # Errors
    /// If NCCL or the device failed, or at the deadline: then abort.
    pub fn is_done(&self) -> Result<bool, NcclError> {
        // An error of NCCL's first: a collective that failed may look done.
        self.communicator.is_settled(self.what)?;
        if self.done.is_done()? {
            return Ok(true);
        }
        if Instant::now() >= self.deadline {
            return Err(self.communicator.late(self.what, self.since));
        }
        Ok(false)
    }

    /// Waits until it is done.
    ///
    /// # Errors
    /// As [`Pending::is_done`].
    pub fn wait(&self) -> Result<(), NcclError> {
        while !self.is_done()? {
            std::thread::sleep(POLL);
        }
        Ok(())
    }
}
