//! Which layers hidden states of unknown origin are, by comparing them with the verifier's own.
//!
//! Files of other programs do not say which layers they hold, and the two conventions of layer ids differ by one: a draft
//! trained on neighbouring layers looks as usual and is accepted less often. So each stored state is compared with the
//! residual stream at every layer, and after the final norm; the nearest one tells what it is.

use std::fmt;

use super::HiddenFileError;
use crate::device::Device;
use crate::row::{HiddenStates, PackedRow, Sample};
use crate::verifier::{Alone, Verifier, VerifierError};

/// Largest relative distance between a state and the same one computed elsewhere: bf16 arithmetic through all layers stays
/// well below it, another model or another text far above.
const SAME: f64 = 0.25;

/// A point of a verifier at which states can be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tap {
    /// What enters this layer; the number of layers stands for what leaves the last one.
    Residual(u32),
    /// What leaves the last layer, after the final norm.
    Normed,
}

impl fmt::Display for Tap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Residual(layer) => write!(f, "{layer}"),
            Self::Normed => f.write_str("final norm"),
        }
    }
}

/// Why stored states cannot be trained on with this verifier.
#[derive(Debug, thiserror::Error)]
pub enum Unrecognised {
    /// They are states of this verifier, taken elsewhere.
    #[error(
        "the stored states are those that enter layers [{}] where [{}] are needed; {}",
        list(found),
        list(expected),
        advice(found, expected)
    )]
    Elsewhere {
        /// Where they were taken.
        found: Vec<Tap>,
        /// Where they should have been.
        expected: Vec<Tap>,
    },
    /// They are nowhere near any state of this verifier.
    #[error(
        "the stored states are not of this verifier: state {state} of the first sample is {distance:.2} away from the nearest \
         layer, where {SAME} is explained by rounding; extract them again"
    )]
    Stranger {
        /// Which state of a token.
        state: usize,
        /// Relative distance to the nearest one.
        distance: f64,
    },
    /// The verifier cannot compute the sample.
    #[error(transparent)]
    Verifier(#[from] VerifierError),
    /// The states cannot be read.
    #[error(transparent)]
    File(#[from] HiddenFileError),
}

fn list(taps: &[Tap]) -> String {
    taps.iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ")
}

/// What to do about states that were taken elsewhere.
fn advice(found: &[Tap], expected: &[Tap]) -> String {
    let (Some((last, aux)), Some((wanted_last, wanted))) = (found.split_last(), expected.split_last()) else {
        return "extract them again".to_owned();
    };
    if last == wanted_last {
        return format!("set verifier.aux_layers = [{}] or extract them again", list(aux));
    }
    if aux == wanted {
        return "the last state must be taken before the final norm: extract them again".to_owned();
    }
    "extract them again".to_owned()
}

/// Checks that the states of a sample, `[tokens, states, H]`, are what `verifier` captures.
///
/// # Errors
/// When they were taken at other layers, are not of this verifier, or the verifier cannot compute the sample.
pub fn recognise<D: Device>(
    verifier: &mut Verifier<D>,
    tokens: &[u32],
    states: &HiddenStates,
) -> Result<(), Unrecognised> {
    let mut row = PackedRow::default();
    row.push(&Sample {
        tokens: tokens.to_vec(),
        loss_mask: vec![0; tokens.len()],
    });
    let mut taps: Vec<(Tap, Vec<f32>)> = verifier
        .residuals(&row, &mut Alone)?
        .into_iter()
        .enumerate()
        .map(|(layer, values)| (Tap::Residual(layer as u32), values))
        .collect();
    let (normed, _) = verifier.logits(&row, &mut Alone)?;
    taps.push((Tap::Normed, normed));
    let last = verifier.config().layers as u32;
    let expected: Vec<Tap> = verifier
        .aux_layers()
        .iter()
        .copied()
        .chain([last])
        .map(Tap::Residual)
        .collect();
    let mut found = Vec::new();
    for state in 0..states.states {
        let stored = values(states, state);
        let distances = taps
            .iter()
            .map(|(tap, values)| (*tap, distance(&stored, values, states.hidden)));
        let nearest = distances.min_by(|a, b| a.1.total_cmp(&b.1));
        match nearest {
            Some((tap, distance)) if distance <= SAME => found.push(tap),
            nearest => {
                return Err(Unrecognised::Stranger {
                    state,
                    distance: nearest.map_or(f64::INFINITY, |(_, distance)| distance),
                });
            }
        }
    }
    if found == expected {
        return Ok(());
    }
    Err(Unrecognised::Elsewhere { found, expected })
}

/// One state of all tokens, `[tokens, H]`.
fn values(states: &HiddenStates, state: usize) -> Vec<f32> {
    let mut values = vec![0.0; states.tokens() * states.hidden];
    for (token, values) in values.chunks_exact_mut(states.hidden.max(1)).enumerate() {
        states.read(token, state, values);
    }
    values
}

/// Length of the difference over the length of `b`, per token of `hidden` values; the median over the tokens, because the
/// first token of many models is a hundred times as long as the others and its rounding would drown them.
fn distance(a: &[f32], b: &[f32], hidden: usize) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let tokens = a.chunks_exact(hidden.max(1)).zip(b.chunks_exact(hidden.max(1)));
    let mut distances: Vec<f64> = tokens
        .map(|(a, b)| {
            let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
            let length: f64 = b.iter().copied().map(square).sum();
            (difference / length.max(f64::MIN_POSITIVE)).sqrt()
        })
        .collect();
    distances.sort_by(f64::total_cmp);
    distances
        .get(distances.len() / 2)
        .copied()
        .unwrap_or(f64::INFINITY)
}
