//! The receiving end of one connection: takes chunks out of the ring, tensors as they lie in the heap, and puts messages
//! together.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::frame::{Frame, FrameKind, FrameReader, Read};
use super::heap::HeapView;
use super::ring::ReadRing;
use super::socket::Speech;
use crate::link::assembly::{Assembly, weight_bytes};
use crate::link::bell::Bell;
use crate::link::checksum::checksum;
use crate::link::error::LinkError;
use crate::link::hello::Hello;
use crate::link::message::{BulkMessage, decode_header};
use crate::link::pool::{Budget, BufferPool};
use crate::wire::BODY_LIMIT_BYTES;

/// One connection after its hello.
pub(super) struct Connection {
    pub(super) socket: Arc<OwnedFd>,
    pub(super) speech: Arc<Speech>,
    pub(super) ring: ReadRing,
    pub(super) heap: Option<Arc<HeapView>>,
    pub(super) peer: Hello,
    pub(super) pool: BufferPool,
    pub(super) budget: Arc<Budget>,
    /// Rings when the consumer gives bytes back.
    pub(super) bell: Bell,
    pub(super) max_message_bytes: u64,
}

/// A message of which some chunks are still to come.
struct Incoming {
    message_bytes: u64,
    header_bytes: usize,
    header: Vec<u8>,
    parts: Option<Assembly>,
}

impl Connection {
    /// Delivers messages until the peer says goodbye.
    pub(super) fn run(&self, deliver: &dyn Fn(BulkMessage)) -> Result<(), LinkError> {
        let mut reader = FrameReader::new();
        let mut sequence = 0;
        let mut incoming: Option<Incoming> = None;
        loop {
            let frame = match reader.next(&*self.socket)? {
                Read::Got(frame) => frame,
                Read::NotYet => continue,
                Read::End if incoming.is_some() => {
                    return Err(LinkError::PeerLost {
                        place: "in the middle of a message",
                    });
                }
                Read::End => {
                    return Err(LinkError::PeerLost {
                        place: "between two messages",
                    });
                }
            };
            match frame.kind {
                FrameKind::Chunk | FrameKind::Placed => {}
                FrameKind::Bye if incoming.is_none() => return Ok(()),
                FrameKind::Refuse => {
                    return Err(LinkError::Refused {
                        reason: reader.text(&*self.socket, frame.length),
                    });
                }
                kind => return Err(LinkError::frame(format!("{kind:?} where a chunk was expected"))),
            }
            if frame.sequence != sequence {
                return Err(LinkError::frame(format!(
                    "chunk {} where {sequence} was expected",
                    frame.sequence
                )));
            }
            sequence += 1;
            let mut current = match incoming.take() {
                Some(current) => current,
                None => self.begin(&frame)?,
            };
            if self.take_piece(&mut current, &frame)? {
                if let Some(parts) = current.parts {
                    deliver(parts.into_message());
                }
            } else {
                incoming = Some(current);
            }
        }
    }

    fn begin(&self, frame: &Frame) -> Result<Incoming, LinkError> {
        let (message_bytes, header_bytes) = (frame.message_bytes, frame.header_bytes as usize);
        if message_bytes > self.max_message_bytes {
            return Err(LinkError::TooLarge {
                bytes: message_bytes,
                limit_bytes: self.max_message_bytes,
            });
        }
        if header_bytes == 0 || header_bytes > BODY_LIMIT_BYTES || header_bytes as u64 > message_bytes {
            return Err(LinkError::frame(format!(
                "a header of {header_bytes} bytes in a message of {message_bytes}"
            )));
        }
        Ok(Incoming {
            message_bytes,
            header_bytes,
            header: Vec::new(),
            parts: None,
        })
    }

    /// Takes one chunk or tensor over; says whether the message is whole.
    fn take_piece(&self, incoming: &mut Incoming, frame: &Frame) -> Result<bool, LinkError> {
        if (frame.message_bytes, frame.header_bytes as usize)
            != (incoming.message_bytes, incoming.header_bytes)
        {
            return Err(LinkError::frame(
                "its message has other lengths than in the chunk before",
            ));
        }
        match &mut incoming.parts {
            None if frame.kind == FrameKind::Placed => Err(LinkError::frame(
                "a tensor in the heap before the header of its message",
            )),
            None => {
                let start = incoming.header.len();
                // Grows by what arrives, whatever was announced.
                let length = self.chunk_length(frame, incoming.header_bytes - start)?;
                incoming.header.resize(start + length, 0);
                self.copy_out(frame, &mut incoming.header[start..])?;
                self.release(frame.slot)?;
                if incoming.header.len() < incoming.header_bytes {
                    return Ok(false);
                }
                let parts = self.prepare_parts(incoming)?;
                let whole = parts.is_whole();
                incoming.parts = Some(parts);
                Ok(whole)
            }
            Some(parts) => {
                if frame.kind == FrameKind::Placed {
                    self.take_placed(parts, frame)?;
                } else {
                    self.take_chunk(parts, frame)?;
                }
                Ok(parts.is_whole())
            }
        }
    }

    fn take_chunk(&self, parts: &mut Assembly, frame: &Frame) -> Result<(), LinkError> {
        let rest = parts.rest();
        let length = self.chunk_length(frame, rest.len())?;
        self.copy_out(frame, &mut rest[..length])?;
        self.release(frame.slot)?;
        parts.filled(length);
        Ok(())
    }

    /// Takes a tensor as it lies in the heap.
    fn take_placed(&self, parts: &mut Assembly, frame: &Frame) -> Result<(), LinkError> {
        let Some(heap) = &self.heap else {
            return Err(LinkError::frame("a tensor in a heap that the link does not have"));
        };
        let wanted = parts.untouched_bytes();
        if wanted != Some(frame.length as usize) {
            return Err(LinkError::frame(format!(
                "a tensor of {} bytes where {} were expected",
                frame.length,
                wanted.unwrap_or(0)
            )));
        }
        let tensor = heap.tensor((frame.slot, frame.length as usize), &self.speech)?;
        check(frame, tensor.as_ref())?;
        self.say(FrameKind::Taken, frame.slot)?;
        parts.placed(tensor.into());
        Ok(())
    }

    /// Checks slot and length. Senders fill each slot as far as what is `left` of a part allows.
    fn chunk_length(&self, frame: &Frame, left: usize) -> Result<usize, LinkError> {
        let shape = self.ring.shape();
        if frame.slot >= shape.slots() {
            return Err(LinkError::frame(format!(
                "slot {} of {}",
                frame.slot,
                shape.slots()
            )));
        }
        let wanted = left.min(shape.slot_bytes());
        if frame.length as usize != wanted {
            return Err(LinkError::frame(format!(
                "a chunk of {} bytes where {wanted} were expected",
                frame.length
            )));
        }
        Ok(wanted)
    }

    /// Checks a whole header and waits until the budget has room for its parts.
    fn prepare_parts(&self, incoming: &mut Incoming) -> Result<Assembly, LinkError> {
        let from = self.peer.from;
        let header = decode_header(
            &incoming.header,
            incoming.message_bytes,
            from.seat,
            from.generation,
        )?;
        incoming.header = Vec::new();
        self.wait_for_room(weight_bytes(incoming.header_bytes, incoming.message_bytes))?;
        Ok(Assembly::new(
            header,
            incoming.header_bytes,
            &self.budget,
            &self.pool,
        ))
    }

    /// Waits for the consumer to give buffers back, or for the end of the connection.
    fn wait_for_room(&self, bytes: u64) -> Result<(), LinkError> {
        while !self.budget.admits(bytes) {
            let mut waits = [
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP),
                PollFd::from_borrowed_fd(self.bell.as_fd(), PollFlags::IN),
            ];
            match rustix::event::poll(&mut waits, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(source) => {
                    return Err(LinkError::System {
                        what: "wait for room",
                        source,
                    });
                }
            }
            if !waits[0].revents().is_empty() {
                return Err(LinkError::PeerLost {
                    place: "while its message waited for room",
                });
            }
            self.bell.hush();
        }
        Ok(())
    }

    /// Copies a chunk out of its slot and checks the copy, which the peer cannot change any more.
    fn copy_out(&self, frame: &Frame, into: &mut [u8]) -> Result<(), LinkError> {
        self.ring.read(frame.slot, into);
        check(frame, into)
    }

    fn release(&self, slot: u32) -> Result<(), LinkError> {
        self.say(FrameKind::Release, slot)
    }

    fn say(&self, kind: FrameKind, slot: u32) -> Result<(), LinkError> {
        self.speech
            .say(kind, slot)
            .map_err(LinkError::system("give a slot back"))
    }
}

/// Compares bytes with the checksum that was announced for them.
fn check(frame: &Frame, bytes: &[u8]) -> Result<(), LinkError> {
    let Some(announced) = frame.checksum else {
        return Ok(());
    };
    let actual = checksum(bytes);
    if actual != announced {
        return Err(LinkError::Checksum {
            sequence: frame.sequence,
            place: frame.slot,
            announced,
            actual,
        });
    }
    Ok(())
}
