//! Reduce-scatter and all-gather over draft seats, as a state machine.
//!
//! Every lane with a row has one gradient; the seat that owns the lane brings it in. Segment `i` is summed by the `i`-th
//! member: it adds the lanes' contributions in the order of the lanes, `((g0 + g1) + g2) + ...`, multiplies the sum by
//! `1 / lanes` and sends the finished segment to all. So the bits depend on the lanes, and neither on the number of
//! members nor on who owns which lane.
//!
//! Invariants, cited by the tests:
//!
//! - **C-1 order**: the result is the same bits whatever the order of arrival.
//! - **C-2 same**: all members end with the same bits, and with those of any other membership.
//! - **C-3 memory**: beyond the gradient and what peers sent, a member holds at most one more gradient for each of its
//!   lanes: copies of the segments of others while they are being sent, and one segment for the sum.

use std::fmt;
use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::segments::Segments;
use crate::link::bytes_of_f32;

/// The two halves of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// A lane's values of a segment, on their way to the member that sums it.
    Contribution {
        /// The lane.
        lane: u16,
    },
    /// The finished values of a segment, on their way from the member that summed it.
    Finished,
}

/// What all members agree on before a reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReduceShape {
    /// Length of the flat gradient.
    pub elements: usize,
    /// Seats that take part, ascending.
    pub members: Vec<u16>,
    /// The seat whose part this is.
    pub own: u16,
    /// Lanes that are summed, ascending, each with the seat that brings it in.
    pub lanes: Vec<(u16, u16)>,
}

/// Something to send.
#[derive(Clone, PartialEq, Eq)]
pub struct Outgoing {
    /// The receiver.
    pub to_seat: u16,
    /// Contribution or finished.
    pub phase: Phase,
    /// Number of the segment.
    pub segment: u16,
    /// Its values, little-endian f32.
    pub bytes: Bytes,
}

impl fmt::Debug for Outgoing {
    /// The length instead of the bytes.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            to_seat,
            phase,
            segment,
            bytes,
        } = self;
        write!(
            f,
            "segment {segment} as {phase:?} to seat {to_seat}, {} bytes",
            bytes.len()
        )
    }
}

/// Why a segment was not accepted, or a reduction cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveError {
    /// The shape contradicts itself.
    #[error("seat {own} cannot take part in a reduction of lanes {lanes:?} over seats {members:?}")]
    Shape {
        /// The seat.
        own: u16,
        /// The seats that take part.
        members: Vec<u16>,
        /// The lanes with their owners.
        lanes: Vec<(u16, u16)>,
    },
    /// The gradient has another length than agreed.
    #[error("the gradient has {actual} elements instead of {wanted}")]
    Gradient {
        /// Its length.
        actual: usize,
        /// The length agreed on.
        wanted: usize,
    },
    /// A lane was brought in that is not this seat's, or for the second time, or after the start.
    #[error("seat {own} cannot bring in lane {lane}")]
    Lane {
        /// This seat.
        own: u16,
        /// The lane.
        lane: u16,
    },
    /// The reduction was started before, or before all lanes of this seat were brought in.
    #[error("the reduction cannot be started now")]
    Start,
    /// The result was asked for too early.
    #[error("the reduction is not done: {missing} segments are missing")]
    NotDone {
        /// Segments without a finished value.
        missing: usize,
    },
    /// A segment came from a seat that has no business with it.
    #[error("seat {from} sent segment {segment} as {phase:?} to seat {own}")]
    Misrouted {
        /// The sender.
        from: u16,
        /// The segment.
        segment: u16,
        /// What it is said to be.
        phase: Phase,
        /// This seat.
        own: u16,
    },
    /// A segment has the wrong length.
    #[error("segment {segment} from seat {from} has {actual_bytes} bytes instead of {wanted_bytes}")]
    Length {
        /// The sender.
        from: u16,
        /// The segment.
        segment: u16,
        /// Its length.
        actual_bytes: usize,
        /// The length agreed on.
        wanted_bytes: usize,
    },
    /// A finished segment came although this seat has not started.
    #[error("seat {from} says that segment {segment} is finished, but seat {own} has not started")]
    Premature {
        /// The sender.
        from: u16,
        /// The segment.
        segment: u16,
        /// This seat.
        own: u16,
    },
}

/// Elements that two ranges share.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> usize {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

/// One member's part in one reduction.
pub struct SeatOrderedReduce {
    shape: ReduceShape,
    segments: Segments,
    /// This seat's place among the members, which is the number of its segment.
    place: u16,
    /// From `start` on; finished segments are written into it.
    result: Option<Vec<f32>>,
    /// Contributions to the own segment that wait for their turn, in the order of `shape.lanes`.
    waiting: Vec<Option<Bytes>>,
    /// Stretches that each lane of this seat has brought in.
    brought: Vec<Vec<Range<usize>>>,
    /// Lanes whose contributions are in the sum; the next turn is the one after them.
    added: usize,
    sum: Vec<f32>,
    /// Segments whose finished values are in the result.
    finished: Vec<bool>,
    duplicates: u64,
}

impl SeatOrderedReduce {
    /// A reduction that has not started. Peers that are faster may contribute already.
    ///
    /// # Errors
    /// If `own` is no member, an owner is none, no lane is summed, or something is not ascending.
    pub fn new(shape: ReduceShape) -> Result<Self, CollectiveError> {
        let ascending = shape.members.windows(2).all(|pair| pair[0] < pair[1])
            && shape.lanes.windows(2).all(|pair| pair[0].0 < pair[1].0);
        let owned = shape.lanes.iter().all(|(_, owner)| shape.members.contains(owner));
        let place = shape.members.iter().position(|&member| member == shape.own);
        let Some(place) = place.filter(|_| ascending && owned && !shape.lanes.is_empty()) else {
            return Err(CollectiveError::Shape {
                own: shape.own,
                members: shape.members,
                lanes: shape.lanes,
            });
        };
        let members = shape.members.len() as u16;
        let segments = Segments::new(shape.elements, members);
        // Nothing is sent for an empty segment.
        let finished = (0..members)
            .map(|segment| segments.range(segment).is_empty())
            .collect();
        Ok(Self {
            segments,
            place: place as u16,
            result: None,
            waiting: vec![None; shape.lanes.len()],
            brought: vec![Vec::new(); shape.lanes.len()],
            added: 0,
            sum: Vec::new(),
            finished,
            duplicates: 0,
            shape,
        })
    }

    /// Brings in the gradient of one of this seat's lanes; says what to send. To be called for each of them, before
    /// [`Self::start`].
    ///
    /// # Errors
    /// If its length is not the agreed one, or the lane is not this seat's or was brought in before.
    pub fn contribute(&mut self, lane: u16, gradient: &[f32]) -> Result<Vec<Outgoing>, CollectiveError> {
        self.contribute_part(lane, 0..self.shape.elements, gradient)
    }

    /// As [`Self::contribute`], of a stretch of the gradient that is final while the rest is still computed. A segment is
    /// to be sent as soon as all of it is final. Stretches must not overlap.
    ///
    /// # Errors
    /// As [`Self::contribute`].
    pub fn contribute_part(
        &mut self,
        lane: u16,
        part: Range<usize>,
        gradient: &[f32],
    ) -> Result<Vec<Outgoing>, CollectiveError> {
        let own = self.shape.own;
        let turn = self.turn_of(lane).filter(|&turn| {
            let fits = part.start <= part.end
                && part.end <= self.shape.elements
                && self.brought[turn]
                    .iter()
                    .all(|known| part.end <= known.start || known.end <= part.start);
            self.shape.lanes[turn].1 == own && fits && !self.is_brought(turn) && self.result.is_none()
        });
        let Some(turn) = turn else {
            return Err(CollectiveError::Lane { own, lane });
        };
        if gradient.len() != self.shape.elements {
            return Err(CollectiveError::Gradient {
                actual: gradient.len(),
                wanted: self.shape.elements,
            });
        }
        self.brought[turn].push(part.clone());
        let mut outgoing = Vec::new();
        for (segment, &seat) in (0..).zip(&self.shape.members) {
            let range = self.segments.range(segment);
            let covered: usize = self.brought[turn]
                .iter()
                .map(|known| overlap(known, &range))
                .sum();
            if overlap(&part, &range) == 0 || covered < range.len() {
                continue;
            }
            let bytes = bytes_of_f32(gradient[range].to_vec());
            if seat == own {
                self.waiting[turn] = Some(bytes);
            } else {
                outgoing.push(Outgoing {
                    to_seat: seat,
                    phase: Phase::Contribution { lane },
                    segment,
                    bytes,
                });
            }
        }
        if self.is_covered(turn) && self.waiting[turn].is_none() {
            // The own segment is empty; the lane is still known to be brought in.
            self.waiting[turn] = Some(Bytes::new());
        }
        Ok(outgoing)
    }

    /// Whether the stretches of a lane, which never overlap, are the whole gradient.
    fn is_covered(&self, turn: usize) -> bool {
        let elements: usize = self.brought[turn].iter().map(ExactSizeIterator::len).sum();
        elements == self.shape.elements
    }

    /// Whether a lane of this seat was brought in.
    fn is_brought(&self, turn: usize) -> bool {
        self.waiting[turn].is_some() && self.is_covered(turn)
    }

    /// Takes the vector that finished segments are written into, of any contents, once all lanes of this seat are
    /// brought in; says what to send.
    ///
    /// # Errors
    /// If its length is not the agreed one, a lane is missing, or the reduction was started before.
    pub fn start(&mut self, result: Vec<f32>) -> Result<Vec<Outgoing>, CollectiveError> {
        let own = self.shape.own;
        let missing = (0..)
            .zip(&self.shape.lanes)
            .any(|(turn, &(_, owner)): (usize, _)| owner == own && !self.is_brought(turn));
        if self.result.is_some() || missing {
            return Err(CollectiveError::Start);
        }
        if result.len() != self.shape.elements {
            return Err(CollectiveError::Gradient {
                actual: result.len(),
                wanted: self.shape.elements,
            });
        }
        self.result = Some(result);
        Ok(self.advance())
    }

    /// Takes in what a peer sent; says what to send in consequence. Duplicates are ignored and counted.
    ///
    /// # Errors
    /// If the segment has no place here. The reduction is as it was before.
    pub fn receive(
        &mut self,
        from_seat: u16,
        phase: Phase,
        segment: u16,
        bytes: impl Into<Bytes>,
    ) -> Result<Vec<Outgoing>, CollectiveError> {
        let own = self.shape.own;
        let misrouted = CollectiveError::Misrouted {
            from: from_seat,
            segment,
            phase,
            own,
        };
        let Some(sender) = self
            .shape
            .members
            .iter()
            .position(|&m| m == from_seat && m != own)
        else {
            return Err(misrouted);
        };
        let turn = match phase {
            Phase::Contribution { lane } => self
                .turn_of(lane)
                .filter(|&turn| self.shape.lanes[turn].1 == from_seat && segment == self.place),
            Phase::Finished => Some(0).filter(|_| usize::from(segment) == sender),
        };
        let Some(turn) = turn else { return Err(misrouted) };
        let (bytes, range) = (bytes.into(), self.segments.range(segment));
        if bytes.len() != range.len() * size_of::<f32>() {
            return Err(CollectiveError::Length {
                from: from_seat,
                segment,
                actual_bytes: bytes.len(),
                wanted_bytes: range.len() * size_of::<f32>(),
            });
        }
        match phase {
            Phase::Contribution { .. } => {
                if turn < self.added || self.waiting[turn].is_some() {
                    self.duplicates += 1;
                    return Ok(Vec::new());
                }
                self.waiting[turn] = Some(bytes);
                Ok(self.advance())
            }
            Phase::Finished => {
                if self.finished[sender] {
                    self.duplicates += 1;
                    return Ok(Vec::new());
                }
                let Some(result) = &mut self.result else {
                    return Err(CollectiveError::Premature {
                        from: from_seat,
                        segment,
                        own,
                    });
                };
                for (value, bytes) in result[range].iter_mut().zip(floats(&bytes)) {
                    *value = bytes;
                }
                self.finished[sender] = true;
                Ok(Vec::new())
            }
        }
    }

    /// Whether all segments are finished.
    pub fn is_done(&self) -> bool {
        self.result.is_some() && self.finished.iter().all(|&finished| finished)
    }

    /// How many segments came twice.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// The mean over the lanes, in the vector that was given to [`Self::start`].
    ///
    /// # Errors
    /// If segments are missing.
    pub fn finish(self) -> Result<Vec<f32>, CollectiveError> {
        let missing = self.finished.iter().filter(|&&finished| !finished).count();
        match self.result {
            Some(result) if missing == 0 => Ok(result),
            _ => Err(CollectiveError::NotDone { missing }),
        }
    }

    /// Gives up, for example because the epoch is over: the vector that was given, with unspecified values.
    pub fn abandon(self) -> Option<Vec<f32>> {
        self.result
    }

    fn turn_of(&self, lane: u16) -> Option<usize> {
        self.shape
            .lanes
            .binary_search_by_key(&lane, |&(lane, _)| lane)
            .ok()
    }

    /// Adds the contributions whose turn it is; sends the own segment when it is finished.
    fn advance(&mut self) -> Vec<Outgoing> {
        let place = usize::from(self.place);
        let Some(result) = &mut self.result else {
            return Vec::new();
        };
        if self.finished[place] {
            return Vec::new();
        }
        while let Some(slot) = self.waiting.get_mut(self.added) {
            let Some(bytes) = slot.take() else {
                return Vec::new();
            };
            accumulate(&mut self.sum, self.added == 0, floats(&bytes));
            self.added += 1;
        }
        let mut sum = std::mem::take(&mut self.sum);
        let scale = 1.0 / self.shape.lanes.len() as f32;
        for value in &mut sum {
            *value *= scale;
        }
        result[self.segments.range(self.place)].copy_from_slice(&sum);
        self.finished[place] = true;
        let bytes = bytes_of_f32(sum);
        let own = self.shape.own;
        self.shape
            .members
            .iter()
            .filter(|&&member| member != own)
            .map(|&to_seat| Outgoing {
                to_seat,
                phase: Phase::Finished,
                segment: self.place,
                bytes: bytes.clone(),
            })
            .collect()
    }
}

/// The first contribution becomes the sum, so that it keeps its bits (zero plus minus zero would not).
fn accumulate(sum: &mut Vec<f32>, first: bool, values: impl ExactSizeIterator<Item = f32>) {
    if first {
        sum.extend(values);
    } else {
        for (sum, value) in sum.iter_mut().zip(values) {
            *sum += value;
        }
    }
}

/// Buffers come from anywhere, so their alignment is not known.
fn floats(bytes: &[u8]) -> impl ExactSizeIterator<Item = f32> + '_ {
    bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}
