//! Attention of a decoder layer: the two kinds there are, and their projections.

use std::ops::Range;

use super::activations::{Activations, take};
use super::layer_config::{AttentionConfig, GroupedConfig, LatentConfig};
use super::linear::Linear;
use super::loader::LayerLoader;
use super::residents::Residence;
use super::rotation::Rotations;
use crate::device::{
    Attention, AttentionPlan, AttentionShape, Buffer, Device, FloatsMut, Matrix, MatrixMut, Pairing,
};

/// The attention of one layer, or a slice of its heads.
pub(super) struct AttentionBlock {
    /// Sizes of the slice.
    shape: AttentionShape,
    window: Option<usize>,
    softcap: Option<f32>,
    /// `[heads]`, or empty.
    sinks: Vec<f32>,
    rotation: Option<usize>,
    projections: Projections,
    output: Linear,
}

enum Projections {
    Grouped(Box<Grouped>),
    Latent(Box<Latent>),
}

struct Grouped {
    q: Linear,
    k: Linear,
    v: Linear,
    /// Weights of the norms of a head of queries and of keys.
    norms: Option<(Buffer, Buffer)>,
}

struct Latent {
    /// Towards the queries' latent, and its norm.
    query_latent: Option<(Linear, Buffer)>,
    queries: Linear,
    /// Towards the latent of keys and values and the rotated part of the keys.
    kv_latent: Linear,
    kv_norm: Buffer,
    keys_and_values: Linear,
    nope_dim: usize,
    rope_dim: usize,
}

impl AttentionBlock {
    pub(super) fn new(
        loader: &LayerLoader<'_, '_>,
        config: &AttentionConfig,
        hidden: usize,
        rotations: &mut Rotations,
    ) -> Self {
        match config {
            AttentionConfig::Grouped(grouped) => Self::grouped(loader, config, grouped, hidden, rotations),
            AttentionConfig::Latent(latent) => Self::latent(loader, config, latent, hidden, rotations),
        }
    }

    fn grouped(
        loader: &LayerLoader<'_, '_>,
        whole: &AttentionConfig,
        config: &GroupedConfig,
        hidden: usize,
        rotations: &mut Rotations,
    ) -> Self {
        let GroupedConfig {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *config;
        let (own, own_kv) = own_heads(loader, heads, kv_heads);
        let [rows, kv_rows] = [&own, &own_kv].map(|range| range.start * head_dim..range.end * head_dim);
        let (query_width, key_width) = (heads * head_dim, kv_heads * head_dim);
        let [q, k, v] = if config.fused {
            let outputs = query_width + 2 * key_width;
            let share = (rows.len() + 2 * kv_rows.len()) as f64 / outputs as f64;
            let stored = loader.matrix("self_attn.qkv_proj", outputs, hidden, share);
            let from = |start: usize, range: &Range<usize>| {
                stored.part(start + range.start..start + range.end, 0..hidden)
            };
            [
                from(0, &rows),
                from(query_width, &kv_rows),
                from(query_width + key_width, &kv_rows),
            ]
        } else {
            let project = |part: &str, width: usize, range: &Range<usize>| {
                loader.outputs(part, width, hidden, range.clone(), config.qkv_bias)
            };
            [
                project("self_attn.q_proj", query_width, &rows),
                project("self_attn.k_proj", key_width, &kv_rows),
                project("self_attn.v_proj", key_width, &kv_rows),
            ]
        };
        let norms = config.qk_norm.then(|| {
            (
                loader.norm("self_attn.q_norm", head_dim),
                loader.norm("self_attn.k_norm", head_dim),
            )
        });
        let sinks = if config.sinks {
            let whole = loader.vector("self_attn.sinks", heads);
            whole.get(own.clone()).unwrap_or_default().to_vec()
        } else {
            Vec::new()
        };
        Self {
            shape: AttentionShape {
                heads: own.len(),
                kv_heads: own_kv.len(),
                ..whole.shape()
            },
            window: config.window,
            softcap: config.softcap,
            sinks,
            rotation: config
                .rope
                .as_ref()
                .map(|rope| rotations.index_of(rope, 0, Pairing::Halves)),
            projections: Projections::Grouped(Box::new(Grouped { q, k, v, norms })),
            output: loader.inputs("self_attn.o_proj", hidden, query_width, rows, config.output_bias),
        }
    }

    fn latent(
        loader: &LayerLoader<'_, '_>,
        whole: &AttentionConfig,
        config: &LatentConfig,
        hidden: usize,
        rotations: &mut Rotations,
    ) -> Self {
        let LatentConfig {
            heads,
            kv_rank,
            nope_dim,
            rope_dim,
            value_dim,
            bias,
            ..
        } = *config;
        let (own, _) = own_heads(loader, heads, heads);
        let of_heads = |width: usize| own.start * width..own.end * width;
        let head_dim = nope_dim + rope_dim;
        let (query_latent, queries) = match config.query_rank {
            Some(rank) => (
                Some((
                    loader.whole("self_attn.q_a_proj", rank, hidden, bias),
                    loader.norm("self_attn.q_a_layernorm", rank),
                )),
                loader.outputs(
                    "self_attn.q_b_proj",
                    heads * head_dim,
                    rank,
                    of_heads(head_dim),
                    false,
                ),
            ),
            None => (
                None,
                loader.outputs(
                    "self_attn.q_proj",
                    heads * head_dim,
                    hidden,
                    of_heads(head_dim),
                    false,
                ),
            ),
        };
        let kv_width = nope_dim + value_dim;
        let latent = Latent {
            query_latent,
            queries,
            kv_latent: loader.whole("self_attn.kv_a_proj_with_mqa", kv_rank + rope_dim, hidden, bias),
            kv_norm: loader.norm("self_attn.kv_a_layernorm", kv_rank),
            keys_and_values: loader.outputs(
                "self_attn.kv_b_proj",
                heads * kv_width,
                kv_rank,
                of_heads(kv_width),
                false,
            ),
            nope_dim,
            rope_dim,
        };
        Self {
            shape: AttentionShape {
                heads: own.len(),
                kv_heads: own.len(),
                ..whole.shape()
            },
            window: None,
            softcap: None,
            sinks: Vec::new(),
            rotation: Some(rotations.index_of(&config.rope, nope_dim, config.pairing)),
            projections: Projections::Latent(Box::new(latent)),
            output: loader.inputs(
                "self_attn.o_proj",
                hidden,
                heads * value_dim,
                of_heads(value_dim),
                bias,
            ),
        }
    }

    /// Takes vectors and matrices to where they are to be.
    pub(super) fn place(&mut self, to: &mut impl Residence) {
        match &mut self.projections {
            Projections::Grouped(grouped) => {
                let Grouped { q, k, v, norms } = &mut **grouped;
                [q, k, v].into_iter().for_each(|linear| linear.place(to));
                let norms = norms.iter_mut().flat_map(|(q, k)| [q, k]);
                norms.for_each(|norm| to.vector(norm));
            }
            Projections::Latent(latent) => {
                if let Some((linear, norm)) = &mut latent.query_latent {
                    linear.place(to);
                    to.vector(norm);
                }
                let linears = [
                    &mut latent.queries,
                    &mut latent.kv_latent,
                    &mut latent.keys_and_values,
                ];
                linears.into_iter().for_each(|linear| linear.place(to));
                to.vector(&mut latent.kv_norm);
            }
        }
        self.output.place(to);
    }

    /// Sizes of the slice.
    pub(super) fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// Tokens that a query sees; `None` is all.
    pub(super) fn window(&self) -> Option<usize> {
        self.window
    }

    /// What the device's attention needs to know besides its operands.
    pub(super) fn call<'a>(&'a self, plan: &'a AttentionPlan) -> Attention<'a> {
        Attention {
            sinks: &self.sinks,
            softcap: self.softcap,
            ..Attention::plain(self.shape, plan)
        }
    }

    /// Rotated queries and keys, and values, from `input` `[rows, H]`: left in `q`, `k` and `v` of `activations`.
    pub(super) fn project(
        &self,
        device: &impl Device,
        activations: &mut Activations,
        input: Matrix<'_>,
        eps: f32,
        rotations: &Rotations,
        positions: &[u32],
    ) {
        let rows = input.rows();
        let shape = self.shape;
        let Activations {
            q, k, v, raw, rstd, ..
        } = activations;
        let mut q = take(device, q, "q", rows * shape.query_width());
        let mut k = take(device, k, "k", rows * shape.key_width());
        let mut v = take(device, v, "v", rows * shape.value_width());
        match &self.projections {
            Projections::Grouped(grouped) => {
                let Grouped {
                    q: queries,
                    k: keys,
                    v: values,
                    norms,
                } = &**grouped;
                values.apply(device, input, v.reborrow(), false);
                let places = [
                    (queries, q.reborrow(), shape.heads),
                    (keys, k.reborrow(), shape.kv_heads),
                ];
                for (which, (linear, out, heads)) in places.into_iter().enumerate() {
                    let Some((query_norm, key_norm)) = norms else {
                        linear.apply(device, input, out, false);
                        continue;
                    };
                    let (heads, dim) = (rows * heads, shape.head_dim);
                    let mut raw = take(device, raw, "raw", heads * dim);
                    linear.apply(device, input, raw.reborrow(), false);
                    let weight = if which == 0 { query_norm } else { key_norm };
                    device.rms_norm(
                        Matrix::new(&raw, heads, dim),
                        weight.floats(),
                        eps,
                        MatrixMut::new(out, heads, dim),
                        take(device, rstd, "rstd", heads),
                    );
                }
            }
            Projections::Latent(latent) => {
                latent.project(
                    device,
                    shape,
                    input,
                    eps,
                    [q, k, v],
                    [raw, rstd, &mut activations.latent],
                );
            }
        }
        if let Some(index) = self.rotation {
            rotations.rotate(
                device,
                index,
                activations.q.part_mut(0..rows * shape.query_width()),
                shape.head_dim,
                positions,
            );
            rotations.rotate(
                device,
                index,
                activations.k.part_mut(0..rows * shape.key_width()),
                shape.head_dim,
                positions,
            );
        }
    }

    /// The output projection of `attended` `[rows, heads · value_dim]`.
    pub(super) fn output(&self) -> &Linear {
        &self.output
    }
}

impl Latent {
    fn project(
        &self,
        device: &impl Device,
        shape: AttentionShape,
        input: Matrix<'_>,
        eps: f32,
        [mut q, mut k, mut v]: [FloatsMut<'_>; 3],
        [raw, rstd, latent]: [&mut Buffer; 3],
    ) {
        let rows = input.rows();
        let mut rstd = take(device, rstd, "rstd", rows);
        match &self.query_latent {
            Some((linear, weight)) => {
                let rank = linear.outputs();
                let mut raw = take(device, raw, "raw", rows * rank);
                linear.apply(device, input, raw.reborrow(), false);
                let mut normed = take(device, latent, "latent", rows * rank);
                let (x, y) = (
                    Matrix::new(&raw, rows, rank),
                    MatrixMut::new(&mut normed, rows, rank),
                );
                device.rms_norm(x, weight.floats(), eps, y, rstd.reborrow());
                self.queries
                    .apply(device, Matrix::new(&normed, rows, rank), q.reborrow(), false);
            }
            None => self.queries.apply(device, input, q.reborrow(), false),
        }
        let (rank, width) = (self.kv_norm.len(), self.kv_latent.outputs());
        let (value_dim, kv_width) = (shape.value_dim, self.keys_and_values.outputs());
        let buffer = take(device, raw, "raw", rows * (width + kv_width));
        let (mut compressed, mut expanded) = buffer.split_at(rows * width);
        self.kv_latent.apply(device, input, compressed.reborrow(), false);
        let mut normed = take(device, latent, "latent", rows * rank);
        let x = Matrix::strided(&compressed, rows, rank, width);
        device.rms_norm(
            x,
            self.kv_norm.floats(),
            eps,
            MatrixMut::new(&mut normed, rows, rank),
            rstd,
        );
        self.keys_and_values.apply(
            device,
            Matrix::new(&normed, rows, rank),
            expanded.reborrow(),
            false,
        );
        let head_width = self.nope_dim + value_dim;
        let (key_width, value_width) = (shape.key_width(), shape.value_width());
        for head in 0..shape.heads {
            let from = |start: usize, cols: usize| {
                Matrix::strided(expanded.floats().tail(start), rows, cols, kv_width)
            };
            let mut key = k.tail_mut(head * shape.head_dim);
            let nope = MatrixMut::strided(&mut key, rows, self.nope_dim, key_width);
            device.copy(from(head * head_width, self.nope_dim), nope);
            let rope = MatrixMut::strided(key.tail_mut(self.nope_dim), rows, self.rope_dim, key_width);
            device.copy(
                Matrix::strided(compressed.floats().tail(rank), rows, self.rope_dim, width),
                rope,
            );
            let value = MatrixMut::strided(v.tail_mut(head * value_dim), rows, value_dim, value_width);
            device.copy(from(head * head_width + self.nope_dim, value_dim), value);
        }
    }
}

/// The query heads and the key heads of this slice. Slices that share a key head hold it each.
fn own_heads(loader: &LayerLoader<'_, '_>, heads: usize, kv_heads: usize) -> (Range<usize>, Range<usize>) {
    let slices = usize::from(loader.shard().slices);
    let group = heads / kv_heads.max(1);
    let own = loader.shard().slice_of(heads, 1);
    let aligned = own.len().is_multiple_of(group) || group.is_multiple_of(own.len().max(1));
    if !heads.is_multiple_of(slices) || !aligned {
        loader.uncut(format!("{heads} query heads that share {kv_heads} key heads"));
        return (0..heads, 0..kv_heads);
    }
    let own_kv = own.start / group..own.end.div_ceil(group);
    (own, own_kv)
}
