//! Loading a verifier, and the hidden states of packed rows.

use std::path::Path;

use half::bf16;

use super::decoder::{Activations, Attending, Decoder};
use super::{VerifierConfig, VerifierError, VerifierFiles};
use crate::contract::HiddenDtype;
use crate::device::{Attention, AttentionInputs, AttentionPlan, Cpu, Device, RotaryTable};
use crate::digest::Digest;
use crate::row::{HiddenStates, PackedRow};
use crate::weights::WeightsError;

/// How a verifier is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifierOptions {
    /// Threads that compute; 0 means one per core. The results do not depend on it.
    pub threads: usize,
    /// Layers whose input is captured, ascending, `1..=n`; `None` is `[2, n/2, n-3]`.
    pub aux_layers: Option<Vec<u32>>,
}

impl Default for VerifierOptions {
    /// One thread and the default layers.
    fn default() -> Self {
        Self {
            threads: 1,
            aux_layers: None,
        }
    }
}

/// A verifier on a device.
pub struct Verifier<D: Device = Cpu> {
    pub(super) device: D,
    pub(super) decoder: Decoder,
    pub(super) activations: Activations,
    pub(super) rotary: RotaryTable,
    pub(super) normed: Vec<f32>,
    pub(super) logits: Vec<f32>,
    positions: Vec<u32>,
    aux_layers: Vec<u32>,
    digest: Digest,
}

impl Verifier<Cpu> {
    /// Loads the verifier in `folder` for the CPU. Weights are mapped, so this reads little more than headers.
    ///
    /// # Errors
    /// When configuration, weights or aux layers are unusable; all problems of the weights are reported at once.
    pub fn load(folder: impl AsRef<Path>, options: VerifierOptions) -> Result<Self, VerifierError> {
        Self::load_on(Cpu::new(options.threads)?, folder, options.aux_layers)
    }
}

impl<D: Device> Verifier<D> {
    /// Loads the verifier in `folder` for a device; `aux_layers` as in [`VerifierOptions`].
    ///
    /// # Errors
    /// As [`Verifier::load`].
    pub fn load_on(
        device: D,
        folder: impl AsRef<Path>,
        aux_layers: Option<Vec<u32>>,
    ) -> Result<Self, VerifierError> {
        let files = VerifierFiles::open(folder)?;
        files.check()?;
        let aux_layers = match aux_layers {
            Some(ids) => ids,
            None => files.config().default_aux_layers(),
        };
        check_aux_layers(&aux_layers, files.config().layers)?;
        Ok(Self {
            device,
            rotary: RotaryTable::new(&files.config().rope, 0),
            decoder: Decoder::new(&files)?,
            activations: Activations::default(),
            normed: Vec::new(),
            logits: Vec::new(),
            positions: Vec::new(),
            aux_layers,
            digest: files.digest(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &VerifierConfig {
        self.decoder.config()
    }

    /// Width H of the hidden states.
    pub fn hidden_size(&self) -> usize {
        self.config().hidden_size
    }

    /// Number V of token ids.
    pub fn vocab_size(&self) -> usize {
        self.config().vocab_size
    }

    /// Layers whose input is captured, ascending.
    pub fn aux_layers(&self) -> &[u32] {
        &self.aux_layers
    }

    /// Captured states per token: the aux layers and the last one.
    pub fn states_per_token(&self) -> usize {
        self.aux_layers.len() + 1
    }

    /// Digest of config.json and of the names, dtypes and shapes of all tensors.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// The embedding, `[V, H]` in f32.
    ///
    /// # Errors
    /// Never for a verifier that loaded; the signature is that of reading a tensor.
    pub fn embedding(&self) -> Result<Vec<f32>, WeightsError> {
        Ok(self.decoder.embedding().stored().to_f32()?.into_owned())
    }

    /// Rows of the head, `[ids, H]` in f32.
    ///
    /// # Errors
    /// When an id is outside the vocabulary.
    pub fn head_rows(&self, ids: &[u32]) -> Result<Vec<f32>, WeightsError> {
        self.decoder.head().stored().gather_f32(ids)
    }

    /// Weight of the final norm, `[H]`.
    pub fn final_norm(&self) -> Vec<f32> {
        self.decoder.final_norm().to_vec()
    }

    /// Hidden states of a row, `[tokens, states, H]`: what enters each aux layer, then what leaves the last layer before
    /// the final norm. Positions start at 0 in every document.
    ///
    /// # Errors
    /// When the row is inconsistent, a token is outside the vocabulary, or a state is not finite in `dtype`.
    pub fn extract(&mut self, row: &PackedRow, dtype: HiddenDtype) -> Result<HiddenStates, VerifierError> {
        let (hidden, states) = (self.hidden_size(), self.states_per_token());
        let mut captured = HiddenStates::zeros(dtype, row.len(), states, hidden);
        let aux_layers = self.aux_layers.clone();
        let last = self.config().layers as u32;
        self.run(row, dtype, |layer, residual| {
            let slots = aux_layers.iter().copied().chain([last]).enumerate();
            for (state, _) in slots.filter(|&(_, id)| id == layer) {
                for (token, values) in residual.chunks_exact(hidden).enumerate() {
                    captured.set(token, state, values);
                }
            }
        })?;
        Ok(captured)
    }

    /// The residual stream of a row entering each layer and leaving the last, each `[tokens, H]`; `layers + 1` of them.
    ///
    /// # Errors
    /// As [`Self::extract`].
    pub fn residuals(&mut self, row: &PackedRow) -> Result<Vec<Vec<f32>>, VerifierError> {
        let mut residuals = Vec::new();
        self.run(row, HiddenDtype::F32, |_, residual| {
            residuals.push(residual.to_vec())
        })?;
        Ok(residuals)
    }

    /// Final norm `[tokens, H]` and logits `[tokens, V]` of a row.
    ///
    /// # Errors
    /// As [`Self::extract`].
    pub fn logits(&mut self, row: &PackedRow) -> Result<(Vec<f32>, Vec<f32>), VerifierError> {
        self.run(row, HiddenDtype::F32, |_, _| ())?;
        let all: Vec<u32> = (0..row.len() as u32).collect();
        let (mut normed, mut logits) = (Vec::new(), Vec::new());
        let Self {
            device,
            decoder,
            activations,
            ..
        } = self;
        device.install(|| decoder.logits(device, activations, &all, &mut normed, &mut logits));
        Ok((normed, logits))
    }

    /// Runs all layers over a row; `capture` sees what enters each layer and what leaves the last.
    fn run(
        &mut self,
        row: &PackedRow,
        dtype: HiddenDtype,
        mut capture: impl FnMut(u32, &[f32]) + Send,
    ) -> Result<(), VerifierError> {
        if !row.is_consistent() {
            return Err(VerifierError::Row {
                tokens: row.tokens.len(),
                masked: row.loss_mask.len(),
                documents: row.document_lengths.iter().map(|&length| length as usize).sum(),
            });
        }
        for (document, range) in row.documents().enumerate() {
            self.check_tokens(document, &row.tokens[range])?;
        }
        if row.is_empty() {
            return Ok(());
        }
        self.positions.clear();
        self.positions
            .extend(row.document_lengths.iter().flat_map(|&length| 0..length));
        self.reach_position(row.document_lengths.iter().copied().max().unwrap_or(0) as usize);

        let every_row: Vec<u32> = (0..row.len() as u32).collect();
        let plan = AttentionPlan::new(row.documents(), &every_row, self.config().sliding_window);
        let largest = largest_magnitude(dtype);
        let Self {
            device,
            decoder,
            activations,
            rotary,
            positions,
            ..
        } = self;
        let attention = Attention {
            shape: decoder.attention_shape(),
            plan: &plan,
            diagonals: 0,
        };
        let hidden = decoder.config().hidden_size;
        device.install(|| {
            decoder.forward(
                device,
                activations,
                rotary,
                (&row.tokens, positions),
                |_, Attending { q, k, v, out, lse }| {
                    let inputs = AttentionInputs {
                        q,
                        k,
                        v,
                        k_diagonal: &[],
                        v_diagonal: &[],
                    };
                    device.attention(&attention, &inputs, out, lse);
                },
                |layer, residual| {
                    check_finite(residual, hidden, row.documents(), layer, largest)?;
                    capture(layer, residual);
                    Ok(())
                },
            )
        })
    }

    /// Makes sure that the rotary table covers positions below `positions`.
    pub(super) fn reach_position(&mut self, positions: usize) {
        if self.rotary.positions() < positions {
            self.rotary = RotaryTable::new(&self.config().rope, positions.next_power_of_two());
        }
    }

    /// Checks that all tokens of a document are in the vocabulary.
    pub(super) fn check_tokens(&self, document: usize, tokens: &[u32]) -> Result<(), VerifierError> {
        let vocab_size = self.vocab_size();
        match tokens.iter().position(|&token| token as usize >= vocab_size) {
            None => Ok(()),
            Some(position) => Err(VerifierError::Token {
                document,
                position,
                token: tokens[position],
                vocab_size,
            }),
        }
    }
}

fn check_aux_layers(ids: &[u32], layers: usize) -> Result<(), VerifierError> {
    let reason = if ids.is_empty() {
        "there are none".to_owned()
    } else if let Some(id) = ids.iter().find(|&&id| id == 0 || id as usize > layers) {
        format!("{id} is out of range")
    } else if let Some(pair) = ids.windows(2).find(|pair| pair[0] >= pair[1]) {
        format!("{} comes after {}", pair[1], pair[0])
    } else {
        return Ok(());
    };
    Err(VerifierError::AuxLayers {
        ids: ids.to_vec(),
        reason,
        layers,
    })
}

/// The largest value that stays finite when it is rounded to a dtype.
pub(super) fn largest_magnitude(dtype: HiddenDtype) -> f32 {
    match dtype {
        HiddenDtype::Bf16 => bf16::MAX.to_f32(),
        HiddenDtype::F32 => f32::MAX,
    }
}

/// Checks that the states `[tokens, hidden]` of all documents are at most `largest` in magnitude, and no NaN.
pub(super) fn check_finite(
    states: &[f32],
    hidden: usize,
    documents: impl Iterator<Item = std::ops::Range<usize>>,
    layer: u32,
    largest: f32,
) -> Result<(), VerifierError> {
    for (document, range) in documents.enumerate() {
        let states = &states[range.start * hidden..range.end * hidden];
        // Without a branch per element, so that it vectorises; NaN fails the comparison.
        if !states
            .iter()
            .fold(true, |finite, value| finite & (value.abs() <= largest))
        {
            return Err(VerifierError::NonFinite { document, layer });
        }
    }
    Ok(())
}
