use half::bf16;

use super::*;
use crate::device::{AttentionPlan, AttentionShape, ExpertGroups, Scoring};
use crate::rope::Rope;

fn wave(n: usize, seed: f64) -> Vec<f32> {
    (0..n).map(|i| (1.3 * i as f64 + seed).sin() as f32).collect()
}

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads).expect("threads")
}

#[track_caller]
fn close(ours: &[f32], exact: &[f64], tolerance: f64) {
    assert_eq!(ours.len(), exact.len());
    let top = exact.iter().fold(1e-30_f64, |a, b| a.max(b.abs()));
    for (i, (&ours, exact)) in ours.iter().zip(exact).enumerate() {
        assert!(
            (f64::from(ours) - exact).abs() <= tolerance * top,
            "element {i}: {ours} for {exact}"
        );
    }
}

fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn products_of_all_layouts_match_f64() {
    let device = cpu(2);
    for (m, n, k) in [
        (1, 1, 1),
        (1, 40, 7),
        (5, 3, 2),
        (16, 16, 16),
        (33, 70, 100),
        (7, 300, 1030),
        (300, 17, 513),
    ] {
        let (a, b, c0) = (wave(m * k, 1.0), wave(k * n, 2.0), wave(m * n, 3.0));
        let transpose = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
            (0..cols)
                .flat_map(|c| (0..rows).map(move |r| x[r * cols + c]))
                .collect()
        };
        let (at, bt) = (transpose(&a, m, k), transpose(&b, k, n));
        for accumulate in [false, true] {
            let exact: Vec<f64> = (0..m * n)
                .map(|i| {
                    let sum: f64 = (0..k)
                        .map(|p| f64::from(a[i / n * k + p]) * f64::from(b[p * n + i % n]))
                        .sum();
                    0.5 * sum + if accumulate { f64::from(c0[i]) } else { 0.0 }
                })
                .collect();
            for layout in 0..4 {
                let a = if layout & 1 == 0 {
                    Matrix::new(&a, m, k)
                } else {
                    Matrix::new(&at, k, m).transposed()
                };
                let b = if layout & 2 == 0 {
                    Matrix::new(&b, k, n)
                } else {
                    Matrix::new(&bt, n, k).transposed()
                };
                let mut c = c0.clone();
                device.gemm(MatrixMut::new(&mut c, m, n), a, b, 0.5, accumulate);
                close(&c, &exact, 1e-6 * (k as f64).sqrt());
            }
        }
    }
}

#[test]
fn a_strided_product_leaves_its_neighbours_alone() {
    let (a, b) = (wave(20 * 30, 1.0), wave(30 * 25, 2.0));
    let mut c = vec![7.0; 20 * 40];
    let view = MatrixMut::strided(&mut c[5..], 20, 25, 40);
    cpu(1).gemm(view, Matrix::new(&a, 20, 30), Matrix::new(&b, 30, 25), 1.0, false);
    let outside = (0..c.len()).filter(|i| !(5..30).contains(&(i % 40)));
    assert_eq!(outside.filter(|&i| c[i] != 7.0).count(), 0);
    assert!(c[5] != 7.0);
}

#[test]
fn a_row_has_the_same_bits_whatever_rows_and_threads_share_the_product() {
    for (n, k) in [(1, 64), (9, 600), (64, 1111), (200, 512), (700, 33)] {
        let (rows, b) = (300, wave(n * k, 2.0));
        let a = wave(rows * k, 1.0);
        let mut whole = vec![0.0; rows * n];
        let right = Matrix::new(&b, n, k).transposed();
        cpu(3).gemm(
            MatrixMut::new(&mut whole, rows, n),
            Matrix::new(&a, rows, k),
            right,
            1.0,
            false,
        );
        for (first, some) in [(0, 1), (5, 1), (17, 2), (3, 16), (100, 33), (7, 293)] {
            let mut part = vec![0.0; some * n];
            let left = Matrix::new(&a[first * k..][..some * k], some, k);
            cpu(1).gemm(MatrixMut::new(&mut part, some, n), left, right, 1.0, false);
            assert_eq!(part, whole[first * n..][..some * n], "{some} rows of {n} by {k}");
        }
    }
}

#[derive(Debug)]
struct Bf16Matrix<'a> {
    values: &'a [bf16],
    cols: usize,
}

impl StoredMatrix for Bf16Matrix<'_> {
    fn rows(&self) -> usize {
        self.values.len() / self.cols
    }

    fn cols(&self) -> usize {
        self.cols
    }

    fn in_place(&self) -> Option<HostMatrix<'_>> {
        None
    }

    fn unpack(&self, rows: std::ops::Range<usize>, out: &mut [f32]) {
        simd::widen(&self.values[rows.start * self.cols..rows.end * self.cols], out);
    }
}

#[test]
fn packed_weights_give_the_bits_of_widened_ones() {
    let (m, n, k) = (37, 300, 700);
    let a = wave(m * k, 1.0);
    let packed: Vec<bf16> = wave(n * k, 2.0).into_iter().map(bf16::from_f32).collect();
    let wide: Vec<f32> = packed.iter().map(|x| x.to_f32()).collect();
    let device = cpu(2);
    let (mut ours, mut reference) = (wave(m * n, 5.0), wave(m * n, 5.0));
    device.gemm_stored(
        MatrixMut::new(&mut ours, m, n),
        Matrix::new(&a, m, k),
        &Bf16Matrix {
            values: &packed,
            cols: k,
        },
        true,
    );
    let right = Matrix::new(&wide, n, k).transposed();
    device.gemm(
        MatrixMut::new(&mut reference, m, n),
        Matrix::new(&a, m, k),
        right,
        1.0,
        true,
    );
    assert_eq!(ours, reference);
}

/// Checks `gradient` of Σ weight·f against central differences of `f`, computed in f64.
#[track_caller]
fn finite_differences(x: &[f32], weight: &[f32], gradient: &[f32], f: impl Fn(&[f64]) -> Vec<f64>) {
    let x = widened(x);
    let value = |x: &[f64]| -> f64 { f(x).iter().zip(weight).map(|(y, &w)| y * f64::from(w)).sum() };
    // A prime stride: every part of a large tensor is sampled, none is systematically missed.
    let places: Vec<usize> = (0..x.len()).step_by(if x.len() > 400 { 13 } else { 1 }).collect();
    let gradient: Vec<f32> = places.iter().map(|&i| gradient[i]).collect();
    let numeric: Vec<f64> = places
        .into_iter()
        .map(|i| {
            let step = 1e-5;
            let (mut up, mut down) = (x.clone(), x.clone());
            up[i] += step;
            down[i] -= step;
            (value(&up) - value(&down)) / (2.0 * step)
        })
        .collect();
    close(&gradient, &numeric, 5e-6);
}

fn rms_norm_f64(x: &[f64], weight: &[f64], epsilon: f64) -> Vec<f64> {
    let n = weight.len();
    x.chunks(n)
        .flat_map(|row| {
            let mean = row.iter().map(|x| x * x).sum::<f64>() / n as f64;
            let rstd = 1.0 / (mean + epsilon).sqrt();
            row.iter()
                .zip(weight)
                .map(move |(x, w)| x * rstd * w)
                .collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn the_norm_and_its_gradients_match_f64() {
    let (rows, n, epsilon) = (5, 37, 1e-5_f32);
    let (x, weight, dy) = (wave(rows * n, 1.0), wave(n, 2.0), wave(rows * n, 3.0));
    let device = cpu(2);
    let (mut y, mut rstd) = (vec![0.0; rows * n], vec![0.0; rows]);
    let view = Matrix::new(&x, rows, n);
    device.rms_norm(
        view,
        (&weight).into(),
        epsilon,
        MatrixMut::new(&mut y, rows, n),
        (&mut rstd).into(),
    );
    close(
        &y,
        &rms_norm_f64(&widened(&x), &widened(&weight), f64::from(epsilon)),
        1e-6,
    );
    let (mut dx, mut dw) = (vec![0.0; rows * n], vec![0.0; n]);
    let gradient = Matrix::new(&dy, rows, n);
    device.rms_norm_backward(
        view,
        (&weight).into(),
        (&rstd).into(),
        gradient,
        MatrixMut::new(&mut dx, rows, n),
    );
    device.rms_norm_weight_gradient(view, (&rstd).into(), gradient, (&mut dw).into());
    finite_differences(&x, &dy, &dx, |x| {
        rms_norm_f64(x, &widened(&weight), f64::from(epsilon))
    });
    finite_differences(&weight, &dy, &dw, |w| {
        rms_norm_f64(&widened(&x), w, f64::from(epsilon))
    });
}

#[test]
fn swiglu_gradients_match_f64() {
    let n = 75;
    let (gate, up, dout) = (wave(n, 1.0), wave(n, 2.0), wave(n, 3.0));
    let device = cpu(1);
    let f = |g: &[f64], u: &[f64]| -> Vec<f64> {
        g.iter().zip(u).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
    };
    let mut out = vec![0.0; n];
    device.swiglu((&gate).into(), (&up).into(), (&mut out).into());
    close(&out, &f(&widened(&gate), &widened(&up)), 1e-6);
    let (mut dgate, mut dup) = (gate.clone(), up.clone());
    device.swiglu_backward((&mut dgate).into(), (&mut dup).into(), (&dout).into());
    finite_differences(&gate, &dout, &dgate, |g| f(g, &widened(&up)));
    finite_differences(&up, &dout, &dup, |u| f(&widened(&gate), u));
}

#[test]
fn turning_back_undoes_a_turn_and_position_zero_is_still() {
    let table = RotaryTable::new(&Rope::new(10000.0, 12), 50);
    let x = wave(3 * 2 * 16, 1.0);
    let mut turned = x.clone();
    let device = cpu(1);
    device.rotate((&mut turned).into(), 16, &table, &[0, 7, 49], Turn::Forward);
    assert_eq!(turned[..32], x[..32]);
    let (angle, a, b) = (7.0_f64, f64::from(x[32]), f64::from(x[38]));
    close(&turned[32..33], &[a * angle.cos() - b * angle.sin()], 1e-6);
    assert_eq!(
        turned[32 + 12..32 + 16],
        x[32 + 12..32 + 16],
        "dimensions past the rotated ones"
    );
    device.rotate((&mut turned).into(), 16, &table, &[0, 7, 49], Turn::Backward);
    close(&turned, &widened(&x), 1e-6);
}

#[test]
fn the_loss_and_its_gradient_match_f64() {
    let n = 70;
    let (logits, targets) = (wave(2 * n, 1.0), wave(n, 2.0));
    let scaled: Vec<f32> = logits.iter().map(|x| x * 4.0).collect();
    let device = cpu(1);
    let (mut p, mut target) = (targets.clone(), [TargetRow::default()]);
    device.softmax_targets(MatrixMut::new(&mut p, 1, n), &mut target);
    let softmax = |x: &[f64]| -> Vec<f64> {
        let sum: f64 = x.iter().map(|x| x.exp()).sum();
        x.iter().map(|x| x.exp() / sum).collect()
    };
    let exact = softmax(&widened(&targets));
    close(&p, &exact, 1e-6);
    let kl = |x: &[f64]| -> Vec<f64> {
        x.chunks(n)
            .map(|x| exact.iter().zip(softmax(x)).map(|(p, q)| p * (p / q).ln()).sum())
            .collect()
    };
    let (mut gradient, mut losses) = (scaled.clone(), [RowLoss::default(); 2]);
    let coefficients = [1.0, 0.25];
    device.kl_divergence(
        MatrixMut::new(&mut gradient, 2, n),
        Matrix::new(&p, 1, n),
        &target,
        &[0, 0],
        &coefficients,
        &mut losses,
    );
    let found: Vec<f32> = losses.iter().map(|row| row.loss).collect();
    close(&found, &kl(&widened(&scaled)), 1e-6);
    finite_differences(&scaled, &coefficients, &gradient, kl);
}

/// Attention in f64, straight from its definition.
struct Reference<'a> {
    shape: AttentionShape,
    documents: &'a [std::ops::Range<usize>],
    rows: &'a [u32],
    window: Option<usize>,
    diagonals: usize,
    sinks: &'a [f32],
    softcap: Option<f32>,
}

impl Reference<'_> {
    fn forward(&self, q: &[f64], k: &[f64], v: &[f64], kd: &[f64], vd: &[f64]) -> Vec<f64> {
        let (shape, queries) = (self.shape, self.rows.len());
        let (dim, kv_width) = (shape.head_dim, shape.key_width());
        let (value_dim, value_width) = (shape.value_dim, shape.value_width());
        let mut out = vec![0.0; queries * shape.output_width()];
        for (i, &row) in self.rows.iter().enumerate() {
            let row = row as usize;
            let document = self
                .documents
                .iter()
                .find(|d| d.contains(&row))
                .expect("a document");
            for h in 0..shape.heads {
                let g = h / (shape.heads / shape.kv_heads);
                let mut places: Vec<(&[f64], &[f64])> = document
                    .clone()
                    .filter(|&j| j <= row && self.window.is_none_or(|window| row - j < window))
                    .map(|j| {
                        (
                            &k[j * kv_width + g * dim..][..dim],
                            &v[j * value_width + g * value_dim..][..value_dim],
                        )
                    })
                    .collect();
                for j in 0..self.diagonals {
                    let at = (j * queries + i) * kv_width + g * dim;
                    places.push((&kd[at..at + dim], &vd[at..at + dim]));
                }
                let q = &q[(i * shape.heads + h) * dim..][..dim];
                let weights: Vec<f64> = places
                    .iter()
                    .map(|(k, _)| {
                        let score =
                            q.iter().zip(*k).map(|(q, k)| q * k).sum::<f64>() * f64::from(shape.scale);
                        match self.softcap.map(f64::from) {
                            Some(cap) => (cap * (score / cap).tanh()).exp(),
                            None => score.exp(),
                        }
                    })
                    .collect();
                let sink = self.sinks.get(h).map_or(0.0, |&sink| f64::from(sink).exp());
                let sum: f64 = weights.iter().sum::<f64>() + sink;
                for (weight, (_, v)) in weights.iter().zip(&places) {
                    for d in 0..value_dim {
                        out[(i * shape.heads + h) * value_dim + d] += weight / sum * v[d];
                    }
                }
            }
        }
        out
    }
}

fn attention_case(
    documents: &[std::ops::Range<usize>],
    rows: &[u32],
    window: Option<usize>,
    diagonals: usize,
) {
    let shape = AttentionShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        value_dim: 6,
        scale: 0.7,
    };
    let plan = AttentionPlan::new(documents.iter().cloned(), rows, window);
    let (queries, keys) = (plan.queries(), plan.keys());
    let q = wave(queries * shape.query_width(), 1.0);
    let (k, v) = (
        wave(keys * shape.key_width(), 2.0),
        wave(keys * shape.key_width(), 3.0),
    );
    let (kd, vd) = (
        wave(diagonals * queries * 12, 4.0),
        wave(diagonals * queries * 12, 5.0),
    );
    let dout = wave(q.len(), 6.0);
    let reference = Reference {
        shape,
        documents,
        rows,
        window,
        diagonals,
        sinks: &[],
        softcap: None,
    };
    let attention = Attention {
        diagonals,
        ..Attention::plain(shape, &plan)
    };
    let inputs = AttentionInputs {
        q: (&q).into(),
        k: (&k).into(),
        v: (&v).into(),
        k_diagonal: (&kd).into(),
        v_diagonal: (&vd).into(),
    };
    let mut bits = Vec::new();
    for threads in [1, 2] {
        let device = cpu(threads);
        let (mut out, mut lse) = (vec![9.0; q.len()], vec![9.0; queries * 4]);
        device.attention(&attention, &inputs, (&mut out).into(), (&mut lse).into());
        let [q64, k64, v64, kd64, vd64] = [&q, &k, &v, &kd, &vd].map(|x| widened(x));
        close(&out, &reference.forward(&q64, &k64, &v64, &kd64, &vd64), 2e-6);
        let [mut dq, mut dk, mut dv, mut dkd, mut dvd] = [&q, &k, &v, &kd, &vd].map(|x| vec![0.0; x.len()]);
        let gradients = AttentionGradients {
            dq: (&mut dq).into(),
            dk: (&mut dk).into(),
            dv: (&mut dv).into(),
            dk_diagonal: (&mut dkd).into(),
            dv_diagonal: (&mut dvd).into(),
        };
        device.attention_backward(&attention, &inputs, (&lse).into(), (&dout).into(), gradients);
        if threads == 1 {
            finite_differences(&q, &dout, &dq, |q| reference.forward(q, &k64, &v64, &kd64, &vd64));
            finite_differences(&k, &dout, &dk, |k| reference.forward(&q64, k, &v64, &kd64, &vd64));
            finite_differences(&v, &dout, &dv, |v| reference.forward(&q64, &k64, v, &kd64, &vd64));
            finite_differences(&kd, &dout, &dkd, |kd| {
                reference.forward(&q64, &k64, &v64, kd, &vd64)
            });
            finite_differences(&vd, &dout, &dvd, |vd| {
                reference.forward(&q64, &k64, &v64, &kd64, vd)
            });
        }
        bits.push([out, lse, dq, dk, dv, dkd, dvd]);
    }
    assert_eq!(bits[0], bits[1], "one and two threads");
}

#[test]
fn attention_over_documents_matches_f64() {
    attention_case(&[0..5, 5..6, 6..13], &(0..13).collect::<Vec<_>>(), None, 0);
    attention_case(&[0..5, 5..6, 6..13], &(0..13).collect::<Vec<_>>(), Some(3), 2);
    attention_case(&[0..5, 5..8, 8..13], &[1, 3, 9, 12], None, 1);
    attention_case(&[0..5, 5..8], &[], None, 1);
}

#[test]
fn attention_over_several_blocks_matches_f64() {
    let rows: Vec<u32> = (0..150).filter(|row| row % 2 == 0).collect();
    attention_case(&[0..140, 140..150], &rows, Some(50), 1);
}

#[test]
fn adamw_follows_its_formula() {
    let n = 40_000;
    let (mut p, mut m, mut v) = (wave(n, 1.0), vec![0.0; n], vec![0.0; n]);
    let (mut p64, mut m64, mut v64) = (widened(&p), vec![0.0; n], vec![0.0; n]);
    let (device, gradient) = (cpu(2), wave(n, 2.0));
    for number in 1..=4 {
        let update = AdamWUpdate {
            learning_rate: 1e-2,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.1,
            number,
            gradient_scale: 0.5,
        };
        device.adamw(
            &update,
            (&mut p).into(),
            (&mut m).into(),
            (&mut v).into(),
            (&gradient).into(),
        );
        for i in 0..n {
            let g = 0.5 * f64::from(gradient[i]);
            m64[i] = 0.9 * m64[i] + 0.1 * g;
            v64[i] = 0.999 * v64[i] + 0.001 * g * g;
            let mean = m64[i] / (1.0 - 0.9_f64.powi(number as i32));
            let root = (v64[i] / (1.0 - 0.999_f64.powi(number as i32))).sqrt();
            p64[i] = p64[i] * (1.0 - 1e-3) - 1e-2 * mean / (root + 1e-8);
        }
    }
    close(&p, &p64, 1e-6);
    assert_eq!(
        device.sum_of_squares((&p).into()),
        cpu(1).sum_of_squares((&p).into())
    );
}

#[test]
fn gathered_and_scattered_rows_find_their_places() {
    let device = cpu(2);
    let table = wave(6 * 4, 1.0);
    let mut out = vec![0.0; 3 * 4];
    device.gather(
        Matrix::new(&table, 6, 4),
        &[5, 0, 5],
        MatrixMut::new(&mut out, 3, 4),
    );
    assert_eq!(
        (&out[..4], &out[4..8], &out[8..]),
        (&table[20..], &table[..4], &table[20..])
    );
    let packed: Vec<bf16> = table.iter().map(|&x| bf16::from_f32(x)).collect();
    let stored = Bf16Matrix {
        values: &packed,
        cols: 4,
    };
    device.gather_stored(&stored, &[2], MatrixMut::new(&mut out[..4], 1, 4));
    assert_eq!(out[3], packed[11].to_f32());
    let mut target = vec![1.0; 4 * 2];
    device.scatter_add(
        Matrix::new(&[1.0, 2.0, 3.0, 4.0], 2, 2),
        &[1, 3],
        MatrixMut::new(&mut target, 4, 2),
    );
    assert_eq!(target, [1.0, 1.0, 2.0, 3.0, 1.0, 1.0, 4.0, 5.0]);
}

#[test]
fn sinks_caps_and_narrow_values_match_f64() {
    let documents = [0..70, 70..75];
    let rows: Vec<u32> = (0..75).collect();
    let shape = AttentionShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
        value_dim: 5,
        scale: 0.9,
    };
    for (window, sinks, softcap) in [
        (None, vec![], None),
        (Some(9), vec![0.5, -1.0, 3.0, 0.0], None),
        (None, vec![], Some(0.8)),
        (Some(64), vec![2.0, 1.0, 0.0, -2.0], Some(1.5)),
    ] {
        let plan = AttentionPlan::new(documents.iter().cloned(), &rows, window);
        let q = wave(75 * shape.query_width(), 1.0);
        let (k, v) = (
            wave(75 * shape.key_width(), 2.0),
            wave(75 * shape.value_width(), 3.0),
        );
        let attention = Attention {
            sinks: &sinks,
            softcap,
            ..Attention::plain(shape, &plan)
        };
        let inputs = AttentionInputs {
            q: (&q).into(),
            k: (&k).into(),
            v: (&v).into(),
            k_diagonal: (&[]).into(),
            v_diagonal: (&[]).into(),
        };
        let (mut out, mut lse) = (vec![9.0; 75 * shape.output_width()], vec![9.0; 75 * 4]);
        cpu(2).attention(&attention, &inputs, (&mut out).into(), (&mut lse).into());
        let reference = Reference {
            shape,
            documents: &documents,
            rows: &rows,
            window,
            diagonals: 0,
            sinks: &sinks,
            softcap,
        };
        let [q, k, v] = [&q, &k, &v].map(|x| widened(x));
        close(&out, &reference.forward(&q, &k, &v, &[], &[]), 2e-6);
    }
}

#[test]
fn gates_follow_their_formulas() {
    let (g, u) = (wave(3000, 1.0), wave(3000, 2.0));
    let g: Vec<f32> = g.iter().map(|x| 6.0 * x).collect();
    let u: Vec<f32> = u.iter().map(|x| 9.0 * x).collect();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let clamped = Gate::Clamped {
        alpha: 1.7,
        limit: 4.0,
    };
    for gate in [Gate::Silu, Gate::GeluTanh, clamped] {
        let mut out = vec![0.0; 3000];
        cpu(2).gated(gate, (&g).into(), (&u).into(), (&mut out).into());
        let expected = g.iter().zip(&u).map(|(&g, &u)| (f64::from(g), f64::from(u)));
        let expected: Vec<f64> = expected
            .map(|(g, u)| match gate {
                Gate::Silu => g * sigmoid(g) * u,
                Gate::GeluTanh => {
                    let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                    0.5 * g * (1.0 + inner.tanh()) * u
                }
                Gate::Clamped { .. } => {
                    let (g, u) = (g.min(4.0), u.clamp(-4.0, 4.0));
                    g * sigmoid(f64::from(1.7f32) * g) * (u + 1.0)
                }
            })
            .collect();
        close(&out, &expected, 1e-6);
    }
    let mut x = g.clone();
    cpu(2).softcap((&mut x).into(), 3.0);
    let expected: Vec<f64> = g.iter().map(|&x| 3.0 * (f64::from(x) / 3.0).tanh()).collect();
    close(&x, &expected, 1e-6);
}

#[test]
fn neighbours_turn_by_the_angles_of_halves() {
    let (rope, device) = (Rope::new(10000.0, 8), cpu(1));
    let positions = [0, 3, 49];
    let halves = RotaryTable::new(&rope, 50);
    let neighbours = RotaryTable::new(&rope, 50).placed(4, Pairing::Neighbours);
    // Two heads of 12, of which the last 8 turn: even places are first halves, odd ones second halves.
    let x = wave(3 * 24, 1.0);
    let mut turned = x.clone();
    device.rotate((&mut turned).into(), 12, &neighbours, &positions, Turn::Forward);
    let mut sorted: Vec<f32> = Vec::new();
    for head in x.chunks(12) {
        sorted.extend(head[4..].iter().step_by(2).chain(head[5..].iter().step_by(2)));
    }
    device.rotate((&mut sorted).into(), 8, &halves, &positions, Turn::Forward);
    for ((turned, x), sorted) in turned.chunks(12).zip(x.chunks(12)).zip(sorted.chunks(8)) {
        assert_eq!(turned[..4], x[..4], "what is not rotated stays");
        let pairs: Vec<f32> = (0..4).flat_map(|pair| [sorted[pair], sorted[4 + pair]]).collect();
        close(&turned[4..], &widened(&pairs), 1e-6);
    }
    device.rotate((&mut turned).into(), 12, &neighbours, &positions, Turn::Backward);
    close(&turned, &widened(&x), 1e-6);
}

fn routed(routing: &Routing<'_>, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
    let (mut chosen, mut weights) = (vec![0; routing.top], vec![0.0; routing.top]);
    let logits = Matrix::new(logits, 1, logits.len());
    cpu(1).route(routing, logits, &mut chosen, &mut weights);
    (chosen, weights)
}

#[test]
fn experts_are_chosen_and_weighed_as_each_family_does() {
    let logits = [0.0, 2.0, 1.0, 2.0];
    let plain = Routing {
        top: 2,
        scoring: Scoring::Softmax,
        choice_bias: &[],
        groups: None,
        normalised: false,
        factor: 1.0,
    };
    let e = f64::exp;
    let sum = 1.0 + e(1.0) + 2.0 * e(2.0);
    let (chosen, weights) = routed(&plain, &logits);
    assert_eq!(chosen, [1, 3], "the first of equals comes first");
    close(&weights, &[e(2.0) / sum; 2], 1e-6);
    let (_, weights) = routed(
        &Routing {
            normalised: true,
            factor: 3.0,
            ..plain
        },
        &logits,
    );
    close(&weights, &[1.5, 1.5], 1e-6);
    let (chosen, weights) = routed(
        &Routing {
            top: 3,
            scoring: Scoring::SoftmaxOfChosen,
            ..plain
        },
        &logits,
    );
    assert_eq!(chosen, [1, 3, 2]);
    let sum = 2.0 * e(2.0) + e(1.0);
    close(&weights, &[e(2.0) / sum, e(2.0) / sum, e(1.0) / sum], 1e-6);

    // A bias decides who is chosen and does not count; a group can lose a good expert.
    let sigmoid = Routing {
        scoring: Scoring::Sigmoid,
        choice_bias: &[1.0, 0.0, 0.0, 0.0],
        ..plain
    };
    let of = |x: f64| 1.0 / (1.0 + e(-x));
    let (chosen, weights) = routed(&sigmoid, &logits);
    assert_eq!(chosen, [0, 1]);
    close(&weights, &[of(0.0), of(2.0)], 1e-6);
    let groups = Some(ExpertGroups { count: 2, chosen: 1 });
    let (chosen, weights) = routed(
        &Routing {
            groups,
            normalised: true,
            choice_bias: &[],
            ..sigmoid
        },
        &logits,
    );
    assert_eq!(chosen, [3, 2], "the second group has the better pair");
    let sum = of(2.0) + of(1.0);
    close(&weights, &[of(2.0) / sum, of(1.0) / sum], 1e-6);
}
