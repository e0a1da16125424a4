//! Parameters of an untrained draft.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::layout::ParameterLayout;

/// Fresh parameters: norms are 1, linear weights uniform in ±1/√(inputs) as `torch.nn.Linear` draws them.
///
/// Each tensor has a random stream of its own, chosen by seed and name, so a value depends on nothing but
/// (seed, tensor name, index).
pub fn init_parameters(layout: &ParameterLayout, seed: u64) -> Vec<f32> {
    let mut parameters = vec![1.0; layout.len()];
    for slot in layout.tensors() {
        let &[_, inputs] = slot.shape.as_slice() else {
            continue;
        };
        let mut key = [0_u8; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..24].copy_from_slice(&xxhash_rust::xxh3::xxh3_128(slot.name.as_bytes()).to_le_bytes());
        let mut random = ChaCha8Rng::from_seed(key);
        let bound = 1.0 / (inputs as f64).sqrt();
        for parameter in &mut parameters[slot.range.clone()] {
            let unit = f64::from(random.next_u32() >> 8) / f64::from(1_u32 << 24);
            *parameter = ((2.0 * unit - 1.0) * bound) as f32;
        }
    }
    parameters
}
