//! The shard of the verifier that this rank holds.

use std::ops::Range;
use std::path::Path;

use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::row::{HiddenStates, PackedRow};
use eaglet_runtime::verifier::{Interrupted, Peers, Shard, Verifier, VerifierError, VerifierOptions};

/// A loaded shard.
pub(super) struct Model(Verifier);

/// Why a row was not computed.
pub(super) enum Unable {
    Interrupted(Interrupted),
    Verifier(VerifierError),
}

impl Model {
    pub(super) fn load(
        path: &Path,
        threads: usize,
        aux_layers: Option<Vec<u32>>,
        _: Shard,
    ) -> Result<Self, VerifierError> {
        Verifier::load(path, VerifierOptions { threads, aux_layers }).map(Self)
    }

    pub(super) fn stop_ids(&self) -> &[u32] {
        &self.0.config().eos_token_ids
    }

    pub(super) fn captured(&self) -> Range<usize> {
        0..self.0.states_per_token()
    }

    pub(super) fn extract(
        &mut self,
        row: &PackedRow,
        dtype: HiddenDtype,
        peers: &mut impl Peers,
    ) -> Result<HiddenStates, Unable> {
        peers.take_over(&mut []).map_err(Unable::Interrupted)?;
        self.0.extract(row, dtype).map_err(Unable::Verifier)
    }

    pub(super) fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_ids: &[u32],
        _: &mut impl Peers,
    ) -> Result<Vec<Vec<u32>>, Unable> {
        self.0
            .generate(prompts, max_new_tokens, stop_ids)
            .map_err(Unable::Verifier)
    }
}
