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

/// What the ranks of one role do together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SideSpeed {
    /// Floating-point operations of a token, in the busiest rank of a verifier or in any draft rank.
    pub flops_per_token: f64,
    /// Tokens that all ranks of the role do together.
    pub tokens_per_s: f64,
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
    /// Extraction; absent where hidden states are read from files.
    pub verifier: Option<SideSpeed>,
    /// Training; absent where hidden states are written to files.
    pub draft: Option<SideSpeed>,
    /// Tokens of the run per second: the lesser of the two.
    pub tokens_per_s: f64,
    /// Who waits.
    pub waiting: Waiting,
    /// Share of the time that they wait.
    pub idle_share: f64,
    /// Steps of the run, if samples could be read.
    pub steps: Option<u64>,
    /// Steps per second.
    pub steps_per_s: f64,
    /// Duration of the run, in s.
    pub duration_s: Option<f64>,
}

impl SupplyPlan {
    /// The plan of a run in which at least one of the two sides computes something.
    pub(crate) fn new(
        speed: Speed,
        load: &StepLoad,
        verifier: Option<VerifierSide>,
        draft: Option<DraftSide<'_>>,
        steps: Option<u64>,
    ) -> Option<Self> {
        let positions = load.tokens_per_row.round().max(1.0);
        let step_tokens = load.lanes as f64 * positions;
        let verifier = verifier.map(|side| SideSpeed {
            flops_per_token: side.flops_per_token,
            tokens_per_s: side.replicas as f64 * speed.verifier_flops_per_s / side.flops_per_token,
        });
        let draft = draft.map(|side| {
            let cost = side.spec.row_cost(&RowLoad {
                positions: positions as usize,
                active: (positions * load.active_share).round() as usize,
                steps: side.steps,
                visible: load.visible,
            });
            // A step is over when the rank with most rows is done.
            let own = load.lanes.div_ceil(side.members.max(1)) as f64;
            SideSpeed {
                flops_per_token: cost.flops / positions,
                tokens_per_s: step_tokens * speed.draft_flops_per_s / (own * cost.flops),
            }
        });
        let speeds = [verifier, draft].map(|side| side.map_or(f64::INFINITY, |side| side.tokens_per_s));
        let [supply, demand] = speeds;
        let slower = supply.min(demand);
        if !slower.is_finite() || slower <= 0.0 {
            return None;
        }
        // Files wait for nobody.
        let is_compared = verifier.is_some() && draft.is_some();
        let idle_share = if is_compared {
            1.0 - slower / supply.max(demand)
        } else {
            0.0
        };
        let waiting = match idle_share < BALANCE {
            true => Waiting::Neither,
            false if supply < demand => Waiting::Draft,
            false => Waiting::Verifier,
        };
        let steps_per_s = slower / step_tokens;
        Some(Self {
            speed,
            verifier,
            draft,
            tokens_per_s: slower,
            waiting,
            idle_share,
            steps,
            steps_per_s,
            duration_s: steps.map(|steps| steps as f64 / steps_per_s),
        })
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
        SupplyPlan::new(speed, &LOAD, Some(verifier), Some(draft), Some(30)).expect("both sides compute")
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
        let [verifier, draft] = [plan.verifier, plan.draft].map(|side| side.expect("both sides compute"));
        assert_eq!(verifier.tokens_per_s, 4000.0);
        // Two ranks have two rows each, a step has four of 100 tokens.
        let demand = 400.0 * 1e6 / (2.0 * row_flops());
        assert!((draft.tokens_per_s / demand - 1.0).abs() < 1e-12);
        assert!((draft.flops_per_token / (row_flops() / 100.0) - 1.0).abs() < 1e-12);
        let slower = demand.min(4000.0);
        assert_eq!(plan.tokens_per_s, slower);
        let seconds = plan.duration_s.expect("the number of steps is known");
        assert!((seconds / (30.0 * 400.0 / slower) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn rows_that_do_not_divide_keep_ranks_waiting_for_one() {
        // Three ranks over four rows are no faster than two.
        let trained = |members| plan(500.0, members, 1e6).draft.map(|side| side.tokens_per_s);
        assert_eq!(trained(3), trained(2));
        assert!(trained(4) > trained(3));
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

    #[test]
    fn files_wait_for_nobody() {
        let speed = Speed {
            verifier_flops_per_s: 1e6,
            draft_flops_per_s: 1e6,
            source: SpeedSource::Given,
        };
        let verifier = VerifierSide {
            replicas: 1,
            flops_per_token: 500.0,
        };
        let written =
            SupplyPlan::new(speed, &LOAD, Some(verifier), None, Some(5)).expect("a verifier computes");
        assert_eq!(
            (written.tokens_per_s, written.waiting),
            (2000.0, Waiting::Neither)
        );
        assert_eq!(written.duration_s, Some(5.0 * 400.0 / 2000.0));
        assert_eq!(SupplyPlan::new(speed, &LOAD, None, None, None), None);
    }
}
