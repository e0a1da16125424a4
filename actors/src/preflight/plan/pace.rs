//! How fast a run goes.

use eaglet_runtime::device::ProductRates;
use eaglet_runtime::ids::Role;

use super::Plan;
use crate::preflight::machine::Machine;
use crate::preflight::supply::{DraftSide, Speed, SpeedSource, SupplyPlan, VerifierSide};

/// Speed of products.
#[derive(Clone, Copy, Debug)]
pub(in crate::preflight) struct Rates {
    /// Of a verifier's thread or rank.
    verifier: f64,
    /// Of a draft's.
    draft: f64,
    source: SpeedSource,
}

impl Rates {
    /// What somebody says that a rank does.
    pub(in crate::preflight) fn given(flops_per_s: f64) -> Self {
        Self {
            verifier: flops_per_s,
            draft: flops_per_s,
            source: SpeedSource::Given,
        }
    }

    /// What a thread of this machine does.
    pub(in crate::preflight) fn measured(rates: ProductRates) -> Self {
        Self {
            verifier: rates.verifier_flops_per_s,
            draft: rates.draft_flops_per_s,
            source: SpeedSource::Measured,
        }
    }
}

impl Plan<'_> {
    /// Supply against demand. `rates` measures products `[rows, inputs] · [inputs, outputs]`, or knows them.
    pub(in crate::preflight) fn supply(
        &self,
        machine: Machine,
        rates: impl FnOnce(usize, usize, usize) -> Option<Rates>,
    ) -> Option<SupplyPlan> {
        let (spec, _) = self.spec()?;
        let flops_per_token = self
            .shards
            .iter()
            .map(|(_, cost)| cost.flops_per_token)
            .fold(0.0, f64::max);
        let verifier = VerifierSide {
            replicas: self.replicas(),
            flops_per_token,
        };
        let is_known = verifier.replicas > 0 && verifier.flops_per_token > 0.0;
        if !is_known && !self.reads_files() {
            return None;
        }
        let draft = DraftSide {
            members: self.members(),
            spec,
            steps: self.config.training.ttt_steps,
        };
        let rows = self.config.training.tokens_per_row;
        let rates = rates(rows, spec.hidden_size, spec.intermediate_size)?;
        let steps = self
            .samples
            .filter(|samples| samples.samples > 0)
            .map(|samples| samples.steps);
        SupplyPlan::new(
            self.speed(rates, machine),
            &self.load(),
            (!self.reads_files()).then_some(verifier),
            (!self.writes_files()).then_some(draft),
            steps,
        )
    }

    /// What a rank of each role does: what was said of a rank, or what its threads do that share the machine's cores.
    fn speed(&self, rates: Rates, machine: Machine) -> Speed {
        let threads_of = |role: Role| {
            let ranks = self.config.ranks.iter().filter(move |rank| rank.role == role);
            ranks.map(|rank| self.config.threads(rank, machine.cores))
        };
        let factor = |role: Role| match rates.source {
            SpeedSource::Given => 1.0,
            SpeedSource::Measured => {
                let all: usize = threads_of(Role::Verifier).chain(threads_of(Role::Draft)).sum();
                let share = (machine.cores as f64 / all.max(1) as f64).min(1.0);
                share * threads_of(role).min().unwrap_or(1) as f64
            }
        };
        Speed {
            verifier_flops_per_s: factor(Role::Verifier) * rates.verifier,
            draft_flops_per_s: factor(Role::Draft) * rates.draft,
            source: rates.source,
        }
    }
}
