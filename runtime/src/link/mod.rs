//! The bulk plane: tensors between processes of one host through shared memory.
//!
//! A link goes one way, from a [`BulkSender`] to the [`BulkListener`] it connected to. The sender makes two sealed memfds,
//! a ring of slots and a heap, and passes their descriptors over a Unix socket in the abstract namespace. A large
//! tensor is written into the heap, once, and read there by the receiver for as long as it likes; who makes it in a
//! [`HeapBuffer`] writes it there himself. Headers, small tensors, and what finds no room in the heap, are copied into
//! slots, and out of them into pooled buffers. Only fixed-size frames travel on the socket.
//!
//! Invariants, cited by the tests:
//!
//! - **L-1 bounded**: a sender holds at most its queue, its ring and its heap; a receiver holds at most its budget per
//!   connection, or one message if that is larger, beside what lies in the heaps. The slots are the credits.
//! - **L-2 no hang**: the death of either process, and `close` on either side, end every wait of the other threads.
//! - **L-3 distrust**: nothing that a peer says is used as a length, an index or a state before it was checked; a bad
//!   frame ends its connection with an error that says what was wrong.
//! - **L-4 no traces**: sockets have no name in the file system, and a ring dies with its last holder.
//! - **L-5 whole or nothing**: a message is delivered once, whole, in the order of its sender, or not at all.
//!
//! Every thread is a plain OS thread: one writer a sender, one acceptor a listener and one reader a connection.

mod checksum;
mod connection;
mod error;
mod frame;
mod heap;
mod listener;
mod message;
mod part;
mod pool;
mod ring;
mod sender;
mod socket;
#[cfg(test)]
mod tests;

pub use error::{LinkError, SendError};
pub use heap::HeapBuffer;
pub use listener::{BulkEvent, BulkListener, ListenerOptions, ListenerStats};
pub use message::{BulkHeader, BulkKind, BulkMessage, BulkOutgoing, StateKind, bytes_of_f32};
pub use part::Part;
pub use pool::{BufferPool, PooledBuffer};
pub use sender::{BulkSender, SenderOptions};
pub use socket::{Endpoint, Hello};

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
