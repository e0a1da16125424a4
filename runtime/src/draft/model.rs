//! The draft as a trainer sees it: gradients and metrics of a row, and acceptance.

use std::ops::Range;
use std::sync::Arc;

use smallvec::smallvec;

use super::acceptance::Acceptance;
use super::batch::DraftBatch;
use super::error::DraftError;
use super::frozen::{FrozenWeights, PlacedWeights};
use super::head::HeadBuffers;
use super::layout::{ParameterLayout, Places};
use super::metrics::{StepMetrics, TttMetrics};
use super::operands::LayerOperands;
use super::spec::DraftSpec;
use super::workspace::{Activations, Deltas, RowPlan, Sizes, Wanted};
use crate::device::{AttentionShape, Buffer, Device, Floats, FloatsMut, RotaryTable};

/// How a draft is trained, apart from the optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TrainingSpec {
    /// Steps of training-time test; also the length of a chain in [`Draft::evaluate`].
    pub ttt_steps: usize,
    /// Step k's loss is weighted by this to the power of k.
    pub step_loss_decay: f64,
}

/// What does not change from row to row.
#[derive(Debug)]
pub(super) struct Core<D> {
    pub(super) spec: DraftSpec,
    pub(super) training: TrainingSpec,
    pub(super) frozen: PlacedWeights,
    pub(super) device: Arc<D>,
    pub(super) layout: ParameterLayout,
}

/// What one pass over one row reads: forward and backward are methods of it.
#[derive(Debug)]
pub(super) struct Pass<'a, D> {
    pub(super) core: &'a Core<D>,
    pub(super) parameters: Floats<'a>,
    /// Some of them, for products.
    pub(super) operands: &'a LayerOperands,
    pub(super) batch: &'a DraftBatch,
    /// The batch's aux states, `[T, k·H]`, where the device computes with them.
    pub(super) hidden: Floats<'a>,
    /// Its last hidden states, `[T, H]`, likewise.
    pub(super) last_hidden: Floats<'a>,
    pub(super) plan: &'a RowPlan,
    pub(super) rotary: &'a RotaryTable,
}

/// The buffers that a pass writes.
pub(super) struct Written<'a> {
    pub(super) activations: &'a mut Activations,
    deltas: &'a mut Deltas,
    head: &'a mut HeadBuffers,
}

impl<D: Device> Pass<'_, D> {
    /// What nearly every operation needs.
    pub(super) fn parts(&self) -> (&D, Sizes, &Places) {
        (&self.core.device, self.plan.sizes, &self.core.layout.places)
    }
}

/// A draft with its frozen weights and the buffers of its training step. The parameters stay with the caller.
#[derive(Debug)]
pub struct Draft<D> {
    pub(super) core: Core<D>,
    rotary: RotaryTable,
    operands: LayerOperands,
    plan: RowPlan,
    activations: Activations,
    deltas: Deltas,
    head: HeadBuffers,
    inputs: InputBuffers,
}

/// What the aux states of a row are called in the device's account of memory.
const HIDDEN: &str = "aux hidden states";
/// And its last hidden states.
const LAST_HIDDEN: &str = "last hidden states";

/// Room for a batch on a device that does not compute where batches arrive.
#[derive(Debug, Default)]
struct InputBuffers {
    hidden: Buffer,
    last_hidden: Buffer,
}

impl InputBuffers {
    /// The batch's aux states and its last hidden states, where the device computes with them.
    fn lend<'a>(&'a mut self, device: &impl Device, batch: &'a DraftBatch) -> [Floats<'a>; 2] {
        if let Some(sent) = &batch.sent {
            let (aux, h) = sent.shape();
            device.fit(&mut self.hidden, HIDDEN, batch.len() * aux * h);
            device.fit(&mut self.last_hidden, LAST_HIDDEN, batch.len() * h);
            sent.widen(device, self.hidden.floats_mut(), self.last_hidden.floats_mut());
            return [self.hidden.floats(), self.last_hidden.floats()];
        }
        [
            device.lend(&batch.hidden, &mut self.hidden, HIDDEN),
            device.lend(&batch.last_hidden, &mut self.last_hidden, LAST_HIDDEN),
        ]
    }
}

impl<D: Device> Core<D> {
    pub(super) fn attention_shape(&self) -> AttentionShape {
        AttentionShape {
            heads: self.spec.heads,
            kv_heads: self.spec.kv_heads,
            head_dim: self.spec.head_dim,
            value_dim: self.spec.head_dim,
            scale: (1.0 / (self.spec.head_dim as f64).sqrt()) as f32,
        }
    }

    pub(super) fn check(&self, parameters: Floats<'_>, batch: &DraftBatch) -> Result<(), DraftError> {
        let expected = self.layout.len();
        if parameters.len() != expected {
            return Err(DraftError::Length {
                what: "parameter vector",
                found: parameters.len(),
                expected,
            });
        }
        let (n, h, aux) = (batch.len(), self.spec.hidden_size, self.spec.aux_layers);
        let found = match &batch.sent {
            Some(sent) => sent.shape(),
            None if batch.hidden.len() == n * aux * h && batch.last_hidden.len() == n * h => (aux, h),
            None => {
                let per_token = (batch.hidden.len() + batch.last_hidden.len()).checked_div(n);
                (0, per_token.unwrap_or(0))
            }
        };
        if found != (aux, h) {
            let found = (found.0 + 1) * found.1;
            let text = format!("{found} hidden elements per token; the draft reads {aux} + 1 states of {h}");
            return Err(DraftError::Batch(text));
        }
        if batch.loss_mask.len() != n || batch.position_ids.len() != n {
            return Err(DraftError::Batch(
                "tokens, loss mask and position ids differ in length".to_owned(),
            ));
        }
        let mut next = 0;
        for document in &batch.documents {
            if document.start != next || document.end < document.start || document.end > n {
                return Err(DraftError::Batch(
                    "documents do not follow one another".to_owned(),
                ));
            }
            next = document.end;
        }
        if let Some(token) = batch
            .tokens
            .iter()
            .find(|&&token| token as usize >= self.spec.vocab_size)
        {
            let text = format!(
                "token {token} is outside the vocabulary of {}",
                self.spec.vocab_size
            );
            return Err(DraftError::Batch(text));
        }
        Ok(())
    }
}

impl<D: Device> Draft<D> {
    /// A draft of this shape over these frozen weights.
    ///
    /// # Errors
    /// If the spec contradicts itself or a frozen tensor has the wrong size.
    pub fn new(
        spec: DraftSpec,
        training: TrainingSpec,
        mut frozen: FrozenWeights,
        device: Arc<D>,
    ) -> Result<Self, DraftError> {
        let layout = ParameterLayout::new(&spec)?;
        if training.ttt_steps == 0 || training.ttt_steps > 64 {
            return Err(DraftError::Spec(format!(
                "ttt_steps is {}; it must be between 1 and 64",
                training.ttt_steps
            )));
        }
        if !(training.step_loss_decay.is_finite() && training.step_loss_decay >= 0.0) {
            return Err(DraftError::Spec(format!(
                "step_loss_decay is {}; it must not be negative",
                training.step_loss_decay
            )));
        }
        frozen.fit(&spec)?;
        let rotary = RotaryTable::new(&spec.rope, 0);
        Ok(Self {
            core: Core {
                frozen: PlacedWeights::new(frozen, &spec, &*device),
                spec,
                training,
                device,
                layout,
            },
            rotary,
            operands: LayerOperands::default(),
            plan: RowPlan::default(),
            activations: Activations::default(),
            deltas: Deltas::default(),
            head: HeadBuffers::default(),
            inputs: InputBuffers::default(),
        })
    }

    /// Where each tensor lies in the flat vectors.
    pub fn layout(&self) -> &ParameterLayout {
        &self.core.layout
    }

    /// The draft's shape.
    pub fn spec(&self) -> &DraftSpec {
        &self.core.spec
    }

    /// Says that the next call gets other parameters than the last one, and that those after it get the same until this is
    /// said again. Where the device multiplies faster with prepared weights, they are then prepared once, else in each call.
    pub fn parameters_changed(&mut self) {
        self.operands.set_old();
    }

    /// Writes the loss gradient of one row, `[parameters]`, and reports its metrics.
    ///
    /// # Errors
    /// If a vector or the row does not fit the draft.
    pub fn gradient<'a>(
        &mut self,
        parameters: impl Into<Floats<'a>>,
        batch: &DraftBatch,
        gradient: impl Into<FloatsMut<'a>>,
    ) -> Result<StepMetrics, DraftError> {
        self.gradient_with(parameters, batch, gradient, |_, _| ())
    }

    /// As [`Self::gradient`]; `on_final` is told of each stretch of the gradient as soon as it is final, in the order in which
    /// that happens, with the gradient as it is then. The stretches cover all parameters, each of them once.
    ///
    /// # Errors
    /// As [`Self::gradient`].
    pub fn gradient_with<'a>(
        &mut self,
        parameters: impl Into<Floats<'a>>,
        batch: &DraftBatch,
        gradient: impl Into<FloatsMut<'a>>,
        mut on_final: impl FnMut(Range<usize>, Floats<'_>) + Send,
    ) -> Result<StepMetrics, DraftError> {
        let (parameters, mut gradient) = (parameters.into(), gradient.into());
        self.core.check(parameters, batch)?;
        let expected = self.core.layout.len();
        if gradient.len() != expected {
            return Err(DraftError::Length {
                what: "gradient",
                found: gradient.len(),
                expected,
            });
        }
        self.prepare(batch, Wanted::Trained);
        let steps = self.core.training.ttt_steps;
        if self.plan.active.is_empty() {
            self.core.device.fill(gradient.reborrow(), 0.0);
            on_final(0..expected, gradient.floats());
            return Ok(StepMetrics {
                steps: smallvec![TttMetrics::default(); steps],
                ..StepMetrics::default()
            });
        }
        self.deltas
            .fit(&*self.core.device, &self.plan.sizes, &self.core.spec);
        let (pass, written) = self.pass(parameters, batch);
        let Written {
            activations,
            deltas,
            head,
        } = written;
        Ok(pass.core.device.install(|| {
            pass.forward(activations);
            let metrics = pass.loss(activations, Some(deltas), head);
            pass.backward(activations, deltas, gradient, &mut on_final);
            metrics
        }))
    }

    /// Loss and accuracy of one row, without its gradient.
    ///
    /// # Errors
    /// If a vector or the row does not fit the draft.
    pub fn loss<'a>(
        &mut self,
        parameters: impl Into<Floats<'a>>,
        batch: &DraftBatch,
    ) -> Result<StepMetrics, DraftError> {
        let parameters = parameters.into();
        self.core.check(parameters, batch)?;
        self.prepare(batch, Wanted::Trained);
        let (pass, written) = self.pass(parameters, batch);
        Ok(pass.core.device.install(|| {
            pass.forward(written.activations);
            pass.loss(written.activations, None, written.head)
        }))
    }

    /// Greedy acceptance on a row whose masked tokens are the verifier's own greedy text.
    ///
    /// `draft_to_target[i]` is the target id of draft id i, `[draft_vocab_size]`. The loss mask bounds the chains; see
    /// [`Acceptance`].
    ///
    /// # Errors
    /// If a vector, the mapping or the row does not fit the draft.
    pub fn evaluate<'a>(
        &mut self,
        parameters: impl Into<Floats<'a>>,
        batch: &DraftBatch,
        draft_to_target: &[u32],
    ) -> Result<Acceptance, DraftError> {
        let parameters = parameters.into();
        self.core.check(parameters, batch)?;
        if draft_to_target.len() != self.core.spec.draft_vocab_size {
            let (found, expected) = (draft_to_target.len(), self.core.spec.draft_vocab_size);
            return Err(DraftError::Batch(format!(
                "vocabulary mapping of {found} ids for a draft of {expected}"
            )));
        }
        self.prepare(batch, Wanted::Anchors);
        let mut acceptance = Acceptance::new(self.core.training.ttt_steps);
        if self.plan.active.is_empty() {
            return Ok(acceptance);
        }
        let (pass, written) = self.pass(parameters, batch);
        let proposals = pass.core.device.install(|| {
            pass.forward(written.activations);
            pass.proposals(written.activations, written.head)
        });
        let plan = pass.plan;
        let proposal = |step: usize, position: usize| {
            draft_to_target[proposals[step * plan.sizes.active + plan.place[position] as usize] as usize]
        };
        for document in &batch.documents {
            acceptance.walk(document.clone(), &batch.tokens, &batch.loss_mask, proposal);
        }
        Ok(acceptance)
    }

    /// A pass over the row that was prepared, and the buffers that it writes.
    pub(super) fn pass<'a>(
        &'a mut self,
        parameters: Floats<'a>,
        batch: &'a DraftBatch,
    ) -> (Pass<'a, D>, Written<'a>) {
        let (core, inputs, operands) = (&self.core, &mut self.inputs, &mut self.operands);
        operands.prepare(&*core.device, &core.spec, &core.layout.places, parameters);
        let [hidden, last_hidden] = inputs.lend(&*core.device, batch);
        let pass = Pass {
            core,
            parameters,
            operands,
            batch,
            hidden,
            last_hidden,
            plan: &self.plan,
            rotary: &self.rotary,
        };
        let written = Written {
            activations: &mut self.activations,
            deltas: &mut self.deltas,
            head: &mut self.head,
        };
        (pass, written)
    }

    pub(super) fn prepare(&mut self, batch: &DraftBatch, wanted: Wanted) {
        let (spec, steps) = (&self.core.spec, self.core.training.ttt_steps);
        self.plan.prepare(spec, steps, batch, wanted);
        let positions = batch
            .position_ids
            .iter()
            .max()
            .map_or(0, |&last| last as usize + 1)
            + steps;
        if self.rotary.positions() < positions {
            let table = RotaryTable::new(&spec.rope, positions.next_power_of_two());
            self.rotary = table.on(&*self.core.device);
        }
        self.activations.fit(&*self.core.device, &self.plan.sizes, spec);
    }
}
