//! How many optimizer steps samples make.

use eaglet_runtime::ids::{SampleSeq, Unit};
use eaglet_runtime::samples::plan_step;

/// Units whose steps are counted one by one; of more the steps of the first so many are extrapolated.
const COUNTED_UNITS: usize = 1 << 20;

/// Optimizer steps over all passes, and tokens of an average row: samples are packed as the engine packs them.
pub(super) fn steps_of(
    lengths: &[u32],
    lanes: usize,
    tokens_per_row: usize,
    passes: u32,
    scale: f64,
) -> (u64, f64) {
    let fit = |length: &&u32| **length > 0 && **length as usize <= tokens_per_row;
    let per_pass = lengths.iter().filter(fit).count();
    if per_pass == 0 || lanes == 0 {
        return (0, 0.0);
    }
    let counted_passes = (COUNTED_UNITS / per_pass).clamp(1, passes.max(1) as usize);
    let mut units: Vec<(Unit, u32)> = Vec::with_capacity(per_pass * counted_passes);
    for pass in 0..counted_passes as u32 {
        let samples = (0..)
            .map(SampleSeq)
            .zip(lengths)
            .filter(|(_, length)| fit(length));
        units.extend(samples.map(|(sample, &length)| (Unit { pass, sample }, length)));
    }
    let tokens: u64 = units.iter().map(|(_, length)| u64::from(*length)).sum();
    let mut left = units.as_slice();
    let mut steps: u64 = 0;
    while let Some(rows) = plan_step(left.iter().copied(), lanes, tokens_per_row as u32, false) {
        left = &left[rows.iter().map(Vec::len).sum::<usize>()..];
        steps += 1;
    }
    let tokens_per_row = tokens as f64 / (steps as f64 * lanes as f64);
    let whole = scale * f64::from(passes.max(1)) / counted_passes as f64;
    let total = if whole > 1.0 {
        (steps as f64 * whole).ceil() as u64
    } else {
        steps
    };
    (total, tokens_per_row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_packed_as_the_engine_packs_them() {
        // Rows of 10: [6, 4], [5, 5] in one step of two lanes; the third pair begins the next.
        let lengths = [6, 5, 4, 5, 3];
        assert_eq!(steps_of(&lengths, 2, 10, 1, 1.0), (2, 23.0 / 4.0));
        // Two passes: the second one goes on in the row that the first has begun.
        assert_eq!(steps_of(&lengths, 2, 10, 2, 1.0).0, 3);
        assert_eq!(steps_of(&lengths, 2, 10, 1, 10.0).0, 20);
        assert_eq!(steps_of(&[], 2, 10, 1, 1.0), (0, 0.0));
    }
}
