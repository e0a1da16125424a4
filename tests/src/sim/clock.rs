//! Virtual time, and what is going to happen in it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Bits of a key that count the entries; the others are the time.
const SEQUENCE_BITS: u32 = 28;

/// A queue of things to happen. Those of one millisecond happen in the order in which they were put in.
#[derive(Debug)]
pub struct Clock<T> {
    now_ms: u64,
    sequence: u64,
    /// Time and order, and the slot of what happens.
    heap: BinaryHeap<Reverse<(u64, u32)>>,
    slots: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Clock<T> {
    /// An empty queue at time 0.
    fn default() -> Self {
        Self {
            now_ms: 0,
            sequence: 0,
            heap: BinaryHeap::with_capacity(64),
            slots: Vec::with_capacity(64),
            free: Vec::new(),
        }
    }
}

impl<T> Clock<T> {
    /// The virtual time.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// Puts something in for a time that has not passed.
    pub fn at(&mut self, at_ms: u64, what: T) {
        let at_ms = at_ms.max(self.now_ms);
        let slot = match self.free.pop() {
            Some(slot) => {
                self.slots[slot as usize] = Some(what);
                slot
            }
            None => {
                self.slots.push(Some(what));
                self.slots.len() as u32 - 1
            }
        };
        self.sequence += 1;
        self.heap
            .push(Reverse((at_ms << SEQUENCE_BITS | self.sequence, slot)));
    }

    /// Puts something in for a while from now.
    pub fn after(&mut self, wait_ms: u64, what: T) {
        self.at(self.now_ms + wait_ms, what);
    }

    /// Lets time go on to the next thing.
    pub fn advance(&mut self) -> Option<T> {
        let Reverse((key, slot)) = self.heap.pop()?;
        self.now_ms = key >> SEQUENCE_BITS;
        self.free.push(slot);
        self.slots[slot as usize].take()
    }

    /// How many things have been put in.
    pub fn count(&self) -> u64 {
        self.sequence
    }
}

#[cfg(test)]
mod tests {
    use super::Clock;

    #[test]
    fn things_happen_in_their_order() {
        let mut clock = Clock::default();
        for (at_ms, what) in [(5, 'c'), (3, 'a'), (5, 'd'), (3, 'b')] {
            clock.at(at_ms, what);
        }
        let mut seen = Vec::new();
        while let Some(what) = clock.advance() {
            seen.push((clock.now_ms(), what));
            if what == 'b' {
                clock.after(1, 'x');
                clock.at(0, 'y');
            }
        }
        assert_eq!(seen, [(3, 'a'), (3, 'b'), (3, 'y'), (4, 'x'), (5, 'c'), (5, 'd')]);
    }
}
