//! Rotary position embedding: which angles, not how they are applied.
//!
//! Which dimension turns with which is the table's matter; see [`RotaryTable`](crate::device::RotaryTable).

use serde::{Deserialize, Serialize};

/// How the base frequencies are scaled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by `factor`.
    Linear {
        /// How much longer positions may become.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Ramp's end on the low side, in turns over the original context.
        low_freq_factor: f64,
        /// Ramp's end on the high side, in turns over the original context.
        high_freq_factor: f64,
        /// Context length of the pre-trained model, in tokens.
        original_max_position_embeddings: f64,
    },
    /// YaRN (Peng et al. 2023): low frequencies divided, high ones kept, a ramp over the dimensions between.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Turns over the original context from which on a frequency is kept.
        beta_fast: f64,
        /// Turns over the original context up to which a frequency is divided.
        beta_slow: f64,
        /// Context length of the pre-trained model, in tokens.
        original_max_position_embeddings: f64,
        /// Factor of cosines and sines; `None` is `0.1 · ln(factor) + 1`.
        attention_factor: Option<f64>,
        /// The ramp begins and ends at whole dimensions.
        truncate: bool,
    },
}

/// The growth of attention scores that YaRN makes up for: `0.1 · m · ln(factor) + 1`, 1 for factors up to 1.
pub fn yarn_magnitude(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * m * factor.ln() + 1.0
    }
}

/// The rotary embedding of a model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rope {
    /// Base of the geometric series of frequencies.
    pub theta: f64,
    /// Rotated dimensions of a head.
    pub dim: usize,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

impl Rope {
    /// An unscaled rotary embedding.
    pub fn new(theta: f64, dim: usize) -> Self {
        Self {
            theta,
            dim,
            scaling: RopeScaling::None,
        }
    }

    /// Factor of all cosines and sines.
    pub fn magnitude(&self) -> f64 {
        match self.scaling {
            RopeScaling::Yarn {
                factor,
                attention_factor,
                ..
            } => attention_factor.unwrap_or_else(|| yarn_magnitude(factor, 1.0)),
            _ => 1.0,
        }
    }

    /// Where YaRN's ramp begins and ends, in pairs: the pair that turns `turns` times over the original context.
    fn yarn_ramp(&self, beta_fast: f64, beta_slow: f64, original: f64, truncate: bool) -> (f64, f64) {
        let pair = |turns: f64| {
            self.dim as f64 * (original / (turns * std::f64::consts::TAU)).ln() / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (pair(beta_fast), pair(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(self.dim as f64 - 1.0));
        // A ramp of no width is a step.
        (low, if low == high { high + 0.001 } else { high })
    }

    /// Angle per position of each rotated pair, `[dim / 2]`.
    pub fn inverse_frequencies(&self) -> Vec<f64> {
        (0..self.dim / 2)
            .map(|i| {
                let base = self.theta.powf(-((2 * i) as f64) / self.dim as f64);
                match self.scaling {
                    RopeScaling::None => base,
                    RopeScaling::Linear { factor } => base / factor,
                    RopeScaling::Llama3 {
                        factor,
                        low_freq_factor,
                        high_freq_factor,
                        original_max_position_embeddings: original,
                    } => {
                        let turns = original * base / std::f64::consts::TAU;
                        if turns < low_freq_factor {
                            base / factor
                        } else if turns > high_freq_factor {
                            base
                        } else {
                            let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                            (1.0 - smooth) * base / factor + smooth * base
                        }
                    }
                    RopeScaling::Yarn {
                        factor,
                        beta_fast,
                        beta_slow,
                        original_max_position_embeddings: original,
                        truncate,
                        ..
                    } => {
                        let (low, high) = self.yarn_ramp(beta_fast, beta_slow, original, truncate);
                        let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                        divided * base / factor + (1.0 - divided) * base
                    }
                }
            })
            .collect()
    }
}
