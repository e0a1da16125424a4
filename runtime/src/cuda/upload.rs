//! Weights and rows on their way to a device: through two pieces of pinned memory that take turns (TURNS-1, TURNS-2).
//!
//! UPLOAD-1: a model of any size needs no more of the host's memory than the two pieces; what it is read from is mapped,
//! and its pages can go when they were read.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use super::driver::CudaError;
use super::memory::ViewMut;
use super::stream::Stream;
use super::turns::Turns;

/// Pieces, and bytes of each.
const PIECES: usize = 2;
const PIECE_BYTES: usize = 8 << 20;

/// The pieces, once they were needed.
#[derive(Debug, Default)]
pub(super) struct Uploads(Mutex<Option<Turns>>);

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
            none => none.insert(Turns::new(stream.context(), PIECES, PIECE_BYTES)?),
        };
        // An upload before this one may have failed half-way.
        pieces.forget();
        let mut upload = Upload {
            pieces,
            stream,
            to,
            sent: 0,
        };
        fill(&mut upload)?;
        upload.flush()?;
        assert_eq!(upload.sent, upload.to.len(), "bytes of an upload");
        Ok(())
    }
}

/// One upload under way.
pub(super) struct Upload<'a> {
    pieces: &'a mut Turns,
    stream: &'a Stream,
    to: ViewMut<'a, u8>,
    sent: usize,
}

impl Upload<'_> {
    /// Sends these bytes next.
    ///
    /// # Errors
    /// If the driver refuses.
    pub(super) fn write(&mut self, mut bytes: &[u8]) -> Result<(), CudaError> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(self.pieces.room()));
            self.pieces.write(now)?;
            if self.pieces.room() == 0 {
                self.flush()?;
            }
            bytes = later;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), CudaError> {
        let bytes = self.pieces.written();
        if bytes.is_empty() {
            return Ok(());
        }
        let end = self.sent + bytes.len();
        let to = self.to.reborrow().part(self.sent..end);
        // SAFETY: TURNS-1, for it is the next one's turn.
        unsafe { self.stream.upload_later(bytes, to)? };
        self.sent = end;
        self.pieces.turn(self.stream)
    }
}
