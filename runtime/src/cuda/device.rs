//! [`Device`] on a GPU, for buffers that lie on the host.
//!
//! Every operation sends its operands, launches, waits, and brings the results back. So all of eaglet's model code runs
//! on a GPU as it stands, with the numbers of the GPU's own kernels and products. It is a proof, not a fast path: the
//! copies cost more than what is computed until buffers live on the device.
//!
//! A GPU that fails makes the operation panic with its [`CudaError`]: the trait's operations cannot fail, and a rank that
//! lost its device has to be started again.

use std::sync::Arc;

use bytemuck::Pod;

use super::blas::{Blas, Factor};
use super::cache::KernelCache;
use super::driver::{Context, CudaError, Driver};
use super::kernels::{AttentionOperands, AttentionTables, Kernels, ScatterList};
use super::library::SearchPath;
use super::matrix::{Indices, MatrixView, MatrixViewMut};
use super::nvrtc::Nvrtc;
use super::staging::{Lent, Staging};
use super::stream::Stream;
use crate::device::{
    AdamWUpdate, Attention, AttentionGradients, AttentionInputs, Device, Gate, Matrix, MatrixMut,
    RotaryTable, Routing, RowLoss, StoredMatrix, TargetRow, Turn,
};

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
    staging: Staging,
    blas: Blas,
    kernels: Kernels,
    stream: Stream,
    context: Arc<Context>,
    precision: Precision,
}

/// The operations of [`Device`] cannot fail.
#[track_caller]
fn must<T>(result: Result<T, CudaError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => std::panic::panic_any(error),
    }
}

/// Elements of a matrix from its first to its last.
fn reach(rows: usize, cols: usize, row_stride: usize, col_stride: usize) -> usize {
    if rows == 0 || cols == 0 {
        0
    } else {
        (rows - 1) * row_stride + (cols - 1) * col_stride + 1
    }
}

fn reach_mut(of: &MatrixMut<'_>) -> usize {
    reach(of.rows, of.cols, of.row_stride, 1)
}

/// A matrix whose elements lie along rows, sent to the device.
struct Sent<'a> {
    data: Lent<'a, f32>,
    rows: usize,
    cols: usize,
    row_stride: usize,
}

impl Sent<'_> {
    fn view(&mut self) -> MatrixView<'_> {
        MatrixView::strided(self.data.view(), self.rows, self.cols, self.row_stride)
    }

    fn view_mut(&mut self) -> MatrixViewMut<'_> {
        MatrixViewMut::strided(self.data.view_mut(), self.rows, self.cols, self.row_stride)
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
        let stream = Stream::new(&context)?;
        let kernels = Kernels::new(&context, Nvrtc::open(search)?, cache)?;
        Ok(Self {
            staging: Staging::new(&context),
            blas: Blas::new(&context, search)?,
            kernels,
            stream,
            context,
            precision,
        })
    }

    fn room<T: Pod>(&self, len: usize) -> Lent<'_, T> {
        must(self.staging.lend(len))
    }

    fn send<T: Pod>(&self, from: &[T]) -> Lent<'_, T> {
        let mut to = self.room(from.len());
        must(self.stream.upload(from, to.view_mut()));
        to
    }

    fn receive<T: Pod>(&self, mut from: Lent<'_, T>, to: &mut [T]) {
        must(self.stream.download(from.view(), to));
    }

    /// A matrix as it lies; of a transpose, what it is the transpose of.
    fn send_stored(&self, matrix: &Matrix<'_>) -> (Sent<'_>, bool) {
        let turned = matrix.col_stride != 1;
        if turned && matrix.row_stride != 1 {
            // Every second row of a transpose, of experts whose gates and values alternate: neither way without gaps.
            let at = |i: usize| i / matrix.cols * matrix.row_stride + i % matrix.cols * matrix.col_stride;
            let dense: Vec<f32> = (0..matrix.rows * matrix.cols)
                .map(|i| matrix.data[at(i)])
                .collect();
            let sent = Sent {
                data: self.send(&dense),
                rows: matrix.rows,
                cols: matrix.cols,
                row_stride: matrix.cols,
            };
            return (sent, false);
        }
        let len = reach(matrix.rows, matrix.cols, matrix.row_stride, matrix.col_stride);
        let (rows, cols, row_stride) = match turned {
            true => (matrix.cols, matrix.rows, matrix.col_stride),
            false => (matrix.rows, matrix.cols, matrix.row_stride),
        };
        let sent = Sent {
            data: self.send(&matrix.data[..len]),
            rows,
            cols,
            row_stride: row_stride.max(cols),
        };
        (sent, turned)
    }

    fn send_matrix(&self, matrix: &Matrix<'_>) -> Sent<'_> {
        assert_eq!(matrix.col_stride, 1, "elements of a row are adjacent");
        self.send_stored(matrix).0
    }

    /// A matrix that is written to. What lies between its rows is carried along.
    fn send_target(&self, matrix: &MatrixMut<'_>) -> Sent<'_> {
        Sent {
            data: self.send(&matrix.data[..reach_mut(matrix)]),
            rows: matrix.rows,
            cols: matrix.cols,
            row_stride: matrix.row_stride.max(matrix.cols),
        }
    }

    fn receive_matrix(&self, from: Sent<'_>, to: MatrixMut<'_>) {
        let len = reach_mut(&to);
        self.receive(from.data, &mut to.data[..len]);
    }

    /// bf16 of a matrix, in rows without gaps.
    fn narrow(&self, sent: &mut Sent<'_>) -> Lent<'_, u16> {
        let (rows, cols) = (sent.rows, sent.cols);
        let mut narrow = self.room(rows * cols);
        let to = MatrixViewMut::new(narrow.view_mut(), rows, cols);
        must(self.kernels.narrow(&self.stream, sent.view(), to));
        narrow
    }

    fn product(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        assert_eq!(
            (a.rows, b.rows, b.cols),
            (c.rows, a.cols, c.cols),
            "shapes of a product"
        );
        if c.rows * c.cols == 0 {
            return;
        }
        if a.cols == 0 {
            assert!(accumulate, "a product without depth");
            return;
        }
        let ((mut a, a_turned), (mut b, b_turned)) = (self.send_stored(&a), self.send_stored(&b));
        let mut target = self.send_target(&c);
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
                let (mut a_narrow, mut b_narrow) = (self.narrow(&mut a), self.narrow(&mut b));
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
        self.receive_matrix(target, c);
    }

    /// `target[rows[i]] += factors[i] · source[i]`.
    fn scatter(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        let list = ScatterList::new(rows);
        let (mut source, mut factors) = (self.send_matrix(&source), self.send(factors));
        let (mut words, mut sent) = (self.room(list.words()), self.send_target(&target));
        must(self.kernels.scatter_add(
            &self.stream,
            source.view(),
            &list,
            factors.view(),
            sent.view_mut(),
            words.view_mut(),
        ));
        self.receive_matrix(sent, target);
    }
}

fn factor<T>(stored: MatrixView<'_, T>, turned: bool) -> Factor<'_, T> {
    if turned {
        Factor::transpose_of(stored)
    } else {
        Factor::new(stored)
    }
}

/// Diagonal keys or values of all queries, without what lies behind them.
fn diagonals<'a>(data: &'a [f32], attention: &Attention<'_>, width: usize) -> &'a [f32] {
    &data[..attention.diagonals * attention.plan.queries() * width]
}

impl Device for Cuda {
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool) {
        self.product(c, a, b, alpha, accumulate);
    }

    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool) {
        let (rows, cols) = (weights.rows(), weights.cols());
        if let Some(stored) = weights.in_place() {
            return self.product(c, a, stored.transposed(), 1.0, accumulate);
        }
        let mut unpacked = vec![0.0; rows * cols];
        weights.unpack(0..rows, &mut unpacked);
        let stored = Matrix::new(&unpacked, rows, cols);
        self.product(c, a, stored.transposed(), 1.0, accumulate);
    }

    fn rms_norm(&self, x: Matrix<'_>, weight: &[f32], epsilon: f32, y: MatrixMut<'_>, rstd: &mut [f32]) {
        let (mut x, mut weight) = (self.send_matrix(&x), self.send(weight));
        let (mut out, mut inverse) = (self.send_target(&y), self.room(rstd.len()));
        must(self.kernels.rms_norm(
            &self.stream,
            x.view(),
            weight.view(),
            epsilon,
            out.view_mut(),
            inverse.view_mut(),
        ));
        self.receive_matrix(out, y);
        self.receive(inverse, rstd);
    }

    fn rms_norm_backward(
        &self,
        x: Matrix<'_>,
        weight: &[f32],
        rstd: &[f32],
        dy: Matrix<'_>,
        dx: MatrixMut<'_>,
    ) {
        let (mut x, mut weight, mut rstd) = (self.send_matrix(&x), self.send(weight), self.send(rstd));
        let (mut dy, mut out) = (self.send_matrix(&dy), self.send_target(&dx));
        must(self.kernels.rms_norm_backward(
            &self.stream,
            x.view(),
            weight.view(),
            rstd.view(),
            dy.view(),
            out.view_mut(),
        ));
        self.receive_matrix(out, dx);
    }

    fn rms_norm_weight_gradient(&self, x: Matrix<'_>, rstd: &[f32], dy: Matrix<'_>, dweight: &mut [f32]) {
        let mut parts = self.room(Kernels::norm_parts(x.rows, x.cols));
        let (mut x, mut rstd, mut dy) = (self.send_matrix(&x), self.send(rstd), self.send_matrix(&dy));
        let mut out = self.send(dweight);
        must(self.kernels.rms_norm_weight_gradient(
            &self.stream,
            x.view(),
            rstd.view(),
            dy.view(),
            parts.view_mut(),
            out.view_mut(),
        ));
        self.receive(out, dweight);
    }

    fn rotate(&self, x: &mut [f32], head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn) {
        if positions.is_empty() || table.half() == 0 {
            return;
        }
        let (cos, sin) = table.angles();
        // Only the angles that are needed, in the order of rows.
        let pick = |angles: &[f32]| -> Vec<f32> {
            let row = |&position: &u32| &angles[position as usize * table.half()..][..table.half()];
            positions.iter().flat_map(row).copied().collect()
        };
        let rows: Vec<u32> = (0..positions.len() as u32).collect();
        let (mut cos, mut sin) = (self.send(&pick(cos)), self.send(&pick(sin)));
        let (mut places, mut out) = (self.room(rows.len()), self.send(x));
        let places = must(Indices::upload(&self.stream, &rows, places.view_mut()));
        let angles = (
            MatrixView::new(cos.view(), rows.len(), table.half()),
            MatrixView::new(sin.view(), rows.len(), table.half()),
        );
        must(self.kernels.rotate(
            &self.stream,
            out.view_mut(),
            head_dim,
            angles,
            table.offset(),
            table.pairing(),
            places,
            turn,
        ));
        self.receive(out, x);
    }

    fn swiglu(&self, gate: &[f32], up: &[f32], out: &mut [f32]) {
        self.gated(Gate::Silu, gate, up, out);
    }

    fn swiglu_backward(&self, gate: &mut [f32], up: &mut [f32], dout: &[f32]) {
        let (mut g, mut u, mut dout) = (self.send(gate), self.send(up), self.send(dout));
        let done = self
            .kernels
            .swiglu_backward(&self.stream, g.view_mut(), u.view_mut(), dout.view());
        must(done);
        self.receive(g, gate);
        self.receive(u, up);
    }

    fn gather(&self, table: Matrix<'_>, rows: &[u32], out: MatrixMut<'_>) {
        let mut target = self.send_target(&out);
        let (mut table, mut places) = (self.send_matrix(&table), self.room(rows.len()));
        let places = must(Indices::upload(&self.stream, rows, places.view_mut()));
        must(
            self.kernels
                .gather(&self.stream, table.view(), places, target.view_mut()),
        );
        self.receive_matrix(target, out);
    }

    fn gather_stored(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>) {
        assert_eq!(
            (rows.len(), table.cols()),
            (out.rows, out.cols),
            "shapes of a gather"
        );
        for (place, &row) in rows.iter().enumerate() {
            let to = &mut out.data[place * out.row_stride..][..out.cols];
            table.unpack(row as usize..row as usize + 1, to);
        }
    }

    fn copy(&self, source: Matrix<'_>, target: MatrixMut<'_>) {
        let (mut from, mut to) = (self.send_matrix(&source), self.send_target(&target));
        must(self.kernels.copy(&self.stream, from.view(), to.view_mut()));
        self.receive_matrix(to, target);
    }

    fn scatter_add(&self, source: Matrix<'_>, rows: &[u32], target: MatrixMut<'_>) {
        self.scatter(source, rows, &[], target);
    }

    fn scatter_add_scaled(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>) {
        assert_eq!(factors.len(), rows.len(), "shapes of a scatter");
        self.scatter(source, rows, factors, target);
    }

    fn gated(&self, gate: Gate, g: &[f32], u: &[f32], out: &mut [f32]) {
        let (mut g, mut u, mut to) = (self.send(g), self.send(u), self.room(out.len()));
        must(
            self.kernels
                .gated(&self.stream, gate, g.view(), u.view(), to.view_mut()),
        );
        self.receive(to, out);
    }

    fn add_bias(&self, x: MatrixMut<'_>, bias: &[f32]) {
        let (mut to, mut bias) = (self.send_target(&x), self.send(bias));
        must(self.kernels.add_bias(&self.stream, to.view_mut(), bias.view()));
        self.receive_matrix(to, x);
    }

    fn scale(&self, x: &mut [f32], factor: f32) {
        let mut to = self.send(x);
        must(self.kernels.scale(&self.stream, to.view_mut(), factor));
        self.receive(to, x);
    }

    fn softcap(&self, x: &mut [f32], cap: f32) {
        let mut to = self.send(x);
        must(self.kernels.softcap(&self.stream, to.view_mut(), cap));
        self.receive(to, x);
    }

    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]) {
        let (mut logits, mut bias) = (self.send_matrix(&logits), self.send(routing.choice_bias));
        let (mut experts, mut shares) = (self.room(chosen.len()), self.room(weights.len()));
        must(self.kernels.route(
            &self.stream,
            routing,
            bias.view(),
            logits.view(),
            experts.view_mut(),
            shares.view_mut(),
        ));
        self.receive(experts, chosen);
        self.receive(shares, weights);
    }

    fn add(&self, target: &mut [f32], source: &[f32]) {
        let (mut to, mut from) = (self.send(target), self.send(source));
        must(self.kernels.add(&self.stream, to.view_mut(), from.view()));
        self.receive(to, target);
    }

    fn attention(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: &mut [f32],
        lse: &mut [f32],
    ) {
        let shape = attention.shape;
        let tables = must(AttentionTables::new(
            &self.context,
            &self.stream,
            shape,
            attention.plan,
        ));
        let mut sent = self.send_inputs(attention, inputs);
        let operands = operands(&mut sent, attention.diagonals);
        let mut sinks = self.send(attention.sinks);
        let (mut result, mut sums) = (self.room(out.len()), self.room(lse.len()));
        must(self.kernels.attention(
            &self.stream,
            &tables,
            &operands,
            sinks.view(),
            attention.softcap,
            result.view_mut(),
            sums.view_mut(),
        ));
        self.receive(result, out);
        self.receive(sums, lse);
    }

    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: &[f32],
        dout: &[f32],
        gradients: AttentionGradients<'_>,
    ) {
        let shape = attention.shape;
        assert!(
            attention.sinks.is_empty() && attention.softcap.is_none(),
            "only a draft's attention has a backward pass"
        );
        let tables = must(AttentionTables::new(
            &self.context,
            &self.stream,
            shape,
            attention.plan,
        ));
        let mut sent = self.send_inputs(attention, inputs);
        let operands = operands(&mut sent, attention.diagonals);
        let diagonal_len = attention.diagonals * attention.plan.queries() * shape.key_width();
        let targets = [
            gradients.dq,
            gradients.dk,
            gradients.dv,
            &mut gradients.dk_diagonal[..diagonal_len],
            &mut gradients.dv_diagonal[..diagonal_len],
        ];
        let mut written = targets.each_ref().map(|target| self.send(target));
        let (mut lse, mut dout, mut delta) = (self.send(lse), self.send(dout), self.room(lse.len()));
        must(self.kernels.attention_backward(
            &self.stream,
            &tables,
            &operands,
            lse.view(),
            dout.view(),
            written.each_mut().map(|written| written.view_mut()),
            delta.view_mut(),
        ));
        for (from, to) in written.into_iter().zip(targets) {
            self.receive(from, to);
        }
    }

    fn softmax_targets(&self, logits: MatrixMut<'_>, targets: &mut [TargetRow]) {
        let mut sent = self.send_target(&logits);
        let (mut entropy, mut argmax) = (self.room(targets.len()), self.room(targets.len()));
        must(self.kernels.softmax_targets(
            &self.stream,
            sent.view_mut(),
            entropy.view_mut(),
            argmax.view_mut(),
        ));
        self.receive_matrix(sent, logits);
        let (mut entropies, mut places) = (vec![0.0; targets.len()], vec![0; targets.len()]);
        self.receive(entropy, &mut entropies);
        self.receive(argmax, &mut places);
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
        let (mut sent, mut p) = (self.send_target(&logits), self.send_matrix(&probabilities));
        let (mut entropy, mut coefficients) = (self.send(&entropies), self.send(coefficients));
        let mut places = self.room(target_of.len());
        let places = must(Indices::upload(&self.stream, target_of, places.view_mut()));
        let (mut loss, mut argmax) = (self.room(losses.len()), self.room(losses.len()));
        must(self.kernels.kl_divergence(
            &self.stream,
            sent.view_mut(),
            p.view(),
            entropy.view(),
            places,
            coefficients.view(),
            loss.view_mut(),
            argmax.view_mut(),
        ));
        self.receive_matrix(sent, logits);
        let (mut values, mut places) = (vec![0.0; losses.len()], vec![0; losses.len()]);
        self.receive(loss, &mut values);
        self.receive(argmax, &mut places);
        for ((row, loss), argmax) in losses.iter_mut().zip(values).zip(places) {
            *row = RowLoss { loss, argmax };
        }
    }

    fn argmax(&self, x: Matrix<'_>, out: &mut [u32]) {
        let (mut x, mut places) = (self.send_matrix(&x), self.room(out.len()));
        must(self.kernels.argmax(&self.stream, x.view(), places.view_mut()));
        self.receive(places, out);
    }

    fn sum_of_squares(&self, x: &[f32]) -> f64 {
        let (mut sent, mut parts) = (self.send(x), self.room(Kernels::sum_parts(x.len())));
        must(
            self.kernels
                .sum_of_squares(&self.stream, sent.view(), parts.view_mut()),
        )
    }

    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        gradient: &[f32],
    ) {
        let targets = [parameters, m, v];
        let mut sent = targets.each_ref().map(|target| self.send(target));
        let mut gradient = self.send(gradient);
        let [p, first, second] = sent.each_mut().map(|sent| sent.view_mut());
        must(
            self.kernels
                .adamw(&self.stream, update, p, first, second, gradient.view()),
        );
        for (from, to) in sent.into_iter().zip(targets) {
            self.receive(from, to);
        }
    }
}

/// What [`Cuda::send_inputs`] has sent, as a kernel takes it.
fn operands<'a>(sent: &'a mut [Lent<'_, f32>; 5], diagonals: usize) -> AttentionOperands<'a> {
    let [q, k, v, k_diagonal, v_diagonal] = sent.each_mut().map(|sent| sent.view());
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
    fn send_inputs(&self, attention: &Attention<'_>, inputs: &AttentionInputs<'_>) -> [Lent<'_, f32>; 5] {
        let shape = attention.shape;
        [
            inputs.q,
            inputs.k,
            inputs.v,
            diagonals(inputs.k_diagonal, attention, shape.key_width()),
            diagonals(inputs.v_diagonal, attention, shape.value_width()),
        ]
        .map(|operand| self.send(operand))
    }
}
