//! The decoder that all families share, over any device.
//!
//! Pre-norm residual layers: attention with rotary positions and grouped keys, then a gated MLP (the Llama layer of
//! Touvron et al. 2023). Where keys and values come from is the caller's: a row's own, or a cache.

use super::files::layer_tensor;
use super::linear::Linear;
use super::{VerifierConfig, VerifierFiles};
use crate::device::{AttentionShape, Device, Matrix, MatrixMut, RotaryTable, Turn};
use crate::weights::WeightsError;

/// Weights of one layer.
struct Layer {
    input_norm: Vec<f32>,
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    mlp_norm: Vec<f32>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(files: &VerifierFiles, index: usize) -> Result<Self, WeightsError> {
        let stored = |part: &str| files.weights().tensor(&layer_tensor(index, part));
        let linear = |part: &str| Linear::new(stored(part)?);
        let norm = |part: &str| Ok::<_, WeightsError>(stored(part)?.to_f32()?.into_owned());
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            q: linear("self_attn.q_proj")?,
            k: linear("self_attn.k_proj")?,
            v: linear("self_attn.v_proj")?,
            o: linear("self_attn.o_proj")?,
            mlp_norm: norm("post_attention_layernorm")?,
            gate: linear("mlp.gate_proj")?,
            up: linear("mlp.up_proj")?,
            down: linear("mlp.down_proj")?,
        })
    }
}

/// Rotated queries and keys, and values of one layer, and where its attention goes.
pub(super) struct Attending<'a> {
    /// `[tokens, heads · head_dim]`.
    pub(super) q: &'a [f32],
    /// `[tokens, kv_heads · head_dim]`.
    pub(super) k: &'a [f32],
    /// `[tokens, kv_heads · head_dim]`.
    pub(super) v: &'a [f32],
    /// `[tokens, heads · head_dim]`, to be written.
    pub(super) out: &'a mut [f32],
    /// `[tokens, heads]`, scratch.
    pub(super) lse: &'a mut [f32],
}

/// Activations of one forward pass. They grow to the longest pass and stay allocated.
#[derive(Default)]
pub(super) struct Activations {
    residual: Vec<f32>,
    normed: Vec<f32>,
    rstd: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    lse: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    gated: Vec<f32>,
    head_input: Vec<f32>,
}

/// The first `len` elements of a buffer that grows as needed.
fn take(buffer: &mut Vec<f32>, len: usize) -> &mut [f32] {
    if buffer.len() < len {
        buffer.resize(len, 0.0);
    }
    &mut buffer[..len]
}

/// Embedding, layers, final norm and head.
pub(super) struct Decoder {
    config: VerifierConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `None` where the head is the embedding.
    untied_head: Option<Linear>,
}

impl Decoder {
    /// Takes the tensors of files that passed [`VerifierFiles::check`].
    pub(super) fn new(files: &VerifierFiles) -> Result<Self, WeightsError> {
        let config = files.config().clone();
        Ok(Self {
            embedding: Linear::new(files.embedding()?)?,
            layers: (0..config.layers)
                .map(|index| Layer::new(files, index))
                .collect::<Result<_, _>>()?,
            final_norm: files.final_norm()?,
            untied_head: if config.tied_embeddings {
                None
            } else {
                Some(Linear::new(files.head()?)?)
            },
            config,
        })
    }

    /// Its configuration.
    pub(super) fn config(&self) -> &VerifierConfig {
        &self.config
    }

    /// The embedding, `[V, H]`.
    pub(super) fn embedding(&self) -> &Linear {
        &self.embedding
    }

    /// The head, `[V, H]`.
    pub(super) fn head(&self) -> &Linear {
        self.untied_head.as_ref().unwrap_or(&self.embedding)
    }

    /// Weight of the final norm, `[H]`.
    pub(super) fn final_norm(&self) -> &[f32] {
        &self.final_norm
    }

    /// Sizes of the attention.
    pub(super) fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            scale: (self.config.head_dim as f32).sqrt().recip(),
        }
    }

    /// Runs all layers over `tokens` at `positions`, `[tokens]` each.
    ///
    /// `attend` computes the attention of a layer. `entering` sees the residual stream `[tokens, H]` before each layer,
    /// and once more, with the number of layers, after the last one; its error ends the pass.
    pub(super) fn forward<E>(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        rotary: &RotaryTable,
        (tokens, positions): (&[u32], &[u32]),
        mut attend: impl FnMut(usize, Attending<'_>),
        mut entering: impl FnMut(u32, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (rows, hidden, eps) = (tokens.len(), self.config.hidden_size, self.config.rms_norm_eps);
        let shape = self.attention_shape();
        let (query_width, key_width) = (shape.query_width(), shape.key_width());
        let inner = self.config.intermediate_size;

        let residual = take(&mut activations.residual, rows * hidden);
        let normed = take(&mut activations.normed, rows * hidden);
        let rstd = take(&mut activations.rstd, rows);
        let q = take(&mut activations.q, rows * query_width);
        let k = take(&mut activations.k, rows * key_width);
        let v = take(&mut activations.v, rows * key_width);
        let attended = take(&mut activations.attended, rows * query_width);
        let lse = take(&mut activations.lse, rows * shape.heads);
        let gate = take(&mut activations.gate, rows * inner);
        let up = take(&mut activations.up, rows * inner);
        let gated = take(&mut activations.gated, rows * inner);

        self.embedding
            .gather(device, tokens, MatrixMut::new(residual, rows, hidden));
        for (index, layer) in self.layers.iter().enumerate() {
            entering(index as u32, residual)?;

            let stream = Matrix::new(residual, rows, hidden);
            device.rms_norm(
                stream,
                &layer.input_norm,
                eps,
                MatrixMut::new(normed, rows, hidden),
                rstd,
            );
            let input = Matrix::new(normed, rows, hidden);
            layer
                .q
                .apply(device, input, MatrixMut::new(q, rows, query_width), false);
            layer
                .k
                .apply(device, input, MatrixMut::new(k, rows, key_width), false);
            layer
                .v
                .apply(device, input, MatrixMut::new(v, rows, key_width), false);
            device.rotate(q, shape.head_dim, rotary, positions, Turn::Forward);
            device.rotate(k, shape.head_dim, rotary, positions, Turn::Forward);
            attend(
                index,
                Attending {
                    q,
                    k,
                    v,
                    out: attended,
                    lse,
                },
            );
            let input = Matrix::new(attended, rows, query_width);
            layer
                .o
                .apply(device, input, MatrixMut::new(residual, rows, hidden), true);

            let stream = Matrix::new(residual, rows, hidden);
            device.rms_norm(
                stream,
                &layer.mlp_norm,
                eps,
                MatrixMut::new(normed, rows, hidden),
                rstd,
            );
            let input = Matrix::new(normed, rows, hidden);
            layer
                .gate
                .apply(device, input, MatrixMut::new(gate, rows, inner), false);
            layer
                .up
                .apply(device, input, MatrixMut::new(up, rows, inner), false);
            device.swiglu(gate, up, gated);
            let input = Matrix::new(gated, rows, inner);
            layer
                .down
                .apply(device, input, MatrixMut::new(residual, rows, hidden), true);
        }
        entering(self.layers.len() as u32, residual)
    }

    /// Final norm `[rows, H]` and logits `[rows, V]` of some tokens of the last forward pass.
    pub(super) fn logits(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        tokens: &[u32],
        normed: &mut Vec<f32>,
        logits: &mut Vec<f32>,
    ) {
        let (rows, hidden, vocab) = (tokens.len(), self.config.hidden_size, self.config.vocab_size);
        let passed = activations.residual.len() / hidden;
        let stream = Matrix::new(&activations.residual, passed, hidden);
        let picked = take(&mut activations.head_input, rows * hidden);
        device.gather(stream, tokens, MatrixMut::new(picked, rows, hidden));
        let normed = take(normed, rows * hidden);
        let rstd = take(&mut activations.rstd, rows);
        let eps = self.config.rms_norm_eps;
        device.rms_norm(
            Matrix::new(picked, rows, hidden),
            &self.final_norm,
            eps,
            MatrixMut::new(normed, rows, hidden),
            rstd,
        );
        let input = Matrix::new(normed, rows, hidden);
        self.head().apply(
            device,
            input,
            MatrixMut::new(take(logits, rows * vocab), rows, vocab),
            false,
        );
    }
}
