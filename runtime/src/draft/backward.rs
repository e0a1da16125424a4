//! The backward pass, written out: steps in reverse for activations, then each weight once over all steps.
//!
//! Keys and values of a step are read by the queries of that step and of all later ones, so their gradients are final
//! when the walk arrives at the step. The head and the embedding are frozen and get no gradient.

use std::ops::Range;

use super::forward::{Half, half};
use super::model::Pass;
use super::spec::LayerKind;
use super::workspace::{Activations, Deltas};
use crate::device::{
    Attention, AttentionGradients, AttentionInputs, Device, Floats, FloatsMut, Matrix, MatrixMut, Turn,
};

/// One half of the columns of a projection's gradient `[rows, 2H]`.
fn half_mut(weight: FloatsMut<'_>, hidden: usize, half: Half) -> MatrixMut<'_> {
    let len = weight.len();
    let rows = weight.len() / (2 * hidden);
    let start = match half {
        Half::Token => 0,
        Half::Hidden => hidden,
    };
    MatrixMut::strided(weight.into_part(start..len), rows, hidden, 2 * hidden)
}

impl<D: Device> Pass<'_, D> {
    /// Fills `gradient` from `deltas.head_input`, the gradient of what the head read. Overwrites gate and up. Tells
    /// `on_final` of each stretch that nothing is added to any more.
    pub(super) fn backward(
        &self,
        a: &mut Activations,
        d: &mut Deltas,
        mut gradient: FloatsMut<'_>,
        on_final: &mut dyn FnMut(Range<usize>, Floats<'_>),
    ) {
        let device = &*self.core.device;
        device.fill(gradient.reborrow(), 0.0);
        for buffer in [
            &mut d.k,
            &mut d.v,
            &mut d.token_q,
            &mut d.token_k,
            &mut d.token_v,
            &mut d.next,
        ] {
            device.fill(buffer.floats_mut(), 0.0);
        }
        for step in (0..self.plan.sizes.steps).rev() {
            self.mlp_backward(step, a, d, gradient.reborrow());
            self.attend_backward(step, a, d);
            self.rotate_backward(step, a, d, gradient.reborrow());
            self.project_hidden_backward(step, a, d, gradient.reborrow());
        }
        let places = &self.core.layout.places;
        let mut tell = |gradient: Floats<'_>, places: &[&Range<usize>]| {
            for place in places.iter().filter(|place| !place.is_empty()) {
                on_final((*place).clone(), gradient);
            }
        };
        let norms = [
            &places.norm,
            &places.post_norm,
            &places.hidden_norm,
            &places.q_norm,
            &places.k_norm,
        ];
        tell(gradient.floats(), &norms);
        self.weights_backward(a, d, gradient.reborrow());
        tell(
            gradient.floats(),
            &[&places.down, &places.up, &places.gate, &places.o],
        );
        self.project_tokens_backward(a, d, gradient.reborrow());
        tell(
            gradient.floats(),
            &[&places.input_norm, &places.v, &places.k, &places.q],
        );
        self.combine_aux_states_backward(a, d, gradient.reborrow());
        tell(gradient.floats(), &[&places.fc]);
        for norm in &places.fc_norms {
            tell(gradient.floats(), &[norm]);
        }
    }

    fn mlp_backward(&self, step: usize, a: &mut Activations, d: &mut Deltas, mut gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        device.stage("mlp backward");
        let (r, h, i) = (sizes.active, sizes.hidden, sizes.intermediate);
        let (rows, wide, one) = (
            sizes.of_step(step, h),
            sizes.of_step(step, i),
            sizes.of_step(step, 1),
        );
        // What the next step sends back arrives behind or before the final norm.
        if self.core.spec.norm_output {
            device.add(d.head_input.part_mut(rows.clone()), d.next.floats());
            device.fill(d.output.part_mut(rows.clone()), 0.0);
        } else {
            device.assign(d.output.part_mut(rows.clone()), d.next.floats());
        }
        let norm = Norm {
            place: &places.norm,
            x: a.output.part(rows.clone()),
            rstd: a.output_rstd.part(one.clone()),
        };
        self.norm_backward(
            &norm,
            d.head_input.part(rows.clone()),
            Some(d.output.part_mut(rows.clone())),
            gradient.reborrow(),
        );

        let output = Matrix::new(d.output.part(rows.clone()), r, h);
        let weight = Matrix::new(self.parameters.part(places.down.clone()), h, i);
        let product = MatrixMut::new(&mut d.product, r, i);
        self.operands
            .down
            .backward(device, product, output, weight, false);
        let (mut gate, mut up) = (a.gate.part_mut(wide.clone()), a.up.part_mut(wide.clone()));
        device.swiglu_backward(gate.reborrow(), up.reborrow(), d.product.floats());
        for (operand, place, delta, accumulate) in [
            (&self.operands.gate, &places.gate, gate, false),
            (&self.operands.up, &places.up, up, true),
        ] {
            let weight = Matrix::new(self.parameters.part(place.clone()), i, h);
            let out = MatrixMut::new(&mut d.middle_norm, r, h);
            operand.backward(device, out, Matrix::new(&delta, r, i), weight, accumulate);
        }
        device.assign(d.middle.part_mut(rows.clone()), d.output.part(rows.clone()));
        let norm = Norm {
            place: &places.post_norm,
            x: a.middle.part(rows.clone()),
            rstd: a.middle_rstd.part(one),
        };
        self.norm_backward(
            &norm,
            d.middle_norm.floats(),
            Some(d.middle.part_mut(rows)),
            gradient,
        );
    }

    fn attend_backward(&self, step: usize, a: &Activations, d: &mut Deltas) {
        let (device, sizes, places) = self.parts();
        device.stage("attention backward");
        let (r, h) = (sizes.active, sizes.hidden);
        let weight = Matrix::new(self.parameters.part(places.o.clone()), h, sizes.query);
        let middle = Matrix::new(d.middle.part(sizes.of_step(step, h)), r, h);
        let attention = MatrixMut::new(&mut d.attention, r, sizes.query);
        self.operands.o.backward(device, attention, middle, weight, false);
        let shared = sizes.positions * sizes.key;
        let queries = sizes.of_step(step, sizes.query);
        let inputs = AttentionInputs {
            q: a.q.part(queries.clone()),
            k: a.k.part(0..shared),
            v: a.v.part(0..shared),
            k_diagonal: a.k.tail(shared),
            v_diagonal: a.v.tail(shared),
        };
        let (dk, dk_diagonal) = d.k.floats_mut().split_at(shared);
        let (dv, dv_diagonal) = d.v.floats_mut().split_at(shared);
        let gradients = AttentionGradients {
            dq: d.q.part_mut(queries),
            dk,
            dv,
            dk_diagonal,
            dv_diagonal,
        };
        let attention = Attention {
            diagonals: step,
            ..Attention::plain(self.core.attention_shape(), &self.plan.attention)
        };
        let lse = a.lse.part(sizes.of_step(step, self.core.spec.heads));
        device.attention_backward(&attention, &inputs, lse, d.attention.floats(), gradients);
    }

    fn rotate_backward(&self, step: usize, a: &Activations, d: &mut Deltas, mut gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        let dim = self.core.spec.head_dim;
        let (queries, keys) = (sizes.of_step(step, sizes.query), sizes.keys_of_step(step));
        let positions = &self.plan.rotary[sizes.of_step(step, 1)];
        device.rotate(
            d.q.part_mut(queries.clone()),
            dim,
            self.rotary,
            positions,
            Turn::Backward,
        );
        let key_positions = if step == 0 {
            &self.batch.position_ids
        } else {
            positions
        };
        device.rotate(
            d.k.part_mut(keys.clone()),
            dim,
            self.rotary,
            key_positions,
            Turn::Backward,
        );
        if self.core.spec.layer == LayerKind::Qwen3 {
            let heads = [
                (queries, &places.q_norm, &a.q_raw, &a.q_rstd, &mut d.q),
                (keys, &places.k_norm, &a.k_raw, &a.k_rstd, &mut d.k),
            ];
            for (range, place, raw, rstd, delta) in heads {
                let norm = Norm {
                    place,
                    x: raw.part(range.clone()),
                    rstd: rstd.part(range.start / dim..range.end / dim),
                };
                let mut before = d.raw.part_mut(0..range.len());
                device.fill(before.reborrow(), 0.0);
                self.norm_backward(
                    &norm,
                    delta.part(range.clone()),
                    Some(before.reborrow()),
                    gradient.reborrow(),
                );
                device.assign(delta.part_mut(range), before.floats());
            }
        }
    }

    /// Sends gradients of queries, keys and values to the hidden input and to the tokens' share.
    fn project_hidden_backward(&self, step: usize, a: &Activations, d: &mut Deltas, gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        device.stage("projections backward");
        let (t, r, h) = (sizes.positions, sizes.active, sizes.hidden);
        let rows = sizes.of_step(step, h);
        let token_rows = &self.plan.token_rows[sizes.of_step(step, 1)];
        let weight = |place: &Range<usize>| half(self.parameters.part(place.clone()), h, Half::Hidden);
        let dq = Matrix::new(d.q.part(sizes.of_step(step, sizes.query)), r, sizes.query);
        device.scatter_add(
            dq,
            token_rows,
            MatrixMut::new(&mut d.token_q, sizes.tokens(), sizes.query),
        );
        let out = MatrixMut::new(&mut d.hidden_norm, r, h);
        self.operands
            .q
            .backward(device, out, dq, weight(&places.q), false);
        if self.core.spec.norm_before_residual {
            device.add(d.hidden_norm.floats_mut(), d.middle.part(rows.clone()));
        }
        let keys = sizes.keys_of_step(step);
        let stacks = [
            (
                &self.operands.k,
                &places.k,
                d.k.part(keys.clone()),
                &mut d.token_k,
            ),
            (&self.operands.v, &places.v, d.v.part(keys), &mut d.token_v),
        ];
        for (i, (operand, place, delta, tokens)) in stacks.into_iter().enumerate() {
            if step == 0 {
                device.add(tokens.part_mut(0..t * sizes.key), delta);
                let out = MatrixMut::new(&mut d.first_norm, t, h);
                let delta = Matrix::new(delta, t, sizes.key);
                operand.backward(device, out, delta, weight(place), i > 0);
            } else {
                let delta = Matrix::new(delta, r, sizes.key);
                device.scatter_add(
                    delta,
                    token_rows,
                    MatrixMut::new(tokens, sizes.tokens(), sizes.key),
                );
                let out = MatrixMut::new(&mut d.hidden_norm, r, h);
                operand.backward(device, out, delta, weight(place), true);
            }
        }
        if step > 0 {
            if self.core.spec.norm_before_residual {
                device.fill(d.next.floats_mut(), 0.0);
            } else {
                device.assign(d.next.floats_mut(), d.middle.part(rows));
            }
            let input = if self.core.spec.norm_output {
                &a.head_input
            } else {
                &a.output
            };
            let (x, rstd) = (
                input.part(sizes.of_step(step - 1, h)),
                a.hidden_rstd.part(sizes.of_step(step, 1)),
            );
            let norm = Norm {
                place: &places.hidden_norm,
                x,
                rstd,
            };
            self.norm_backward(&norm, d.hidden_norm.floats(), Some(d.next.floats_mut()), gradient);
        } else {
            let active = Matrix::new(&d.hidden_norm, r, h);
            device.scatter_add(active, &self.plan.active, MatrixMut::new(&mut d.first_norm, t, h));
            device.fill(d.fc_output.floats_mut(), 0.0);
            if !self.core.spec.norm_before_residual {
                let residual = Matrix::new(d.middle.part(rows), r, h);
                device.scatter_add(
                    residual,
                    &self.plan.active,
                    MatrixMut::new(&mut d.fc_output, t, h),
                );
            }
            let norm = Norm {
                place: &places.hidden_norm,
                x: a.fc_output.floats(),
                rstd: a.first_rstd.floats(),
            };
            self.norm_backward(
                &norm,
                d.first_norm.floats(),
                Some(d.fc_output.floats_mut()),
                gradient,
            );
        }
    }

    /// Weight gradients of the layer: every product over all steps at once.
    fn weights_backward(&self, a: &Activations, d: &Deltas, mut gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        device.stage("weight gradients");
        let (n, t, h, i) = (sizes.stacked(), sizes.positions, sizes.hidden, sizes.intermediate);
        let products = [
            (&places.o, &d.middle, h, &a.attention, sizes.query),
            (&places.gate, &a.gate, i, &a.middle_norm, h),
            (&places.up, &a.up, i, &a.middle_norm, h),
            (&places.down, &d.output, h, &a.product, i),
        ];
        for (place, delta, outputs, input, inputs) in products {
            let out = MatrixMut::new(gradient.part_mut(place.clone()), outputs, inputs);
            let delta = Matrix::new(delta, n, outputs).transposed();
            device.gemm(out, delta, Matrix::new(input, n, inputs), 1.0, false);
        }
        let hidden = Matrix::new(&a.hidden_norm, n, h);
        let out = half_mut(gradient.part_mut(places.q.clone()), h, Half::Hidden);
        device.gemm(
            out,
            Matrix::new(&d.q, n, sizes.query).transposed(),
            hidden,
            1.0,
            false,
        );
        // Keys of step 0 come from all positions, later ones from the active positions.
        let (shared, later) = (t * sizes.key, sizes.keys() - t);
        let later_hidden = Matrix::new(a.hidden_norm.tail((n - later) * h), later, h);
        for (place, delta) in [(&places.k, &d.k), (&places.v, &d.v)] {
            let first = Matrix::new(delta.part(0..shared), t, sizes.key).transposed();
            let out = half_mut(gradient.part_mut(place.clone()), h, Half::Hidden);
            device.gemm(out, first, Matrix::new(&a.first_norm, t, h), 1.0, false);
            let rest = Matrix::new(delta.tail(shared), later, sizes.key).transposed();
            let out = half_mut(gradient.part_mut(place.clone()), h, Half::Hidden);
            device.gemm(out, rest, later_hidden, 1.0, true);
        }
    }

    fn project_tokens_backward(&self, a: &Activations, d: &mut Deltas, mut gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        device.stage("projections backward");
        let (n, h) = (sizes.tokens(), sizes.hidden);
        let stacks = [
            (&places.q, &d.token_q, sizes.query),
            (&places.k, &d.token_k, sizes.key),
            (&places.v, &d.token_v, sizes.key),
        ];
        for (index, (place, delta, width)) in stacks.into_iter().enumerate() {
            let delta = Matrix::new(delta, n, width);
            let out = half_mut(gradient.part_mut(place.clone()), h, Half::Token);
            device.gemm(
                out,
                delta.transposed(),
                Matrix::new(&a.embedding_norm, n, h),
                1.0,
                false,
            );
            let weight = half(self.parameters.part(place.clone()), h, Half::Token);
            device.gemm(
                MatrixMut::new(&mut d.embedding_norm, n, h),
                delta,
                weight,
                1.0,
                index > 0,
            );
        }
        let norm = Norm {
            place: &places.input_norm,
            x: a.embedding.floats(),
            rstd: a.embedding_rstd.floats(),
        };
        self.norm_backward(&norm, d.embedding_norm.floats(), None, gradient);
    }

    fn combine_aux_states_backward(&self, a: &Activations, d: &mut Deltas, mut gradient: FloatsMut<'_>) {
        let (device, sizes, places) = self.parts();
        device.stage("fc backward");
        let (t, h, aux) = (sizes.positions, sizes.hidden, sizes.aux);
        let delta = Matrix::new(&d.fc_output, t, h);
        let input = if places.fc_norms.is_empty() {
            self.hidden
        } else {
            a.fc_input.floats()
        };
        let out = MatrixMut::new(gradient.part_mut(places.fc.clone()), h, aux);
        device.gemm(out, delta.transposed(), Matrix::new(input, t, aux), 1.0, false);
        if places.fc_norms.is_empty() {
            return;
        }
        let weight = Matrix::new(self.parameters.part(places.fc.clone()), h, aux);
        device.gemm(MatrixMut::new(&mut d.fc_input, t, aux), delta, weight, 1.0, false);
        for (i, norm) in places.fc_norms.iter().enumerate() {
            let width = norm.len();
            let x = Matrix::strided(self.hidden.tail(i * width), t, width, aux);
            let dy = Matrix::strided(d.fc_input.tail(i * width), t, width, aux);
            let rstd = a.fc_rstd.part(i * t..(i + 1) * t);
            device.rms_norm_weight_gradient(x, rstd, dy, gradient.part_mut(norm.clone()));
        }
    }

    /// Adds a norm's input gradient to `dx` and its weight gradient to `gradient`.
    fn norm_backward(
        &self,
        norm: &Norm<'_>,
        dy: Floats<'_>,
        dx: Option<FloatsMut<'_>>,
        mut gradient: FloatsMut<'_>,
    ) {
        let (rows, width) = (norm.rstd.len(), norm.place.len());
        let (x, dy) = (Matrix::new(norm.x, rows, width), Matrix::new(dy, rows, width));
        if let Some(dx) = dx {
            let weight = self.parameters.part(norm.place.clone());
            self.core
                .device
                .rms_norm_backward(x, weight, norm.rstd, dy, MatrixMut::new(dx, rows, width));
        }
        self.core
            .device
            .rms_norm_weight_gradient(x, norm.rstd, dy, gradient.part_mut(norm.place.clone()));
    }
}

/// A norm in the forward pass.
struct Norm<'a> {
    place: &'a Range<usize>,
    x: Floats<'a>,
    rstd: Floats<'a>,
}
