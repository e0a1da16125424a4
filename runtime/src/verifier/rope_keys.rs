//! The rotary embedding in a verifier's config.json, in either spelling.

use super::keys::Keys;
use crate::rope::{Rope, RopeScaling, yarn_magnitude};

/// Rotary base of transformers' Llama when a file has none.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// The rotary embeddings of a model.
pub(super) struct Ropes {
    /// Of layers with full attention, and of all where there is one only.
    pub(super) full: Rope,
    /// Of layers with a window.
    pub(super) sliding: Rope,
    /// YaRN's factor of the softmax's scale, for families that have it: `mscale_all_dim` in DeepSeek's files.
    pub(super) score_magnitude: f64,
}

/// Reads the rotary embeddings of heads of `head_dim`.
pub(super) fn ropes(keys: &Keys<'_>, head_dim: usize) -> Ropes {
    let section = if keys.get("rope_parameters").is_some() {
        "rope_parameters"
    } else {
        "rope_scaling"
    };
    let parameters = keys.object(section);
    if let Some(parameters) = &parameters
        && let Some(full) = parameters.object("full_attention")
    {
        let sliding = parameters.object("sliding_attention");
        return Ropes {
            score_magnitude: score_magnitude(&full),
            sliding: sliding.map_or_else(
                || rope(keys, None, head_dim),
                |own| rope(keys, Some(&own), head_dim),
            ),
            full: rope(keys, Some(&full), head_dim),
        };
    }
    let full = rope(keys, parameters.as_ref(), head_dim);
    let sliding = match keys.positive("rope_local_base_freq") {
        Some(theta) => Rope::new(theta, full.dim),
        None => full.clone(),
    };
    Ropes {
        score_magnitude: parameters.as_ref().map_or(1.0, score_magnitude),
        full,
        sliding,
    }
}

fn rope(keys: &Keys<'_>, parameters: Option<&Keys<'_>>, head_dim: usize) -> Rope {
    let either = |key: &str| {
        parameters
            .and_then(|parameters| parameters.positive(key))
            .or_else(|| keys.positive(key))
    };
    let part = either("partial_rotary_factor").unwrap_or(1.0);
    if part > 1.0 {
        keys.inconsistent("partial_rotary_factor", format!("is {part}; it is at most 1"));
    }
    Rope {
        theta: either("rope_theta").unwrap_or(DEFAULT_ROPE_THETA),
        dim: (head_dim as f64 * part.min(1.0)) as usize,
        scaling: parameters.map_or(RopeScaling::None, |parameters| scaling(keys, parameters)),
    }
}

fn scaling(root: &Keys<'_>, keys: &Keys<'_>) -> RopeScaling {
    // transformers called the key `type` before it was `rope_type`.
    let type_key = if keys.get("rope_type").is_some() {
        "rope_type"
    } else {
        "type"
    };
    match keys.text(type_key) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear {
            factor: keys.required_positive("factor"),
        },
        Some("llama3") => RopeScaling::Llama3 {
            factor: keys.required_positive("factor"),
            low_freq_factor: keys.required_positive("low_freq_factor"),
            high_freq_factor: keys.required_positive("high_freq_factor"),
            original_max_position_embeddings: keys.required_positive("original_max_position_embeddings"),
        },
        Some("yarn") => {
            let factor = keys.required_positive("factor");
            let magnitudes = (keys.positive("mscale"), keys.positive("mscale_all_dim"));
            let attention_factor = match (keys.positive("attention_factor"), magnitudes) {
                (Some(given), _) => Some(given),
                (None, (Some(scale), Some(all))) => {
                    Some(yarn_magnitude(factor, scale) / yarn_magnitude(factor, all))
                }
                (None, _) => None,
            };
            let original = keys
                .positive("original_max_position_embeddings")
                .or_else(|| root.positive("max_position_embeddings"));
            RopeScaling::Yarn {
                factor,
                beta_fast: keys.positive("beta_fast").unwrap_or(32.0),
                beta_slow: keys.positive("beta_slow").unwrap_or(1.0),
                original_max_position_embeddings: original
                    .unwrap_or_else(|| keys.required_positive("original_max_position_embeddings")),
                attention_factor,
                truncate: keys.flag("truncate").unwrap_or(true),
            }
        }
        Some(_) => {
            keys.unsupported(type_key, "default, linear, llama3, yarn");
            RopeScaling::None
        }
    }
}

/// Square of YaRN's magnitude for all dimensions, by which DeepSeek multiplies the scores.
fn score_magnitude(keys: &Keys<'_>) -> f64 {
    match (keys.positive("factor"), keys.positive("mscale_all_dim")) {
        (Some(factor), Some(all)) => yarn_magnitude(factor, all).powi(2),
        _ => 1.0,
    }
}
