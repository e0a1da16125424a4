//! What the engine must know of `cluster.toml`.

use eaglet_runtime::contract::Contract;
use eaglet_runtime::optimizer::{Decay, Schedule};

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

impl RestartPolicy {
    /// Wait before a seat is filled again that was filled again `recent` times within the window. The first time there
    /// is none: most losses are single ones.
    pub fn backoff_ms(&self, recent: u32) -> u64 {
        let Some(doublings) = recent.checked_sub(1) else {
            return 0;
        };
        let factor = 1_u64.checked_shl(doublings).unwrap_or(u64::MAX);
        self.backoff_initial_ms
            .saturating_mul(factor)
            .min(self.backoff_max_ms)
    }
}

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fall {
    /// Straight to zero.
    Linear,
    /// Half a cosine to zero.
    Cosine,
    /// Not at all until the last part of the run, then straight to zero.
    Constant {
        /// That part, 0 to 1.
        decay_ratio: f64,
    },
}

/// The learning rate as parts of a run whose length is known later.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LearningRate {
    /// After the warm-up.
    pub peak: f64,
    /// Part of the run that warms up, 0 to 1.
    pub warmup_ratio: f64,
    /// What comes then.
    pub fall: Fall,
}

impl LearningRate {
    /// The schedule of a run of so many steps.
    pub fn schedule(&self, total_steps: u64) -> Schedule {
        let part = |ratio: f64| (ratio * total_steps as f64).ceil() as u64;
        Schedule {
            peak: self.peak,
            warmup_steps: part(self.warmup_ratio),
            total_steps,
            decay: match self.fall {
                Fall::Linear => Decay::Linear,
                Fall::Cosine => Decay::Cosine,
                Fall::Constant { decay_ratio } => Decay::Constant {
                    decay_steps: part(decay_ratio),
                },
            },
        }
    }
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
    /// Rows that each draft seat evaluates at most.
    pub held_out_rows: usize,
    /// Longest held-out answer.
    pub max_new_tokens: usize,
    /// Write a checkpoint every so many steps; 0 is only at the end.
    pub checkpoint_every_steps: u64,
    /// Learning rate of each step.
    pub learning_rate: LearningRate,
    /// A verifier that is silent for longer gets no new rows.
    pub suspect_after_ms: u64,
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
