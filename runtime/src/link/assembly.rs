//! The parts of a message on their way in.

use std::collections::VecDeque;
use std::sync::Arc;

use super::message::{BulkHeader, BulkMessage};
use super::part::Part;
use super::pool::{Budget, BufferPool, Charge, PooledBuffer};

/// What a decoded header may weigh beyond four times its encoded bytes (a token id of one byte becomes a `u32`).
const HEADER_OVERHEAD_BYTES: u64 = 512;

/// What a message weighs while it is taken in.
pub(super) fn weight_bytes(header_bytes: usize, message_bytes: u64) -> u64 {
    header_weight_bytes(header_bytes).saturating_add(message_bytes)
}

fn header_weight_bytes(header_bytes: usize) -> u64 {
    4 * header_bytes as u64 + HEADER_OVERHEAD_BYTES
}

/// A message whose header has come, and whose weight its budget has admitted.
pub(super) struct Assembly {
    header: BulkHeader,
    charge: Charge,
    /// Parts that are whole.
    whole: Vec<Part>,
    /// What the parts after them weigh until it is known where they lie.
    reserved: VecDeque<Charge>,
    /// The part after them, as far as it has come.
    filling: Option<(PooledBuffer, usize)>,
    pool: BufferPool,
}

impl Assembly {
    pub(super) fn new(
        header: BulkHeader,
        header_bytes: usize,
        budget: &Arc<Budget>,
        pool: &BufferPool,
    ) -> Self {
        let charge = budget.charge(header_weight_bytes(header_bytes));
        let reserved = header.parts.iter().map(|&bytes| budget.charge(bytes)).collect();
        let mut assembly = Self {
            header,
            charge,
            whole: Vec::new(),
            reserved,
            filling: None,
            pool: pool.clone(),
        };
        assembly.skip_empty();
        assembly
    }

    /// Nothing is sent for empty parts.
    fn skip_empty(&mut self) {
        while self.next_bytes() == Some(0) {
            self.reserved.pop_front();
            self.whole.push(self.pool.take(0).into());
        }
    }

    /// Bytes of the part that is next or being filled, if one is missing.
    fn next_bytes(&self) -> Option<usize> {
        self.header
            .parts
            .get(self.whole.len())
            .map(|&bytes| bytes as usize)
    }

    /// Bytes of the part that is next, if one is missing and nothing of it has come.
    pub(super) fn untouched_bytes(&self) -> Option<usize> {
        self.next_bytes().filter(|_| self.filling.is_none())
    }

    pub(super) fn is_whole(&self) -> bool {
        self.next_bytes().is_none()
    }

    /// Where the rest of the part goes that is being filled; empty if the message is whole.
    pub(super) fn rest(&mut self) -> &mut [u8] {
        let (buffer, filled) = match self.filling.take() {
            Some(filling) => filling,
            None => {
                let bytes = self.next_bytes().unwrap_or(0);
                (self.pool.take_charged(bytes, self.reserved.pop_front()), 0)
            }
        };
        let (buffer, filled) = self.filling.insert((buffer, filled));
        &mut buffer[*filled..]
    }

    /// So many bytes of the rest have come; says whether the part is whole.
    pub(super) fn filled(&mut self, bytes: usize) -> bool {
        let Some((buffer, filled)) = self.filling.take() else {
            return false;
        };
        let end = filled + bytes;
        if end < buffer.len() {
            self.filling = Some((buffer, end));
            return false;
        }
        self.whole.push(buffer.into());
        self.skip_empty();
        true
    }

    /// The next part has come whole, in memory of its own.
    pub(super) fn placed(&mut self, part: Part) {
        self.reserved.pop_front();
        self.whole.push(part);
        self.skip_empty();
    }

    /// The message, once it is whole.
    pub(super) fn into_message(self) -> BulkMessage {
        BulkMessage {
            header: self.header,
            parts: self.whole,
            charge: self.charge,
        }
    }
}
