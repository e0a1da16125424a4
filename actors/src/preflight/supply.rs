//! Supply against demand: how many tokens verifier ranks extract, how many draft ranks train, and who waits for whom.
//!
//! Work is counted in the products of the forward and backward passes; speed is that of a product of this size, measured or
//! given. Everything else (norms, softmax, memory traffic, messages) comes on top, so these are upper bounds that err in
//! the same direction on both sides: the comparison is better than the numbers.

use eaglet_runtime::draft::{DraftSpec, RowLoad};
use serde::Serialize;

/// Sides whose speeds differ by less than this share are in balance.
const BALANCE: f64 = 0.1;

/// Which ranks stand idle for a part of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Waiting {
    /// Verifier ranks: the draft ranks are slower.
    Verifier,
    /// Draft ranks: the verifier ranks are slower.
    Draft,
    /// Nobody for long.
    Neither,
}

/// Where the speed of products comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpeedSource {
    /// A product was timed on this machine.
    Measured,
    /// Somebody said it.
    Given,
}

/// Floating-point operations per second of one rank of either role.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Speed {
    /// Of a verifier rank.
    pub verifier_flops_per_s: f64,
    /// Of a draft rank.
    pub draft_flops_per_s: f64,
    /// Where the numbers come from.
    pub source: SpeedSource,
}

/// What a typical step holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct StepLoad {
    /// Rows of a step.
    pub(crate) lanes: u64,
    /// Tokens of a row.
    pub(crate) tokens_per_row: f64,
    /// Share of a row's positions that is unrolled.
    pub(crate) active_share: f64,
    /// Tokens that a query sees on average.
    pub(crate) visible: f64,
}

/// The verifier's side.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct VerifierSide {
    /// Whole verifiers, each of one or more ranks.
    pub(crate) replicas: u64,
    /// Work of a token in the rank of a replica that has most of it.
    pub(crate) flops_per_token: f64,
}

/// The draft's side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftSide<'a> {
    /// Draft ranks.
    pub(crate) members: u64,
    /// The draft.
    pub(crate) spec: &'a DraftSpec,
    /// TTT steps.
    pub(crate) steps: usize,
}

/// Who is faster, and how long a run takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SupplyPlan {
    /// Speed of the ranks.
    #[serde(flatten)]
    pub speed: Speed,
    /// Work of a token in the busiest rank of a verifier.
    pub verifier_flops_per_token: f64,
    /// Work of a token of a row in a draft rank.
    pub draft_flops_per_token: f64,
    /// Tokens that all verifier ranks extract together.
    pub verifier_tokens_per_s: f64,
    /// Tokens that all draft ranks train together.
    pub draft_tokens_per_s: f64,
    /// Tokens that the run trains: the lesser of the two.
    pub tokens_per_s: f64,
    /// Who waits.
    pub waiting: Waiting,
    /// Share of the time that they wait.
    pub idle_share: f64,
    /// Steps of the run, if samples could be read.
    pub steps: Option<u64>,
    /// Optimizer steps per second.
    pub steps_per_s: f64,
    /// Duration of the run, in s.
    pub duration_s: Option<f64>,
}

impl SupplyPlan {
    pub(crate) fn new(
        speed: Speed,
        load: &StepLoad,
        verifier: &VerifierSide,
        draft: &DraftSide<'_>,
        steps: Option<u64>,
    ) -> Self {
        let positions = load.tokens_per_row.round().max(1.0);
        let cost = draft.spec.row_cost(&RowLoad {
            positions: positions as usize,
            active: (positions * load.active_share).round() as usize,
            steps: draft.steps,
            visible: load.visible,
        });
        let supply = verifier.replicas as f64 * speed.verifier_flops_per_s / verifier.flops_per_token;
        // A step is over when the rank with most rows is done.
        let own = load.lanes.div_ceil(draft.members.max(1)) as f64;
        let step_tokens = load.lanes as f64 * positions;
        let demand = step_tokens * speed.draft_flops_per_s / (own * cost.flops);
        let slower = supply.min(demand);
        let idle_share = 1.0 - slower / supply.max(demand);
        let waiting = match idle_share < BALANCE {
            true => Waiting::Neither,
            false if supply < demand => Waiting::Draft,
            false => Waiting::Verifier,
        };
        let steps_per_s = slower / step_tokens;
        Self {
            speed,
            verifier_flops_per_token: verifier.flops_per_token,
            draft_flops_per_token: cost.flops / positions,
            verifier_tokens_per_s: supply,
            draft_tokens_per_s: demand,
            tokens_per_s: slower,
            waiting,
            idle_share,
            steps,
            steps_per_s,
            duration_s: steps.map(|steps| steps as f64 / steps_per_s),
        }
    }

    /// What would balance the two sides, where that is worth saying.
    pub fn advice(&self) -> Option<&'static str> {
        match self.waiting {
            Waiting::Neither => None,
            Waiting::Verifier => {
                Some("give draft ranks more threads, or add one (training.rows_per_step of them can work)")
            }
            Waiting::Draft => Some("give verifier ranks more threads, or add one"),
        }
    }
}

#[cfg(test)]
mod tests {
    use eaglet_runtime::draft::LayerKind;
    use eaglet_runtime::rope::{Rope, RopeScaling};

    use super::*;

    fn spec() -> DraftSpec {
        DraftSpec {
            layer: LayerKind::Llama,
            hidden_size: 8,
            intermediate_size: 16,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            vocab_size: 24,
            draft_vocab_size: 10,
            aux_layers: 3,
            rms_norm_eps: 1e-5,
            rope: Rope {
                theta: 10_000.0,
                dim: 4,
                scaling: RopeScaling::None,
            },
            sliding_window: None,
            norm_before_residual: true,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: true,
        }
    }

    const LOAD: StepLoad = StepLoad {
        lanes: 4,
        tokens_per_row: 100.0,
        active_share: 0.5,
        visible: 10.0,
    };

    fn plan(verifier_flops_per_token: f64, members: u64, draft_speed: f64) -> SupplyPlan {
        let spec = spec();
        let speed = Speed {
            verifier_flops_per_s: 1e6,
            draft_flops_per_s: draft_speed,
            source: SpeedSource::Given,
        };
        let verifier = VerifierSide {
            replicas: 2,
            flops_per_token: verifier_flops_per_token,
        };
        let draft = DraftSide {
            members,
            spec: &spec,
            steps: 2,
        };
        SupplyPlan::new(speed, &LOAD, &verifier, &draft, Some(30))
    }

    /// Work of a row of [`LOAD`].
    fn row_flops() -> f64 {
        let load = RowLoad {
            positions: 100,
            active: 50,
            steps: 2,
            visible: 10.0,
        };
        spec().row_cost(&load).flops
    }

    #[test]
    fn each_side_is_its_speed_over_its_work() {
        let plan = plan(500.0, 2, 1e6);
        assert_eq!(plan.verifier_tokens_per_s, 4000.0);
        // Two ranks have two rows each, a step has four of 100 tokens.
        let demand = 400.0 * 1e6 / (2.0 * row_flops());
        assert!((plan.draft_tokens_per_s / demand - 1.0).abs() < 1e-12);
        assert!((plan.draft_flops_per_token / (row_flops() / 100.0) - 1.0).abs() < 1e-12);
        let slower = demand.min(4000.0);
        assert_eq!(plan.tokens_per_s, slower);
        let seconds = plan.duration_s.expect("the number of steps is known");
        assert!((seconds / (30.0 * 400.0 / slower) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn rows_that_do_not_divide_keep_ranks_waiting_for_one() {
        // Three ranks over four rows are no faster than two.
        assert_eq!(
            plan(500.0, 3, 1e6).draft_tokens_per_s,
            plan(500.0, 2, 1e6).draft_tokens_per_s
        );
        assert!(plan(500.0, 4, 1e6).draft_tokens_per_s > plan(500.0, 3, 1e6).draft_tokens_per_s);
    }

    #[test]
    fn the_faster_side_waits() {
        let per_token = row_flops() / 100.0;
        let slow_verifier = plan(1e6, 2, 1e6 * per_token);
        assert_eq!(slow_verifier.waiting, Waiting::Draft);
        assert!(
            slow_verifier
                .advice()
                .is_some_and(|advice| advice.contains("verifier ranks"))
        );
        let slow_draft = plan(0.001, 2, 1.0);
        assert_eq!(slow_draft.waiting, Waiting::Verifier);
        assert!(slow_draft.idle_share > 0.99);
        // 2e6 / 500 tokens on one side, 2e6·(1/per token) on the other: equal when both take 500.
        let equal = plan(500.0, 2, 1e6 * per_token / 500.0);
        assert_eq!((equal.waiting, equal.advice()), (Waiting::Neither, None));
    }
}
