//! What can go wrong on a link.

use rustix::io::Errno;

use super::message::BulkOutgoing;
use super::{MAX_PARTS, MAX_SLOT_BYTES, MAX_SLOTS, MAX_TOKEN_BYTES};

/// Most bytes of a reason that is told to the peer.
pub(super) const REASON_LIMIT_BYTES: usize = 1024;

/// Why a link could not be made, or ended.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    /// The name of a socket is empty or too long.
    #[error("`{name}` is no name for a link: it must have 1 to 107 bytes")]
    Name {
        /// The name.
        name: String,
    },
    /// Another process listens under this name.
    #[error("link name `{name}` is taken by another process; use another run name or end that process")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// Nobody listens under this name.
    #[error("nobody listens on link `{name}`; its process has ended or has not started yet")]
    NoListener {
        /// The name.
        name: String,
    },
    /// A system call failed.
    #[error("link: cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: Errno,
    },
    /// The options ask for a ring that is not allowed.
    #[error(
        "a ring of {slots} slots of {slot_bytes} bytes is not allowed; \
         use 1 to {MAX_SLOTS} slots of 4096 to {MAX_SLOT_BYTES} bytes and no more than the receiver takes"
    )]
    RingShape {
        /// Number of slots.
        slots: u32,
        /// Bytes of each.
        slot_bytes: u32,
    },
    /// The options ask for a heap that is not allowed.
    #[error("a heap of {bytes} bytes is not allowed; use at most {limit_bytes}")]
    HeapSize {
        /// Its size.
        bytes: u64,
        /// The limit of this end.
        limit_bytes: u64,
    },
    /// A descriptor is no ring: not a memfd, not sealed or of another size.
    #[error("a descriptor passed with the hello is no ring and no heap: {reason}")]
    Ring {
        /// What is wrong.
        reason: String,
    },
    /// The peer runs as somebody else.
    #[error(
        "the peer runs as user {peer_uid}, this process as {own_uid}; both ends of a link need the same user"
    )]
    OtherUser {
        /// User of the peer.
        peer_uid: u32,
        /// User of this process.
        own_uid: u32,
    },
    /// The peer did not answer the hello, sent none, or, between hosts, gives no sign of life any more.
    #[error("the peer was silent for {timeout_ms} ms: it is stopped, busy or cannot be reached")]
    Silent {
        /// How long it was given.
        timeout_ms: u64,
    },
    /// The peer ended the link and said why.
    #[error("the peer refused the link: {reason}")]
    Refused {
        /// Its words.
        reason: String,
    },
    /// A sender knows another token than the listener, or none.
    #[error("the peer does not know the token of this launch")]
    Token,
    /// A token that cannot be sent.
    #[error("the token of a network must be 1 to {MAX_TOKEN_BYTES} visible ascii characters")]
    BadToken,
    /// A hello was addressed to another occupant.
    #[error("the hello is for {wanted}, this is {here}")]
    WrongReceiver {
        /// Seat and generation that the sender wants.
        wanted: String,
        /// Seat and generation that listen.
        here: String,
    },
    /// A newer occupant of the sender's seat has said hello before.
    #[error("{sender} was superseded by generation {newest}")]
    Superseded {
        /// The sender.
        sender: String,
        /// The newest generation of its seat.
        newest: u32,
    },
    /// The listener has as many connections as it allows.
    #[error("the listener has {limit} connections already, which is its limit")]
    TooManyConnections {
        /// The limit.
        limit: usize,
    },
    /// A frame is not one of ours or was damaged.
    #[error("bad frame: {reason}")]
    Frame {
        /// What is wrong.
        reason: String,
    },
    /// Bytes are not those that were sent.
    #[error(
        "chunk {sequence} (slot, page or part {place}) is damaged: its checksum is {actual:016x} instead of {announced:016x}"
    )]
    Checksum {
        /// Number of the chunk on its connection.
        sequence: u64,
        /// Its slot or its first page in the heap; between hosts 0 for the header and `n` for the `n`-th part.
        place: u32,
        /// Checksum that was announced.
        announced: u64,
        /// Checksum of the bytes.
        actual: u64,
    },
    /// The header of a message is malformed or contradicts its frames or its hello.
    #[error("bad message header: {reason}")]
    Header {
        /// What is wrong.
        reason: String,
    },
    /// A message is larger than allowed.
    #[error(
        "a message of {bytes} bytes exceeds the limit of {limit_bytes}; split it or raise max_message_bytes"
    )]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A message has too many parts.
    #[error("a message of {parts} parts exceeds the limit of {MAX_PARTS}")]
    TooManyParts {
        /// How many.
        parts: usize,
    },
    /// The peer's end is gone without a goodbye.
    #[error("the peer's process ended or dropped the link {place}")]
    PeerLost {
        /// Where in the conversation.
        place: &'static str,
    },
    /// This side has closed the link.
    #[error("the link was closed on this side")]
    Closed,
}

impl LinkError {
    /// For `map_err` on system calls.
    pub(super) fn system(what: &'static str) -> impl FnOnce(Errno) -> Self {
        move |source| Self::System { what, source }
    }

    /// What is told to the peer: the text, cut to [`REASON_LIMIT_BYTES`].
    pub(super) fn told(&self) -> String {
        let mut text = self.to_string();
        let mut end = text.len().min(REASON_LIMIT_BYTES);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text
    }

    pub(super) fn frame(reason: impl Into<String>) -> Self {
        Self::Frame {
            reason: reason.into(),
        }
    }
}

/// Why a message was not queued. It is handed back where another try can succeed.
#[derive(Debug, thiserror::Error)]
pub enum SendError {
    /// The queue is full: the receiver is slower than the sender.
    #[error("the queue of the link is full")]
    Full(Box<BulkOutgoing>),
    /// The message can never be sent on this link.
    #[error(transparent)]
    Invalid(LinkError),
    /// The link has ended, for this reason.
    #[error("the link has ended: {0}")]
    Ended(LinkError),
}
