//! Reduce-scatter and all-gather over seats, as a state machine.
//!
//! Seat `i` owns segment `i`. Every seat sends each owner its contribution; the owner adds the contributions in the order
//! of the seats, `((g0 + g1) + g2) + ...`, multiplies the sum by a factor and sends the finished segment to all.
//!
//! Invariants, cited by the tests:
//!
//! - **C-1 order**: the result is the same bits whatever the order of arrival.
//! - **C-2 same**: all seats end with the same bits.
//! - **C-3 memory**: beyond the gradient and what peers sent, a seat holds at most one more gradient: copies of the
//!   segments of others while they are being sent, and one segment for the sum.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::segments::Segments;
use crate::link::bytes_of_f32;

/// The two halves of a reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// A seat's own values of a segment, on their way to its owner.
    Contribution,
    /// The finished values of a segment, on their way from its owner.
    Finished,
}

/// What all seats agree on before a reduction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReduceShape {
    /// Length of the flat gradient.
    pub elements: usize,
    /// Number of seats.
    pub seats: u16,
    /// The seat whose part this is.
    pub own: u16,
    /// What the sum is multiplied by, for example `1 / contributing seats`.
    pub scale: f32,
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
    /// The shape names a seat that does not exist.
    #[error("seat {own} takes no part in a reduction over {seats} seats")]
    Shape {
        /// The seat.
        own: u16,
        /// Number of seats.
        seats: u16,
    },
    /// The gradient has another length than agreed.
    #[error("the gradient has {actual} elements instead of {wanted}")]
    Gradient {
        /// Its length.
        actual: usize,
        /// The length agreed on.
        wanted: usize,
    },
    /// The reduction was started before.
    #[error("the reduction was started before")]
    Started,
    /// The result was asked for too early.
    #[error("the reduction is not done: {missing} segments are missing")]
    NotDone {
        /// Segments without a finished value.
        missing: usize,
    },
    /// A segment came from a seat that takes no part, or from this one.
    #[error("a segment came from seat {from}, which is no peer of seat {own} among {seats} seats")]
    From {
        /// The sender.
        from: u16,
        /// This seat.
        own: u16,
        /// Number of seats.
        seats: u16,
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
    /// A finished segment came although this seat has not contributed to it.
    #[error("seat {from} says that segment {segment} is finished, but seat {own} has not contributed to it")]
    Premature {
        /// The sender.
        from: u16,
        /// The segment.
        segment: u16,
        /// This seat.
        own: u16,
    },
}

/// One seat's part in one reduction.
pub struct SeatOrderedReduce {
    shape: ReduceShape,
    segments: Segments,
    /// The gradient, from `start` on; finished segments replace its values.
    gradient: Option<Vec<f32>>,
    /// Contributions to the own segment that wait for their turn, by seat.
    waiting: Vec<Option<Bytes>>,
    /// Seats whose contributions are in the sum; the next turn is this seat's.
    added: u16,
    sum: Vec<f32>,
    /// Segments whose finished values are in the gradient.
    finished: Vec<bool>,
    duplicates: u64,
}

impl SeatOrderedReduce {
    /// A reduction that has not started. Peers that are faster may contribute already.
    ///
    /// # Errors
    /// If `own` is no seat of the shape.
    pub fn new(shape: ReduceShape) -> Result<Self, CollectiveError> {
        let ReduceShape {
            elements, seats, own, ..
        } = shape;
        if own >= seats {
            return Err(CollectiveError::Shape { own, seats });
        }
        let segments = Segments::new(elements, seats);
        // Nothing is sent for an empty segment.
        let finished = (0..seats)
            .map(|segment| segments.range(segment).is_empty())
            .collect();
        Ok(Self {
            shape,
            segments,
            gradient: None,
            waiting: vec![None; usize::from(seats)],
            added: 0,
            sum: Vec::new(),
            finished,
            duplicates: 0,
        })
    }

    /// Brings in this seat's gradient; says what to send.
    ///
    /// # Errors
    /// If its length is not the agreed one, or the reduction was started before.
    pub fn start(&mut self, gradient: Vec<f32>) -> Result<Vec<Outgoing>, CollectiveError> {
        if self.gradient.is_some() {
            return Err(CollectiveError::Started);
        }
        if gradient.len() != self.shape.elements {
            return Err(CollectiveError::Gradient {
                actual: gradient.len(),
                wanted: self.shape.elements,
            });
        }
        let mut outgoing: Vec<Outgoing> = self
            .peers()
            .map(|seat| (seat, self.segments.range(seat)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(seat, range)| Outgoing {
                to_seat: seat,
                phase: Phase::Contribution,
                segment: seat,
                bytes: bytes_of_f32(gradient[range].to_vec()),
            })
            .collect();
        self.gradient = Some(gradient);
        outgoing.extend(self.advance());
        Ok(outgoing)
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
        let ReduceShape { seats, own, .. } = self.shape;
        if from_seat >= seats || from_seat == own {
            return Err(CollectiveError::From {
                from: from_seat,
                own,
                seats,
            });
        }
        let owner = match phase {
            Phase::Contribution => own,
            Phase::Finished => from_seat,
        };
        if segment != owner {
            return Err(CollectiveError::Misrouted {
                from: from_seat,
                segment,
                phase,
                own,
            });
        }
        let (bytes, range) = (bytes.into(), self.segments.range(segment));
        if bytes.len() != range.len() * size_of::<f32>() {
            return Err(CollectiveError::Length {
                from: from_seat,
                segment,
                actual_bytes: bytes.len(),
                wanted_bytes: range.len() * size_of::<f32>(),
            });
        }
        let place = usize::from(from_seat);
        let seen = match phase {
            Phase::Contribution => {
                from_seat < self.added || self.waiting[place].is_some() || self.finished[usize::from(own)]
            }
            Phase::Finished => self.finished[place],
        };
        if seen {
            self.duplicates += 1;
            return Ok(Vec::new());
        }
        match phase {
            Phase::Contribution => {
                self.waiting[place] = Some(bytes);
                Ok(self.advance())
            }
            Phase::Finished => {
                let Some(gradient) = &mut self.gradient else {
                    return Err(CollectiveError::Premature {
                        from: from_seat,
                        segment,
                        own,
                    });
                };
                for (value, bytes) in gradient[range].iter_mut().zip(floats(&bytes)) {
                    *value = bytes;
                }
                self.finished[place] = true;
                Ok(Vec::new())
            }
        }
    }

    /// Whether all segments are finished.
    pub fn is_done(&self) -> bool {
        self.gradient.is_some() && self.finished.iter().all(|&finished| finished)
    }

    /// How many segments came twice.
    pub fn duplicates(&self) -> u64 {
        self.duplicates
    }

    /// Peers that still owe something: a contribution to the own segment, or their finished one.
    pub fn awaited(&self) -> Vec<u16> {
        let own_finished = self.finished[usize::from(self.shape.own)];
        self.peers()
            .filter(|&seat| {
                let place = usize::from(seat);
                let contributed = own_finished || seat < self.added || self.waiting[place].is_some();
                !contributed || !self.finished[place]
            })
            .collect()
    }

    /// The reduced gradient: the vector that was brought in, with other values.
    ///
    /// # Errors
    /// If segments are missing.
    pub fn finish(self) -> Result<Vec<f32>, CollectiveError> {
        let missing = self.finished.iter().filter(|&&finished| !finished).count();
        match self.gradient {
            Some(gradient) if missing == 0 => Ok(gradient),
            _ => Err(CollectiveError::NotDone { missing }),
        }
    }

    /// Gives up, for example because the epoch is over: the vector that was brought in, with unspecified values.
    pub fn abandon(self) -> Option<Vec<f32>> {
        self.gradient
    }

    fn peers(&self) -> impl Iterator<Item = u16> + use<> {
        let own = self.shape.own;
        (0..self.shape.seats).filter(move |&seat| seat != own)
    }

    /// Adds the contributions whose turn it is; sends the own segment when it is finished.
    fn advance(&mut self) -> Vec<Outgoing> {
        let own = self.shape.own;
        let range = self.segments.range(own);
        let Some(gradient) = &mut self.gradient else {
            return Vec::new();
        };
        if self.finished[usize::from(own)] {
            return Vec::new();
        }
        while self.added < self.shape.seats {
            let contribution = self.waiting[usize::from(self.added)].take();
            match contribution {
                None if self.added == own => {
                    accumulate(
                        &mut self.sum,
                        self.added == 0,
                        gradient[range.clone()].iter().copied(),
                    );
                }
                Some(bytes) => accumulate(&mut self.sum, self.added == 0, floats(&bytes)),
                None => return Vec::new(),
            }
            self.added += 1;
        }
        let mut sum = std::mem::take(&mut self.sum);
        for value in &mut sum {
            *value *= self.shape.scale;
        }
        gradient[range].copy_from_slice(&sum);
        self.finished[usize::from(own)] = true;
        let bytes = bytes_of_f32(sum);
        self.peers()
            .map(|to_seat| Outgoing {
                to_seat,
                phase: Phase::Finished,
                segment: own,
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
