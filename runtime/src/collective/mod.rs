//! What several ranks compute together, in a fixed order so that it repeats bit for bit: sums over the draft replicas, and
//! what the shards of one verifier tell each other.
//!
//! Nothing here owns a link: [`SeatOrderedReduce`] says what to send and is told what arrived, and [`ShardPeers`] asks an
//! [`Exchange`], so that whoever drives them can listen to the coordinator at the same time.

mod buckets;
mod reduce;
mod segments;
mod shards;
#[cfg(test)]
mod tests;

pub use buckets::{BucketError, BucketPlan, Piece, SumMode, Turn};
pub use reduce::{CollectiveError, Outgoing, Phase, ReduceShape, SeatOrderedReduce};
pub use segments::Segments;
pub use shards::{Exchange, ShardMessage, ShardPeers};
