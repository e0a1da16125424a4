//! The sending end of a link.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::checksum::{checksum, extend_checksum};
use super::error::{LinkError, SendError};
use super::frame::{FRAME_BYTES, Frame, FrameKind, FrameReader, Read};
use super::heap::{Heap, HeapBuffer};
use super::message::{BulkOutgoing, Encoded};
use super::ring::{RingShape, WriteRing};
use super::socket::{self, Hello};
use super::{DEFAULT_HEAP_BYTES, DEFAULT_MAX_MESSAGE_BYTES, MIN_PLACED_BYTES};

/// Tensors are copied into the heap so many bytes at a time: their checksum is taken while they are in the caches.
const PIECE_BYTES: usize = 256 << 10;

/// Limits and sizes of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SenderOptions {
    /// Slots of the ring, 1 to [`super::MAX_SLOTS`].
    pub slots: u32,
    /// Bytes of each slot, 4096 to [`super::MAX_SLOT_BYTES`].
    pub slot_bytes: u32,
    /// Largest size of the heap, in bytes; 0 for none. Memory is reserved as it is used.
    pub heap_bytes: u64,
    /// Most messages in the queue, counting the one that is being copied.
    pub queue_messages: usize,
    /// Most bytes in the queue, counting the message that is being copied. One message is always taken.
    pub queue_bytes: u64,
    /// Largest message, header and parts.
    pub max_message_bytes: u64,
    /// Whether the payload carries checksums, which the receiver then compares.
    pub checksum: bool,
    /// How long the receiver may take to accept the link.
    pub handshake_timeout_ms: u64,
    /// For drills: the chunk, counted from 0, in which a bit flips after its checksum was made.
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

/// The sending end of a link, with a queue and a writer thread of its own.
///
/// Dropping it is [`BulkSender::close`].
pub struct BulkSender {
    hello: Hello,
    options: SenderOptions,
    heap: Option<Arc<Heap>>,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Told when the queue shrinks, when everything was taken and when the link ends.
    changed: Condvar,
    closing: AtomicBool,
    /// Wakes the writer out of its wait for the socket.
    bell: OwnedFd,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Encoded>,
    /// Messages and bytes of `waiting` and of the message that is being copied.
    held_messages: usize,
    held_bytes: u64,
    /// Slots that the receiver has not given back, and tensors in the heap that it has not taken.
    slots_out: usize,
    ended: Option<LinkError>,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ring_bell(&self) {
        // Fails only when the counter is at its maximum, and then the bell rings already.
        let _ = rustix::io::write(&self.bell, &1_u64.to_ne_bytes());
    }

    /// Waits for a change until `deadline`; says whether there is time left.
    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, deadline: Instant) -> (MutexGuard<'a, Queue>, bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return (queue, false);
        }
        let (queue, _) = self
            .changed
            .wait_timeout(queue, left)
            .unwrap_or_else(PoisonError::into_inner);
        (queue, true)
    }
}

impl BulkSender {
    /// Opens a link to the listener under `name`, which must be the occupant that `hello` names.
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
        let shape = RingShape::new(options.slots, options.slot_bytes)?;
        let socket = socket::connect(name, options.handshake_timeout_ms)?;
        let ring = WriteRing::create(shape)?;
        let heap = match options.heap_bytes {
            0 => None,
            bytes => Some(Heap::create(bytes)?),
        };
        let said = socket::send_hello(&socket, &hello, (shape, ring.fd()), heap.as_deref());
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
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(LinkError::system("make an eventfd"))?;
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            changed: Condvar::new(),
            closing: AtomicBool::new(false),
            bell,
        });
        let writer = Writer {
            shared: Arc::clone(&shared),
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
        Ok(Self {
            hello,
            options,
            heap,
            shared,
            writer: Some(writer),
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
        let encoded = Encoded::new(
            &message,
            from.seat,
            from.generation,
            self.options.max_message_bytes,
        )
        .map_err(SendError::Invalid)?;
        let deadline = Instant::now() + timeout;
        let mut queue = self.shared.queue();
        loop {
            if let Some(error) = &queue.ended {
                return Err(SendError::Ended(error.clone()));
            }
            let bytes = queue.held_bytes.saturating_add(encoded.message_bytes);
            let fits = queue.held_messages < self.options.queue_messages && bytes <= self.options.queue_bytes;
            if fits || queue.held_messages == 0 {
                break;
            }
            let in_time;
            (queue, in_time) = self.shared.wait(queue, deadline);
            if !in_time {
                return Err(SendError::Full(Box::new(message)));
            }
        }
        queue.held_messages += 1;
        queue.held_bytes += encoded.message_bytes;
        queue.waiting.push_back(encoded);
        drop(queue);
        self.shared.ring_bell();
        Ok(())
    }

    /// Memory of `length` bytes in which a tensor for this link can be made, so that nobody has to copy it; none if it is
    /// small or the heap has no room for it.
    pub fn buffer(&self, length: usize) -> Option<HeapBuffer> {
        let heap = self.heap.as_ref().filter(|_| is_placed(length))?;
        heap.take(length)
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
        let deadline = Instant::now() + timeout;
        let mut queue = self.shared.queue();
        loop {
            if let Some(error) = &queue.ended {
                return Err(error.clone());
            }
            if queue.held_messages == 0 && queue.slots_out == 0 {
                return Ok(true);
            }
            let in_time;
            (queue, in_time) = self.shared.wait(queue, deadline);
            if !in_time {
                return Ok(false);
            }
        }
    }

    /// Why the link has ended, if it has.
    pub fn ended(&self) -> Option<LinkError> {
        self.shared.queue().ended.clone()
    }

    /// Bytes in the queue, counting the message that is being copied.
    pub fn queued_bytes(&self) -> u64 {
        self.shared.queue().held_bytes
    }

    /// What this end said first.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Ends the link at once: what is queued is dropped. Call [`BulkSender::drain`] before to have it delivered.
    pub fn close(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.shared.ring_bell();
        if let Some(writer) = self.writer.take() {
            // A panic of the writer was reported by its thread; the link has ended either way.
            let _ = writer.join();
        }
    }
}

impl Drop for BulkSender {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The writer thread's own.
struct Writer {
    shared: Arc<Shared>,
    socket: OwnedFd,
    reader: FrameReader,
    ring: WriteRing,
    heap: Option<Arc<Heap>>,
    /// Bytes of each tensor in the heap that the receiver has not taken, in their order.
    untaken: VecDeque<usize>,
    /// Free slots; the one used last is used next, because it is in the caches.
    free: Vec<u32>,
    /// Whether each slot is with the receiver.
    out: Vec<bool>,
    sequence: u64,
    checksum: bool,
    corrupt_nth: Option<u64>,
}

impl Writer {
    fn main(mut self, on_end: impl FnOnce(&LinkError)) {
        let error = self.run();
        if error == LinkError::Closed {
            tracing::debug!("link closed");
        }
        let shared = Arc::clone(&self.shared);
        // Socket and ring go first, so that whoever learns of the end finds them gone.
        drop(self);
        {
            let mut queue = shared.queue();
            *queue = Queue {
                ended: Some(error.clone()),
                ..Queue::default()
            };
        }
        shared.changed.notify_all();
        if error != LinkError::Closed {
            on_end(&error);
        }
    }

    /// Sends messages until the link ends; says why it did.
    fn run(&mut self) -> LinkError {
        loop {
            let next = self.shared.queue().waiting.pop_front();
            let result = match next {
                _ if self.closing() => {
                    // Between two messages the receiver may know that nothing is missing. It need not hear it.
                    let frame = Frame::new(FrameKind::Bye).encode();
                    let _ = rustix::net::send(&self.socket, &frame, SendFlags::NOSIGNAL);
                    Err(LinkError::Closed)
                }
                Some(message) => self.send(&message),
                None => self.wait(PollFlags::IN),
            };
            if let Err(error) = result {
                return error;
            }
        }
    }

    fn closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire)
    }

    fn send(&mut self, message: &Encoded) -> Result<(), LinkError> {
        self.send_chunks(message, &message.header)?;
        for part in &message.parts {
            if !self.place(message, part)? {
                self.send_chunks(message, part)?;
            }
        }
        let mut queue = self.shared.queue();
        queue.held_messages -= 1;
        queue.held_bytes -= message.message_bytes;
        drop(queue);
        self.shared.changed.notify_all();
        Ok(())
    }

    fn send_chunks(&mut self, message: &Encoded, piece: &[u8]) -> Result<(), LinkError> {
        for chunk in piece.chunks(self.ring.shape().slot_bytes()) {
            let slot = self.take_slot()?;
            if self.corrupt_nth == Some(self.sequence) {
                self.ring.write(slot, &flipped(chunk));
            } else {
                self.ring.write(slot, chunk);
            }
            let checksum = self.checksum.then(|| checksum(chunk));
            self.announce(message, FrameKind::Chunk, (slot, chunk.len()), checksum)?;
        }
        Ok(())
    }

    fn announce(
        &mut self,
        message: &Encoded,
        kind: FrameKind,
        (slot, length): (u32, usize),
        checksum: Option<u64>,
    ) -> Result<(), LinkError> {
        let frame = Frame {
            slot,
            length: length as u32,
            sequence: self.sequence,
            message_bytes: message.message_bytes,
            header_bytes: message.header.len() as u32,
            checksum,
            ..Frame::new(kind)
        };
        self.sequence += 1;
        self.send_frame(&frame.encode())
    }

    /// Sends a part by way of the heap: as it lies there, or after a copy. Says whether it could.
    fn place(&mut self, message: &Encoded, part: &[u8]) -> Result<bool, LinkError> {
        let Some(heap) = self.heap.clone().filter(|_| is_placed(part.len())) else {
            return Ok(false);
        };
        let corrupt = self.corrupt_nth == Some(self.sequence);
        if !corrupt && heap.holds(part) {
            self.wait_for_credit(part.len())?;
        }
        let lent = if corrupt { None } else { heap.lend(part) };
        let (place, sum) = match lent {
            Some(place) => (place, self.checksum.then(|| checksum(part))),
            None => {
                // What has come back makes room.
                self.take_frames()?;
                let Some(mut buffer) = heap.take(part.len()) else {
                    return Ok(false);
                };
                let mut sum = 0;
                for (into, from) in buffer.chunks_mut(PIECE_BYTES).zip(part.chunks(PIECE_BYTES)) {
                    if self.closing() {
                        return Err(LinkError::Closed);
                    }
                    into.copy_from_slice(from);
                    if self.checksum {
                        sum = extend_checksum(sum, from);
                    }
                }
                if corrupt {
                    buffer[part.len() / 2] ^= 1;
                }
                // Only now, so that one tensor is copied while the receiver looks at the one before.
                self.wait_for_credit(part.len())?;
                let Some(place) = heap.lend(&buffer) else {
                    return Ok(false);
                };
                (place, self.checksum.then_some(sum))
            }
        };
        self.untaken.push_back(part.len());
        self.shared.queue().slots_out += 1;
        self.announce(message, FrameKind::Placed, (place, part.len()), sum)?;
        Ok(true)
    }

    /// L-1: waits until the receiver has taken enough of what lies in the heap that this tensor may follow: as many bytes as
    /// the slots hold, or one tensor. A receiver that stands still fills the queue, and not the heap.
    fn wait_for_credit(&mut self, length: usize) -> Result<(), LinkError> {
        let most = self.ring.shape().bytes() as usize;
        while !self.untaken.is_empty() && self.untaken.iter().sum::<usize>() + length > most {
            if self.closing() {
                return Err(LinkError::Closed);
            }
            self.wait(PollFlags::IN)?;
        }
        Ok(())
    }

    fn take_slot(&mut self) -> Result<u32, LinkError> {
        loop {
            if self.closing() {
                return Err(LinkError::Closed);
            }
            if let Some(slot) = self.free.pop() {
                self.out[slot as usize] = true;
                self.shared.queue().slots_out += 1;
                return Ok(slot);
            }
            self.wait(PollFlags::IN)?;
        }
    }

    fn send_frame(&mut self, frame: &[u8; FRAME_BYTES]) -> Result<(), LinkError> {
        let mut bytes = &frame[..];
        while !bytes.is_empty() {
            match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) if self.closing() => return Err(LinkError::Closed),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN | PollFlags::OUT)?,
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    // The receiver may have said why before it went.
                    self.take_frames()?;
                    return Err(LinkError::PeerLost {
                        place: "while it was sent a message",
                    });
                }
                Err(source) => {
                    return Err(LinkError::System {
                        what: "write to the socket",
                        source,
                    });
                }
            }
        }
        Ok(())
    }

    /// Waits for the socket or the bell, and takes in what the receiver says.
    fn wait(&mut self, interest: PollFlags) -> Result<(), LinkError> {
        let mut waits = [
            PollFd::from_borrowed_fd(self.socket.as_fd(), interest),
            PollFd::from_borrowed_fd(self.shared.bell.as_fd(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut waits, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(source) => {
                return Err(LinkError::System {
                    what: "wait for the receiver",
                    source,
                });
            }
        }
        if !waits[1].revents().is_empty() {
            // It does not block, and an empty counter is as good as a read one.
            let _ = rustix::io::read(&self.shared.bell, &mut [0; 8]);
        }
        self.take_frames()
    }

    /// Takes in the frames that are there.
    fn take_frames(&mut self) -> Result<(), LinkError> {
        let mut released = 0;
        let result = loop {
            match self.reader.next(&self.socket) {
                Ok(Read::Got(Frame {
                    kind: FrameKind::Release,
                    slot,
                    ..
                })) => {
                    match self.out.get_mut(slot as usize) {
                        Some(out) if *out => *out = false,
                        _ => {
                            break Err(LinkError::frame(format!(
                                "slot {slot} comes back but was not given"
                            )));
                        }
                    }
                    self.free.push(slot);
                    released += 1;
                }
                Ok(Read::Got(Frame {
                    kind: FrameKind::Taken,
                    ..
                })) => {
                    if self.untaken.pop_front().is_none() {
                        break Err(LinkError::frame("a tensor is taken that was not sent"));
                    }
                    released += 1;
                }
                Ok(Read::Got(Frame {
                    kind: FrameKind::Returned,
                    slot,
                    ..
                })) => {
                    let returned = match &self.heap {
                        Some(heap) => heap.returned(slot),
                        None => Err(LinkError::frame("an extent comes back of no heap")),
                    };
                    if let Err(error) = returned {
                        break Err(error);
                    }
                }
                Ok(Read::Got(Frame {
                    kind: FrameKind::Refuse,
                    length,
                    ..
                })) => {
                    break Err(LinkError::Refused {
                        reason: self.reader.text(&self.socket, length),
                    });
                }
                Ok(Read::Got(frame)) => {
                    break Err(LinkError::frame(format!(
                        "{:?} where a slot was expected back",
                        frame.kind
                    )));
                }
                Ok(Read::NotYet) => break Ok(()),
                Ok(Read::End) if self.free.len() == self.out.len() && self.untaken.is_empty() => {
                    break Err(LinkError::PeerLost {
                        place: "with nothing under way",
                    });
                }
                Ok(Read::End) => {
                    break Err(LinkError::PeerLost {
                        place: "before it took everything",
                    });
                }
                Err(error) => break Err(error),
            }
        };
        if released > 0 {
            self.shared.queue().slots_out -= released;
            self.shared.changed.notify_all();
        }
        result
    }
}

/// Whether a tensor goes through the heap, if there is room.
fn is_placed(length: usize) -> bool {
    length >= MIN_PLACED_BYTES && u32::try_from(length).is_ok()
}

/// A chunk with one bit in its middle flipped.
fn flipped(chunk: &[u8]) -> Vec<u8> {
    let mut flipped = chunk.to_vec();
    if let Some(byte) = flipped.get_mut(chunk.len() / 2) {
        *byte ^= 1;
    }
    flipped
}
