//! Bincode at one place: small bodies only, always with a byte limit. Tensors never pass through here.
//!
//! The limit bounds what a hostile length prefix can make the decoder allocate.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Largest body that is encoded or decoded, in bytes.
pub const BODY_LIMIT_BYTES: usize = 16 << 20;

/// Why a body could not be encoded or decoded.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The value does not fit the limit, or cannot be encoded.
    #[error("cannot encode a message: {0}")]
    Encode(#[from] bincode::error::EncodeError),
    /// The bytes are no such value.
    #[error("cannot decode a message: {0}")]
    Decode(#[from] bincode::error::DecodeError),
    /// The bytes hold more than the value.
    #[error("cannot decode a message: {extra_bytes} bytes are left over")]
    Trailing {
        /// How many.
        extra_bytes: usize,
    },
}

fn configuration() -> bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<BODY_LIMIT_BYTES>,
> {
    bincode::config::standard().with_limit::<BODY_LIMIT_BYTES>()
}

/// Encodes a small body.
///
/// # Errors
/// If the value cannot be represented or exceeds [`BODY_LIMIT_BYTES`].
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, WireError> {
    let bytes = bincode::serde::encode_to_vec(value, configuration())?;
    if bytes.len() > BODY_LIMIT_BYTES {
        return Err(WireError::Encode(bincode::error::EncodeError::Other(
            "body exceeds the limit",
        )));
    }
    Ok(bytes)
}

/// Decodes a body that must fill `bytes` exactly.
///
/// # Errors
/// If the bytes are torn, malformed, too long, or followed by others.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    let (value, read) = bincode::serde::decode_from_slice(bytes, configuration())?;
    if read != bytes.len() {
        return Err(WireError::Trailing {
            extra_bytes: bytes.len() - read,
        });
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hostile_length_is_refused_without_allocating() {
        let mut bytes = vec![253]; // varint tag of a u64
        bytes.extend_from_slice(&(1_u64 << 40).to_le_bytes());
        assert!(decode::<Vec<u8>>(&bytes).is_err());
        assert!(decode::<Vec<u64>>(&bytes).is_err());
    }

    #[test]
    fn torn_and_trailing_bytes_are_refused() {
        let bytes = encode(&(1_u32, "two".to_owned())).expect("small");
        assert_eq!(
            decode::<(u32, String)>(&bytes).expect("whole"),
            (1, "two".to_owned())
        );
        for end in 0..bytes.len() {
            assert!(decode::<(u32, String)>(&bytes[..end]).is_err(), "cut at {end}");
        }
        let mut longer = bytes;
        longer.push(0);
        assert!(matches!(
            decode::<(u32, String)>(&longer),
            Err(WireError::Trailing { extra_bytes: 1 })
        ));
    }
}
