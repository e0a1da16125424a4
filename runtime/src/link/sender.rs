//! The sending end of a link.

use std::sync::Arc;
use std::time::Duration;

use super::error::{LinkError, SendError};
use super::hello::Hello;
use super::message::{BulkOutgoing, Encoded};
use super::outbox::{NotTaken, Outbox};
use super::{DEFAULT_HEAP_BYTES, DEFAULT_MAX_MESSAGE_BYTES, HeapBuffer, Network, memory, network};

/// Limits and sizes of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderOptions {
    /// In memory: slots of the ring, 1 to [`super::MAX_SLOTS`].
    pub slots: u32,
    /// In memory: bytes of each slot, 4096 to [`super::MAX_SLOT_BYTES`].
    pub slot_bytes: u32,
    /// In memory: largest size of the heap, in bytes; 0 for none. Memory is reserved as it is used.
    pub heap_bytes: u64,
    /// Most messages in the queue, counting what is being sent.
    pub queue_messages: usize,
    /// Most bytes in the queue, counting what is being sent. One message is always taken.
    pub queue_bytes: u64,
    /// Largest message, header and parts.
    pub max_message_bytes: u64,
    /// Whether the payload carries checksums, which the receiver then compares.
    pub checksum: bool,
    /// How long the receiver may take to accept the link.
    pub handshake_timeout_ms: u64,
    /// For drills: the chunk, counted from 0 (between hosts the header or part), in which a bit flips after its checksum was made.
    pub corrupt_nth: Option<u64>,
}

impl Default for SenderOptions {
    fn default() -> Self {
        Self {
            slots: 8,
            slot_bytes: 1 << 20,
            heap_bytes: DEFAULT_HEAP_BYTES,
            queue_messages: 64,
            queue_bytes: 256 << 20,
            max_message_bytes: DEFAULT_MAX_MESSAGE_BYTES,
            checksum: true,
            handshake_timeout_ms: 5_000,
            corrupt_nth: None,
        }
    }
}

/// The sending end of a link, with a queue of its own and a writer: a thread within a host, a task between hosts.
///
/// Dropping it is [`BulkSender::close`].
pub struct BulkSender {
    hello: Hello,
    max_message_bytes: u64,
    outbox: Arc<Outbox>,
    transport: Transport,
}

/// What carries the messages.
enum Transport {
    Memory(memory::Link),
    Network(network::Link),
}

impl BulkSender {
    /// Opens a link to the listener of this host under `name`, which must be the occupant that `hello` names.
    ///
    /// `on_end` is called once, on the writer thread, if the link ends for another reason than [`BulkSender::close`].
    ///
    /// # Errors
    /// If nobody listens, the receiver refuses or is silent, or the system lacks memory or descriptors. Waits at most
    /// `handshake_timeout_ms` for each answer.
    pub fn connect(
        name: &str,
        hello: Hello,
        options: SenderOptions,
        on_end: impl FnOnce(&LinkError) + Send + 'static,
    ) -> Result<Self, LinkError> {
        let (outbox, link) = memory::connect(name, &hello, &options, on_end)?;
        Ok(Self {
            hello,
            max_message_bytes: options.max_message_bytes,
            outbox,
            transport: Transport::Memory(link),
        })
    }

    /// Opens a link to a listener on any host: to the address of `network`, with its token.
    ///
    /// `on_end` is called once, on a thread that all network links share, if the link ends for another reason than
    /// [`BulkSender::close`]. It must not block.
    ///
    /// # Errors
    /// If nobody listens, the receiver refuses or is silent, or the system lacks descriptors or threads. Waits at most
    /// `handshake_timeout_ms`.
    pub fn connect_remote(
        network: &Network,
        hello: Hello,
        options: SenderOptions,
        on_end: impl FnOnce(&LinkError) + Send + 'static,
    ) -> Result<Self, LinkError> {
        let (outbox, link) = network::connect(network, &hello, &options, on_end)?;
        Ok(Self {
            hello,
            max_message_bytes: options.max_message_bytes,
            outbox,
            transport: Transport::Network(link),
        })
    }

    /// Queues a message; waits up to `timeout` for room.
    ///
    /// A thread that also consumes messages should not wait here: while it waits it gives nothing back, so two ranks that
    /// send to each other would hold each other up. It keeps what [`BulkSender::try_send`] returns and goes on consuming.
    ///
    /// # Errors
    /// If there was no room in time (the message comes back), the message contradicts itself or is too large, or the
    /// link has ended.
    pub fn send(&self, message: BulkOutgoing, timeout: Duration) -> Result<(), SendError> {
        let Hello { from, .. } = self.hello;
        let encoded = Encoded::new(&message, from.seat, from.generation, self.max_message_bytes)
            .map_err(SendError::Invalid)?;
        self.outbox.push(encoded, timeout).map_err(|why| match why {
            NotTaken::Full => SendError::Full(Box::new(message)),
            NotTaken::Ended(error) => SendError::Ended(error),
        })
    }

    /// Memory of `length` bytes in which a tensor for this link can be made, so that nobody has to copy it; none if it is
    /// small, the heap has no room for it, or the link goes to another host.
    pub fn buffer(&self, length: usize) -> Option<HeapBuffer> {
        match &self.transport {
            Transport::Memory(link) => link.buffer(length),
            Transport::Network(_) => None,
        }
    }

    /// Queues a message if there is room now.
    ///
    /// # Errors
    /// As [`BulkSender::send`].
    pub fn try_send(&self, message: BulkOutgoing) -> Result<(), SendError> {
        self.send(message, Duration::ZERO)
    }

    /// Waits until the receiver has taken over everything that was queued; says whether it did so in time.
    ///
    /// # Errors
    /// If the link has ended.
    pub fn drain(&self, timeout: Duration) -> Result<bool, LinkError> {
        self.outbox.drain(timeout)
    }

    /// Why the link has ended, if it has.
    pub fn ended(&self) -> Option<LinkError> {
        self.outbox.ended()
    }

    /// Bytes in the queue, counting what is being sent.
    pub fn queued_bytes(&self) -> u64 {
        self.outbox.held_bytes()
    }

    /// What this end said first.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Ends the link at once: what is queued is dropped. Call [`BulkSender::drain`] before to have it delivered.
    pub fn close(self) {
        // Dropping it does so.
    }
}

impl Drop for BulkSender {
    fn drop(&mut self) {
        self.outbox.close();
        match &mut self.transport {
            Transport::Memory(link) => link.join(),
            Transport::Network(link) => link.join(&self.outbox),
        }
    }
}
