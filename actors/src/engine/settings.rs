//! What the engine must know of `cluster.toml`.

use std::collections::BTreeMap;

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::Contract;
use eaglet_runtime::ids::{Role, Seat};
use eaglet_runtime::optimizer::{Decay, Schedule};
use serde::{Deserialize, Serialize};

/// What is done about a seat that was lost too often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WhenExhausted {
    /// It stays empty and the others go on, as long as there are others of its role.
    #[default]
    Continue,
    /// The run ends.
    Stop,
}

/// When a seat is filled again, and when that is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestartPolicy {
    /// Restarts of one seat within the window before it is given up.
    pub max_restarts: u32,
    /// The window.
    pub window_ms: u64,
    /// Wait before the second restart within the window; it doubles with each further one.
    pub backoff_initial_ms: u64,
    /// Longest wait.
    pub backoff_max_ms: u64,
    /// What is done then.
    pub then: WhenExhausted,
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

    /// The rate of the step that follows `done` steps, in a run of a known length or of one that is not known yet.
    ///
    /// While the length is not known the rate rises over the warm-up part of what is known and then stays. Once it is,
    /// the rate falls from where it is to zero over the steps that are left. When a run of known length becomes longer or
    /// shorter, its schedule is stretched, and the rate goes from where it is to the stretched curve no faster than it
    /// rises in the warm-up, or by a hundredth of the peak a step without one.
    pub fn at(&self, done: u64, length: Length, pace: Pace) -> f64 {
        let (curve, total_steps) = match (length, pace.closed) {
            (Length::SoFar(total), _) => {
                let schedule = self.schedule(total);
                let rise = Schedule {
                    decay: Decay::Constant { decay_steps: 0 },
                    ..schedule
                };
                (rise.learning_rate(done), total)
            }
            (Length::Whole(total), Some(Turn { at, rate })) => {
                let rest = Schedule {
                    peak: rate,
                    warmup_steps: 0,
                    total_steps: total.saturating_sub(at),
                    decay: self.schedule(total.saturating_sub(at)).decay,
                };
                (rest.learning_rate(done.saturating_sub(at)), total)
            }
            (Length::Whole(total), None) => (self.schedule(total).learning_rate(done), total),
        };
        let Some(Turn { at, rate }) = pace.turned else {
            return curve;
        };
        let warmup_steps = self.schedule(total_steps).warmup_steps;
        let slope = if warmup_steps > 0 {
            self.peak / warmup_steps as f64
        } else {
            self.peak / 100.0
        };
        let reach = (done.saturating_sub(at) + 1) as f64 * slope;
        curve.clamp(rate - reach, rate + reach).max(0.0)
    }
}

/// The length of a run, as far as it is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// All steps.
    Whole(u64),
    /// The steps of what was read so far; more may come.
    SoFar(u64),
}

/// Where the course of the learning rate took a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// The last time the number of steps changed.
    pub turned: Option<Turn>,
    /// When an open run learnt its length.
    pub closed: Option<Turn>,
}

/// Steps that were committed at a turn, and the rate of the last of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turn {
    /// Steps committed by then.
    pub at: u64,
    /// Learning rate of the last of them.
    pub rate: f64,
}

/// What the engine must know of `cluster.toml`.
#[derive(Clone)]
pub struct Settings {
    /// Rows of each step; the draft seats share them.
    pub lanes: u16,
    /// Stages that a verifier is cut into, at least 1.
    pub pipeline: u16,
    /// Slices that each stage is cut into, at least 1.
    pub tensor: u16,
    /// The seats of `cluster.toml`.
    pub seats: Vec<Seat>,
    /// Whether the run waits for more samples when all are trained.
    pub open: bool,
    /// What hidden states promise.
    pub contract: Contract,
    /// Digest of everything in the configuration that decides the weights.
    pub recipe: eaglet_runtime::digest::Digest,
    /// In which order gradients of lanes are added: whether a step that is done again by others has the same bits.
    pub sums: SumMode,
    /// In which order the slices of a verifier are added: whether a row that is extracted again has the same bits.
    pub slice_sums: SumMode,
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
    /// Rows that are evaluated at most for each lane.
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
    /// A row must be extracted, and a step staged and applied, within this.
    pub step_timeout_ms: u64,
    /// The members of an epoch must have linked up within this.
    pub form_timeout_ms: u64,
    /// The shards of a verifier must have linked up within this.
    pub team_timeout_ms: u64,
    /// Whether a draft replica's state reaches those who need it when an epoch has met, rather than over a link before.
    pub broadcasts_state: bool,
    /// Ranks that were told to leave get this long.
    pub leave_timeout_ms: u64,
    /// Hosts of the seats that are not on the coordinator's machine.
    pub hosts: BTreeMap<Seat, String>,
    /// A host that is away for longer loses its seats until it joins.
    pub host_timeout_ms: u64,
    /// Restarts of verifier ranks.
    pub verifier_restarts: RestartPolicy,
    /// Restarts of draft ranks.
    pub draft_restarts: RestartPolicy,
}

impl Settings {
    /// Ranks of one replica of the verifier. Seats `n · shards` to `(n + 1) · shards - 1` are replica `n`.
    pub fn shards(&self) -> u16 {
        self.pipeline.max(1).saturating_mul(self.tensor.max(1))
    }

    /// Whether a step that is done again has the same bits, whoever does it.
    pub fn repeats_bits(&self) -> bool {
        self.sums == SumMode::Exact && self.slice_sums == SumMode::Exact
    }

    /// The restart policy of a role.
    pub fn restarts(&self, role: Role) -> RestartPolicy {
        match role {
            Role::Verifier => self.verifier_restarts,
            Role::Draft => self.draft_restarts,
        }
    }
}
