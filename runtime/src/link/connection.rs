//! The receiving end of one connection: takes chunks out of the ring and puts messages together.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::checksum::checksum;
use super::error::LinkError;
use super::frame::{Frame, FrameKind, FrameReader, Read};
use super::message::{BulkHeader, BulkMessage, decode_header};
use super::pool::{Budget, BufferPool, Charge, PooledBuffer};
use super::ring::ReadRing;
use super::socket::Hello;
use crate::wire::BODY_LIMIT_BYTES;

/// What a decoded header may weigh beyond four times its encoded bytes (a token id of one byte becomes a `u32`).
const HEADER_OVERHEAD_BYTES: u64 = 512;

/// One connection after its hello.
pub(super) struct Connection {
    pub(super) socket: Arc<OwnedFd>,
    pub(super) ring: ReadRing,
    pub(super) peer: Hello,
    pub(super) pool: BufferPool,
    pub(super) budget: Arc<Budget>,
    pub(super) max_message_bytes: u64,
}

/// A message of which some chunks are still to come.
struct Assembly {
    message_bytes: u64,
    header_bytes: usize,
    header: Vec<u8>,
    parts: Option<Parts>,
}

struct Parts {
    header: BulkHeader,
    buffers: Vec<PooledBuffer>,
    charge: Charge,
    /// The part that the next chunk belongs to, and how much of it is there.
    at: usize,
    filled: usize,
}

impl Parts {
    fn skip_full(&mut self) {
        while self
            .buffers
            .get(self.at)
            .is_some_and(|buffer| buffer.len() == self.filled)
        {
            self.at += 1;
            self.filled = 0;
        }
    }
}

impl Connection {
    /// Delivers messages until the peer says goodbye.
    pub(super) fn run(&self, deliver: &dyn Fn(BulkMessage)) -> Result<(), LinkError> {
        let mut reader = FrameReader::new();
        let mut sequence = 0;
        let mut assembly: Option<Assembly> = None;
        loop {
            let frame = match reader.next(&*self.socket)? {
                Read::Got(frame) => frame,
                Read::NotYet => continue,
                Read::End if assembly.is_some() => {
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
                FrameKind::Chunk => {}
                FrameKind::Bye if assembly.is_none() => return Ok(()),
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
            let mut current = match assembly.take() {
                Some(current) => current,
                None => self.begin(&frame)?,
            };
            if self.take_chunk(&mut current, &frame)? {
                if let Some(Parts {
                    header,
                    buffers,
                    charge,
                    ..
                }) = current.parts
                {
                    deliver(BulkMessage {
                        header,
                        parts: buffers,
                        charge,
                    });
                }
            } else {
                assembly = Some(current);
            }
        }
    }

    fn begin(&self, frame: &Frame) -> Result<Assembly, LinkError> {
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
        Ok(Assembly {
            message_bytes,
            header_bytes,
            header: Vec::new(),
            parts: None,
        })
    }

    /// Takes one chunk over; says whether the message is whole.
    fn take_chunk(&self, assembly: &mut Assembly, frame: &Frame) -> Result<bool, LinkError> {
        if (frame.message_bytes, frame.header_bytes as usize)
            != (assembly.message_bytes, assembly.header_bytes)
        {
            return Err(LinkError::frame(
                "its message has other lengths than in the chunk before",
            ));
        }
        match &mut assembly.parts {
            None => {
                let start = assembly.header.len();
                // Grows by what arrives, whatever was announced.
                let length = self.chunk_length(frame, assembly.header_bytes - start)?;
                assembly.header.resize(start + length, 0);
                self.copy_out(frame, &mut assembly.header[start..])?;
                self.release(frame.slot)?;
                if assembly.header.len() < assembly.header_bytes {
                    return Ok(false);
                }
                let parts = self.prepare_parts(assembly)?;
                let whole = parts.at == parts.buffers.len();
                assembly.parts = Some(parts);
                Ok(whole)
            }
            Some(parts) => {
                let buffer = &mut parts.buffers[parts.at];
                let length = self.chunk_length(frame, buffer.len() - parts.filled)?;
                self.copy_out(frame, &mut buffer[parts.filled..parts.filled + length])?;
                self.release(frame.slot)?;
                parts.filled += length;
                parts.skip_full();
                Ok(parts.at == parts.buffers.len())
            }
        }
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

    /// Checks a whole header, waits until the budget has room for its parts and takes buffers for them.
    fn prepare_parts(&self, assembly: &mut Assembly) -> Result<Parts, LinkError> {
        let from = self.peer.from;
        let header = decode_header(
            &assembly.header,
            assembly.message_bytes,
            from.seat,
            from.generation,
        )?;
        assembly.header = Vec::new();
        let weight_bytes = 4 * assembly.header_bytes as u64 + HEADER_OVERHEAD_BYTES;
        self.wait_for_room(weight_bytes + assembly.message_bytes)?;
        let charge = self.budget.charge(weight_bytes);
        let take = |&bytes: &u64| self.pool.take_charged(bytes as usize, self.budget.charge(bytes));
        let buffers = header.parts.iter().map(take).collect();
        let mut parts = Parts {
            header,
            buffers,
            charge,
            at: 0,
            filled: 0,
        };
        parts.skip_full();
        Ok(parts)
    }

    /// Waits for the consumer to give buffers back, or for the end of the connection.
    fn wait_for_room(&self, bytes: u64) -> Result<(), LinkError> {
        while !self.budget.admits(bytes) {
            let mut waits = [
                PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP),
                PollFd::from_borrowed_fd(self.budget.bell(), PollFlags::IN),
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
            self.budget.hush();
        }
        Ok(())
    }

    /// Copies a chunk out of its slot and checks the copy, which the peer cannot change any more.
    fn copy_out(&self, frame: &Frame, into: &mut [u8]) -> Result<(), LinkError> {
        self.ring.read(frame.slot, into);
        let Some(announced) = frame.checksum else {
            return Ok(());
        };
        let actual = checksum(into);
        if actual != announced {
            return Err(LinkError::Checksum {
                sequence: frame.sequence,
                slot: frame.slot,
                announced,
                actual,
            });
        }
        Ok(())
    }

    fn release(&self, slot: u32) -> Result<(), LinkError> {
        let frame = Frame {
            slot,
            ..Frame::new(FrameKind::Release)
        }
        .encode();
        let mut bytes = &frame[..];
        while !bytes.is_empty() {
            match rustix::net::send(&*self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                // Its last messages may still lie in the ring; the end of the frames will tell.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(source) => {
                    return Err(LinkError::System {
                        what: "give a slot back",
                        source,
                    });
                }
            }
        }
        Ok(())
    }
}
