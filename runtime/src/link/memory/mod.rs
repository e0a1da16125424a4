//! Links within a host: tensors through shared memory.
//!
//! The sender makes two sealed memfds, a ring of slots and a heap, and passes their descriptors over a Unix socket in the
//! abstract namespace. A large tensor is written into the heap, once, and read there by the receiver for as long as it
//! likes; who makes it in a [`HeapBuffer`] writes it there himself. Headers, small tensors, and what finds no room in the
//! heap, are copied into slots, and out of them into pooled buffers. Only fixed-size frames travel on the socket. The
//! slots are the credits.

mod accept;
mod connection;
pub(super) mod frame;
pub(super) mod heap;
pub(super) mod ring;
pub(super) mod socket;
mod writer;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::io::Errno;

pub(super) use self::accept::{Acceptor, listen};
use self::frame::{Frame, FrameKind, FrameReader, Read};
use self::heap::{Heap, HeapBuffer};
use self::ring::{RingShape, WriteRing};
use self::writer::{Writer, is_placed};
use super::bell::Bell;
use super::error::LinkError;
use super::hello::Hello;
use super::outbox::Outbox;
use super::sender::SenderOptions;

/// The sending end: its heap and its writer thread.
pub(super) struct Link {
    heap: Option<Arc<Heap>>,
    writer: Option<JoinHandle<()>>,
}

/// Says hello and starts the writer.
pub(super) fn connect(
    name: &str,
    hello: &Hello,
    options: &SenderOptions,
    on_end: impl FnOnce(&LinkError) + Send + 'static,
) -> Result<(Arc<Outbox>, Link), LinkError> {
    let shape = RingShape::new(options.slots, options.slot_bytes)?;
    let socket = socket::connect(name, options.handshake_timeout_ms)?;
    let ring = WriteRing::create(shape)?;
    let heap = match options.heap_bytes {
        0 => None,
        bytes => Some(Heap::create(bytes)?),
    };
    let said = socket::send_hello(&socket, hello, (shape, ring.fd()), heap.as_deref());
    let mut reader = FrameReader::new();
    match (said, reader.next(&socket)) {
        // A listener that is full refuses without reading, so the hello may have failed already.
        (
            _,
            Ok(Read::Got(Frame {
                kind: FrameKind::Refuse,
                length,
                ..
            })),
        ) => {
            return Err(LinkError::Refused {
                reason: reader.text(&socket, length),
            });
        }
        (Err(error), _) | (Ok(()), Err(error)) => return Err(error),
        (
            Ok(()),
            Ok(Read::Got(Frame {
                kind: FrameKind::Welcome,
                ..
            })),
        ) => {}
        (Ok(()), Ok(Read::Got(frame))) => {
            return Err(LinkError::frame(format!(
                "{:?} where a welcome was expected",
                frame.kind
            )));
        }
        (Ok(()), Ok(Read::NotYet)) => {
            return Err(LinkError::Silent {
                timeout_ms: options.handshake_timeout_ms,
            });
        }
        (Ok(()), Ok(Read::End)) => {
            return Err(LinkError::PeerLost {
                place: "before it answered the hello",
            });
        }
    }
    rustix::io::ioctl_fionbio(&socket, true).map_err(LinkError::system("make a socket non-blocking"))?;
    let bell = Bell::new()?;
    let outbox = Outbox::new(options.queue_messages, options.queue_bytes, bell.wake());
    let writer = Writer {
        outbox: Arc::clone(&outbox),
        bell,
        socket,
        reader,
        ring,
        heap: heap.clone(),
        untaken: VecDeque::new(),
        free: (0..options.slots).rev().collect(),
        out: vec![false; options.slots as usize],
        sequence: 0,
        checksum: options.checksum,
        corrupt_nth: options.corrupt_nth,
    };
    let writer = std::thread::Builder::new()
        .name(format!("link-to-{}", hello.to.seat))
        .spawn(move || writer.main(on_end))
        .map_err(|error| LinkError::System {
            what: "start a writer thread",
            source: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
        })?;
    let writer = Some(writer);
    Ok((outbox, Link { heap, writer }))
}

impl Link {
    pub(super) fn buffer(&self, length: usize) -> Option<HeapBuffer> {
        let heap = self.heap.as_ref().filter(|_| is_placed(length))?;
        heap.take(length)
    }

    /// Waits for the writer, which was told to end.
    pub(super) fn join(&mut self) {
        if let Some(writer) = self.writer.take() {
            // A panic of the writer was reported by its thread; the link has ended either way.
            let _ = writer.join();
        }
    }
}
