//! Sums over the draft replicas, taken in seat order so that they repeat bit for bit.
//!
//! Nothing here sends or waits: [`SeatOrderedReduce`] says what to send and is told what arrived, so that the thread which
//! drives it can listen to the coordinator at the same time.

mod reduce;
mod segments;
#[cfg(test)]
mod tests;

pub use reduce::{CollectiveError, Outgoing, Phase, ReduceShape, SeatOrderedReduce};
pub use segments::Segments;
