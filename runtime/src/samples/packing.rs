//! Which samples make up the rows of a step.
//!
//! A step has one row per draft seat, each with room for `tokens_per_row`. Units are taken in their order; each goes into the
//! first row, lowest seat first, that has room; the first that fits nowhere closes all rows and begins the next step.
//!
//! Invariants:
//! - The plan depends on the order of the units and on nothing else: not on when they arrived, nor on how many more wait.
//! - The units of a step are the first ones pending, without gaps: nothing is overtaken across steps.
//! - No row exceeds its room. A unit without tokens, or longer than a row, never reaches the packer: intake cuts samples at
//!   the row's length.

use crate::ids::Unit;

/// Plans the next step: the units of each seat's row, `[seats]`.
///
/// `pending` yields units with their tokens, in order, beginning with the first that no step has taken. `None` means that
/// the rows are not closed and more units may come, or that nothing is pending at all. When nothing more comes, the last step
/// is planned as it is, and some of its rows may be empty.
pub fn plan_step(
    pending: impl IntoIterator<Item = (Unit, u32)>,
    seats: usize,
    tokens_per_row: u32,
    more_may_come: bool,
) -> Option<Vec<Vec<Unit>>> {
    let mut rows: Vec<Vec<Unit>> = vec![Vec::new(); seats];
    let mut room = vec![tokens_per_row; seats];
    let mut closed = false;
    for (unit, tokens) in pending {
        debug_assert!(
            0 < tokens && tokens <= tokens_per_row,
            "intake lets no unit of {tokens} tokens through"
        );
        let Some(seat) = room.iter().position(|&room| tokens <= room) else {
            closed = true;
            break;
        };
        rows[seat].push(unit);
        room[seat] -= tokens;
        // Whatever comes next fits nowhere, so there is no need to wait for it.
        if room.iter().all(|&room| room == 0) {
            closed = true;
            break;
        }
    }
    let some = rows.iter().any(|row| !row.is_empty());
    (some && (closed || !more_may_come)).then_some(rows)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ids::SampleSeq;

    fn units(lengths: &[u32]) -> Vec<(Unit, u32)> {
        (0..)
            .zip(lengths)
            .map(|(seq, &tokens)| {
                (
                    Unit {
                        pass: 0,
                        sample: SampleSeq(seq),
                    },
                    tokens,
                )
            })
            .collect()
    }

    /// The plan as sample numbers.
    fn plan(lengths: &[u32], seats: usize, room: u32, more: bool) -> Option<Vec<Vec<u64>>> {
        let rows = plan_step(units(lengths), seats, room, more)?;
        Some(
            rows.into_iter()
                .map(|row| row.into_iter().map(|unit| unit.sample.0).collect())
                .collect(),
        )
    }

    #[test]
    fn the_lowest_seat_with_room_takes_the_unit() {
        assert_eq!(
            plan(&[6, 5, 4, 5, 1], 2, 10, true),
            Some(vec![vec![0, 2], vec![1, 3]])
        );
        assert_eq!(
            plan(&[6, 6, 3, 5, 1], 2, 10, true),
            Some(vec![vec![0, 2], vec![1]])
        );
    }

    #[test]
    fn open_rows_wait_for_more() {
        assert_eq!(plan(&[6, 5], 2, 10, true), None);
        assert_eq!(plan(&[6, 3], 2, 10, false), Some(vec![vec![0, 1], vec![]]));
        assert_eq!(plan(&[], 2, 10, false), None);
        assert_eq!(plan(&[], 2, 10, true), None);
    }

    #[test]
    fn full_rows_do_not_wait() {
        assert_eq!(plan(&[10, 4, 6], 2, 10, true), Some(vec![vec![0], vec![1, 2]]));
    }

    proptest! {
        #[test]
        fn a_plan_is_a_prefix_in_its_order_and_fits(
            lengths in proptest::collection::vec(1_u32..=16, 1..60),
            seats in 1_usize..5,
        ) {
            let all = units(&lengths);
            let rows = plan_step(all.clone(), seats, 16, false).expect("something is pending");
            prop_assert_eq!(rows.len(), seats);
            let taken: usize = rows.iter().map(Vec::len).sum();
            let length = |unit: &Unit| lengths[unit.sample.0 as usize];
            let room: Vec<u32> = rows.iter().map(|row| 16 - row.iter().map(length).sum::<u32>()).collect();
            let mut seen: Vec<u64> = rows.iter().flatten().map(|unit| unit.sample.0).collect();
            prop_assert!(rows.iter().all(|row| row.is_sorted()));
            seen.sort_unstable();
            prop_assert!(seen.iter().copied().eq(0..taken as u64));
            // The next unit fits nowhere, and each unit had no room in a lower seat when it came.
            if let Some(&next) = lengths.get(taken) {
                prop_assert!(room.iter().all(|&room| room < next));
            }
            for (seat, row) in rows.iter().enumerate() {
                for unit in row {
                    for lower in &rows[..seat] {
                        let used: u32 = lower.iter().filter(|other| *other < unit).map(length).sum();
                        prop_assert!(used + length(unit) > 16);
                    }
                }
            }
        }

        #[test]
        fn arrival_does_not_matter(
            lengths in proptest::collection::vec(1_u32..=16, 1..60),
            seats in 1_usize..5,
        ) {
            // All known at once, against one unit at a time: the same sequence of steps.
            let all = units(&lengths);
            let (mut at_once, mut start) = (Vec::new(), 0);
            while let Some(rows) = plan_step(all[start..].iter().copied(), seats, 16, false) {
                start += rows.iter().map(Vec::len).sum::<usize>();
                at_once.push(rows);
            }
            prop_assert_eq!(start, all.len());
            let (mut trickled, mut start) = (Vec::new(), 0);
            for arrived in 1..=all.len() {
                while let Some(rows) = plan_step(all[start..arrived].iter().copied(), seats, 16, true) {
                    start += rows.iter().map(Vec::len).sum::<usize>();
                    trickled.push(rows);
                }
            }
            while let Some(rows) = plan_step(all[start..].iter().copied(), seats, 16, false) {
                start += rows.iter().map(Vec::len).sum::<usize>();
                trickled.push(rows);
            }
            prop_assert_eq!(at_once, trickled);
        }
    }
}
