//! The tensors of messages that arrived.

use std::fmt;
use std::ops::Deref;

use bytes::Bytes;

use super::memory::heap::PlacedTensor;
use super::pool::PooledBuffer;

/// A tensor of a message that arrived.
pub struct Part(Place);

enum Place {
    /// In a buffer of this process.
    Pooled(PooledBuffer),
    /// In the heap of its sender.
    Placed(PlacedTensor),
}

impl Part {
    /// The tensor, shared without a copy. The budget of its connection is relieved at once: what the caller keeps is the
    /// caller's to bound.
    pub fn into_bytes(self) -> Bytes {
        match self.0 {
            Place::Pooled(buffer) => buffer.into_bytes(),
            Place::Placed(tensor) => Bytes::from_owner(tensor),
        }
    }
}

impl From<PooledBuffer> for Part {
    fn from(buffer: PooledBuffer) -> Self {
        Self(Place::Pooled(buffer))
    }
}

impl From<PlacedTensor> for Part {
    fn from(tensor: PlacedTensor) -> Self {
        Self(Place::Placed(tensor))
    }
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.0 {
            Place::Pooled(buffer) => buffer,
            Place::Placed(tensor) => tensor.as_ref(),
        }
    }
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let in_place = matches!(self.0, Place::Placed(_));
        f.debug_struct("Part")
            .field("length", &self.len())
            .field("in_place", &in_place)
            .finish()
    }
}
