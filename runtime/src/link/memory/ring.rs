//! The memfd ring: slots of shared memory that one process writes and another reads.
//!
//! The memory is sealed against shrinking and growing, so that neither end can make the other fault. It is only ever
//! touched through raw copies into and out of private memory: no reference into it exists, so a peer that scribbles over a
//! slot at the wrong time can spoil the bytes (which their checksum tells) but not the soundness of this process.
//!
//! Who may touch a slot follows from the frames on the socket, whose system calls order the memory accesses.

#![allow(unsafe_code)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::link::error::LinkError;
use crate::link::{MAX_SLOT_BYTES, MAX_SLOTS};

/// Smallest slot: a page.
const MIN_SLOT_BYTES: u32 = 4096;

/// Number and size of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::link) struct RingShape {
    slots: u32,
    slot_bytes: u32,
}

impl RingShape {
    pub(in crate::link) fn new(slots: u32, slot_bytes: u32) -> Result<Self, LinkError> {
        if !(1..=MAX_SLOTS).contains(&slots) || !(MIN_SLOT_BYTES..=MAX_SLOT_BYTES).contains(&slot_bytes) {
            return Err(LinkError::RingShape { slots, slot_bytes });
        }
        Ok(Self { slots, slot_bytes })
    }

    pub(in crate::link) fn slots(self) -> u32 {
        self.slots
    }

    pub(in crate::link) fn slot_bytes(self) -> usize {
        self.slot_bytes as usize
    }

    pub(in crate::link) fn bytes(self) -> u64 {
        u64::from(self.slots) * u64::from(self.slot_bytes)
    }

    /// Where a slot begins in the ring, for a copy of `length` bytes.
    fn place(self, slot: u32, length: usize) -> usize {
        let fits = slot < self.slots && length <= self.slot_bytes();
        assert!(fits, "callers check slot and length before they copy");
        slot as usize * self.slot_bytes()
    }
}

/// The end that fills slots.
pub(in crate::link) struct WriteRing {
    map: MmapRaw,
    shape: RingShape,
    fd: OwnedFd,
}

impl WriteRing {
    /// Makes a ring and reserves its memory, so that a lack of it is an error here and no fault later.
    pub(in crate::link) fn create(shape: RingShape) -> Result<Self, LinkError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("eaglet-link", flags).map_err(LinkError::system("make a memfd"))?;
        rustix::fs::ftruncate(&fd, shape.bytes()).map_err(LinkError::system("size a memfd"))?;
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, shape.bytes())
            .map_err(LinkError::system("reserve the memory of a ring"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(LinkError::system("seal a memfd"))?;
        let map = MmapOptions::new()
            .len(shape.bytes() as usize)
            .populate()
            .map_raw(&fd)
            .map_err(map_error)?;
        Ok(Self { map, shape, fd })
    }

    pub(in crate::link) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(in crate::link) fn shape(&self) -> RingShape {
        self.shape
    }

    /// Copies `bytes` to the start of a slot.
    ///
    /// # Panics
    /// If they do not fit: slot and lengths are the sender's own.
    pub(in crate::link) fn write(&mut self, slot: u32, bytes: &[u8]) {
        let place = self.shape.place(slot, bytes.len());
        // SAFETY: `place` has checked that `bytes.len()` bytes from there lie within the mapping, whose size is sealed.
        // `bytes` is private memory, so the two do not overlap. `&mut self` keeps other threads of this process out; the
        // other process reads a slot only between the frame that announces it and the one that releases it.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(place), bytes.len())
        }
    }
}

/// The end that empties slots. It is mapped read-only.
pub(in crate::link) struct ReadRing {
    map: MmapRaw,
    shape: RingShape,
}

impl ReadRing {
    /// Maps a ring that a peer made, after checking that it is sealed and as large as announced.
    pub(in crate::link) fn map(fd: OwnedFd, shape: RingShape) -> Result<Self, LinkError> {
        check_sealed(&fd, shape.bytes())?;
        let map = MmapOptions::new()
            .len(shape.bytes() as usize)
            .populate()
            .map_raw_read_only(&fd)
            .map_err(map_error)?;
        Ok(Self { map, shape })
    }

    pub(in crate::link) fn shape(&self) -> RingShape {
        self.shape
    }

    /// Fills `into` from the start of a slot.
    ///
    /// # Panics
    /// If it is larger than a slot: the caller checks what the frame says.
    pub(in crate::link) fn read(&self, slot: u32, into: &mut [u8]) {
        let place = self.shape.place(slot, into.len());
        // SAFETY: `place` has checked that `into.len()` bytes from there lie within the mapping, whose size is sealed, so
        // that the pages exist whatever the peer does. `into` is private memory, so the two do not overlap. A peer that keeps
        // to the protocol does not write a slot before its release; one that does not can only change which bytes arrive, and
        // every bit pattern is a valid `u8`.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(place), into.as_mut_ptr(), into.len()) }
    }
}

/// Checks that a descriptor is a memfd of `bytes` bytes that nobody can resize.
pub(in crate::link) fn check_sealed(fd: &OwnedFd, bytes: u64) -> Result<(), LinkError> {
    let wrong = |reason: String| LinkError::Ring { reason };
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| wrong("it is no memfd".to_owned()))?;
    if !seals.contains(SealFlags::SHRINK | SealFlags::GROW) {
        return Err(wrong("it is not sealed against resizing".to_owned()));
    }
    let found = rustix::fs::fstat(fd)
        .map_err(LinkError::system("look at a ring"))?
        .st_size;
    if u64::try_from(found) != Ok(bytes) {
        return Err(wrong(format!("it has {found} bytes instead of {bytes}")));
    }
    Ok(())
}

pub(in crate::link) fn map_error(error: std::io::Error) -> LinkError {
    LinkError::System {
        what: "map a ring",
        source: Errno::from_io_error(&error).unwrap_or(Errno::NOMEM),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(slots: u32, slot_bytes: u32) -> RingShape {
        RingShape::new(slots, slot_bytes).expect("allowed")
    }

    fn copy_of(fd: BorrowedFd<'_>) -> OwnedFd {
        fd.try_clone_to_owned().expect("descriptors are left")
    }

    #[test]
    fn what_is_written_is_read() {
        let mut write = WriteRing::create(shape(3, 4096)).expect("memory is left");
        let read = ReadRing::map(copy_of(write.fd()), shape(3, 4096)).expect("sealed");
        write.write(0, &[1; 4096]);
        write.write(1, &[2; 96]);
        write.write(2, b"three");
        let mut bytes = [0; 4096];
        read.read(0, &mut bytes);
        assert_eq!(bytes, [1; 4096]);
        read.read(1, &mut bytes[..96]);
        assert_eq!(bytes[..96], [2; 96]);
        read.read(2, &mut bytes[..5]);
        assert_eq!(&bytes[..5], b"three");
    }

    #[test]
    fn a_ring_cannot_be_resized_and_a_wrong_one_is_refused() {
        let write = WriteRing::create(shape(2, 4096)).expect("memory is left");
        assert_eq!(rustix::fs::ftruncate(write.fd(), 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(write.fd(), 1 << 20), Err(Errno::PERM));
        let larger = ReadRing::map(copy_of(write.fd()), shape(3, 4096));
        assert!(matches!(larger, Err(LinkError::Ring { .. })));

        let unsealed =
            rustix::fs::memfd_create("unsealed", MemfdFlags::ALLOW_SEALING).expect("memory is left");
        rustix::fs::ftruncate(&unsealed, 8192).expect("not sealed");
        let error = ReadRing::map(unsealed, shape(2, 4096)).err().expect("refused");
        assert!(error.to_string().contains("not sealed"), "{error}");

        let (pipe, _other) = rustix::pipe::pipe().expect("descriptors are left");
        let error = ReadRing::map(pipe, shape(2, 4096)).err().expect("refused");
        assert!(error.to_string().contains("no memfd"), "{error}");
    }

    #[test]
    fn shapes_are_limited() {
        for (slots, slot_bytes) in [
            (0, 4096),
            (MAX_SLOTS + 1, 4096),
            (1, 4095),
            (1, MAX_SLOT_BYTES + 1),
            (1, 0),
        ] {
            assert!(
                RingShape::new(slots, slot_bytes).is_err(),
                "{slots} x {slot_bytes}"
            );
        }
    }
}
