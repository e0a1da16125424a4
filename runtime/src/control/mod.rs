//! The control plane: messages between the coordinator and its ranks or operators, and the link that carries them.
//!
//! One bidirectional stream per rank incarnation; the life of the stream is the life of the incarnation. A stream ends
//! well only after an explicit [`RankEvent::Bye`] or [`CoordinatorCommand::Quit`]; every other end is loss. Bodies are
//! small: tensors travel on the bulk plane. A host beside the coordinator's has such a stream of its own, over which ranks are
//! started there. An operator's request is a call of its own with one answer.
//!
//! The transport is tonic; only [`transport`] and [`BincodeCodec`] know it.

mod codec;
mod host;
mod message;
mod operator;
pub mod transport;

pub use codec::BincodeCodec;
pub use host::{HostCommand, HostEvent, HostWelcome, Join};
pub use message::{
    Acceptance, Activity, Attach, Beat, BulkAddress, CollectiveId, CoordinatorCommand, DraftOrigin,
    Extraction, Handover, HeldOutRequest, LaneMetrics, Member, PROTOCOL, RankEvent, StepMetrics, Turn,
};
pub use operator::{OperatorCall, OperatorReply, OperatorRequest, RankLine};
