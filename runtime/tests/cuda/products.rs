//! Products by cuBLASLt, of all layouts, against f64.

use eaglet_runtime::cuda::{Blas, Factor, MatrixView, MatrixViewMut};
use half::bf16;

use crate::cases::wave;
use crate::stack::{self, Stack};

/// A row-major matrix with some room behind each row.
fn padded(values: &[f32], rows: usize, cols: usize, stride: usize) -> Vec<f32> {
    let mut wide = vec![f32::NAN; rows * stride];
    for row in 0..rows {
        wide[row * stride..][..cols].copy_from_slice(&values[row * cols..][..cols]);
    }
    wide
}

fn transposed(values: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols)
        .map(|i| values[i % rows * cols + i / rows])
        .collect()
}

#[test]
fn products_of_all_layouts_match_f64() {
    let Some(stack) = Stack::open() else { return };
    let search = stack::search().expect("the stack is there");
    let blas = Blas::new(&stack.context, &search).expect("cuBLASLt");
    for (m, n, k) in [(1, 1, 1), (5, 3, 2), (33, 72, 100), (7, 300, 514)] {
        let (a, b, c) = (wave(m * k, 1.0), wave(k * n, 2.0), wave(m * n, 3.0));
        for (layout, accumulate) in (0..4).flat_map(|layout| [(layout, false), (layout, true)]) {
            let (a_turned, b_turned) = (layout & 1 == 1, layout & 2 == 2);
            // Strides of eight elements more than a multiple of eight: what tensor cores take.
            let lay = |values: &[f32], rows: usize, cols: usize, turned: bool| {
                let (values, rows, cols) = match turned {
                    true => (transposed(values, rows, cols), cols, rows),
                    false => (values.to_vec(), rows, cols),
                };
                let stride = cols.next_multiple_of(8) + 8;
                (padded(&values, rows, cols, stride), rows, cols, stride)
            };
            let (a_laid, a_rows, a_cols, a_stride) = lay(&a, m, k, a_turned);
            let (b_laid, b_rows, b_cols, b_stride) = lay(&b, k, n, b_turned);
            let (c_laid, _, _, c_stride) = lay(&c, m, n, false);
            for narrow in [false, true] {
                let round = |x: f32| if narrow { bf16::from_f32(x).to_f32() } else { x };
                let exact: Vec<f64> = (0..m * n)
                    .map(|i| {
                        let sum: f64 = (0..k)
                            .map(|p| f64::from(round(a[i / n * k + p])) * f64::from(round(b[p * n + i % n])))
                            .sum();
                        0.5 * sum + if accumulate { f64::from(c[i]) } else { 0.0 }
                    })
                    .collect();
                // What is there before is not read unless it is added to.
                let before: Vec<f32> = match accumulate {
                    true => c_laid.clone(),
                    false => vec![f32::NAN; c_laid.len()],
                };
                let mut target = stack.upload(&before);
                let out = MatrixViewMut::strided(target.view_mut(), m, n, c_stride);
                let done = if narrow {
                    let pack =
                        |x: &[f32]| -> Vec<u16> { x.iter().map(|&x| bf16::from_f32(x).to_bits()).collect() };
                    let (a, b) = (stack.upload(&pack(&a_laid)), stack.upload(&pack(&b_laid)));
                    let a = factor(MatrixView::strided(a.view(), a_rows, a_cols, a_stride), a_turned);
                    let b = factor(MatrixView::strided(b.view(), b_rows, b_cols, b_stride), b_turned);
                    blas.product_bf16(&stack.stream, out, a, b, 0.5, accumulate)
                        .and_then(|()| stack.stream.synchronize())
                } else {
                    let (a, b) = (stack.upload(&a_laid), stack.upload(&b_laid));
                    let a = factor(MatrixView::strided(a.view(), a_rows, a_cols, a_stride), a_turned);
                    let b = factor(MatrixView::strided(b.view(), b_rows, b_cols, b_stride), b_turned);
                    blas.product(&stack.stream, out, a, b, 0.5, accumulate)
                        .and_then(|()| stack.stream.synchronize())
                };
                let case = format!("{m}x{n}x{k}, layout {layout}, accumulate {accumulate}, bf16 {narrow}");
                done.unwrap_or_else(|error| panic!("{case}: {error}"));
                let ours = stack.download(&target);
                let top = exact.iter().fold(1e-30_f64, |top, x| top.max(x.abs()));
                for (i, exact) in exact.iter().enumerate() {
                    let ours = f64::from(ours[i / n * c_stride + i % n]);
                    let error = (ours - exact).abs();
                    assert!(
                        error <= 1e-6 * (k as f64).sqrt() * top,
                        "{case}, element {i}: {ours} for {exact}"
                    );
                }
                for (place, value) in ours.iter().enumerate() {
                    assert!(
                        place % c_stride < n || value.to_bits() == before[place].to_bits(),
                        "{case}: {place} lies between the rows"
                    );
                }
            }
        }
    }
}

fn factor<T>(stored: MatrixView<'_, T>, turned: bool) -> Factor<'_, T> {
    if turned {
        Factor::transpose_of(stored)
    } else {
        Factor::new(stored)
    }
}

/// PRODUCT-1
#[test]
fn a_row_of_a_product_has_the_same_bits_in_every_call() {
    let Some(stack) = Stack::open() else { return };
    let search = stack::search().expect("the stack is there");
    let blas = Blas::new(&stack.context, &search).expect("cuBLASLt");
    let (rows, n, k) = (300, 64, 128);
    let (a, b) = (
        stack.upload(&wave(rows * k, 1.0)),
        stack.upload(&wave(n * k, 2.0)),
    );
    let product = |first: usize, some: usize| {
        let mut c = stack.upload(&vec![f32::NAN; some * n]);
        let a = MatrixView::new(a.view().part(first * k..(first + some) * k), some, k);
        let b = Factor::transpose_of(MatrixView::new(b.view(), n, k));
        let out = MatrixViewMut::new(c.view_mut(), some, n);
        blas.product(&stack.stream, out, Factor::new(a), b, 1.0, false)
            .expect("computed");
        stack.download(&c)
    };
    let whole = product(0, rows);
    for (first, some) in [(0, 1), (5, 1), (17, 2), (3, 16), (100, 33), (7, 293)] {
        assert_eq!(
            product(first, some),
            whole[first * n..][..some * n],
            "{some} rows from {first}"
        );
    }
}

/// PRODUCT-2
#[test]
fn some_outputs_are_computed_even_where_the_algorithm_of_all_does_not_take_them() {
    let Some(stack) = Stack::open() else { return };
    let search = stack::search().expect("the stack is there");
    let blas = Blas::new(&stack.context, &search).expect("cuBLASLt");
    // Of this depth the stand-in takes no algorithm for fewer outputs than it was chosen for.
    let (rows, width, k) = (5, 24, 13);
    let (a, b) = (
        stack.upload(&wave(rows * k, 1.0)),
        stack.upload(&wave(width * k, 2.0)),
    );
    let outputs = |first: usize, some: usize| {
        let mut c = stack.upload(&vec![f32::NAN; rows * width]);
        let a = Factor::new(MatrixView::new(a.view(), rows, k));
        let b = Factor::transpose_of(MatrixView::new(
            b.view().part(first * k..(first + some) * k),
            some,
            k,
        ));
        // Columns of the whole result.
        let len = c.view().len();
        let out = MatrixViewMut::strided(c.view_mut().part(first..len), rows, some, width);
        blas.outputs(&stack.stream, out, a, b, width, false)
            .expect("computed");
        let values = stack.download(&c);
        let part = values.chunks(width).flat_map(|row| &row[first..first + some]);
        part.copied().collect::<Vec<f32>>()
    };
    let whole = outputs(0, width);
    for (first, some) in [(0, 8), (8, 16), (0, 8)] {
        let part = outputs(first, some);
        for (place, value) in part.iter().enumerate() {
            let expected = whole[place / some * width + first + place % some];
            assert!((value - expected).abs() <= 1e-5, "{value} for {expected}");
        }
        assert_eq!(part, outputs(first, some), "the same call has the same bits");
    }
}
