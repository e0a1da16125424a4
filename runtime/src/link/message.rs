//! What travels on the bulk plane: a small header and parts that are tensors.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::MAX_PARTS;
use super::error::LinkError;
use super::part::Part;
use super::pool::Charge;
use crate::collective::{Phase, ShardMessage};
use crate::contract::HiddenDtype;
use crate::digest::Digest;
use crate::ids::{Epoch, Generation, RowId, Seat, Step};
use crate::row::PackedRow;
use crate::wire;

const _: () = assert!(
    cfg!(target_endian = "little"),
    "tensors travel as they lie in memory, which is little-endian"
);

/// Header of a message. It precedes the parts and is all that is serialised.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BulkHeader {
    /// Who sends it.
    pub from: Seat,
    /// Occupant of that seat.
    pub generation: Generation,
    /// Membership of the group for which it was sent; rows for draft replicas belong to none.
    pub epoch: Epoch,
    /// What it is.
    pub kind: BulkKind,
    /// Bytes of each part.
    pub parts: Vec<u64>,
}

/// What a message is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BulkKind {
    /// Hidden states of a row, all or those of one pipeline stage. One part, `[tokens, states, hidden]` row-major.
    Hidden {
        /// The row.
        row: RowId,
        /// The lease that it was extracted for; a later one may hold other samples.
        lease: u64,
        /// Digest of the [`crate::contract::Contract`] that the states fulfil.
        contract: Digest,
        /// Element type of the part.
        dtype: HiddenDtype,
        /// First captured state in the part, in the order of the contract.
        first_state: u16,
        /// Number of captured states in the part.
        states: u16,
        /// Width of a state.
        hidden: u32,
        /// Tokens, masks and documents of the row.
        packed: PackedRow,
    },
    /// What shards of one verifier tell each other. One part, f32 or u32.
    Shard {
        /// Number of the row in the work of the team.
        turn: u64,
        /// Messages that this link has carried before.
        sequence: u64,
        /// What it is.
        what: ShardMessage,
    },
    /// A segment of a gradient that is being reduced. One part, f32.
    Gradient {
        /// The step.
        step: Step,
        /// Contribution to a sum, or a finished sum.
        phase: Phase,
        /// Number of the segment.
        segment: u16,
    },
    /// Training state for a replica that starts or is replaced. The parts, f32, are consecutive runs of elements of one
    /// flat tensor.
    State {
        /// Steps that the state has seen.
        step: Step,
        /// Which tensor.
        what: StateKind,
        /// Digest of the whole tensor.
        digest: Digest,
        /// Elements of the whole tensor.
        elements: u64,
        /// Where the first part begins in it, in elements.
        first_element: u64,
    },
}

/// The flat tensors that make up the training state of a draft replica, `[parameters]` in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StateKind {
    /// Master weights.
    Weights,
    /// First moments of AdamW.
    FirstMoments,
    /// Second moments of AdamW.
    SecondMoments,
}

impl BulkKind {
    /// What contradicts itself in the kind and the lengths of its parts, if anything does.
    pub fn contradiction(&self, parts: &[u64]) -> Option<String> {
        let Some(bytes) = parts.iter().try_fold(0_u64, |sum, &part| sum.checked_add(part)) else {
            return Some("the lengths of its parts overflow".to_owned());
        };
        if parts.len() != 1 && !matches!(self, Self::State { .. }) {
            return Some(format!("it has {} parts instead of 1", parts.len()));
        }
        match self {
            Self::Hidden {
                dtype,
                states,
                hidden,
                packed,
                row,
                ..
            } => {
                if !packed.is_consistent() {
                    return Some(format!(
                        "tokens, mask and document lengths of the {row} differ in length"
                    ));
                }
                let wanted = [
                    packed.len() as u64,
                    u64::from(*states),
                    u64::from(*hidden),
                    dtype.bytes() as u64,
                ]
                .into_iter()
                .try_fold(1_u64, u64::checked_mul);
                (wanted != Some(bytes)).then(|| {
                    let tokens = packed.len();
                    format!("the {row} has {bytes} bytes for [{tokens}, {states}, {hidden}] of {dtype:?}")
                })
            }
            Self::Shard { what, .. } => (bytes % 4 != 0).then(|| {
                format!("a message between shards ({what:?}) has {bytes} bytes, which are no numbers")
            }),
            Self::Gradient { segment, .. } => (bytes % 4 != 0)
                .then(|| format!("segment {segment} has {bytes} bytes, which is no number of f32")),
            Self::State {
                what,
                elements,
                first_element,
                ..
            } => {
                let end = first_element.checked_add(bytes / 4);
                let whole = parts.iter().all(|part| part % 4 == 0);
                (!whole || end.is_none_or(|end| end > *elements)).then(|| {
                    format!(
                        "{bytes} bytes from element {first_element} do not lie in {what:?} of {elements} f32"
                    )
                })
            }
        }
    }
}

/// A message to send. Parts are shared, not copied, until they go into ring or heap, if they are not there already.
#[derive(Clone)]
pub struct BulkOutgoing {
    /// Membership of the group for which it is sent.
    pub epoch: Epoch,
    /// What it is.
    pub kind: BulkKind,
    /// The tensors.
    pub parts: Vec<Bytes>,
}

impl fmt::Debug for BulkOutgoing {
    /// Lengths instead of bytes: a message in an error text must not fill the log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lengths: Vec<usize> = self.parts.iter().map(Bytes::len).collect();
        f.debug_struct("BulkOutgoing")
            .field("epoch", &self.epoch)
            .field("kind", &self.kind)
            .field("parts", &lengths)
            .finish()
    }
}

/// A message that arrived.
///
/// Parts that are not in the sender's heap weigh in the budget of their connection until they are dropped, so that a
/// consumer that is too slow holds up the sender instead of filling the memory.
pub struct BulkMessage {
    /// Who sent what.
    pub header: BulkHeader,
    /// The tensors, each as long as the header says.
    pub parts: Vec<Part>,
    /// The weight of the header.
    #[expect(dead_code, reason = "it counts until it is dropped")]
    pub(super) charge: Charge,
}

impl fmt::Debug for BulkMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BulkMessage")
            .field("header", &self.header)
            .field("parts", &self.parts)
            .finish_non_exhaustive()
    }
}

/// Little-endian bytes of some floats, shared without a copy. Takes a `Vec<f32>`, an `Arc<[f32]>` and the like.
pub fn bytes_of_f32<T: AsRef<[f32]> + Send + 'static>(values: T) -> Bytes {
    struct Floats<T>(T);
    impl<T: AsRef<[f32]>> AsRef<[u8]> for Floats<T> {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(self.0.as_ref())
        }
    }
    Bytes::from_owner(Floats(values))
}

/// A message with its header encoded.
pub(super) struct Encoded {
    pub(super) header: Vec<u8>,
    pub(super) parts: Vec<Bytes>,
    pub(super) message_bytes: u64,
}

impl Encoded {
    pub(super) fn new(
        message: &BulkOutgoing,
        from: Seat,
        generation: Generation,
        limit_bytes: u64,
    ) -> Result<Self, LinkError> {
        if message.parts.len() > MAX_PARTS {
            return Err(LinkError::TooManyParts {
                parts: message.parts.len(),
            });
        }
        let lengths: Vec<u64> = message.parts.iter().map(|part| part.len() as u64).collect();
        if let Some(reason) = message.kind.contradiction(&lengths) {
            return Err(LinkError::Header { reason });
        }
        let parts_bytes: u64 = lengths.iter().sum();
        let header = BulkHeader {
            from,
            generation,
            epoch: message.epoch,
            kind: message.kind.clone(),
            parts: lengths,
        };
        let header = wire::encode(&header).map_err(|error| LinkError::Header {
            reason: error.to_string(),
        })?;
        let message_bytes = parts_bytes + header.len() as u64;
        if message_bytes > limit_bytes {
            return Err(LinkError::TooLarge {
                bytes: message_bytes,
                limit_bytes,
            });
        }
        Ok(Self {
            header,
            parts: message.parts.clone(),
            message_bytes,
        })
    }
}

/// Decodes a header and checks it against what the frames and the hello of its connection say.
pub(super) fn decode_header(
    bytes: &[u8],
    message_bytes: u64,
    from: Seat,
    generation: Generation,
) -> Result<BulkHeader, LinkError> {
    let wrong = |reason: String| LinkError::Header { reason };
    let header: BulkHeader = wire::decode(bytes).map_err(|error| wrong(error.to_string()))?;
    if (header.from, header.generation) != (from, generation) {
        return Err(wrong(format!(
            "it names {} generation {}, but the hello came from {from} generation {generation}",
            header.from, header.generation
        )));
    }
    if header.parts.len() > MAX_PARTS {
        return Err(LinkError::TooManyParts {
            parts: header.parts.len(),
        });
    }
    let total = header
        .parts
        .iter()
        .try_fold(bytes.len() as u64, |sum, &part| sum.checked_add(part));
    if total != Some(message_bytes) {
        return Err(wrong(format!(
            "header and parts do not add up to the {message_bytes} bytes of the message"
        )));
    }
    match header.kind.contradiction(&header.parts) {
        Some(reason) => Err(wrong(reason)),
        None => Ok(header),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hidden(tokens: usize, states: u16, hidden: u32) -> BulkKind {
        BulkKind::Hidden {
            row: RowId::HeldOut { lane: 1, part: 0 },
            lease: 1,
            contract: Digest::of(b"contract"),
            dtype: HiddenDtype::Bf16,
            first_state: 0,
            states,
            hidden,
            packed: PackedRow {
                tokens: vec![7; tokens],
                loss_mask: vec![1; tokens],
                document_lengths: vec![tokens as u32],
            },
        }
    }

    #[test]
    fn lengths_must_agree_with_the_kind() {
        assert_eq!(hidden(5, 4, 8).contradiction(&[5 * 4 * 8 * 2]), None);
        assert!(hidden(5, 4, 8).contradiction(&[5 * 4 * 8 * 4]).is_some());
        assert!(hidden(5, 4, 8).contradiction(&[]).is_some());
        assert!(hidden(5, 4, 8).contradiction(&[160, 160]).is_some());
        let gradient = BulkKind::Gradient {
            step: Step(1),
            phase: Phase::Finished,
            segment: 0,
        };
        assert_eq!(gradient.contradiction(&[0]), None);
        assert!(gradient.contradiction(&[7]).is_some());
        let shard = BulkKind::Shard {
            turn: 3,
            sequence: 0,
            what: ShardMessage::Tokens,
        };
        assert_eq!(shard.contradiction(&[8]), None);
        assert!(shard.contradiction(&[6]).is_some());
        assert!(shard.contradiction(&[4, 4]).is_some());
        let state = |first_element| BulkKind::State {
            step: Step(1),
            what: StateKind::Weights,
            digest: Digest::default(),
            elements: 10,
            first_element,
        };
        assert_eq!(state(6).contradiction(&[16]), None);
        assert_eq!(state(6).contradiction(&[4, 0, 12]), None);
        assert!(state(6).contradiction(&[6, 6, 4]).is_some());
        assert!(state(6).contradiction(&[u64::MAX, 1]).is_some());
        assert!(state(7).contradiction(&[16]).is_some());
        assert!(state(u64::MAX).contradiction(&[16]).is_some());
    }

    #[test]
    fn a_mask_of_another_length_is_refused() {
        let mut kind = hidden(5, 1, 1);
        if let BulkKind::Hidden { packed, .. } = &mut kind {
            packed.loss_mask.pop();
        }
        assert!(
            kind.contradiction(&[10])
                .is_some_and(|reason| reason.contains("differ in length"))
        );
    }

    #[test]
    fn headers_are_checked_against_frames_and_hello() {
        let message = BulkOutgoing {
            epoch: Epoch(3),
            kind: hidden(2, 1, 4),
            parts: vec![Bytes::from(vec![0; 16])],
        };
        let (from, generation) = (Seat::verifier(0), Generation(2));
        let encoded = Encoded::new(&message, from, generation, 1 << 20).expect("small");
        let total = encoded.message_bytes;
        let decoded = decode_header(&encoded.header, total, from, generation).expect("its own");
        assert_eq!((decoded.epoch, decoded.kind), (Epoch(3), hidden(2, 1, 4)));
        assert!(decode_header(&encoded.header, total + 1, from, generation).is_err());
        assert!(decode_header(&encoded.header, total, from, Generation(3)).is_err());
        assert!(decode_header(&encoded.header, total, Seat::draft(0), generation).is_err());
        assert!(matches!(
            Encoded::new(&message, from, generation, 20),
            Err(LinkError::TooLarge { .. })
        ));
    }
}
