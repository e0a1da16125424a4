//! Attention on the CPU: blocks of queries forward, blocks of queries and then of keys backward.
//!
//! Scores exist for one block at a time and are computed again in the backward pass, so memory is linear in tokens.

use std::ops::Range;

use super::each_row;
use super::gemm::gemm_serial;
use super::scratch::with_scratch;
use super::simd;
use crate::device::attention::{KeyBlock, QueryBlock};
use crate::device::{Attention, GradientsOf, HostMatrix, HostMatrixMut, InputsOf};

fn check(attention: &Attention<'_>, inputs: &InputsOf<&[f32]>) {
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

/// Runs `work` on every block with its rows of the buffers, `[queries, width]` each, over the threads of the pool.
fn each_query_block<const N: usize>(
    blocks: &[QueryBlock],
    buffers: [&mut [f32]; N],
    widths: [usize; N],
    work: &(impl Fn(&QueryBlock, [&mut [f32]; N]) + Sync),
) {
    match blocks {
        [] => {}
        [block] => work(block, buffers),
        _ => {
            let (left, right) = blocks.split_at(blocks.len() / 2);
            let rows = right[0].queries.start - left[0].queries.start;
            let (before, after) = split(buffers, widths.map(|width| rows * width));
            rayon::join(
                || each_query_block(left, before, widths, work),
                || each_query_block(right, after, widths, work),
            );
        }
    }
}

/// Runs `work` on every block with its rows of both buffers, `[keys, width]` from key `at` on, over the threads of the pool.
fn each_key_block(
    blocks: &[KeyBlock],
    at: usize,
    buffers: [&mut [f32]; 2],
    width: usize,
    work: &(impl Fn(&KeyBlock, [&mut [f32]; 2]) + Sync),
) {
    match blocks {
        [] => {}
        [block] => {
            let skipped = (block.keys.start - at) * width;
            let rows = block.keys.len() * width;
            work(block, buffers.map(|buffer| &mut buffer[skipped..][..rows]));
        }
        _ => {
            let (left, right) = blocks.split_at(blocks.len() / 2);
            let middle = right[0].keys.start;
            let (before, after) = split(buffers, [(middle - at) * width; 2]);
            rayon::join(
                || each_key_block(left, at, before, width, work),
                || each_key_block(right, middle, after, width, work),
            );
        }
    }
}

/// Splits each of some buffers at a place of its own.
fn split<const N: usize>(buffers: [&mut [f32]; N], places: [usize; N]) -> ([&mut [f32]; N], [&mut [f32]; N]) {
    let mut after: [&mut [f32]; N] = std::array::from_fn(|_| Default::default());
    let mut next = 0;
    let before = buffers.map(|buffer| {
        let (head, tail) = buffer.split_at_mut(places[next]);
        after[next] = tail;
        next += 1;
        head
    });
    (before, after)
}

/// Columns of one head of rows `from..from + rows`.
fn head<'a>(
    data: &'a [f32],
    from: usize,
    rows: usize,
    head: usize,
    dim: usize,
    width: usize,
) -> HostMatrix<'a> {
    let start = (from * width + head * dim).min(data.len());
    HostMatrix::strided(&data[start..], rows, dim, width)
}

pub(super) fn forward(
    attention: &Attention<'_>,
    inputs: &InputsOf<&[f32]>,
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
    let work = |block: &QueryBlock, [out, lse]: [&mut [f32]; 2]| {
        let (rows, keys, first) = (block.queries.len(), block.keys.len(), block.queries.start);
        with_scratch([rows * keys, attention.diagonals], |[scores, extra]| {
            for h in 0..heads {
                let g = h / (heads / shape.kv_heads);
                let q = head(inputs.q, first, rows, h, dim, width);
                let k = head(inputs.k, block.keys.start, keys, g, dim, kv_width);
                gemm_serial(
                    HostMatrixMut::new(&mut *scores, rows, keys),
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
                let out = HostMatrixMut::strided(&mut out[h * value_dim..], rows, value_dim, out_width);
                gemm_serial(out, HostMatrix::new(&*scores, rows, keys), v, 1.0, true);
            }
        });
    };
    each_query_block(&plan.query_blocks, [out, lse], [out_width, heads], &work);
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
    inputs: &InputsOf<&[f32]>,
    lse: &[f32],
    dout: &[f32],
    gradients: GradientsOf<&mut [f32]>,
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
    let extra = queries * heads * attention.diagonals;
    with_scratch([queries * heads, extra, extra], |[delta, extra_p, extra_d]| {
        pass.queries(gradients.dq, delta, extra_p, extra_d);
        pass.diagonals(gradients.dk_diagonal, extra_d, inputs.q);
        pass.diagonals(gradients.dv_diagonal, extra_p, dout);
        pass.keys(gradients.dk, gradients.dv, delta);
    });
}

struct Backward<'a> {
    attention: &'a Attention<'a>,
    inputs: &'a InputsOf<&'a [f32]>,
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
        gemm_serial(
            HostMatrixMut::new(&mut *probabilities, rows, keys.len()),
            q,
            k,
            1.0,
            false,
        );
        gemm_serial(
            HostMatrixMut::new(gradients, rows, keys.len()),
            dout,
            v,
            1.0,
            false,
        );
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

    /// Gradients of queries. Leaves Σ p·dp of each query and head in `delta`, and p and dp of the diagonal keys,
    /// `[queries, heads, diagonals]`.
    fn queries(&self, dq: &mut [f32], delta: &mut [f32], extra_p: &mut [f32], extra_d: &mut [f32]) {
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
        let queries = plan.queries();
        let extra_width = heads * diagonals;
        let work = |block: &QueryBlock, [dq, delta, extra_p, extra_d]: [&mut [f32]; 4]| {
            let (rows, keys, first) = (block.queries.len(), block.keys.len(), block.queries.start);
            with_scratch([rows * keys, rows * keys], |[probabilities, gradients]| {
                for h in 0..heads {
                    let g = h / (heads / shape.kv_heads);
                    self.probabilities((first, rows), block.keys.clone(), h, probabilities, gradients);
                    for r in 0..rows {
                        let query = first + r;
                        let q = &self.inputs.q[query * width + h * dim..][..dim];
                        let dout = &self.dout[query * width + h * dim..][..dim];
                        let of_diagonal = |data, j| diagonal(data, queries, j, query, g, dim, kv_width);
                        let at = r * extra_width + h * diagonals;
                        let extra_p = &mut extra_p[at..][..diagonals];
                        let extra_d = &mut extra_d[at..][..diagonals];
                        for j in 0..diagonals {
                            extra_p[j] = simd::dot(q, of_diagonal(self.inputs.k_diagonal, j));
                            extra_d[j] = simd::dot(dout, of_diagonal(self.inputs.v_diagonal, j));
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
                        for (j, &d) in extra_d.iter().enumerate() {
                            simd::axpy(d, of_diagonal(self.inputs.k_diagonal, j), dq);
                        }
                    }
                    let k = head(self.inputs.k, block.keys.start, keys, g, dim, kv_width);
                    let dq = HostMatrixMut::strided(&mut dq[h * dim..], rows, dim, width);
                    gemm_serial(dq, HostMatrix::new(&*gradients, rows, keys), k, 1.0, true);
                }
            });
        };
        each_query_block(
            &plan.query_blocks,
            [dq, delta, extra_p, extra_d],
            [width, heads, extra_width, extra_width],
            &work,
        );
    }

    /// Gradients of the diagonal keys or values `[diagonals, queries, kv_heads · head_dim]`: the rows of `source`
    /// `[queries, heads · head_dim]`, each head times its factor of `[queries, heads, diagonals]`.
    fn diagonals(&self, gradients: &mut [f32], factors: &[f32], source: &[f32]) {
        let (shape, queries, diagonals) = (
            self.attention.shape,
            self.attention.plan.queries(),
            self.attention.diagonals,
        );
        let (heads, dim) = (shape.heads, shape.head_dim);
        let (width, kv_width) = (shape.query_width(), shape.key_width());
        let steps = gradients.chunks_mut((queries * kv_width).max(1));
        for (j, gradients) in steps.take(diagonals).enumerate() {
            each_row(
                HostMatrixMut::new(gradients, queries, kv_width),
                |query, gradients| {
                    for h in 0..heads {
                        let g = h / (heads / shape.kv_heads);
                        let factor = factors[(query * heads + h) * diagonals + j];
                        let source = &source[query * width + h * dim..][..dim];
                        simd::axpy(factor, source, &mut gradients[g * dim..][..dim]);
                    }
                },
            );
        }
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
        let work = |block: &KeyBlock, [dk, dv]: [&mut [f32]; 2]| {
            let seen_by = &plan.query_blocks[block.blocks.clone()];
            let (Some(first), Some(last)) = (seen_by.first(), seen_by.last()) else {
                return;
            };
            let (n, first, rows) = (
                block.keys.len(),
                first.queries.start,
                last.queries.end - first.queries.start,
            );
            with_scratch([rows * n, rows * n], |[probabilities, gradients]| {
                for h in 0..heads {
                    let g = h / (heads / shape.kv_heads);
                    self.probabilities((first, rows), block.keys.clone(), h, probabilities, gradients);
                    for (r, (p, d)) in probabilities
                        .chunks_exact(n)
                        .zip(gradients.chunks_exact_mut(n))
                        .enumerate()
                    {
                        simd::softmax_backward(p, d, delta[(first + r) * heads + h], shape.scale);
                    }
                    let products = [
                        (&mut *dv, &*probabilities, self.dout),
                        (&mut *dk, &*gradients, self.inputs.q),
                    ];
                    for (gradient, factors, source) in products {
                        gemm_serial(
                            HostMatrixMut::strided(&mut gradient[g * dim..], n, dim, kv_width),
                            HostMatrix::new(factors, rows, n).transposed(),
                            head(source, first, rows, h, dim, width),
                            1.0,
                            true,
                        );
                    }
                }
            });
        };
        each_key_block(&plan.key_blocks, 0, [dk, dv], kv_width, &work);
    }
}
