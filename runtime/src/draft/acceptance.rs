//! Acceptance as it will be served: a greedy chain against the verifier's own text.
//!
//! A document is *on-policy* where its masked tokens are the verifier's greedy continuation; there the token that the
//! verifier would choose next is the text itself, so no verifier runs. With x the raw tokens of a document, position i
//! of the shifted batch reads g_i and x_{i+1} and is an **anchor**: the verifier has just produced x_{i+1}, and the
//! draft proposes x_{i+2}, x_{i+3}, … Step j of the chain reads x_{i+1+j} and proposes a token for the raw place
//! i+2+j. As long as every earlier proposal was accepted, feeding the text is feeding the draft's own tokens. With `a`
//! accepted proposals the verifier itself adds x_{i+2+a}, so the next anchor is i+1+a. A chain stops where the masked
//! span or the document stops: past it the text is not the verifier's.

use std::ops::Range;

/// Sums of greedy verification; they add over rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    /// Chains that had at least one token to propose.
    pub verifications: u64,
    /// Proposals accepted in them.
    pub accepted: u64,
    /// Accepted proposals per place in the chain, `[ttt_steps]`.
    pub accepted_at: Vec<u64>,
    /// Chains that reached each place with all earlier proposals accepted, `[ttt_steps]`.
    pub tried_at: Vec<u64>,
}

impl Acceptance {
    /// Nothing verified yet, for chains of `ttt_steps` proposals.
    pub fn new(ttt_steps: usize) -> Self {
        Self {
            accepted_at: vec![0; ttt_steps],
            tried_at: vec![0; ttt_steps],
            ..Self::default()
        }
    }

    /// Tokens a verification yields on average: the accepted ones and the verifier's own. NaN before any.
    pub fn mean_length(&self) -> f64 {
        1.0 + self.accepted as f64 / self.verifications as f64
    }

    /// Adds another row's sums.
    pub fn merge(&mut self, other: &Self) {
        self.verifications += other.verifications;
        self.accepted += other.accepted;
        for (mine, theirs) in [
            (&mut self.accepted_at, &other.accepted_at),
            (&mut self.tried_at, &other.tried_at),
        ] {
            mine.resize(mine.len().max(theirs.len()), 0);
            mine.iter_mut()
                .zip(theirs)
                .for_each(|(mine, theirs)| *mine += theirs);
        }
    }

    /// Walks one document of a shifted batch; `proposal(step, position)` is a target token id.
    ///
    /// `tokens` and `loss_mask` are the batch's, indexed by position: the raw token at i+1 is `tokens[i]`.
    pub(super) fn walk(
        &mut self,
        document: Range<usize>,
        tokens: &[u32],
        loss_mask: &[u8],
        proposal: impl Fn(usize, usize) -> u32,
    ) {
        let ttt_steps = self.tried_at.len();
        let mut anchor = document.start;
        while anchor < document.end {
            if loss_mask[anchor] == 0 {
                anchor += 1;
                continue;
            }
            let mut accepted = 0;
            while accepted < ttt_steps {
                // The raw place anchor+2+accepted is `tokens[anchor + 1 + accepted]`.
                let wanted = anchor + 1 + accepted;
                if wanted >= document.end || loss_mask[wanted] == 0 {
                    break;
                }
                self.verifications += u64::from(accepted == 0);
                self.tried_at[accepted] += 1;
                if proposal(accepted, anchor) != tokens[wanted] {
                    break;
                }
                self.accepted_at[accepted] += 1;
                accepted += 1;
            }
            self.accepted += accepted as u64;
            anchor += accepted + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_made_text_is_walked_chain_by_chain() {
        // Raw text: a prompt token 9, then the answer 1 2 3 4 5 6 7; shifted, position i reads token i+1.
        let tokens = [1, 2, 3, 4, 5, 6, 7];
        let mask = [1; 7];
        // Anchor 0 has just seen 1. Its chain proposes 2, 3 right and 9 wrong: two accepted, the verifier adds 4.
        // Anchor 3 has just seen 4 and proposes 8, wrong at once: the verifier adds 5.
        // Anchor 4 has just seen 5 and proposes 6, 7 right; the text ends: anchor 7 is past the end.
        let table = |step: usize, anchor: usize| match (anchor, step) {
            (0, 0) => 2,
            (0, 1) => 3,
            (0, 2) => 9,
            (3, 0) => 8,
            (4, 0) => 6,
            (4, 1) => 7,
            other => panic!("{other:?} is never asked"),
        };
        let mut acceptance = Acceptance::new(3);
        acceptance.walk(0..7, &tokens, &mask, table);
        let expected = Acceptance {
            verifications: 3,
            accepted: 4,
            accepted_at: vec![2, 2, 0],
            tried_at: vec![3, 2, 1],
        };
        assert_eq!(acceptance, expected);
        assert!((acceptance.mean_length() - (1.0 + 4.0 / 3.0)).abs() < 1e-12);
    }

    #[test]
    fn chains_stay_inside_masked_spans_and_documents() {
        // Two documents; in the first the answer is interrupted by an unmasked turn.
        let tokens = [1, 2, 3, 4, 5, 6, 7, 8];
        let mask = [0, 1, 1, 0, 1, 1, 1, 1];
        let perfect = |step: usize, anchor: usize| tokens[anchor + 1 + step];
        let mut acceptance = Acceptance::new(4);
        acceptance.walk(0..6, &tokens, &mask, perfect);
        acceptance.walk(6..8, &tokens, &mask, perfect);
        // Spans (1, 2), (4, 5) and (6, 7): one proposal each; the last token of a span has nothing to propose.
        let expected = Acceptance {
            verifications: 3,
            accepted: 3,
            accepted_at: vec![3, 0, 0, 0],
            tried_at: vec![3, 0, 0, 0],
        };
        assert_eq!(acceptance, expected);
        let mut sum = Acceptance::default();
        sum.merge(&acceptance);
        sum.merge(&acceptance);
        assert_eq!((sum.verifications, sum.accepted_at[0]), (6, 6));
    }
}
