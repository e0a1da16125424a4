//! The `Device` trait on a GPU: operations with strides, transposes and packed weights against the CPU.

use std::ops::Range;

use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::cuda::{Cuda, Precision};
use eaglet_runtime::device::{
    Attention, AttentionGradients, AttentionInputs, AttentionPlan, AttentionShape, Cpu, Device, Gate,
    HostMatrix, Matrix, MatrixMut, RotaryTable, Routing, RowLoss, Scoring, StoredMatrix, TargetRow, Turn,
};
use eaglet_runtime::rope::Rope;
use eaglet_runtime::row::HiddenStates;
use half::bf16;

use crate::cases::wave;
use crate::stack;

#[derive(Debug)]
struct Bf16Matrix(Vec<bf16>, usize);

impl StoredMatrix for Bf16Matrix {
    fn rows(&self) -> usize {
        self.0.len() / self.1
    }

    fn cols(&self) -> usize {
        self.1
    }

    fn in_place(&self) -> Option<HostMatrix<'_>> {
        None
    }

    fn unpack(&self, rows: Range<usize>, out: &mut [f32]) {
        let values = &self.0[rows.start * self.1..rows.end * self.1];
        for (out, value) in out.iter_mut().zip(values) {
            *out = value.to_f32();
        }
    }
}

/// What one device makes of a small piece of a model, operation after operation.
fn piece(device: &impl Device) -> Vec<Vec<f32>> {
    let (rows, hidden, inner) = (21, 32, 56);
    let shape = AttentionShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 16,
        value_dim: 16,
        scale: 0.25,
    };
    let stored = Bf16Matrix(
        wave(inner * hidden, 1.0)
            .into_iter()
            .map(bf16::from_f32)
            .collect(),
        hidden,
    );
    let mut x = vec![0.0; rows * hidden];
    let places: Vec<u32> = (0..rows as u32).map(|i| i * 5 % inner as u32).collect();
    device.gather_stored(&stored, &places, MatrixMut::new(&mut x, rows, hidden));
    let (weight, mut rstd) = (wave(hidden, 2.0), vec![0.0; rows]);
    // Every second column block of a wider buffer is written.
    let mut normed = wave(rows * 2 * hidden, 3.0);
    device.rms_norm(
        Matrix::new(&x, rows, hidden),
        (&weight).into(),
        1e-6,
        MatrixMut::strided(&mut normed, rows, hidden, 2 * hidden),
        (&mut rstd).into(),
    );
    let normed_view = Matrix::strided(&normed, rows, hidden, 2 * hidden);
    let (mut gate, mut up, mut out) = (
        vec![0.0; rows * inner],
        vec![0.0; rows * inner],
        vec![0.0; rows * inner],
    );
    device.gemm_stored(
        MatrixMut::new(&mut gate, rows, inner),
        normed_view,
        &stored,
        false,
    );
    let projection = wave(hidden * inner, 4.0);
    device.gemm(
        MatrixMut::new(&mut up, rows, inner),
        normed_view,
        Matrix::new(&projection, hidden, inner),
        0.5,
        false,
    );
    device.gated(Gate::GeluTanh, (&gate).into(), (&up).into(), (&mut out).into());
    device.swiglu((&gate.clone()).into(), (&up).into(), (&mut gate).into());
    device.swiglu_backward((&mut gate).into(), (&mut up).into(), (&out).into());
    // A weight gradient: the first factor is transposed, and the result is added to.
    let mut gradient = wave(inner * hidden, 5.0);
    device.gemm(
        MatrixMut::new(&mut gradient, inner, hidden),
        Matrix::new(&gate, rows, inner).transposed(),
        normed_view,
        1.0,
        true,
    );
    let mut dweight = wave(hidden, 6.0);
    device.rms_norm_weight_gradient(
        Matrix::new(&x, rows, hidden),
        (&rstd).into(),
        normed_view,
        (&mut dweight).into(),
    );
    let mut dx = wave(rows * hidden, 7.0);
    device.rms_norm_backward(
        Matrix::new(&x, rows, hidden),
        (&weight).into(),
        (&rstd).into(),
        normed_view,
        MatrixMut::new(&mut dx, rows, hidden),
    );

    let table = RotaryTable::new(&Rope::new(1e4, 16), 64);
    let positions: Vec<u32> = (0..rows as u32).map(|i| (i * 3) % 64).collect();
    device.rotate((&mut dx).into(), 16, &table, &positions, Turn::Backward);
    let plan = AttentionPlan::new([0..9, 9..rows], &(0..rows as u32).collect::<Vec<_>>(), Some(6));
    let attention = Attention {
        diagonals: 1,
        ..Attention::plain(shape, &plan)
    };
    let [k, v, k_diagonal, v_diagonal] = [8.0, 9.0, 10.0, 11.0].map(|seed| wave(rows * 16, seed));
    let inputs = AttentionInputs {
        q: (&dx).into(),
        k: (&k).into(),
        v: (&v).into(),
        k_diagonal: (&k_diagonal).into(),
        v_diagonal: (&v_diagonal).into(),
    };
    let (mut attended, mut lse) = (vec![0.0; rows * hidden], vec![0.0; rows * 2]);
    device.attention(&attention, &inputs, (&mut attended).into(), (&mut lse).into());
    let mut gradients = [
        wave(rows * hidden, 0.0),
        k.clone(),
        v.clone(),
        k.clone(),
        v.clone(),
    ];
    let [dq, dk, dv, dk_diagonal, dv_diagonal] = &mut gradients;
    let targets = AttentionGradients {
        dq: dq.into(),
        dk: dk.into(),
        dv: dv.into(),
        dk_diagonal: dk_diagonal.into(),
        dv_diagonal: dv_diagonal.into(),
    };
    device.attention_backward(&attention, &inputs, (&lse).into(), (&attended).into(), targets);

    let (mut targets, mut losses) = (vec![TargetRow::default(); rows], vec![RowLoss::default(); rows]);
    let mut p = out.clone();
    device.softmax_targets(MatrixMut::new(&mut p, rows, inner), &mut targets);
    let order: Vec<u32> = (0..rows as u32).rev().collect();
    let mut logits = out.clone();
    device.kl_divergence(
        MatrixMut::new(&mut logits, rows, inner),
        Matrix::new(&p, rows, inner),
        &targets,
        &order,
        &wave(rows, 12.0),
        &mut losses,
    );
    let (mut experts, mut shares) = (vec![0; rows * 3], vec![0.0; rows * 3]);
    let bias = wave(inner, 13.0);
    let routing = Routing {
        top: 3,
        scoring: Scoring::Sigmoid,
        choice_bias: &bias,
        groups: None,
        normalised: true,
        factor: 1.5,
    };
    device.route(
        &routing,
        Matrix::new(&out, rows, inner),
        &mut experts,
        &mut shares,
    );
    let mut best = vec![0; rows];
    device.argmax(Matrix::new(&out, rows, inner), &mut best);
    let mut scattered = wave(inner * hidden, 14.0);
    device.scatter_add_scaled(
        Matrix::new(&x, rows, hidden),
        &places,
        &shares[..rows],
        MatrixMut::new(&mut scattered, inner, hidden),
    );
    device.scatter_add(
        Matrix::new(&x, rows, hidden),
        &places,
        MatrixMut::new(&mut scattered, inner, hidden),
    );
    device.add_bias(MatrixMut::new(&mut scattered, inner, hidden), (&weight).into());
    device.softcap((&mut scattered).into(), 2.0);
    device.add((&mut scattered).into(), (&gradient).into());
    device.scale((&mut scattered).into(), 3.0);
    let squares = device.sum_of_squares((&scattered).into()) as f32;
    let mut results = vec![
        x,
        rstd,
        normed,
        gate,
        up,
        out,
        gradient,
        dweight,
        dx,
        attended,
        lse,
        p,
        logits,
        shares,
        scattered,
        vec![squares],
        losses.iter().map(|row| row.loss).collect(),
        targets.iter().map(|row| row.negative_entropy).collect(),
        losses.iter().map(|row| row.argmax as f32).collect(),
        [experts, best]
            .concat()
            .iter()
            .map(|&place| place as f32)
            .collect(),
    ];
    results.extend(gradients);
    results
}

fn compare(ours: &[Vec<f32>], exact: &[Vec<f32>], tolerance: f64) {
    assert_eq!(ours.len(), exact.len());
    for (place, (ours, exact)) in ours.iter().zip(exact).enumerate() {
        let top = exact.iter().fold(1e-30_f64, |top, x| top.max(f64::from(x.abs())));
        for (i, (a, b)) in ours.iter().zip(exact).enumerate() {
            let error = (f64::from(*a) - f64::from(*b)).abs();
            assert!(
                error <= tolerance * top,
                "result {place}, element {i}: {a} for {b}"
            );
        }
    }
}

#[test]
fn a_piece_of_a_model_is_the_same_on_the_gpu_and_on_the_cpu() {
    let Some(_) = stack::Stack::open() else { return };
    let (search, cache) = (stack::search().expect("there"), stack::cache().expect("there"));
    let exact = piece(&Cpu::new(2).expect("threads"));
    let gpu = Cuda::new(&search, 0, cache, Precision::F32).expect("a gpu");
    let first = piece(&gpu);
    compare(&first, &exact, 2e-5);
    // Buffers that were used before must not shine through.
    assert_eq!(piece(&gpu), first, "the second time");
}

#[test]
fn products_of_rounded_factors_are_near_those_of_whole_ones() {
    let Some(_) = stack::Stack::open() else { return };
    let (search, cache) = (stack::search().expect("there"), stack::cache().expect("there"));
    let (m, n, k) = (40, 24, 64);
    let (a, b) = (wave(m * k, 1.0), wave(n * k, 2.0));
    let round = |x: &[f32]| -> Vec<f32> { x.iter().map(|&x| bf16::from_f32(x).to_f32()).collect() };
    let (mut ours, mut exact) = (vec![0.0; m * n], vec![0.0; m * n]);
    let gpu = Cuda::new(&search, 0, cache, Precision::Bf16).expect("a gpu");
    gpu.gemm(
        MatrixMut::new(&mut ours, m, n),
        Matrix::new(&a, m, k),
        Matrix::new(&b, n, k).transposed(),
        1.0,
        false,
    );
    Cpu::new(1).expect("a thread").gemm(
        MatrixMut::new(&mut exact, m, n),
        Matrix::new(&round(&a), m, k),
        Matrix::new(&round(&b), n, k).transposed(),
        1.0,
        false,
    );
    compare(&[ours], &[exact], 1e-6);
}

/// ARRIVAL-1, ARRIVAL-2
#[test]
fn states_that_were_sent_ahead_are_those_of_the_host() {
    let (Some(search), Some(cache)) = (stack::search(), stack::cache()) else {
        return;
    };
    let gpu = Cuda::new(&search, 0, cache, Precision::F32).expect("a device");
    let held = || gpu.holders().0.iter().map(|(_, bytes)| bytes).sum::<usize>();
    // More than two pieces of pinned memory, and less than one.
    for (tokens, dtype) in [
        (6000, HiddenDtype::Bf16),
        (6000, HiddenDtype::F32),
        (3, HiddenDtype::Bf16),
    ] {
        let (states, hidden) = (3, 512);
        let mut made = HiddenStates::zeros(dtype, tokens, states, hidden);
        for (place, values) in wave(tokens * states * hidden, 1.0).chunks(hidden).enumerate() {
            made.set(place / states, place % states, values);
        }
        let sent = made.share();
        let before = held();
        let [one, another] = [(); 2].map(|()| gpu.send_ahead(&sent).expect("a GPU is sent to"));
        assert!(one.is_of(&sent) && !one.is_of(&sent.of_tokens(0..1)));
        // Never read.
        drop(another);
        let count = tokens * states;
        let rows: Vec<u32> = (0..40)
            .map(|i| (i * 7919 % count) as u32)
            .chain([count as u32 - 1])
            .collect();
        let mut out = vec![f32::NAN; rows.len() * hidden];
        gpu.widen(&one, &rows, MatrixMut::new(&mut out, rows.len(), hidden));
        let mut expected = vec![0.0; hidden];
        for (row, out) in rows.iter().map(|&row| row as usize).zip(out.chunks(hidden)) {
            sent.read(row / states, row % states, &mut expected);
            assert_eq!(out, expected, "state {row} of {count}");
        }
        drop(one);
        gpu.finish();
        // Rows of operands stay, and nothing of the states does; the thread may still hold what nobody read.
        let begun = std::time::Instant::now();
        while gpu
            .holders()
            .0
            .iter()
            .any(|(name, _)| name.contains("rows to come"))
        {
            assert!(
                begun.elapsed().as_secs() < 20,
                "{:?}, {before} before",
                gpu.holders()
            );
        }
    }
}
