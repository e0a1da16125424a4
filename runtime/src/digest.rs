//! 128-bit digests that tell whether two replicas hold the same bits.
//!
//! XXH3-128: it finds corruption and divergence at memory speed. It is no protection against somebody who wants to deceive.

use std::fmt;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

/// A 128-bit XXH3 digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct Digest(u128);

impl Digest {
    /// Digest of some bytes.
    pub fn of(bytes: &[u8]) -> Self {
        Self(xxhash_rust::xxh3::xxh3_128(bytes))
    }

    /// Digest of the bit patterns of some floats, in memory order.
    pub fn of_f32(values: &[f32]) -> Self {
        Self::of(bytemuck::cast_slice(values))
    }
}

impl From<u64> for Digest {
    /// The digest of a [`checksum`](crate::device::checksum).
    fn from(checksum: u64) -> Self {
        Self::of(&checksum.to_le_bytes())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The text is no digest: 32 hexadecimal digits are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a digest has 32 hexadecimal digits")]
pub struct ParseDigestError;

impl std::str::FromStr for Digest {
    type Err = ParseDigestError;

    fn from_str(text: &str) -> Result<Self, ParseDigestError> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(ParseDigestError);
        }
        u128::from_str_radix(text, 16)
            .map(Self)
            .map_err(|_| ParseDigestError)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({:032x})", self.0)
    }
}

/// A digest of parts that arrive one after the other.
#[derive(Default)]
pub struct Digester(Xxh3);

impl Digester {
    /// An empty digester.
    pub fn new() -> Self {
        Self(Xxh3::new())
    }

    /// Adds bytes, preceded by their length so that parts cannot run into each other.
    pub fn part(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.update(&(bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    /// The digest of all parts so far.
    pub fn finish(&self) -> Digest {
        Digest(self.0.digest128())
    }
}
