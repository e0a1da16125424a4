//! States on their way from a device to the host, while the device goes on computing.
//!
//! LANDING-1: the memory at both ends of a copy is given back after the copy.

use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Cuda, must};
use super::driver::{Context, CudaError};
use super::memory::Pinned;
use super::staging::Lent;
use super::stream::Event;

/// Memory is taken in multiples of this, in bytes, so that a row that is a little longer finds what the one before had.
const STEP: usize = 16 << 10;

/// Pinned memory for what arrives, of one kind: kept for what comes next.
#[derive(Debug, Default)]
pub(super) struct Landing {
    free: Mutex<Vec<Pinned<u8>>>,
}

impl Landing {
    /// At least `bytes` of pinned memory.
    ///
    /// # Errors
    /// If the host does not give it.
    pub(super) fn lend(&self, context: &Arc<Context>, bytes: usize) -> Result<Pinned<u8>, CudaError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = bytes.next_multiple_of(STEP);
        if let Some(fitting) = free.iter().position(|memory| memory.len() >= bytes) {
            return Ok(free.swap_remove(fitting));
        }
        // All that arrive in a pass are alike, so what is too small is of no use any more.
        free.clear();
        Pinned::new(context, bytes)
    }
}

/// Rows on their way from a device to the host.
#[derive(Debug)]
pub struct InFlight<'d> {
    pub(super) landing: &'d Landing,
    /// Where they arrive, without gaps; taken when this is dropped.
    pub(super) arrived: Option<Pinned<u8>>,
    /// Where they come from; it goes back to its pool with this.
    #[expect(dead_code, reason = "held until the copy is done")]
    pub(super) source: Lent<'d, u8>,
    /// Marks their arrival.
    pub(super) done: Event,
    pub(super) rows: usize,
    /// Bytes of a row.
    pub(super) bytes: usize,
}

impl InFlight<'_> {
    /// Waits for the rows, which lie without gaps.
    ///
    /// # Panics
    /// With its [`CudaError`] if the device failed.
    pub(crate) fn wait(&self) -> impl ExactSizeIterator<Item = &[u8]> {
        must(self.done.synchronize());
        let arrived = self.arrived.as_deref().unwrap_or_default();
        arrived[..self.rows * self.bytes].chunks_exact(self.bytes)
    }

    /// Waits for the rows and writes row `i` to `out[i · row_bytes..]`.
    ///
    /// # Panics
    /// If there is not so much room; with its [`CudaError`] if the device failed.
    pub fn land(self, out: &mut [u8], row_bytes: usize) {
        for (out, row) in out.chunks_mut(row_bytes).zip(self.wait()) {
            out[..self.bytes].copy_from_slice(row);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        // LANDING-1; an error has been told, or will be by the next operation.
        let _ = self.done.synchronize();
        if let Some(memory) = self.arrived.take() {
            let mut free = self.landing.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.push(memory);
        }
    }
}

impl Cuda {
    /// Begins to bring rows to the host, beside what is computed next.
    #[allow(unsafe_code)]
    pub(super) fn begin_landing<'d>(
        &'d self,
        landing: &'d Landing,
        source: Lent<'d, u8>,
        rows: usize,
        bytes: usize,
    ) -> Result<InFlight<'d>, CudaError> {
        let ready = Event::new(&self.context)?;
        self.stream.record(&ready)?;
        self.copies.wait_for(&ready)?;
        let mut arrived = landing.lend(&self.context, rows * bytes)?;
        // SAFETY: LANDING-1, both go into what is returned, and it waits for the mark before it gives them back.
        let done = unsafe {
            self.copies
                .begin_download(source.view().part(0..rows * bytes), &mut arrived)?
        };
        Ok(InFlight {
            landing,
            arrived: Some(arrived),
            source,
            done,
            rows,
            bytes,
        })
    }
}
