//! Pinned memory of the host, in pieces that take turns: one is filled while a device copies out of the others.
//!
//! TURNS-1: a piece is written again, or freed, only after the copies out of it are done.
//! TURNS-2: whatever is sent, no more of the host's memory is taken than the pieces.

use std::sync::Arc;

use super::driver::{Context, CudaError};
use super::memory::Pinned;
use super::stream::{Event, Stream};

/// Copies start at multiples of this.
const ALIGNMENT: usize = 64;

/// The pieces, and how far the present one is written.
#[derive(Debug)]
pub(super) struct Turns {
    pieces: Vec<Piece>,
    now: usize,
    written: usize,
}

#[derive(Debug)]
struct Piece {
    memory: Pinned<u8>,
    /// Marks the last copy out of it.
    left: Event,
    /// Whether there is a copy that nobody has waited for.
    is_read: bool,
}

impl Piece {
    /// Waits until nothing copies out of it.
    fn free(&mut self) -> Result<(), CudaError> {
        if self.is_read {
            self.left.synchronize()?;
            self.is_read = false;
        }
        Ok(())
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        // A device that failed reads nothing any more.
        let _ = self.free();
    }
}

impl Turns {
    /// `pieces` of `bytes` each.
    ///
    /// # Errors
    /// If the host does not give them.
    pub(super) fn new(context: &Arc<Context>, pieces: usize, bytes: usize) -> Result<Self, CudaError> {
        let piece = |_| {
            Ok(Piece {
                memory: Pinned::new(context, bytes)?,
                left: Event::new(context)?,
                is_read: false,
            })
        };
        Ok(Self {
            pieces: (0..pieces).map(piece).collect::<Result<_, CudaError>>()?,
            now: 0,
            written: 0,
        })
    }

    /// Bytes that the present piece still takes.
    pub(super) fn room(&self) -> usize {
        self.pieces[self.now].memory.len() - self.written
    }

    /// Writes to the present piece; where the bytes lie there. Waits if copies out of its last turn are not done.
    ///
    /// # Errors
    /// If the device failed.
    ///
    /// # Panics
    /// If there is not so much [room](Self::room).
    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<&[u8], CudaError> {
        let piece = &mut self.pieces[self.now];
        if self.written == 0 {
            piece.free()?;
        }
        let place = &mut piece.memory[self.written..][..bytes.len()];
        place.copy_from_slice(bytes);
        self.written += bytes.len();
        Ok(place)
    }

    /// What was written to the present piece.
    pub(super) fn written(&self) -> &[u8] {
        &self.pieces[self.now].memory[..self.written]
    }

    /// What is written next may be copied by itself.
    pub(super) fn align(&mut self) {
        let end = self.pieces[self.now].memory.len();
        self.written = self.written.next_multiple_of(ALIGNMENT).min(end);
    }

    /// The next piece, once all copies out of the present one were begun on `stream`.
    ///
    /// # Errors
    /// If the device failed.
    pub(super) fn turn(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let piece = &mut self.pieces[self.now];
        piece.is_read = true;
        stream.record(&piece.left)?;
        self.now = (self.now + 1) % self.pieces.len();
        self.written = 0;
        Ok(())
    }

    /// Forgets what was written to the present piece and is not copied.
    pub(super) fn forget(&mut self) {
        self.written = 0;
    }
}
