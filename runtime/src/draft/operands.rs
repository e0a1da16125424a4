//! Weights in the form that a device multiplies fastest, for those that several products read before they change.
//!
//! OPERANDS: nothing is multiplied with what was prepared of other weights. Those of the layer are prepared in each call,
//! unless the caller says when they change ([`Draft::parameters_changed`](super::Draft::parameters_changed)).

use super::forward::{Half, half};
use super::layout::Places;
use super::spec::DraftSpec;
use crate::device::{Device, Floats, Matrix, MatrixMut, Prepared};

/// A weight `[outputs, inputs]` for both ways through it.
#[derive(Debug, Default)]
pub(super) struct Operand {
    /// Its transpose.
    forward: Prepared,
    backward: Prepared,
}

impl Operand {
    pub(super) fn prepare(&mut self, device: &impl Device, weight: Matrix<'_>) {
        self.prepare_forward(device, weight);
        device.prepare(&mut self.backward, weight);
    }

    /// For [`Self::forward`] only.
    pub(super) fn prepare_forward(&mut self, device: &impl Device, weight: Matrix<'_>) {
        device.prepare(&mut self.forward, weight.transposed());
    }

    /// `y = x·wᵀ`, or `y += x·wᵀ` with `accumulate`.
    pub(super) fn forward(
        &self,
        device: &impl Device,
        y: MatrixMut<'_>,
        x: Matrix<'_>,
        weight: Matrix<'_>,
        accumulate: bool,
    ) {
        device.gemm_prepared(y, x, weight.transposed(), &self.forward, 1.0, accumulate);
    }

    /// `dx = dy·w`, or `dx += dy·w` with `accumulate`.
    pub(super) fn backward(
        &self,
        device: &impl Device,
        dx: MatrixMut<'_>,
        dy: Matrix<'_>,
        weight: Matrix<'_>,
        accumulate: bool,
    ) {
        device.gemm_prepared(dx, dy, weight, &self.backward, 1.0, accumulate);
    }
}

/// Whether the prepared weights of the layer are those of the next call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Standing {
    /// Nobody says when they change.
    #[default]
    Untold,
    /// They have changed.
    Old,
    /// They are.
    Current,
}

/// The layer's weights that each TTT step multiplies with, the halves for hidden inputs of those for queries, keys and values.
#[derive(Debug, Default)]
pub(super) struct LayerOperands {
    standing: Standing,
    pub(super) q: Operand,
    pub(super) k: Operand,
    pub(super) v: Operand,
    pub(super) o: Operand,
    pub(super) gate: Operand,
    pub(super) up: Operand,
    pub(super) down: Operand,
}

impl LayerOperands {
    /// The parameters of the next call are others than those of the last one.
    pub(super) fn set_old(&mut self) {
        self.standing = Standing::Old;
    }

    /// Prepares them for a call with these parameters, unless that was done.
    pub(super) fn prepare(
        &mut self,
        device: &impl Device,
        spec: &DraftSpec,
        places: &Places,
        parameters: Floats<'_>,
    ) {
        if self.standing == Standing::Current || !device.prepares() {
            return;
        }
        let (h, i, query) = (
            spec.hidden_size,
            spec.intermediate_size,
            spec.heads * spec.head_dim,
        );
        device.stage("packing");
        for (operand, place) in [
            (&mut self.q, &places.q),
            (&mut self.k, &places.k),
            (&mut self.v, &places.v),
        ] {
            operand.prepare(device, half(parameters.part(place.clone()), h, Half::Hidden));
        }
        for (operand, place, outputs, inputs) in [
            (&mut self.o, &places.o, h, query),
            (&mut self.gate, &places.gate, i, h),
            (&mut self.up, &places.up, i, h),
            (&mut self.down, &places.down, h, i),
        ] {
            operand.prepare(
                device,
                Matrix::new(parameters.part(place.clone()), outputs, inputs),
            );
        }
        if self.standing == Standing::Old {
            self.standing = Standing::Current;
        }
    }
}
