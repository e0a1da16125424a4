//! Memory of a device, and memory of the host that a device copies from at full speed.
//!
//! MEMORY-1: who asks for memory gives it a name, and an error for want of room says how much every name holds. It comes from
//! the rank's arena.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::arena::{Arena, ArenaUse};
use super::driver::{Context, CudaError, OUT_OF_MEMORY};
use super::stream::Stream;

/// `len` elements in a device's memory. Its first contents are whatever was there.
#[derive(Debug)]
pub struct Buffer<T> {
    context: Arc<Context>,
    pointer: u64,
    len: usize,
    element: PhantomData<T>,
    /// Where it goes back to, if it came from a rank's own memory.
    held: Option<Held>,
}

impl<T: Pod> Buffer<T> {
    /// Takes memory from the driver, for what is no rank's.
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
                    name: "a buffer",
                    bytes,
                    device: format!("cuda:{}", context.gpu().ordinal()),
                    free,
                    total,
                    holders: Holders::default(),
                });
            }
            context.check("cuMemAlloc_v2", code)?;
        }
        Ok(Self {
            context: context.clone(),
            pointer,
            len,
            element: PhantomData,
            held: None,
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
        if self.pointer == 0 {
            return;
        }
        if let Some(held) = &self.held {
            held.by.arena.give_back(self.pointer);
        } else if let Ok(table) = self.context.bind() {
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

impl<'a> View<'a, u8> {
    /// The first `len` elements of another type.
    ///
    /// # Panics
    /// If there are not so many bytes.
    #[track_caller]
    pub(super) fn typed<T: Pod>(self, len: usize) -> View<'a, T> {
        assert!(
            len * size_of::<T>() <= self.len && self.pointer.is_multiple_of(align_of::<T>() as u64),
            "{len} elements in {} bytes",
            self.len
        );
        View {
            pointer: self.pointer,
            len,
            life: PhantomData,
        }
    }
}

impl<'a> ViewMut<'a, u8> {
    /// The first `len` elements of another type.
    ///
    /// # Panics
    /// If there are not so many bytes.
    #[track_caller]
    pub(super) fn typed<T: Pod>(self, len: usize) -> ViewMut<'a, T> {
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

    /// The first `at` elements, and the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[track_caller]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        let right = Self {
            pointer: part::<T>(self.pointer, self.len, &(at..self.len)),
            len: self.len - at,
            life: PhantomData,
        };
        (self.part(0..at), right)
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
                    name: "pinned memory",
                    bytes,
                    device: "the host".to_owned(),
                    free: 0,
                    total: 0,
                    holders: Holders::default(),
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

/// What a rank holds of its device's memory, by name.
///
/// Memory is taken when something first needs its size, and kept: after the first steps nothing is taken any more.
#[derive(Debug)]
pub(super) struct Memory(Arc<Account>);

#[derive(Debug)]
struct Account {
    arena: Arena,
    names: Arc<Mutex<BTreeMap<&'static str, usize>>>,
}

impl Drop for Account {
    fn drop(&mut self) {
        if let Ok(Some(ArenaUse {
            reserved, most_used, ..
        })) = self.arena.usage()
        {
            let gpu = self.arena.stream().context().gpu().ordinal();
            tracing::info!(gpu, most_used, reserved, "memory of the gpu, in bytes");
        }
    }
}

/// An entry in a rank's account, for as long as a buffer lives.
#[derive(Debug)]
struct Held {
    by: Arc<Account>,
    name: &'static str,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut all = self.by.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = all.get_mut(self.name) {
            *bytes -= self.bytes;
        }
    }
}

impl Memory {
    /// Memory that is used in the order of a stream (ARENA-1).
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub(super) fn new(stream: &Arc<Stream>) -> Result<Self, CudaError> {
        Ok(Self(Arc::new(Account {
            arena: Arena::new(stream)?,
            names: Arc::default(),
        })))
    }

    /// Memory of the same rank, in the same account, that is used in the order of another stream.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(super) fn beside(&self, stream: &Arc<Stream>) -> Result<Self, CudaError> {
        Ok(Self(Arc::new(Account {
            arena: Arena::new(stream)?,
            names: Arc::clone(&self.0.names),
        })))
    }

    /// Takes memory for `len` elements.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], which says who holds what (MEMORY-1).
    pub(super) fn take<T: Pod>(&self, name: &'static str, len: usize) -> Result<Buffer<T>, CudaError> {
        let arena = &self.0.arena;
        let bytes = len.saturating_mul(size_of::<T>());
        let pointer = match bytes {
            0 => 0,
            bytes => arena.take(bytes)?.ok_or_else(|| {
                let (free, total) = arena.room();
                CudaError::OutOfMemory {
                    name,
                    bytes,
                    device: format!("cuda:{}", arena.stream().context().gpu().ordinal()),
                    free,
                    total,
                    holders: self.holders(),
                }
            })?,
        };
        let mut all = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        *all.entry(name).or_default() += bytes;
        Ok(Buffer {
            context: arena.stream().context().clone(),
            pointer,
            len,
            element: PhantomData,
            held: Some(Held {
                by: Arc::clone(&self.0),
                name,
                bytes,
            }),
        })
    }

    /// What its arena has.
    ///
    /// # Errors
    /// As [`Arena::usage`].
    pub(super) fn usage(&self) -> Result<Option<ArenaUse>, CudaError> {
        self.0.arena.usage()
    }

    /// Who holds how much, the largest first.
    pub(super) fn holders(&self) -> Holders {
        let all = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sums: Vec<_> = all.iter().map(|(&name, &bytes)| (name, bytes)).collect();
        sums.retain(|&(_, bytes)| bytes > 0);
        sums.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
        Holders(sums)
    }
}

/// Names and the bytes they hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Holders(pub Vec<(&'static str, usize)>);

/// Names that an error lists; the smaller ones are summed up.
const LISTED: usize = 6;

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return write!(f, "this rank holds nothing");
        }
        write!(f, "this rank holds ")?;
        for (place, (name, bytes)) in self.0.iter().take(LISTED).enumerate() {
            let comma = if place > 0 { ", " } else { "" };
            write!(f, "{comma}{bytes} for {name}")?;
        }
        let rest: usize = self.0.iter().skip(LISTED).map(|(_, bytes)| bytes).sum();
        if rest > 0 {
            write!(f, " and {rest} for others")?;
        }
        Ok(())
    }
}
