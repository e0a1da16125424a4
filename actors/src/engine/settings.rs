//! What the engine must know of `cluster.toml`.

use eaglet_runtime::contract::Contract;

/// When a seat is filled again, and when that is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Restarts of one seat within the window before the run is given up.
    pub max_restarts: u32,
    /// The window.
    pub window_ms: u64,
    /// Wait before the second restart within the window; it doubles with each further one.
    pub backoff_initial_ms: u64,
    /// Longest wait.
    pub backoff_max_ms: u64,
}

/// What the engine must know of `cluster.toml`.
#[derive(Clone)]
pub struct Settings {
    /// Seats of draft replicas.
    pub draft_seats: u16,
    /// Seats of verifiers.
    pub verifier_seats: u16,
    /// What hidden states promise.
    pub contract: Contract,
    /// Digest of everything in the configuration that decides the weights.
    pub recipe: eaglet_runtime::digest::Digest,
    /// Capacity of a row.
    pub tokens_per_row: u32,
    /// Passes over each sample.
    pub passes: u32,
    /// Train at most so many steps.
    pub step_limit: Option<u64>,
    /// Rows are extracted for so many steps ahead.
    pub prefetch_steps: u64,
    /// Measure acceptance every so many steps; 0 is only at the end.
    pub evaluate_every_steps: u64,
    /// Longest held-out answer.
    pub max_new_tokens: usize,
    /// Write a checkpoint every so many steps; 0 is only at the end.
    pub checkpoint_every_steps: u64,
    /// Learning rate of each step.
    pub schedule: eaglet_runtime::optimizer::Schedule,
    /// A rank that is silent for longer is dead.
    pub dead_after_ms: u64,
    /// A rank must attach within this.
    pub attach_timeout_ms: u64,
    /// A rank must have loaded within this.
    pub load_timeout_ms: u64,
    /// A step must be staged and applied within this.
    pub step_timeout_ms: u64,
    /// Ranks that were told to leave get this long.
    pub leave_timeout_ms: u64,
    /// Restarts.
    pub restarts: RestartPolicy,
}
