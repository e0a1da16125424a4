//! Learning rates by step: linear warm-up, then a decay; the formulas of transformers' schedulers.

use serde::{Deserialize, Serialize};

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decay {
    /// To zero in a straight line.
    Linear,
    /// To zero in half a cosine wave.
    Cosine,
    /// Not, until the last `decay_steps` steps; then to zero in a straight line.
    Constant {
        /// Length of the final decay; 0 for none.
        decay_steps: u64,
    },
}

/// Learning rate as a pure function of the number of steps done.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Schedule {
    /// Highest learning rate.
    pub peak: f64,
    /// Steps of linear warm-up from zero.
    pub warmup_steps: u64,
    /// Steps until the rate is zero.
    pub total_steps: u64,
    /// What follows the warm-up.
    pub decay: Decay,
}

impl Schedule {
    /// Learning rate of the step that follows `done` steps. The first step of a warm-up has rate zero.
    pub fn learning_rate(&self, done: u64) -> f64 {
        if done < self.warmup_steps {
            return self.peak * (done as f64 / self.warmup_steps.max(1) as f64);
        }
        let left = self.total_steps.saturating_sub(done) as f64;
        let length = self.total_steps.saturating_sub(self.warmup_steps).max(1) as f64;
        let factor = match self.decay {
            Decay::Linear => left / length,
            Decay::Cosine => {
                let progress = ((done - self.warmup_steps) as f64 / length).min(1.0);
                (0.5 * (1.0 + (std::f64::consts::PI * progress).cos())).max(0.0)
            }
            Decay::Constant { decay_steps: 0 } => 1.0,
            Decay::Constant { decay_steps } => (left / decay_steps as f64).min(1.0),
        };
        self.peak * factor
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(decay: Decay, steps: impl IntoIterator<Item = u64>) -> Vec<f64> {
        let schedule = Schedule {
            peak: 1e-3,
            warmup_steps: 2,
            total_steps: 200,
            decay,
        };
        steps
            .into_iter()
            .map(|step| schedule.learning_rate(step))
            .collect()
    }

    #[test]
    fn linear_matches_transformers() {
        // From `get_linear_schedule_with_warmup(2, 200)`.
        let expected = [0.0, 0.0005, 0.001, 0.000994949494949495, 0.00098989898989899];
        assert_eq!(rates(Decay::Linear, 0..5), expected);
        assert_eq!(rates(Decay::Linear, [200, 300]), [0.0, 0.0]);
    }

    #[test]
    fn cosine_is_half_way_down_in_the_middle_and_stays_at_zero() {
        let rates = rates(Decay::Cosine, [2, 101, 200, 400]);
        assert_eq!(rates[0], 1e-3);
        assert!((rates[1] - 5e-4).abs() < 1e-15);
        assert_eq!(&rates[2..], [0.0, 0.0]);
    }

    #[test]
    fn constant_falls_only_at_the_end() {
        assert_eq!(
            rates(Decay::Constant { decay_steps: 10 }, [1, 2, 190, 195, 200]),
            [5e-4, 1e-3, 1e-3, 5e-4, 0.0]
        );
        assert_eq!(rates(Decay::Constant { decay_steps: 0 }, [2, 1000]), [1e-3, 1e-3]);
    }
}
