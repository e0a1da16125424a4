//! The frozen head and the loss: logits exist for a block of rows at a time.
//!
//! Loss rows of all TTT steps are walked together, ordered by target position: a block takes a few targets and every
//! row that is compared with them, so each target distribution is formed once, and one product gives the logits of
//! targets and drafts when both use the same head. The head gets no gradient, so nothing has to outlive the block.

use smallvec::smallvec;

use super::batch::DraftBatch;
use super::metrics::{PerStep, StepMetrics, TttMetrics};
use super::model::Pass;
use super::workspace::{Activations, Deltas, RowPlan};
use crate::device::{Buffer, Device, FloatsMut, Matrix, MatrixMut, RowLoss, TargetRow};

/// Logits of a block, in elements: 16 MiB.
const BLOCK_ELEMENTS: usize = 4 << 20;
/// Fewest rows of a block: a product over fewer would read the head too often.
const BLOCK_ROWS: usize = 128;
/// Added to the number of masked positions, as speculators does.
const MASK_EPSILON: f64 = 1e-5;

/// Buffers of the head.
#[derive(Debug, Default)]
pub(super) struct HeadBuffers {
    /// Last hidden states of the block's targets.
    raw: Buffer,
    rstd: Buffer,
    /// What the heads read: targets first, then draft rows.
    inputs: Buffer,
    logits: Buffer,
    targets: Vec<TargetRow>,
    losses: Vec<RowLoss>,
    rows: Vec<LossRow>,
    /// Columns of `rows`, as the device wants them.
    target_positions: Vec<u32>,
    stack_rows: Vec<u32>,
    target_of: Vec<u32>,
    coefficients: Vec<f32>,
    /// Arg-max of each draft row, `[S·R]`.
    draft_top: Vec<u32>,
    /// Arg-max of each target, `[T]`.
    target_top: Vec<u32>,
}

/// One comparison: a step's output at an active position against the target `position + step`.
#[derive(Clone, Copy, Debug)]
struct LossRow {
    step: usize,
    stack_row: u32,
    target: u32,
    masked: bool,
}

/// Elements of the buffers of a block, for a draft vocabulary of `vocabulary` tokens.
pub(super) fn block_elements(vocabulary: usize, hidden: usize) -> usize {
    // What the head reads, that before its norm, and the logits.
    block_rows(vocabulary) * (2 * hidden + vocabulary)
}

/// Rows of a block of logits.
fn block_rows(vocabulary: usize) -> usize {
    (BLOCK_ELEMENTS / vocabulary).clamp(BLOCK_ROWS, 4 * BLOCK_ROWS)
}

impl<D: Device> Pass<'_, D> {
    /// Losses and metrics; writes the gradient of what the head read when `deltas` is given.
    pub(super) fn loss(
        &self,
        a: &Activations,
        mut deltas: Option<&mut Deltas>,
        b: &mut HeadBuffers,
    ) -> StepMetrics {
        let (sizes, steps) = (self.plan.sizes, self.core.training.ttt_steps);
        self.core.device.stage("head and loss");
        let masked = |position: usize| self.batch.loss_mask[position] != 0;
        let total = |step: usize| {
            (step..sizes.positions)
                .filter(|&position| masked(position))
                .count()
        };
        let totals: PerStep<usize> = (0..steps).map(total).collect();
        let normaliser: PerStep<f64> = totals.iter().map(|&total| total as f64 + MASK_EPSILON).collect();
        let coefficients: PerStep<f32> = (0..steps)
            .map(|step| (self.core.training.step_loss_decay.powi(step as i32) / normaliser[step]) as f32)
            .collect();
        if let Some(deltas) = deltas.as_deref_mut() {
            self.core.device.fill(deltas.head_input.floats_mut(), 0.0);
        }
        b.draft_top.clear();
        b.draft_top.resize(sizes.stacked(), 0);
        b.target_top.clear();
        b.target_top.resize(sizes.positions, 0);
        let mut sums: PerStep<f64> = smallvec![0.0; steps];
        let limit = block_rows(self.core.spec.draft_vocab_size);
        let mut next = 0;
        while next < sizes.positions {
            b.rows.clear();
            b.target_positions.clear();
            while next < sizes.positions && b.rows.len() + b.target_positions.len() + steps < limit {
                self.push_rows(next, b);
                next += 1;
            }
            if b.rows.is_empty() {
                continue;
            }
            self.block(a, deltas.as_deref_mut(), &coefficients, b);
            for (row, loss) in b.rows.iter().zip(&b.losses) {
                if row.masked {
                    sums[row.step] += f64::from(loss.loss);
                }
                b.draft_top[row.stack_row as usize] = loss.argmax;
            }
            for (&position, target) in b.target_positions.iter().zip(&b.targets) {
                b.target_top[position as usize] = target.argmax;
            }
        }
        let mut metrics = StepMetrics {
            loss: 0.0,
            masked_tokens: totals[0],
            steps: PerStep::new(),
        };
        for step in 0..steps {
            let loss = sums[step] / normaliser[step];
            metrics.loss += self.core.training.step_loss_decay.powi(step as i32) * loss;
            metrics.steps.push(TttMetrics {
                loss,
                full_total: totals[step] as f64,
                ..TttMetrics::default()
            });
        }
        count_matches(self.batch, self.plan, b, &mut metrics.steps);
        metrics
    }

    /// The loss rows whose target is `target`.
    ///
    /// A row counts where its target is masked. A masked position whose target is not, but a later step's is, is
    /// compared as well, with weight zero: the accuracy of that later step depends on this one.
    fn push_rows(&self, target: usize, b: &mut HeadBuffers) {
        let (active, steps) = (self.plan.sizes.active, self.core.training.ttt_steps);
        let is_masked = |position: usize| self.batch.loss_mask.get(position).is_some_and(|&mask| mask != 0);
        let before = b.rows.len();
        for step in 0..steps.min(target + 1) {
            let position = target - step;
            let place = self.plan.place[position];
            let masked = is_masked(target);
            let bridges =
                || is_masked(position) && (step + 1..steps).any(|later| is_masked(position + later));
            if place != u32::MAX && (masked || bridges()) {
                let stack_row = (step * active) as u32 + place;
                b.rows.push(LossRow {
                    step,
                    stack_row,
                    target: b.target_positions.len() as u32,
                    masked,
                });
            }
        }
        if b.rows.len() > before {
            b.target_positions.push(target as u32);
        }
    }

    fn block(&self, a: &Activations, deltas: Option<&mut Deltas>, coefficients: &[f32], b: &mut HeadBuffers) {
        let (device, h, v) = (
            &*self.core.device,
            self.core.spec.hidden_size,
            self.core.spec.draft_vocab_size,
        );
        let (targets, drafts) = (b.target_positions.len(), b.rows.len());
        let stacked = self.plan.sizes.stacked();
        b.stack_rows.clear();
        b.stack_rows.extend(b.rows.iter().map(|row| row.stack_row));
        b.target_of.clear();
        b.target_of.extend(b.rows.iter().map(|row| row.target));
        b.coefficients.clear();
        b.coefficients.extend(
            b.rows
                .iter()
                .map(|row| if row.masked { coefficients[row.step] } else { 0.0 }),
        );
        b.targets.resize(targets, TargetRow::default());
        b.losses.resize(drafts, RowLoss::default());
        device.fit(&mut b.inputs, "head inputs", (targets + drafts) * h);
        device.fit(&mut b.logits, "logits", (targets + drafts) * v);
        self.target_inputs(
            &b.target_positions,
            &mut b.raw,
            &mut b.rstd,
            b.inputs.part_mut(0..targets * h),
        );
        let draft_inputs = MatrixMut::new(b.inputs.tail_mut(targets * h), drafts, h);
        device.gather(
            Matrix::new(&a.head_input, stacked, h),
            &b.stack_rows,
            draft_inputs,
        );
        let frozen = &self.core.frozen;
        let lm_head = Matrix::new(&frozen.lm_head, v, h);
        if frozen.heads_are_shared() {
            let rows = targets + drafts;
            let logits = MatrixMut::new(&mut b.logits, rows, v);
            let inputs = Matrix::new(&b.inputs, rows, h);
            frozen.head.forward(device, logits, inputs, lm_head, false);
        } else {
            let head = Matrix::new(frozen.verifier_head(), v, h);
            let logits = MatrixMut::new(b.logits.part_mut(0..targets * v), targets, v);
            let inputs = Matrix::new(b.inputs.part(0..targets * h), targets, h);
            frozen.own_head.forward(device, logits, inputs, head, false);
            let logits = MatrixMut::new(b.logits.tail_mut(targets * v), drafts, v);
            let inputs = Matrix::new(b.inputs.tail(targets * h), drafts, h);
            frozen.head.forward(device, logits, inputs, lm_head, false);
        }
        let (mut target_logits, mut draft_logits) = b.logits.floats_mut().split_at(targets * v);
        device.softmax_targets(MatrixMut::new(&mut target_logits, targets, v), &mut b.targets);
        device.kl_divergence(
            MatrixMut::new(&mut draft_logits, drafts, v),
            Matrix::new(&target_logits, targets, v),
            &b.targets,
            &b.target_of,
            &b.coefficients,
            &mut b.losses,
        );
        if let Some(deltas) = deltas {
            let mut inputs = b.inputs.floats_mut().split_at(targets * h).1;
            let (out, logits) = (
                MatrixMut::new(&mut inputs, drafts, h),
                Matrix::new(&draft_logits, drafts, v),
            );
            frozen.head.backward(device, out, logits, lm_head, false);
            let all = MatrixMut::new(&mut deltas.head_input, stacked, h);
            device.scatter_add(Matrix::new(&inputs, drafts, h), &b.stack_rows, all);
        }
    }

    /// What the verifier's head reads at `positions`: its last hidden states behind its final norm.
    pub(super) fn target_inputs(
        &self,
        positions: &[u32],
        raw: &mut Buffer,
        rstd: &mut Buffer,
        out: FloatsMut<'_>,
    ) {
        let (device, h, n) = (&*self.core.device, self.core.spec.hidden_size, positions.len());
        device.fit(raw, "last hidden states of targets", n * h);
        device.fit(rstd, "norms of targets", n);
        let all = Matrix::new(self.last_hidden, self.batch.len(), h);
        device.gather(all, positions, MatrixMut::new(&mut *raw, n, h));
        let (norm, eps) = (
            self.core.frozen.verifier_norm.floats(),
            self.core.frozen.verifier_norm_eps,
        );
        device.rms_norm(
            Matrix::new(&*raw, n, h),
            norm,
            eps,
            MatrixMut::new(out, n, h),
            rstd.floats_mut(),
        );
    }

    /// Arg-max of every draft row, `[S·R]`.
    pub(super) fn proposals<'b>(&self, a: &Activations, b: &'b mut HeadBuffers) -> &'b [u32] {
        let (device, h, v) = (
            &*self.core.device,
            self.core.spec.hidden_size,
            self.core.spec.draft_vocab_size,
        );
        let stacked = self.plan.sizes.stacked();
        b.draft_top.resize(stacked, 0);
        let limit = block_rows(v);
        device.fit(&mut b.logits, "logits", limit.min(stacked) * v);
        let head = Matrix::new(&self.core.frozen.lm_head, v, h);
        for first in (0..stacked).step_by(limit) {
            let rows = limit.min(stacked - first);
            let mut logits = b.logits.part_mut(0..rows * v);
            let inputs = Matrix::new(a.head_input.part(first * h..(first + rows) * h), rows, h);
            let out = MatrixMut::new(&mut logits, rows, v);
            self.core.frozen.head.forward(device, out, inputs, head, false);
            device.argmax(
                Matrix::new(&logits, rows, v),
                &mut b.draft_top[first..first + rows],
            );
        }
        &b.draft_top
    }
}

/// Accuracy per step: a chain holds while every step so far matched the verifier's arg-max.
///
/// A chain starts at a masked position. It is *counted* as a hit where its target is masked; it is in the conditional
/// denominator wherever it held and still has a target.
fn count_matches(batch: &DraftBatch, plan: &RowPlan, b: &HeadBuffers, steps: &mut [TttMetrics]) {
    let active = plan.sizes.active;
    for (place, &position) in plan.active.iter().enumerate() {
        let position = position as usize;
        let mut holds = batch.loss_mask[position] != 0;
        for (step, metrics) in steps.iter_mut().enumerate() {
            let target = position + step;
            if !holds || target >= plan.sizes.positions {
                break;
            }
            metrics.cond_total += 1.0;
            holds = b.draft_top[step * active + place] == b.target_top[target];
            if holds && batch.loss_mask[target] != 0 {
                metrics.full_correct += 1.0;
                metrics.cond_correct += 1.0;
            }
        }
    }
}
