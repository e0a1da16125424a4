//! The thread that carries the messages of a sender into ring and heap.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::frame::{FRAME_BYTES, Frame, FrameKind, FrameReader, Read};
use super::heap::Heap;
use super::ring::WriteRing;
use crate::link::MIN_PLACED_BYTES;
use crate::link::bell::Bell;
use crate::link::checksum::{checksum, extend_checksum, flipped};
use crate::link::error::LinkError;
use crate::link::message::Encoded;
use crate::link::outbox::Outbox;

/// Tensors are copied into the heap so many bytes at a time: their checksum is taken while they are in the caches.
const PIECE_BYTES: usize = 256 << 10;

/// The writer thread's own.
pub(super) struct Writer {
    pub(super) outbox: Arc<Outbox>,
    pub(super) bell: Bell,
    pub(super) socket: OwnedFd,
    pub(super) reader: FrameReader,
    pub(super) ring: WriteRing,
    pub(super) heap: Option<Arc<Heap>>,
    /// Bytes of each tensor in the heap that the receiver has not taken, in their order.
    pub(super) untaken: VecDeque<usize>,
    /// Free slots; the one used last is used next, because it is in the caches.
    pub(super) free: Vec<u32>,
    /// Whether each slot is with the receiver.
    pub(super) out: Vec<bool>,
    pub(super) sequence: u64,
    pub(super) checksum: bool,
    pub(super) corrupt_nth: Option<u64>,
}

impl Writer {
    pub(super) fn main(mut self, on_end: impl FnOnce(&LinkError)) {
        let error = self.run();
        if error == LinkError::Closed {
            tracing::debug!("link closed");
        }
        let outbox = Arc::clone(&self.outbox);
        // Socket and ring go first, so that whoever learns of the end finds them gone.
        drop(self);
        outbox.end(&error);
        if error != LinkError::Closed {
            on_end(&error);
        }
    }

    /// Sends messages until the link ends; says why it did.
    fn run(&mut self) -> LinkError {
        loop {
            let next = self.outbox.next();
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
        self.outbox.is_closing()
    }

    fn send(&mut self, message: &Encoded) -> Result<(), LinkError> {
        self.send_chunks(message, &message.header)?;
        for part in &message.parts {
            if !self.place(message, part)? {
                self.send_chunks(message, part)?;
            }
        }
        self.outbox.let_go(message.message_bytes);
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
        self.outbox.lent();
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
                self.outbox.lent();
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
            PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
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
            self.bell.hush();
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
            self.outbox.taken(released);
        }
        result
    }
}

/// Whether a tensor goes through the heap, if there is room.
pub(super) fn is_placed(length: usize) -> bool {
    length >= MIN_PLACED_BYTES && u32::try_from(length).is_ok()
}
