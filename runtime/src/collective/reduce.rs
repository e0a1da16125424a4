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
#[derive(Clone, Debug, PartialEq, Eq)]
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
        let ReduceShape { elements, seats, own, .. } = shape;
        if own >= seats {
            return Err(CollectiveError::Shape { own, seats });
        }
        let segments = Segments::new(elements, seats);
        // Nothing is sent for an empty segment.
        let finished = (0..seats).map(|segment| segments.range(segment).is_empty()).collect();
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
            return Err(CollectiveError::Gradient { actual: gradient.len(), wanted: self.shape.elements });
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
            return Err(CollectiveError::From { from: from_seat, own, seats });
        }
        let owner = match phase {
            Phase::Contribution => own,
            Phase::Finished => from_seat,
        };
        if segment != owner {
            return Err(CollectiveError::Misrouted { from: from_seat, segment, phase, own });
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
                    return Err(CollectiveError::Premature { from: from_seat, segment, own });
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
                    accumulate(&mut self.sum, self.added == 0, gradient[range.clone()].iter().copied());
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
            .map(|to_seat| Outgoing { to_seat, phase: Phase::Finished, segment: own, bytes: bytes.clone() })
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
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Values of very different size, so that another order of addition gives other bits.
    fn gradients(seats: u16, elements: usize, seed: u64) -> Vec<Vec<f32>> {
        let mut state = seed | 1;
        let mut next = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let exponent = (state >> 20) % 60;
            ((state >> 40) as f32 - (1 << 23) as f32) * 2_f32.powi(exponent as i32 - 30)
        };
        (0..seats).map(|_| (0..elements).map(|_| next()).collect()).collect()
    }

    fn sequential(gradients: &[Vec<f32>], scale: f32) -> Vec<u32> {
        let mut sum = gradients[0].clone();
        for gradient in &gradients[1..] {
            for (sum, value) in sum.iter_mut().zip(gradient) {
                *sum += value;
            }
        }
        sum.iter().map(|value| (value * scale).to_bits()).collect()
    }

    fn reduce(elements: usize, seats: u16, own: u16, scale: f32) -> SeatOrderedReduce {
        SeatOrderedReduce::new(ReduceShape { elements, seats, own, scale }).expect("own is a seat")
    }

    /// Something that a seat may do next.
    enum Event {
        Start(u16),
        Deliver(u16, Outgoing),
    }

    /// Plays a whole reduction; `choose(n)` picks which of `n` possible events is next.
    fn play(gradients: &[Vec<f32>], scale: f32, twice: bool, mut choose: impl FnMut(usize) -> usize) -> Vec<Vec<u32>> {
        let seats = gradients.len() as u16;
        let elements = gradients[0].len();
        let mut parts: Vec<_> = (0..seats).map(|own| reduce(elements, seats, own, scale)).collect();
        let mut events: Vec<_> = (0..seats).map(Event::Start).collect();
        let (mut sent, mut started) = (0_u64, vec![false; usize::from(seats)]);
        while !events.is_empty() {
            let at = choose(events.len());
            let (seat, outgoing) = match events.swap_remove(at) {
                Event::Start(seat) => {
                    let place = usize::from(seat);
                    started[place] = true;
                    let outgoing = parts[place].start(gradients[place].clone());
                    (seat, outgoing.expect("the first start"))
                }
                Event::Deliver(from, Outgoing { to_seat, phase, segment, bytes }) => {
                    let part = &mut parts[usize::from(to_seat)];
                    (to_seat, part.receive(from, phase, segment, bytes).expect("it belongs there"))
                }
            };
            for outgoing in outgoing {
                for _ in 0..if twice { 2 } else { 1 } {
                    sent += 1;
                    events.push(Event::Deliver(seat, outgoing.clone()));
                }
            }
        }
        assert!(started.iter().all(|&started| started));
        let duplicates: u64 = parts.iter().map(SeatOrderedReduce::duplicates).sum();
        assert_eq!(duplicates, if twice { sent / 2 } else { 0 });
        parts
            .into_iter()
            .map(|part| {
                assert!(part.is_done());
                assert!(part.awaited().is_empty());
                part.finish().expect("done").into_iter().map(f32::to_bits).collect()
            })
            .collect()
    }

    proptest! {
        /// C-1, C-2.
        #[test]
        fn any_order_of_arrival_gives_the_sequential_sum(
            seats in 1_u16..=5,
            elements in 0_usize..200,
            seed in any::<u64>(),
            twice in any::<bool>(),
            choices in prop::collection::vec(any::<usize>(), 400),
        ) {
            let gradients = gradients(seats, elements, seed);
            let scale = 1.0 / f32::from(seats);
            let mut choices = choices.into_iter().cycle();
            let results = play(&gradients, scale, twice, |n| choices.next().map_or(0, |choice| choice % n));
            for result in results {
                prop_assert_eq!(&result, &sequential(&gradients, scale));
            }
        }
    }

    /// C-1, exhaustively: all orders in which the contributions of five seats can reach an owner.
    #[test]
    fn all_arrival_orders_at_an_owner_agree() {
        fn permutations(rest: Vec<u16>) -> Vec<Vec<u16>> {
            if rest.is_empty() {
                return vec![Vec::new()];
            }
            let mut all = Vec::new();
            for at in 0..rest.len() {
                let mut others = rest.clone();
                let first = others.remove(at);
                all.extend(permutations(others).into_iter().map(|mut order| {
                    order.insert(0, first);
                    order
                }));
            }
            all
        }
        let mut different_sums = std::collections::HashSet::new();
        for seats in 1..=5_u16 {
            let gradients = gradients(seats, 16 * usize::from(seats), 9);
            let expected = sequential(&gradients, 0.25);
            for own in 0..seats {
                let range = Segments::new(16 * usize::from(seats), seats).range(own);
                for order in permutations((0..seats).collect()) {
                    let mut part = reduce(16 * usize::from(seats), seats, own, 0.25);
                    let mut naive = vec![0_f32; range.len()];
                    let mut outgoing = Vec::new();
                    for &seat in &order {
                        let gradient = &gradients[usize::from(seat)];
                        naive.iter_mut().zip(&gradient[range.clone()]).for_each(|(sum, value)| *sum += value);
                        if seat == own {
                            outgoing.extend(part.start(gradient.clone()).expect("the first start"));
                        } else {
                            let bytes = bytes_of_f32(gradient[range.clone()].to_vec());
                            let answer = part.receive(seat, Phase::Contribution, own, bytes);
                            outgoing.extend(answer.expect("it belongs there"));
                        }
                    }
                    different_sums.insert(naive.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
                    let finished: Vec<_> = outgoing.iter().filter(|out| out.phase == Phase::Finished).collect();
                    assert_eq!(finished.len(), usize::from(seats) - 1);
                    for out in finished {
                        let bits: Vec<_> = floats(&out.bytes).map(f32::to_bits).collect();
                        assert_eq!(bits, expected[range.clone()], "order {order:?}");
                    }
                }
            }
        }
        assert!(different_sums.len() > 20, "the values do not tell orders apart");
    }

    #[test]
    fn a_single_seat_needs_no_messages() {
        let mut part = reduce(3, 1, 0, 0.5);
        assert!(!part.is_done());
        assert_eq!(part.start(vec![1.0, -0.0, 4.0]).expect("first"), Vec::new());
        assert!(part.is_done());
        let result = part.finish().expect("done");
        assert_eq!(result.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), [0.5_f32, -0.0, 2.0].map(f32::to_bits));
    }

    #[test]
    fn the_vector_that_went_in_comes_out() {
        let gradient = vec![1.0; 100];
        let place = gradient.as_ptr();
        let mut part = reduce(100, 1, 0, 1.0);
        part.start(gradient).expect("first");
        assert_eq!(part.finish().expect("done").as_ptr(), place);
    }

    /// C-3.
    #[test]
    fn what_is_sent_is_the_segments_of_others() {
        let mut part = reduce(1000, 4, 1, 1.0);
        let outgoing = part.start(vec![1.0; 1000]).expect("first");
        let bytes: usize = outgoing.iter().map(|out| out.bytes.len()).sum();
        assert_eq!(bytes, 4 * (1000 - Segments::new(1000, 4).range(1).len()));
        assert_eq!(part.awaited(), [0, 2, 3]);
        assert_eq!(part.sum.capacity(), 0, "the sum waits for seat 0");
    }

    #[test]
    fn what_has_no_place_is_refused_and_changes_nothing() {
        let values = |n: usize| bytes_of_f32(vec![1.0; n]);
        let mut part = reduce(64, 2, 0, 1.0);
        assert!(matches!(SeatOrderedReduce::new(ReduceShape { own: 2, ..part.shape }), Err(CollectiveError::Shape { .. })));
        assert_eq!(
            part.receive(1, Phase::Finished, 1, values(32)),
            Err(CollectiveError::Premature { from: 1, segment: 1, own: 0 })
        );
        assert_eq!(part.start(vec![0.0; 63]), Err(CollectiveError::Gradient { actual: 63, wanted: 64 }));
        part.start(vec![1.0; 64]).expect("first");
        assert_eq!(part.start(vec![1.0; 64]), Err(CollectiveError::Started));
        for from in [0, 2, u16::MAX] {
            let error = part.receive(from, Phase::Contribution, 0, values(32));
            assert_eq!(error, Err(CollectiveError::From { from, own: 0, seats: 2 }));
        }
        for (phase, segment) in [
            (Phase::Contribution, 1),
            (Phase::Contribution, u16::MAX),
            (Phase::Finished, 0),
            (Phase::Finished, 2),
        ] {
            let error = part.receive(1, phase, segment, values(32));
            assert_eq!(error, Err(CollectiveError::Misrouted { from: 1, segment, phase, own: 0 }));
        }
        for n in [0, 31, 33] {
            let error = part.receive(1, Phase::Contribution, 0, values(n)).expect_err("wrong length");
            assert!(matches!(error, CollectiveError::Length { wanted_bytes: 128, .. }), "{error}");
        }
        assert!(part.receive(1, Phase::Contribution, 0, Bytes::from(vec![0; 127])).is_err());
        assert!(!part.is_done());
        assert_eq!(part.duplicates(), 0);
        assert_eq!(part.receive(1, Phase::Contribution, 0, values(32)).expect("right").len(), 1);
        part.receive(1, Phase::Finished, 1, values(32)).expect("right");
        assert!(part.is_done());
        for (phase, segment) in [(Phase::Contribution, 0), (Phase::Finished, 1)] {
            assert_eq!(part.receive(1, phase, segment, values(32)), Ok(Vec::new()), "late duplicates are ignored");
        }
        assert_eq!(part.duplicates(), 2);
        let result = part.finish().expect("done");
        assert_eq!(result[..32], [2.0; 32]);
        assert_eq!(result[32..], [1.0; 32]);
    }

    #[test]
    fn an_unfinished_reduction_gives_no_result_but_its_memory_back() {
        let part = reduce(64, 2, 0, 1.0);
        assert!(part.finish().is_err());
        let mut part = reduce(64, 2, 0, 1.0);
        part.start(vec![1.0; 64]).expect("first");
        assert_eq!(part.awaited(), [1]);
        assert_eq!(part.abandon().map(|gradient| gradient.len()), Some(64));
    }
}
