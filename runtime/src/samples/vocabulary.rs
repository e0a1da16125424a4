//! The draft's vocabulary: the tokens that answers use most.
//!
//! A draft scores `Vd` of the verifier's `V` tokens. Two tensors say which: `d2t`, i64 `[Vd]`, the *offset* from a draft id to
//! its token id, and `t2d`, bool `[V]`, whether a token has a draft id. Formula and layout: speculators 0.9,
//! `train/vocab_mapping.py`.
//!
//! Invariants of a [`DraftVocabulary`], checked when it is made and when it is loaded: ids ascend strictly and lie below `V`;
//! `d2t[i] = ids[i] - i`, hence it never falls; `t2d` is true exactly at the ids, `Vd` times.

use std::cmp::Reverse;

use crate::row::Sample;

/// How often each token is trained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// By token id; ids beyond the end were never seen.
    counts: Vec<u64>,
    total: u64,
}

impl TokenCounts {
    /// Nothing counted.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts the trained tokens of a sample, those whose mask is 1.
    pub fn add(&mut self, sample: &Sample) {
        for (&token, _) in sample
            .tokens
            .iter()
            .zip(&sample.loss_mask)
            .filter(|&(_, &bit)| bit == 1)
        {
            self.add_token(token, 1);
        }
    }

    /// Counts a token `count` times.
    pub fn add_token(&mut self, token: u32, count: u64) {
        let index = token as usize;
        if index >= self.counts.len() {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += count;
        self.total += count;
    }

    /// Adds what another has counted; the order of merging does not matter.
    pub fn merge(&mut self, other: &Self) {
        for (token, count) in other.iter() {
            self.add_token(token, count);
        }
    }

    /// How often a token was counted.
    pub fn get(&self, token: u32) -> u64 {
        self.counts.get(token as usize).copied().unwrap_or(0)
    }

    /// All tokens counted together.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// How many different tokens were counted.
    pub fn distinct(&self) -> usize {
        self.iter().count()
    }

    /// Tokens that were counted with their counts, ids ascending.
    pub fn iter(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        (0..)
            .zip(&self.counts)
            .filter(|&(_, &count)| count > 0)
            .map(|(token, &count)| (token, count))
    }
}

/// Why a draft vocabulary cannot be made or loaded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum VocabularyError {
    /// The draft's vocabulary has no size, or more than the verifier's.
    #[error(
        "a draft vocabulary of {draft} tokens does not fit a verifier vocabulary of {verifier}; \
         choose from 1 to {verifier}"
    )]
    Size {
        /// Tokens of the draft.
        draft: usize,
        /// Tokens of the verifier.
        verifier: usize,
    },
    /// A counted token is unknown to the verifier.
    #[error(
        "token {token} was counted, but the verifier's vocabulary has {verifier} tokens; \
         the samples were made with another tokenizer"
    )]
    Counted {
        /// The token.
        token: u32,
        /// Tokens of the verifier.
        verifier: usize,
    },
    /// `d2t` leads out of the verifier's vocabulary.
    #[error(
        "d2t[{index}] leads to token {token}, outside the verifier's vocabulary of {verifier}; the draft is corrupt"
    )]
    Outside {
        /// Place in `d2t`.
        index: usize,
        /// The token it leads to.
        token: i128,
        /// Tokens of the verifier.
        verifier: usize,
    },
    /// The ids of `d2t` do not ascend.
    #[error(
        "d2t[{index}] leads to token {token}, which does not come after the one before it; \
         d2t must hold offsets (token id - draft id), not token ids"
    )]
    NotAscending {
        /// Place in `d2t`.
        index: usize,
        /// The token it leads to.
        token: u32,
    },
    /// The two tensors name different tokens.
    #[error("d2t and t2d disagree about token {token}; they are not of the same draft")]
    Disagree {
        /// The first such token.
        token: usize,
    },
}

/// The tokens that a draft can propose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftVocabulary {
    ids: Vec<u32>,
    verifier_vocab_size: usize,
}

impl DraftVocabulary {
    /// The `draft_vocab_size` most trained tokens; equal counts go to the lower id, unused places to the lowest unused ids.
    ///
    /// # Errors
    /// If the sizes do not fit or a counted token is not of this vocabulary.
    pub fn from_counts(
        counts: &TokenCounts,
        draft_vocab_size: usize,
        verifier_vocab_size: usize,
    ) -> Result<Self, VocabularyError> {
        check_size(draft_vocab_size, verifier_vocab_size)?;
        let mut ranked: Vec<(u32, u64)> = counts.iter().collect();
        if let Some(&(token, _)) = ranked
            .iter()
            .find(|(token, _)| *token as usize >= verifier_vocab_size)
        {
            return Err(VocabularyError::Counted {
                token,
                verifier: verifier_vocab_size,
            });
        }
        ranked.sort_unstable_by_key(|&(token, count)| (Reverse(count), token));
        ranked.truncate(draft_vocab_size);
        let mut taken = vec![false; verifier_vocab_size];
        for &(token, _) in &ranked {
            taken[token as usize] = true;
        }
        let mut missing = draft_vocab_size - ranked.len();
        for place in &mut taken {
            if missing == 0 {
                break;
            }
            if !*place {
                *place = true;
                missing -= 1;
            }
        }
        let ids = (0..)
            .zip(&taken)
            .filter(|&(_, &taken)| taken)
            .map(|(token, _)| token)
            .collect();
        Ok(Self {
            ids,
            verifier_vocab_size,
        })
    }

    /// The vocabulary of some ids of the verifier, which must ascend.
    ///
    /// # Errors
    /// If they do not ascend, or one is not of the verifier's vocabulary.
    pub fn from_ids(ids: Vec<u32>, verifier_vocab_size: usize) -> Result<Self, VocabularyError> {
        check_size(ids.len(), verifier_vocab_size)?;
        for (index, &token) in ids.iter().enumerate() {
            if token as usize >= verifier_vocab_size {
                return Err(VocabularyError::Outside {
                    index,
                    token: i128::from(token),
                    verifier: verifier_vocab_size,
                });
            }
            if index > 0 && token <= ids[index - 1] {
                return Err(VocabularyError::NotAscending { index, token });
            }
        }
        Ok(Self {
            ids,
            verifier_vocab_size,
        })
    }

    /// The vocabulary that a loaded draft's tensors describe.
    ///
    /// # Errors
    /// If they break one of the module's invariants; the first place where they do is named.
    pub fn validate(d2t: &[i64], t2d: &[bool]) -> Result<Self, VocabularyError> {
        let verifier = t2d.len();
        check_size(d2t.len(), verifier)?;
        let mut ids: Vec<u32> = Vec::with_capacity(d2t.len());
        for (index, &offset) in d2t.iter().enumerate() {
            let wide = index as i128 + i128::from(offset);
            let token = u32::try_from(wide)
                .ok()
                .filter(|&token| (token as usize) < verifier)
                .ok_or(VocabularyError::Outside {
                    index,
                    token: wide,
                    verifier,
                })?;
            if ids.last().is_some_and(|&last| token <= last) {
                return Err(VocabularyError::NotAscending { index, token });
            }
            ids.push(token);
        }
        let vocabulary = Self {
            ids,
            verifier_vocab_size: verifier,
        };
        match vocabulary
            .t2d()
            .iter()
            .zip(t2d)
            .position(|(ours, theirs)| ours != theirs)
        {
            Some(token) => Err(VocabularyError::Disagree { token }),
            None => Ok(vocabulary),
        }
    }

    /// Token id of each draft id, `[Vd]`, ascending.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Number of draft ids.
    pub fn draft_vocab_size(&self) -> usize {
        self.ids.len()
    }

    /// Number of the verifier's tokens.
    pub fn verifier_vocab_size(&self) -> usize {
        self.verifier_vocab_size
    }

    /// Offset from each draft id to its token id, `[Vd]`.
    pub fn d2t(&self) -> Vec<i64> {
        (0..)
            .zip(&self.ids)
            .map(|(index, &token)| i64::from(token) - index)
            .collect()
    }

    /// Whether each of the verifier's tokens has a draft id, `[V]`.
    pub fn t2d(&self) -> Vec<bool> {
        let mut mask = vec![false; self.verifier_vocab_size];
        for &token in &self.ids {
            mask[token as usize] = true;
        }
        mask
    }

    /// Share of the counted tokens that the draft can propose, from 0 to 1; `None` if nothing was counted.
    pub fn coverage(&self, counts: &TokenCounts) -> Option<f64> {
        let inside: u64 = self.ids.iter().map(|&token| counts.get(token)).sum();
        (counts.total() > 0).then(|| inside as f64 / counts.total() as f64)
    }
}

fn check_size(draft: usize, verifier: usize) -> Result<(), VocabularyError> {
    if draft == 0 || draft > verifier || u32::try_from(verifier).is_err() {
        return Err(VocabularyError::Size { draft, verifier });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn counts(pairs: &[(u32, u64)]) -> TokenCounts {
        let mut counts = TokenCounts::new();
        for &(token, count) in pairs {
            counts.add_token(token, count);
        }
        counts
    }

    #[test]
    fn only_trained_tokens_count() {
        let mut counted = TokenCounts::new();
        counted.add(&Sample {
            tokens: vec![5, 5, 9, 5],
            loss_mask: vec![0, 1, 1, 1],
        });
        assert_eq!(counted.iter().collect::<Vec<_>>(), [(5, 2), (9, 1)]);
        let mut merged = counts(&[(5, 1), (2, 4)]);
        merged.merge(&counted);
        assert_eq!(merged, counts(&[(2, 4), (5, 3), (9, 1)]));
        assert_eq!(
            (merged.total(), merged.distinct(), merged.get(5), merged.get(77)),
            (8, 3, 3, 0)
        );
    }

    #[test]
    fn ties_go_to_the_lower_id_and_places_left_to_the_lowest_ids() {
        let counted = counts(&[(9, 2), (4, 2), (7, 5), (11, 2)]);
        let some = DraftVocabulary::from_counts(&counted, 3, 12).expect("fits");
        assert_eq!(some.ids(), [4, 7, 9]);
        assert_eq!(some.d2t(), [4, 6, 7]);
        assert_eq!(some.coverage(&counted), Some(9.0 / 11.0));
        let filled = DraftVocabulary::from_counts(&counted, 6, 12).expect("fits");
        assert_eq!(filled.ids(), [0, 1, 4, 7, 9, 11]);
        assert_eq!(filled.coverage(&TokenCounts::new()), None);
    }

    #[test]
    fn a_draft_may_have_the_whole_vocabulary() {
        let whole = DraftVocabulary::from_counts(&counts(&[(3, 1)]), 5, 5).expect("fits");
        assert_eq!(whole.d2t(), [0; 5]);
        assert_eq!(whole.t2d(), [true; 5]);
        assert_eq!(whole.coverage(&counts(&[(3, 1)])), Some(1.0));
        assert_eq!(DraftVocabulary::validate(&[0; 5], &[true; 5]), Ok(whole));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let none = TokenCounts::new();
        for (draft, verifier) in [(0, 5), (6, 5), (0, 0)] {
            let error = DraftVocabulary::from_counts(&none, draft, verifier).expect_err("does not fit");
            assert_eq!(error, VocabularyError::Size { draft, verifier });
        }
        let error = DraftVocabulary::from_counts(&counts(&[(5, 1)]), 2, 5).expect_err("foreign token");
        assert_eq!(
            error,
            VocabularyError::Counted {
                token: 5,
                verifier: 5
            }
        );
    }

    #[test]
    fn broken_tensors_are_refused_at_their_first_fault() {
        let t2d = [false, true, false, true];
        let validate = |d2t: &[i64], t2d: &[bool]| DraftVocabulary::validate(d2t, t2d).map(|v| v.ids);
        assert_eq!(validate(&[1, 2], &t2d), Ok(vec![1, 3]));
        assert_eq!(
            validate(&[1, 3], &t2d),
            Err(VocabularyError::Outside {
                index: 1,
                token: 4,
                verifier: 4
            })
        );
        assert_eq!(
            validate(&[-1, 2], &t2d),
            Err(VocabularyError::Outside {
                index: 0,
                token: -1,
                verifier: 4
            })
        );
        assert!(matches!(
            validate(&[i64::MAX, 0], &t2d),
            Err(VocabularyError::Outside { index: 0, .. })
        ));
        assert!(matches!(
            validate(&[0, i64::MAX], &t2d),
            Err(VocabularyError::Outside { index: 1, .. })
        ));
        assert_eq!(
            validate(&[3, 0], &t2d),
            Err(VocabularyError::NotAscending { index: 1, token: 1 })
        );
        assert_eq!(
            validate(&[1, 0], &t2d),
            Err(VocabularyError::NotAscending { index: 1, token: 1 })
        );
        assert_eq!(
            validate(&[1, 1], &t2d),
            Err(VocabularyError::Disagree { token: 2 })
        );
        assert_eq!(validate(&[1], &t2d), Err(VocabularyError::Disagree { token: 3 }));
        assert_eq!(
            validate(&[], &t2d),
            Err(VocabularyError::Size {
                draft: 0,
                verifier: 4
            })
        );
    }

    proptest! {
        #[test]
        fn any_counts_give_a_vocabulary_that_validates(
            pairs in proptest::collection::vec((0_u32..60, 1_u64..5), 0..80),
            draft in 1_usize..=60,
        ) {
            let counted = counts(&pairs);
            let vocabulary = DraftVocabulary::from_counts(&counted, draft, 60).expect("fits");
            let (d2t, t2d) = (vocabulary.d2t(), vocabulary.t2d());
            prop_assert_eq!(t2d.iter().filter(|&&inside| inside).count(), draft);
            prop_assert!(d2t.is_sorted());
            prop_assert_eq!(&DraftVocabulary::validate(&d2t, &t2d).expect("valid"), &vocabulary);
            // No token outside is counted more often than one inside.
            let least = vocabulary.ids().iter().map(|&token| counted.get(token)).min().unwrap_or(0);
            for token in (0..60).filter(|&token| !t2d[token as usize]) {
                prop_assert!(counted.get(token) <= least);
            }
        }
    }
}
