//! The CPU: a thread pool of its own, `gemm-f32` or the AMX unit for products, vectorised loops for the rest.

mod amx;
mod attention;
mod gemm;
mod scratch;
mod setup;
mod simd;
#[cfg(test)]
mod tests;

use rayon::prelude::*;

use super::{
    AdamWUpdate, Attention, AttentionGradients, AttentionInputs, Buffer, Device, EachMatrix, Floats,
    FloatsMut, Gate, HostMatrix, HostMatrixMut, Matrix, MatrixMut, Pairing, Prepared, ProductKernel,
    Products, RotaryTable, Routing, RowLoss, Sought, StoredMatrix, TargetRow, Turn, check_capture,
};

use crate::contract::HiddenDtype;
use crate::cuda::InFlight;

pub use amx::{NoAmx, PackedMatrix};
pub use setup::{Cpu, ThreadsError};
pub(crate) use simd::{multiply_add_rounds, widen_bf16};

/// Elements a task of an element-wise operation takes at least; a fixed number, so block sums are too.
const ELEMENTS: usize = 16 * 1024;

/// Rows of `width` that one task takes.
fn rows_per_task(width: usize) -> usize {
    (ELEMENTS / width.max(1)).max(1)
}

/// Calls `work(row, elements)` for every row of `out`, over the pool when there is enough to do.
fn each_row(out: HostMatrixMut<'_>, work: impl Fn(usize, &mut [f32]) + Sync) {
    let (rows, cols, stride) = (out.rows, out.cols, out.row_stride.max(1));
    if rows == 0 || cols == 0 {
        return;
    }
    let group = rows_per_task(cols);
    out.data
        .par_chunks_mut(stride)
        .take(rows)
        .with_min_len(group)
        .enumerate()
        .for_each(|(row, elements)| {
            work(row, &mut elements[..cols]);
        });
}

/// [`each_row`] with one more value per row.
fn each_row_with<T: Send>(
    out: HostMatrixMut<'_>,
    values: &mut [T],
    work: impl Fn(usize, &mut [f32], &mut T) + Sync,
) {
    let (rows, cols, stride) = (out.rows, out.cols, out.row_stride.max(1));
    assert_eq!(values.len(), rows, "one value per row");
    if rows == 0 || cols == 0 {
        return;
    }
    let group = rows_per_task(cols);
    let chunks = out.data.par_chunks_mut(stride).take(rows).with_min_len(group);
    chunks
        .zip(values.par_iter_mut())
        .enumerate()
        .for_each(|(row, (elements, value))| {
            work(row, &mut elements[..cols], value);
        });
}

fn row<'a>(x: &HostMatrix<'a>, row: usize) -> &'a [f32] {
    &x.data[row * x.row_stride..][..x.cols]
}

impl Device for Cpu {
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    fn is_host(&self) -> bool {
        true
    }

    fn products(&self) -> Products {
        match self.kernel() {
            ProductKernel::F32 => Products::F32,
            ProductKernel::AmxBf16 => Products::Bf16,
        }
    }

    fn fit(&self, buffer: &mut Buffer, _: &'static str, len: usize) {
        buffer.resize_on_host(len);
    }

    fn lend<'a>(&self, values: &'a [f32], _: &'a mut Buffer, _: &'static str) -> Floats<'a> {
        values.into()
    }

    fn place(&self, values: Buffer, _: &'static str) -> Buffer {
        values
    }

    fn assign(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        target.host().copy_from_slice(source.host());
    }

    fn fill(&self, x: FloatsMut<'_>, value: f32) {
        x.host().fill(value);
    }

    fn capture(
        &self,
        x: Matrix<'_>,
        dtype: HiddenDtype,
        out: &mut [u8],
        row_bytes: usize,
    ) -> Option<InFlight<'_>> {
        check_capture(&x, dtype, out, row_bytes);
        let (x, bytes) = (x.host(), x.cols * dtype.bytes());
        for (r, out) in out.chunks_mut(row_bytes.max(1)).take(x.rows).enumerate() {
            dtype.write(row(&x, r), &mut out[..bytes]);
        }
        None
    }

    fn seek_beyond(&self, x: Matrix<'_>, largest: f32) -> Sought<'_> {
        let x = x.host();
        // Without a branch per element, so that it vectorises; NaN fails the comparison.
        let is_within = |values: &[f32]| {
            values
                .iter()
                .fold(true, |all, value| all & (value.abs() <= largest))
        };
        Sought::Known((0..x.rows).find(|&r| !is_within(row(&x, r))))
    }

    fn checksum(&self, x: Floats<'_>) -> u64 {
        let x = x.host();
        self.install(|| {
            let blocks = x.par_chunks(ELEMENTS).enumerate();
            blocks
                .map(|(block, x)| simd::checksum((block * ELEMENTS) as u32, x))
                .reduce(|| 0, u64::wrapping_add)
        })
    }

    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        let (c, a, b) = (c.host(), a.host(), b.host());
        self.install(|| match &self.amx {
            Some(amx) => amx.gemm(c, a, b, alpha, accumulate),
            None => gemm::gemm(c, a, b, alpha, accumulate),
        });
    }

    fn prepares(&self) -> bool {
        self.amx.is_some()
    }

    fn prepare(&self, prepared: &mut Prepared, b: Matrix<'_>) {
        match &mut prepared.0 {
            Some(packed) if (packed.rows(), packed.cols()) == (b.rows(), b.cols()) => self.repack(packed, b),
            other => *other = self.pack(b),
        }
    }

    fn gemm_prepared(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: Matrix<'_>,
        prepared: &Prepared,
        alpha: f32,
        accumulate: bool,
    ) {
        match &prepared.0 {
            Some(packed) => {
                assert_eq!(
                    (packed.rows(), packed.cols()),
                    (b.rows(), b.cols()),
                    "shape of a prepared operand"
                );
                self.gemm_packed(c, a, packed, alpha, accumulate);
            }
            None => self.gemm(c, a, b, alpha, accumulate),
        }
    }

    fn keep_all(&self, each: &mut EachMatrix<'_>) {
        if let Some(cache) = &self.packed {
            cache.keep(&self.pool, each);
        }
    }

    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool) {
        let (c, a) = (c.host(), a.host());
        self.install(|| match &self.amx {
            Some(amx) => amx.gemm_stored(c, a, weights, accumulate),
            None => gemm::gemm_stored(c, a, weights, accumulate),
        });
    }

    fn rms_norm(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        epsilon: f32,
        y: MatrixMut<'_>,
        rstd: FloatsMut<'_>,
    ) {
        let (x, weight, y, rstd) = (x.host(), weight.host(), y.host(), rstd.host());
        assert_eq!(
            (x.rows, x.cols, weight.len(), x.col_stride),
            (y.rows, y.cols, y.cols, 1),
            "shapes of a norm"
        );
        self.install(|| {
            each_row_with(y, rstd, |r, y, rstd| {
                *rstd = simd::rms_norm(row(&x, r), weight, epsilon, y)
            });
        });
    }

    fn rms_norm_backward(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dx: MatrixMut<'_>,
    ) {
        let (x, weight, rstd, dy, dx) = (x.host(), weight.host(), rstd.host(), dy.host(), dx.host());
        assert_eq!(
            (x.rows, x.cols),
            (dx.rows, dx.cols),
            "shapes of a norm's gradient"
        );
        assert_eq!(
            (dy.rows, dy.cols, weight.len()),
            (dx.rows, dx.cols, dx.cols),
            "shapes of a norm's gradient"
        );
        assert_eq!(
            (rstd.len(), x.col_stride, dy.col_stride),
            (dx.rows, 1, 1),
            "shapes of a norm's gradient"
        );
        self.install(|| {
            each_row(dx, |r, dx| {
                simd::rms_norm_backward(row(&x, r), weight, rstd[r], row(&dy, r), dx)
            });
        });
    }

    fn rms_norm_weight_gradient(
        &self,
        x: Matrix<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dweight: FloatsMut<'_>,
    ) {
        let (x, rstd, dy, dweight) = (x.host(), rstd.host(), dy.host(), dweight.host());
        assert_eq!(
            (x.rows, x.cols),
            (dy.rows, dy.cols),
            "shapes of a norm's weight gradient"
        );
        assert_eq!(
            (rstd.len(), dweight.len()),
            (x.rows, x.cols),
            "shapes of a norm's weight gradient"
        );
        assert_eq!(
            (x.col_stride, dy.col_stride),
            (1, 1),
            "shapes of a norm's weight gradient"
        );
        // Columns are spread, rows are summed in order.
        const COLUMNS: usize = 64;
        self.install(|| {
            dweight
                .par_chunks_mut(COLUMNS)
                .enumerate()
                .for_each(|(chunk, dweight)| {
                    let columns = chunk * COLUMNS..chunk * COLUMNS + dweight.len();
                    for (r, &rstd) in rstd.iter().enumerate() {
                        let (x, dy) = (&row(&x, r)[columns.clone()], &row(&dy, r)[columns.clone()]);
                        simd::rms_norm_weight(x, rstd, dy, dweight);
                    }
                });
        });
    }

    fn rotate(&self, x: FloatsMut<'_>, head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn) {
        let x = x.host();
        let (half, offset) = (table.half(), table.offset());
        assert!(
            offset + 2 * half <= head_dim,
            "{half} pairs from {offset} on in a head of {head_dim}"
        );
        if positions.is_empty() {
            return;
        }
        let width = x.len() / positions.len();
        assert!(
            width * positions.len() == x.len() && width.is_multiple_of(head_dim),
            "shapes of a rotation"
        );
        let sign = if turn == Turn::Forward { 1.0 } else { -1.0 };
        self.install(|| {
            each_row(HostMatrixMut::new(x, positions.len(), width), |r, x| {
                let (cos, sin) = table.at(positions[r]);
                for head in x.chunks_exact_mut(head_dim) {
                    let turned = &mut head[offset..offset + 2 * half];
                    match table.pairing() {
                        Pairing::Halves => {
                            let (a, b) = turned.split_at_mut(half);
                            simd::turn(a, b, cos, sin, sign);
                        }
                        Pairing::Neighbours => simd::turn_neighbours(turned, cos, sin, sign),
                    }
                }
            });
        });
    }

    fn swiglu(&self, gate: Floats<'_>, up: Floats<'_>, out: FloatsMut<'_>) {
        let (gate, up, out) = (gate.host(), up.host(), out.host());
        assert_eq!((gate.len(), up.len()), (out.len(), out.len()), "shapes of swiglu");
        self.install(|| {
            let blocks = gate
                .par_chunks(ELEMENTS)
                .zip(up.par_chunks(ELEMENTS))
                .zip(out.par_chunks_mut(ELEMENTS));
            blocks.for_each(|((gate, up), out)| simd::swiglu(gate, up, out));
        });
    }

    fn swiglu_backward(&self, gate: FloatsMut<'_>, up: FloatsMut<'_>, dout: Floats<'_>) {
        let (gate, up, dout) = (gate.host(), up.host(), dout.host());
        assert_eq!(
            (gate.len(), up.len()),
            (dout.len(), dout.len()),
            "shapes of swiglu"
        );
        self.install(|| {
            let blocks = gate
                .par_chunks_mut(ELEMENTS)
                .zip(up.par_chunks_mut(ELEMENTS))
                .zip(dout.par_chunks(ELEMENTS));
            blocks.for_each(|((gate, up), dout)| simd::swiglu_backward(gate, up, dout));
        });
    }

    fn gather(&self, table: Matrix<'_>, rows: &[u32], out: MatrixMut<'_>) {
        let (table, out) = (table.host(), out.host());
        assert_eq!(
            (rows.len(), table.cols, table.col_stride),
            (out.rows, out.cols, 1),
            "shapes of a gather"
        );
        self.install(|| each_row(out, |r, out| out.copy_from_slice(table.row(rows[r] as usize))));
    }

    fn gather_stored(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>) {
        let out = out.host();
        assert_eq!(
            (rows.len(), table.cols()),
            (out.rows, out.cols),
            "shapes of a gather"
        );
        self.install(|| {
            each_row(out, |r, out| {
                let row = rows[r] as usize;
                table.unpack(row..row + 1, out);
            })
        });
    }

    fn copy(&self, source: Matrix<'_>, target: MatrixMut<'_>) {
        let (source, target) = (source.host(), target.host());
        assert_eq!(
            (source.rows, source.cols, source.col_stride),
            (target.rows, target.cols, 1),
            "shapes of a copy"
        );
        self.install(|| each_row(target, |r, out| out.copy_from_slice(row(&source, r))));
    }

    fn scatter_add(&self, source: Matrix<'_>, rows: &[u32], target: MatrixMut<'_>) {
        let (source, target) = (source.host(), target.host());
        assert_eq!(
            (source.rows, source.cols, source.col_stride),
            (rows.len(), target.cols, 1),
            "shapes of a scatter"
        );
        assert!(
            rows.iter().all(|&row| (row as usize) < target.rows),
            "rows of a scatter are in range"
        );
        for (from, &to) in rows.iter().enumerate() {
            simd::add(
                &mut target.data[to as usize * target.row_stride..][..target.cols],
                source.row(from),
            );
        }
    }

    fn scatter_add_scaled(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        let (source, target) = (source.host(), target.host());
        assert_eq!(
            (source.rows, source.cols, source.col_stride, factors.len()),
            (rows.len(), target.cols, 1, rows.len()),
            "shapes of a scatter"
        );
        for (from, (&to, &factor)) in rows.iter().zip(factors).enumerate() {
            assert!((to as usize) < target.rows, "rows of a scatter are in range");
            simd::axpy(
                factor,
                source.row(from),
                &mut target.data[to as usize * target.row_stride..][..target.cols],
            );
        }
    }

    fn gated(&self, gate: Gate, g: Floats<'_>, u: Floats<'_>, out: FloatsMut<'_>) {
        let (g, u, out) = (g.host(), u.host(), out.host());
        assert_eq!((g.len(), u.len()), (out.len(), out.len()), "shapes of a gate");
        self.install(|| {
            let blocks = g
                .par_chunks(ELEMENTS)
                .zip(u.par_chunks(ELEMENTS))
                .zip(out.par_chunks_mut(ELEMENTS));
            blocks.for_each(|((g, u), out)| match gate {
                Gate::Silu => simd::swiglu(g, u, out),
                Gate::GeluTanh => simd::geglu(g, u, out),
                Gate::Clamped { alpha, limit } => simd::clamped_glu(g, u, alpha, limit, out),
            });
        });
    }

    fn add_bias(&self, x: MatrixMut<'_>, bias: Floats<'_>) {
        let (x, bias) = (x.host(), bias.host());
        assert_eq!(x.cols, bias.len(), "shapes of a bias");
        self.install(|| each_row(x, |_, x| simd::add(x, bias)));
    }

    fn scale(&self, x: FloatsMut<'_>, factor: f32) {
        let x = x.host();
        self.install(|| x.par_chunks_mut(ELEMENTS).for_each(|x| simd::scale(x, factor)));
    }

    fn softcap(&self, x: FloatsMut<'_>, cap: f32) {
        let x = x.host();
        self.install(|| x.par_chunks_mut(ELEMENTS).for_each(|x| simd::softcap(x, cap)));
    }

    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]) {
        let logits = logits.host();
        let (tokens, experts, top) = (logits.rows, logits.cols, routing.top);
        assert_eq!(
            (chosen.len(), weights.len()),
            (tokens * top, tokens * top),
            "shapes of a routing"
        );
        assert!(
            (1..=experts).contains(&top)
                && (routing.choice_bias.is_empty() || routing.choice_bias.len() == experts),
            "{top} of {experts} experts"
        );
        self.install(|| {
            let places = chosen.par_chunks_mut(top).zip(weights.par_chunks_mut(top));
            places
                .with_min_len(rows_per_task(experts))
                .enumerate()
                .for_each(|(token, (chosen, weights))| {
                    scratch::with_scratch([2 * experts], |[scratch]| {
                        routing.choose(row(&logits, token), scratch, chosen, weights);
                    });
                });
        });
    }

    fn add(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        let (target, source) = (target.host(), source.host());
        assert_eq!(target.len(), source.len(), "shapes of a sum");
        self.install(|| {
            let blocks = target.par_chunks_mut(ELEMENTS).zip(source.par_chunks(ELEMENTS));
            blocks.for_each(|(target, source)| simd::add(target, source));
        });
    }

    fn attention(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: FloatsMut<'_>,
        lse: FloatsMut<'_>,
    ) {
        let (inputs, out, lse) = (inputs.host(), out.host(), lse.host());
        self.install(|| attention::forward(attention, &inputs, out, lse));
    }

    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: Floats<'_>,
        dout: Floats<'_>,
        gradients: AttentionGradients<'_>,
    ) {
        let (inputs, lse, dout, gradients) = (inputs.host(), lse.host(), dout.host(), gradients.host());
        self.install(|| attention::backward(attention, &inputs, lse, dout, gradients));
    }

    fn softmax_targets(&self, logits: MatrixMut<'_>, targets: &mut [TargetRow]) {
        let logits = logits.host();
        self.install(|| {
            each_row_with(logits, targets, |_, row, target| {
                let (negative_entropy, argmax) = simd::softmax_target(row);
                *target = TargetRow {
                    negative_entropy,
                    argmax,
                };
            });
        });
    }

    fn kl_divergence(
        &self,
        logits: MatrixMut<'_>,
        probabilities: Matrix<'_>,
        targets: &[TargetRow],
        target_of: &[u32],
        coefficients: &[f32],
        losses: &mut [RowLoss],
    ) {
        let (logits, probabilities) = (logits.host(), probabilities.host());
        assert_eq!(
            (logits.cols, targets.len()),
            (probabilities.cols, probabilities.rows),
            "shapes of a loss"
        );
        assert_eq!(
            (target_of.len(), coefficients.len()),
            (logits.rows, logits.rows),
            "shapes of a loss"
        );
        self.install(|| {
            each_row_with(logits, losses, |r, logits, loss| {
                let target = target_of[r] as usize;
                let (p, entropy) = (probabilities.row(target), targets[target].negative_entropy);
                let (value, argmax) = simd::kl_divergence(logits, p, entropy, coefficients[r]);
                *loss = RowLoss { loss: value, argmax };
            });
        });
    }

    fn argmax(&self, x: Matrix<'_>, out: &mut [u32]) {
        let x = x.host();
        assert_eq!((x.rows, x.col_stride), (out.len(), 1), "shapes of an arg-max");
        self.install(|| {
            out.par_iter_mut()
                .with_min_len(rows_per_task(x.cols))
                .enumerate()
                .for_each(|(r, out)| {
                    *out = simd::argmax(row(&x, r));
                });
        });
    }

    fn sum_of_squares(&self, x: Floats<'_>) -> f64 {
        let x = x.host();
        self.install(|| {
            let mut sums = [0.0; 256];
            let mut total = 0.0;
            for part in x.chunks(sums.len() * ELEMENTS) {
                let blocks = part.par_chunks(ELEMENTS).zip(&mut sums);
                blocks.for_each(|(block, sum)| *sum = simd::sum_of_squares(block));
                total = sums[..part.len().div_ceil(ELEMENTS)]
                    .iter()
                    .fold(total, |total, sum| total + sum);
            }
            total
        })
    }

    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: FloatsMut<'_>,
        m: FloatsMut<'_>,
        v: FloatsMut<'_>,
        gradient: Floats<'_>,
    ) {
        let (parameters, m, v, gradient) = (parameters.host(), m.host(), v.host(), gradient.host());
        let n = parameters.len();
        assert_eq!(
            (m.len(), v.len(), gradient.len()),
            (n, n, n),
            "shapes of an update"
        );
        self.install(|| {
            let moments = m.par_chunks_mut(ELEMENTS).zip(v.par_chunks_mut(ELEMENTS));
            let blocks = parameters
                .par_chunks_mut(ELEMENTS)
                .zip(moments)
                .zip(gradient.par_chunks(ELEMENTS));
            blocks
                .for_each(|((parameters, (m, v)), gradient)| simd::adamw(update, parameters, m, v, gradient));
        });
    }
}
