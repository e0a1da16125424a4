//! Where numbers are computed: one trait, and the CPU behind it.
//!
//! [`Device`] is the seam between model code and hardware. Model code (the draft, the verifier) is written once over it
//! and holds no loops over elements. Buffers are contiguous slices in row-major order; a backend with memory of its own
//! replaces what stands behind these slices, not the operations.
//!
//! Invariants every backend keeps:
//! - **Repeatable.** Sums have a fixed order: the same inputs give the same bits, whatever the number of threads.
//! - **Rows are independent.** A row of a product, a norm, a rotation or an attention output has the same bits whatever
//!   other rows share the call, so a row can be computed again in another batch.
//! - **Exact shapes.** A shape that does not fit is a bug of the caller and panics before anything is computed; nothing
//!   that comes from outside reaches this module unchecked.

mod attention;
mod calibration;
mod cpu;
mod limits;
mod matrix;
mod products;
mod rotary;
mod routing;
mod stored;
mod timed;

pub use attention::{Attention, AttentionGradients, AttentionInputs, AttentionPlan, AttentionShape};
pub use calibration::ProductRates;
pub(crate) use cpu::widen_bf16;
pub use cpu::{Cpu, NoAmx, PackedMatrix, ThreadsError};
pub use limits::MachineLimits;
pub use matrix::{Matrix, MatrixMut};
pub use products::{ProductKernel, Products};
pub use rotary::{Pairing, RotaryTable, Turn};
pub use routing::{ExpertGroups, Routing, Scoring};
pub use stored::StoredMatrix;
pub use timed::{OperationKind, Spent, Timed};

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

/// The operations a draft and a verifier are made of. All floats are `f32` unless a signature says otherwise.
pub trait Device: Send + Sync + 'static {
    /// Runs `work` where the device's operations start fastest; operations called inside `work` are unchanged.
    fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R;

    /// Says which part of the work comes next: for profilers, and for [`Timed`]. Changes nothing else.
    fn stage(&self, _name: &'static str) {}

    /// What operands of products are really rounded to.
    fn products(&self) -> Products {
        Products::F32
    }

    /// `c = alpha · a·b`, or `c += alpha · a·b` with `accumulate`; `c` `[m, n]`, `a` `[m, k]`, `b` `[k, n]`.
    ///
    /// Transposes are views: [`Matrix::transposed`]. The sum over k runs in fixed blocks.
    fn gemm(&self, c: MatrixMut<'_>, a: Matrix<'_>, b: Matrix<'_>, alpha: f32, accumulate: bool);

    /// `c = a·wᵀ`, or `c += a·wᵀ` with `accumulate`; `c` `[m, n]`, `a` `[m, k]`, `weights` `[n, k]`.
    ///
    /// The weights are unpacked tile by tile, so a mapped model stays packed; weights that are plain floats may be kept in
    /// the device's own form ([`StoredMatrix::packed`]). Same bits as [`Device::gemm`] on the unpacked weights.
    fn gemm_stored(&self, c: MatrixMut<'_>, a: Matrix<'_>, weights: &dyn StoredMatrix, accumulate: bool);

    /// `y = x / rms(x) · weight` per row, and `rstd[row] = 1 / rms(x)`; `x`, `y` `[rows, n]`, `weight` `[n]`.
    fn rms_norm(&self, x: Matrix<'_>, weight: &[f32], epsilon: f32, y: MatrixMut<'_>, rstd: &mut [f32]);

    /// Adds the input gradient of [`Device::rms_norm`] to `dx` `[rows, n]`.
    fn rms_norm_backward(
        &self,
        x: Matrix<'_>,
        weight: &[f32],
        rstd: &[f32],
        dy: Matrix<'_>,
        dx: MatrixMut<'_>,
    );

    /// Adds the weight gradient of [`Device::rms_norm`] to `dweight` `[n]`.
    fn rms_norm_weight_gradient(&self, x: Matrix<'_>, rstd: &[f32], dy: Matrix<'_>, dweight: &mut [f32]);

    /// Rotates every head of `x` `[rows, heads · head_dim]` by its row's position.
    fn rotate(&self, x: &mut [f32], head_dim: usize, table: &RotaryTable, positions: &[u32], turn: Turn);

    /// `out = silu(gate) · up`, element by element.
    fn swiglu(&self, gate: &[f32], up: &[f32], out: &mut [f32]);

    /// Replaces `gate` and `up` by their gradients, given that of [`Device::swiglu`]'s result.
    fn swiglu_backward(&self, gate: &mut [f32], up: &mut [f32], dout: &[f32]);

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
    fn gated(&self, gate: Gate, g: &[f32], u: &[f32], out: &mut [f32]);

    /// Adds `bias` `[n]` to every row of `x` `[rows, n]`.
    fn add_bias(&self, x: MatrixMut<'_>, bias: &[f32]);

    /// `x · factor`, element by element.
    fn scale(&self, x: &mut [f32], factor: f32);

    /// `cap · tanh(x / cap)`, element by element.
    fn softcap(&self, x: &mut [f32], cap: f32);

    /// Chooses the experts of each token: `logits` `[tokens, experts]`; `chosen` and `weights` `[tokens, top]`, the experts of
    /// a token in falling order of their scores, the first one of several equal ones first.
    fn route(&self, routing: &Routing<'_>, logits: Matrix<'_>, chosen: &mut [u32], weights: &mut [f32]);

    /// `target += source`, element by element.
    fn add(&self, target: &mut [f32], source: &[f32]);

    /// Softmax attention of `plan`'s queries over the keys that it makes visible and over their own diagonal keys.
    ///
    /// Writes `out` `[queries, heads · value_dim]` and the log of each softmax's denominator, `lse` `[queries, heads]`.
    fn attention(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        out: &mut [f32],
        lse: &mut [f32],
    );

    /// Backward of [`Device::attention`] without sinks and cap, for heads of one width, from its `lse` and the gradient
    /// `dout` of its result.
    fn attention_backward(
        &self,
        attention: &Attention<'_>,
        inputs: &AttentionInputs<'_>,
        lse: &[f32],
        dout: &[f32],
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
    fn sum_of_squares(&self, x: &[f32]) -> f64;

    /// One fused AdamW update of `parameters` and their moments `m`, `v`; all of one length.
    fn adamw(
        &self,
        update: &AdamWUpdate,
        parameters: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
        gradient: &[f32],
    );
}
