//! The checksum of payloads, for damage between the sender's buffer and the receiver's.

/// Checksums are taken of blocks of this size just before or after their copy, while they are in the first-level cache.
pub(super) const COPY_BLOCK_BYTES: usize = 16 << 10;

/// The checksum of a payload: crc32c, which the processor computes.
pub(super) struct Checksum(u32);

impl Checksum {
    pub(super) fn new() -> Self {
        Self(0)
    }

    pub(super) fn update(&mut self, block: &[u8]) {
        self.0 = crc32c::crc32c_append(self.0, block);
    }

    pub(super) fn finish(self) -> u64 {
        u64::from(self.0)
    }
}
