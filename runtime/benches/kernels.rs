//! Times of single operations on the CPU, `cargo bench -p eaglet-runtime --bench kernels`; words behind `--` choose some.
//!
//! Shapes are those of a draft for SmolLM2-135M and a row of 1,024 tokens. `order` shows what repeatability costs: the same
//! product with blocks of k and tiles that never change, as the device has them, and as the crate behind it would choose
//! them itself.

#![allow(unsafe_code, missing_docs)]

use std::ops::Range;

use divan::Bencher;
use divan::counter::{BytesCount, ItemsCount};
use eaglet_runtime::device::{
    AdamWUpdate, Attention, AttentionGradients, AttentionInputs, AttentionPlan, AttentionShape, Cpu, Device,
    HostMatrix, Matrix, MatrixMut, RotaryTable, RowLoss, StoredMatrix, TargetRow, Turn,
};
use eaglet_runtime::rope::Rope;
use half::bf16;

const ROWS: usize = 1024;
const HIDDEN: usize = 576;
const INNER: usize = 1536;
const HEADS: usize = 9;
const HEAD_DIM: usize = 64;
const THREADS: [usize; 2] = [1, 2];

fn main() {
    divan::main();
}

fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads).expect("a machine has two threads")
}

fn wave(length: usize, seed: f32) -> Vec<f32> {
    (0..length).map(|i| (1.3 * i as f32 + seed).sin()).collect()
}

mod product {
    use super::*;

    /// bf16 weights, as a verifier's files hold them.
    #[derive(Debug)]
    struct Packed(Vec<bf16>);

    impl StoredMatrix for Packed {
        fn rows(&self) -> usize {
            INNER
        }

        fn cols(&self) -> usize {
            HIDDEN
        }

        fn in_place(&self) -> Option<HostMatrix<'_>> {
            None
        }

        fn unpack(&self, rows: Range<usize>, out: &mut [f32]) {
            let values = &self.0[rows.start * HIDDEN..rows.end * HIDDEN];
            out.iter_mut()
                .zip(values)
                .for_each(|(out, value)| *out = value.to_f32());
        }
    }

    fn flops() -> ItemsCount {
        ItemsCount::new(2 * ROWS * HIDDEN * INNER)
    }

    #[divan::bench(args = THREADS)]
    fn f32_weights(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, a, w) = (cpu(threads), wave(ROWS * HIDDEN, 1.0), wave(INNER * HIDDEN, 2.0));
        let mut c = vec![0.0; ROWS * INNER];
        bencher.counter(flops()).bench_local(|| {
            let b = Matrix::new(&w, INNER, HIDDEN).transposed();
            let c = MatrixMut::new(&mut c, ROWS, INNER);
            device.gemm(c, Matrix::new(&a, ROWS, HIDDEN), b, 1.0, false);
        });
    }

    #[divan::bench(args = THREADS)]
    fn bf16_weights(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, a) = (cpu(threads), wave(ROWS * HIDDEN, 1.0));
        let w = Packed(
            wave(INNER * HIDDEN, 2.0)
                .into_iter()
                .map(bf16::from_f32)
                .collect(),
        );
        let mut c = vec![0.0; ROWS * INNER];
        bencher.counter(flops()).bench_local(|| {
            let c = MatrixMut::new(&mut c, ROWS, INNER);
            device.gemm_stored(c, Matrix::new(&a, ROWS, HIDDEN), &w, false);
        });
    }
}

mod order {
    use super::*;

    const SIDE: usize = 2048;

    fn operands() -> [Vec<f32>; 3] {
        [1.0, 2.0, 3.0].map(|seed| wave(SIDE * SIDE, seed))
    }

    fn flops() -> ItemsCount {
        ItemsCount::new(2 * SIDE * SIDE * SIDE)
    }

    #[divan::bench(args = THREADS, sample_count = 20)]
    fn fixed(bencher: Bencher<'_, '_>, threads: usize) {
        let ([a, w, mut c], device) = (operands(), cpu(threads));
        bencher.counter(flops()).bench_local(|| {
            let b = Matrix::new(&w, SIDE, SIDE).transposed();
            let c = MatrixMut::new(&mut c, SIDE, SIDE);
            device.gemm(c, Matrix::new(&a, SIDE, SIDE), b, 1.0, false);
        });
    }

    #[divan::bench(args = THREADS, sample_count = 20)]
    fn free(bencher: Bencher<'_, '_>, threads: usize) {
        let ([a, w, mut c], device) = (operands(), cpu(threads));
        let product = gemm_f32::gemm::f32::get_gemm_fn();
        let parallelism = match threads {
            1 => gemm_common::Parallelism::None,
            _ => gemm_common::Parallelism::Rayon(threads),
        };
        bencher.counter(flops()).bench_local(|| {
            let c = &mut c;
            let (n, stride) = (SIDE, SIDE as isize);
            // SAFETY: three dense matrices of SIDE x SIDE, the output apart from the others.
            device.install(|| unsafe {
                let (c, a, w) = (c.as_mut_ptr(), a.as_ptr(), w.as_ptr());
                product(
                    n,
                    n,
                    n,
                    c,
                    stride,
                    1,
                    false,
                    w,
                    1,
                    stride,
                    a,
                    stride,
                    1,
                    1.0,
                    1.0,
                    false,
                    false,
                    false,
                    parallelism,
                );
            });
        });
    }
}

mod elementwise {
    use super::*;

    #[divan::bench(args = THREADS)]
    fn copy(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, x) = (cpu(threads), wave(ROWS * INNER, 1.0));
        let mut y = vec![0.0; ROWS * INNER];
        bencher.counter(BytesCount::new(8 * x.len())).bench_local(|| {
            let y = MatrixMut::new(&mut y, ROWS, INNER);
            device.copy(Matrix::new(&x, ROWS, INNER), y);
        });
    }

    #[divan::bench(args = THREADS)]
    fn rms_norm(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, x, weight) = (cpu(threads), wave(ROWS * HIDDEN, 1.0), vec![1.0; HIDDEN]);
        let (mut y, mut rstd) = (vec![0.0; ROWS * HIDDEN], vec![0.0; ROWS]);
        bencher.counter(BytesCount::new(8 * x.len())).bench_local(|| {
            let y = MatrixMut::new(&mut y, ROWS, HIDDEN);
            device.rms_norm(
                Matrix::new(&x, ROWS, HIDDEN),
                (&weight).into(),
                1e-5,
                y,
                (&mut rstd).into(),
            );
        });
    }

    #[divan::bench(args = THREADS)]
    fn rotate(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, mut x) = (cpu(threads), wave(ROWS * HEADS * HEAD_DIM, 1.0));
        let table = RotaryTable::new(&Rope::new(10_000.0, HEAD_DIM), ROWS);
        let positions: Vec<u32> = (0..ROWS as u32).collect();
        bencher
            .counter(BytesCount::new(8 * x.len()))
            .bench_local(|| device.rotate((&mut x).into(), HEAD_DIM, &table, &positions, Turn::Forward));
    }

    #[divan::bench(args = THREADS)]
    fn swiglu(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, gate, up) = (cpu(threads), wave(ROWS * INNER, 1.0), wave(ROWS * INNER, 2.0));
        let mut out = vec![0.0; ROWS * INNER];
        bencher
            .counter(BytesCount::new(12 * out.len()))
            .bench_local(|| device.swiglu((&gate).into(), (&up).into(), (&mut out).into()));
    }

    #[divan::bench(args = THREADS)]
    fn adamw(bencher: Bencher<'_, '_>, threads: usize) {
        const PARAMETERS: usize = 5_000_000;
        let (device, gradient) = (cpu(threads), wave(PARAMETERS, 1.0));
        let [mut p, mut m, mut v] = [2.0, 3.0, 4.0].map(|seed| wave(PARAMETERS, seed));
        v.iter_mut().for_each(|v| *v = v.abs());
        let update = AdamWUpdate {
            learning_rate: 1e-4,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            number: 10,
            gradient_scale: 0.5,
        };
        bencher.counter(BytesCount::new(28 * PARAMETERS)).bench_local(|| {
            device.adamw(
                &update,
                (&mut p).into(),
                (&mut m).into(),
                (&mut v).into(),
                (&gradient).into(),
            )
        });
    }

    #[divan::bench(args = THREADS)]
    fn kl_divergence(bencher: Bencher<'_, '_>, threads: usize) {
        const BLOCK: usize = 512;
        const VOCABULARY: usize = 8192;
        let (device, mut p) = (cpu(threads), wave(BLOCK * VOCABULARY, 1.0));
        let mut targets = vec![TargetRow::default(); BLOCK];
        device.softmax_targets(MatrixMut::new(&mut p, BLOCK, VOCABULARY), &mut targets);
        let mut logits = wave(BLOCK * VOCABULARY, 2.0);
        let mut losses = vec![RowLoss::default(); BLOCK];
        let (of, coefficients) = ((0..BLOCK as u32).collect::<Vec<_>>(), vec![0.1; BLOCK]);
        bencher
            .counter(BytesCount::new(12 * logits.len()))
            .bench_local(|| {
                let logits = MatrixMut::new(&mut logits, BLOCK, VOCABULARY);
                let p = Matrix::new(&p, BLOCK, VOCABULARY);
                device.kl_divergence(logits, p, &targets, &of, &coefficients, &mut losses);
            });
    }
}

mod attention {
    use super::*;

    const SHAPE: AttentionShape = AttentionShape {
        heads: HEADS,
        kv_heads: 3,
        head_dim: HEAD_DIM,
        value_dim: HEAD_DIM,
        scale: 0.125,
    };

    fn operands() -> (AttentionPlan, [Vec<f32>; 3]) {
        let rows: Vec<u32> = (0..ROWS as u32).collect();
        let widths = [SHAPE.query_width(), SHAPE.key_width(), SHAPE.value_width()];
        (
            AttentionPlan::new(std::iter::once(0..ROWS), &rows, None),
            widths.map(|width| wave(ROWS * width, width as f32)),
        )
    }

    fn inputs([q, k, v]: &[Vec<f32>; 3]) -> AttentionInputs<'_> {
        AttentionInputs {
            q: q.into(),
            k: k.into(),
            v: v.into(),
            k_diagonal: (&[]).into(),
            v_diagonal: (&[]).into(),
        }
    }

    /// Multiply-adds of so many products over the visible half of all pairs, twice.
    fn flops(products: usize) -> ItemsCount {
        ItemsCount::new(products * HEADS * HEAD_DIM * ROWS * (ROWS + 1))
    }

    #[divan::bench(args = THREADS)]
    fn forward(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, (plan, operands)) = (cpu(threads), operands());
        let attention = Attention::plain(SHAPE, &plan);
        let (mut out, mut lse) = (vec![0.0; ROWS * SHAPE.output_width()], vec![0.0; ROWS * HEADS]);
        bencher.counter(flops(2)).bench_local(|| {
            device.attention(
                &attention,
                &inputs(&operands),
                (&mut out).into(),
                (&mut lse).into(),
            )
        });
    }

    #[divan::bench(args = THREADS)]
    fn backward(bencher: Bencher<'_, '_>, threads: usize) {
        let (device, (plan, operands)) = (cpu(threads), operands());
        let attention = Attention::plain(SHAPE, &plan);
        let (mut out, mut lse) = (vec![0.0; ROWS * SHAPE.output_width()], vec![0.0; ROWS * HEADS]);
        device.attention(
            &attention,
            &inputs(&operands),
            (&mut out).into(),
            (&mut lse).into(),
        );
        let [mut dq, mut dk, mut dv] = operands.each_ref().map(|operand| vec![0.0; operand.len()]);
        bencher.counter(flops(5)).bench_local(|| {
            let gradients = AttentionGradients {
                dq: (&mut dq).into(),
                dk: (&mut dk).into(),
                dv: (&mut dv).into(),
                dk_diagonal: (&mut []).into(),
                dv_diagonal: (&mut []).into(),
            };
            device.attention_backward(
                &attention,
                &inputs(&operands),
                (&lse).into(),
                (&out).into(),
                gradients,
            );
        });
    }
}
