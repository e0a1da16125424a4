//! A device that keeps time: every operation goes to another device, and what it took is added up by stage and kind.
//!
//! Invariant TIMED-1: results are those of the device within; only the clock is read beside it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::{
    AdamWUpdate, Attention, AttentionGradients, AttentionInputs, Buffer, Device, EachMatrix, Floats,
    FloatsMut, Gate, Matrix, MatrixMut, Prepared, Products, RotaryTable, Routing, RowLoss, Sought,
    StoredMatrix, TargetRow, Turn,
};
use crate::contract::HiddenDtype;
use crate::cuda::{Arrival, InFlight, Stream};
use crate::row::HiddenStates;

/// What an operation mostly does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OperationKind {
    /// Matrix products.
    Product,
    /// Attention, forward or backward.
    Attention,
    /// Norms, rotations, gates, sums: a pass over memory.
    Elementwise,
    /// Softmax and divergence over a vocabulary.
    Loss,
    /// Copies of rows.
    Move,
    /// The optimizer's update, and norms of gradients.
    Optimizer,
}

/// What the operations of one kind took in one stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spent {
    /// The stage, as [`Device::stage`] named it; empty before the first.
    pub stage: &'static str,
    /// The kind.
    pub kind: OperationKind,
    /// Wall time.
    pub seconds: f64,
    /// Floating-point operations of products and attention, a multiply-add counted as two.
    pub flops: f64,
    /// Bytes that have to be read and written at least, every operand once.
    pub bytes: f64,
}

/// Keeps time of the operations of `D`. They must be called from one thread at a time for stages to mean anything.
#[derive(Debug)]
pub struct Timed<D> {
    within: D,
    watch: Arc<Watch>,
}

/// The clock of a [`Timed`], for who does not have the device itself.
#[derive(Debug)]
pub struct Watch {
    is_on: AtomicBool,
    spent: Mutex<(&'static str, Vec<Spent>)>,
}

impl Watch {
    /// Keeps time from now on, or not. A device that does not wait for its operations has to while time is kept.
    pub fn keep_time(&self, is_on: bool) {
        self.is_on.store(is_on, Ordering::Relaxed);
    }

    /// What was spent since the last call, in the order of first use.
    pub fn take(&self) -> Vec<Spent> {
        std::mem::take(&mut *self.spent.lock().unwrap_or_else(PoisonError::into_inner)).1
    }
}

impl<D: Device> Timed<D> {
    /// A device around another one.
    pub fn new(within: D) -> Self {
        Self {
            within,
            watch: Arc::new(Watch {
                is_on: AtomicBool::new(true),
                spent: Mutex::default(),
            }),
        }
    }

    /// The device that computes.
    pub fn within(&self) -> &D {
        &self.within
    }

    /// Its clock.
    pub fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    fn time<R>(&self, kind: OperationKind, work: Work, operation: impl FnOnce(&D) -> R) -> R {
        if !self.watch.is_on.load(Ordering::Relaxed) {
            return operation(&self.within);
        }
        let begun = Instant::now();
        let result = operation(&self.within);
        self.within.finish();
        let seconds = begun.elapsed().as_secs_f64();
        let (stage, all) = &mut *self.watch.spent.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all
            .iter_mut()
            .find(|spent| spent.stage == *stage && spent.kind == kind);
        let bytes = work.elements * size_of::<f32>() as f64;
        match known {
            Some(spent) => {
                spent.seconds += seconds;
                spent.flops += work.flops;
                spent.bytes += bytes;
            }
            None => all.push(Spent {
                stage,
                kind,
                seconds,
                flops: work.flops,
                bytes,
            }),
        }
        result
    }
}

#[derive(Clone, Copy)]
struct Work {
    flops: f64,
    elements: f64,
}

fn product(rows: usize, cols: usize, depth: usize) -> Work {
    let [rows, cols, depth] = [rows, cols, depth].map(|side| side as f64);
    Work {
        flops: 2.0 * rows * cols * depth,
        elements: rows * depth + cols * depth + rows * cols,
    }
}

/// A pass over so many elements.
fn pass(elements: usize) -> Work {
    Work {
        flops: 0.0,
        elements: elements as f64,
    }
}

/// So many products over all visible pairs of query and key, and a pass over operands and results.
fn attention(attention: &Attention<'_>, inputs: &AttentionInputs<'_>, products: f64, passes: usize) -> Work {
    let pairs: f64 = attention.plan.visible.iter().map(|keys| keys.len() as f64).sum();
    let shape = attention.shape;
    let per_pair = shape.heads as f64 * (shape.head_dim + shape.value_dim) as f64;
    Work {
        flops: products * pairs * per_pair,
        elements: (passes * (2 * inputs.q.len() + inputs.k.len() + inputs.v.len())) as f64,
    }
}

impl<D: Device> Device for Timed<D> {
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.within.install(work)
    }

    fn stage(&self, name: &'static str) {
        self.within.stage(name);
        self.watch.spent.lock().unwrap_or_else(PoisonError::into_inner).0 = name;
    }

    fn stream(&self) -> Option<&Stream> {
        self.within.stream()
    }

    fn is_host(&self) -> bool {
        self.within.is_host()
    }

    fn finish(&self) {
        self.within.finish();
    }

    fn products(&self) -> Products {
        self.within.products()
    }

    fn fit(&self, buffer: &mut Buffer, name: &'static str, len: usize) {
        self.within.fit(buffer, name, len);
    }

    fn lend<'a>(&self, values: &'a [f32], room: &'a mut Buffer, name: &'static str) -> Floats<'a> {
        self.within.lend(values, room, name)
    }

    fn place(&self, values: Buffer, name: &'static str) -> Buffer {
        self.within.place(values, name)
    }

    fn assign(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        let work = pass(2 * source.len());
        self.time(OperationKind::Move, work, |d| d.assign(target, source));
    }

    fn fill(&self, x: FloatsMut<'_>, value: f32) {
        let work = pass(x.len());
        self.time(OperationKind::Move, work, |d| d.fill(x, value));
    }

    fn capture(
        &self,
        x: Matrix<'_>,
        dtype: HiddenDtype,
        out: &mut [u8],
        row_bytes: usize,
    ) -> Option<InFlight<'_>> {
        let work = pass(2 * x.rows * x.cols);
        let within = &self.within;
        self.time(OperationKind::Move, work, |_| {
            within.capture(x, dtype, out, row_bytes)
        })
    }

    fn send_ahead(&self, states: &HiddenStates) -> Option<Arrival> {
        self.within.send_ahead(states)
    }

    fn widen(&self, arrival: &Arrival, rows: &[u32], out: MatrixMut<'_>) {
        let work = pass(2 * out.rows * out.cols);
        self.time(OperationKind::Move, work, |d| d.widen(arrival, rows, out));
    }

    fn seek_beyond(&self, x: Matrix<'_>, largest: f32) -> Sought<'_> {
        let work = pass(x.rows * x.cols);
        let within = &self.within;
        self.time(OperationKind::Elementwise, work, |_| {
            within.seek_beyond(x, largest)
        })
    }

    fn checksum(&self, x: Floats<'_>) -> u64 {
        self.time(OperationKind::Optimizer, pass(x.len()), |d| d.checksum(x))
    }

    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        let work = product(c.rows, c.cols, a.cols);
        self.time(OperationKind::Product, work, |d| {
            d.gemm(c, a, b, alpha, accumulate)
        });
    }

    fn prepares(&self) -> bool {
        self.within.prepares()
    }

    fn prepare(&self, prepared: &mut Prepared, b: Matrix<'_>) {
        let work = pass(b.rows * b.cols);
        self.time(OperationKind::Elementwise, work, |d| d.prepare(prepared, b));
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
        let work = product(c.rows, c.cols, a.cols);
        self.time(OperationKind::Product, work, |d| {
            d.gemm_prepared(c, a, b, prepared, alpha, accumulate)
        });
    }

    fn keep(&self, weights: &dyn StoredMatrix) {
        self.within.keep(weights);
    }

    fn keep_all(&self, each: &mut EachMatrix<'_>) {
        self.within.keep_all(each);
    }

    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool) {
        let work = product(c.rows, c.cols, a.cols);
        self.time(OperationKind::Product, work, |d| {
            d.gemm_stored(c, a, weights, accumulate)
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
        let work = pass(2 * x.rows * x.cols);
        self.time(OperationKind::Elementwise, work, |d| {
            d.rms_norm(x, weight, epsilon, y, rstd)
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
        let work = pass(4 * x.rows * x.cols);
        self.time(OperationKind::Elementwise, work, |d| {
            d.rms_norm_backward(x, weight, rstd, dy, dx)
        });
    }

    fn rms_norm_weight_gradient(
        &self,
        x: Matrix<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dweight: FloatsMut<'_>,
    ) {
        let work = pass(2 * x.rows * x.cols);
        self.time(OperationKind::Elementwise, work, |d| {
            d.rms_norm_weight_gradient(x, rstd, dy, dweight)
        });
    }

    fn rotate(&self, x: FloatsMut<'_>, head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn) {
        let work = pass(2 * x.len());
        self.time(OperationKind::Elementwise, work, |d| {
            d.rotate(x, head_dim, table, positions, turn)
        });
    }

    fn swiglu(&self, gate: Floats<'_>, up: Floats<'_>, out: FloatsMut<'_>) {
        let work = pass(3 * out.len());
        self.time(OperationKind::Elementwise, work, |d| d.swiglu(gate, up, out));
    }

    fn swiglu_backward(&self, gate: FloatsMut<'_>, up: FloatsMut<'_>, dout: Floats<'_>) {
        let work = pass(5 * dout.len());
        self.time(OperationKind::Elementwise, work, |d| {
            d.swiglu_backward(gate, up, dout)
        });
    }

    fn gather(&self, table: Matrix<'_>, rows: &[u32], out: MatrixMut<'_>) {
        let work = pass(2 * rows.len() * table.cols);
        self.time(OperationKind::Move, work, |d| d.gather(table, rows, out));
    }

    fn gather_stored(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>) {
        let work = pass(2 * rows.len() * out.cols);
        self.time(OperationKind::Move, work, |d| d.gather_stored(table, rows, out));
    }

    fn copy(&self, source: Matrix<'_>, target: MatrixMut<'_>) {
        let work = pass(2 * source.rows * source.cols);
        self.time(OperationKind::Move, work, |d| d.copy(source, target));
    }

    fn scatter_add(&self, source: Matrix<'_>, rows: &[u32], target: MatrixMut<'_>) {
        let work = pass(3 * source.rows * source.cols);
        self.time(OperationKind::Move, work, |d| d.scatter_add(source, rows, target));
    }

    fn scatter_add_scaled(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        let work = pass(3 * source.rows * source.cols);
        self.time(OperationKind::Move, work, |d| {
            d.scatter_add_scaled(source, rows, factors, target)
        });
    }

    fn gated(&self, gate: Gate, g: Floats<'_>, u: Floats<'_>, out: FloatsMut<'_>) {
        let work = pass(3 * out.len());
        self.time(OperationKind::Elementwise, work, |d| d.gated(gate, g, u, out));
    }

    fn add_bias(&self, x: MatrixMut<'_>, bias: Floats<'_>) {
        let work = pass(2 * x.rows * x.cols);
        self.time(OperationKind::Elementwise, work, |d| d.add_bias(x, bias));
    }

    fn scale(&self, x: FloatsMut<'_>, factor: f32) {
        let work = pass(2 * x.len());
        self.time(OperationKind::Elementwise, work, |d| d.scale(x, factor));
    }

    fn softcap(&self, x: FloatsMut<'_>, cap: f32) {
        let work = pass(2 * x.len());
        self.time(OperationKind::Elementwise, work, |d| d.softcap(x, cap));
    }

    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]) {
        let work = pass(logits.rows * logits.cols);
        self.time(OperationKind::Elementwise, work, |d| {
            d.route(routing, logits, chosen, weights)
        });
    }

    fn add(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        let work = pass(3 * target.len());
        self.time(OperationKind::Elementwise, work, |d| d.add(target, source));
    }

    fn attention(
        &self,
        attended: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: FloatsMut<'_>,
        lse: FloatsMut<'_>,
    ) {
        let work = attention(attended, inputs, 2.0, 1);
        self.time(OperationKind::Attention, work, |d| {
            d.attention(attended, inputs, out, lse)
        });
    }

    fn attention_backward(
        &self,
        attended: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: Floats<'_>,
        dout: Floats<'_>,
        gradients: AttentionGradients<'_>,
    ) {
        // Scores and their gradients are formed again; then the gradients of queries, keys and values.
        let work = attention(attended, inputs, 5.0, 2);
        self.time(OperationKind::Attention, work, |d| {
            d.attention_backward(attended, inputs, lse, dout, gradients)
        });
    }

    fn softmax_targets(&self, logits: MatrixMut<'_>, targets: &mut [TargetRow]) {
        let work = pass(2 * logits.rows * logits.cols);
        self.time(OperationKind::Loss, work, |d| d.softmax_targets(logits, targets));
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
        let work = pass(3 * logits.rows * logits.cols);
        self.time(OperationKind::Loss, work, |d| {
            d.kl_divergence(logits, probabilities, targets, target_of, coefficients, losses)
        });
    }

    fn argmax(&self, x: Matrix<'_>, out: &mut [u32]) {
        let work = pass(x.rows * x.cols);
        self.time(OperationKind::Loss, work, |d| d.argmax(x, out));
    }

    fn sum_of_squares(&self, x: Floats<'_>) -> f64 {
        self.time(OperationKind::Optimizer, pass(x.len()), |d| d.sum_of_squares(x))
    }

    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: FloatsMut<'_>,
        m: FloatsMut<'_>,
        v: FloatsMut<'_>,
        gradient: Floats<'_>,
    ) {
        let work = pass(7 * parameters.len());
        self.time(OperationKind::Optimizer, work, |d| {
            d.adamw(update, parameters, m, v, gradient)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Cpu;

    #[test]
    fn time_and_work_are_kept_by_stage_and_kind() {
        let device = Timed::new(Cpu::new(1).expect("a thread"));
        let (a, b) = (vec![1.0; 6], vec![2.0; 12]);
        let mut c = vec![0.0; 8];
        for stage in ["one", "two", "one"] {
            device.stage(stage);
            let product = MatrixMut::new(&mut c, 2, 4);
            device.gemm(product, Matrix::new(&a, 2, 3), Matrix::new(&b, 3, 4), 1.0, false);
        }
        device.scale(FloatsMut::from(&mut c), 2.0);
        assert_eq!(c, [12.0; 8], "TIMED-1");
        let spent = device.watch().take();
        let seen: Vec<_> = spent
            .iter()
            .map(|spent| (spent.stage, spent.kind, spent.flops, spent.bytes))
            .collect();
        let product_bytes = 4.0 * (6.0 + 12.0 + 8.0);
        assert_eq!(
            seen,
            [
                ("one", OperationKind::Product, 96.0, 2.0 * product_bytes),
                ("two", OperationKind::Product, 48.0, product_bytes),
                ("one", OperationKind::Elementwise, 0.0, 64.0)
            ]
        );
        assert!(device.watch().take().is_empty());
    }
}
