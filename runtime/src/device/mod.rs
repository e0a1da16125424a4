//! Where numbers are computed: one trait, and the CPU behind it.
//!
//! [`Device`] is the seam between model code and hardware. Model code (the draft, the verifier) is written once over it
//! and holds no loops over elements. It owns [`Buffer`]s, contiguous and in row-major order, and hands out [`Floats`]; where
//! they lie is the device's business, and what it takes from the host it takes from any slice.
//!
//! Invariants every backend keeps:
//! - **Repeatable.** Sums have a fixed order: the same inputs give the same bits, whatever the number of threads.
//! - **Rows are independent.** A row of a product, a norm, a rotation or an attention output has the same bits whatever
//!   other rows share the call, so a row can be computed again in another batch.
//! - **Exact shapes.** A shape that does not fit is a bug of the caller and panics before anything is computed; nothing
//!   that comes from outside reaches this module unchecked.

mod attention;
mod calibration;
mod checksum;
mod cpu;
mod encoded;
pub(crate) mod floats;
mod limits;
pub(crate) mod matrix;
mod products;
mod rotary;
mod routing;
mod sought;
mod stored;
mod timed;

pub use attention::{
    Attention, AttentionGradients, AttentionInputs, AttentionPlan, AttentionShape, GradientsOf, InputsOf,
};
pub use calibration::ProductRates;
pub use checksum::checksum;
pub(crate) use cpu::widen_bf16;
pub use cpu::{Cpu, NoAmx, PackedMatrix, ThreadsError};
pub use encoded::{Encoded, EncodedForm, FloatKind, Keep, Kept, Plane, Prepared, RowSteps};
pub use floats::{Buffer, Floats, FloatsMut};
pub use limits::{DeviceLimits, MachineLimits};
pub use matrix::{Elements, HostMatrix, HostMatrixMut, Matrix, MatrixMut, MatrixMutOf, MatrixOf};
pub use products::{ProductKernel, Products};
pub use rotary::{Pairing, RotaryTable, Turn};
pub use routing::{ExpertGroups, Routing, Scoring};
pub use sought::Sought;
pub use stored::{EachMatrix, StoredMatrix, WeightUse};
pub use timed::{OperationKind, Spent, Timed, Watch};

use crate::contract::HiddenDtype;
use crate::cuda::{Arrival, InFlight, Stream};
use crate::row::HiddenStates;

/// What a gated MLP does to its two inner products; gates are `g`, the others `u`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Gate {
    /// `g · sigmoid(g) · u`.
    Silu,
    /// `gelu(g) · u`, with the tanh approximation.
    GeluTanh,
    /// `g · sigmoid(alpha · g) · (u + 1)`, with `g` cut at `limit` from above and `u` at both sides (gpt-oss).
    Clamped {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// Where both are cut.
        limit: f32,
    },
}

/// What one loss row of [`Device::kl_divergence`] came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RowLoss {
    /// KL(p‖q) of the row, in nats.
    pub loss: f32,
    /// Index of the row's largest logit; the first one when several are equal.
    pub argmax: u32,
}

/// What [`Device::softmax_targets`] leaves besides the probabilities.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TargetRow {
    /// Σ p·ln p, in nats.
    pub negative_entropy: f32,
    /// Index of the row's largest logit; the first one when several are equal.
    pub argmax: u32,
}

/// One AdamW update (decoupled weight decay; the formula of `torch.optim.AdamW`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWUpdate {
    /// Learning rate of this update.
    pub learning_rate: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Number of this update, from 1.
    pub number: u64,
    /// The gradient is multiplied by this first (clipping, averaging).
    pub gradient_scale: f32,
}

#[track_caller]
pub(crate) fn check_capture(x: &Matrix<'_>, dtype: HiddenDtype, out: &[u8], row_bytes: usize) {
    let bytes = x.cols * dtype.bytes();
    assert!(
        bytes <= row_bytes && (x.rows == 0 || out.len() >= (x.rows - 1) * row_bytes + bytes),
        "memory for captured states"
    );
}

/// The operations a draft and a verifier are made of. All floats are `f32` unless a signature says otherwise.
pub trait Device: Send + Sync + 'static {
    /// Runs `work` where the device's operations start fastest; operations called inside `work` are unchanged.
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R;

    /// Whether it computes in the host's memory, so that what it is given there is not copied.
    fn is_host(&self) -> bool {
        false
    }

    /// What orders its work with that of others on the same GPU, if it computes on one.
    fn stream(&self) -> Option<&Stream> {
        None
    }

    /// Says which part of the work comes next: for profilers, and for [`Timed`]. Changes nothing else.
    fn stage(&self, _name: &'static str) {}

    /// Waits until everything asked for so far is done.
    fn finish(&self) {}

    /// What operands of products are really rounded to.
    fn products(&self) -> Products {
        Products::F32
    }

    /// Gives `buffer` `len` elements where operations are fastest. What is in it afterwards is of no meaning, except that
    /// a buffer that grows on the host is zero in what is new. `name` says who holds the memory.
    fn fit(&self, buffer: &mut Buffer, name: &'static str, len: usize);

    /// `target = source`; either of them may lie on the host.
    fn assign(&self, target: FloatsMut<'_>, source: Floats<'_>);

    /// Sets every element of `x` to `value`.
    fn fill(&self, x: FloatsMut<'_>, value: f32);

    /// Writes states to the host: row `i` of `x` `[rows, n]`, in `dtype`, little-endian, to `out[i · row_bytes..]`.
    ///
    /// If something is returned, nothing is written yet: it writes them when it is told to [land](InFlight::land), and
    /// until then the device may compute.
    #[must_use]
    fn capture(
        &self,
        x: Matrix<'_>,
        dtype: HiddenDtype,
        out: &mut [u8],
        row_bytes: usize,
    ) -> Option<InFlight<'_>>;

    /// Looks for the first row of `x` `[rows, n]` with an element that is no number or larger than `largest` in magnitude.
    /// Until the answer is [asked for](Sought::first) the device may compute.
    fn seek_beyond(&self, x: Matrix<'_>, largest: f32) -> Sought<'_>;

    /// Begins to bring captured states to where operations are fastest, while something else is computed; nothing where
    /// that is the host.
    fn send_ahead(&self, _states: &HiddenStates) -> Option<Arrival> {
        None
    }

    /// `out[i]` = state `rows[i]` of those that were sent ahead by this device, counted over all tokens, as f32.
    ///
    /// # Panics
    /// If the shapes differ, a state lies behind the last one, or the device sends nothing ahead.
    fn widen(&self, _arrival: &Arrival, _rows: &[u32], _out: MatrixMut<'_>) {
        unreachable!("only a device that sends states ahead is asked for them")
    }

    /// [`checksum`] of `x`.
    fn checksum(&self, x: Floats<'_>) -> u64;

    /// A copy on the host.
    fn read(&self, x: Floats<'_>) -> Vec<f32> {
        let mut copy = vec![0.0; x.len()];
        self.assign(FloatsMut::from(&mut copy), x);
        copy
    }

    /// `values` where operations are fastest: as they are, or in `room`.
    fn lend<'a>(&self, values: &'a [f32], room: &'a mut Buffer, name: &'static str) -> Floats<'a> {
        self.fit(room, name, values.len());
        self.assign(room.floats_mut(), values.into());
        room.floats()
    }

    /// `values`, where operations are fastest, for good.
    fn place(&self, values: Buffer, name: &'static str) -> Buffer {
        let mut placed = Buffer::default();
        self.fit(&mut placed, name, values.len());
        self.assign(placed.floats_mut(), values.floats());
        placed
    }

    /// Brings weights to where operations are fastest, in the form they are stored in, if there is a place for them
    /// ([`StoredMatrix::kept`]). Products with them are the same before and after; who does not ask pays at the first one.
    fn keep(&self, _weights: &dyn StoredMatrix) {}

    /// [`Self::keep`] for all weights of a model.
    fn keep_all(&self, each: &mut EachMatrix<'_>) {
        each(&mut |weights, _| self.keep(weights));
    }

    /// `c = alpha · a·b`, or `c += alpha · a·b` with `accumulate`; `c` `[m, n]`, `a` `[m, k]`, `b` `[k, n]`.
    ///
    /// Transposes are views: [`Matrix::transposed`]. The sum over k runs in fixed blocks.
    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool);

    /// Whether [`Self::prepare`] does anything.
    fn prepares(&self) -> bool {
        false
    }

    /// Brings the right operand `b` `[k, n]` of several products into the form that they go through fastest, if there is one,
    /// in the memory of what was prepared before if that had its shape. It is what `b` is now, not what it becomes.
    fn prepare(&self, _prepared: &mut Prepared, _b: Matrix<'_>) {}

    /// [`Device::gemm`] with what was prepared of `b`: the same bits.
    fn gemm_prepared(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        b: Matrix<'_>,
        _prepared: &Prepared,
        alpha: f32,
        accumulate: bool,
    ) {
        self.gemm(c, a, b, alpha, accumulate);
    }

    /// `c = a·wᵀ`, or `c += a·wᵀ` with `accumulate`; `c` `[m, n]`, `a` `[m, k]`, `weights` `[n, k]`.
    ///
    /// The weights are unpacked tile by tile, so a mapped model stays packed; the device may keep them for itself
    /// ([`StoredMatrix::kept`]). Same bits as [`Device::gemm`] on the unpacked weights.
    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool);

    /// `y = x / rms(x) · weight` per row, and `rstd[row] = 1 / rms(x)`; `x`, `y` `[rows, n]`, `weight` `[n]`.
    fn rms_norm(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        epsilon: f32,
        y: MatrixMut<'_>,
        rstd: FloatsMut<'_>,
    );

    /// Adds the input gradient of [`Device::rms_norm`] to `dx` `[rows, n]`.
    fn rms_norm_backward(
        &self,
        x: Matrix<'_>,
        weight: Floats<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dx: MatrixMut<'_>,
    );

    /// Adds the weight gradient of [`Device::rms_norm`] to `dweight` `[n]`.
    fn rms_norm_weight_gradient(
        &self,
        x: Matrix<'_>,
        rstd: Floats<'_>,
        dy: Matrix<'_>,
        dweight: FloatsMut<'_>,
    );

    /// Rotates every head of `x` `[rows, heads · head_dim]` by its row's position.
    fn rotate(&self, x: FloatsMut<'_>, head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn);

    /// `out = silu(gate) · up`, element by element.
    fn swiglu(&self, gate: Floats<'_>, up: Floats<'_>, out: FloatsMut<'_>);

    /// Replaces `gate` and `up` by their gradients, given that of [`Device::swiglu`]'s result.
    fn swiglu_backward(&self, gate: FloatsMut<'_>, up: FloatsMut<'_>, dout: Floats<'_>);

    /// `out[i] = table[rows[i]]`; `table` `[any, n]`, `out` `[rows, n]`.
    fn gather(&self, table: Matrix<'_>, rows: &[u32], out: MatrixMut<'_>);

    /// `out[i] = table[rows[i]]` unpacked; `table` `[any, n]`, `out` `[rows, n]`.
    fn gather_stored(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>);

    /// `target = source`, both `[rows, cols]` with strides of their own.
    fn copy(&self, source: Matrix<'_>, target: MatrixMut<'_>);

    /// `target[rows[i]] += source[i]`, in the order of `i`.
    fn scatter_add(&self, source: Matrix<'_>, rows: &[u32], target: MatrixMut<'_>);

    /// `target[rows[i]] += factors[i] · source[i]`, in the order of `i`.
    fn scatter_add_scaled(&self, source: Matrix<'_>, rows: &[u32], factors: &[f32], target: MatrixMut<'_>);

    /// `out = gate(g) · u`, element by element.
    fn gated(&self, gate: Gate, g: Floats<'_>, u: Floats<'_>, out: FloatsMut<'_>);

    /// Adds `bias` `[n]` to every row of `x` `[rows, n]`.
    fn add_bias(&self, x: MatrixMut<'_>, bias: Floats<'_>);

    /// `x · factor`, element by element.
    fn scale(&self, x: FloatsMut<'_>, factor: f32);

    /// `cap · tanh(x / cap)`, element by element.
    fn softcap(&self, x: FloatsMut<'_>, cap: f32);

    /// Chooses the experts of each token: `logits` `[tokens, experts]`; `chosen` and `weights` `[tokens, top]`, the experts of
    /// a token in falling order of their scores, the first one of several equal ones first.
    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]);

    /// `target += source`, element by element.
    fn add(&self, target: FloatsMut<'_>, source: Floats<'_>);

    /// Softmax attention of `plan`'s queries over the keys that it makes visible and over their own diagonal keys.
    ///
    /// Writes `out` `[queries, heads · value_dim]` and the log of each softmax's denominator, `lse` `[queries, heads]`.
    fn attention(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: FloatsMut<'_>,
        lse: FloatsMut<'_>,
    );

    /// Backward of [`Device::attention`] without sinks and cap, for heads of one width, from its `lse` and the gradient
    /// `dout` of its result.
    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: Floats<'_>,
        dout: Floats<'_>,
        gradients: AttentionGradients<'_>,
    );

    /// Turns target logits `[rows, n]` into probabilities in place.
    fn softmax_targets(&self, logits: MatrixMut<'_>, targets: &mut [TargetRow]);

    /// Forward KL divergence and its gradient: row `i` of `logits` `[rows, n]` against row `target_of[i]` of
    /// `probabilities`. `logits` becomes `coefficients[i] · (softmax(logits) − p)`.
    fn kl_divergence(
        &self,
        logits: MatrixMut<'_>,
        probabilities: Matrix<'_>,
        targets: &[TargetRow],
        target_of: &[u32],
        coefficients: &[f32],
        losses: &mut [RowLoss],
    );

    /// Index of each row's largest value, the first one when several are equal; `x` `[rows, n]`.
    fn argmax(&self, x: Matrix<'_>, out: &mut [u32]);

    /// Σ x², in f64 and in fixed order.
    fn sum_of_squares(&self, x: Floats<'_>) -> f64;

    /// One fused AdamW update of `parameters` and their moments `m`, `v`; all of one length.
    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: FloatsMut<'_>,
        m: FloatsMut<'_>,
        v: FloatsMut<'_>,
        gradient: Floats<'_>,
    );
}
