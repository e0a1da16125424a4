//! The heap of a link: shared memory in which large tensors lie whole, so that the receiver reads them where the sender
//! has put them.
//!
//! It is a memfd of its own, sealed at its largest size; its pages are reserved when they are first used. The sender cuts
//! it into extents of whole pages. An extent belongs to the sender until a frame announces it, then to the receiver until
//! it says that it holds it no more. What finds no extent goes through the slots of the ring, so nobody ever waits for
//! one.
//!
//! Invariants, cited by the tests:
//!
//! - **HEAP-1**: an extent is not given out again while this process holds its buffer, or the peer its tensor.
//! - **HEAP-2**: a place that a peer names is read only after it was checked to lie in the heap.
//!
//! A peer is a process of the same user, started from the same binary. One that wrote to an extent that it has announced
//! would spoil numbers behind their checksum, as it would by writing to the weights that ranks map; it cannot make a read
//! fault, because the size is sealed.

#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use memmap2::{Advice, MmapOptions, MmapRaw};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use super::frame::FrameKind;
use super::ring::{check_sealed, map_error};
use super::socket::Speech;
use crate::link::error::LinkError;

/// Extents begin and end at multiples of this.
const PAGE_BYTES: usize = 4096;

/// Most extents that the receiver has at a time: with their frames, and those of the slots, the default buffer of a socket
/// is never full.
const MAX_OUT: usize = 64;

/// Largest heap: its places are page numbers in 32 bits, with room to spare.
pub(in crate::link) const MAX_HEAP_BYTES: u64 = 1 << 40;

/// The sender's end.
pub(in crate::link) struct Heap {
    map: MmapRaw,
    fd: OwnedFd,
    bytes: usize,
    extents: Mutex<Extents>,
}

#[derive(Default)]
struct Extents {
    /// Pages from the start that are reserved.
    reserved: usize,
    /// Runs of reserved pages that are in no extent, by their first page; no two of them touch.
    free: BTreeMap<usize, usize>,
    /// Extents that are in use, by their first page.
    used: BTreeMap<usize, Extent>,
    /// How many of them the receiver has.
    out: usize,
}

/// An extent in use.
struct Extent {
    pages: usize,
    /// A buffer of this process lies in it.
    held: bool,
    /// It is announced to the receiver.
    out: bool,
}

impl Heap {
    /// A heap of at most `bytes`, none of which is reserved yet.
    pub(in crate::link) fn create(bytes: u64) -> Result<Arc<Self>, LinkError> {
        if bytes > MAX_HEAP_BYTES {
            return Err(LinkError::HeapSize {
                bytes,
                limit_bytes: MAX_HEAP_BYTES,
            });
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd =
            rustix::fs::memfd_create("eaglet-link-heap", flags).map_err(LinkError::system("make a memfd"))?;
        rustix::fs::ftruncate(&fd, bytes).map_err(LinkError::system("size a memfd"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(LinkError::system("seal a memfd"))?;
        let bytes = bytes as usize;
        let map = MmapOptions::new().len(bytes).map_raw(&fd).map_err(map_error)?;
        Ok(Arc::new(Self {
            map,
            fd,
            bytes,
            extents: Mutex::default(),
        }))
    }

    pub(in crate::link) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    pub(in crate::link) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// A buffer of `length` bytes with unspecified content; none if there is no room.
    pub(in crate::link) fn take(self: &Arc<Self>, length: usize) -> Option<HeapBuffer> {
        let pages = length.div_ceil(PAGE_BYTES).max(1);
        let mut extents = self.extents();
        let first = match extents.take_free(pages) {
            Some(first) => first,
            None => self.extend(&mut extents, pages)?,
        };
        extents.used.insert(
            first,
            Extent {
                pages,
                held: true,
                out: false,
            },
        );
        drop(extents);
        Some(HeapBuffer {
            heap: Arc::clone(self),
            first,
            length,
        })
    }

    /// Reserves as many pages as are missing at the end, so that a lack of memory is seen here and is no fault later.
    fn extend(&self, extents: &mut Extents, pages: usize) -> Option<usize> {
        let tail = extents
            .free
            .last_key_value()
            .map(|(&first, &pages)| (first, pages));
        let first = match tail {
            Some((first, tail)) if first + tail == extents.reserved => first,
            _ => extents.reserved,
        };
        let end = first.checked_add(pages)?;
        if end.checked_mul(PAGE_BYTES)? > self.bytes {
            return None;
        }
        let (from, more) = (
            extents.reserved * PAGE_BYTES,
            (end - extents.reserved) * PAGE_BYTES,
        );
        if let Err(error) = rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), from as u64, more as u64)
        {
            tracing::debug!(%error, bytes = more, "no memory for the heap of a link");
            return None;
        }
        // Only saves faults, one for each page.
        let _ = self.map.advise_range(Advice::PopulateWrite, from, more);
        extents.free.remove(&first);
        extents.reserved = end;
        Some(first)
    }

    /// Whether a tensor lies in this heap.
    pub(in crate::link) fn holds(&self, tensor: &[u8]) -> bool {
        let start = self.map.as_mut_ptr() as usize;
        (start..start + self.bytes).contains(&(tensor.as_ptr() as usize))
    }

    /// The place of a tensor that lies at the start of an extent of this heap, if the receiver does not have it already.
    /// It has it from now on.
    pub(in crate::link) fn lend(&self, tensor: &[u8]) -> Option<u32> {
        let offset = (tensor.as_ptr() as usize).checked_sub(self.map.as_mut_ptr() as usize)?;
        let first = offset / PAGE_BYTES;
        let mut extents = self.extents();
        if extents.out >= MAX_OUT {
            return None;
        }
        let extent = extents.used.get_mut(&first)?;
        let fits = offset.is_multiple_of(PAGE_BYTES) && tensor.len() <= extent.pages * PAGE_BYTES;
        if !fits || !extent.held || extent.out {
            return None;
        }
        extent.out = true;
        extents.out += 1;
        u32::try_from(first).ok()
    }

    /// The receiver gives an extent back.
    pub(in crate::link) fn returned(&self, first: u32) -> Result<(), LinkError> {
        let mut extents = self.extents();
        let first = first as usize;
        match extents.used.get_mut(&first) {
            Some(extent) if extent.out => extent.out = false,
            _ => {
                return Err(LinkError::frame(format!(
                    "extent {first} comes back but was not given"
                )));
            }
        }
        extents.out -= 1;
        extents.reclaim(first);
        Ok(())
    }

    fn extents(&self) -> MutexGuard<'_, Extents> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Extents {
    /// Cuts an extent off the first free run that is long enough.
    fn take_free(&mut self, pages: usize) -> Option<usize> {
        let (&first, &free) = self.free.iter().find(|(_, free)| **free >= pages)?;
        self.free.remove(&first);
        if free > pages {
            self.free.insert(first + pages, free - pages);
        }
        Some(first)
    }

    /// HEAP-1: frees an extent that neither end holds any more.
    fn reclaim(&mut self, first: usize) {
        let Some(extent) = self.used.get(&first).filter(|extent| !extent.held && !extent.out) else {
            return;
        };
        let (mut start, mut pages) = (first, extent.pages);
        self.used.remove(&first);
        if let Some((&before, &length)) = self.free.range(..first).next_back()
            && before + length == first
        {
            self.free.remove(&before);
            (start, pages) = (before, length + pages);
        }
        if let Some(length) = self.free.remove(&(start + pages)) {
            pages += length;
        }
        self.free.insert(start, pages);
    }
}

/// Memory of a link's heap that this process writes: what is put into it and sent over that link is not copied.
pub struct HeapBuffer {
    heap: Arc<Heap>,
    first: usize,
    length: usize,
}

impl HeapBuffer {
    fn start(&self) -> *mut u8 {
        // In bounds of the mapping, since the extent is.
        self.heap.map.as_mut_ptr().wrapping_add(self.first * PAGE_BYTES)
    }
}

impl Deref for HeapBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the extent lies within the mapping, its pages are reserved, and every bit pattern is a valid `u8`. Nobody
        // writes to it through another reference: HEAP-1 keeps other buffers out, and the peer maps it read-only.
        unsafe { std::slice::from_raw_parts(self.start(), self.length) }
    }
}

impl DerefMut for HeapBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the peer reads it only after it is lent, which takes `&self` only once this is shared.
        unsafe { std::slice::from_raw_parts_mut(self.start(), self.length) }
    }
}

impl AsRef<[u8]> for HeapBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl AsMut<[u8]> for HeapBuffer {
    fn as_mut(&mut self) -> &mut [u8] {
        self
    }
}

impl From<HeapBuffer> for Bytes {
    /// Shares the buffer without a copy; nobody writes to it any more.
    fn from(buffer: HeapBuffer) -> Self {
        Self::from_owner(buffer)
    }
}

impl fmt::Debug for HeapBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapBuffer")
            .field("length", &self.length)
            .finish_non_exhaustive()
    }
}

impl Drop for HeapBuffer {
    fn drop(&mut self) {
        let mut extents = self.heap.extents();
        if let Some(extent) = extents.used.get_mut(&self.first) {
            extent.held = false;
        }
        extents.reclaim(self.first);
    }
}

/// The receiver's end. It is mapped read-only.
pub(in crate::link) struct HeapView {
    map: MmapRaw,
    bytes: usize,
    /// Bytes from the start whose pages are in the page table already.
    seen: AtomicUsize,
}

impl HeapView {
    /// Maps a heap that a peer made, after checking that it is sealed and as large as announced.
    pub(in crate::link) fn map(fd: &OwnedFd, bytes: u64) -> Result<Arc<Self>, LinkError> {
        check_sealed(fd, bytes)?;
        let bytes = bytes as usize;
        let map = MmapOptions::new()
            .len(bytes)
            .map_raw_read_only(fd)
            .map_err(map_error)?;
        Ok(Arc::new(Self {
            map,
            bytes,
            seen: AtomicUsize::new(0),
        }))
    }

    /// HEAP-2: a tensor of `length` bytes in the extent that begins at page `first`, to be given back over `socket`.
    pub(in crate::link) fn tensor(
        self: &Arc<Self>,
        (first, length): (u32, usize),
        socket: &Arc<Speech>,
    ) -> Result<PlacedTensor, LinkError> {
        let offset = (first as usize).checked_mul(PAGE_BYTES);
        let end = offset.and_then(|offset| offset.checked_add(length));
        let (Some(offset), Some(end)) = (offset, end.filter(|&end| end <= self.bytes)) else {
            return Err(LinkError::frame(format!(
                "{length} bytes from page {first} on do not lie in a heap of {} bytes",
                self.bytes
            )));
        };
        let seen = self.seen.load(Ordering::Relaxed);
        if end > seen {
            let end = end.next_multiple_of(PAGE_BYTES).min(self.bytes);
            // Only saves faults.
            let _ = self.map.advise_range(Advice::PopulateRead, seen, end - seen);
            self.seen.store(end, Ordering::Relaxed);
        }
        Ok(PlacedTensor {
            view: Arc::clone(self),
            first,
            offset,
            length,
            socket: Arc::downgrade(socket),
        })
    }
}

/// A tensor that lies in its sender's heap. The sender gets the memory back when it is dropped.
pub(in crate::link) struct PlacedTensor {
    view: Arc<HeapView>,
    first: u32,
    offset: usize,
    length: usize,
    /// Weak, so that a tensor does not keep its connection open.
    socket: Weak<Speech>,
}

impl AsRef<[u8]> for PlacedTensor {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: HEAP-2 has checked that these bytes lie within the mapping, whose size is sealed, so that the pages exist
        // whatever the peer does, and every bit pattern is a valid `u8`. A peer that keeps to the protocol does not write
        // to them before they are given back, which happens when this is dropped; see the module's documentation for one
        // that does not.
        unsafe { std::slice::from_raw_parts(self.view.map.as_ptr().add(self.offset), self.length) }
    }
}

impl Drop for PlacedTensor {
    fn drop(&mut self) {
        if let Some(socket) = self.socket.upgrade() {
            // A link that has ended says so itself; its sender takes nothing back any more.
            let _ = socket.say(FrameKind::Returned, self.first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::memory::frame::{FrameReader, Read};
    use crate::link::part::Part;

    fn ends(bytes: usize) -> (Arc<Heap>, Arc<HeapView>) {
        let heap = Heap::create(bytes as u64).expect("memory is left");
        let fd = heap.fd().try_clone_to_owned().expect("descriptors are left");
        let view = HeapView::map(&fd, bytes as u64).expect("sealed");
        (heap, view)
    }

    /// What the receiver says, and what it says it on.
    fn speech() -> (Arc<Speech>, OwnedFd) {
        let (here, there) = rustix::net::socketpair(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            rustix::net::SocketFlags::CLOEXEC,
            None,
        )
        .expect("descriptors are left");
        (Speech::new(Arc::new(here)), there)
    }

    #[test]
    fn a_tensor_is_read_where_it_was_written() {
        let (heap, view) = ends(16 * PAGE_BYTES);
        let (speech, told) = speech();
        let mut buffer = heap.take(10_000).expect("room");
        buffer.fill(7);
        let bytes = Bytes::from(buffer);
        let place = heap.lend(&bytes).expect("it lies there");
        assert_eq!(heap.lend(&bytes), None, "the receiver has it already");
        let part = Part::from(view.tensor((place, 10_000), &speech).expect("in the heap"));
        assert!(part[..] == [7; 10_000][..]);
        drop(bytes);
        let shared = part.into_bytes();
        let other = shared.clone();
        drop(shared);
        assert_eq!(heap.extents().used.len(), 1, "HEAP-1: the receiver holds it");
        drop(other);
        let mut frames = FrameReader::new();
        let Ok(Read::Got(frame)) = frames.next(&told) else {
            panic!("the sender is not told")
        };
        assert_eq!((frame.kind, frame.slot), (FrameKind::Returned, place));
        heap.returned(place).expect("it was out");
        assert!(heap.returned(place).is_err(), "only once");
        assert!(heap.extents().used.is_empty());
    }

    /// HEAP-1
    #[test]
    fn an_extent_is_used_again_when_both_ends_have_let_it_go() {
        let (heap, _) = ends(8 * PAGE_BYTES);
        let whole = Bytes::from(heap.take(8 * PAGE_BYTES).expect("room"));
        let place = heap.lend(&whole).expect("it lies there");
        assert!(heap.take(1).is_none(), "it is full");
        heap.returned(place).expect("it was out");
        assert!(heap.take(1).is_none(), "this process holds it");
        let place = heap.lend(&whole).expect("it can be sent again");
        drop(whole);
        assert!(heap.take(1).is_none(), "the receiver holds it");
        heap.returned(place).expect("it was out");
        assert!(heap.take(8 * PAGE_BYTES).is_some());
    }

    #[test]
    fn free_runs_are_joined() {
        let (heap, _) = ends(9 * PAGE_BYTES);
        let mut buffers: Vec<_> = (0..9)
            .map(|_| Some(heap.take(PAGE_BYTES).expect("room")))
            .collect();
        assert!(heap.take(1).is_none());
        for freed in [0, 2, 1, 8, 6, 7, 4, 3, 5] {
            buffers[freed] = None;
        }
        assert_eq!(heap.extents().free, BTreeMap::from([(0, 9)]));
        let half = heap.take(5 * PAGE_BYTES).expect("room");
        assert!(heap.take(5 * PAGE_BYTES).is_none());
        assert!(heap.take(0).is_some_and(|empty| empty.is_empty()));
        drop(half);
    }

    #[test]
    fn only_what_is_used_is_reserved() {
        let (heap, _) = ends(1 << 30);
        drop(heap.take(3 * PAGE_BYTES));
        drop(heap.take(5 * PAGE_BYTES));
        assert_eq!(heap.extents().reserved, 5, "the free tail grows");
        let blocks = rustix::fs::fstat(heap.fd()).expect("open").st_blocks;
        assert_eq!(blocks as usize * 512, 5 * PAGE_BYTES);
    }

    #[test]
    fn what_lies_elsewhere_cannot_be_lent() {
        let (heap, _) = ends(8 * PAGE_BYTES);
        let bytes = Bytes::from(heap.take(2 * PAGE_BYTES).expect("room"));
        assert_eq!(heap.lend(&bytes[PAGE_BYTES..]), None);
        assert_eq!(heap.lend(&[1; 100]), None);
        let other = ends(8 * PAGE_BYTES).0;
        assert_eq!(other.lend(&bytes), None);
        // A slice from the start is as good as the whole.
        assert_eq!(heap.lend(&bytes[..5]), Some(0));
    }

    /// HEAP-2
    #[test]
    fn places_outside_the_heap_are_refused() {
        let (_heap, view) = ends(4 * PAGE_BYTES);
        let (speech, _told) = speech();
        for (first, length) in [
            (4, 1),
            (0, 4 * PAGE_BYTES + 1),
            (3, PAGE_BYTES + 1),
            (u32::MAX, usize::MAX),
        ] {
            let error = view.tensor((first, length), &speech).err().expect("refused");
            assert!(error.to_string().contains("do not lie in a heap"), "{error}");
        }
        assert!(view.tensor((3, PAGE_BYTES), &speech).is_ok());
    }
}
