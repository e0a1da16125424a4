//! A product whose result is known, through packers and micro-kernel.

use super::hardware::Amx;
use super::pack::{self, Side};
use super::tiles::{BLOCK_SUMS, Line, NoAmx, PANEL_LANES, STEP_DEPTH, STEP_LINES};
use crate::device::HostMatrix;

const STEPS: usize = 3;
const DEPTH: usize = STEPS * STEP_DEPTH;

/// Whether the unit multiplies as it should: whole numbers that bf16 and every order of summing hold exactly.
pub(super) fn check(amx: Amx) -> Result<(), NoAmx> {
    // Different in every lane and along k, so that no two tiles, lanes or pairs can be taken for each other.
    let operand = |a: usize, b: usize| -> Vec<f32> {
        let element = |i: usize| (i / DEPTH * a + i % DEPTH * b + i % DEPTH * (i / DEPTH) % 7) % 31;
        (0..PANEL_LANES * DEPTH)
            .map(|i| element(i) as f32 - 15.0)
            .collect()
    };
    let (left, right) = (operand(3, 11), operand(5, 7));
    let mut packed = [(); 2].map(|()| vec![Line::ZERO; STEPS * STEP_LINES]);
    for ((operand, side), packed) in [(&left, Side::Left), (&right, Side::Right)]
        .into_iter()
        .zip(&mut packed)
    {
        pack::panels(
            side,
            HostMatrix::new(&operand[..], PANEL_LANES, DEPTH),
            0,
            STEPS,
            packed,
        );
    }
    let mut sums = [0.0; BLOCK_SUMS];
    let mut tiles = amx.configure();
    // Once from zero and once on top of that.
    for add in [false, true] {
        tiles.multiply(&packed[0], &packed[1], &mut sums, add);
    }
    drop(tiles);
    for (place, &sum) in sums.iter().enumerate() {
        let (row, col) = (place / PANEL_LANES, place % PANEL_LANES);
        let terms = left[row * DEPTH..][..DEPTH].iter().zip(&right[col * DEPTH..]);
        let expected = 2.0 * terms.map(|(&x, &y)| x * y).sum::<f32>();
        if sum != expected {
            return Err(NoAmx::Wrong(format!(
                "row {row}, column {col} of a known product is {sum}, not {expected}"
            )));
        }
    }
    Ok(())
}
