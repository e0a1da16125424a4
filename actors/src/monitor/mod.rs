//! What a run looks like from outside: the state that views show.

mod snapshot;

pub use snapshot::{
    Acceptance, Event, Point, RankState, RankView, SampleCounts, ShardView, Snapshot, StepAccuracy,
};
