//! The forward pass: `fc`, then the one decoder layer once per TTT step.
//!
//! The layer projects cat(norm(embedding), norm(hidden)). Its weights' left half therefore sees only tokens, and step k
//! reads the same tokens as step 0, shifted by k: those products are formed once for all steps and read with an offset.

use super::model::Pass;
use super::spec::LayerKind;
use super::workspace::Activations;
use crate::device::{Attention, AttentionInputs, Device, Floats, Matrix, MatrixMut, Turn};

/// Left (token) and right (hidden) half of a projection's inputs.
#[derive(Clone, Copy)]
pub(super) enum Half {
    Token,
    Hidden,
}

/// One half of the columns of a projection `[rows, 2H]`.
pub(super) fn half(weight: Floats<'_>, hidden: usize, half: Half) -> Matrix<'_> {
    let rows = weight.len() / (2 * hidden);
    let start = match half {
        Half::Token => 0,
        Half::Hidden => hidden,
    };
    Matrix::strided(weight.tail(start), rows, hidden, 2 * hidden)
}

impl<D: Device> Pass<'_, D> {
    pub(super) fn forward(&self, a: &mut Activations) {
        self.combine_aux_states(a);
        self.project_tokens(a);
        for step in 0..self.plan.sizes.steps {
            self.project_hidden(step, a);
            self.rotate(step, a);
            self.attend(step, a);
            self.mlp(step, a);
        }
    }

    /// The norms before `fc`, and `fc`.
    fn combine_aux_states(&self, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        device.stage("fc");
        let (t, h, aux, eps) = (
            sizes.positions,
            sizes.hidden,
            sizes.aux,
            self.core.spec.rms_norm_eps,
        );
        for (i, norm) in places.fc_norms.iter().enumerate() {
            let width = norm.len();
            device.rms_norm(
                Matrix::strided(self.hidden.tail(i * width), t, width, aux),
                self.parameters.part(norm.clone()),
                eps,
                MatrixMut::strided(a.fc_input.tail_mut(i * width), t, width, aux),
                a.fc_rstd.part_mut(i * t..(i + 1) * t),
            );
        }
        let input = if places.fc_norms.is_empty() {
            self.hidden
        } else {
            a.fc_input.floats()
        };
        let weight = Matrix::new(self.parameters.part(places.fc.clone()), h, aux);
        let output = MatrixMut::new(&mut a.fc_output, t, h);
        device.gemm(
            output,
            Matrix::new(input, t, aux),
            weight.transposed(),
            1.0,
            false,
        );
    }

    /// Embeddings of all tokens that any step reads, and their share of queries, keys and values.
    fn project_tokens(&self, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        device.stage("projections");
        let (n, h) = (sizes.tokens(), sizes.hidden);
        let table = Matrix::new(&self.core.frozen.embed, self.core.spec.vocab_size, h);
        device.gather(table, &self.plan.tokens, MatrixMut::new(&mut a.embedding, n, h));
        let norm = self.parameters.part(places.input_norm.clone());
        let (x, y) = (
            Matrix::new(&a.embedding, n, h),
            MatrixMut::new(&mut a.embedding_norm, n, h),
        );
        device.rms_norm(
            x,
            norm,
            self.core.spec.rms_norm_eps,
            y,
            a.embedding_rstd.floats_mut(),
        );
        let projections = [
            (&places.q, &mut a.token_q),
            (&places.k, &mut a.token_k),
            (&places.v, &mut a.token_v),
        ];
        for (place, out) in projections {
            let weight = half(self.parameters.part(place.clone()), h, Half::Token);
            let out = MatrixMut::new(out, n, weight.rows());
            device.gemm(
                out,
                Matrix::new(&a.embedding_norm, n, h),
                weight.transposed(),
                1.0,
                false,
            );
        }
    }

    /// The hidden input's norm and the queries, keys and values of one step, before their norms and rotation.
    fn project_hidden(&self, step: usize, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        device.stage("projections");
        let (t, r, h, eps) = (
            sizes.positions,
            sizes.active,
            sizes.hidden,
            self.core.spec.rms_norm_eps,
        );
        let norm = self.parameters.part(places.hidden_norm.clone());
        let rows = sizes.of_step(step, h);
        let handed_on = if self.core.spec.norm_output {
            &a.head_input
        } else {
            &a.output
        };
        if step == 0 {
            let first = MatrixMut::new(&mut a.first_norm, t, h);
            device.rms_norm(
                Matrix::new(&a.fc_output, t, h),
                norm,
                eps,
                first,
                a.first_rstd.floats_mut(),
            );
            let normed = MatrixMut::new(a.hidden_norm.part_mut(rows.clone()), r, h);
            device.gather(Matrix::new(&a.first_norm, t, h), &self.plan.active, normed);
        } else {
            let input = Matrix::new(handed_on.part(sizes.of_step(step - 1, h)), r, h);
            let normed = MatrixMut::new(a.hidden_norm.part_mut(rows.clone()), r, h);
            device.rms_norm(
                input,
                norm,
                eps,
                normed,
                a.hidden_rstd.part_mut(sizes.of_step(step, 1)),
            );
        }
        // The residual stream starts from the hidden input, normalised or not.
        if self.core.spec.norm_before_residual {
            device.assign(a.middle.part_mut(rows.clone()), a.hidden_norm.part(rows.clone()));
        } else if step == 0 {
            let residual = MatrixMut::new(a.middle.part_mut(rows.clone()), r, h);
            device.gather(Matrix::new(&a.fc_output, t, h), &self.plan.active, residual);
        } else {
            device.assign(
                a.middle.part_mut(rows.clone()),
                handed_on.part(sizes.of_step(step - 1, h)),
            );
        }
        let hidden = Matrix::new(a.hidden_norm.part(rows), r, h);
        let token_rows = &self.plan.token_rows[sizes.of_step(step, 1)];
        let weight =
            |place: &std::ops::Range<usize>| half(self.parameters.part(place.clone()), h, Half::Hidden);
        let mut q = a.q.part_mut(sizes.of_step(step, sizes.query));
        let shared = Matrix::new(&a.token_q, sizes.tokens(), sizes.query);
        device.gather(shared, token_rows, MatrixMut::new(&mut q, r, sizes.query));
        let out = MatrixMut::new(&mut q, r, sizes.query);
        self.operands
            .q
            .forward(device, out, hidden, weight(&places.q), true);
        for (operand, place, tokens, stack) in [
            (&self.operands.k, &places.k, &a.token_k, &mut a.k),
            (&self.operands.v, &places.v, &a.token_v, &mut a.v),
        ] {
            let mut out = stack.part_mut(sizes.keys_of_step(step));
            if step == 0 {
                device.assign(out.reborrow(), tokens.part(0..t * sizes.key));
                let all = Matrix::new(&a.first_norm, t, h);
                let out = MatrixMut::new(&mut out, t, sizes.key);
                operand.forward(device, out, all, weight(place), true);
            } else {
                let shared = Matrix::new(tokens, sizes.tokens(), sizes.key);
                device.gather(shared, token_rows, MatrixMut::new(&mut out, r, sizes.key));
                let out = MatrixMut::new(&mut out, r, sizes.key);
                operand.forward(device, out, hidden, weight(place), true);
            }
        }
    }

    /// Norms of queries and keys where the layer has them, then the rotation by position + step.
    fn rotate(&self, step: usize, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        let (dim, eps) = (self.core.spec.head_dim, self.core.spec.rms_norm_eps);
        let (queries, keys) = (sizes.of_step(step, sizes.query), sizes.keys_of_step(step));
        if self.core.spec.layer == LayerKind::Qwen3 {
            let heads = [
                (
                    queries.clone(),
                    &places.q_norm,
                    &mut a.q,
                    &mut a.q_raw,
                    &mut a.q_rstd,
                ),
                (
                    keys.clone(),
                    &places.k_norm,
                    &mut a.k,
                    &mut a.k_raw,
                    &mut a.k_rstd,
                ),
            ];
            for (range, norm, out, raw, rstd) in heads {
                device.assign(raw.part_mut(range.clone()), out.part(range.clone()));
                let (rows, per_head) = (range.len() / dim, range.start / dim..range.end / dim);
                let (x, y) = (
                    Matrix::new(raw.part(range.clone()), rows, dim),
                    MatrixMut::new(out.part_mut(range), rows, dim),
                );
                device.rms_norm(
                    x,
                    self.parameters.part(norm.clone()),
                    eps,
                    y,
                    rstd.part_mut(per_head),
                );
            }
        }
        let positions = &self.plan.rotary[sizes.of_step(step, 1)];
        device.rotate(a.q.part_mut(queries), dim, self.rotary, positions, Turn::Forward);
        let key_positions = if step == 0 {
            &self.batch.position_ids
        } else {
            positions
        };
        device.rotate(a.k.part_mut(keys), dim, self.rotary, key_positions, Turn::Forward);
    }

    /// Attention, `o_proj`, and the residual stream behind them.
    fn attend(&self, step: usize, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        device.stage("attention");
        let (r, h) = (sizes.active, sizes.hidden);
        let shared = sizes.positions * sizes.key;
        let inputs = AttentionInputs {
            q: a.q.part(sizes.of_step(step, sizes.query)),
            k: a.k.part(0..shared),
            v: a.v.part(0..shared),
            k_diagonal: a.k.tail(shared),
            v_diagonal: a.v.tail(shared),
        };
        let attention = Attention {
            diagonals: step,
            ..Attention::plain(self.core.attention_shape(), &self.plan.attention)
        };
        let mut out = a.attention.part_mut(sizes.of_step(step, sizes.query));
        device.attention(
            &attention,
            &inputs,
            out.reborrow(),
            a.lse.part_mut(sizes.of_step(step, self.core.spec.heads)),
        );
        let weight = Matrix::new(self.parameters.part(places.o.clone()), h, sizes.query);
        let middle = MatrixMut::new(a.middle.part_mut(sizes.of_step(step, h)), r, h);
        let out = Matrix::new(&out, r, sizes.query);
        self.operands.o.forward(device, middle, out, weight, true);
    }

    /// The MLP, and the norm before the head.
    fn mlp(&self, step: usize, a: &mut Activations) {
        let (device, sizes, places) = self.parts();
        device.stage("mlp");
        let (r, h, i, eps) = (
            sizes.active,
            sizes.hidden,
            sizes.intermediate,
            self.core.spec.rms_norm_eps,
        );
        let (rows, wide, one) = (
            sizes.of_step(step, h),
            sizes.of_step(step, i),
            sizes.of_step(step, 1),
        );
        let norm = self.parameters.part(places.post_norm.clone());
        let middle = Matrix::new(a.middle.part(rows.clone()), r, h);
        let normed = MatrixMut::new(a.middle_norm.part_mut(rows.clone()), r, h);
        device.rms_norm(middle, norm, eps, normed, a.middle_rstd.part_mut(one.clone()));
        let x = Matrix::new(a.middle_norm.part(rows.clone()), r, h);
        for (operand, place, out) in [
            (&self.operands.gate, &places.gate, &mut a.gate),
            (&self.operands.up, &places.up, &mut a.up),
        ] {
            let weight = Matrix::new(self.parameters.part(place.clone()), i, h);
            let out = MatrixMut::new(out.part_mut(wide.clone()), r, i);
            operand.forward(device, out, x, weight, false);
        }
        device.swiglu(
            a.gate.part(wide.clone()),
            a.up.part(wide.clone()),
            a.product.part_mut(wide.clone()),
        );
        device.assign(a.output.part_mut(rows.clone()), a.middle.part(rows.clone()));
        let weight = Matrix::new(self.parameters.part(places.down.clone()), h, i);
        let output = MatrixMut::new(a.output.part_mut(rows.clone()), r, h);
        let product = Matrix::new(a.product.part(wide), r, i);
        self.operands.down.forward(device, output, product, weight, true);
        let norm = self.parameters.part(places.norm.clone());
        let (x, y) = (
            Matrix::new(a.output.part(rows.clone()), r, h),
            MatrixMut::new(a.head_input.part_mut(rows), r, h),
        );
        device.rms_norm(x, norm, eps, y, a.output_rstd.part_mut(one));
    }
}
