//! The checksum of payloads, for damage between the sender's buffer and the receiver's.

/// Checksum of a chunk: crc32c, which the processor computes faster than it copies.
///
/// Taken of a whole chunk beside its copy. Going through it in small blocks, so that each is still in the first-level
/// cache, was measured: it halves the rate of large messages, because it breaks up the streams from memory.
pub(super) fn checksum(chunk: &[u8]) -> u64 {
    u64::from(crc32c::crc32c(chunk))
}

/// Checksum of what `before` is the checksum of, followed by `chunk`.
pub(super) fn extend_checksum(before: u64, chunk: &[u8]) -> u64 {
    u64::from(crc32c::crc32c_append(before as u32, chunk))
}

/// For drills: a chunk with one bit in its middle flipped.
pub(super) fn flipped(chunk: &[u8]) -> Vec<u8> {
    let mut flipped = chunk.to_vec();
    if let Some(byte) = flipped.get_mut(chunk.len() / 2) {
        *byte ^= 1;
    }
    flipped
}

/// Bytes of a checksum that follows what it is of.
pub(super) const CHECKSUM_BYTES: usize = 4;

/// A checksum as it follows what it is of.
pub(super) fn checksum_bytes(sum: u64) -> [u8; CHECKSUM_BYTES] {
    (sum as u32).to_le_bytes()
}
