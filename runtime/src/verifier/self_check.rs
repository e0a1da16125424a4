//! Whether a verifier's hidden states are what a draft takes them for, before anything is trained on them.
//!
//! The worst mistakes of this field train without complaint: a final norm that is forgotten or scaled otherwise, a layer
//! that is captured one too late, a head that is another one, tokens that are shifted by one. Each of them shows in a
//! few tokens: what a draft makes of the captured state, by the parts that it reads itself, must be the verifier's own
//! logits.

use super::VerifierError;
use super::extract::Verifier;
use super::shard::Peers;
use crate::contract::HiddenDtype;
use crate::device::{Device, Products};
use crate::row::{HiddenStates, PackedRow, Sample};

/// Tokens of the two documents that are looked at.
const DOCUMENTS: [usize; 2] = [9, 6];
/// Logits of each token that are compared, spread over the vocabulary, besides the largest one.
const COMPARED: usize = 256;

/// What the check has found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SelfCheck {
    /// Tokens that were looked at.
    pub tokens: usize,
    /// Logits that were compared; 0 on a shard without the head.
    pub logits: usize,
    /// Largest difference over the largest logit.
    pub difference: f32,
    /// What is tolerated.
    pub tolerance: f32,
}

/// Largest difference that rounding explains, of the last state to a dtype and of what the head's product takes, over the
/// largest logit. A forgotten norm or another head differs by about 1.
fn tolerance(dtype: HiddenDtype, products: Products) -> f32 {
    match (dtype, products) {
        (HiddenDtype::F32, Products::F32) => 1e-4,
        _ => 0.03,
    }
}

impl<D: Device> Verifier<D> {
    /// Compares a few hidden states, rounded to `dtype`, with the verifier's own logits, by the way a draft takes.
    ///
    /// # Errors
    /// [`VerifierError::SelfCheck`] if they disagree; as [`Verifier::extract`] otherwise.
    pub fn self_check(
        &mut self,
        dtype: HiddenDtype,
        peers: &mut impl Peers,
    ) -> Result<SelfCheck, VerifierError> {
        if let Some(cap) = self.config().logit_softcap {
            let what = format!("its logits are bent below {cap}, which a draft's head does not do");
            return Err(VerifierError::SelfCheck { what });
        }
        let row = self.probe(None);
        let states = self.extract(&row, dtype, peers)?;
        let moved = self.extract(&self.probe(Some(DOCUMENTS[0] - 1)), dtype, peers)?;
        let (_, logits) = self.logits(&row, peers)?;
        let own = self.captured().len();
        if states.states != own || own > 0 && states.tokens() != row.len() {
            let what = format!(
                "{} tokens with {} states each were captured where {} tokens with {own} were asked for",
                states.tokens(),
                states.states,
                row.len()
            );
            return Err(VerifierError::SelfCheck { what });
        }
        self.check_alignment(&states, &moved)?;
        let mut found = SelfCheck {
            tokens: row.len(),
            logits: 0,
            difference: 0.0,
            tolerance: tolerance(dtype, self.device.products()),
        };
        if self.shard().is_last() {
            self.check_logits(&states, &logits, &mut found)?;
        }
        Ok(found)
    }

    /// A row of token ids from all over the vocabulary; one of them can be another one.
    fn probe(&self, changed: Option<usize>) -> PackedRow {
        let vocab = self.vocab_size();
        let mut row = PackedRow::default();
        let mut index = 0;
        for length in DOCUMENTS {
            let tokens = (0..length).map(|_| {
                let shift = usize::from(changed == Some(index));
                index += 1;
                ((index * 7919 + shift * 31) % vocab) as u32
            });
            let tokens: Vec<u32> = tokens.collect();
            row.push(&Sample {
                loss_mask: vec![1; tokens.len()],
                tokens,
            });
        }
        row
    }

    /// The last token of the first document was changed between the two: its states must differ, and no others.
    fn check_alignment(&self, states: &HiddenStates, moved: &HiddenStates) -> Result<(), VerifierError> {
        let bytes = states.bytes.len() / states.tokens().max(1);
        let parts = states
            .bytes
            .chunks(bytes.max(1))
            .zip(moved.bytes.chunks(bytes.max(1)));
        for (token, (before, after)) in parts.enumerate() {
            let expected = token == DOCUMENTS[0] - 1;
            if (before != after) != expected && bytes > 0 {
                let what = format!(
                    "the states of token {token} {} when token {} changes",
                    if expected { "stay the same" } else { "change" },
                    DOCUMENTS[0] - 1
                );
                return Err(VerifierError::SelfCheck { what });
            }
        }
        Ok(())
    }

    /// `head(norm(last state))`, by the parts that a draft reads, against the verifier's own logits.
    fn check_logits(
        &self,
        states: &HiddenStates,
        logits: &[f32],
        found: &mut SelfCheck,
    ) -> Result<(), VerifierError> {
        let (vocab, hidden) = (self.vocab_size(), self.hidden_size());
        let mut ids: Vec<u32> = (0..COMPARED.min(vocab))
            .map(|i| (i * vocab / COMPARED.min(vocab)) as u32)
            .collect();
        for logits in logits.chunks_exact(vocab) {
            ids.push(largest(logits) as u32);
        }
        ids.sort_unstable();
        ids.dedup();
        let (head_rows, final_norm) = (self.head_rows(&ids)?, self.final_norm()?);
        let largest_logit = logits
            .iter()
            .fold(0f32, |largest, logit| largest.max(logit.abs()));
        let mut state = vec![0.0; hidden];
        for (token, logits) in logits.chunks_exact(vocab).enumerate() {
            states.read(token, states.states - 1, &mut state);
            let mean = state.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / hidden as f64;
            let scale = (mean + f64::from(self.config().rms_norm_eps)).sqrt().recip();
            for (&id, head) in ids.iter().zip(head_rows.chunks_exact(hidden)) {
                let terms = state.iter().zip(&final_norm).zip(head);
                let logit: f64 = terms
                    .map(|((x, w), h)| f64::from(*x) * scale * f64::from(*w) * f64::from(*h))
                    .sum();
                let difference = (logit as f32 - logits[id as usize]).abs() / largest_logit;
                // NaN must not be lost.
                if difference.is_nan() || difference > found.difference {
                    found.difference = difference;
                }
            }
            found.logits += ids.len();
            if found.difference.is_nan() || found.difference > found.tolerance {
                let what = format!(
                    "what a draft makes of the hidden state of token {token} differs from the verifier's own logits by {:.3} \
                     of the largest one, where {} is rounding",
                    found.difference, found.tolerance
                );
                return Err(VerifierError::SelfCheck { what });
            }
        }
        Ok(())
    }
}

fn largest(values: &[f32]) -> usize {
    let by_value = |a: &(usize, &f32), b: &(usize, &f32)| a.1.total_cmp(b.1);
    values
        .iter()
        .enumerate()
        .max_by(by_value)
        .map_or(0, |(index, _)| index)
}
