//! Which part of which verifier each verifier rank holds, and what that part costs.

use eaglet_runtime::verifier::{LayoutProblem, Need, Shard, ShardCost, VerifierFiles};

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
    /// Bytes that those of them take in bf16 which are matrices of floats, and so may be packed for AMX.
    pub(crate) packable_bytes: u64,
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
                    packable_bytes: needs.iter().map(packable_bytes).sum(),
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

/// Quantised weights stay as they are. An embedding is counted with them though it is not multiplied by: it may be the
/// head, too.
fn packable_bytes(need: &Need) -> u64 {
    let is_float = need.bytes == 2 * need.parameters || need.bytes == 4 * need.parameters;
    if need.shape.len() > 1 && is_float {
        2 * need.parameters
    } else {
        0
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
    fn matrices_of_floats_are_packed_in_bf16_and_nothing_else_is() {
        let need = |shape: &[usize], bytes| Need {
            name: String::new(),
            shape: shape.to_vec(),
            bytes,
            parameters: shape.iter().product::<usize>() as u64,
        };
        let cases = [
            (need(&[6, 10], 120), 120), // bf16
            (need(&[6, 10], 240), 120), // f32
            (need(&[2, 3, 10], 120), 120),
            (need(&[6, 10], 60), 0), // one byte each
            (need(&[60], 120), 0),
        ];
        for (need, bytes) in cases {
            assert_eq!(packable_bytes(&need), bytes, "{need:?}");
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
