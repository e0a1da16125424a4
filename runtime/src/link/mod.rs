//! The bulk plane: tensors between processes, of one host through shared memory and of several through HTTP/2.
//!
//! A link goes one way, from a [`BulkSender`] to the [`BulkListener`] it connected to. A listener takes links of both
//! kinds at a time and tells of them in the same way; generations fence over both. Within a host (`memory`) large tensors
//! lie in memory that both ends map; between hosts (`network`) each message is a POST, and what arrives is copied once,
//! into pooled buffers.
//!
//! Invariants, cited by the tests:
//!
//! - **L-1 bounded**: a sender holds at most its queue, its ring and its heap; a receiver holds at most its budget per
//!   connection, or one message if that is larger, beside what lies in the heaps, and between hosts the windows of the
//!   connection. Slots and windows are the credits.
//! - **L-2 no hang**: the death of either process, and `close` on either side, end every wait of the other threads; between
//!   hosts also the silence of a peer that is stopped or cannot be reached.
//! - **L-3 distrust**: nothing that a peer says is used as a length, an index or a state before it was checked; a bad
//!   frame ends its connection with an error that says what was wrong, and the peer is told. Between hosts a peer that
//!   does not know the token of the launch is heard no further.
//! - **L-4 no traces**: sockets have no name in the file system, and a ring dies with its last holder.
//! - **L-5 whole or nothing**: a message is delivered once, whole, in the order of its sender, or not at all. An end
//!   without a goodbye is a loss.
//!
//! Within a host every thread is a plain OS thread: one writer a sender, one acceptor a listener, one reader a connection.
//! Between hosts all links of a process share two threads of a runtime, which do nothing but move bytes.

mod assembly;
mod bell;
mod checksum;
mod error;
mod hello;
mod listener;
mod memory;
mod message;
mod network;
mod outbox;
mod part;
mod pool;
mod sender;
#[cfg(test)]
mod tests;

pub use error::{LinkError, SendError};
pub use hello::{Endpoint, Hello};
pub use listener::{BulkEvent, BulkListener, ListenerOptions, ListenerStats};
pub use memory::heap::HeapBuffer;
pub use message::{BulkHeader, BulkKind, BulkMessage, BulkOutgoing, StateKind, bytes_of_f32};
pub use network::Network;
pub use part::Part;
pub use pool::{BufferPool, PooledBuffer};
pub use sender::{BulkSender, SenderOptions};

/// Most parts of one message. Tensors are few and large; the bound keeps a header from announcing millions of them.
pub const MAX_PARTS: usize = 64;

/// Most slots of a ring. Each slot has at most one frame under way in either direction, so this bound keeps all of them
/// within the default buffer of a socket and a frame is hardly ever waited for.
pub const MAX_SLOTS: u32 = 128;

/// Tensors of fewer bytes go through the slots: two copies of them cost less than a place in the heap.
pub const MIN_PLACED_BYTES: usize = 64 << 10;

/// Largest slot, in bytes. Slots beyond a few MiB fall out of the caches between the two copies.
pub const MAX_SLOT_BYTES: u32 = 64 << 20;

/// Default of the largest heap, in bytes. Pages are reserved when they are used first.
pub const DEFAULT_HEAP_BYTES: u64 = 1 << 30;

/// Default of the largest message, in bytes: header and parts.
pub const DEFAULT_MAX_MESSAGE_BYTES: u64 = 1 << 30;

/// Longest token of a [`Network`], in bytes.
pub const MAX_TOKEN_BYTES: usize = 256;
