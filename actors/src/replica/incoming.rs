//! A state on its way from a peer, piece by piece.

use eaglet_runtime::device::checksum;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::Step;
use eaglet_runtime::link::BulkKind;

use super::ReplicaError;

/// A state that is arriving from a peer.
#[derive(Default)]
pub struct IncomingState {
    step: Step,
    vectors: [Option<Incoming>; 3],
}

struct Incoming {
    digest: Digest,
    values: Vec<f32>,
    elements: usize,
}

/// A state that has arrived.
pub struct WholeState {
    pub(super) step: Step,
    pub(super) weights: Vec<f32>,
    pub(super) first_moments: Vec<f32>,
    pub(super) second_moments: Vec<f32>,
}

impl IncomingState {
    /// Takes one piece; pieces of a vector come in their order. Returns the state once it is whole.
    ///
    /// # Errors
    /// If the piece does not follow those before it, or a whole vector has another digest than announced.
    pub fn take(&mut self, kind: &BulkKind, bytes: &[u8]) -> Result<Option<WholeState>, ReplicaError> {
        let foreign = |what: &str| ReplicaError::ForeignState {
            what: what.to_owned(),
        };
        let &BulkKind::State {
            step,
            what,
            digest,
            elements,
            first_element,
        } = kind
        else {
            return Ok(None);
        };
        if self.vectors.iter().all(Option::is_none) {
            self.step = step;
        }
        let slot = &mut self.vectors[what as usize];
        let vector = slot.get_or_insert_with(|| Incoming {
            digest,
            values: Vec::new(),
            elements: elements as usize,
        });
        if step != self.step || vector.digest != digest || vector.values.len() as u64 != first_element {
            return Err(foreign("has pieces that do not follow each other"));
        }
        vector.values.extend(
            bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])),
        );
        if vector.values.len() == vector.elements && Digest::from(checksum(&vector.values)) != digest {
            return Err(foreign("has another digest than announced"));
        }
        let whole = |vector: &Option<Incoming>| vector.as_ref().is_some_and(|v| v.values.len() == v.elements);
        if !self.vectors.iter().all(whole) {
            return Ok(None);
        }
        let [weights, first_moments, second_moments] =
            std::mem::take(&mut self.vectors).map(|vector| vector.map(|v| v.values).unwrap_or_default());
        Ok(Some(WholeState {
            step,
            weights,
            first_moments,
            second_moments,
        }))
    }
}
