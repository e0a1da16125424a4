//! The fixed-size frames on the socket of a link.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..4 | magic `EGLB` |
//! | 4..6 | version |
//! | 6 | kind |
//! | 7 | flags: bit 0 says that the checksum of the payload counts |
//! | 8..12 | slot, or first page of an extent of the heap |
//! | 12..16 | bytes in the slot or extent, or of the text that follows the frame |
//! | 16..24 | sequence number of the chunk on its connection |
//! | 24..32 | bytes of the whole message: header and parts |
//! | 32..36 | bytes of the message's header |
//! | 36..44 | checksum of the payload |
//! | 44..48 | crc32c of bytes 0..44 |
//!
//! Numbers are little-endian. Fields that a kind does not use are zero.

use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::net::RecvFlags;

use crate::link::error::LinkError;

/// Bytes of a frame.
pub(in crate::link) const FRAME_BYTES: usize = 48;
const MAGIC: [u8; 4] = *b"EGLB";
const VERSION: u16 = 2;
const FLAG_CHECKED: u8 = 1;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) enum FrameKind {
    /// Sender: who I am, whom I want; the descriptors of ring and heap and `length` bytes of [`crate::link::Hello`] come with it.
    Hello = 1,
    /// Receiver: the hello is accepted.
    Welcome = 2,
    /// Either: I end this link; `length` bytes of text say why.
    Refuse = 3,
    /// Sender: a slot is full.
    Chunk = 4,
    /// Receiver: a slot is free again.
    Release = 5,
    /// Sender: no more messages; the end of file that follows is no fault.
    Bye = 6,
    /// Sender: a tensor lies in an extent of the heap.
    Placed = 7,
    /// Receiver: I have such a tensor.
    Taken = 8,
    /// Receiver: I need such a tensor no more.
    Returned = 9,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::Hello,
            Self::Welcome,
            Self::Refuse,
            Self::Chunk,
            Self::Release,
            Self::Bye,
            Self::Placed,
            Self::Taken,
            Self::Returned,
        ]
        .into_iter()
        .find(|&kind| kind as u8 == byte)
    }
}

/// A frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct Frame {
    pub(in crate::link) kind: FrameKind,
    pub(in crate::link) slot: u32,
    pub(in crate::link) length: u32,
    pub(in crate::link) sequence: u64,
    pub(in crate::link) message_bytes: u64,
    pub(in crate::link) header_bytes: u32,
    /// Checksum of the payload, if the sender makes them.
    pub(in crate::link) checksum: Option<u64>,
}

impl Frame {
    /// A frame whose other fields are zero.
    pub(in crate::link) fn new(kind: FrameKind) -> Self {
        Self {
            kind,
            slot: 0,
            length: 0,
            sequence: 0,
            message_bytes: 0,
            header_bytes: 0,
            checksum: None,
        }
    }

    pub(in crate::link) fn encode(&self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.kind as u8;
        bytes[7] = if self.checksum.is_some() { FLAG_CHECKED } else { 0 };
        bytes[8..12].copy_from_slice(&self.slot.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.message_bytes.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.header_bytes.to_le_bytes());
        bytes[36..44].copy_from_slice(&self.checksum.unwrap_or(0).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..44]);
        bytes[44..48].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    pub(in crate::link) fn decode(bytes: &[u8; FRAME_BYTES]) -> Result<Self, LinkError> {
        fn field<const N: usize>(bytes: &[u8; FRAME_BYTES], start: usize) -> [u8; N] {
            std::array::from_fn(|i| bytes[start + i])
        }
        if bytes[0..4] != MAGIC {
            return Err(LinkError::frame(format!(
                "it starts with {:02x?} instead of {MAGIC:02x?}",
                &bytes[0..4]
            )));
        }
        let version = u16::from_le_bytes(field(bytes, 4));
        if version != VERSION {
            return Err(LinkError::frame(format!(
                "version {version}, this binary speaks {VERSION}; start every rank from the same binary"
            )));
        }
        let (announced, actual) = (u32::from_le_bytes(field(bytes, 44)), crc32c::crc32c(&bytes[..44]));
        if announced != actual {
            return Err(LinkError::frame(format!(
                "its crc32c is {actual:08x} instead of {announced:08x}"
            )));
        }
        let kind = FrameKind::from_byte(bytes[6])
            .ok_or_else(|| LinkError::frame(format!("unknown kind {}", bytes[6])))?;
        let checksum = (bytes[7] & FLAG_CHECKED != 0).then(|| u64::from_le_bytes(field(bytes, 36)));
        Ok(Self {
            kind,
            slot: u32::from_le_bytes(field(bytes, 8)),
            length: u32::from_le_bytes(field(bytes, 12)),
            sequence: u64::from_le_bytes(field(bytes, 16)),
            message_bytes: u64::from_le_bytes(field(bytes, 24)),
            header_bytes: u32::from_le_bytes(field(bytes, 32)),
            checksum,
        })
    }
}

/// What a read found.
pub(in crate::link) enum Read<T> {
    /// What was asked for.
    Got(T),
    /// Nothing whole yet; only on a socket that does not block.
    NotYet,
    /// The end, between two frames.
    End,
}

/// Cuts the byte stream of a socket into frames. Reads ahead by at most [`FrameReader::BUFFER_BYTES`].
pub(in crate::link) struct FrameReader {
    buffer: Box<[u8; Self::BUFFER_BYTES]>,
    start: usize,
    end: usize,
}

impl FrameReader {
    const BUFFER_BYTES: usize = 32 * FRAME_BYTES;

    pub(in crate::link) fn new() -> Self {
        Self {
            buffer: Box::new([0; Self::BUFFER_BYTES]),
            start: 0,
            end: 0,
        }
    }

    /// The next frame.
    pub(in crate::link) fn next(&mut self, socket: impl AsFd) -> Result<Read<Frame>, LinkError> {
        match self.fill(socket.as_fd(), FRAME_BYTES)? {
            Read::Got(()) => {
                let bytes = std::array::from_fn(|i| self.buffer[self.start + i]);
                self.start += FRAME_BYTES;
                Frame::decode(&bytes).map(Read::Got)
            }
            Read::NotYet => Ok(Read::NotYet),
            Read::End => Ok(Read::End),
        }
    }

    /// The text that follows a frame; cut to what the buffer takes, since it is only for people.
    pub(in crate::link) fn text(&mut self, socket: impl AsFd, length: u32) -> String {
        let length = (length as usize).min(Self::BUFFER_BYTES);
        // The peer writes frame and text with one call; whatever of it cannot be read is not worth another error.
        let _ = self.fill(socket, length);
        let length = length.min(self.end - self.start);
        let text = String::from_utf8_lossy(&self.buffer[self.start..self.start + length]).into_owned();
        self.start += length;
        text
    }

    /// Reads until `wanted` bytes are in the buffer.
    fn fill(&mut self, socket: impl AsFd, wanted: usize) -> Result<Read<()>, LinkError> {
        while self.end - self.start < wanted {
            if self.start > 0 {
                self.buffer.copy_within(self.start..self.end, 0);
                self.end -= self.start;
                self.start = 0;
            }
            match rustix::net::recv(&socket, &mut self.buffer[self.end..], RecvFlags::empty()) {
                Ok((0, _)) if self.end == 0 => return Ok(Read::End),
                Ok((0, _)) => {
                    return Err(LinkError::PeerLost {
                        place: "in the middle of a frame",
                    });
                }
                Ok((count, _)) => self.end += count,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(Read::NotYet),
                Err(Errno::CONNRESET) => {
                    return Err(LinkError::PeerLost {
                        place: "without reading what it was told",
                    });
                }
                Err(source) => {
                    return Err(LinkError::System {
                        what: "read from the socket",
                        source,
                    });
                }
            }
        }
        Ok(Read::Got(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk() -> Frame {
        Frame {
            kind: FrameKind::Chunk,
            slot: 3,
            length: 4096,
            sequence: u64::MAX - 1,
            message_bytes: 1 << 40,
            header_bytes: 77,
            checksum: Some(0x0123_4567_89ab_cdef),
        }
    }

    #[test]
    fn frames_survive_the_wire() {
        for kind in 1..=9 {
            let kind = FrameKind::from_byte(kind).expect("known");
            for checksum in [None, Some(0), Some(u64::MAX)] {
                let frame = Frame {
                    kind,
                    checksum,
                    ..chunk()
                };
                assert_eq!(Frame::decode(&frame.encode()).expect("whole"), frame);
            }
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = chunk().encode();
        for bit in 0..FRAME_BYTES * 8 {
            let mut damaged = bytes;
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Frame::decode(&damaged).is_err(), "bit {bit}");
        }
    }
}
