//! Element-wise kernels, norms, rotations, losses, the optimizer.

use eaglet_runtime::cuda::{Indices, Kernels, MatrixView, MatrixViewMut};
use eaglet_runtime::device::checksum;
use eaglet_runtime::device::{
    AdamWUpdate, Device, Gate, Matrix, MatrixMut, Pairing, RotaryTable, RowLoss, TargetRow, Turn,
};
use eaglet_runtime::rope::Rope;

use crate::cases::{Cases, wave};

pub(crate) fn all(cases: &mut Cases<'_>) {
    for n in [1, 255, 1000, 40_001] {
        gates(cases, n);
        arithmetic(cases, n);
        optimizer(cases, n);
    }
    for (rows, cols) in [(1, 1), (5, 37), (130, 576), (3, 2048)] {
        norms(cases, rows, cols);
        strided(cases, rows, cols);
    }
    rotations(cases);
    for (rows, cols) in [(1, 1), (4, 31), (6, 1000), (3, 5003)] {
        losses(cases, rows, cols);
    }
}

fn gates(cases: &mut Cases<'_>, n: usize) {
    let stack = cases.stack;
    let (g, u, dout) = (
        wave(n, 1.0).iter().map(|x| 6.0 * x).collect::<Vec<_>>(),
        wave(n, 2.0),
        wave(n, 3.0),
    );
    let clamped = Gate::Clamped {
        alpha: 1.702,
        limit: 3.0,
    };
    for (name, gate) in [
        ("silu", Gate::Silu),
        ("gelu", Gate::GeluTanh),
        ("clamped", clamped),
    ] {
        let mut exact = vec![0.0; n];
        cases
            .cpu
            .gated(gate, (&g).into(), (&u).into(), (&mut exact).into());
        let (dg, du) = (stack.upload(&g), stack.upload(&u));
        let mut out = stack.upload(&vec![f32::NAN; n]);
        let done = stack
            .kernels
            .gated(&stack.stream, gate, dg.view(), du.view(), out.view_mut());
        done.expect("launched");
        cases.close(format!("gated {name} {n}"), &stack.download(&out), &exact, 1e-6);
    }
    let (mut exact_g, mut exact_u) = (g.clone(), u.clone());
    cases
        .cpu
        .swiglu_backward((&mut exact_g).into(), (&mut exact_u).into(), (&dout).into());
    let (mut dg, mut du, dd) = (stack.upload(&g), stack.upload(&u), stack.upload(&dout));
    stack
        .kernels
        .swiglu_backward(&stack.stream, dg.view_mut(), du.view_mut(), dd.view())
        .expect("launched");
    cases.close(
        format!("swiglu gate gradient {n}"),
        &stack.download(&dg),
        &exact_g,
        1e-6,
    );
    cases.close(
        format!("swiglu up gradient {n}"),
        &stack.download(&du),
        &exact_u,
        1e-6,
    );
}

fn arithmetic(cases: &mut Cases<'_>, n: usize) {
    let stack = cases.stack;
    let (a, b) = (wave(n, 1.0), wave(n, 2.0));
    let mut exact = a.clone();
    let (mut x, y) = (stack.upload(&a), stack.upload(&b));
    cases.cpu.add((&mut exact).into(), (&b).into());
    stack
        .kernels
        .add(&stack.stream, x.view_mut(), y.view())
        .expect("launched");
    cases.same(format!("add {n}"), &stack.download(&x), &exact);
    cases.cpu.scale((&mut exact).into(), 37.5);
    stack
        .kernels
        .scale(&stack.stream, x.view_mut(), 37.5)
        .expect("launched");
    cases.same(format!("scale {n}"), &stack.download(&x), &exact);
    cases.cpu.softcap((&mut exact).into(), 30.0);
    stack
        .kernels
        .softcap(&stack.stream, x.view_mut(), 30.0)
        .expect("launched");
    cases.close(format!("softcap {n}"), &stack.download(&x), &exact, 1e-6);
}

fn optimizer(cases: &mut Cases<'_>, n: usize) {
    let stack = cases.stack;
    let gradient = wave(n, 2.0);
    let [mut p, mut m, mut v] = [wave(n, 1.0), vec![0.0; n], vec![0.0; n]];
    let [mut dp, mut dm, mut dv] = [&p, &m, &v].map(|x| stack.upload(x));
    let dg = stack.upload(&gradient);
    for number in 1..=3 {
        let update = AdamWUpdate {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            number,
            gradient_scale: 0.5,
        };
        cases.cpu.adamw(
            &update,
            (&mut p).into(),
            (&mut m).into(),
            (&mut v).into(),
            (&gradient).into(),
        );
        stack
            .kernels
            .adamw(
                &stack.stream,
                &update,
                dp.view_mut(),
                dm.view_mut(),
                dv.view_mut(),
                dg.view(),
            )
            .expect("launched");
    }
    cases.close(format!("adamw parameters {n}"), &stack.download(&dp), &p, 1e-6);
    cases.close(format!("adamw first moment {n}"), &stack.download(&dm), &m, 1e-6);
    cases.close(format!("adamw second moment {n}"), &stack.download(&dv), &v, 1e-6);

    let mut parts = stack.upload(&vec![f64::NAN; Kernels::sum_parts(n)]);
    let sum = stack
        .kernels
        .sum_of_squares(&stack.stream, dg.view(), parts.view_mut())
        .expect("summed");
    let exact = cases.cpu.sum_of_squares((&gradient).into());
    assert!(
        (sum - exact).abs() <= 1e-12 * exact,
        "sum of squares {n}: {sum} for {exact}"
    );
    let mut parts = stack.upload(&vec![u64::MAX; Kernels::sum_parts(n)]);
    let sum = stack
        .kernels
        .checksum(&stack.stream, dg.view(), parts.view_mut())
        .expect("summed");
    cases.same(format!("checksum {n}"), &[sum], &[checksum(&gradient)]);
    let mut found = stack.upload(&[9_u32]);
    for wrong in [None, Some(f32::INFINITY), Some(f32::NAN)] {
        let mut values = gradient.clone();
        if let Some(wrong) = wrong {
            values[n / 2] = wrong;
        }
        let values = stack.upload(&values);
        let finite = stack
            .kernels
            .is_finite(&stack.stream, values.view(), found.view_mut());
        assert_eq!(finite.expect("checked"), wrong.is_none(), "{wrong:?} among {n}");
    }
}

fn norms(cases: &mut Cases<'_>, rows: usize, cols: usize) {
    let stack = cases.stack;
    let (x, weight, dy, dx) = (
        wave(rows * cols, 1.0),
        wave(cols, 2.0),
        wave(rows * cols, 3.0),
        wave(rows * cols, 4.0),
    );
    let (mut y, mut rstd, mut exact_dx, mut dw) = (
        vec![0.0; rows * cols],
        vec![0.0; rows],
        dx.clone(),
        wave(cols, 5.0),
    );
    let view = Matrix::new(&x, rows, cols);
    let gradient = Matrix::new(&dy, rows, cols);
    let [x_gpu, w_gpu, dy_gpu] = [&x, &weight, &dy].map(|x| stack.upload(x));
    let [mut y_gpu, mut rstd_gpu, mut dx_gpu, mut dw_gpu] = [&y, &rstd, &dx, &dw].map(|x| stack.upload(x));
    let mut parts = stack.upload(&vec![f32::NAN; Kernels::norm_parts(rows, cols)]);

    let cpu = &cases.cpu;
    cpu.rms_norm(
        view,
        (&weight).into(),
        1e-5,
        MatrixMut::new(&mut y, rows, cols),
        (&mut rstd).into(),
    );
    cpu.rms_norm_backward(
        view,
        (&weight).into(),
        (&rstd).into(),
        gradient,
        MatrixMut::new(&mut exact_dx, rows, cols),
    );
    cpu.rms_norm_weight_gradient(view, (&rstd).into(), gradient, (&mut dw).into());

    let on_device = MatrixView::new(x_gpu.view(), rows, cols);
    let gradient = MatrixView::new(dy_gpu.view(), rows, cols);
    let (kernels, stream) = (&stack.kernels, &stack.stream);
    let target = MatrixViewMut::new(y_gpu.view_mut(), rows, cols);
    kernels
        .rms_norm(stream, on_device, w_gpu.view(), 1e-5, target, rstd_gpu.view_mut())
        .expect("launched");
    let target = MatrixViewMut::new(dx_gpu.view_mut(), rows, cols);
    kernels
        .rms_norm_backward(stream, on_device, w_gpu.view(), rstd_gpu.view(), gradient, target)
        .expect("launched");
    kernels
        .rms_norm_weight_gradient(
            stream,
            on_device,
            rstd_gpu.view(),
            gradient,
            parts.view_mut(),
            dw_gpu.view_mut(),
        )
        .expect("launched");
    let shape = format!("{rows}x{cols}");
    cases.close(format!("rms_norm {shape}"), &stack.download(&y_gpu), &y, 1e-6);
    cases.close(
        format!("rms_norm rstd {shape}"),
        &stack.download(&rstd_gpu),
        &rstd,
        1e-6,
    );
    cases.close(
        format!("rms_norm dx {shape}"),
        &stack.download(&dx_gpu),
        &exact_dx,
        2e-6,
    );
    cases.close(
        format!("rms_norm dw {shape}"),
        &stack.download(&dw_gpu),
        &dw,
        2e-6,
    );
}

/// Kernels with strides of their own leave what lies between the rows alone.
fn strided(cases: &mut Cases<'_>, rows: usize, cols: usize) {
    let stack = cases.stack;
    let (from_stride, to_stride) = (cols + 3, cols + 5);
    let (source, bias, target) = (
        wave(rows * from_stride, 1.0),
        wave(cols, 2.0),
        wave(rows * to_stride, 3.0),
    );
    let mut exact = target.clone();
    let from = Matrix::strided(&source, rows, cols, from_stride);
    cases
        .cpu
        .copy(from, MatrixMut::strided(&mut exact, rows, cols, to_stride));
    cases.cpu.add_bias(
        MatrixMut::strided(&mut exact, rows, cols, to_stride),
        (&bias).into(),
    );
    let (kernels, stream) = (&stack.kernels, &stack.stream);
    let [source_gpu, bias_gpu] = [&source, &bias].map(|x| stack.upload(x));
    let mut target_gpu = stack.upload(&target);
    let from = MatrixView::strided(source_gpu.view(), rows, cols, from_stride);
    let to = MatrixViewMut::strided(target_gpu.view_mut(), rows, cols, to_stride);
    kernels.copy(stream, from, to).expect("launched");
    let to = MatrixViewMut::strided(target_gpu.view_mut(), rows, cols, to_stride);
    kernels.add_bias(stream, to, bias_gpu.view()).expect("launched");
    cases.same(
        format!("copy and add_bias {rows}x{cols}"),
        &stack.download(&target_gpu),
        &exact,
    );

    let mut narrow = vec![7_u16; rows * to_stride];
    let mut narrow_gpu = stack.upload(&narrow);
    let to = MatrixViewMut::strided(narrow_gpu.view_mut(), rows, cols, to_stride);
    kernels.narrow(stream, from, to).expect("launched");
    for row in 0..rows {
        for col in 0..cols {
            narrow[row * to_stride + col] = half::bf16::from_f32(source[row * from_stride + col]).to_bits();
        }
    }
    cases.same(
        format!("narrow {rows}x{cols}"),
        &stack.download(&narrow_gpu),
        &narrow,
    );
    let mut wide_gpu = stack.upload(&vec![0.0_f32; rows * cols]);
    let from = MatrixView::strided(narrow_gpu.view(), rows, cols, to_stride);
    kernels
        .widen(stream, from, MatrixViewMut::new(wide_gpu.view_mut(), rows, cols))
        .expect("launched");
    let wide: Vec<f32> = (0..rows * cols)
        .map(|i| half::bf16::from_bits(narrow[i / cols * to_stride + i % cols]).to_f32())
        .collect();
    cases.same(format!("widen {rows}x{cols}"), &stack.download(&wide_gpu), &wide);
}

fn rotations(cases: &mut Cases<'_>) {
    let stack = cases.stack;
    let (head_dim, heads) = (20, 3);
    for (offset, pairing) in [
        (0, Pairing::Halves),
        (8, Pairing::Halves),
        (6, Pairing::Neighbours),
    ] {
        let table = RotaryTable::new(&Rope::new(10_000.0, 12), 50).placed(offset, pairing);
        let (cos, sin) = table.angles();
        let (cos, sin) = (
            stack.upload(&cases.cpu.read(cos)),
            stack.upload(&cases.cpu.read(sin)),
        );
        let positions: Vec<u32> = vec![0, 49, 7, 7, 31];
        for turn in [Turn::Forward, Turn::Backward] {
            let mut exact = wave(positions.len() * heads * head_dim, 1.0);
            let mut x = stack.upload(&exact);
            cases
                .cpu
                .rotate((&mut exact).into(), head_dim, &table, &positions, turn);
            let mut places = stack.upload(&positions);
            let places = Indices::upload(&stack.stream, &positions, places.view_mut()).expect("sent");
            let angles = (
                MatrixView::new(cos.view(), 50, 6),
                MatrixView::new(sin.view(), 50, 6),
            );
            stack
                .kernels
                .rotate(
                    &stack.stream,
                    x.view_mut(),
                    head_dim,
                    angles,
                    offset,
                    pairing,
                    places,
                    turn,
                )
                .expect("launched");
            let name = format!("rotate {pairing:?} from {offset} {turn:?}");
            cases.close(name, &stack.download(&x), &exact, 1e-6);
        }
    }
}

fn losses(cases: &mut Cases<'_>, rows: usize, cols: usize) {
    let stack = cases.stack;
    let spiky = |seed: f64| -> Vec<f32> { wave(rows * cols, seed).iter().map(|x| 9.0 * x).collect() };
    let (mut targets, mut logits) = (spiky(1.0), spiky(2.0));
    // Equal maxima: the first one counts.
    for row in targets.chunks_mut(cols).chain(logits.chunks_mut(cols)) {
        (row[cols / 3], row[cols - 1]) = (11.0, 11.0);
    }
    let target_of: Vec<u32> = (0..rows as u32).rev().collect();
    let coefficients = wave(rows, 3.0);
    let [mut targets_gpu, mut logits_gpu] = [&targets, &logits].map(|x| stack.upload(x));
    let (mut entropy, mut argmax) = (stack.upload(&wave(rows, 0.0)), stack.upload(&vec![9_u32; rows]));
    let (kernels, stream) = (&stack.kernels, &stack.stream);
    let shape = format!("{rows}x{cols}");

    let mut exact_argmax = vec![0; rows];
    cases
        .cpu
        .argmax(Matrix::new(&logits, rows, cols), &mut exact_argmax);
    kernels
        .argmax(
            stream,
            MatrixView::new(logits_gpu.view(), rows, cols),
            argmax.view_mut(),
        )
        .expect("launched");
    cases.same(format!("argmax {shape}"), &stack.download(&argmax), &exact_argmax);

    let mut exact_targets = vec![TargetRow::default(); rows];
    cases
        .cpu
        .softmax_targets(MatrixMut::new(&mut targets, rows, cols), &mut exact_targets);
    kernels
        .softmax_targets(
            stream,
            MatrixViewMut::new(targets_gpu.view_mut(), rows, cols),
            entropy.view_mut(),
            argmax.view_mut(),
        )
        .expect("launched");
    let exact_entropy: Vec<f32> = exact_targets
        .iter()
        .map(|target| target.negative_entropy)
        .collect();
    let places: Vec<u32> = exact_targets.iter().map(|target| target.argmax).collect();
    cases.close(
        format!("softmax_targets {shape}"),
        &stack.download(&targets_gpu),
        &targets,
        2e-6,
    );
    cases.close(
        format!("softmax_targets entropy {shape}"),
        &stack.download(&entropy),
        &exact_entropy,
        2e-6,
    );
    cases.same(
        format!("softmax_targets argmax {shape}"),
        &stack.download(&argmax),
        &places,
    );

    let mut losses = vec![RowLoss::default(); rows];
    cases.cpu.kl_divergence(
        MatrixMut::new(&mut logits, rows, cols),
        Matrix::new(&targets, rows, cols),
        &exact_targets,
        &target_of,
        &coefficients,
        &mut losses,
    );
    let (coefficients_gpu, mut losses_gpu) = (stack.upload(&coefficients), stack.upload(&wave(rows, 0.0)));
    let mut order = stack.upload(&target_of);
    let order = Indices::upload(stream, &target_of, order.view_mut()).expect("sent");
    kernels
        .kl_divergence(
            stream,
            MatrixViewMut::new(logits_gpu.view_mut(), rows, cols),
            MatrixView::new(targets_gpu.view(), rows, cols),
            entropy.view(),
            order,
            coefficients_gpu.view(),
            losses_gpu.view_mut(),
            argmax.view_mut(),
        )
        .expect("launched");
    let exact: Vec<f32> = losses.iter().map(|row| row.loss).collect();
    let places: Vec<u32> = losses.iter().map(|row| row.argmax).collect();
    // A loss is a small difference of large terms; the largest logit tells their size.
    let ours = stack.download(&losses_gpu);
    for (ours, exact) in ours.iter().zip(&exact) {
        assert!(
            (ours - exact).abs() <= 1e-5 * (1.0 + exact.abs()),
            "{shape}: {ours} for {exact}"
        );
    }
    cases.close(
        format!("kl_divergence gradient {shape}"),
        &stack.download(&logits_gpu),
        &logits,
        3e-6,
    );
    cases.same(
        format!("kl_divergence argmax {shape}"),
        &stack.download(&argmax),
        &places,
    );
}
