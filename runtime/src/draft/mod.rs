//! The EAGLE-3 draft: its shape, forward, loss and backward.

mod spec;

pub use spec::{DraftSpec, LayerKind};
