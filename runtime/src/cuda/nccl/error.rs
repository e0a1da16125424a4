//! What goes wrong with communicators.

use crate::cuda::driver::CudaError;

/// A collective, or the making of a communicator, failed.
#[derive(Debug, Clone, thiserror::Error)]
pub enum NcclError {
    /// NCCL says so.
    #[error("{call} failed: {name} (nccl result {code}){detail}")]
    Call {
        /// NCCL's function.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// The answer's name.
        name: &'static str,
        /// NCCL's last words, if it has any.
        detail: String,
    },
    /// A peer is missing, dead or slow.
    #[error("{what} of rank {rank} of {ranks} is not done after {waited_ms} ms; a peer is gone or late")]
    Late {
        /// What was waited for.
        what: &'static str,
        /// Who waited.
        rank: usize,
        /// Ranks of the communicator.
        ranks: usize,
        /// How long.
        waited_ms: u64,
    },
    /// The communicator was aborted.
    #[error("{what}: the communicator was aborted")]
    Aborted {
        /// What was asked for.
        what: &'static str,
    },
    /// The abort itself hangs; only the end of the process helps.
    #[error("the communicator of rank {rank} is not aborted after {waited_ms} ms; the process has to end")]
    AbortStuck {
        /// Who aborted.
        rank: usize,
        /// How long it waited.
        waited_ms: u64,
    },
    /// The device failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

pub(super) fn name(code: i32) -> &'static str {
    // ncclResult_t of nccl.h.
    match code {
        1 => "unhandled cuda error",
        2 => "unhandled system error",
        3 => "internal error",
        4 => "invalid argument",
        5 => "invalid usage",
        6 => "remote error",
        7 => "in progress",
        _ => "unknown",
    }
}
