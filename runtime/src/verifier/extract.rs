//! Loading a verifier, and the hidden states of packed rows.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::Path;

use bytes::Bytes;
use half::bf16;

use super::activations::Activations;
use super::decoder::{Attending, Decoder};
use super::residents::{Matrices, VectorsOn};
use super::shard::{Peers, Shard};
use super::{VerifierConfig, VerifierError, VerifierFiles};
use crate::contract::HiddenDtype;
use crate::device::{AttentionInputs, AttentionPlan, Buffer, Cpu, Device, Floats, Matrix, Products, Sought};
use crate::digest::Digest;
use crate::row::{HiddenStates, PackedRow};
use crate::weights::WeightsError;

/// How a verifier is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifierOptions {
    /// Threads that compute; 0 means one per core. The results do not depend on it.
    pub threads: usize,
    /// How products are computed.
    pub products: Products,
    /// Layers whose input is captured, ascending, `1..=n`; `None` is `[2, n/2, n-3]`.
    pub aux_layers: Option<Vec<u32>>,
    /// The part of the verifier that is loaded.
    pub shard: Shard,
}

impl Default for VerifierOptions {
    /// The whole verifier on one thread, with the default layers and products in f32.
    fn default() -> Self {
        Self {
            threads: 1,
            products: Products::F32,
            aux_layers: None,
            shard: Shard::WHOLE,
        }
    }
}

/// A verifier on a device, or a shard of one.
pub struct Verifier<D: Device = Cpu> {
    pub(super) device: D,
    pub(super) files: VerifierFiles,
    pub(super) decoder: Decoder,
    pub(super) activations: Activations,
    pub(super) normed: Buffer,
    pub(super) logits: Buffer,
    positions: Vec<u32>,
    aux_layers: Vec<u32>,
}

impl Verifier<Cpu> {
    /// Loads the verifier in `folder` for the CPU. Weights are mapped, so this reads little more than headers. With products
    /// through AMX, weights that are stored as floats are mapped from the cache of packed weights, which takes as much disk
    /// as they have in bf16, and are packed into it first if it does not have them; without a cache they are packed when
    /// they are first needed, and take as much memory again.
    ///
    /// # Errors
    /// When configuration, weights or aux layers are unusable; all problems of the weights are reported at once.
    pub fn load(folder: impl AsRef<Path>, options: VerifierOptions) -> Result<Self, VerifierError> {
        Self::load_on(
            Cpu::with_products(options.threads, options.products)?,
            folder,
            options.aux_layers,
            options.shard,
        )
    }
}

impl<D: Device> Verifier<D> {
    /// Loads the verifier in `folder`, or a shard of it, for a device; `aux_layers` as in [`VerifierOptions`].
    ///
    /// # Errors
    /// As [`Verifier::load`].
    pub fn load_on(
        device: D,
        folder: impl AsRef<Path>,
        aux_layers: Option<Vec<u32>>,
        shard: Shard,
    ) -> Result<Self, VerifierError> {
        let files = VerifierFiles::open(folder)?;
        let aux_layers = match aux_layers {
            Some(ids) => ids,
            None => files.config().default_aux_layers(),
        };
        let mut decoder = files.decoder(shard)?;
        check_aux_layers(&aux_layers, files.config().layers)?;
        decoder.place(&mut VectorsOn(&device));
        device.keep_all(&mut |see| decoder.place(&mut Matrices(see)));
        Ok(Self {
            device,
            decoder,
            files,
            activations: Activations::default(),
            normed: Buffer::default(),
            logits: Buffer::default(),
            positions: Vec::new(),
            aux_layers,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &VerifierConfig {
        self.decoder.config()
    }

    /// What it computes on.
    pub fn device(&self) -> &D {
        &self.device
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

    /// Captured states per token of the whole verifier: the aux layers and the last one.
    pub fn states_per_token(&self) -> usize {
        self.aux_layers.len() + 1
    }

    /// Which of these states this shard captures.
    pub fn captured(&self) -> Range<usize> {
        let span = self.decoder.span();
        let first = self.aux_layers.partition_point(|&id| (id as usize) < span.start);
        if self.decoder.shard().is_last() {
            return first..self.states_per_token();
        }
        first..self.aux_layers.partition_point(|&id| (id as usize) < span.end)
    }

    /// The part of the verifier that is loaded.
    pub fn shard(&self) -> Shard {
        self.decoder.shard()
    }

    /// Digest of config.json and of the names, dtypes and shapes of all tensors.
    pub fn digest(&self) -> Digest {
        self.files.digest()
    }

    /// The embedding, `[V, H]` in f32, as it is stored.
    ///
    /// # Errors
    /// When it is missing, of another shape, or stored in a form that cannot be unpacked.
    pub fn embedding(&self) -> Result<Vec<f32>, WeightsError> {
        Ok(self.files.embedding()?.to_f32()?.into_owned())
    }

    /// Rows of the head, `[ids, H]` in f32.
    ///
    /// # Errors
    /// As [`Self::embedding`], and when an id is outside the vocabulary.
    pub fn head_rows(&self, ids: &[u32]) -> Result<Vec<f32>, WeightsError> {
        self.files.head()?.gather_f32(ids)
    }

    /// What the final norm multiplies by, `[H]`.
    ///
    /// # Errors
    /// As [`Self::embedding`].
    pub fn final_norm(&self) -> Result<Vec<f32>, WeightsError> {
        self.files.final_norm()
    }

    /// Hidden states of a row, `[tokens, states, H]`: what enters each aux layer, then what leaves the last layer before
    /// the final norm; of these the ones that this shard captures. Positions start at 0 in every document.
    ///
    /// # Errors
    /// When the row is inconsistent, a token is outside the vocabulary, a state of this shard is not finite in `dtype`, or
    /// the other shards do not answer. A shard whose states are not finite still passes them on.
    pub fn extract(
        &mut self,
        row: &PackedRow,
        dtype: HiddenDtype,
        peers: &mut impl Peers,
    ) -> Result<HiddenStates, VerifierError> {
        let mut bytes = vec![0; self.captured_bytes(row.len(), dtype)];
        self.extract_into(row, dtype, peers, Some(&mut bytes))?;
        Ok(self.states_in(bytes.into(), dtype))
    }

    /// Bytes of the states that this shard captures of so many tokens.
    pub fn captured_bytes(&self, tokens: usize, dtype: HiddenDtype) -> usize {
        tokens * self.captured().len() * self.hidden_size() * dtype.bytes()
    }

    /// Bytes that [`Self::extract_into`] has filled, as what they are.
    pub fn states_in(&self, bytes: Bytes, dtype: HiddenDtype) -> HiddenStates {
        HiddenStates {
            dtype,
            states: self.captured().len(),
            hidden: self.hidden_size(),
            bytes,
        }
    }

    /// As [`Self::extract`], into memory of [`Self::captured_bytes`]; without it, for a shard whose states another one
    /// sends, nothing is kept.
    ///
    /// # Errors
    /// As [`Self::extract`].
    ///
    /// # Panics
    /// If the memory has another length.
    pub fn extract_into(
        &mut self,
        row: &PackedRow,
        dtype: HiddenDtype,
        peers: &mut impl Peers,
        out: Option<&mut [u8]>,
    ) -> Result<(), VerifierError> {
        let (hidden, own) = (self.hidden_size(), self.captured());
        if let Some(out) = &out {
            assert_eq!(out.len(), self.captured_bytes(row.len(), dtype));
        }
        let mut captured = out;
        let mut in_flight = VecDeque::new();
        let (state_bytes, row_bytes) = (hidden * dtype.bytes(), own.len() * hidden * dtype.bytes());
        let last = self.config().layers as u32;
        let slots: Vec<u32> = self.aux_layers.iter().copied().chain([last]).collect();
        self.run(row, dtype, peers, |device, layer, residual| {
            let Some(captured) = &mut captured else { return };
            for (state, slot) in own.clone().enumerate() {
                if slots[slot] != layer {
                    continue;
                }
                let Some(states) = captured.get_mut(state * state_bytes..) else {
                    continue;
                };
                let landing = device.capture(residual, dtype, states, row_bytes);
                in_flight.extend(landing.map(|landing| (state, landing)));
                while in_flight.len() > IN_FLIGHT
                    && let Some((state, landing)) = in_flight.pop_front()
                {
                    landing.land(&mut captured[state * state_bytes..], row_bytes);
                }
            }
        })?;
        for (state, landing) in in_flight {
            if let Some(captured) = &mut captured {
                landing.land(&mut captured[state * state_bytes..], row_bytes);
            }
        }
        Ok(())
    }

    /// The residual stream of a row entering each layer of this shard, each `[tokens, H]`, and leaving the last layer of all.
    ///
    /// # Errors
    /// As [`Self::extract`].
    pub fn residuals(
        &mut self,
        row: &PackedRow,
        peers: &mut impl Peers,
    ) -> Result<Vec<Vec<f32>>, VerifierError> {
        let mut residuals = Vec::new();
        self.run(row, HiddenDtype::F32, peers, |device, _, residual| {
            residuals.push(device.read(residual.data))
        })?;
        Ok(residuals)
    }

    /// Final norm `[tokens, H]` and logits `[tokens, V]` of a row; both empty where this is not the last stage.
    ///
    /// # Errors
    /// As [`Self::extract`].
    pub fn logits(
        &mut self,
        row: &PackedRow,
        peers: &mut impl Peers,
    ) -> Result<(Vec<f32>, Vec<f32>), VerifierError> {
        self.run(row, HiddenDtype::F32, peers, |_, _, _| ())?;
        if !self.shard().is_last() {
            return Ok((Vec::new(), Vec::new()));
        }
        let all: Vec<u32> = (0..row.len() as u32).collect();
        let (mut normed, mut part) = (Buffer::default(), Buffer::default());
        let (vocab, shard) = (self.vocab_size(), self.shard());
        let Self {
            device,
            decoder,
            activations,
            ..
        } = self;
        let ids = device.install(|| decoder.logits(device, activations, &all, &mut normed, &mut part));
        let (normed, part) = (device.read(normed.floats()), device.read(part.floats()));
        if shard.slices == 1 {
            return Ok((normed, part));
        }
        // Parts differ by one id at most; to be joined they must be equally long.
        let width = vocab.div_ceil(usize::from(shard.slices));
        let mut padded = vec![0.0; row.len() * width];
        for (padded, part) in padded
            .chunks_exact_mut(width)
            .zip(part.chunks_exact(ids.len().max(1)))
        {
            padded[..ids.len()].copy_from_slice(part);
        }
        let mut joined = Vec::new();
        peers.gather(&padded, &mut joined)?;
        let mut logits = vec![0.0; row.len() * vocab];
        for slice in 0..shard.slices {
            let ids = Shard { slice, ..shard }.slice_of(vocab, 1);
            let part = &joined[usize::from(slice) * padded.len()..][..padded.len()];
            for (logits, part) in logits.chunks_exact_mut(vocab).zip(part.chunks_exact(width)) {
                logits[ids.clone()].copy_from_slice(&part[..ids.len()]);
            }
        }
        Ok((normed, logits))
    }

    /// Runs the layers over a row; `capture` sees what enters each layer and what leaves the last.
    fn run<'s>(
        &'s mut self,
        row: &PackedRow,
        dtype: HiddenDtype,
        peers: &mut impl Peers,
        mut capture: impl FnMut(&'s D, u32, Matrix<'_>) + Send,
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
        let longest = row.document_lengths.iter().copied().max().unwrap_or(0);
        self.decoder.reach_position(&self.device, longest as usize);

        let every_row: Vec<u32> = (0..row.len() as u32).collect();
        let plans = Plans::new(&self.decoder, |window| {
            AttentionPlan::new(row.documents(), &every_row, window)
        });
        let largest = largest_magnitude(dtype);
        let Self {
            device,
            decoder,
            activations,
            positions,
            ..
        } = self;
        // A shard that finds a fault goes on, for the others wait for what it passes on.
        let mut checks = FiniteChecks::default();
        device.install(|| {
            decoder.forward(
                device,
                activations,
                (&row.tokens, positions),
                peers,
                |_,
                 Attending {
                     block,
                     q,
                     k,
                     v,
                     out,
                     lse,
                 }| {
                    let inputs = AttentionInputs {
                        q,
                        k,
                        v,
                        k_diagonal: Floats::empty(),
                        v_diagonal: Floats::empty(),
                    };
                    device.attention(&block.call(plans.of(block.window())), &inputs, out, lse);
                },
                |layer, residual| {
                    checks.begin(device, layer, residual, largest);
                    capture(device, layer, residual);
                },
            )
        })?;
        match checks.fault(row.documents()) {
            None => Ok(()),
            Some((document, layer)) => Err(VerifierError::NonFinite { document, layer }),
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

/// Captured states that a device may still be sending when the next ones are captured: they take memory at both ends.
const IN_FLIGHT: usize = 2;

/// The attention plans of a pass: one for each window that some layer has.
pub(super) struct Plans {
    plans: Vec<(Option<usize>, AttentionPlan)>,
}

impl Plans {
    pub(super) fn new(decoder: &Decoder, plan: impl Fn(Option<usize>) -> AttentionPlan) -> Self {
        let mut plans: Vec<(Option<usize>, AttentionPlan)> = Vec::new();
        for window in decoder.attentions().map(super::attention::AttentionBlock::window) {
            if plans.iter().all(|(known, _)| *known != window) {
                plans.push((window, plan(window)));
            }
        }
        Self { plans }
    }

    pub(super) fn of(&self, window: Option<usize>) -> &AttentionPlan {
        let found = self.plans.iter().find(|(known, _)| *known == window);
        &found.expect("every layer's window has a plan").1
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
pub(crate) fn largest_magnitude(dtype: HiddenDtype) -> f32 {
    match dtype {
        HiddenDtype::Bf16 => bf16::MAX.to_f32(),
        HiddenDtype::F32 => f32::MAX,
    }
}

/// Checks of the states of a pass. Their answers are asked for when it is over: between its layers nobody waits for a device.
#[derive(Default)]
pub(super) struct FiniteChecks<'d>(Vec<(u32, Sought<'d>)>);

impl<'d> FiniteChecks<'d> {
    /// Checks that the states `[tokens, hidden]` that enter a layer are at most `largest` in magnitude, and no NaN.
    pub(super) fn begin(&mut self, device: &'d impl Device, layer: u32, states: Matrix<'_>, largest: f32) {
        self.0.push((layer, device.seek_beyond(states, largest)));
    }

    /// The first layer whose states failed, and the first of these documents where they did: document, layer.
    pub(super) fn fault(self, mut documents: impl Iterator<Item = Range<usize>>) -> Option<(usize, u32)> {
        let mut checks = self.0.into_iter();
        let (layer, row) = checks.find_map(|(layer, sought)| Some((layer, sought.first()?)))?;
        let document = documents.position(|document| document.contains(&row))?;
        Some((document, layer))
    }
}
