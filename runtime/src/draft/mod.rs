//! The EAGLE-3 draft: its shape, forward, loss and backward.
//!
//! One decoder layer that reads the verifier's aux hidden states and predicts its next tokens, trained by unrolling it on
//! its own output (training-time test, TTT) in the dialect of speculators 0.9. There is no tape: the graph is one known
//! layer, so [`Draft::gradient`] is written out, keeps what the backward pass needs, and forms each weight gradient once
//! with all TTT steps stacked.
//!
//! Invariants: parameters, gradients and moments share one flat order ([`ParameterLayout`]); a step with the same inputs
//! gives the same bits, whatever the number of threads; after the first row of a size a step reuses all its buffers.

mod acceptance;
mod backward;
mod batch;
mod cost;
mod error;
mod forward;
mod frozen;
mod head;
mod init;
mod layout;
mod metrics;
mod model;
mod operands;
mod spec;
#[cfg(test)]
mod tests;
mod trace;
mod workspace;

pub use acceptance::Acceptance;
pub use batch::{DraftBatch, SentStates};
pub use cost::{RowCost, RowLoad};
pub use error::DraftError;
pub use frozen::FrozenWeights;
pub use init::init_parameters;
pub use layout::{ParameterLayout, TensorSlot};
pub use metrics::{PerStep, StepMetrics, TttMetrics};
pub use model::{Draft, TrainingSpec};
pub use spec::{DraftSpec, LayerKind};
pub use trace::{DraftTrace, TttTrace};
