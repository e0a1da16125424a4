//! Inner values of a forward pass, for comparison with other implementations.

use super::batch::DraftBatch;
use super::error::DraftError;
use super::model::Draft;
use super::workspace::Wanted;
use crate::device::{Buffer, Device, Floats, Matrix, MatrixMut};

/// Every value of a forward pass that another trainer can be compared by. All positions are computed, trained or not.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftTrace {
    /// Output of `fc`, `[positions, hidden]`.
    pub fc_output: Vec<f32>,
    /// Target logits over the draft vocabulary, `[positions, draft_vocab_size]`.
    pub targets: Vec<f32>,
    /// One entry per TTT step.
    pub steps: Vec<TttTrace>,
}

/// Values of one TTT step.
#[derive(Clone, Debug, PartialEq)]
pub struct TttTrace {
    /// What the head reads, `[positions, hidden]`.
    pub head_input: Vec<f32>,
    /// Logits over the draft vocabulary, `[positions, draft_vocab_size]`.
    pub logits: Vec<f32>,
    /// Arg-max of the logits, in draft ids, `[positions]`.
    pub draft_ids: Vec<u32>,
}

impl<D: Device> Draft<D> {
    /// Runs the forward pass over all positions and copies its inner values out.
    ///
    /// Holds all logits at once: meant for tests and small rows.
    ///
    /// # Errors
    /// If a vector or the row does not fit the draft.
    pub fn trace<'a>(
        &mut self,
        parameters: impl Into<Floats<'a>>,
        batch: &DraftBatch,
    ) -> Result<DraftTrace, DraftError> {
        let parameters = parameters.into();
        self.core.check(parameters, batch)?;
        self.prepare(batch, Wanted::All);
        let (pass, written) = self.pass(parameters, batch);
        let (core, a, sizes) = (pass.core, written.activations, pass.plan.sizes);
        pass.forward(a);
        let (n, h, v) = (sizes.positions, core.spec.hidden_size, core.spec.draft_vocab_size);
        let logits = |inputs: Floats<'_>, head: &Buffer| {
            let mut logits = Buffer::default();
            core.device.fit(&mut logits, "logits", n * v);
            let head = Matrix::new(head, v, h).transposed();
            core.device.gemm(
                MatrixMut::new(&mut logits, n, v),
                Matrix::new(inputs, n, h),
                head,
                1.0,
                false,
            );
            logits
        };
        let mut inputs = Buffer::default();
        core.device.fit(&mut inputs, "head inputs", n * h);
        let (mut raw, mut rstd) = (Buffer::default(), Buffer::default());
        pass.target_inputs(&pass.plan.active, &mut raw, &mut rstd, inputs.floats_mut());
        let targets = core
            .device
            .read(logits(inputs.floats(), core.frozen.verifier_head()).floats());
        let steps = (0..sizes.steps).map(|step| {
            let head_input = a.head_input.part(sizes.of_step(step, h));
            let logits = logits(head_input, &core.frozen.lm_head);
            let mut draft_ids = vec![0; n];
            core.device.argmax(Matrix::new(&logits, n, v), &mut draft_ids);
            TttTrace {
                head_input: core.device.read(head_input),
                logits: core.device.read(logits.floats()),
                draft_ids,
            }
        });
        Ok(DraftTrace {
            fc_output: core.device.read(a.fc_output.floats()),
            targets,
            steps: steps.collect(),
        })
    }
}
