//! Attention on the CPU: blocks of queries forward, blocks of queries and then of keys backward.
//!
//! Scores exist for one block at a time and are computed again in the backward pass, so memory is linear in tokens.

use std::ops::Range;

use rayon::prelude::*;

use super::gemm::gemm_serial;
use super::scratch::with_scratch;
use super::simd;
use crate::device::attention::QueryBlock;
use crate::device::{Attention, AttentionGradients, AttentionInputs, Matrix, MatrixMut};

fn check(attention: &Attention<'_>, inputs: &AttentionInputs<'_>) {
    let (shape, plan) = (attention.shape, attention.plan);
    assert!(
        shape.kv_heads > 0 && shape.heads.is_multiple_of(shape.kv_heads),
        "heads of an attention"
    );
    assert_eq!(
        (inputs.q.len(), inputs.k.len(), inputs.v.len()),
        (
            plan.queries() * shape.query_width(),
            plan.keys() * shape.key_width(),
            plan.keys() * shape.value_width()
        ),
        "shapes of an attention"
    );
    let diagonals = attention.diagonals * plan.queries();
    assert!(
        inputs.k_diagonal.len() >= diagonals * shape.key_width()
            && inputs.v_diagonal.len() >= diagonals * shape.value_width(),
        "shapes of an attention"
    );
    assert!(
        attention.sinks.is_empty() || attention.sinks.len() == shape.heads,
        "one sink a head"
    );
}

/// Cuts `buffer` `[rows, width]` at the plan's query blocks.
fn by_query_block<'a>(blocks: &[QueryBlock], mut buffer: &'a mut [f32], width: usize) -> Vec<&'a mut [f32]> {
    let cut = |block: &QueryBlock| {
        let (part, rest) = std::mem::take(&mut buffer).split_at_mut(block.queries.len() * width);
        buffer = rest;
        part
    };
    blocks.iter().map(cut).collect()
}

/// Columns of one head of rows `from..from + rows`.
fn head<'a>(data: &'a [f32], from: usize, rows: usize, head: usize, dim: usize, width: usize) -> Matrix<'a> {
    let start = (from * width + head * dim).min(data.len());
    Matrix::strided(&data[start..], rows, dim, width)
}

pub(super) fn forward(
    attention: &Attention<'_>,
    inputs: &AttentionInputs<'_>,
    out: &mut [f32],
    lse: &mut [f32],
) {
    check(attention, inputs);
    let (shape, plan) = (attention.shape, attention.plan);
    let (heads, dim, width, kv_width) = (
        shape.heads,
        shape.head_dim,
        shape.query_width(),
        shape.key_width(),
    );
    let (value_dim, value_width, out_width) = (shape.value_dim, shape.value_width(), shape.output_width());
    assert_eq!(
        (out.len(), lse.len()),
        (plan.queries() * out_width, plan.queries() * heads),
        "shapes of an attention"
    );
    let blocks = &plan.query_blocks;
    let outs = by_query_block(blocks, out, out_width);
    let lses = by_query_block(blocks, lse, heads);
    blocks
        .par_iter()
        .zip(outs)
        .zip(lses)
        .for_each(|((block, out), lse)| {
            let (rows, keys, first) = (block.queries.len(), block.keys.len(), block.queries.start);
            with_scratch([rows * keys, attention.diagonals], |[scores, extra]| {
                for h in 0..heads {
                    let g = h / (heads / shape.kv_heads);
                    let q = head(inputs.q, first, rows, h, dim, width);
                    let k = head(inputs.k, block.keys.start, keys, g, dim, kv_width);
                    gemm_serial(
                        MatrixMut::new(scores, rows, keys),
                        q,
                        k.transposed(),
                        shape.scale,
                        false,
                    );
                    let sink = attention.sinks.get(h).copied();
                    for r in 0..rows {
                        let query = first + r;
                        let row = &mut scores[r * keys..][..keys];
                        let seen = local(&plan.visible[query], block.keys.start);
                        if let Some(cap) = attention.softcap {
                            simd::softcap(&mut row[seen.clone()], cap);
                        }
                        let mut top = simd::max(&row[seen.clone()]);
                        if let Some(sink) = sink {
                            top = top.max(sink);
                        }
                        for (j, extra) in extra.iter_mut().enumerate() {
                            let k = diagonal(inputs.k_diagonal, plan.queries(), j, query, g, dim, kv_width);
                            *extra = simd::dot(q.row(r), k) * shape.scale;
                            top = top.max(*extra);
                        }
                        row[..seen.start].fill(0.0);
                        row[seen.end..].fill(0.0);
                        let mut sum = simd::exp_sum(&mut row[seen.clone()], 1.0, top);
                        sum += simd::exp_sum(extra, 1.0, top);
                        if let Some(sink) = sink {
                            sum += (sink - top).exp();
                        }
                        lse[r * heads + h] = top + sum.ln();
                        simd::scale(&mut row[seen], 1.0 / sum);
                        simd::scale(extra, 1.0 / sum);
                        let out = &mut out[r * out_width + h * value_dim..][..value_dim];
                        out.fill(0.0);
                        for (j, &p) in extra.iter().enumerate() {
                            let v = diagonal(
                                inputs.v_diagonal,
                                plan.queries(),
                                j,
                                query,
                                g,
                                value_dim,
                                value_width,
                            );
                            simd::axpy(p, v, out);
                        }
                    }
                    let v = head(inputs.v, block.keys.start, keys, g, value_dim, value_width);
                    let out = MatrixMut::strided(&mut out[h * value_dim..], rows, value_dim, out_width);
                    gemm_serial(out, Matrix::new(scores, rows, keys), v, 1.0, true);
                }
            });
        });
}

/// A query's visible keys, counted from the block's first key.
fn local(visible: &Range<u32>, first_key: usize) -> Range<usize> {
    visible.start as usize - first_key..visible.end as usize - first_key
}

fn diagonal(
    data: &[f32],
    queries: usize,
    step: usize,
    query: usize,
    head: usize,
    dim: usize,
    width: usize,
) -> &[f32] {
    &data[(step * queries + query) * width + head * dim..][..dim]
}

pub(super) fn backward(
    attention: &Attention<'_>,
    inputs: &AttentionInputs<'_>,
    lse: &[f32],
    dout: &[f32],
    gradients: AttentionGradients<'_>,
) {
    check(attention, inputs);
    let (shape, plan) = (attention.shape, attention.plan);
    let (queries, heads) = (plan.queries(), shape.heads);
    assert!(
        shape.value_dim == shape.head_dim && attention.sinks.is_empty() && attention.softcap.is_none(),
        "only a draft's attention has a backward pass"
    );
    assert_eq!(
        (dout.len(), gradients.dq.len()),
        (inputs.q.len(), inputs.q.len()),
        "shapes of an attention"
    );
    assert_eq!(
        (gradients.dk.len(), gradients.dv.len()),
        (inputs.k.len(), inputs.v.len()),
        "shapes of an attention"
    );
    assert_eq!(lse.len(), queries * heads, "shapes of an attention");
    let pass = Backward {
        attention,
        inputs,
        lse,
        dout,
    };
    with_scratch([queries * heads], |[delta]| {
        pass.queries(gradients.dq, gradients.dk_diagonal, gradients.dv_diagonal, delta);
        pass.keys(gradients.dk, gradients.dv, delta);
    });
}

struct Backward<'a> {
    attention: &'a Attention<'a>,
    inputs: &'a AttentionInputs<'a>,
    lse: &'a [f32],
    dout: &'a [f32],
}

impl Backward<'_> {
    /// Probabilities of queries `first..first + rows` against keys `keys` and their gradients, both `[rows, keys]`.
    fn probabilities(
        &self,
        (first, rows): (usize, usize),
        keys: Range<usize>,
        h: usize,
        probabilities: &mut [f32],
        gradients: &mut [f32],
    ) {
        let (shape, plan) = (self.attention.shape, self.attention.plan);
        let (heads, dim, width, kv_width) = (
            shape.heads,
            shape.head_dim,
            shape.query_width(),
            shape.key_width(),
        );
        let g = h / (heads / shape.kv_heads);
        let q = head(self.inputs.q, first, rows, h, dim, width);
        let dout = head(self.dout, first, rows, h, dim, width);
        let k = head(self.inputs.k, keys.start, keys.len(), g, dim, kv_width).transposed();
        let v = head(self.inputs.v, keys.start, keys.len(), g, dim, kv_width).transposed();
        gemm_serial(MatrixMut::new(probabilities, rows, keys.len()), q, k, 1.0, false);
        gemm_serial(MatrixMut::new(gradients, rows, keys.len()), dout, v, 1.0, false);
        for (r, row) in probabilities.chunks_exact_mut(keys.len()).enumerate() {
            let visible = &plan.visible[first + r];
            let start = (visible.start as usize).clamp(keys.start, keys.end) - keys.start;
            let end = (visible.end as usize).clamp(keys.start, keys.end) - keys.start;
            row[..start].fill(0.0);
            row[end.max(start)..].fill(0.0);
            if start < end {
                simd::exp_shifted(
                    &mut row[start..end],
                    shape.scale,
                    self.lse[(first + r) * heads + h],
                );
            }
        }
    }

    /// Gradients of queries and of their diagonal keys and values; leaves Σ p·dp of each query and head in `delta`.
    fn queries(&self, dq: &mut [f32], dk_diagonal: &mut [f32], dv_diagonal: &mut [f32], delta: &mut [f32]) {
        let (shape, plan, diagonals) = (
            self.attention.shape,
            self.attention.plan,
            self.attention.diagonals,
        );
        let (heads, dim, width, kv_width) = (
            shape.heads,
            shape.head_dim,
            shape.query_width(),
            shape.key_width(),
        );
        let (blocks, queries) = (&plan.query_blocks, plan.queries());
        let mut diagonal_parts: Vec<Vec<[&mut [f32]; 2]>> =
            blocks.iter().map(|_| Vec::with_capacity(diagonals)).collect();
        let step_width = (queries * kv_width).max(1);
        let steps = dk_diagonal
            .chunks_mut(step_width)
            .zip(dv_diagonal.chunks_mut(step_width));
        for (dk, dv) in steps.take(diagonals) {
            let (dk, dv) = (
                by_query_block(blocks, dk, kv_width),
                by_query_block(blocks, dv, kv_width),
            );
            for (block, (dk, dv)) in diagonal_parts.iter_mut().zip(dk.into_iter().zip(dv)) {
                block.push([dk, dv]);
            }
        }
        let rows_of = by_query_block(blocks, dq, width)
            .into_iter()
            .zip(by_query_block(blocks, delta, heads));
        let tasks: Vec<_> = blocks.iter().zip(rows_of).zip(diagonal_parts).collect();
        tasks
            .into_par_iter()
            .for_each(|((block, (dq, delta)), mut parts)| {
                let (rows, keys, first) = (block.queries.len(), block.keys.len(), block.queries.start);
                with_scratch(
                    [rows * keys, rows * keys, 2 * diagonals],
                    |[probabilities, gradients, extra]| {
                        let (extra_p, extra_d) = extra.split_at_mut(diagonals);
                        for h in 0..heads {
                            let g = h / (heads / shape.kv_heads);
                            self.probabilities(
                                (first, rows),
                                block.keys.clone(),
                                h,
                                probabilities,
                                gradients,
                            );
                            for r in 0..rows {
                                let query = first + r;
                                let q = &self.inputs.q[query * width + h * dim..][..dim];
                                let dout = &self.dout[query * width + h * dim..][..dim];
                                for j in 0..diagonals {
                                    let k =
                                        diagonal(self.inputs.k_diagonal, queries, j, query, g, dim, kv_width);
                                    let v =
                                        diagonal(self.inputs.v_diagonal, queries, j, query, g, dim, kv_width);
                                    (extra_p[j], extra_d[j]) = (simd::dot(q, k), simd::dot(dout, v));
                                }
                                simd::exp_shifted(extra_p, shape.scale, self.lse[query * heads + h]);
                                let (p, d) = (
                                    &probabilities[r * keys..][..keys],
                                    &mut gradients[r * keys..][..keys],
                                );
                                // A hidden key has p = 0, so whatever its gradient is, it drops out.
                                let sum = simd::dot(p, d) + simd::dot(extra_p, extra_d);
                                simd::softmax_backward(p, d, sum, shape.scale);
                                simd::softmax_backward(extra_p, extra_d, sum, shape.scale);
                                delta[r * heads + h] = sum;
                                let dq = &mut dq[r * width + h * dim..][..dim];
                                dq.fill(0.0);
                                for (j, [dk, dv]) in parts.iter_mut().enumerate() {
                                    let at = r * kv_width + g * dim..r * kv_width + (g + 1) * dim;
                                    let k =
                                        diagonal(self.inputs.k_diagonal, queries, j, query, g, dim, kv_width);
                                    simd::axpy(extra_d[j], k, dq);
                                    simd::axpy(extra_d[j], q, &mut dk[at.clone()]);
                                    simd::axpy(extra_p[j], dout, &mut dv[at]);
                                }
                            }
                            let k = head(self.inputs.k, block.keys.start, keys, g, dim, kv_width);
                            let dq = MatrixMut::strided(&mut dq[h * dim..], rows, dim, width);
                            gemm_serial(dq, Matrix::new(gradients, rows, keys), k, 1.0, true);
                        }
                    },
                );
            });
    }

    /// Gradients of the keys and values that are shared by many queries.
    fn keys(&self, dk: &mut [f32], dv: &mut [f32], delta: &[f32]) {
        let (shape, plan) = (self.attention.shape, self.attention.plan);
        let (heads, dim, width, kv_width) = (
            shape.heads,
            shape.head_dim,
            shape.query_width(),
            shape.key_width(),
        );
        let (mut dk_rest, mut dv_rest, mut at) = (dk, dv, 0);
        let mut tasks = Vec::with_capacity(plan.key_blocks.len());
        for block in &plan.key_blocks {
            let (skip, take) = ((block.keys.start - at) * kv_width, block.keys.len() * kv_width);
            let (dk, dk_after) = std::mem::take(&mut dk_rest)[skip..].split_at_mut(take);
            let (dv, dv_after) = std::mem::take(&mut dv_rest)[skip..].split_at_mut(take);
            (dk_rest, dv_rest, at) = (dk_after, dv_after, block.keys.end);
            let seen_by = &plan.query_blocks[block.blocks.clone()];
            if let (Some(first), Some(last)) = (seen_by.first(), seen_by.last()) {
                tasks.push((block.keys.clone(), first.queries.start..last.queries.end, dk, dv));
            }
        }
        tasks.into_par_iter().for_each(|(keys, queries, dk, dv)| {
            let (n, first, rows) = (keys.len(), queries.start, queries.len());
            with_scratch([rows * n, rows * n], |[probabilities, gradients]| {
                for h in 0..heads {
                    let g = h / (heads / shape.kv_heads);
                    self.probabilities((first, rows), keys.clone(), h, probabilities, gradients);
                    for (r, (p, d)) in probabilities
                        .chunks_exact(n)
                        .zip(gradients.chunks_exact_mut(n))
                        .enumerate()
                    {
                        simd::softmax_backward(p, d, delta[(first + r) * heads + h], shape.scale);
                    }
                    let dout = head(self.dout, first, rows, h, dim, width);
                    let q = head(self.inputs.q, first, rows, h, dim, width);
                    let p = Matrix::new(probabilities, rows, n).transposed();
                    let d = Matrix::new(gradients, rows, n).transposed();
                    gemm_serial(
                        MatrixMut::strided(&mut dv[g * dim..], n, dim, kv_width),
                        p,
                        dout,
                        1.0,
                        true,
                    );
                    gemm_serial(
                        MatrixMut::strided(&mut dk[g * dim..], n, dim, kv_width),
                        d,
                        q,
                        1.0,
                        true,
                    );
                }
            });
        });
    }
}
