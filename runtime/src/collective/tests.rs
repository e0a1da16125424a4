//! Whole reductions over several seats, in every order of arrival.

use bytes::Bytes;
use proptest::prelude::*;

use super::reduce::{CollectiveError, Outgoing, Phase, ReduceShape, SeatOrderedReduce};
use super::segments::Segments;
use crate::link::bytes_of_f32;

fn floats(bytes: &[u8]) -> impl Iterator<Item = f32> + '_ {
    bytes
        .chunks_exact(4)
        .map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

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
    (0..seats)
        .map(|_| (0..elements).map(|_| next()).collect())
        .collect()
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
    SeatOrderedReduce::new(ReduceShape {
        elements,
        seats,
        own,
        scale,
    })
    .expect("own is a seat")
}

/// Something that a seat may do next.
enum Event {
    Start(u16),
    Deliver(u16, Outgoing),
}

/// Plays a whole reduction; `choose(n)` picks which of `n` possible events is next.
fn play(
    gradients: &[Vec<f32>],
    scale: f32,
    twice: bool,
    mut choose: impl FnMut(usize) -> usize,
) -> Vec<Vec<u32>> {
    let seats = gradients.len() as u16;
    let elements = gradients[0].len();
    let mut parts: Vec<_> = (0..seats)
        .map(|own| reduce(elements, seats, own, scale))
        .collect();
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
            Event::Deliver(
                from,
                Outgoing {
                    to_seat,
                    phase,
                    segment,
                    bytes,
                },
            ) => {
                let part = &mut parts[usize::from(to_seat)];
                (
                    to_seat,
                    part.receive(from, phase, segment, bytes)
                        .expect("it belongs there"),
                )
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
            part.finish()
                .expect("done")
                .into_iter()
                .map(f32::to_bits)
                .collect()
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
                    naive
                        .iter_mut()
                        .zip(&gradient[range.clone()])
                        .for_each(|(sum, value)| *sum += value);
                    if seat == own {
                        outgoing.extend(part.start(gradient.clone()).expect("the first start"));
                    } else {
                        let bytes = bytes_of_f32(gradient[range.clone()].to_vec());
                        let answer = part.receive(seat, Phase::Contribution, own, bytes);
                        outgoing.extend(answer.expect("it belongs there"));
                    }
                }
                different_sums.insert(naive.iter().map(|value| value.to_bits()).collect::<Vec<_>>());
                let finished: Vec<_> = outgoing
                    .iter()
                    .filter(|out| out.phase == Phase::Finished)
                    .collect();
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
    assert_eq!(
        result.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
        [0.5_f32, -0.0, 2.0].map(f32::to_bits)
    );
}

#[test]
fn the_vector_that_went_in_comes_out() {
    let gradient = vec![1.0; 100];
    let place = gradient.as_ptr();
    let mut part = reduce(100, 1, 0, 1.0);
    part.start(gradient).expect("first");
    let result = part.finish().expect("done");
    assert_eq!(result.as_ptr(), place);
}

/// C-3.
#[test]
fn what_is_sent_is_the_segments_of_others() {
    let mut part = reduce(1000, 4, 1, 1.0);
    let outgoing = part.start(vec![1.0; 1000]).expect("first");
    let bytes: usize = outgoing.iter().map(|out| out.bytes.len()).sum();
    assert_eq!(bytes, 4 * (1000 - Segments::new(1000, 4).range(1).len()));
    assert_eq!(part.awaited(), [0, 2, 3]);
}

#[test]
fn what_has_no_place_is_refused_and_changes_nothing() {
    let values = |n: usize| bytes_of_f32(vec![1.0; n]);
    let mut part = reduce(64, 2, 0, 1.0);
    assert!(matches!(
        SeatOrderedReduce::new(ReduceShape {
            elements: 64,
            seats: 2,
            own: 2,
            scale: 1.0
        }),
        Err(CollectiveError::Shape { .. })
    ));
    assert_eq!(
        part.receive(1, Phase::Finished, 1, values(32)),
        Err(CollectiveError::Premature {
            from: 1,
            segment: 1,
            own: 0
        })
    );
    assert_eq!(
        part.start(vec![0.0; 63]),
        Err(CollectiveError::Gradient {
            actual: 63,
            wanted: 64
        })
    );
    part.start(vec![1.0; 64]).expect("first");
    assert_eq!(part.start(vec![1.0; 64]), Err(CollectiveError::Started));
    for from in [0, 2, u16::MAX] {
        let error = part.receive(from, Phase::Contribution, 0, values(32));
        assert_eq!(
            error,
            Err(CollectiveError::From {
                from,
                own: 0,
                seats: 2
            })
        );
    }
    for (phase, segment) in [
        (Phase::Contribution, 1),
        (Phase::Contribution, u16::MAX),
        (Phase::Finished, 0),
        (Phase::Finished, 2),
    ] {
        let error = part.receive(1, phase, segment, values(32));
        assert_eq!(
            error,
            Err(CollectiveError::Misrouted {
                from: 1,
                segment,
                phase,
                own: 0
            })
        );
    }
    for n in [0, 31, 33] {
        let error = part
            .receive(1, Phase::Contribution, 0, values(n))
            .expect_err("wrong length");
        assert!(
            matches!(
                error,
                CollectiveError::Length {
                    wanted_bytes: 128,
                    ..
                }
            ),
            "{error}"
        );
    }
    assert!(
        part.receive(1, Phase::Contribution, 0, Bytes::from(vec![0; 127]))
            .is_err()
    );
    assert!(!part.is_done());
    assert_eq!(part.duplicates(), 0);
    assert_eq!(
        part.receive(1, Phase::Contribution, 0, values(32))
            .expect("right")
            .len(),
        1
    );
    part.receive(1, Phase::Finished, 1, values(32)).expect("right");
    assert!(part.is_done());
    for (phase, segment) in [(Phase::Contribution, 0), (Phase::Finished, 1)] {
        assert_eq!(
            part.receive(1, phase, segment, values(32)),
            Ok(Vec::new()),
            "late duplicates are ignored"
        );
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
