//! Whole reductions over several seats, in every order of arrival.

use std::collections::BTreeMap;

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

fn reduce(elements: usize, members: &[u16], own: u16, lanes: &[(u16, u16)]) -> SeatOrderedReduce {
    SeatOrderedReduce::new(ReduceShape {
        elements,
        members: members.to_vec(),
        own,
        lanes: lanes.to_vec(),
    })
    .expect("own is a member")
}

/// Segments leave as soon as they are final, whatever the order of the stretches, and hold what a whole gradient gives.
#[test]
fn segments_leave_when_they_are_final() {
    let gradient = &gradients(1, 200, 7)[0];
    let whole = reduce(200, &[0, 1, 2], 1, &[(0, 1), (1, 2)])
        .contribute(0, gradient)
        .expect("its lane");
    assert_eq!(whole.len(), 2);
    let mut parts = reduce(200, &[0, 1, 2], 1, &[(0, 1), (1, 2)]);
    let mut give = |range: std::ops::Range<usize>| parts.contribute_part(0, range, gradient);
    // Segments are 0..64, 64..128 and 128..200.
    assert_eq!(give(100..190), Ok(Vec::new()));
    assert!(give(120..130).is_err(), "that is here already");
    assert_eq!(give(0..60), Ok(Vec::new()));
    assert_eq!(give(190..200), Ok(vec![whole[1].clone()]));
    assert_eq!(give(62..100), Ok(Vec::new()));
    assert_eq!(give(60..62), Ok(vec![whole[0].clone()]));
    assert!(give(0..1).is_err() && give(0..200).is_err(), "all is here");
    assert!(parts.start(vec![0.0; 200]).is_ok());
    let mut early = reduce(200, &[0, 1, 2], 1, &[(0, 1), (1, 2)]);
    early.contribute_part(0, 64..200, gradient).expect("its lane");
    assert_eq!(
        early.start(vec![0.0; 200]),
        Err(CollectiveError::Start),
        "a stretch is missing"
    );
}

/// Something that may happen next.
enum Event {
    Contribute(u16, u16),
    Start(u16),
    Deliver(u16, Outgoing),
}

/// Plays a whole reduction of gradients `[lanes, elements]`; `choose(n)` picks which of `n` possible events is next.
fn play(
    gradients: &[Vec<f32>],
    members: &[u16],
    lanes: &[(u16, u16)],
    twice: bool,
    mut choose: impl FnMut(usize) -> usize,
) -> Vec<Vec<u32>> {
    let elements = gradients[0].len();
    let mut parts: BTreeMap<u16, _> = members
        .iter()
        .map(|&own| (own, reduce(elements, members, own, lanes)))
        .collect();
    let mut left: BTreeMap<u16, usize> = members
        .iter()
        .map(|&own| (own, lanes.iter().filter(|(_, owner)| *owner == own).count()))
        .collect();
    let mut events: Vec<_> = lanes
        .iter()
        .map(|&(lane, owner)| Event::Contribute(owner, lane))
        .collect();
    events.extend(
        left.iter()
            .filter(|(_, left)| **left == 0)
            .map(|(&own, _)| Event::Start(own)),
    );
    let mut sent = 0_u64;
    let mut early: Vec<Event> = Vec::new();
    while !events.is_empty() {
        let at = choose(events.len());
        let (seat, outgoing) = match events.swap_remove(at) {
            Event::Contribute(seat, lane) => {
                let place = lanes
                    .iter()
                    .position(|&(l, _)| l == lane)
                    .expect("a lane of the list");
                let part = parts.get_mut(&seat).expect("a member");
                let outgoing = part.contribute(lane, &gradients[place]).expect("the first time");
                let left = left.get_mut(&seat).expect("a member");
                *left -= 1;
                if *left == 0 {
                    events.push(Event::Start(seat));
                }
                (seat, outgoing)
            }
            Event::Start(seat) => {
                let part = parts.get_mut(&seat).expect("a member");
                let outgoing = part.start(vec![f32::NAN; elements]).expect("the first start");
                events.append(&mut early);
                (seat, outgoing)
            }
            Event::Deliver(from, out) => {
                let part = parts.get_mut(&out.to_seat).expect("a member");
                let answer = part.receive(from, out.phase, out.segment, out.bytes.clone());
                if matches!(answer, Err(CollectiveError::Premature { .. })) {
                    // A rank keeps what comes before its own beginning.
                    early.push(Event::Deliver(from, out));
                    continue;
                }
                (out.to_seat, answer.expect("it belongs there"))
            }
        };
        for outgoing in outgoing {
            for _ in 0..if twice { 2 } else { 1 } {
                sent += 1;
                events.push(Event::Deliver(seat, outgoing.clone()));
            }
        }
    }
    let duplicates: u64 = parts.values().map(SeatOrderedReduce::duplicates).sum();
    assert_eq!(duplicates, if twice { sent / 2 } else { 0 });
    parts
        .into_values()
        .map(|part| {
            assert!(part.is_done());
            part.finish()
                .expect("done")
                .into_iter()
                .map(f32::to_bits)
                .collect()
        })
        .collect()
}

proptest! {
    /// C-1, C-2: whoever takes part, whoever owns which lane, whatever arrives first.
    #[test]
    fn any_membership_and_any_order_of_arrival_give_the_sequential_sum(
        lanes in 1_u16..=5,
        seats in prop::collection::btree_set(0_u16..9, 1..5),
        owners in prop::collection::vec(any::<prop::sample::Index>(), 5),
        elements in 0_usize..200,
        seed in any::<u64>(),
        twice in any::<bool>(),
        choices in prop::collection::vec(any::<usize>(), 400),
    ) {
        let members: Vec<u16> = seats.into_iter().collect();
        // Lanes 1, 3, 5 ...: those between have no row.
        let lanes: Vec<(u16, u16)> =
            (0..lanes).map(|lane| (2 * lane + 1, members[owners[usize::from(lane)].index(members.len())])).collect();
        let gradients = gradients(lanes.len() as u16, elements, seed);
        let mut choices = choices.into_iter().cycle();
        let results = play(&gradients, &members, &lanes, twice, |n| choices.next().map_or(0, |choice| choice % n));
        for result in results {
            prop_assert_eq!(&result, &sequential(&gradients, 1.0 / lanes.len() as f32));
        }
    }
}

/// C-1, exhaustively: all orders in which the contributions of five lanes can reach a member.
#[test]
fn all_arrival_orders_at_a_member_agree() {
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
        let members: Vec<u16> = (0..seats).collect();
        let lanes: Vec<(u16, u16)> = members.iter().map(|&seat| (seat, seat)).collect();
        let elements = 16 * usize::from(seats);
        let gradients = gradients(seats, elements, 9);
        let expected = sequential(&gradients, 1.0 / f32::from(seats));
        for own in 0..seats {
            let range = Segments::new(elements, seats).range(own);
            for order in permutations(members.clone()) {
                let mut part = reduce(elements, &members, own, &lanes);
                let mut naive = vec![0_f32; range.len()];
                let mut outgoing = Vec::new();
                for &seat in &order {
                    let gradient = &gradients[usize::from(seat)];
                    naive
                        .iter_mut()
                        .zip(&gradient[range.clone()])
                        .for_each(|(sum, value)| *sum += value);
                    if seat == own {
                        outgoing.extend(part.contribute(own, gradient).expect("the first time"));
                        outgoing.extend(part.start(vec![0.0; elements]).expect("the first start"));
                    } else {
                        let bytes = bytes_of_f32(gradient[range.clone()].to_vec());
                        let answer = part.receive(seat, Phase::Contribution { lane: seat }, own, bytes);
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
fn a_single_member_needs_no_messages() {
    let mut part = reduce(3, &[4], 4, &[(0, 4), (1, 4)]);
    assert!(!part.is_done());
    assert_eq!(part.contribute(1, &[1.0, -0.0, 4.0]).expect("first"), Vec::new());
    assert_eq!(part.start(vec![0.0; 3]), Err(CollectiveError::Start));
    assert_eq!(part.contribute(0, &[1.0, -0.0, 4.0]).expect("first"), Vec::new());
    assert_eq!(part.start(vec![7.0; 3]).expect("first"), Vec::new());
    assert!(part.is_done());
    let result = part.finish().expect("done");
    assert_eq!(
        result.iter().map(|v| v.to_bits()).collect::<Vec<_>>(),
        [1.0_f32, -0.0, 4.0].map(f32::to_bits)
    );
}

#[test]
fn the_vector_that_went_in_comes_out() {
    let result = vec![1.0; 100];
    let place = result.as_ptr();
    let mut part = reduce(100, &[0], 0, &[(0, 0)]);
    part.contribute(0, &result).expect("first");
    part.start(result).expect("first");
    let result = part.finish().expect("done");
    assert_eq!(result.as_ptr(), place);
}

/// C-3.
#[test]
fn what_is_sent_is_the_segments_of_others() {
    let mut part = reduce(1000, &[0, 1, 2, 3], 1, &[(0, 0), (1, 1), (2, 2), (3, 3)]);
    let outgoing = part.contribute(1, &[1.0; 1000]).expect("first");
    let bytes: usize = outgoing.iter().map(|out| out.bytes.len()).sum();
    assert_eq!(bytes, 4 * (1000 - Segments::new(1000, 4).range(1).len()));
}

#[test]
fn a_shape_that_contradicts_itself_is_refused() {
    for (members, own, lanes) in [
        (vec![0, 1], 2, vec![(0, 0)]),
        (vec![0, 1], 0, vec![(0, 2)]),
        (vec![1, 0], 0, vec![(0, 0)]),
        (vec![0, 1], 0, vec![(1, 0), (0, 1)]),
        (vec![0, 1], 0, vec![(1, 0), (1, 1)]),
        (vec![0, 1], 0, vec![]),
        (vec![], 0, vec![(0, 0)]),
    ] {
        let shape = ReduceShape {
            elements: 64,
            members,
            own,
            lanes,
        };
        assert!(matches!(
            SeatOrderedReduce::new(shape),
            Err(CollectiveError::Shape { .. })
        ));
    }
}

#[test]
fn what_has_no_place_is_refused_and_changes_nothing() {
    let values = |n: usize| bytes_of_f32(vec![1.0; n]);
    let contribution = |lane| Phase::Contribution { lane };
    let mut part = reduce(64, &[0, 5], 0, &[(0, 0), (1, 5)]);
    assert_eq!(
        part.receive(5, Phase::Finished, 1, values(32)),
        Err(CollectiveError::Premature {
            from: 5,
            segment: 1,
            own: 0
        })
    );
    let short = CollectiveError::Gradient {
        actual: 63,
        wanted: 64,
    };
    assert_eq!(part.contribute(0, &[0.0; 63]), Err(short.clone()));
    for lane in [1, 2, u16::MAX] {
        assert_eq!(
            part.contribute(lane, &[0.0; 64]),
            Err(CollectiveError::Lane { own: 0, lane })
        );
    }
    assert_eq!(part.start(vec![1.0; 64]), Err(CollectiveError::Start));
    part.contribute(0, &[1.0; 64]).expect("first");
    assert_eq!(
        part.contribute(0, &[1.0; 64]),
        Err(CollectiveError::Lane { own: 0, lane: 0 })
    );
    assert_eq!(part.start(vec![0.0; 63]), Err(short));
    part.start(vec![1.0; 64]).expect("first");
    assert_eq!(part.start(vec![1.0; 64]), Err(CollectiveError::Start));
    for (from, phase, segment) in [
        (0, contribution(0), 0),
        (1, contribution(1), 0),
        (u16::MAX, contribution(1), 0),
        (5, contribution(0), 0),
        (5, contribution(2), 0),
        (5, contribution(1), 1),
        (5, contribution(1), u16::MAX),
        (5, Phase::Finished, 0),
        (5, Phase::Finished, 2),
    ] {
        assert_eq!(
            part.receive(from, phase, segment, values(32)),
            Err(CollectiveError::Misrouted {
                from,
                segment,
                phase,
                own: 0
            })
        );
    }
    for n in [0, 31, 33] {
        let error = part
            .receive(5, contribution(1), 0, values(n))
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
        part.receive(5, contribution(1), 0, Bytes::from(vec![0; 127]))
            .is_err()
    );
    assert!(!part.is_done());
    assert_eq!(part.duplicates(), 0);
    assert_eq!(
        part.receive(5, contribution(1), 0, values(32))
            .expect("right")
            .len(),
        1
    );
    part.receive(5, Phase::Finished, 1, values(32)).expect("right");
    assert!(part.is_done());
    for (phase, segment) in [(contribution(1), 0), (Phase::Finished, 1)] {
        assert_eq!(
            part.receive(5, phase, segment, values(32)),
            Ok(Vec::new()),
            "late duplicates are ignored"
        );
    }
    assert_eq!(part.duplicates(), 2);
    let result = part.finish().expect("done");
    assert_eq!(result[..32], [1.0; 32]);
    assert_eq!(result[32..], [1.0; 32]);
}

#[test]
fn an_unfinished_reduction_gives_no_result_but_its_memory_back() {
    let shape = |own| reduce(64, &[0, 1], own, &[(0, 0), (1, 1)]);
    assert!(shape(0).finish().is_err());
    let mut part = shape(0);
    part.contribute(0, &[1.0; 64]).expect("first");
    part.start(vec![1.0; 64]).expect("first");
    assert_eq!(part.abandon().map(|result| result.len()), Some(64));
}
