//! LANES: in every epoch each lane has exactly one owner, who is a member; in every step each lane that has a row is
//! computed by its owner, once. Who owns what never changes the weights, which SAME checks.

use eaglet_runtime::control::LaneMetrics;
use eaglet_runtime::ids::Step;

use super::book::Book;
use super::{Checked, broken};

/// An epoch is about to form.
pub fn owners(lanes: u16, members: impl Iterator<Item = u16> + Clone, owners: &[u16]) -> Checked {
    let is_member = |owner: &u16| members.clone().any(|member| member == *owner);
    if owners.len() == usize::from(lanes) && owners.iter().all(is_member) {
        return Ok(());
    }
    broken(
        "LANES",
        format!(
            "{lanes} lanes are owned by {owners:?}, and {:?} are members",
            members.collect::<Vec<_>>()
        ),
    )
}

/// A step is about to begin.
pub fn begin(book: &Book, step: Step, lanes: &[u16]) -> Checked {
    let expected = book.lanes_with_rows(step);
    if expected.is_some_and(|expected| expected.eq(lanes.iter().copied())) {
        return Ok(());
    }
    broken(
        "LANES",
        format!("step {step} begins with lanes {lanes:?}, which are not those of its rows"),
    )
}

/// A step is about to be applied: what each member computed for it.
pub fn computed<'a>(
    lanes: &[u16],
    owners: &[u16],
    votes: impl Iterator<Item = (u16, &'a [LaneMetrics])> + Clone,
) -> Checked {
    for &lane in lanes {
        let mut by = votes
            .clone()
            .flat_map(|(seat, measured)| measured.iter().map(move |metrics| (seat, metrics.lane)))
            .filter(|&(_, other)| other == lane)
            .map(|(seat, _)| seat);
        let owner = owners.get(usize::from(lane)).copied();
        if by.next() != owner || by.next().is_some() {
            return broken(
                "LANES",
                format!("lane {lane} was not computed once by its owner {owner:?}"),
            );
        }
    }
    Ok(())
}
