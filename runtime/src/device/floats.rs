//! Floats wherever they lie: in the host's memory, or in a GPU's.
//!
//! Model code owns [`Buffer`]s and hands out [`Floats`] and [`FloatsMut`], which borrow as slices do; only a [`Device`] looks
//! inside. A GPU takes both kinds: what lies on the host is sent along with the operation. The CPU takes the host's.
//!
//! FLOATS-1: what lies on a GPU is read and written by its stream only, in the order of the operations, so a borrow may end
//! before the GPU is done with it. What lies on the host is as its type says when an operation returns.
//!
//! [`Device`]: super::Device

use std::ops::Range;
use std::sync::Arc;

use crate::cuda::{Buffer as GpuBuffer, View, ViewMut};

/// Floats to read.
#[derive(Clone, Copy, Debug)]
pub struct Floats<'a>(pub(crate) Place<'a>);

/// Floats to write, or to read and write.
#[derive(Debug)]
pub struct FloatsMut<'a>(pub(crate) PlaceMut<'a>);

#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    Host(&'a [f32]),
    Gpu(View<'a, f32>),
}

#[derive(Debug)]
pub(crate) enum PlaceMut<'a> {
    Host(&'a mut [f32]),
    Gpu(ViewMut<'a, f32>),
}

/// What an operation of the CPU says to a GPU's memory: the caller has mixed up two devices.
const FOREIGN: &str = "the cpu was given floats that lie on a gpu";

impl<'a> Floats<'a> {
    /// None.
    pub const fn empty() -> Self {
        Self(Place::Host(&[]))
    }

    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            Place::Host(floats) => floats.len(),
            Place::Gpu(floats) => floats.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of them.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    #[must_use]
    pub fn part(&self, range: Range<usize>) -> Self {
        match &self.0 {
            Place::Host(floats) => Self(Place::Host(&floats[range])),
            Place::Gpu(floats) => Self(Place::Gpu(floats.part(range))),
        }
    }

    /// All from the `start`-th on; none if there are fewer.
    #[must_use]
    pub fn tail(&self, start: usize) -> Self {
        self.part(start.min(self.len())..self.len())
    }

    /// The floats as a slice, if they lie on the host.
    pub fn as_host(self) -> Option<&'a [f32]> {
        match self.0 {
            Place::Host(floats) => Some(floats),
            Place::Gpu(_) => None,
        }
    }

    /// The floats as a view, if they lie on a GPU.
    pub fn as_gpu(self) -> Option<View<'a, f32>> {
        match self.0 {
            Place::Host(_) => None,
            Place::Gpu(floats) => Some(floats),
        }
    }

    /// The floats as a slice, for a device that computes on the host.
    ///
    /// # Panics
    /// If they lie on a GPU.
    #[track_caller]
    pub(crate) fn host(self) -> &'a [f32] {
        match self.0 {
            Place::Host(floats) => floats,
            Place::Gpu(_) => panic!("{FOREIGN}"),
        }
    }
}

impl<'a> FloatsMut<'a> {
    /// How many.
    pub fn len(&self) -> usize {
        match &self.0 {
            PlaceMut::Host(floats) => floats.len(),
            PlaceMut::Gpu(floats) => floats.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same floats for a shorter time.
    pub fn reborrow(&mut self) -> FloatsMut<'_> {
        match &mut self.0 {
            PlaceMut::Host(floats) => FloatsMut(PlaceMut::Host(floats)),
            PlaceMut::Gpu(floats) => FloatsMut(PlaceMut::Gpu(floats.reborrow())),
        }
    }

    /// The same floats, to read.
    pub fn floats(&self) -> Floats<'_> {
        match &self.0 {
            PlaceMut::Host(floats) => Floats(Place::Host(floats)),
            PlaceMut::Gpu(floats) => Floats(Place::Gpu(floats.view())),
        }
    }

    /// Some of them, to read.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    pub fn part(&self, range: Range<usize>) -> Floats<'_> {
        self.floats().part(range)
    }

    /// Some of them.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    pub fn part_mut(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        self.reborrow().into_part(range)
    }

    /// Some of them, and no more of the others.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    #[must_use]
    pub fn into_part(self, range: Range<usize>) -> Self {
        match self.0 {
            PlaceMut::Host(floats) => Self(PlaceMut::Host(&mut floats[range])),
            PlaceMut::Gpu(floats) => Self(PlaceMut::Gpu(floats.part(range))),
        }
    }

    /// All from the `start`-th on; none if there are fewer.
    #[must_use]
    pub fn tail_mut(&mut self, start: usize) -> FloatsMut<'_> {
        let len = self.len();
        self.part_mut(start.min(len)..len)
    }

    /// The first `at` of them, and the others.
    ///
    /// # Panics
    /// If there are fewer.
    #[track_caller]
    pub fn split_at(self, at: usize) -> (Self, Self) {
        match self.0 {
            PlaceMut::Host(floats) => {
                let (left, right) = floats.split_at_mut(at);
                (Self(PlaceMut::Host(left)), Self(PlaceMut::Host(right)))
            }
            PlaceMut::Gpu(floats) => {
                let (left, right) = floats.split_at(at);
                (Self(PlaceMut::Gpu(left)), Self(PlaceMut::Gpu(right)))
            }
        }
    }

    /// The floats as a view, if they lie on a GPU.
    pub fn into_gpu(self) -> Option<ViewMut<'a, f32>> {
        match self.0 {
            PlaceMut::Host(_) => None,
            PlaceMut::Gpu(floats) => Some(floats),
        }
    }

    /// The floats as a slice, if they lie on the host.
    pub(crate) fn host_mut(&mut self) -> Option<&mut [f32]> {
        match &mut self.0 {
            PlaceMut::Host(floats) => Some(floats),
            PlaceMut::Gpu(_) => None,
        }
    }

    /// The floats as a slice, for a device that computes on the host.
    ///
    /// # Panics
    /// If they lie on a GPU.
    #[track_caller]
    pub(crate) fn host(self) -> &'a mut [f32] {
        match self.0 {
            PlaceMut::Host(floats) => floats,
            PlaceMut::Gpu(_) => panic!("{FOREIGN}"),
        }
    }
}

impl<'a> From<&'a [f32]> for Floats<'a> {
    fn from(floats: &'a [f32]) -> Self {
        Self(Place::Host(floats))
    }
}

impl<'a> From<&'a Vec<f32>> for Floats<'a> {
    fn from(floats: &'a Vec<f32>) -> Self {
        Self(Place::Host(floats))
    }
}

impl<'a, const N: usize> From<&'a [f32; N]> for Floats<'a> {
    fn from(floats: &'a [f32; N]) -> Self {
        Self(Place::Host(floats))
    }
}

impl<'a> From<&'a Buffer> for Floats<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        buffer.floats()
    }
}

impl<'a> From<&'a FloatsMut<'_>> for Floats<'a> {
    fn from(floats: &'a FloatsMut<'_>) -> Self {
        floats.floats()
    }
}

impl<'a> From<&'a mut [f32]> for FloatsMut<'a> {
    fn from(floats: &'a mut [f32]) -> Self {
        Self(PlaceMut::Host(floats))
    }
}

impl<'a> From<&'a mut Vec<f32>> for FloatsMut<'a> {
    fn from(floats: &'a mut Vec<f32>) -> Self {
        Self(PlaceMut::Host(floats))
    }
}

impl<'a, const N: usize> From<&'a mut [f32; N]> for FloatsMut<'a> {
    fn from(floats: &'a mut [f32; N]) -> Self {
        Self(PlaceMut::Host(floats))
    }
}

impl<'a> From<&'a mut Buffer> for FloatsMut<'a> {
    fn from(buffer: &'a mut Buffer) -> Self {
        buffer.floats_mut()
    }
}

impl<'a> From<&'a mut FloatsMut<'_>> for FloatsMut<'a> {
    fn from(floats: &'a mut FloatsMut<'_>) -> Self {
        floats.reborrow()
    }
}

/// Floats that somebody owns. A new one is empty and lies on the host; a device that fits it may take it to itself.
#[derive(Debug, Default)]
pub struct Buffer(Owned);

#[derive(Debug)]
enum Owned {
    Host(Vec<f32>),
    /// Never written to.
    Shared(Arc<[f32]>),
    /// The first `len` elements of the memory.
    Gpu {
        memory: GpuBuffer<f32>,
        len: usize,
    },
}

impl Default for Owned {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl Buffer {
    /// In a GPU's memory.
    pub(crate) fn on_gpu(memory: GpuBuffer<f32>, len: usize) -> Self {
        assert!(len <= memory.len(), "{len} floats in memory for {}", memory.len());
        Self(Owned::Gpu { memory, len })
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.floats().len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All of them, to read.
    pub fn floats(&self) -> Floats<'_> {
        match &self.0 {
            Owned::Host(floats) => Floats(Place::Host(floats)),
            Owned::Shared(floats) => Floats(Place::Host(floats)),
            Owned::Gpu { memory, len } => Floats(Place::Gpu(memory.view().part(0..*len))),
        }
    }

    /// All of them.
    ///
    /// # Panics
    /// If they are shared.
    #[track_caller]
    pub fn floats_mut(&mut self) -> FloatsMut<'_> {
        match &mut self.0 {
            Owned::Host(floats) => FloatsMut(PlaceMut::Host(floats)),
            Owned::Shared(_) => panic!("shared floats are never written to"),
            Owned::Gpu { memory, len } => FloatsMut(PlaceMut::Gpu(memory.view_mut().part(0..*len))),
        }
    }

    /// The vector that it owns on the host; an empty one if it owns none.
    #[must_use]
    pub fn into_vec(self) -> Vec<f32> {
        match self.0 {
            Owned::Host(floats) => floats,
            Owned::Shared(_) | Owned::Gpu { .. } => Vec::new(),
        }
    }

    /// Some of them, to read.
    ///
    /// # Panics
    /// If they are out of range.
    #[track_caller]
    pub fn part(&self, range: Range<usize>) -> Floats<'_> {
        self.floats().part(range)
    }

    /// All from the `start`-th on, to read; none if there are fewer.
    pub fn tail(&self, start: usize) -> Floats<'_> {
        self.floats().tail(start)
    }

    /// Some of them.
    ///
    /// # Panics
    /// If they are out of range, or shared.
    #[track_caller]
    pub fn part_mut(&mut self, range: Range<usize>) -> FloatsMut<'_> {
        self.floats_mut().into_part(range)
    }

    /// All from the `start`-th on; none if there are fewer.
    ///
    /// # Panics
    /// If they are shared.
    #[track_caller]
    pub fn tail_mut(&mut self, start: usize) -> FloatsMut<'_> {
        let len = self.len();
        self.part_mut(start.min(len)..len)
    }

    /// Gives it `len` elements on the host; what is new is zero.
    pub(crate) fn resize_on_host(&mut self, len: usize) {
        match &mut self.0 {
            Owned::Host(floats) => floats.resize(len, 0.0),
            other => *other = Owned::Host(vec![0.0; len]),
        }
    }

    /// Gives it `len` elements of the GPU's memory that it has; whether there was room.
    pub(crate) fn resize_on_gpu(&mut self, to: usize) -> bool {
        match &mut self.0 {
            Owned::Gpu { memory, len } if to <= memory.len() => {
                *len = to;
                true
            }
            _ => false,
        }
    }
}

impl From<Vec<f32>> for Buffer {
    fn from(floats: Vec<f32>) -> Self {
        Self(Owned::Host(floats))
    }
}

impl From<Arc<[f32]>> for Buffer {
    fn from(floats: Arc<[f32]>) -> Self {
        Self(Owned::Shared(floats))
    }
}
