//! [`Device`] on a GPU.
//!
//! Operations are launched on one stream and not waited for, except where something comes back to the host. Operands on
//! the GPU are used where they lie; those on the host, which are small or come from a test, are sent along.
//!
//! A GPU that fails makes the operation panic with its [`CudaError`]: the trait's operations cannot fail, and a rank that
//! lost its device has to be started again.

use std::sync::{Arc, Mutex, PoisonError};

use super::arena::ArenaUse;
use super::arrivals::{Arrival, Arrivals};
use super::blas::{Blas, Factor};
use super::cache::KernelCache;
use super::driver::{Context, CudaError, Driver};
use super::kernels::{AttentionOperands, AttentionTables, Kernels, ScatterList};
use super::landing::{InFlight, Landing};
use super::library::SearchPath;
use super::matrix::{Indices, MatrixView, MatrixViewMut};
use super::memory::{Holders, Memory};
use super::nvrtc::Nvrtc;
use super::operands::{Input, Output};
use super::staging::Staging;
use super::stream::Stream;
use super::upload::Uploads;
use super::weights::UNPACKED_BYTES;
use crate::contract::HiddenDtype;
use crate::device::check_capture;
use crate::device::floats::{Place, PlaceMut};
use crate::device::{
    AdamWUpdate, Attention, AttentionGradients, AttentionInputs, AttentionPlan, Buffer, Device, Floats,
    FloatsMut, Gate, Matrix, MatrixMut, Products, RotaryTable, Routing, RowLoss, Sought, StoredMatrix,
    TargetRow, Turn,
};
use crate::row::HiddenStates;

/// What the factors of products are rounded to; sums are f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Precision {
    /// Nothing: the reference.
    #[default]
    F32,
    /// bf16, for tensor cores.
    Bf16,
}

/// A GPU with its kernels and products.
#[derive(Debug)]
pub struct Cuda {
    pub(super) memory: Arc<Memory>,
    pub(super) staging: Staging,
    pub(super) uploads: Uploads,
    /// Bytes of a tile of weights that are unpacked for a product.
    pub(super) unpacked_bytes: usize,
    /// Where captured states arrive on the host.
    pub(super) landing: Landing,
    /// Where answers of checks do.
    flags: Landing,
    /// The way of hidden states, once some were sent.
    pub(super) arrivals: Mutex<Option<Arrivals>>,
    /// What the last attention saw, for layers that see the same.
    last_plan: Mutex<Option<(AttentionPlan, AttentionTables)>>,
    pub(super) blas: Blas,
    pub(super) kernels: Kernels,
    pub(super) stream: Arc<Stream>,
    /// For copies beside what is computed.
    pub(super) copies: Stream,
    pub(super) context: Arc<Context>,
    pub(super) precision: Precision,
}

/// The operations of [`Device`] cannot fail.
#[track_caller]
pub(super) fn must<T>(result: Result<T, CudaError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => std::panic::panic_any(error),
    }
}

impl Cuda {
    /// Opens the GPU with this number, and compiles its kernels or takes them from `cache`.
    ///
    /// # Errors
    /// If a library or the device is missing, or a kernel does not compile.
    pub fn new(
        search: &SearchPath,
        ordinal: usize,
        cache: KernelCache,
        precision: Precision,
    ) -> Result<Self, CudaError> {
        let context = Driver::open(search)?.device(ordinal)?.context()?;
        let stream = Arc::new(Stream::new(&context)?);
        let memory = Arc::new(Memory::new(&stream)?);
        let kernels = Kernels::new(&context, Nvrtc::open(search)?, cache)?;
        Ok(Self {
            staging: Staging::new(&memory),
            uploads: Uploads::default(),
            unpacked_bytes: UNPACKED_BYTES,
            memory,
            landing: Landing::default(),
            flags: Landing::default(),
            arrivals: Mutex::default(),
            last_plan: Mutex::default(),
            blas: Blas::new(&context, search)?,
            kernels,
            copies: Stream::new(&context)?,
            stream,
            context,
            precision,
        })
    }

    /// The stream of its operations.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its name, as the driver tells it.
    ///
    /// # Errors
    /// If the driver does not.
    pub fn name(&self) -> Result<String, CudaError> {
        self.context.gpu().name()
    }

    /// What this rank has of the GPU's memory, in use or not; `None` where the GPU has no memory pools.
    ///
    /// # Errors
    /// If the driver does not say.
    pub fn arena(&self) -> Result<Option<ArenaUse>, CudaError> {
        self.memory.usage()
    }

    /// What this rank holds of the GPU's memory, by name.
    pub fn holders(&self) -> Holders {
        self.memory.holders()
    }

    /// The same with tiles of weights of another size.
    #[cfg(test)]
    pub(crate) fn with_unpacked_bytes(self, unpacked_bytes: usize) -> Self {
        Self {
            unpacked_bytes,
            ..self
        }
    }

    fn product(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        if is_nothing(&c, &a, (b.rows, b.cols), accumulate) {
            return;
        }
        let ((a, a_turned), (b, b_turned)) = (self.input_stored(a), self.input_stored(b));
        let mut target = self.target_matrix(c);
        let done = match self.precision {
            Precision::F32 => self.blas.product(
                &self.stream,
                target.view_mut(),
                factor(a.view(), a_turned),
                factor(b.view(), b_turned),
                alpha,
                accumulate,
            ),
            Precision::Bf16 => {
                let a_narrow = self.narrow(a.view(), a.rows, a.cols);
                let b_narrow = self.narrow(b.view(), b.rows, b.cols);
                self.blas.product_bf16(
                    &self.stream,
                    target.view_mut(),
                    factor(MatrixView::new(a_narrow.view(), a.rows, a.cols), a_turned),
                    factor(MatrixView::new(b_narrow.view(), b.rows, b.cols), b_turned),
                    alpha,
                    accumulate,
                )
            }
        };
        must(done);
        self.settle(target.data);
    }

    /// `target[rows[i]] += factors[i] · source[i]`.
    fn scatter(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        let list = ScatterList::new(rows);
        let (source, factors) = (self.input_matrix(source), self.send(factors));
        let (mut words, mut target) = (self.room(list.words()), self.target_matrix(target));
        must(self.kernels.scatter_add(
            &self.stream,
            source.view(),
            &list,
            factors.view(),
            target.view_mut(),
            words.view_mut(),
        ));
        self.settle(target.data);
    }
}

/// Checks the shapes of a product with a factor `[depth, outputs]`; whether there is nothing to compute.
#[track_caller]
pub(super) fn is_nothing(
    c: &MatrixMut<'_>,
    a: &Matrix<'_>,
    (depth, outputs): (usize, usize),
    accumulate: bool,
) -> bool {
    assert_eq!(
        (a.rows, depth, outputs),
        (c.rows, a.cols, c.cols),
        "shapes of a product"
    );
    let is_empty = c.rows * c.cols == 0;
    assert!(is_empty || depth > 0 || accumulate, "a product without depth");
    is_empty || depth == 0
}

pub(super) fn factor<T>(stored: MatrixView<'_, T>, turned: bool) -> Factor<'_, T> {
    if turned {
        Factor::transpose_of(stored)
    } else {
        Factor::new(stored)
    }
}

/// Diagonal keys or values of all queries, without what lies behind them.
fn diagonals<'a>(data: Floats<'a>, attention: &Attention<'_>, width: usize) -> Floats<'a> {
    data.part(0..attention.diagonals * attention.plan.queries() * width)
}

impl Device for Cuda {
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    fn stream(&self) -> Option<&Stream> {
        Some(&self.stream)
    }

    fn finish(&self) {
        must(self.stream.synchronize());
    }

    fn products(&self) -> Products {
        match self.precision {
            Precision::F32 => Products::F32,
            Precision::Bf16 => Products::Bf16,
        }
    }

    fn fit(&self, buffer: &mut Buffer, name: &'static str, len: usize) {
        if !buffer.resize_on_gpu(len) {
            // What it had goes first, so that both need not fit.
            *buffer = Buffer::default();
            *buffer = Buffer::on_gpu(must(self.memory.take(name, len)), len);
        }
    }

    fn assign(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        must(match (target.0, source.0) {
            (PlaceMut::Gpu(to), Place::Gpu(from)) => self.stream.copy(from, to),
            (PlaceMut::Gpu(to), Place::Host(from)) => self.stream.send(from, to),
            (PlaceMut::Host(to), Place::Gpu(from)) => self.stream.download(from, to),
            (PlaceMut::Host(to), Place::Host(from)) => {
                to.copy_from_slice(from);
                Ok(())
            }
        });
    }

    fn fill(&self, x: FloatsMut<'_>, value: f32) {
        must(match x.0 {
            PlaceMut::Gpu(x) if value.to_bits() == 0 => self.stream.zero(x),
            PlaceMut::Gpu(x) => self.kernels.fill(&self.stream, x, value),
            PlaceMut::Host(x) => {
                x.fill(value);
                Ok(())
            }
        });
    }

    fn capture(
        &self,
        x: Matrix<'_>,
        dtype: HiddenDtype,
        out: &mut [u8],
        row_bytes: usize,
    ) -> Option<InFlight<'_>> {
        let (rows, cols, bytes) = (x.rows, x.cols, x.cols * dtype.bytes());
        check_capture(&x, dtype, out, row_bytes);
        if rows * bytes == 0 {
            return None;
        }
        let x = self.input_matrix(x);
        // A copy of its own: what it comes from changes with the next layer.
        let source = match dtype {
            HiddenDtype::Bf16 => self.narrow(x.view(), rows, cols).cast(),
            HiddenDtype::F32 => {
                let mut dense = self.room(rows * cols);
                let to = MatrixViewMut::new(dense.view_mut(), rows, cols);
                must(self.kernels.copy(&self.stream, x.view(), to));
                dense.cast()
            }
        };
        Some(must(self.begin_landing(&self.landing, source, rows, bytes)))
    }

    fn send_ahead(&self, states: &HiddenStates) -> Option<Arrival> {
        Some(self.begin_arrival(states))
    }

    fn widen(&self, arrival: &Arrival, rows: &[u32], out: MatrixMut<'_>) {
        self.widen_arrival(arrival, rows, out);
    }

    fn seek_beyond(&self, x: Matrix<'_>, largest: f32) -> Sought<'_> {
        if x.rows == 0 {
            return Sought::Known(None);
        }
        let (x, mut flags) = (self.input_matrix(x), self.room::<u32>(x.rows));
        must(
            self.kernels
                .beyond(&self.stream, x.view(), largest, flags.view_mut()),
        );
        let flags = self.begin_landing(&self.flags, flags.cast(), x.rows, size_of::<u32>());
        Sought::UnderWay(must(flags))
    }

    fn checksum(&self, x: Floats<'_>) -> u64 {
        let (x, mut parts) = (self.input(x), self.room(Kernels::sum_parts(x.len())));
        must(self.kernels.checksum(&self.stream, x.view(), parts.view_mut()))
    }

    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        self.product(c, a, b, alpha, accumulate);
    }

    fn keep(&self, weights: &dyn StoredMatrix) {
        self.keep_weights(weights);
    }

    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool) {
        self.stored_product(c, a, weights, accumulate);
    }

    fn rms_norm(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        epsilon: f32,
        y: MatrixMut<'_>,
        rstd: FloatsMut<'_>,
    ) {
        let (x, weight) = (self.input_matrix(x), self.input(weight));
        let (mut y, mut rstd) = (self.target_matrix(y), self.output(rstd));
        must(self.kernels.rms_norm(
            &self.stream,
            x.view(),
            weight.view(),
            epsilon,
            y.view_mut(),
            rstd.view_mut(),
        ));
        self.settle(y.data);
        self.settle(rstd);
    }

    fn rms_norm_backward(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dx: MatrixMut<'_>,
    ) {
        let (x, weight, rstd) = (self.input_matrix(x), self.input(weight), self.input(rstd));
        let (dy, mut dx) = (self.input_matrix(dy), self.target_matrix(dx));
        must(self.kernels.rms_norm_backward(
            &self.stream,
            x.view(),
            weight.view(),
            rstd.view(),
            dy.view(),
            dx.view_mut(),
        ));
        self.settle(dx.data);
    }

    fn rms_norm_weight_gradient(
        &self,
        x: Matrix<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dweight: FloatsMut<'_>,
    ) {
        let mut parts = self.room(Kernels::norm_parts(x.rows, x.cols));
        let (x, rstd, dy) = (self.input_matrix(x), self.input(rstd), self.input_matrix(dy));
        let mut dweight = self.target(dweight);
        must(self.kernels.rms_norm_weight_gradient(
            &self.stream,
            x.view(),
            rstd.view(),
            dy.view(),
            parts.view_mut(),
            dweight.view_mut(),
        ));
        self.settle(dweight);
    }

    fn rotate(&self, x: FloatsMut<'_>, head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn) {
        if positions.is_empty() || table.half() == 0 {
            return;
        }
        let (cos, sin) = table.angles();
        let (cos, sin) = (self.input(cos), self.input(sin));
        let mut places = self.room(positions.len());
        let places = must(Indices::upload(&self.stream, positions, places.view_mut()));
        let angles = (
            MatrixView::new(cos.view(), table.positions(), table.half()),
            MatrixView::new(sin.view(), table.positions(), table.half()),
        );
        let mut x = self.target(x);
        must(self.kernels.rotate(
            &self.stream,
            x.view_mut(),
            head_dim,
            angles,
            table.offset(),
            table.pairing(),
            places,
            turn,
        ));
        self.settle(x);
    }

    fn swiglu(&self, gate: Floats<'_>, up: Floats<'_>, out: FloatsMut<'_>) {
        self.gated(Gate::Silu, gate, up, out);
    }

    fn swiglu_backward(&self, gate: FloatsMut<'_>, up: FloatsMut<'_>, dout: Floats<'_>) {
        let (mut gate, mut up, dout) = (self.target(gate), self.target(up), self.input(dout));
        must(
            self.kernels
                .swiglu_backward(&self.stream, gate.view_mut(), up.view_mut(), dout.view()),
        );
        self.settle(gate);
        self.settle(up);
    }

    fn gather(&self, table: Matrix<'_>, rows: &[u32], out: MatrixMut<'_>) {
        let (table, mut out) = (self.input_matrix(table), self.target_matrix(out));
        let mut places = self.room(rows.len());
        let places = must(Indices::upload(&self.stream, rows, places.view_mut()));
        must(
            self.kernels
                .gather(&self.stream, table.view(), places, out.view_mut()),
        );
        self.settle(out.data);
    }

    fn gather_stored(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>) {
        self.gather_weights(table, rows, out);
    }

    fn copy(&self, source: Matrix<'_>, target: MatrixMut<'_>) {
        let (source, mut target) = (self.input_matrix(source), self.target_matrix(target));
        must(self.kernels.copy(&self.stream, source.view(), target.view_mut()));
        self.settle(target.data);
    }

    fn scatter_add(&self, source: Matrix<'_>, rows: &[u32], target: MatrixMut<'_>) {
        self.scatter(source, rows, &[], target);
    }

    fn scatter_add_scaled(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        assert_eq!(factors.len(), rows.len(), "shapes of a scatter");
        self.scatter(source, rows, factors, target);
    }

    fn gated(&self, gate: Gate, g: Floats<'_>, u: Floats<'_>, out: FloatsMut<'_>) {
        let (g, u, mut out) = (self.input(g), self.input(u), self.output(out));
        must(
            self.kernels
                .gated(&self.stream, gate, g.view(), u.view(), out.view_mut()),
        );
        self.settle(out);
    }

    fn add_bias(&self, x: MatrixMut<'_>, bias: Floats<'_>) {
        let (mut x, bias) = (self.target_matrix(x), self.input(bias));
        must(self.kernels.add_bias(&self.stream, x.view_mut(), bias.view()));
        self.settle(x.data);
    }

    fn scale(&self, x: FloatsMut<'_>, factor: f32) {
        let mut x = self.target(x);
        must(self.kernels.scale(&self.stream, x.view_mut(), factor));
        self.settle(x);
    }

    fn softcap(&self, x: FloatsMut<'_>, cap: f32) {
        let mut x = self.target(x);
        must(self.kernels.softcap(&self.stream, x.view_mut(), cap));
        self.settle(x);
    }

    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]) {
        let (logits, bias) = (self.input_matrix(logits), self.send(routing.choice_bias));
        let (mut experts, mut shares) = (self.room(chosen.len()), self.room(weights.len()));
        must(self.kernels.route(
            &self.stream,
            routing,
            bias.view(),
            logits.view(),
            experts.view_mut(),
            shares.view_mut(),
        ));
        self.receive(&experts, chosen);
        self.receive(&shares, weights);
    }

    fn add(&self, target: FloatsMut<'_>, source: Floats<'_>) {
        let (mut target, source) = (self.target(target), self.input(source));
        must(self.kernels.add(&self.stream, target.view_mut(), source.view()));
        self.settle(target);
    }

    fn attention(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: FloatsMut<'_>,
        lse: FloatsMut<'_>,
    ) {
        let inputs = self.attention_inputs(attention, inputs);
        let sinks = self.send(attention.sinks);
        let (mut out, mut lse) = (self.output(out), self.output(lse));
        must(self.with_tables(attention, |tables| {
            self.kernels.attention(
                &self.stream,
                tables,
                &operands_of(&inputs, attention.diagonals),
                sinks.view(),
                attention.softcap,
                out.view_mut(),
                lse.view_mut(),
            )
        }));
        self.settle(out);
        self.settle(lse);
    }

    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: Floats<'_>,
        dout: Floats<'_>,
        gradients: AttentionGradients<'_>,
    ) {
        assert!(
            attention.sinks.is_empty() && attention.softcap.is_none(),
            "only a draft's attention has a backward pass"
        );
        let inputs = self.attention_inputs(attention, inputs);
        let diagonal_len = attention.diagonals * attention.plan.queries() * attention.shape.key_width();
        let mut targets = [
            gradients.dq,
            gradients.dk,
            gradients.dv,
            gradients.dk_diagonal.into_part(0..diagonal_len),
            gradients.dv_diagonal.into_part(0..diagonal_len),
        ]
        .map(|target| self.target(target));
        let mut delta = self.room(lse.len());
        let (lse, dout) = (self.input(lse), self.input(dout));
        must(self.with_tables(attention, |tables| {
            self.kernels.attention_backward(
                &self.stream,
                tables,
                &operands_of(&inputs, attention.diagonals),
                lse.view(),
                dout.view(),
                targets.each_mut().map(Output::view_mut),
                delta.view_mut(),
            )
        }));
        targets.into_iter().for_each(|target| self.settle(target));
    }

    fn softmax_targets(&self, logits: MatrixMut<'_>, targets: &mut [TargetRow]) {
        let mut logits = self.target_matrix(logits);
        let (mut entropy, mut argmax) = (self.room(targets.len()), self.room(targets.len()));
        must(self.kernels.softmax_targets(
            &self.stream,
            logits.view_mut(),
            entropy.view_mut(),
            argmax.view_mut(),
        ));
        self.settle(logits.data);
        let (mut entropies, mut places) = (vec![0.0; targets.len()], vec![0; targets.len()]);
        self.receive(&entropy, &mut entropies);
        self.receive(&argmax, &mut places);
        for ((target, negative_entropy), argmax) in targets.iter_mut().zip(entropies).zip(places) {
            *target = TargetRow {
                negative_entropy,
                argmax,
            };
        }
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
        let entropies: Vec<f32> = targets.iter().map(|target| target.negative_entropy).collect();
        let (mut logits, p) = (self.target_matrix(logits), self.input_matrix(probabilities));
        let (entropy, coefficients) = (self.send(&entropies), self.send(coefficients));
        let mut places = self.room(target_of.len());
        let places = must(Indices::upload(&self.stream, target_of, places.view_mut()));
        let (mut loss, mut argmax) = (self.room(losses.len()), self.room(losses.len()));
        must(self.kernels.kl_divergence(
            &self.stream,
            logits.view_mut(),
            p.view(),
            entropy.view(),
            places,
            coefficients.view(),
            loss.view_mut(),
            argmax.view_mut(),
        ));
        self.settle(logits.data);
        let (mut values, mut places) = (vec![0.0; losses.len()], vec![0; losses.len()]);
        self.receive(&loss, &mut values);
        self.receive(&argmax, &mut places);
        for ((row, loss), argmax) in losses.iter_mut().zip(values).zip(places) {
            *row = RowLoss { loss, argmax };
        }
    }

    fn argmax(&self, x: Matrix<'_>, out: &mut [u32]) {
        let (x, mut places) = (self.input_matrix(x), self.room(out.len()));
        must(self.kernels.argmax(&self.stream, x.view(), places.view_mut()));
        self.receive(&places, out);
    }

    fn sum_of_squares(&self, x: Floats<'_>) -> f64 {
        let (x, mut parts) = (self.input(x), self.room(Kernels::sum_parts(x.len())));
        must(
            self.kernels
                .sum_of_squares(&self.stream, x.view(), parts.view_mut()),
        )
    }

    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: FloatsMut<'_>,
        m: FloatsMut<'_>,
        v: FloatsMut<'_>,
        gradient: Floats<'_>,
    ) {
        let mut targets = [parameters, m, v].map(|target| self.target(target));
        let gradient = self.input(gradient);
        let [p, first, second] = targets.each_mut().map(Output::view_mut);
        must(
            self.kernels
                .adamw(&self.stream, update, p, first, second, gradient.view()),
        );
        targets.into_iter().for_each(|target| self.settle(target));
    }
}

/// The inputs of an attention, as a kernel takes them.
fn operands_of<'a>(inputs: &'a [Input<'_, '_>; 5], diagonals: usize) -> AttentionOperands<'a> {
    let [q, k, v, k_diagonal, v_diagonal] = inputs.each_ref().map(Input::view);
    AttentionOperands {
        q,
        k,
        v,
        k_diagonal,
        v_diagonal,
        diagonals,
    }
}

impl Cuda {
    fn attention_inputs<'a>(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'a>,
    ) -> [Input<'_, 'a>; 5] {
        let shape = attention.shape;
        [
            inputs.q,
            inputs.k,
            inputs.v,
            diagonals(inputs.k_diagonal, attention, shape.key_width()),
            diagonals(inputs.v_diagonal, attention, shape.value_width()),
        ]
        .map(|operand| self.input(operand))
    }

    /// Calls `work` with the tables of a call: those of the last one if it saw the same.
    fn with_tables(
        &self,
        attention: &Attention<'_>,
        work: impl FnOnce(&AttentionTables) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let (shape, plan) = (attention.shape, attention.plan);
        let mut last = self.last_plan.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, tables) = match &mut *last {
            Some(last) => {
                if last.1.shape() != shape || last.0 != *plan {
                    last.1.replace(&self.context, &self.stream, shape, plan)?;
                    last.0.clone_from(plan);
                }
                last
            }
            none => {
                let tables = AttentionTables::new(&self.context, &self.stream, shape, plan)?;
                none.insert((plan.clone(), tables))
            }
        };
        work(tables)
    }
}
