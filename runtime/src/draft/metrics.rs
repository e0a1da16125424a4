//! What a training step reports.

use smallvec::SmallVec;

/// One value per TTT step; without an allocation as long as there are not unusually many.
pub type PerStep<T> = SmallVec<[T; 8]>;

/// Sums over the masked positions of one TTT step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TttMetrics {
    /// Mean KL divergence over masked positions: Σ KL / (Σ mask + 1e-5), in nats.
    pub loss: f64,
    /// Positions whose arg-max matched the verifier's in this and all earlier steps.
    pub full_correct: f64,
    /// Masked positions.
    pub full_total: f64,
    /// Same as `full_correct`: a match counts only while the chain holds.
    pub cond_correct: f64,
    /// Positions whose chain held before this step.
    pub cond_total: f64,
}

/// Metrics of one row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepMetrics {
    /// Σ decay^k · loss of TTT step k, in nats.
    pub loss: f64,
    /// Masked positions of the row; each is trained by up to `ttt_steps` steps.
    pub masked_tokens: usize,
    /// One entry per TTT step.
    pub steps: PerStep<TttMetrics>,
}
