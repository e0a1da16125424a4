//! What travels between ranks: bytes per token, per step, and when a rank is replaced.

use serde::Serialize;

/// What a link carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cargo {
    /// Captured states, from a verifier rank to the draft rank that computes the row.
    HiddenStates,
    /// The residual stream, from a stage of the verifier to the next.
    Residual,
    /// Partial sums between the slices of a stage.
    SliceSums,
    /// Gradients of a step, from a draft rank to all others together.
    Gradients,
    /// Weights and moments, from a draft rank to one that takes a lost one's seat.
    State,
}

/// How often a link carries that much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Per {
    /// For each token that is extracted.
    Token,
    /// For each optimizer step.
    Step,
    /// For each draft rank that is replaced.
    Replacement,
}

/// A link, or all links of a kind between the same ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LinkPlan {
    /// What travels.
    pub cargo: Cargo,
    /// The rank that sends.
    pub from: String,
    /// The rank, or ranks, that receive.
    pub to: String,
    /// How often.
    pub per: Per,
    /// Bytes each time.
    pub bytes: u64,
    /// Bytes per second at the estimated speed of the run; of a state none.
    pub bytes_per_s: Option<f64>,
}

/// Bytes that a draft rank sends in a step with `lanes` lanes, of which it owns `own`, among `members` draft ranks: the
/// segments of its lanes to those who sum them, and the segment that it sums to all.
pub(super) fn gradient_bytes_per_step(parameters: u64, own: u64, members: u64) -> u64 {
    if members < 2 {
        return 0;
    }
    let segment = (parameters * 4).div_ceil(members);
    (members - 1) * segment * (own + 1)
}

/// Bytes of weights and both moments.
pub(super) const fn state_bytes(parameters: u64) -> u64 {
    3 * 4 * parameters
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_replica_has_nobody_to_talk_to() {
        assert_eq!(gradient_bytes_per_step(1000, 4, 1), 0);
    }

    #[test]
    fn gradients_are_scattered_lane_by_lane_and_gathered_once() {
        // Two members, a lane each: half of 4000 bytes goes out as a contribution, half as the finished sum.
        assert_eq!(gradient_bytes_per_step(1000, 1, 2), 4000);
        // Four members, three lanes here: 3 segments of 1000 bytes for each lane and for the sum.
        assert_eq!(gradient_bytes_per_step(1000, 3, 4), 3 * 1000 * 4);
        assert_eq!(state_bytes(1000), 12_000);
    }
}
