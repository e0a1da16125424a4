//! Which part of a verifier a rank holds, and what it needs of the ranks that hold the others.
//!
//! A verifier is cut twice: its layers into stages, one after the other, and every layer of a stage into slices that are
//! computed side by side. The ranks of one verifier run the same program on the same rows in the same order, so that
//! nobody has to be told what to send: who waits for a residual knows that it comes.
//!
//! Invariants:
//! - SHARD-1: stages give the same bits as the whole verifier; only what travels between them is cut.
//! - SHARD-2: slices are summed in slice order, so all slices of a stage hold the same bits.

use std::fmt;
use std::ops::Range;

use super::VerifierConfig;
use crate::cuda::SliceSums;

/// The part of a verifier that one rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// Which stage of the layers, from 0.
    pub stage: u16,
    /// Stages, at least 1.
    pub stages: u16,
    /// Which slice of every layer of the stage, from 0.
    pub slice: u16,
    /// Slices, at least 1.
    pub slices: u16,
}

impl Shard {
    /// The whole verifier.
    pub const WHOLE: Self = Self {
        stage: 0,
        stages: 1,
        slice: 0,
        slices: 1,
    };

    /// The `index`-th of `stages · slices` shards: slices of a stage are neighbours.
    ///
    /// # Panics
    /// If there are no stages or slices, or not so many.
    pub fn nth(index: u16, stages: u16, slices: u16) -> Self {
        assert!(index < stages * slices, "shard {index} of {stages} x {slices}");
        Self {
            stage: index / slices,
            stages,
            slice: index % slices,
            slices,
        }
    }

    /// The layers of this stage: consecutive ones, cut so that the costliest stage costs as little as it can. A layer costs
    /// what a token meets of it; the head, which extraction does not need, costs nothing.
    pub fn layers(&self, config: &VerifierConfig) -> Range<usize> {
        let costs: Vec<u64> = config
            .blocks
            .iter()
            .map(|layer| layer.active_parameters(config.hidden_size))
            .collect();
        let cuts = cuts(&costs, usize::from(self.stages));
        let stage = usize::from(self.stage);
        cuts[stage]..cuts[stage + 1]
    }

    /// Whether tokens enter here.
    pub const fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether the final norm and the head are here.
    pub const fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// The part of `0..len` that belongs to this slice: neighbours differ by one `unit` at most.
    pub fn slice_of(&self, len: usize, unit: usize) -> Range<usize> {
        let units = len.div_ceil(unit.max(1));
        let cut = |slice: usize| (units * slice / usize::from(self.slices) * unit).min(len);
        cut(usize::from(self.slice))..cut(usize::from(self.slice) + 1)
    }
}

impl Default for Shard {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            stage,
            stages,
            slice,
            slices,
        } = self;
        write!(f, "stage {stage} of {stages}, slice {slice} of {slices}")
    }
}

/// Where `costs` are cut into `parts` consecutive parts, the costliest as cheap as can be; `parts + 1` places. As long as there
/// are enough layers, every part has one.
fn cuts(costs: &[u64], parts: usize) -> Vec<usize> {
    let total: u64 = costs.iter().sum();
    let (mut low, mut high) = (costs.iter().copied().max().unwrap_or(0), total);
    while low < high {
        let middle = low + (high - low) / 2;
        if parts_within(costs, middle) <= parts {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    let mut cuts = vec![0];
    let mut cost = 0;
    for (layer, &next) in costs.iter().enumerate() {
        // The parts to come need a layer each.
        let left = parts.saturating_sub(cuts.len());
        let must_leave_room = costs.len() - layer <= left && layer > cuts[cuts.len() - 1];
        if cuts.len() < parts && layer > 0 && (cost + next > low || must_leave_room) {
            cuts.push(layer);
            cost = 0;
        }
        cost += next;
    }
    cuts.resize(parts, costs.len());
    cuts.push(costs.len());
    cuts
}

/// Parts that are filled one after the other up to `limit` each.
fn parts_within(costs: &[u64], limit: u64) -> usize {
    let (mut parts, mut cost) = (1, 0);
    for &next in costs {
        if cost + next > limit {
            parts += 1;
            cost = 0;
        }
        cost += next;
    }
    parts
}

/// The other shards of the verifier do not answer; what was under way is void.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Interrupted {
    /// Who, and why.
    pub reason: String,
}

/// What a shard says to the other shards of its verifier, and hears from them.
///
/// Every call waits until it is done. All shards make the same calls for the same rows, so calls pair up by their order.
pub trait Peers: Send {
    /// Replaces `values` by the sum of the values of all slices of this stage, added in slice order.
    ///
    /// # Errors
    /// [`Interrupted`], as all calls here.
    fn sum(&mut self, values: &mut [f32]) -> Result<(), Interrupted>;

    /// What sums values that lie on a GPU without bringing them to the host, if there is such a thing.
    fn slice_sums(&mut self) -> Option<&mut SliceSums> {
        None
    }

    /// Joins equally long parts of the slices of this stage, in slice order.
    fn gather(&mut self, part: &[f32], whole: &mut Vec<f32>) -> Result<(), Interrupted>;

    /// Hands the residual stream `[tokens, H]` to the same slice of the next stage.
    fn pass_on(&mut self, residual: &[f32]) -> Result<(), Interrupted>;

    /// Takes the residual stream `[tokens, H]` of the stage before.
    fn take_over(&mut self, residual: &mut [f32]) -> Result<(), Interrupted>;

    /// Makes the tokens that the last stage has chosen known to all shards; `chosen` has as many places as there are
    /// tokens to come, and is filled already on the last stage.
    fn announce(&mut self, chosen: &mut [u32]) -> Result<(), Interrupted>;
}

/// A verifier that is not cut has no peers.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Peers for Alone {
    fn sum(&mut self, _: &mut [f32]) -> Result<(), Interrupted> {
        Ok(())
    }

    fn gather(&mut self, part: &[f32], whole: &mut Vec<f32>) -> Result<(), Interrupted> {
        whole.clear();
        whole.extend_from_slice(part);
        Ok(())
    }

    fn pass_on(&mut self, _: &[f32]) -> Result<(), Interrupted> {
        Ok(())
    }

    fn take_over(&mut self, _: &mut [f32]) -> Result<(), Interrupted> {
        Ok(())
    }

    fn announce(&mut self, _: &mut [u32]) -> Result<(), Interrupted> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{Shard, cuts};

    #[test]
    fn stages_are_cut_where_the_costliest_one_is_cheapest() {
        assert_eq!(cuts(&[1, 1, 1, 1, 1, 1], 3), [0, 2, 4, 6]);
        assert_eq!(cuts(&[5, 1, 1, 1, 1, 1], 2), [0, 1, 6]);
        assert_eq!(cuts(&[1, 1, 1, 1, 1, 5], 2), [0, 5, 6]);
        assert_eq!(cuts(&[3; 7], 1), [0, 7]);
        // As many layers as stages: one each.
        assert_eq!(cuts(&[9, 1, 1], 3), [0, 1, 2, 3]);
        assert_eq!(cuts(&[1, 1, 9], 3), [0, 1, 2, 3]);
        // Kimi-K2.5: a dense layer, then 60 that cost the same.
        let layers: Vec<u64> = [2].into_iter().chain([3; 60]).collect();
        let cuts = cuts(&layers, 8);
        let longest = cuts.windows(2).map(|pair| pair[1] - pair[0]).max();
        assert_eq!((cuts[8], longest), (61, Some(8)));
        assert!(cuts.windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn slices_cover_everything_once() {
        for (len, slices) in [(10, 3), (3, 4), (64, 8), (0, 2)] {
            let mut next = 0;
            for slice in 0..slices {
                let range = Shard {
                    slice,
                    slices,
                    ..Shard::WHOLE
                }
                .slice_of(len, 1);
                assert_eq!(range.start, next);
                next = range.end;
            }
            assert_eq!(next, len);
        }
    }
}
