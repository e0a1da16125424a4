//! A configuration with the places of its values, right or wrong.

use super::layers::Layers;
use super::problem::{Place, Problem};
use super::{ClusterConfig, ConfigError};

/// What was read of a cluster file and all that overrides it.
pub struct Survey {
    /// The configuration. Values that could not be read have their defaults, so it is for looking, not for launching,
    /// while [`Self::problems`] holds anything.
    pub config: ClusterConfig,
    /// Everything that is wrong with it, file first and in its order.
    pub problems: Vec<Problem>,
    layers: Layers,
}

impl Survey {
    pub(super) fn new(config: ClusterConfig, mut layers: Layers) -> Self {
        let problems = std::mem::take(&mut layers.problems);
        let problems = ConfigError::from_problems(problems).map_or_else(Vec::new, |error| error.problems);
        Self {
            config,
            problems,
            layers,
        }
    }

    /// The place of a key such as `samples.files[1]`: where it was written, or where the section or file begins that it
    /// could be written in.
    pub fn place(&self, key: &str) -> Place {
        self.layers.place(key)
    }

    /// Whether somebody has written this key.
    pub fn is_set(&self, key: &str) -> bool {
        self.layers.is_set(key)
    }

    /// Whether the value of a key, or of anything under a section, was left out because it could not be used.
    pub fn is_rejected(&self, key: &str) -> bool {
        self.layers.is_rejected(key) || self.layers.has_rejected_under(key)
    }
}
