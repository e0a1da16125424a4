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
