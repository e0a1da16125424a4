//! What a row costs the draft, known before any weight is: memory from the sizes of the very buffers of a step, work from
//! the products of the forward and backward pass.

use half::bf16;

use super::error::DraftError;
use super::head::block_elements;
use super::layout::ParameterLayout;
use super::spec::DraftSpec;
use super::workspace::{Activations, Deltas, Sizes};

/// How much of a row there is to do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowLoad {
    /// Positions of the row.
    pub positions: usize,
    /// Positions that are unrolled: those with a trained token within the TTT steps.
    pub active: usize,
    /// TTT steps.
    pub steps: usize,
    /// Keys that a query sees on average.
    pub visible: f64,
}

/// Memory and work of the gradient of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowCost {
    /// Bytes of what the forward pass keeps for the backward pass.
    pub activation_bytes: u64,
    /// Bytes of the gradients of activations.
    pub delta_bytes: u64,
    /// Bytes of the logits and head inputs of a block.
    pub logit_bytes: u64,
    /// Bytes of the row's hidden states, widened to f32.
    pub batch_bytes: u64,
    /// Bytes of the bf16 copies of factors that a GPU makes for products in bf16.
    pub rounded_bytes: u64,
    /// Floating-point operations of all products, a multiply-add counted as two.
    pub flops: f64,
}

impl DraftSpec {
    /// Number of trained parameters.
    ///
    /// # Errors
    /// If the spec contradicts itself.
    pub fn parameters(&self) -> Result<u64, DraftError> {
        Ok(ParameterLayout::new(self)?.len() as u64)
    }

    /// What the gradient of a row costs.
    pub fn row_cost(&self, load: &RowLoad) -> RowCost {
        let sizes = Sizes::new(self, load.steps.max(1), load.positions, load.active);
        let bytes = |elements: usize| elements as u64 * size_of::<f32>() as u64;
        RowCost {
            activation_bytes: bytes(Activations::elements(&sizes, self)),
            delta_bytes: bytes(Deltas::elements(&sizes, self)),
            logit_bytes: bytes(block_elements(self.draft_vocab_size, self.hidden_size)),
            batch_bytes: bytes(load.positions * (self.aux_layers + 1) * self.hidden_size),
            rounded_bytes: self.rounded_bytes(&sizes),
            flops: self.row_flops(&sizes, load.visible),
        }
    }

    /// A product has two factors, and their copies are kept by size, which is a power of two: together those of all sizes up
    /// to the largest come to four of that.
    fn rounded_bytes(&self, sizes: &Sizes) -> u64 {
        let (h, i) = (sizes.hidden, sizes.intermediate);
        let weights = [
            h * sizes.aux,
            2 * h * sizes.query.max(sizes.key),
            h * i,
            h * self.draft_vocab_size,
        ];
        let rows = [
            sizes.positions * sizes.aux.max(sizes.query),
            sizes.stacked() * i.max(h).max(sizes.query),
            block_elements(self.draft_vocab_size, h),
        ];
        let largest = weights.into_iter().chain(rows).max().unwrap_or(0) * size_of::<bf16>();
        4 * largest.next_power_of_two() as u64
    }

    /// Multiply-adds of the products, twice.
    fn row_flops(&self, sizes: &Sizes, visible: f64) -> f64 {
        let product =
            |rows: usize, inputs: usize, outputs: usize| 2.0 * rows as f64 * inputs as f64 * outputs as f64;
        let (h, i) = (sizes.hidden, sizes.intermediate);
        let (stacked, keys) = (sizes.stacked(), sizes.keys());
        // Most matrices make three products: forward, gradient of the input, gradient of the weight.
        let layer = product(stacked, h, sizes.query)
            + 2.0 * product(keys, h, sizes.key)
            + product(stacked, sizes.query, h)
            + 3.0 * product(stacked, h, i);
        let tokens = product(sizes.tokens(), h, sizes.query + 2 * sizes.key);
        // The aux states are nobody's output: their gradient is needed for a norm before `fc` only.
        let fc_products = if self.norm_before_fc || self.fc_norm {
            3.0
        } else {
            2.0
        };
        let fc = fc_products * product(sizes.positions, sizes.aux, h);
        // Forward 2 products; backward 3 for the queries and 4 for the keys, which form the probabilities again.
        let attention = 9.0 * 2.0 * stacked as f64 * visible * sizes.query as f64;
        // The head is frozen: targets forward, drafts forward and back.
        let head = product(sizes.active + 2 * stacked, h, self.draft_vocab_size);
        3.0 * (layer + tokens) + fc + attention + head
    }
}

#[cfg(test)]
mod tests {
    use super::super::spec::LayerKind;
    use super::*;
    use crate::device::Cpu;
    use crate::rope::{Rope, RopeScaling};

    fn kimi() -> DraftSpec {
        DraftSpec {
            layer: LayerKind::Llama,
            hidden_size: 7168,
            intermediate_size: 12288,
            heads: 64,
            kv_heads: 64,
            head_dim: 128,
            vocab_size: 163_840,
            draft_vocab_size: 32_000,
            aux_layers: 3,
            rms_norm_eps: 1e-5,
            rope: Rope {
                theta: 50_000.0,
                dim: 128,
                scaling: RopeScaling::None,
            },
            sliding_window: None,
            norm_before_residual: true,
            norm_before_fc: false,
            fc_norm: false,
            norm_output: true,
        }
    }

    fn tiny() -> DraftSpec {
        DraftSpec {
            hidden_size: 8,
            intermediate_size: 16,
            heads: 2,
            kv_heads: 1,
            head_dim: 4,
            vocab_size: 24,
            draft_vocab_size: 10,
            rope: Rope {
                theta: 10_000.0,
                dim: 4,
                scaling: RopeScaling::None,
            },
            ..kimi()
        }
    }

    #[test]
    fn the_draft_of_a_trillion_parameter_verifier_trains_0_83_billion_parameters() {
        // fc 3H·H; q, k, v 8192·2H each; o 8192·H; MLP 3·12288·H; four norms of H.
        let matrices = 7168 * (3 * 7168 + 3 * 2 * 8192 + 8192 + 3 * 12288);
        let parameters = kimi().parameters().expect("it is consistent");
        assert_eq!(parameters, matrices + 4 * 7168);
        assert_eq!(parameters, 829_452_288);
    }

    #[test]
    fn work_is_counted_product_by_product() {
        // T = 10, R = 4, S = 2: stacked 8, keys 10 + 4, tokens 11.
        let load = RowLoad {
            positions: 10,
            active: 4,
            steps: 2,
            visible: 3.0,
        };
        let layer = 2 * (8 * 8 * 8 + 2 * 14 * 8 * 4 + 8 * 8 * 8 + 3 * 8 * 8 * 16);
        let tokens = 2 * 11 * 8 * (8 + 2 * 4);
        let fc = 2 * 2 * 10 * 24 * 8;
        let attention = 9 * 2 * 8 * 3 * 8;
        let head = 2 * (4 + 16) * 8 * 10;
        let flops = (3 * (layer + tokens) + fc + attention + head) as f64;
        assert_eq!(tiny().row_cost(&load).flops, flops);
        let mut normed = tiny();
        normed.norm_before_fc = true;
        assert_eq!(
            normed.row_cost(&load).flops - flops,
            f64::from(2 * 10 * 24 * 8),
            "one product more"
        );
    }

    #[test]
    fn a_token_of_a_large_draft_costs_about_19_gigaflop_for_three_steps() {
        let load = RowLoad {
            positions: 2048,
            active: 2048,
            steps: 3,
            visible: 0.0,
        };
        let per_token = kimi().row_cost(&load).flops / 2048.0;
        // 6 operations per parameter and step, less what the steps share: fc and the tokens' half of q, k and v.
        let shared = 7168.0 * (3.0 * 7168.0 * 4.0 + 3.0 * 8192.0 * 6.0);
        let stepped = 7168.0 * (3.0 * 8192.0 + 8192.0 + 3.0 * 12288.0) * 6.0 * 3.0;
        let head = 7168.0 * 32_000.0 * 2.0 * 7.0;
        assert!(
            (per_token / (shared + stepped + head) - 1.0).abs() < 1e-3,
            "{per_token}"
        );
        assert!((13e9..19e9).contains(&per_token), "{per_token}");
    }

    #[test]
    fn memory_is_that_of_the_buffers() {
        let load = RowLoad {
            positions: 10,
            active: 4,
            steps: 2,
            visible: 3.0,
        };
        let spec = tiny();
        let cost = spec.row_cost(&load);
        let (mut activations, mut deltas) = (Activations::default(), Deltas::default());
        let sizes = Sizes::new(&spec, 2, 10, 4);
        let device = Cpu::new(1).expect("a thread");
        activations.fit(&device, &sizes, &spec);
        deltas.fit(&device, &sizes, &spec);
        // Some of the largest, as the forward pass addresses them.
        let wide = [&activations.gate, &activations.up, &activations.product];
        assert!(wide.iter().all(|buffer| buffer.len() == 8 * 16));
        assert_eq!(activations.k.len(), 14 * 4);
        let all = |elements: usize| 4 * elements as u64;
        assert_eq!(cost.activation_bytes, all(Activations::elements(&sizes, &spec)));
        assert!(cost.activation_bytes > all(3 * 8 * 16 + 2 * 14 * 4));
        assert!(cost.delta_bytes > all(deltas.output.len() + deltas.fc_output.len()));
        assert_eq!(cost.batch_bytes, all(10 * 4 * 8));
        assert_eq!(cost.logit_bytes, all(512 * (2 * 8 + 10)));
    }
}
