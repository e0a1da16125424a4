//! Packers against their plain twin, and that one against the definition of a panel.

use half::bf16;
use proptest::prelude::*;

use crate::device::HostMatrix;
use crate::device::cpu::amx::pack::{Element, Level, Side};
use crate::device::cpu::amx::tiles::{Line, PANEL_LANES, STEP_DEPTH, STEP_LINES};

/// Numbers of all sizes, NaN, infinities, subnormal ones and ties among them.
fn bits(seed: u32) -> impl Iterator<Item = u32> {
    let mut state = seed | 1;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        match state >> 28 {
            0 => 0x7f80_0000 | state << 31,
            1 => 0x7f80_0001 | state & 0x8000_0000,
            2 => state & 0x807f_ffff,
            3 => state & 0xffff_0000 | 0x8000,
            _ => state ^ state >> 15,
        }
    })
}

/// One panel from its definition.
fn defined<T: Element>(side: Side, source: HostMatrix<'_, T>, first: usize, steps: usize) -> Vec<[u32; 16]> {
    let at = |lane: usize, term: usize| {
        if lane < source.rows && term < source.cols {
            u32::from(source.data[lane * source.row_stride + term * source.col_stride].bits())
        } else {
            0
        }
    };
    let pair = |lane: usize, term: usize| at(lane, term) | at(lane, term + 1) << 16;
    let line = |line: usize| {
        let (step, half, row) = (line / STEP_LINES, line / 16 % 2, line % 16);
        let (lane, term) = (first + half * 16, step * STEP_DEPTH);
        std::array::from_fn(|place| match side {
            Side::Left => pair(lane + row, term + 2 * place),
            Side::Right => pair(lane + place, term + 2 * row),
        })
    };
    (0..steps * STEP_LINES).map(line).collect()
}

fn check<T: Element>(source: HostMatrix<'_, T>) -> Result<(), TestCaseError> {
    let (steps, panels) = (
        source.cols.div_ceil(STEP_DEPTH),
        source.rows.div_ceil(PANEL_LANES),
    );
    for side in [Side::Left, Side::Right] {
        let expected: Vec<[u32; 16]> = (0..panels)
            .flat_map(|panel| defined(side, source, panel * PANEL_LANES, steps))
            .collect();
        for level in Level::ALL.iter().filter(|level| level.is_here()) {
            // What is left over from before must not show.
            let mut packed = vec![Line([0xdead_beef; 16]); panels * steps * STEP_LINES];
            level.panels(side, source, 0, steps, &mut packed);
            let packed: Vec<[u32; 16]> = packed.into_iter().map(|line| line.0).collect();
            prop_assert_eq!(&packed, &expected, "{:?} {:?}", level, side);
        }
    }
    Ok(())
}

/// The same numbers in both storage orders and with gaps.
fn check_layouts<T: Element>(
    values: &[T],
    lanes: usize,
    depth: usize,
    gap: usize,
) -> Result<(), TestCaseError> {
    check(HostMatrix::strided(values, lanes, depth, depth + gap))?;
    check(HostMatrix::strided(values, depth, lanes, lanes + gap).transposed())?;
    // Neither way contiguous.
    let wide = HostMatrix::strided(values, depth, lanes, lanes + gap).transposed();
    check(wide.part((0, 2, lanes.div_ceil(2)), 0, depth))?;
    // One row of memory, or one column of it.
    check(HostMatrix::strided(&values[..depth], 1, depth, depth))?;
    check(HostMatrix::strided(&values[..lanes], 1, lanes, lanes).transposed())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn every_packer_writes_the_panel_as_it_is_defined(
        lanes in 1..=100usize,
        depth in 1..=100usize,
        gap in 0..4usize,
        seed in any::<u32>(),
    ) {
        let count = (lanes + gap) * (depth + gap) + 8;
        let wide: Vec<f32> = bits(seed).map(f32::from_bits).take(count).collect();
        let narrow: Vec<bf16> = bits(seed).map(|bits| bf16::from_bits((bits >> 16) as u16)).take(count).collect();
        check_layouts(&wide, lanes, depth, gap)?;
        check_layouts(&narrow, lanes, depth, gap)?;
    }
}

#[test]
fn rounding_is_that_of_the_half_crate_and_nan_stays_nan() {
    let ends = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    for upper in 0..=u16::MAX {
        for lower in ends {
            let x = f32::from_bits(u32::from(upper) << 16 | lower);
            let (ours, theirs) = (bf16::from_bits(x.bits()), bf16::from_f32(x));
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{:x}: {ours:?} for {theirs:?}",
                x.to_bits()
            );
            assert_eq!(ours.is_nan(), x.is_nan(), "{:x}", x.to_bits());
        }
    }
}
