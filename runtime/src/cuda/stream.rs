//! Streams of work of a device, and marks in them.

use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cudarc::driver::sys::{CUevent, CUstream};

use super::driver::{Context, CudaError};
use super::memory::{Pinned, View, ViewMut};
use super::turns::Turns;

/// Not synchronised with the default stream.
const NON_BLOCKING: u32 = 1;
/// An event that takes no time stamp.
const NO_TIMING: u32 = 2;

/// Pieces for small things on their way to a device, and bytes of each: what is sent ahead of the device is less than their
/// product.
const RING_PIECES: usize = 8;
const RING_PIECE_BYTES: usize = 256 << 10;

/// Work that a device does in order.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: CUstream,
    /// Made when something small is sent.
    ring: Mutex<Option<Turns>>,
}

#[allow(unsafe_code)]
// SAFETY: a stream may be used by any thread that makes its context current.
unsafe impl Send for Stream {}
#[allow(unsafe_code)]
// SAFETY: the driver locks a stream itself.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    ///
    /// # Errors
    /// If the driver makes none.
    #[allow(unsafe_code)]
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let table = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        context.check("cuStreamCreate", unsafe {
            (table.stream_create)(&raw mut raw, NON_BLOCKING)
        })?;
        Ok(Self {
            context: context.clone(),
            raw,
            ring: Mutex::default(),
        })
    }

    /// Its device's context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until everything asked for so far is done.
    ///
    /// # Errors
    /// If any of it failed: the error of a kernel shows here.
    #[allow(unsafe_code)]
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let table = self.context.bind()?;
        // SAFETY: the stream is alive.
        self.context.check("cuStreamSynchronize", unsafe {
            (table.stream_synchronize)(self.raw)
        })
    }

    /// Whether everything asked for so far is done.
    ///
    /// # Errors
    /// If any of it failed.
    #[allow(unsafe_code)]
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let table = self.context.bind()?;
        // SAFETY: the stream is alive.
        let code = unsafe { (table.stream_query)(self.raw) };
        self.context.gpu.driver.is_done("cuStreamQuery", code)
    }

    /// Copies from the host; done when it returns.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ.
    #[allow(unsafe_code)]
    pub fn upload<T: Pod>(&self, from: &[T], to: ViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "lengths of an upload");
        if from.is_empty() {
            return Ok(());
        }
        let table = self.context.bind()?;
        // SAFETY: both are alive until the copy is done, which is waited for.
        self.context.check("cuMemcpyHtoDAsync_v2", unsafe {
            (table.copy_to_device)(to.address(), from.as_ptr().cast(), size_of_val(from), self.raw)
        })?;
        self.synchronize()
    }

    /// Copies from the host, as later work of this stream sees it; `from` may be changed when it returns. Small copies
    /// wait for nothing.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ.
    #[allow(unsafe_code)]
    pub fn send<T: Pod>(&self, from: &[T], to: ViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "lengths of an upload");
        let bytes: &[u8] = bytemuck::cast_slice(from);
        if bytes.len() > RING_PIECE_BYTES || bytes.is_empty() {
            return self.upload(from, to);
        }
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = match &mut *ring {
            Some(ring) => ring,
            none => none.insert(Turns::new(&self.context, RING_PIECES, RING_PIECE_BYTES)?),
        };
        ring.align();
        if ring.room() < bytes.len() {
            ring.turn(self)?;
        }
        let kept = ring.write(bytes)?;
        // SAFETY: TURNS-1 keeps what is copied from as it is, and the ring lives until the stream has ended.
        unsafe { self.upload_later(bytemuck::cast_slice(kept), to) }
    }

    /// Copies from pinned memory of the host, and does not wait.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ.
    ///
    /// # Safety
    /// Until an event that is recorded after this, `from` must stay alive and unchanged.
    #[allow(unsafe_code)]
    pub(super) unsafe fn upload_later<T: Pod>(
        &self,
        from: &[T],
        to: ViewMut<'_, T>,
    ) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "lengths of an upload");
        let table = self.context.bind()?;
        // SAFETY: the target is alive, for memory is freed only after the work that uses it; the caller keeps the source.
        self.context.check("cuMemcpyHtoDAsync_v2", unsafe {
            (table.copy_to_device)(to.address(), from.as_ptr().cast(), size_of_val(from), self.raw)
        })
    }

    /// Copies to the host; done when it returns.
    ///
    /// # Errors
    /// If the driver refuses, or if what was asked for before failed.
    ///
    /// # Panics
    /// If the lengths differ.
    #[allow(unsafe_code)]
    pub fn download<T: Pod>(&self, from: View<'_, T>, to: &mut [T]) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "lengths of a download");
        if to.is_empty() {
            return Ok(());
        }
        let table = self.context.bind()?;
        // SAFETY: both are alive until the copy is done, which is waited for.
        self.context.check("cuMemcpyDtoHAsync_v2", unsafe {
            (table.copy_to_host)(to.as_mut_ptr().cast(), from.address(), size_of_val(to), self.raw)
        })?;
        self.synchronize()
    }

    /// Begins to copy to the host; the mark behind it.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If there is less room.
    ///
    /// # Safety
    /// Both must stay as they are, and alive, until the mark is reached.
    #[allow(unsafe_code)]
    pub(super) unsafe fn begin_download(
        &self,
        from: View<'_, u8>,
        to: &mut Pinned<u8>,
    ) -> Result<Event, CudaError> {
        assert!(from.len() <= to.len(), "lengths of a download");
        let table = self.context.bind()?;
        let done = Event::new(&self.context)?;
        // SAFETY: there is room, and the caller keeps both.
        self.context.check("cuMemcpyDtoHAsync_v2", unsafe {
            (table.copy_to_host)(to.as_mut_ptr().cast(), from.address(), from.len(), self.raw)
        })?;
        self.record(&done)?;
        Ok(done)
    }

    /// Copies on the device.
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the lengths differ.
    #[allow(unsafe_code)]
    pub fn copy<T: Pod>(&self, from: View<'_, T>, to: ViewMut<'_, T>) -> Result<(), CudaError> {
        assert_eq!(from.len(), to.len(), "lengths of a copy");
        if from.is_empty() {
            return Ok(());
        }
        let table = self.context.bind()?;
        // SAFETY: both lie on the device; memory is freed only after the work that uses it.
        self.context.check("cuMemcpyDtoDAsync_v2", unsafe {
            (table.copy_on_device)(
                to.address(),
                from.address(),
                from.len() * size_of::<T>(),
                self.raw,
            )
        })
    }

    /// Sets all bytes to zero.
    ///
    /// # Errors
    /// If the driver refuses.
    #[allow(unsafe_code)]
    pub fn zero<T: Pod>(&self, of: ViewMut<'_, T>) -> Result<(), CudaError> {
        if of.is_empty() {
            return Ok(());
        }
        let table = self.context.bind()?;
        // SAFETY: the memory is that of the view.
        self.context.check("cuMemsetD8Async", unsafe {
            (table.set_bytes)(of.address(), 0, of.len() * size_of::<T>(), self.raw)
        })
    }

    /// Marks this place in the stream.
    ///
    /// # Errors
    /// If the driver refuses.
    #[allow(unsafe_code)]
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        let table = self.context.bind()?;
        // SAFETY: both are alive.
        self.context.check("cuEventRecord", unsafe {
            (table.event_record)(event.raw, self.raw)
        })
    }

    /// What is asked for later waits for the mark.
    ///
    /// # Errors
    /// If the driver refuses.
    #[allow(unsafe_code)]
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        let table = self.context.bind()?;
        // SAFETY: both are alive.
        self.context.check("cuStreamWaitEvent", unsafe {
            (table.stream_wait)(self.raw, event.raw, 0)
        })
    }
}

impl Drop for Stream {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(table) = self.context.bind() {
            // What copies out of the ring ends before the ring; an error has been told by whoever waited.
            // SAFETY: the stream is alive.
            unsafe { (table.stream_synchronize)(self.raw) };
            // SAFETY: made once, destroyed once; nothing is under way.
            unsafe { (table.stream_destroy)(self.raw) };
        }
    }
}

/// A mark in a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

#[allow(unsafe_code)]
// SAFETY: an event may be used by any thread that makes its context current.
unsafe impl Send for Event {}
#[allow(unsafe_code)]
// SAFETY: the driver locks an event itself.
unsafe impl Sync for Event {}

impl Event {
    /// A new mark, not yet placed.
    ///
    /// # Errors
    /// If the driver makes none.
    #[allow(unsafe_code)]
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let table = context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        context.check("cuEventCreate", unsafe {
            (table.event_create)(&raw mut raw, NO_TIMING)
        })?;
        Ok(Self {
            context: context.clone(),
            raw,
        })
    }

    /// Whether everything before the mark is done.
    ///
    /// # Errors
    /// If any of it failed.
    #[allow(unsafe_code)]
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let table = self.context.bind()?;
        // SAFETY: the event is alive.
        let code = unsafe { (table.event_query)(self.raw) };
        self.context.gpu.driver.is_done("cuEventQuery", code)
    }

    /// Waits until everything before the mark is done.
    ///
    /// # Errors
    /// If any of it failed.
    #[allow(unsafe_code)]
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let table = self.context.bind()?;
        // SAFETY: the event is alive.
        self.context.check("cuEventSynchronize", unsafe {
            (table.event_synchronize)(self.raw)
        })
    }
}

impl Drop for Event {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if let Ok(table) = self.context.bind() {
            // SAFETY: made once, destroyed once.
            unsafe { (table.event_destroy)(self.raw) };
        }
    }
}
