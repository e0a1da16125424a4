//! A checksum that every device computes alike, in any order.
//!
//! Every element adds, modulo 2^64, the product of two 32-bit numbers: its bits, hidden under a key that its place gives,
//! and another key made odd. Places count modulo 2^32. It finds damage and divergence at memory speed; whoever wants to
//! deceive can.

/// The key of a place: the low half hides the bits, an odd multiple of it is the factor.
#[inline(always)]
fn key(place: u32) -> u32 {
    let mixed = (place ^ (place >> 16)).wrapping_mul(0x7feb_352d);
    let mixed = (mixed ^ (mixed >> 15)).wrapping_mul(0x846c_a68b);
    mixed ^ (mixed >> 16)
}

/// What elements from place `first` on add.
#[inline(always)]
pub(crate) fn checksum_from(first: u32, values: &[f32]) -> u64 {
    let mut sum = 0u64;
    for (offset, value) in values.iter().enumerate() {
        let key = key(first.wrapping_add(offset as u32));
        let factor = key.wrapping_mul(0x9e37_79b1) | 1;
        sum = sum.wrapping_add(u64::from(value.to_bits() ^ key) * u64::from(factor));
    }
    sum
}

/// The checksum of the bits of `values` and of their places.
pub fn checksum(values: &[f32]) -> u64 {
    checksum_from(0, values)
}

#[cfg(test)]
mod tests {
    use super::{checksum, checksum_from};

    #[test]
    fn every_bit_and_every_place_counts() {
        let values: Vec<f32> = (0..1000).map(|i| (i as f32).sin()).collect();
        let whole = checksum(&values);
        for place in [0, 1, 499, 999] {
            for bit in [0, 12, 31] {
                let mut other = values.clone();
                other[place] = f32::from_bits(other[place].to_bits() ^ (1 << bit));
                assert_ne!(checksum(&other), whole, "bit {bit} at {place}");
            }
        }
        let mut swapped = values.clone();
        swapped.swap(3, 700);
        assert_ne!(checksum(&swapped), whole);
        assert_ne!(checksum(&[0.0; 3]), checksum(&[0.0; 4]));
        // Parts add up.
        let (left, right) = values.split_at(333);
        assert_eq!(checksum(left).wrapping_add(checksum_from(333, right)), whole);
    }
}
