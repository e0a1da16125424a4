//! Memory of a device, and memory of the host that a device copies from at full speed.
//!
//! MEMORY-1: who asks for memory gives it a name, and an error for want of room says how much every name holds.

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::driver::{Context, CudaError, OUT_OF_MEMORY};

/// Alignment of what an [`Arena`] gives out, in bytes: that of the driver's own allocations.
const ALIGNMENT: usize = 256;

/// `len` elements in a device's memory. Its first contents are whatever was there.
#[derive(Debug)]
pub struct Buffer<T> {
    context: Arc<Context>,
    pointer: u64,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Takes memory.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is not enough.
    #[allow(unsafe_code)]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        let table = context.bind()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let mut pointer = 0;
        if bytes > 0 {
            // SAFETY: writes one address.
            let code = unsafe { (table.alloc)(&raw mut pointer, bytes) };
            if code == OUT_OF_MEMORY {
                let (free, total) = context.memory().unwrap_or_default();
                return Err(CudaError::OutOfMemory {
                    bytes,
                    device: format!("cuda:{}", context.gpu().ordinal()),
                    free,
                    total,
                });
            }
            context.check("cuMemAlloc_v2", code)?;
        }
        Ok(Self {
            context: context.clone(),
            pointer,
            len,
            element: PhantomData,
        })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of it.
    pub fn view(&self) -> View<'_, T> {
        View {
            pointer: self.pointer,
            len: self.len,
            life: PhantomData,
        }
    }

    /// All of it, to write to.
    pub fn view_mut(&mut self) -> ViewMut<'_, T> {
        ViewMut {
            pointer: self.pointer,
            len: self.len,
            life: PhantomData,
        }
    }
}

impl<T> Drop for Buffer<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.pointer != 0
            && let Ok(table) = self.context.bind()
        {
            // SAFETY: allocated once, freed once; the driver waits for kernels that use it.
            unsafe { (table.free)(self.pointer) };
        }
    }
}

/// Elements in a device's memory.
#[derive(Debug)]
pub struct View<'a, T> {
    pointer: u64,
    len: usize,
    life: PhantomData<&'a T>,
}

impl<T> Clone for View<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for View<'_, T> {}

/// Elements in a device's memory that nobody else uses.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    pointer: u64,
    len: usize,
    life: PhantomData<&'a mut T>,
}

#[track_caller]
fn part<T>(pointer: u64, len: usize, range: &Range<usize>) -> u64 {
    assert!(
        range.start <= range.end && range.end <= len,
        "{range:?} of {len} elements"
    );
    pointer + (range.start * size_of::<T>()) as u64
}

impl<'a, T> View<'a, T> {
    /// No elements.
    pub fn empty() -> Self {
        Self {
            pointer: 0,
            len: 0,
            life: PhantomData,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    pub fn part(&self, range: Range<usize>) -> Self {
        Self {
            pointer: part::<T>(self.pointer, self.len, &range),
            len: range.len(),
            life: PhantomData,
        }
    }

    pub(super) fn address(&self) -> u64 {
        self.pointer
    }
}

impl<'a> ViewMut<'a, u8> {
    /// The first `len` elements of another type.
    ///
    /// # Panics
    /// If there are not so many bytes.
    #[track_caller]
    pub(super) fn typed<T: Pod>(self, len: usize) -> ViewMut<'a, T> {
        // Whole buffers only: they are aligned for every type.
        assert!(
            len * size_of::<T>() <= self.len && self.pointer.is_multiple_of(align_of::<T>() as u64),
            "{len} elements in {} bytes",
            self.len
        );
        ViewMut {
            pointer: self.pointer,
            len,
            life: PhantomData,
        }
    }
}

impl<'a, T> ViewMut<'a, T> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The same elements, to read.
    pub fn view(&self) -> View<'_, T> {
        View {
            pointer: self.pointer,
            len: self.len,
            life: PhantomData,
        }
    }

    /// The same elements, to read only from now on.
    pub fn into_view(self) -> View<'a, T> {
        View {
            pointer: self.pointer,
            len: self.len,
            life: PhantomData,
        }
    }

    /// The same elements for a shorter time.
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut {
            pointer: self.pointer,
            len: self.len,
            life: PhantomData,
        }
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    pub fn part(self, range: Range<usize>) -> Self {
        Self {
            pointer: part::<T>(self.pointer, self.len, &range),
            len: range.len(),
            life: PhantomData,
        }
    }

    pub(super) fn address(&self) -> u64 {
        self.pointer
    }
}

/// Elements in pinned memory of the host, zero at first.
#[derive(Debug)]
pub struct Pinned<T> {
    context: Arc<Context>,
    pointer: *mut T,
    len: usize,
}

#[allow(unsafe_code)]
// SAFETY: it owns its memory, like a vector.
unsafe impl<T: Send> Send for Pinned<T> {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Pod> Pinned<T> {
    /// Takes memory.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if the host does not give it.
    #[allow(unsafe_code)]
    pub fn new(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        let table = context.bind()?;
        let bytes = len.saturating_mul(size_of::<T>());
        let mut pointer: *mut c_void = std::ptr::NonNull::<T>::dangling().as_ptr().cast();
        if bytes > 0 {
            // 1: pinned for all contexts.
            // SAFETY: writes one address.
            let code = unsafe { (table.alloc_host)(&raw mut pointer, bytes, 1) };
            if code == OUT_OF_MEMORY {
                return Err(CudaError::OutOfMemory {
                    bytes,
                    device: "the host (pinned)".to_owned(),
                    free: 0,
                    total: 0,
                });
            }
            context.check("cuMemHostAlloc", code)?;
            // SAFETY: the driver gave `bytes` bytes, aligned to a page.
            unsafe { std::ptr::write_bytes(pointer.cast::<u8>(), 0, bytes) };
        }
        Ok(Self {
            context: context.clone(),
            pointer: pointer.cast(),
            len,
        })
    }
}

impl<T: Pod> std::ops::Deref for Pinned<T> {
    type Target = [T];

    #[allow(unsafe_code)]
    fn deref(&self) -> &[T] {
        // SAFETY: `len` elements that are initialised and live as long as this value.
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }
}

impl<T: Pod> std::ops::DerefMut for Pinned<T> {
    #[allow(unsafe_code)]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.len * size_of::<T>() > 0
            && let Ok(table) = self.context.bind()
        {
            // SAFETY: allocated once, freed once.
            unsafe { (table.free_host)(self.pointer.cast()) };
        }
    }
}

/// One allocation of a rank, given out piece by piece and taken back all at once.
#[derive(Debug)]
pub struct Arena {
    memory: Buffer<u8>,
    pieces: Mutex<Vec<Piece>>,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    name: &'static str,
    end: usize,
    bytes: usize,
}

/// A rank's memory of the device is used up.
#[derive(Debug, Clone, thiserror::Error)]
#[error(
    "no room for {bytes} bytes of {name}: {used} of {total} bytes of the rank's device memory are used, {holders}"
)]
pub struct ArenaFull {
    /// What was asked for.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// Bytes in use.
    pub used: usize,
    /// Bytes of the arena.
    pub total: usize,
    /// Who holds them, the largest first.
    pub holders: Holders,
}

/// Names and the bytes they hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders(pub Vec<(&'static str, usize)>);

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return write!(f, "nothing is held");
        }
        for (place, (name, bytes)) in self.0.iter().enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            write!(f, "{comma}{name} {bytes}")?;
        }
        Ok(())
    }
}

impl Arena {
    /// Takes `bytes` of the device.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] if there is not enough.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self {
            memory: Buffer::new(context, bytes)?,
            pieces: Mutex::new(Vec::new()),
        })
    }

    /// `len` elements, until the arena is cleared. Their first contents are whatever was there.
    ///
    /// # Errors
    /// [`ArenaFull`], which says who holds what.
    pub fn take<T: Pod>(&self, name: &'static str, len: usize) -> Result<ViewMut<'_, T>, ArenaFull> {
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let start = pieces.last().map_or(0, |piece| piece.end);
        let bytes = len.saturating_mul(size_of::<T>());
        let end = start.saturating_add(bytes).checked_next_multiple_of(ALIGNMENT);
        let Some(end) = end.filter(|&end| end <= self.memory.len()) else {
            return Err(ArenaFull {
                name,
                bytes,
                used: start,
                total: self.memory.len(),
                holders: holders(&pieces),
            });
        };
        pieces.push(Piece { name, end, bytes });
        Ok(ViewMut {
            pointer: self.memory.pointer + start as u64,
            len,
            life: PhantomData,
        })
    }

    /// Who holds how much, the largest first.
    pub fn holders(&self) -> Holders {
        holders(&self.pieces.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes everything back; what kernels still do with it comes before whatever is launched later on the same stream.
    pub fn clear(&mut self) {
        self.pieces
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .clear();
    }
}

fn holders(pieces: &[Piece]) -> Holders {
    let mut sums: Vec<(&'static str, usize)> = Vec::new();
    for piece in pieces {
        match sums.iter_mut().find(|(name, _)| *name == piece.name) {
            Some((_, bytes)) => *bytes += piece.bytes,
            None => sums.push((piece.name, piece.bytes)),
        }
    }
    sums.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    Holders(sums)
}
