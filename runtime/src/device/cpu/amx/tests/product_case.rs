//! A product of any kind, and whether it is right.

use std::ops::Range;

use half::bf16;
use proptest::prelude::*;

use crate::device::cpu::amx::Engine;
use crate::device::{HostMatrix, HostMatrixMut, Keep, StoredMatrix};

/// Half a unit in the last place of 1.
const ROUNDING: f64 = 5.960_464_477_539_063e-8;

pub(super) fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // From about 2^-6 to 4.
            let size = f32::from_bits(0x3c80_0000 + (state >> 5 & 7) * 0x0080_0000);
            ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * size * 2.0
        })
        .collect()
}

fn rounded(x: f32) -> f64 {
    bf16::from_f32(x).to_f64()
}

/// How an operand lies in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) is_transposed: bool,
    pub(super) gap: usize,
}

impl Layout {
    /// Elements of a `rows` x `cols` matrix, and what is between its lines.
    fn count(self, rows: usize, cols: usize) -> usize {
        (rows.max(cols) + self.gap) * rows.max(cols)
    }

    fn view<T: Copy>(self, data: &[T], rows: usize, cols: usize) -> HostMatrix<'_, T> {
        if self.is_transposed {
            HostMatrix::strided(data, cols, rows, rows + self.gap).transposed()
        } else {
            HostMatrix::strided(data, rows, cols, cols + self.gap)
        }
    }
}

/// How the right operand is handed over.
#[derive(Clone, Copy, Debug)]
pub(super) enum Handing {
    F32,
    PackedF32,
    PackedBf16,
    StoredF32,
    StoredBf16,
    /// Stored, with a place to be kept in.
    Kept,
    /// Stored in a form that is unpacked row by row.
    Unpacked,
}

/// Weights in some form.
#[derive(Debug)]
struct Weights<'a> {
    wide: Option<HostMatrix<'a>>,
    narrow: Option<HostMatrix<'a, bf16>>,
    /// Read to unpack, `[n, k]`.
    values: HostMatrix<'a>,
    kept: Option<Keep>,
}

impl StoredMatrix for Weights<'_> {
    fn rows(&self) -> usize {
        self.values.rows
    }

    fn cols(&self) -> usize {
        self.values.cols
    }

    fn in_place(&self) -> Option<HostMatrix<'_>> {
        self.wide
    }

    fn in_place_bf16(&self) -> Option<HostMatrix<'_, bf16>> {
        self.narrow
    }

    fn kept(&self) -> Option<&Keep> {
        self.kept.as_ref()
    }

    fn unpack(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_exact_mut(self.cols())) {
            for (col, out) in out.iter_mut().enumerate() {
                *out = element(self.values, row, col);
            }
        }
    }
}

fn element<T: Copy>(matrix: HostMatrix<'_, T>, row: usize, col: usize) -> T {
    matrix.data[row * matrix.row_stride + col * matrix.col_stride]
}

/// A product `[m, k]·[k, n]`, `shape` being (m, n, k).
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) shape: (usize, usize, usize),
    pub(super) a: Layout,
    pub(super) b: Layout,
    pub(super) gap: usize,
    pub(super) handing: Handing,
    pub(super) alpha: f32,
    pub(super) accumulate: bool,
    pub(super) seed: u32,
}

impl Case {
    pub(super) const PLAIN: Self = Self {
        shape: (1, 1, 1),
        a: Layout {
            is_transposed: false,
            gap: 0,
        },
        b: Layout {
            is_transposed: true,
            gap: 0,
        },
        gap: 0,
        handing: Handing::F32,
        alpha: 1.0,
        accumulate: false,
        seed: 1,
    };

    /// Weights know neither a factor nor their transpose.
    fn settled(mut self) -> Self {
        if !matches!(
            self.handing,
            Handing::F32 | Handing::PackedF32 | Handing::PackedBf16
        ) {
            self.alpha = 1.0;
        }
        self
    }

    /// The product and what is wrong with it.
    pub(super) fn check(self, engine: &Engine) -> Result<Vec<f32>, TestCaseError> {
        let (m, n, k) = self.shape;
        let a_data = values(self.a.count(m, k), self.seed);
        let b_data = values(self.b.count(k, n), self.seed ^ 77);
        let b_narrow: Vec<bf16> = b_data.iter().map(|&x| bf16::from_f32(x)).collect();
        let (a, b) = (self.a.view(&a_data, m, k), self.b.view(&b_data, k, n));
        let narrow = self.b.view(&b_narrow, k, n);
        let before = values((n + self.gap) * m, self.seed ^ 99);
        let mut c = before.clone();
        let view = HostMatrixMut::strided(&mut c[..], m, n, n + self.gap);
        let (alpha, accumulate) = (self.alpha, self.accumulate);
        let weights = |wide: bool, narrow_too: bool, keeps: bool| Weights {
            wide: wide.then_some(b.transposed()),
            narrow: narrow_too.then_some(narrow.transposed()),
            values: b.transposed(),
            kept: keeps.then(Keep::new),
        };
        match self.handing {
            Handing::F32 => engine.gemm(view, a, b, alpha, accumulate),
            Handing::PackedF32 => engine.gemm_packed(view, a, &engine.pack(b), alpha, accumulate),
            Handing::PackedBf16 => {
                engine.gemm_packed(view, a, &engine.pack_bf16(narrow), alpha, accumulate);
            }
            Handing::StoredF32 => engine.gemm_stored(view, a, &weights(true, false, false), accumulate),
            Handing::StoredBf16 => engine.gemm_stored(view, a, &weights(false, true, false), accumulate),
            Handing::Kept => {
                let kept = weights(false, true, true);
                engine.gemm_stored(view, a, &kept, accumulate);
                prop_assert!(kept.kept().is_some_and(|place| place.get().is_some()));
            }
            Handing::Unpacked => {
                let unpacked = weights(false, false, true);
                engine.gemm_stored(view, a, &unpacked, accumulate);
                prop_assert!(unpacked.kept().is_some_and(|place| place.get().is_none()));
            }
        }
        for (place, (&ours, &before)) in c.iter().zip(&before).enumerate() {
            let (row, col) = (place / (n + self.gap), place % (n + self.gap));
            if col >= n {
                prop_assert_eq!(ours, before, "between the rows of the output");
                continue;
            }
            let terms = (0..k).map(|p| rounded(element(a, row, p)) * rounded(element(b, p, col)));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let old = if accumulate { f64::from(before) } else { 0.0 };
            let exact = f64::from(alpha) * sum + old;
            // 16 roundings of half a step, one where its halves meet, one a step, and those of factor and old output.
            let roundings = (17 + k.div_ceil(32) + 1) as f64;
            let bound = ROUNDING * (roundings * size * f64::from(alpha.abs()) + exact.abs() + old.abs());
            let error = (f64::from(ours) - exact).abs();
            prop_assert!(
                error <= bound * 1.001,
                "row {} column {}: {} for {}, error {:e}, bound {:e}",
                row,
                col,
                ours,
                exact,
                error,
                bound
            );
        }
        Ok(c)
    }
}

fn handing() -> impl Strategy<Value = Handing> {
    prop_oneof![
        3 => Just(Handing::F32),
        1 => Just(Handing::PackedF32),
        1 => Just(Handing::PackedBf16),
        1 => Just(Handing::StoredF32),
        1 => Just(Handing::StoredBf16),
        1 => Just(Handing::Kept),
        1 => Just(Handing::Unpacked),
    ]
}

pub(super) fn case(sizes: Range<usize>) -> impl Strategy<Value = Case> {
    let layout = || (any::<bool>(), 0..4usize).prop_map(|(is_transposed, gap)| Layout { is_transposed, gap });
    let shape = (sizes.clone(), sizes.clone(), sizes);
    let alpha = prop_oneof![Just(1.0_f32), Just(0.5), Just(-1.7), Just(0.0)];
    (
        shape,
        layout(),
        layout(),
        0..5usize,
        handing(),
        alpha,
        any::<bool>(),
        any::<u32>(),
    )
        .prop_map(|(shape, a, b, gap, handing, alpha, accumulate, seed)| {
            Case {
                shape,
                a,
                b,
                gap,
                handing,
                alpha,
                accumulate,
                seed,
            }
            .settled()
        })
}
