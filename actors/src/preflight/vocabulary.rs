//! How much of what is trained the draft's vocabulary covers.

use eaglet_runtime::samples::{DraftVocabulary, TokenCounts, VocabularyError};
use serde::Serialize;

/// Share of the trained tokens that the draft vocabulary should hold at least. What it does not hold can never be
/// proposed: at 0.9 every tenth token ends the chain, whatever the draft has learnt.
pub(crate) const ENOUGH_COVERAGE: f64 = 0.9;

/// The draft vocabulary, counted on the samples that were read.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VocabularySurvey {
    /// Tokens that the draft can propose.
    pub draft_vocab_size: usize,
    /// Tokens of the verifier.
    pub verifier_vocab_size: usize,
    /// Trained tokens that were counted.
    pub trained_tokens: u64,
    /// How many different ones.
    pub distinct_tokens: usize,
    /// Share of them that the vocabulary holds, counted on the very same samples, as the launch does with all.
    pub coverage: f64,
    /// The same for a vocabulary of every second sample, on the others: what samples to come can expect. `None` for fewer
    /// than two samples.
    pub unseen_coverage: Option<f64>,
}

impl VocabularySurvey {
    /// Counts; `halves` are the trained tokens of every second sample, and of the others.
    pub(crate) fn new(
        halves: &[TokenCounts; 2],
        draft_vocab_size: usize,
        verifier_vocab_size: usize,
    ) -> Result<Option<Self>, VocabularyError> {
        let mut all = halves[0].clone();
        all.merge(&halves[1]);
        let of = |counts: &TokenCounts| {
            DraftVocabulary::from_counts(counts, draft_vocab_size, verifier_vocab_size)
        };
        let Some(coverage) = of(&all)?.coverage(&all) else {
            return Ok(None);
        };
        let unseen = of(&halves[0])?.coverage(&halves[1]);
        Ok(Some(Self {
            draft_vocab_size,
            verifier_vocab_size,
            trained_tokens: all.total(),
            distinct_tokens: all.distinct(),
            coverage,
            unseen_coverage: unseen.filter(|_| halves[0].total() > 0),
        }))
    }

    /// What is doubtful.
    pub(crate) fn doubt(&self) -> Option<String> {
        (self.coverage < ENOUGH_COVERAGE).then(|| {
            format!(
                "the draft vocabulary of {} tokens covers {:.1} % of the trained tokens that were read, less than {:.0} %; \
                 the draft can never propose the others: raise draft.vocab_size",
                self.draft_vocab_size,
                100.0 * self.coverage,
                100.0 * ENOUGH_COVERAGE,
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(tokens: &[(u32, u64)]) -> TokenCounts {
        let mut counts = TokenCounts::new();
        tokens
            .iter()
            .for_each(|&(token, count)| counts.add_token(token, count));
        counts
    }

    #[test]
    fn coverage_is_that_of_the_most_frequent_tokens() {
        let halves = [counts(&[(5, 6), (7, 2)]), counts(&[(5, 1), (9, 1)])];
        let found = VocabularySurvey::new(&halves, 2, 20)
            .expect("it fits")
            .expect("something is trained");
        // 5 and 7 are kept: 9 of 10. Of the second half the first half's vocabulary knows one of two.
        assert_eq!((found.coverage, found.unseen_coverage), (0.9, Some(0.5)));
        assert_eq!((found.trained_tokens, found.distinct_tokens), (10, 3));
        assert_eq!(found.doubt(), None);
        let small = VocabularySurvey::new(&halves, 1, 20)
            .expect("it fits")
            .expect("something is trained");
        let doubt = small.doubt().expect("7 of 10 is too little");
        assert!(
            doubt.contains("70.0 %") && doubt.contains("raise draft.vocab_size"),
            "{doubt}"
        );
    }

    #[test]
    fn nothing_trained_has_no_coverage_and_a_size_that_does_not_fit_is_told() {
        let nothing = [TokenCounts::new(), TokenCounts::new()];
        assert_eq!(VocabularySurvey::new(&nothing, 2, 20), Ok(None));
        let halves = [counts(&[(5, 1)]), TokenCounts::new()];
        assert!(VocabularySurvey::new(&halves, 21, 20).is_err());
        let one = VocabularySurvey::new(&halves, 2, 20)
            .expect("it fits")
            .expect("one token");
        assert_eq!(one.unseen_coverage, None);
    }
}
