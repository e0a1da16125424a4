//! Products against f64, and the invariants of the module.

use half::bf16;
use proptest::prelude::*;

use super::product_case::{Case, Handing, Layout, case, values};
use super::{engine, engine_with_slabs};
use crate::device::{Cpu, Device, HostMatrix, Matrix, MatrixMut, ProductKernel};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(250))]

    #[test]
    fn products_of_rounded_operands_match_f64(case in case(1..101)) {
        case.check(&engine())?;
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    /// AMX-5: whether operands are packed whole or panel by panel changes no bit.
    #[test]
    fn slabs_change_nothing(case in case(1..140), slab_bytes in 1..30_000usize) {
        let slabs = case.check(&engine_with_slabs(slab_bytes))?;
        prop_assert_eq!(slabs, case.check(&engine())?);
    }
}

#[test]
fn products_of_every_size_match_f64() {
    let engine = engine();
    let (plain, packed) = (Handing::F32, Handing::PackedBf16);
    for size in 1..=100 {
        for shape in [(size, 33, 65), (17, size, 40), (5, 37, size)] {
            for (handing, is_transposed) in [(plain, false), (packed, true)] {
                let case = Case {
                    shape,
                    handing,
                    b: Layout {
                        is_transposed,
                        gap: 0,
                    },
                    ..Case::PLAIN
                };
                case.check(&engine).expect("a right product");
            }
        }
    }
}

#[test]
fn a_long_sum_goes_through_several_chunks_of_k() {
    for accumulate in [false, true] {
        let case = Case {
            shape: (40, 70, 64 * 32 * 2 + 100),
            accumulate,
            ..Case::PLAIN
        };
        case.check(&engine()).expect("a right product");
    }
}

/// AMX-2, and the distance of rows where caches are narrow.
#[test]
fn rows_that_lie_pages_apart_are_written_like_others() {
    let (m, n, k) = (70, 100, 40);
    let apart = Case {
        shape: (m, n, k),
        gap: 1024 - n,
        ..Case::PLAIN
    };
    let (apart, close) = (apart.check(&engine()), Case { gap: 0, ..apart }.check(&engine()));
    let (apart, close) = (apart.expect("right"), close.expect("right"));
    for row in 0..m {
        assert_eq!(apart[row * 1024..][..n], close[row * n..][..n], "row {row}");
    }
}

fn product(cpu: &Cpu, a: &[f32], b: &[f32], (m, n, k): (usize, usize, usize)) -> Vec<f32> {
    let mut c = vec![0.0; m * n];
    cpu.gemm(
        MatrixMut::new(&mut c, m, n),
        Matrix::new(a, m, k),
        Matrix::new(b, n, k).transposed(),
        1.0,
        false,
    );
    c
}

#[test]
fn threads_and_other_rows_change_no_bit() {
    let (m, n, k) = (300, 610, 130);
    let (a, b) = (values(m * k, 1), values(n * k, 2));
    let whole = product(&Cpu::with_amx(1), &a, &b, (m, n, k));
    for threads in [2, 3] {
        assert_eq!(
            product(&Cpu::with_amx(threads), &a, &b, (m, n, k)),
            whole,
            "{threads} threads"
        );
    }
    for (first, rows) in [(0, 1), (5, 1), (17, 2), (3, 16), (100, 33), (7, 250)] {
        let part = product(&Cpu::with_amx(2), &a[first * k..][..rows * k], &b, (rows, n, k));
        assert_eq!(
            part,
            whole[first * n..][..rows * n],
            "{rows} rows from {first} on"
        );
    }
    let left = product(&Cpu::with_amx(2), &a, &b[..37 * k], (m, 37, k));
    for row in 0..m {
        assert_eq!(left[row * 37..][..37], whole[row * n..][..37], "row {row}");
    }
}

#[test]
fn a_packed_matrix_is_used_by_many_products_and_takes_new_values() {
    let (m, n, k) = (45, 70, 90);
    let cpu = Cpu::with_amx(2);
    assert_eq!(cpu.kernel(), ProductKernel::AmxBf16);
    let (first, second) = (values(n * k, 2), values(n * k, 3));
    fn view(b: &[f32], (n, k): (usize, usize)) -> Matrix<'_> {
        Matrix::new(b, n, k).transposed()
    }
    let mut packed = cpu.pack(view(&first, (n, k))).expect("a unit");
    assert_eq!((packed.rows(), packed.cols()), (k, n));
    for (b, seed) in [(&first, 4), (&first, 5), (&second, 4)] {
        cpu.repack(&mut packed, view(b, (n, k)));
        let (a, mut c) = (values(m * k, seed), vec![0.0; m * n]);
        cpu.gemm_packed(
            MatrixMut::new(&mut c, m, n),
            Matrix::new(&a, m, k),
            &packed,
            1.0,
            false,
        );
        assert_eq!(c, product(&cpu, &a, b, (m, n, k)));
    }
    let narrow: Vec<bf16> = second.iter().map(|&x| bf16::from_f32(x)).collect();
    let also = cpu
        .pack_bf16(HostMatrix::new(&narrow[..], n, k).transposed())
        .expect("a unit");
    let (a, mut c) = (values(m * k, 6), vec![0.0; m * n]);
    cpu.gemm_packed(
        MatrixMut::new(&mut c, m, n),
        Matrix::new(&a, m, k),
        &also,
        1.0,
        false,
    );
    assert_eq!(c, product(&cpu, &a, &second, (m, n, k)));
}

#[test]
fn products_without_terms_or_outputs_are_what_they_are() {
    let cpu = Cpu::with_amx(1);
    let empty: [f32; 0] = [];
    for (accumulate, expected) in [(false, 0.0), (true, 7.0)] {
        let mut c = [7.0; 6];
        cpu.gemm(
            MatrixMut::new(&mut c, 2, 3),
            Matrix::new(&empty, 2, 0),
            Matrix::new(&empty, 0, 3),
            1.0,
            accumulate,
        );
        assert_eq!(c, [expected; 6]);
    }
    let mut none: [f32; 0] = [];
    let b = values(12, 1);
    cpu.gemm(
        MatrixMut::new(&mut none, 0, 3),
        Matrix::new(&empty, 0, 4),
        Matrix::new(&b, 4, 3),
        1.0,
        false,
    );
    let packed = cpu.pack(Matrix::new(&empty, 0, 3)).expect("a unit");
    let mut c = [7.0; 6];
    cpu.gemm_packed(
        MatrixMut::new(&mut c, 2, 3),
        Matrix::new(&empty, 2, 0),
        &packed,
        1.0,
        false,
    );
    assert_eq!(c, [0.0; 6]);
}

#[test]
fn nan_and_infinity_reach_their_outputs_and_no_others() {
    let (m, n, k) = (3, 5, 40);
    let (mut a, mut b) = (values(m * k, 1), values(n * k, 2));
    (a[k + 39], b[2 * k]) = (f32::from_bits(0x7f80_0001), f32::INFINITY);
    let c = product(&Cpu::with_amx(1), &a, &b, (m, n, k));
    for (place, c) in c.iter().enumerate() {
        let expected = (place / n == 1, place % n == 2);
        assert_eq!(
            (c.is_nan(), c.is_infinite()),
            (expected.0, expected.1 && !expected.0),
            "{place}"
        );
    }
}
