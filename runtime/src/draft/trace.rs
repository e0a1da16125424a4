//! Inner values of a forward pass, for comparison with other implementations.

use super::batch::DraftBatch;
use super::error::DraftError;
use super::model::{Draft, Pass};
use super::workspace::Wanted;
use crate::device::{Device, Matrix, MatrixMut};

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
    pub fn trace(&mut self, parameters: &[f32], batch: &DraftBatch) -> Result<DraftTrace, DraftError> {
        self.core.check(parameters, batch)?;
        self.prepare(batch, Wanted::All);
        let (core, a, sizes) = (&self.core, &mut self.activations, self.plan.sizes);
        let pass = Pass {
            core,
            parameters,
            batch,
            plan: &self.plan,
            rotary: &self.rotary,
        };
        pass.forward(a);
        let (n, h, v) = (sizes.positions, core.spec.hidden_size, core.spec.draft_vocab_size);
        let logits = |inputs: &[f32], head: &[f32]| {
            let mut logits = vec![0.0; n * v];
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
        let mut inputs = vec![0.0; n * h];
        pass.target_inputs(&self.plan.active, &mut Vec::new(), &mut Vec::new(), &mut inputs);
        let targets = logits(&inputs, &core.frozen.verifier_head);
        let steps = (0..sizes.steps).map(|step| {
            let head_input = a.head_input[sizes.of_step(step, h)].to_vec();
            let logits = logits(&head_input, &core.frozen.lm_head);
            let mut draft_ids = vec![0; n];
            core.device.argmax(Matrix::new(&logits, n, v), &mut draft_ids);
            TttTrace {
                head_input,
                logits,
                draft_ids,
            }
        });
        Ok(DraftTrace {
            fc_output: a.fc_output.clone(),
            targets,
            steps: steps.collect(),
        })
    }
}
