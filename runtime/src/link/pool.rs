//! Buffers that are used again, and the budget that bounds what a connection may have delivered.
//!
//! A fresh vector for every tensor costs more in page faults than the copy into it.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::bell::Wake;
use bytes::Bytes;

/// Keeps a bounded amount of memory for buffers to come.
///
/// Clones share the memory.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<PoolState>,
}

struct PoolState {
    keep_bytes: usize,
    /// Vectors at rest; each is as long as it was ever used, so that taking one writes nothing.
    spare: Mutex<Vec<Vec<u8>>>,
}

impl BufferPool {
    /// A pool that keeps at most `keep_bytes` at rest.
    pub fn new(keep_bytes: usize) -> Self {
        Self {
            shared: Arc::new(PoolState {
                keep_bytes,
                spare: Mutex::new(Vec::new()),
            }),
        }
    }

    /// A buffer of `length` bytes with unspecified content.
    pub fn take(&self, length: usize) -> PooledBuffer {
        self.buffer(length, None)
    }

    fn give_back(&self, bytes: Vec<u8>) {
        let mut spare = self.spare();
        let resting: usize = spare.iter().map(Vec::len).sum();
        if !bytes.is_empty() && resting + bytes.len() <= self.shared.keep_bytes {
            spare.push(bytes);
        }
    }

    /// Bytes at rest.
    pub fn resting_bytes(&self) -> usize {
        self.spare().iter().map(Vec::len).sum()
    }

    pub(super) fn take_charged(&self, length: usize, charge: Option<Charge>) -> PooledBuffer {
        self.buffer(length, charge)
    }

    fn buffer(&self, length: usize, charge: Option<Charge>) -> PooledBuffer {
        PooledBuffer {
            bytes: self.vector(length),
            length,
            pool: self.clone(),
            charge,
        }
    }

    /// The smallest vector at rest that is long enough and not more than twice as long, or a new one.
    fn vector(&self, length: usize) -> Vec<u8> {
        let mut spare = self.spare();
        let best = spare
            .iter()
            .enumerate()
            .filter(|(_, bytes)| bytes.len() >= length && bytes.len() / 2 <= length)
            .min_by_key(|(_, bytes)| bytes.len())
            .map(|(at, _)| at);
        match best {
            Some(at) => spare.swap_remove(at),
            None => {
                // What lies there does not fit the traffic: the oldest makes room for this one's return.
                let mut resting: usize = spare.iter().map(Vec::len).sum();
                while !spare.is_empty() && resting + length > self.shared.keep_bytes {
                    resting -= spare.remove(0).len();
                }
                drop(spare);
                vec![0; length]
            }
        }
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Vec<u8>>> {
        self.shared.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes that return to their pool when they are dropped.
pub struct PooledBuffer {
    bytes: Vec<u8>,
    length: usize,
    pool: BufferPool,
    /// What this buffer weighs in the budget of its connection.
    charge: Option<Charge>,
}

impl PooledBuffer {
    /// The bytes, shared without a copy; the last clone returns them to the pool. The budget of the connection is relieved
    /// at once.
    pub(super) fn into_bytes(mut self) -> Bytes {
        self.charge = None;
        Bytes::from_owner(self)
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.bytes));
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for PooledBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let charged = self.charge.is_some();
        f.debug_struct("PooledBuffer")
            .field("length", &self.length)
            .field("charged", &charged)
            .finish()
    }
}

/// How many delivered bytes of one connection may be alive.
pub(super) struct Budget {
    limit_bytes: u64,
    held_bytes: AtomicU64,
    /// Called when bytes are given back.
    wake: Wake,
}

impl Budget {
    pub(super) fn new(limit_bytes: u64, wake: Wake) -> Arc<Self> {
        Arc::new(Self {
            limit_bytes,
            held_bytes: AtomicU64::new(0),
            wake,
        })
    }

    /// Whether a message of so many bytes may come in. One always may when nothing is held.
    pub(super) fn admits(&self, bytes: u64) -> bool {
        let held_bytes = self.held_bytes.load(Ordering::Acquire);
        held_bytes == 0 || held_bytes.saturating_add(bytes) <= self.limit_bytes
    }

    /// Counts bytes until the charge is dropped.
    pub(super) fn charge(self: &Arc<Self>, bytes: u64) -> Charge {
        self.held_bytes.fetch_add(bytes, Ordering::AcqRel);
        Charge {
            budget: Arc::clone(self),
            bytes,
        }
    }
}

/// Bytes counted in a budget.
pub(super) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.held_bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        (self.budget.wake)();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_used_again() {
        let pool = BufferPool::new(1 << 20);
        let first = pool.take(1000);
        let place = first.as_ptr();
        drop(first);
        assert_eq!(pool.resting_bytes(), 1000);
        let second = pool.take(900);
        assert_eq!((second.as_ptr(), second.len()), (place, 900));
        assert_eq!(pool.resting_bytes(), 0);
        assert_ne!(pool.take(100).as_ptr(), place, "in use");
    }

    #[test]
    fn the_pool_is_bounded_and_follows_the_traffic() {
        let pool = BufferPool::new(1000);
        let buffers: Vec<_> = (0..4).map(|_| pool.take(400)).collect();
        drop(buffers);
        assert_eq!(pool.resting_bytes(), 800);
        drop(pool.take(900));
        assert_eq!(pool.resting_bytes(), 900, "old sizes make room");
        drop(pool.take(1001));
        assert!(pool.resting_bytes() <= 1000);
    }

    #[test]
    fn the_last_clone_returns_a_buffer() {
        let pool = BufferPool::new(1000);
        let bytes = pool.take(500).into_bytes();
        let (place, clone) = (bytes.as_ptr(), bytes.clone());
        drop(bytes);
        assert_eq!(pool.resting_bytes(), 0, "a clone is left");
        drop(clone);
        assert_eq!(pool.resting_bytes(), 500);
        assert_eq!(pool.take(500).as_ptr(), place);
    }

    #[test]
    fn a_budget_admits_one_message_of_any_size() {
        let budget = Budget::new(100, Box::new(|| {}));
        assert!(budget.admits(1000));
        let large = budget.charge(1000);
        assert!(!budget.admits(1));
        drop(large);
        let _small = budget.charge(60);
        assert!(budget.admits(40));
        assert!(!budget.admits(41));
        assert!(!budget.admits(u64::MAX));
    }
}
