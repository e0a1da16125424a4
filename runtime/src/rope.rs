//! Rotary position embedding: which angles, not how they are applied.
//!
//! The half-rotation kind: dimension `i` turns with dimension `i + head_dim / 2`.

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
                }
            })
            .collect()
    }
}
