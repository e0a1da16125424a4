//! How a gradient is cut into buckets, and the one order in which the members of a group sum them.
//!
//! A communicator only works if all its members ask for the same collectives in the same order. So the order is made of
//! what they agree on before a step and of nothing that they see on the way:
//!
//! - **SEQUENCE-1**: the collectives of a step follow from the bucket plan, the mode and the number of lanes. When a lane
//!   is finished, in which stretches its gradient came, and who owns it decide nothing.
//! - **SEQUENCE-2**: a member asks for a collective after it has asked for all before it. What is ready earlier waits.
//!
//! Buckets follow the order in which the backward pass finishes parameters, and parameters lie in them in that order: so
//! the small ones travel with their neighbours, and a bucket is whole long before the pass ends.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Most elements of a bucket: 16 MiB, large enough that a collective's start does not count.
const BUCKET_ELEMENTS: usize = 4 << 20;
/// Fewest elements of a bucket but the last.
const LEAST_ELEMENTS: usize = 16 << 10;
/// Buckets of a small gradient.
const BUCKETS: usize = 16;

/// In which order gradients of lanes are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SumMode {
    /// In the order of the lanes, whoever computed them: the same bits for every membership.
    #[default]
    Exact,
    /// Each member's lanes first, then the members in the order of the library: bits depend on the membership.
    Fast,
}

impl fmt::Display for SumMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Exact => "exact",
            Self::Fast => "fast",
        })
    }
}

/// A part of a gradient and its place in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Elements of the gradient.
    pub part: Range<usize>,
    /// The bucket.
    pub bucket: usize,
    /// Where the part begins in it.
    pub at: usize,
}

/// A collective of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The owner of a lane sends a bucket of its gradient to all.
    Send {
        /// Number of the lane among those that are summed.
        lane: usize,
        /// The bucket.
        bucket: usize,
    },
    /// All members add what they have of a bucket.
    Add {
        /// The bucket.
        bucket: usize,
    },
}

/// Stretches that do not make up a gradient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stretches {order:?} do not cover a gradient of {elements} elements once")]
pub struct BucketError {
    /// The stretches.
    order: Vec<Range<usize>>,
    /// Its length.
    elements: usize,
}

/// The buckets of a gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketPlan {
    /// Stretches of the gradient, each with its place in the order of buckets; ascending in that order.
    stretches: Vec<(Range<usize>, usize)>,
    elements: usize,
    bucket_elements: usize,
}

impl BucketPlan {
    /// Buckets of `bucket_elements`, the last one shorter, of a gradient that becomes final in this order.
    ///
    /// # Errors
    /// If the stretches do not cover `elements` without overlap.
    ///
    /// # Panics
    /// If buckets are empty.
    pub fn new(elements: usize, order: &[Range<usize>], bucket_elements: usize) -> Result<Self, BucketError> {
        assert!(bucket_elements > 0, "empty buckets");
        let mut sorted: Vec<&Range<usize>> = order.iter().filter(|stretch| !stretch.is_empty()).collect();
        sorted.sort_by_key(|stretch| stretch.start);
        let mut end = 0;
        let follows = sorted.iter().all(|stretch| {
            let follows = stretch.start == end;
            end = stretch.end;
            follows
        });
        if !follows || end != elements {
            let order = order.to_vec();
            return Err(BucketError { order, elements });
        }
        let mut at = 0;
        let stretches = order
            .iter()
            .filter(|stretch| !stretch.is_empty())
            .map(|stretch| {
                let start = at;
                at += stretch.len();
                (stretch.clone(), start)
            })
            .collect();
        Ok(Self {
            stretches,
            elements,
            bucket_elements,
        })
    }

    /// Elements of a bucket that suit a gradient of so many: small ones are cut, too, so that they leave while the rest is
    /// computed.
    pub fn bucket_elements_for(elements: usize) -> usize {
        elements.div_ceil(BUCKETS).clamp(LEAST_ELEMENTS, BUCKET_ELEMENTS)
    }

    /// Elements of the gradient.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Elements of a bucket that is not the last one.
    pub fn bucket_elements(&self) -> usize {
        self.bucket_elements
    }

    /// Number of buckets.
    pub fn buckets(&self) -> usize {
        self.elements.div_ceil(self.bucket_elements)
    }

    /// Elements of bucket `bucket`.
    pub fn len_of(&self, bucket: usize) -> usize {
        let start = bucket.saturating_mul(self.bucket_elements);
        self.elements.saturating_sub(start).min(self.bucket_elements)
    }

    /// Where the elements `part` of a gradient lie.
    pub fn pieces(&self, part: Range<usize>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (stretch, place) in &self.stretches {
            let (mut from, end) = (part.start.max(stretch.start), part.end.min(stretch.end));
            while from < end {
                let position = place + (from - stretch.start);
                let (bucket, at) = (position / self.bucket_elements, position % self.bucket_elements);
                let len = (end - from).min(self.bucket_elements - at);
                pieces.push(Piece {
                    part: from..from + len,
                    bucket,
                    at,
                });
                from += len;
            }
        }
        pieces
    }

    /// SEQUENCE-1: the collectives of a step over some number of lanes.
    pub fn sequence(&self, mode: SumMode, lanes: usize) -> impl Iterator<Item = Turn> + use<> {
        let buckets = self.buckets();
        let lanes = match mode {
            SumMode::Exact => lanes,
            SumMode::Fast => 1,
        };
        (0..lanes).flat_map(move |lane| {
            (0..buckets).map(move |bucket| match mode {
                SumMode::Exact => Turn::Send { lane, bucket },
                SumMode::Fast => Turn::Add { bucket },
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(bucket_elements: usize) -> BucketPlan {
        // As of a draft: what lies last is final first, and what lies first is not quite the last.
        let order = [90..100, 30..90, 25..30, 0..25, 100..103];
        BucketPlan::new(103, &order, bucket_elements).expect("it covers all")
    }

    #[test]
    fn each_element_has_one_place_and_buckets_fill_in_the_order_of_the_pass() {
        for bucket_elements in [1, 7, 16, 100, 103, 4096] {
            let plan = plan(bucket_elements);
            let pieces = plan.pieces(0..103);
            let mut places: Vec<(usize, usize)> = pieces
                .iter()
                .flat_map(|piece| (0..piece.part.len()).map(|i| (piece.bucket, piece.at + i)))
                .collect();
            assert!(places.is_sorted(), "in the order of the pass");
            places.dedup();
            assert_eq!(places.len(), 103);
            let total: usize = (0..plan.buckets()).map(|bucket| plan.len_of(bucket)).sum();
            assert_eq!(total, 103);
            assert!(
                pieces
                    .iter()
                    .all(|piece| piece.at + piece.part.len() <= plan.len_of(piece.bucket))
            );
            // The same places, however the gradient is cut on its way.
            let mut cut: Vec<Piece> = (0..103).flat_map(|i| plan.pieces(i..i + 1)).collect();
            cut.sort_by_key(|piece| (piece.bucket, piece.at));
            let whole: Vec<usize> = pieces.into_iter().flat_map(|piece| piece.part).collect();
            assert_eq!(
                cut.into_iter().flat_map(|piece| piece.part).collect::<Vec<_>>(),
                whole
            );
        }
    }

    #[test]
    fn sequence_1_follows_from_the_plan_the_mode_and_the_number_of_lanes() {
        let plan = plan(60);
        let exact: Vec<Turn> = plan.sequence(SumMode::Exact, 2).collect();
        let send = |lane, bucket| Turn::Send { lane, bucket };
        assert_eq!(exact, [send(0, 0), send(0, 1), send(1, 0), send(1, 1)]);
        let fast: Vec<Turn> = plan.sequence(SumMode::Fast, 9).collect();
        assert_eq!(fast, [Turn::Add { bucket: 0 }, Turn::Add { bucket: 1 }]);
    }

    #[test]
    fn stretches_that_overlap_or_leave_a_gap_are_refused() {
        for order in [&[0..5, 4..10][..], &[0..5, 6..10], &[0..9; 1], &[0..11; 1]] {
            assert!(BucketPlan::new(10, order, 4).is_err(), "{order:?}");
        }
        assert_eq!(BucketPlan::new(0, &[], 4).expect("nothing").buckets(), 0);
    }
}
