//! The decoder that all families share, over any device: the layers of one shard.
//!
//! Residual layers of attention and MLP, each behind a norm, for some families with one after it too (the Llama layer of
//! Touvron et al. 2023, and what became of it). Where keys and values come from is the caller's: a row's own, or a cache.

use std::ops::Range;
use std::sync::Arc;

use super::activations::{Activations, take};
use super::attention::AttentionBlock;
use super::error::LayoutProblem;
use super::linear::Linear;
use super::loader::{Loader, Need};
use super::mlp::MlpBlock;
use super::residents::Residence;
use super::rotation::Rotations;
use super::shard::{Interrupted, Peers, Shard};
use super::{VerifierConfig, VerifierFiles};
use crate::device::{Buffer, Device, Floats, FloatsMut, Matrix, MatrixMut, WeightUse};

/// Weights of one layer.
struct Layer {
    input_norm: Buffer,
    attention: AttentionBlock,
    /// Norm of what attention adds, in families that have one.
    attention_norm: Option<Buffer>,
    mlp_norm: Buffer,
    mlp: MlpBlock,
    /// Norm of what the MLP adds.
    output_norm: Option<Buffer>,
}

impl Layer {
    fn new(loader: &Loader<'_>, index: usize, rotations: &mut Rotations) -> Self {
        let (config, layer) = (loader.config(), loader.layer(index));
        let (hidden, block) = (config.hidden_size, &config.blocks[index]);
        let (before_mlp, after) = if config.sandwich_norms {
            let norm = |part| Some(layer.norm(part, hidden));
            (
                "pre_feedforward_layernorm",
                [
                    norm("post_attention_layernorm"),
                    norm("post_feedforward_layernorm"),
                ],
            )
        } else {
            ("post_attention_layernorm", [None, None])
        };
        let [attention_norm, output_norm] = after;
        Self {
            input_norm: layer.norm("input_layernorm", hidden),
            attention: AttentionBlock::new(&layer, &block.attention, hidden, rotations),
            attention_norm,
            mlp_norm: layer.norm(before_mlp, hidden),
            mlp: MlpBlock::new(&layer, &block.mlp, hidden),
            output_norm,
        }
    }
}

/// Rotated queries and keys, and values of one layer, and where its attention goes.
pub(super) struct Attending<'a> {
    /// The layer's attention.
    pub(super) block: &'a AttentionBlock,
    /// `[tokens, heads · head_dim]`.
    pub(super) q: Floats<'a>,
    /// `[tokens, kv_heads · head_dim]`.
    pub(super) k: Floats<'a>,
    /// `[tokens, kv_heads · value_dim]`.
    pub(super) v: Floats<'a>,
    /// `[tokens, heads · value_dim]`, to be written.
    pub(super) out: FloatsMut<'a>,
    /// `[tokens, heads]`, scratch.
    pub(super) lse: FloatsMut<'a>,
}

/// Rows of the embedding or head that one slice holds; where they are one tensor, one part is both.
#[derive(Clone)]
struct VocabularyPart {
    linear: Arc<Linear>,
    ids: Range<usize>,
}

/// What comes after the last layer.
struct Head {
    norm: Buffer,
    part: VocabularyPart,
}

/// The layers of a shard; embedding where tokens enter, final norm and head where they leave.
pub(super) struct Decoder {
    config: VerifierConfig,
    shard: Shard,
    span: Range<usize>,
    embedding: Option<VocabularyPart>,
    layers: Vec<Layer>,
    head: Option<Head>,
    rotations: Rotations,
}

/// A shard's decoder, and what making it has shown.
pub(super) struct Built {
    pub(super) decoder: Decoder,
    pub(super) needs: Vec<Need>,
    pub(super) problems: Vec<LayoutProblem>,
}

impl Decoder {
    /// Makes the decoder of a shard. It must not be computed with if there are problems.
    pub(super) fn build(files: &VerifierFiles, shard: Shard) -> Built {
        let config = files.config();
        let loader = Loader::new(files.weights(), config, files.names(), shard);
        let span = shard.layers(config);
        let mut rotations = Rotations::default();
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let vocabulary = |name: &str| {
            let ids = shard.slice_of(vocab, 1);
            let share = ids.len() as f64 / vocab as f64;
            let linear = loader
                .matrix(name, vocab, hidden, share)
                .part(ids.clone(), 0..hidden);
            VocabularyPart {
                linear: Arc::new(linear),
                ids,
            }
        };
        let embedding_name = loader.names().embedding();
        let embedding = shard.is_first().then(|| vocabulary(&embedding_name));
        let decoder = Self {
            head: shard.is_last().then(|| Head {
                norm: loader.norm(&loader.names().final_norm(), hidden).into(),
                part: match (config.tied_embeddings, &embedding) {
                    (true, Some(embedding)) => embedding.clone(),
                    (true, None) => vocabulary(&embedding_name),
                    (false, _) => vocabulary(loader.names().head()),
                },
            }),
            embedding,
            layers: span
                .clone()
                .map(|index| Layer::new(&loader, index, &mut rotations))
                .collect(),
            config: config.clone(),
            shard,
            rotations,
            span: span.clone(),
        };
        let (needs, known, mut problems) = loader.finish();
        problems.extend(files.unused(&span, &known));
        Built {
            decoder,
            needs,
            problems,
        }
    }

    /// Takes vectors and matrices of all layers to where they are to be.
    pub(super) fn place(&mut self, to: &mut impl Residence) {
        let embedding = self.embedding.as_ref().map(|part| &part.linear);
        if let Some(embedding) = embedding {
            let is_head = self
                .head
                .as_ref()
                .is_some_and(|head| Arc::ptr_eq(embedding, &head.part.linear));
            let purpose = if is_head {
                WeightUse::Products
            } else {
                WeightUse::Rows
            };
            to.matrix(&**embedding, purpose);
        }
        for layer in &mut self.layers {
            let Layer {
                input_norm,
                attention,
                attention_norm,
                mlp_norm,
                mlp,
                output_norm,
            } = layer;
            let norms = [input_norm, mlp_norm].into_iter();
            let norms = norms.chain(attention_norm).chain(output_norm);
            norms.for_each(|norm| to.vector(norm));
            attention.place(to);
            mlp.place(to);
        }
        if let Some(head) = &mut self.head {
            to.vector(&mut head.norm);
            if !embedding.is_some_and(|embedding| Arc::ptr_eq(embedding, &head.part.linear)) {
                to.matrix(&*head.part.linear, WeightUse::Products);
            }
        }
    }

    /// Its configuration.
    pub(super) fn config(&self) -> &VerifierConfig {
        &self.config
    }

    /// Which part of the verifier it is.
    pub(super) fn shard(&self) -> Shard {
        self.shard
    }

    /// Its layers.
    pub(super) fn span(&self) -> Range<usize> {
        self.span.clone()
    }

    /// The attention of each of its layers.
    pub(super) fn attentions(&self) -> impl Iterator<Item = &AttentionBlock> {
        self.layers.iter().map(|layer| &layer.attention)
    }

    /// Makes sure that positions below `positions` can be rotated.
    pub(super) fn reach_position(&mut self, device: &impl Device, positions: usize) {
        self.rotations.reach(device, positions);
    }

    /// Runs the layers over `tokens` at `positions`, `[tokens]` each.
    ///
    /// `attend` computes the attention of a layer, counted from the shard's first. `entering` sees the residual stream
    /// `[tokens, H]` before each layer, and once more, with the number of layers, after the last one of all.
    pub(super) fn forward(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        (tokens, positions): (&[u32], &[u32]),
        peers: &mut impl Peers,
        mut attend: impl FnMut(usize, Attending<'_>),
        mut entering: impl FnMut(u32, Matrix<'_>),
    ) -> Result<(), Interrupted> {
        let (rows, hidden) = (tokens.len(), self.config.hidden_size);
        match &self.embedding {
            Some(embedding) => self.embed(device, activations, embedding, tokens, peers)?,
            None => {
                let residual = take(device, &mut activations.residual, "residual", rows * hidden);
                on_host(device, residual, |residual| peers.take_over(residual))?;
            }
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let residual = activations.residual.part(0..rows * hidden);
            entering(
                (self.span.start + index) as u32,
                Matrix::new(residual, rows, hidden),
            );
            self.attend(device, activations, layer, positions, peers, |attending| {
                attend(index, attending);
            })?;
            self.feed_forward(device, activations, layer, rows, peers)?;
        }
        if self.shard.is_last() {
            let residual = activations.residual.part(0..rows * hidden);
            entering(self.config.layers as u32, Matrix::new(residual, rows, hidden));
            Ok(())
        } else {
            let residual = activations.residual.part_mut(0..rows * hidden);
            on_host(device, residual, |residual| peers.pass_on(residual))
        }
    }

    fn embed(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        embedding: &VocabularyPart,
        tokens: &[u32],
        peers: &mut impl Peers,
    ) -> Result<(), Interrupted> {
        let (rows, hidden) = (tokens.len(), self.config.hidden_size);
        device.stage("embedding");
        let mut residual = take(device, &mut activations.residual, "residual", rows * hidden);
        if self.shard.slices == 1 {
            embedding
                .linear
                .gather(device, tokens, MatrixMut::new(&mut residual, rows, hidden));
        } else {
            // Every token is in one slice's part; the others add zero to it.
            let own = tokens.iter().enumerate().filter_map(|(row, &token)| {
                let id = (token as usize).checked_sub(embedding.ids.start)?;
                (id < embedding.ids.len()).then_some((row as u32, id as u32))
            });
            let (places, ids): (Vec<u32>, Vec<u32>) = own.unzip();
            let mut picked = take(device, &mut activations.update, "update", ids.len() * hidden);
            embedding
                .linear
                .gather(device, &ids, MatrixMut::new(&mut picked, ids.len(), hidden));
            device.fill(residual.reborrow(), 0.0);
            device.scatter_add(
                Matrix::new(&picked, ids.len(), hidden),
                &places,
                MatrixMut::new(&mut residual, rows, hidden),
            );
            sum(device, residual.reborrow(), peers)?;
        }
        if self.config.embedding_scale != 1.0 {
            device.scale(residual, self.config.embedding_scale);
        }
        Ok(())
    }

    fn attend(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        layer: &Layer,
        positions: &[u32],
        peers: &mut impl Peers,
        attend: impl FnOnce(Attending<'_>),
    ) -> Result<(), Interrupted> {
        let (rows, hidden, eps) = (positions.len(), self.config.hidden_size, self.config.rms_norm_eps);
        device.stage("attention");
        self.norm(device, activations, &layer.input_norm, rows);
        let block = &layer.attention;
        let normed = std::mem::take(&mut activations.normed);
        let input = Matrix::new(normed.part(0..rows * hidden), rows, hidden);
        block.project(device, activations, input, eps, &self.rotations, positions);
        activations.normed = normed;
        let shape = block.shape();
        let mut attended = take(
            device,
            &mut activations.attended,
            "attended",
            rows * shape.output_width(),
        );
        attend(Attending {
            block,
            q: activations.q.part(0..rows * shape.query_width()),
            k: activations.k.part(0..rows * shape.key_width()),
            v: activations.v.part(0..rows * shape.value_width()),
            out: attended.reborrow(),
            lse: take(device, &mut activations.lse, "lse", rows * shape.heads),
        });
        let input = Matrix::new(&attended, rows, shape.output_width());
        let residual = activations.residual.part_mut(0..rows * hidden);
        if self.adds_at_once(layer.attention_norm.as_ref()) {
            block.output().apply(device, input, residual, true);
            return Ok(());
        }
        let update = take(device, &mut activations.update, "update", rows * hidden);
        block.output().apply(device, input, update, false);
        self.add_update(device, activations, layer.attention_norm.as_ref(), rows, peers)
    }

    fn feed_forward(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        layer: &Layer,
        rows: usize,
        peers: &mut impl Peers,
    ) -> Result<(), Interrupted> {
        let hidden = self.config.hidden_size;
        device.stage("mlp");
        self.norm(device, activations, &layer.mlp_norm, rows);
        let Activations {
            residual,
            normed,
            mlp,
            update,
            ..
        } = activations;
        let input = Matrix::new(normed.part(0..rows * hidden), rows, hidden);
        if self.adds_at_once(layer.output_norm.as_ref()) {
            layer
                .mlp
                .apply(device, mlp, input, residual.part_mut(0..rows * hidden), true);
            return Ok(());
        }
        layer.mlp.apply(
            device,
            mlp,
            input,
            take(device, update, "update", rows * hidden),
            false,
        );
        self.add_update(device, activations, layer.output_norm.as_ref(), rows, peers)
    }

    /// Whether a product can be added to the residual stream as it is computed.
    fn adds_at_once(&self, norm: Option<&Buffer>) -> bool {
        self.shard.slices == 1 && norm.is_none()
    }

    /// Adds what all slices came to, normed if the family does so, to the residual stream.
    fn add_update(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        norm: Option<&Buffer>,
        rows: usize,
        peers: &mut impl Peers,
    ) -> Result<(), Interrupted> {
        let hidden = self.config.hidden_size;
        let Activations {
            residual,
            normed,
            rstd,
            update,
            ..
        } = activations;
        let residual = residual.part_mut(0..rows * hidden);
        let mut update = update.part_mut(0..rows * hidden);
        if self.shard.slices > 1 {
            sum(device, update.reborrow(), peers)?;
        }
        match norm {
            Some(weight) => {
                let mut normed = take(device, normed, "normed", rows * hidden);
                device.rms_norm(
                    Matrix::new(&update, rows, hidden),
                    weight.floats(),
                    self.config.rms_norm_eps,
                    MatrixMut::new(&mut normed, rows, hidden),
                    take(device, rstd, "rstd", rows),
                );
                device.add(residual, normed.floats());
            }
            None => device.add(residual, update.floats()),
        }
        Ok(())
    }

    /// Norms the residual stream.
    fn norm(&self, device: &impl Device, activations: &mut Activations, weight: &Buffer, rows: usize) {
        let hidden = self.config.hidden_size;
        device.rms_norm(
            Matrix::new(activations.residual.part(0..rows * hidden), rows, hidden),
            weight.floats(),
            self.config.rms_norm_eps,
            MatrixMut::new(
                take(device, &mut activations.normed, "normed", rows * hidden),
                rows,
                hidden,
            ),
            take(device, &mut activations.rstd, "rstd", rows),
        );
    }

    /// Final norm `[rows, H]` and logits `[rows, ids]` of some tokens of the last forward pass; the logits' ids.
    ///
    /// # Panics
    /// If this is not the last stage.
    pub(super) fn logits(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        tokens: &[u32],
        normed: &mut Buffer,
        logits: &mut Buffer,
    ) -> Range<usize> {
        let head = self
            .head
            .as_ref()
            .expect("only the last stage is asked for logits");
        let (rows, hidden) = (tokens.len(), self.config.hidden_size);
        device.stage("head");
        let passed = activations.residual.len() / hidden;
        let stream = Matrix::new(activations.residual.part(0..passed * hidden), passed, hidden);
        let mut picked = take(device, &mut activations.head_input, "head_input", rows * hidden);
        device.gather(stream, tokens, MatrixMut::new(&mut picked, rows, hidden));
        let mut normed = take(device, normed, "normed", rows * hidden);
        device.rms_norm(
            Matrix::new(&picked, rows, hidden),
            head.norm.floats(),
            self.config.rms_norm_eps,
            MatrixMut::new(&mut normed, rows, hidden),
            take(device, &mut activations.rstd, "rstd", rows),
        );
        let mut logits = take(device, logits, "logits", rows * head.part.ids.len());
        head.part.linear.apply(
            device,
            Matrix::new(&normed, rows, hidden),
            logits.reborrow(),
            false,
        );
        if let Some(cap) = self.config.logit_softcap {
            device.softcap(logits, cap);
        }
        head.part.ids.clone()
    }
}

/// Replaces floats by their sum over all slices of the stage: where they lie, if the peers can do that, else on the host.
fn sum(device: &impl Device, floats: FloatsMut<'_>, peers: &mut impl Peers) -> Result<(), Interrupted> {
    match (floats.floats().as_gpu(), device.stream(), peers.slice_sums()) {
        (Some(_), Some(stream), Some(sums)) => {
            let Some(values) = floats.into_gpu() else {
                return Ok(());
            };
            sums.sum(values, stream).map_err(|error| Interrupted {
                reason: error.to_string(),
            })
        }
        _ => on_host(device, floats, |floats| peers.sum(floats)),
    }
}

/// Lets the host work on floats that may lie on a device: on the spot, or on a copy that is brought back.
fn on_host<R>(device: &impl Device, mut floats: FloatsMut<'_>, work: impl FnOnce(&mut [f32]) -> R) -> R {
    if let Some(floats) = floats.host_mut() {
        return work(floats);
    }
    let mut copy = device.read(floats.floats());
    let result = work(&mut copy);
    device.assign(floats, Floats::from(&copy));
    result
}
