//! Small things on their way to a device: copied into pinned memory, so that nobody waits for the stream.
//!
//! RING-1: a segment is written again only after the copies out of it are done.

use std::sync::Arc;

use super::driver::{Context, CudaError};
use super::memory::Pinned;
use super::stream::Event;

/// Segments of a ring, and their size: what is sent ahead of the device is less than their product.
const SEGMENTS: usize = 8;
const SEGMENT_BYTES: usize = 256 << 10;
/// Copies start at multiples of this.
const ALIGNMENT: usize = 64;

/// Pinned memory that is written round and round.
#[derive(Debug)]
pub(super) struct Ring {
    memory: Pinned<u8>,
    /// Marks the last copy out of each segment; `None` if there was none.
    left: [Option<Event>; SEGMENTS],
    segment: usize,
    /// Bytes of the present segment that are written.
    written: usize,
}

impl Ring {
    /// The largest copy that fits.
    pub(super) const LARGEST: usize = SEGMENT_BYTES;

    pub(super) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Pinned::new(context, SEGMENTS * SEGMENT_BYTES)?,
            left: Default::default(),
            segment: 0,
            written: 0,
        })
    }

    /// Keeps `bytes` and calls `copy` with where they are: it is to start a copy from there.
    ///
    /// `mark` makes a mark behind everything that was started.
    ///
    /// # Errors
    /// If the device failed, or what `copy` and `mark` return.
    ///
    /// # Panics
    /// If there are more than [`Self::LARGEST`].
    pub(super) fn send(
        &mut self,
        bytes: &[u8],
        mark: impl FnOnce() -> Result<Event, CudaError>,
        copy: impl FnOnce(&[u8]) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        assert!(bytes.len() <= Self::LARGEST, "{} bytes for a ring", bytes.len());
        if self.written + bytes.len() > SEGMENT_BYTES {
            self.left[self.segment] = Some(mark()?);
            self.segment = (self.segment + 1) % SEGMENTS;
            self.written = 0;
            if let Some(event) = self.left[self.segment].take() {
                event.synchronize()?;
            }
        }
        let start = self.segment * SEGMENT_BYTES + self.written;
        self.written = (self.written + bytes.len()).next_multiple_of(ALIGNMENT);
        let place = &mut self.memory[start..start + bytes.len()];
        place.copy_from_slice(bytes);
        copy(place)
    }
}
