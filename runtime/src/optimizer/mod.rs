//! AdamW, learning-rate schedules and gradient clipping.
//!
//! Semantics are PyTorch's and transformers', so that a run can be compared step by step. State is two flat vectors in
//! the order of the parameters; nothing here knows which tensor an element belongs to.

mod adamw;
mod schedule;

pub use adamw::{AdamW, AdamWSpec, LengthError, UpdateReport};
pub use schedule::{Decay, Schedule};
