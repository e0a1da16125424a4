//! Which part of which verifier each verifier rank holds, and what that part costs.

use eaglet_runtime::verifier::{LayoutProblem, Shard, ShardCost, VerifierFiles};

use super::report::ShardPlan;

/// A part of a verifier as its files hold it.
#[derive(Debug)]
pub(crate) struct ShardFiles {
    /// The part.
    pub(crate) shard: Shard,
    /// Tensors that it reads.
    pub(crate) tensors: u64,
    /// Parameters in them.
    pub(crate) parameters: u64,
    /// Their bytes as they are stored.
    pub(crate) bytes: u64,
    /// What is wrong with them.
    pub(crate) problems: Vec<LayoutProblem>,
}

impl ShardFiles {
    /// Looks at the headers of all parts of a verifier.
    pub(crate) fn all(files: &VerifierFiles, (stages, slices): (u16, u16)) -> Vec<Self> {
        (0..stages * slices)
            .map(|index| {
                let shard = Shard::nth(index, stages, slices);
                let (needs, problems) = files.inspect(shard);
                Self {
                    shard,
                    tensors: needs.len() as u64,
                    parameters: needs.iter().map(|need| need.parameters).sum(),
                    bytes: needs.iter().map(|need| need.bytes).sum(),
                    problems,
                }
            })
            .collect()
    }

    /// For the report.
    pub(crate) fn plan(&self, cost: &ShardCost, replica: u16) -> ShardPlan {
        ShardPlan {
            replica,
            stage: self.shard.stage,
            stages: self.shard.stages,
            slice: self.shard.slice,
            slices: self.shard.slices,
            first_layer: cost.layers.start,
            end_layer: cost.layers.end,
        }
    }
}

/// Captured states of `aux_layers` that a part hands out, the last state among them.
pub(crate) fn captured(shard: Shard, cost: &ShardCost, aux_layers: &[u32], layers: usize) -> u64 {
    let states = aux_layers.iter().map(|&id| id as usize).chain([layers]);
    let is_here = |&id: &usize| cost.layers.contains(&id) || (shard.is_last() && id >= cost.layers.end);
    states.filter(is_here).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(layers: std::ops::Range<usize>) -> ShardCost {
        ShardCost {
            layers,
            activation_bytes_per_token: 0,
            cache_bytes_per_token: 0,
            logit_bytes_per_prompt: 0,
            flops_per_token: 0.0,
        }
    }

    #[test]
    fn each_state_is_handed_out_by_one_stage() {
        let aux = [2, 30, 58];
        let stages = [0..31, 31..61];
        let found: Vec<u64> = stages
            .into_iter()
            .enumerate()
            .map(|(stage, layers)| captured(Shard::nth(stage as u16, 2, 1), &cost(layers), &aux, 61))
            .collect();
        assert_eq!(found, [2, 2]);
        assert_eq!(captured(Shard::WHOLE, &cost(0..61), &aux, 61), 4);
        // The last state may be among the aux layers, too.
        assert_eq!(captured(Shard::WHOLE, &cost(0..61), &[2, 61], 61), 3);
    }
}
