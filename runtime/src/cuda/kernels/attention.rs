//! Attention forward and backward, and the tables that tell its blocks what to do.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::Kernels;
use crate::cuda::driver::{Context, CudaError};
use crate::cuda::matrix::count;
use crate::cuda::memory::{Buffer, View, ViewMut};
use crate::cuda::module::Shape;
use crate::cuda::programs::Program;
use crate::cuda::stream::Stream;
use crate::device::{AttentionPlan, AttentionShape};

/// Threads of a block, as in the kernels' text.
const THREADS: u32 = 128;
/// Rows of threads, as in the kernels' text.
const ROWS: usize = 16;
/// Keys of a tile of the forward pass, as in the kernels' text.
const TILE_KEYS: usize = 32;

/// Queries of a tile of the forward pass.
fn tile_queries(head_dim: usize, value_dim: usize) -> usize {
    if head_dim > 128 || value_dim > 128 {
        2 * ROWS
    } else {
        4 * ROWS
    }
}

/// Queries and keys of a tile of the backward pass.
fn back_tile(head_dim: usize) -> usize {
    if head_dim > 128 { ROWS } else { 2 * ROWS }
}

/// An [`AttentionPlan`] on a device: what each query sees, and the tiles of each kernel.
#[derive(Debug)]
pub struct AttentionTables {
    words: Buffer<u32>,
    shape: AttentionShape,
    queries: usize,
    keys: usize,
    forward: usize,
    backward_queries: usize,
    backward_keys: usize,
}

impl AttentionTables {
    /// Sends a plan to a device, for heads of the widths in `shape`.
    ///
    /// # Errors
    /// If the device has no room.
    ///
    /// # Panics
    /// If the heads are not a multiple of the key heads.
    pub fn new(
        context: &Arc<Context>,
        stream: &Stream,
        shape: AttentionShape,
        plan: &AttentionPlan,
    ) -> Result<Self, CudaError> {
        let mut tables = Self {
            words: Buffer::new(context, 0)?,
            shape,
            queries: 0,
            keys: 0,
            forward: 0,
            backward_queries: 0,
            backward_keys: 0,
        };
        tables.replace(context, stream, shape, plan)?;
        Ok(tables)
    }

    /// Makes them those of another plan, in the memory that they have. Kernels that were launched on `stream` before still
    /// see the old ones.
    ///
    /// # Errors
    /// If the device has no room.
    ///
    /// # Panics
    /// If the heads are not a multiple of the key heads.
    pub(in crate::cuda) fn replace(
        &mut self,
        context: &Arc<Context>,
        stream: &Stream,
        shape: AttentionShape,
        plan: &AttentionPlan,
    ) -> Result<(), CudaError> {
        assert!(
            shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
            "heads of an attention"
        );
        let forward = query_tiles(plan, tile_queries(shape.head_dim, shape.value_dim), TILE_KEYS);
        let back = back_tile(shape.head_dim);
        let backward_queries = query_tiles(plan, back, back);
        let backward_keys = key_tiles(plan, back);
        let visible = plan.visible.iter().flat_map(|keys| [keys.start, keys.end]);
        let words: Vec<u32> = visible
            .chain(
                [&forward, &backward_queries, &backward_keys]
                    .into_iter()
                    .flatten()
                    .flatten()
                    .copied(),
            )
            .collect();
        if self.words.len() < words.len() {
            self.words = Buffer::new(context, words.len().next_power_of_two())?;
        }
        stream.send(&words, self.words.view_mut().part(0..words.len()))?;
        (self.shape, self.queries, self.keys) = (shape, plan.queries(), plan.keys());
        self.forward = forward.len();
        self.backward_queries = backward_queries.len();
        self.backward_keys = backward_keys.len();
        Ok(())
    }

    /// The sizes they are for.
    pub(in crate::cuda) fn shape(&self) -> AttentionShape {
        self.shape
    }

    fn visible(&self) -> View<'_, u32> {
        self.words.view().part(0..2 * self.queries)
    }

    fn tiles(&self, before: usize, tiles: usize) -> View<'_, u32> {
        let start = 2 * self.queries + 4 * before;
        self.words.view().part(start..start + 4 * tiles)
    }
}

/// First query, queries, first key, end of the keys. Key tiles are counted from the document on, whatever the window
/// hides, so that a query's keys are grouped alike in every tile.
fn query_tiles(plan: &AttentionPlan, queries: usize, keys: usize) -> Vec<[u32; 4]> {
    let mut tiles = Vec::new();
    for block in &plan.query_blocks {
        for first in block.queries.clone().step_by(queries) {
            let end = (first + queries).min(block.queries.end);
            let (start, stop) = (plan.visible[first].start, plan.visible[end - 1].end);
            let hidden = (start as usize - block.document) / keys * keys;
            tiles.push([
                count(first),
                count(end - first),
                count(block.document + hidden),
                stop,
            ]);
        }
    }
    tiles
}

/// First key, keys, first query that sees any of them, end of these queries.
fn key_tiles(plan: &AttentionPlan, keys: usize) -> Vec<[u32; 4]> {
    let mut tiles = Vec::new();
    for block in &plan.key_blocks {
        let seen_by = &plan.query_blocks[block.blocks.clone()];
        let (Some(first), Some(last)) = (seen_by.first(), seen_by.last()) else {
            continue;
        };
        for start in block.keys.clone().step_by(keys) {
            let end = (start + keys).min(block.keys.end);
            tiles.push([
                count(start),
                count(end - start),
                count(first.queries.start),
                count(last.queries.end),
            ]);
        }
    }
    tiles
}

/// Operands of an attention on a device; shapes as in [`crate::device::AttentionInputs`].
#[derive(Clone, Copy, Debug)]
pub struct AttentionOperands<'a> {
    /// `[queries, heads · head_dim]`.
    pub q: View<'a, f32>,
    /// `[keys, kv_heads · head_dim]`.
    pub k: View<'a, f32>,
    /// `[keys, kv_heads · value_dim]`.
    pub v: View<'a, f32>,
    /// `[diagonals, queries, kv_heads · head_dim]`.
    pub k_diagonal: View<'a, f32>,
    /// `[diagonals, queries, kv_heads · value_dim]`.
    pub v_diagonal: View<'a, f32>,
    /// Diagonal keys of a query.
    pub diagonals: usize,
}

impl AttentionOperands<'_> {
    #[track_caller]
    fn check(&self, tables: &AttentionTables) {
        let shape = tables.shape;
        let diagonals = self.diagonals * tables.queries;
        assert_eq!(
            (self.q.len(), self.k.len(), self.v.len()),
            (
                tables.queries * shape.query_width(),
                tables.keys * shape.key_width(),
                tables.keys * shape.value_width()
            ),
            "shapes of an attention"
        );
        assert!(
            self.k_diagonal.len() >= diagonals * shape.key_width()
                && self.v_diagonal.len() >= diagonals * shape.value_width(),
            "shapes of an attention"
        );
    }
}

impl Kernels {
    /// Softmax attention: `out` `[queries, heads · value_dim]`, and the log of each softmax's denominator, `lse`
    /// `[queries, heads]`. `sinks` `[heads]` may be empty.
    ///
    /// # Errors
    /// If the kernels for these widths do not compile, or the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    #[allow(clippy::too_many_arguments)]
    pub fn attention(
        &self,
        stream: &Stream,
        tables: &AttentionTables,
        inputs: &AttentionOperands<'_>,
        sinks: View<'_, f32>,
        softcap: Option<f32>,
        out: ViewMut<'_, f32>,
        lse: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        inputs.check(tables);
        let shape = tables.shape;
        assert_eq!(
            (out.len(), lse.len()),
            (
                tables.queries * shape.output_width(),
                tables.queries * shape.heads
            ),
            "shapes of an attention"
        );
        assert!(sinks.is_empty() || sinks.len() == shape.heads, "one sink a head");
        let rows = tile_queries(shape.head_dim, shape.value_dim);
        let pitch = shape.head_dim.max(shape.value_dim) + 1;
        let shared = rows * (shape.head_dim + 1) + TILE_KEYS * pitch + rows * (TILE_KEYS + 1);
        let launch = Shape {
            grid: [count(tables.forward), count(shape.heads), 1],
            threads: THREADS,
            shared_bytes: count(shared * size_of::<f32>()),
        };
        let tiles = tables.tiles(0, tables.forward);
        let cap = softcap.unwrap_or(0.0);
        let (queries, heads, kv_heads, diagonals) = (
            count(tables.queries),
            count(shape.heads),
            count(shape.kv_heads),
            count(inputs.diagonals),
        );
        // SAFETY: checked above; the tables' numbers are those of the plan, whose queries and keys the operands have.
        unsafe {
            self.launch(
                stream,
                (program(shape), "attention_forward"),
                launch,
                &[
                    &inputs.q,
                    &inputs.k,
                    &inputs.v,
                    &inputs.k_diagonal,
                    &inputs.v_diagonal,
                    &tables.visible(),
                    &tiles,
                    &sinks,
                    &cap,
                    &shape.scale,
                    &queries,
                    &heads,
                    &kv_heads,
                    &diagonals,
                    &out,
                    &lse,
                ],
            )
        }
    }

    /// Backward of [`Kernels::attention`] without sinks and cap, for heads of one width. `gradients`: `dq` is written,
    /// `dk`, `dv`, `dk_diagonal`, `dv_diagonal` are added to; `delta` `[queries, heads]` is scratch.
    ///
    /// # Errors
    /// If the kernels for these widths do not compile, or a launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    #[allow(clippy::too_many_arguments)]
    pub fn attention_backward(
        &self,
        stream: &Stream,
        tables: &AttentionTables,
        inputs: &AttentionOperands<'_>,
        lse: View<'_, f32>,
        dout: View<'_, f32>,
        gradients: [ViewMut<'_, f32>; 5],
        delta: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        inputs.check(tables);
        let shape = tables.shape;
        let [dq, dk, dv, dk_diagonal, dv_diagonal] = gradients;
        assert_eq!(
            shape.head_dim, shape.value_dim,
            "only a draft's attention has a backward pass"
        );
        let statistics = tables.queries * shape.heads;
        assert_eq!(
            (dout.len(), dq.len(), dk.len(), dv.len()),
            (inputs.q.len(), inputs.q.len(), inputs.k.len(), inputs.v.len()),
            "shapes of an attention"
        );
        assert_eq!(
            (lse.len(), delta.len()),
            (statistics, statistics),
            "shapes of an attention"
        );
        let diagonal_len = inputs.diagonals * tables.queries * shape.key_width();
        assert!(
            dk_diagonal.len() >= diagonal_len && dv_diagonal.len() >= diagonal_len,
            "shapes of an attention"
        );
        let (rows, pitch) = (back_tile(shape.head_dim), shape.head_dim + 1);
        let four_tiles = 4 * rows * pitch;
        let launch = |tiles: usize, score_tiles: usize| Shape {
            grid: [count(tiles), count(shape.kv_heads), 1],
            threads: THREADS,
            shared_bytes: count((four_tiles + score_tiles * rows * (rows + 1)) * size_of::<f32>()),
        };
        let (queries, heads, kv_heads, diagonals) = (
            count(tables.queries),
            count(shape.heads),
            count(shape.kv_heads),
            count(inputs.diagonals),
        );
        let query_tiles = tables.tiles(tables.forward, tables.backward_queries);
        let key_tiles = tables.tiles(tables.forward + tables.backward_queries, tables.backward_keys);
        // SAFETY: checked above; the tables' numbers are those of the plan, whose queries and keys the operands have.
        unsafe {
            self.launch(
                stream,
                (program(shape), "attention_backward_queries"),
                launch(tables.backward_queries, 1),
                &[
                    &inputs.q,
                    &inputs.k,
                    &inputs.v,
                    &inputs.k_diagonal,
                    &inputs.v_diagonal,
                    &tables.visible(),
                    &query_tiles,
                    &lse,
                    &dout,
                    &shape.scale,
                    &queries,
                    &heads,
                    &kv_heads,
                    &diagonals,
                    &dq,
                    &dk_diagonal,
                    &dv_diagonal,
                    &delta,
                ],
            )?;
            self.launch(
                stream,
                (program(shape), "attention_backward_keys"),
                launch(tables.backward_keys, 2),
                &[
                    &inputs.q,
                    &inputs.k,
                    &inputs.v,
                    &tables.visible(),
                    &key_tiles,
                    &lse,
                    &delta,
                    &dout,
                    &shape.scale,
                    &heads,
                    &kv_heads,
                    &dk,
                    &dv,
                ],
            )
        }
    }
}

fn program(shape: AttentionShape) -> Program {
    Program::Attention {
        head_dim: count(shape.head_dim),
        value_dim: count(shape.value_dim),
    }
}
