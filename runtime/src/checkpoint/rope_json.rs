//! The rotary embedding in a `config.json`: `rope_parameters`, and the older `rope_theta` with `rope_scaling`.

use serde_json::{Map, Value, json};

use super::config_json::{ConfigError, Section};
use crate::rope::{Rope, RopeScaling};

/// `rope_parameters` of a rotary embedding, in the spelling of transformers 5.
pub(super) fn to_json(rope: &Rope) -> Value {
    let mut map = Map::new();
    let mut set = |key: &str, value: Value| map.insert(key.to_owned(), value);
    let kind = match rope.scaling {
        RopeScaling::None => "default",
        RopeScaling::Linear { factor } => {
            set("factor", json!(factor));
            "linear"
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            set("factor", json!(factor));
            set("high_freq_factor", json!(high_freq_factor));
            set("low_freq_factor", json!(low_freq_factor));
            set(
                "original_max_position_embeddings",
                whole(original_max_position_embeddings),
            );
            "llama3"
        }
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings,
            attention_factor,
            truncate,
        } => {
            set("factor", json!(factor));
            set("beta_fast", json!(beta_fast));
            set("beta_slow", json!(beta_slow));
            set(
                "original_max_position_embeddings",
                whole(original_max_position_embeddings),
            );
            if let Some(attention_factor) = attention_factor {
                set("attention_factor", json!(attention_factor));
            }
            if !truncate {
                set("truncate", json!(false));
            }
            "yarn"
        }
    };
    set("rope_theta", json!(rope.theta));
    set("rope_type", json!(kind));
    Value::Object(map)
}

/// A number of tokens: transformers wants it without a decimal point.
fn whole(tokens: f64) -> Value {
    if tokens.fract() == 0.0 && (0.0..9e15).contains(&tokens) {
        json!(tokens as u64)
    } else {
        json!(tokens)
    }
}

/// The rotary embedding of a layer's section, turning all `head_dim` dimensions of a head.
pub(super) fn from_json(layer: &Section<'_>, head_dim: usize) -> Result<Rope, ConfigError> {
    if let Some(rope) = layer.optional_section("rope_parameters")? {
        let theta = positive(&rope, "rope_theta")?;
        return Ok(Rope {
            theta,
            dim: head_dim,
            scaling: scaling(&rope)?,
        });
    }
    let Some(theta) = layer.optional_f64("rope_theta")? else {
        return Err(layer.error("rope_parameters", "is missing; it holds rope_type and rope_theta"));
    };
    let scaling = match layer.optional_section("rope_scaling")? {
        Some(rope) => scaling(&rope)?,
        None => RopeScaling::None,
    };
    Ok(Rope {
        theta,
        dim: head_dim,
        scaling,
    })
}

fn scaling(rope: &Section<'_>) -> Result<RopeScaling, ConfigError> {
    if rope
        .optional_f64("partial_rotary_factor")?
        .is_some_and(|factor| factor != 1.0)
    {
        return Err(rope.error("partial_rotary_factor", "is not 1: drafts rotate whole heads"));
    }
    let key = if rope.has("rope_type") {
        "rope_type"
    } else {
        "type"
    };
    match rope.optional_str(key)?.unwrap_or("default") {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear {
            factor: positive(rope, "factor")?,
        }),
        "llama3" => Ok(RopeScaling::Llama3 {
            factor: positive(rope, "factor")?,
            low_freq_factor: positive(rope, "low_freq_factor")?,
            high_freq_factor: positive(rope, "high_freq_factor")?,
            original_max_position_embeddings: positive(rope, "original_max_position_embeddings")?,
        }),
        "yarn" => Ok(RopeScaling::Yarn {
            factor: positive(rope, "factor")?,
            beta_fast: rope.optional_f64("beta_fast")?.unwrap_or(32.0),
            beta_slow: rope.optional_f64("beta_slow")?.unwrap_or(1.0),
            original_max_position_embeddings: positive(rope, "original_max_position_embeddings")?,
            attention_factor: rope.optional_f64("attention_factor")?,
            truncate: rope.optional_bool("truncate")?.unwrap_or(true),
        }),
        other => Err(rope.error(
            key,
            format!("is `{other}`; drafts have default, linear, llama3 or yarn"),
        )),
    }
}

fn positive(section: &Section<'_>, key: &str) -> Result<f64, ConfigError> {
    let value = section.f64(key)?;
    if value > 0.0 {
        Ok(value)
    } else {
        Err(section.error(key, format!("is {value}; it must be above 0")))
    }
}
