//! Memory that carries operands from the host to a device and results back, kept for the next operation.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;

use super::driver::CudaError;
use super::memory::{Buffer, Memory, View, ViewMut};

/// The smallest buffer that is kept, in bytes.
const SMALLEST: usize = 4096;
/// Its name in the rank's account of memory.
const OPERANDS: &str = "operands of operations";

/// Buffers of a device by their size, a power of two.
#[derive(Debug)]
pub(super) struct Staging {
    memory: Arc<Memory>,
    free: Mutex<HashMap<usize, Vec<Buffer<u8>>>>,
}

/// Elements in a buffer that goes back to where it came from.
#[derive(Debug)]
pub(super) struct Lent<'a, T> {
    from: &'a Staging,
    buffer: Option<Buffer<u8>>,
    len: usize,
    element: PhantomData<T>,
}

impl Staging {
    pub(super) fn new(memory: &Arc<Memory>) -> Self {
        Self {
            memory: memory.clone(),
            free: Mutex::default(),
        }
    }

    /// Room for `len` elements; its contents are whatever was there.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`].
    pub(super) fn lend<T: Pod>(&self, len: usize) -> Result<Lent<'_, T>, CudaError> {
        let bytes = (len * size_of::<T>()).next_power_of_two().max(SMALLEST);
        let kept = {
            let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.get_mut(&bytes).and_then(Vec::pop)
        };
        let buffer = match kept {
            Some(buffer) => buffer,
            None => match self.memory.take(OPERANDS, bytes) {
                Err(CudaError::OutOfMemory { .. }) => {
                    // What is kept in other sizes may be enough.
                    self.free.lock().unwrap_or_else(PoisonError::into_inner).clear();
                    self.memory.take(OPERANDS, bytes)?
                }
                made => made?,
            },
        };
        Ok(Lent {
            from: self,
            buffer: Some(buffer),
            len,
            element: PhantomData,
        })
    }
}

impl<'a, T: Pod> Lent<'a, T> {
    pub(super) fn view(&self) -> View<'_, T> {
        match &self.buffer {
            Some(buffer) => buffer.view().typed(self.len),
            None => unreachable!("only a drop takes the buffer"),
        }
    }

    /// The same memory for as many elements of another type as fit.
    pub(super) fn cast<U: Pod>(mut self) -> Lent<'a, U> {
        Lent {
            from: self.from,
            buffer: self.buffer.take(),
            len: self.len * size_of::<T>() / size_of::<U>(),
            element: PhantomData,
        }
    }

    pub(super) fn view_mut(&mut self) -> ViewMut<'_, T> {
        let len = self.len;
        match &mut self.buffer {
            Some(buffer) => buffer.view_mut().typed(len),
            None => unreachable!("only a drop takes the buffer"),
        }
    }
}

impl<T> Drop for Lent<'_, T> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            let mut free = self.from.free.lock().unwrap_or_else(PoisonError::into_inner);
            free.entry(buffer.len()).or_default().push(buffer);
        }
    }
}
