//! Weights on their way to a device: through two pieces of pinned memory, one of which is filled while the other is sent.
//!
//! UPLOAD-1: a model of any size needs no more of the host's memory than the two pieces; what it is read from is mapped,
//! and its pages can go when they were read.
#![allow(unsafe_code)]

use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Context, CudaError};
use super::memory::{Pinned, ViewMut};
use super::stream::{Event, Stream};

/// Bytes of a piece.
pub(super) const PIECE_BYTES: usize = 8 << 20;

/// The pieces, once they were needed.
#[derive(Debug, Default)]
pub(super) struct Uploads(Mutex<Option<[Piece; 2]>>);

#[derive(Debug)]
struct Piece {
    memory: Pinned<u8>,
    /// Marks the end of the last transfer from it.
    sent: Event,
    /// Whether there was one.
    used: bool,
}

impl Piece {
    fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Pinned::new(context, PIECE_BYTES)?,
            sent: Event::new(context)?,
            used: false,
        })
    }

    /// Waits until nothing is sent from it any more.
    fn free(&mut self) -> Result<(), CudaError> {
        if self.used {
            self.sent.synchronize()?;
            self.used = false;
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

impl Uploads {
    /// Sends what `fill` writes, in its order, to `to`.
    ///
    /// # Errors
    /// If there is no room for the pieces, or the driver refuses.
    ///
    /// # Panics
    /// If `fill` does not write as many bytes as `to` has.
    pub(super) fn send(
        &self,
        stream: &Stream,
        to: ViewMut<'_, u8>,
        fill: impl FnOnce(&mut Upload<'_>) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut pieces = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pieces = match &mut *pieces {
            Some(pieces) => pieces,
            none => {
                let context = stream.context();
                none.insert([Piece::new(context)?, Piece::new(context)?])
            }
        };
        let mut upload = Upload {
            pieces,
            stream,
            to,
            sent: 0,
            filled: 0,
        };
        fill(&mut upload)?;
        upload.flush()?;
        assert_eq!(upload.sent, upload.to.len(), "bytes of an upload");
        Ok(())
    }
}

/// One upload under way.
pub(super) struct Upload<'a> {
    pieces: &'a mut [Piece; 2],
    stream: &'a Stream,
    to: ViewMut<'a, u8>,
    sent: usize,
    filled: usize,
}

impl Upload<'_> {
    /// Sends these bytes next.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CudaError> {
        while !bytes.is_empty() {
            let piece = &mut self.pieces[0];
            if self.filled == 0 {
                piece.free()?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(PIECE_BYTES - self.filled));
            piece.memory[self.filled..][..now.len()].copy_from_slice(now);
            self.filled += now.len();
            if self.filled == PIECE_BYTES {
                self.flush()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        if self.filled == 0 {
            return Ok(());
        }
        let end = self.sent + self.filled;
        let piece = &mut self.pieces[0];
        let to = self.to.reborrow().part(self.sent..end);
        // SAFETY: the piece is written to or freed only after the event behind the transfer.
        unsafe { self.stream.upload_later(&piece.memory[..self.filled], to)? };
        piece.used = true;
        self.stream.record(&piece.sent)?;
        (self.sent, self.filled) = (end, 0);
        self.pieces.swap(0, 1);
        Ok(())
    }
}
