//! The layers whose states a draft reads, in both conventions.
//!
//! vLLM and speculators name the layer whose *input* is taken, and so does `cluster.toml`; SGLang, SpecForge, TorchSpec and
//! Model-Optimizer name the layer whose *output* is taken, which is one less. A list in the wrong convention trains well
//! and is accepted one per cent of the time, so lists that look like the other one are doubted here.

use std::fmt;

use serde::Serialize;

/// The captured layers of a verifier.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct CapturedLayers {
    /// Layers whose input is captured: vLLM, speculators, `cluster.toml`.
    pub input_of: Vec<u32>,
    /// The same states as layers whose output is captured: SGLang, SpecForge.
    pub output_of: Vec<u32>,
    /// The id of the last state, before the final norm, in vLLM's convention: the number of layers. It is always captured.
    pub last: u32,
    /// Whether they are those that vLLM takes unless told otherwise.
    pub is_default: bool,
}

impl CapturedLayers {
    /// The layers with some ids, of a verifier with `layers` layers, whose defaults are `default`.
    pub fn new(ids: &[u32], layers: u32, default: &[u32]) -> Self {
        Self {
            input_of: ids.to_vec(),
            output_of: ids.iter().map(|id| id.saturating_sub(1)).collect(),
            last: layers,
            is_default: ids == default,
        }
    }

    /// What is doubtful about a list of ids that somebody wrote.
    pub fn doubts(ids: &[u32], layers: u32, default: &[u32]) -> Vec<LayerDoubt> {
        let by_output: Vec<u32> = default.iter().map(|id| id.saturating_sub(1)).collect();
        let mut doubts = Vec::new();
        let (head, last) = match ids.split_last() {
            Some((&last, head)) if last == layers || (last + 1 == layers && head.len() == default.len()) => {
                (head, Some(last))
            }
            _ => (ids, None),
        };
        if head == by_output && head != default {
            doubts.push(LayerDoubt::OtherConvention {
                ids: ids.to_vec(),
                meant: default.to_vec(),
            });
        }
        if let Some(last) = last {
            doubts.push(LayerDoubt::WithLast {
                ids: ids.to_vec(),
                last,
                without: if head == by_output { default } else { head }.to_vec(),
            });
        } else if ids.len() != default.len() && !ids.is_empty() {
            doubts.push(LayerDoubt::Count { count: ids.len() });
        }
        doubts
    }
}

/// Why a list of layers may not be what was meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerDoubt {
    /// They are the default layers in the other convention.
    OtherConvention {
        /// The list.
        ids: Vec<u32>,
        /// What was most likely meant, in this convention.
        meant: Vec<u32>,
    },
    /// The last state is among them.
    WithLast {
        /// The list.
        ids: Vec<u32>,
        /// Its last entry.
        last: u32,
        /// The list without it.
        without: Vec<u32>,
    },
    /// There are more or fewer than three.
    Count {
        /// How many.
        count: usize,
    },
}

impl fmt::Display for LayerDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherConvention { ids, meant } => write!(
                f,
                "verifier.aux_layers = {ids:?} are the default layers as SGLang and SpecForge count them, by the layer whose \
                 output is taken; here an id names the layer whose input is taken, as in vLLM: write {meant:?}, or drop the \
                 key, for the same states"
            ),
            Self::WithLast { ids, last, without } => write!(
                f,
                "verifier.aux_layers = {ids:?} ends with {last}, the verifier's last state, which is always captured as \
                 the target; write {without:?}, or the draft reads one state more than is served by default"
            ),
            Self::Count { count } => write!(
                f,
                "verifier.aux_layers names {count} layers; SGLang serves drafts of three only, and vLLM does by default"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Kimi-K2.5 has 61 layers.
    const KIMI: (u32, [u32; 3]) = (61, [2, 30, 58]);

    fn doubts(ids: &[u32]) -> Vec<LayerDoubt> {
        CapturedLayers::doubts(ids, KIMI.0, &KIMI.1)
    }

    #[test]
    fn both_conventions_name_the_same_states() {
        let layers = CapturedLayers::new(&[2, 30, 58], KIMI.0, &KIMI.1);
        assert_eq!(layers.output_of, [1, 29, 57]);
        assert_eq!((layers.last, layers.is_default), (61, true));
        assert!(!CapturedLayers::new(&[3, 30, 58], KIMI.0, &KIMI.1).is_default);
    }

    #[test]
    fn lists_that_were_meant_are_not_doubted() {
        for ids in [[2, 30, 58], [3, 30, 58], [1, 30, 57], [5, 20, 60]] {
            assert_eq!(doubts(&ids), [], "{ids:?}");
        }
        // In a small model 2 less 1 and so on may be somebody's choice, but not all of the defaults less one.
        assert_eq!(CapturedLayers::doubts(&[1, 4, 5], 8, &[2, 4, 5]), []);
    }

    #[test]
    fn the_defaults_of_the_other_convention_are_recognised() {
        let found = doubts(&[1, 29, 57]);
        let [LayerDoubt::OtherConvention { meant, .. }] = found.as_slice() else {
            panic!("{found:?}")
        };
        assert_eq!(*meant, [2, 30, 58]);
        let text = found[0].to_string();
        assert!(
            text.contains("[1, 29, 57]") && text.contains("write [2, 30, 58]"),
            "{text}"
        );
    }

    #[test]
    fn a_list_that_includes_the_last_state_is_recognised() {
        // As vLLM is launched, as the first data generation wrote it, and in the other convention.
        for (ids, without) in [
            ([2, 30, 58, 61], [2, 30, 58]),
            ([2, 30, 58, 60], [2, 30, 58]),
            ([1, 29, 57, 60], [2, 30, 58]),
        ] {
            let found = doubts(&ids);
            let is_it = |doubt: &LayerDoubt| matches!(doubt, LayerDoubt::WithLast { without: rest, .. } if *rest == without);
            assert!(found.iter().any(is_it), "{ids:?}: {found:?}");
        }
        assert_eq!(doubts(&[1, 29, 57, 60]).len(), 2);
        assert_eq!(doubts(&[2, 58]), [LayerDoubt::Count { count: 2 }]);
    }
}
