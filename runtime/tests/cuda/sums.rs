//! Sums of gradients over the members of an epoch: bits, members that die, hang or never come, and what is told then.

use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use eaglet_runtime::collective::{BucketPlan, ReduceShape, SeatOrderedReduce, SumMode};
use eaglet_runtime::cuda::{
    Gradient, GradientSums, Handover, NcclError, Stream, SumDevice, SumError, SumShape, SumWord, UniqueId,
};

use crate::cases::wave;
use crate::stack::{self, Stack};

#[path = "handover.rs"]
mod handover;

const ID: &str = "EAGLET_TEST_SUMS_ID";
/// Longer than anything that works takes.
const LONG: Duration = Duration::from_secs(60);
/// Too short for anything that hangs.
const SHORT: Duration = Duration::from_millis(400);
const ELEMENTS: usize = 1003;
const BUCKET: usize = 128;

/// What each lane brings: values of all sizes, zeros of both signs, numbers that are nearly nothing.
fn lane(lane: u16) -> Vec<f32> {
    let mut values = wave(ELEMENTS, f64::from(lane) + 0.25);
    for (i, value) in values.iter_mut().enumerate() {
        match i % 7 {
            0 => *value = -0.0,
            1 => *value *= 1e-38,
            2 => *value *= 1e6 * f32::from(lane + 1),
            _ => {}
        }
    }
    values
}

/// The order of a pass: what lies last comes first, but for a piece at the end.
fn plan() -> BucketPlan {
    let order = [700..990, 690..700, 300..690, 0..300, 990..ELEMENTS];
    BucketPlan::new(ELEMENTS, &order, BUCKET).expect("it covers all")
}

fn shape(members: &[u16], own: u16, mode: SumMode) -> SumShape {
    SumShape {
        members: members.to_vec(),
        own,
        plan: plan(),
        mode,
        meeting_patience: LONG,
        handover: None,
    }
}

fn device() -> Option<SumDevice> {
    // One GPU is one rank.
    let _stack = Stack::open().filter(|stack| !stack.is_real())?;
    let search = stack::search()?;
    Some(SumDevice::open(&search, 0, stack::cache()?).expect("a device to sum on"))
}

/// The reference: all lanes at one member.
fn reference(lanes: &[u16]) -> Vec<f32> {
    let mut reduce = SeatOrderedReduce::new(ReduceShape {
        elements: ELEMENTS,
        members: vec![0],
        own: 0,
        lanes: lanes.iter().map(|&lane| (lane, 0)).collect(),
    })
    .expect("a shape");
    for &number in lanes {
        reduce.contribute(number, &lane(number)).expect("a lane");
    }
    reduce.start(vec![0.0; ELEMENTS]).expect("started");
    reduce.finish().expect("a sum")
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// A member with what it was told.
struct Part {
    sums: GradientSums,
    words: Receiver<SumWord>,
    own: u16,
}

impl Part {
    fn begin(device: &SumDevice, shape: SumShape) -> Self {
        let (tell, words) = channel();
        let own = shape.own;
        let sums = GradientSums::begin_epoch(device, shape, move |word| {
            // Nobody may listen any more.
            let _ = tell.send(word);
        });
        Self {
            sums: sums.expect("an epoch"),
            words,
            own,
        }
    }

    fn hear(&self) -> SumWord {
        self.words.recv_timeout(LONG).expect("a word in time")
    }

    /// Brings in a lane, cut in one of several ways.
    fn bring(&mut self, number: u16, cut: usize) {
        let values = lane(number);
        let ends: Vec<usize> = match cut {
            0 => vec![0, ELEMENTS],
            1 => (0..ELEMENTS).step_by(61).chain([ELEMENTS]).collect(),
            _ => vec![0, 1, 299, 691, 990, ELEMENTS],
        };
        let mut parts: Vec<Range<usize>> = ends.windows(2).map(|pair| pair[0]..pair[1]).collect();
        if cut > 0 {
            parts.reverse();
        }
        for part in parts {
            self.sums
                .bring(number, part, Gradient::Host(&values))
                .expect("a stretch");
        }
    }

    fn step(&mut self, lanes: &[(u16, u16)], cut: usize) -> Vec<f32> {
        self.sums
            .begin(lanes.to_vec(), Instant::now() + LONG)
            .expect("a step");
        for &(lane, owner) in lanes {
            if owner == self.own {
                self.bring(lane, cut);
            }
        }
        assert_eq!(self.hear(), SumWord::Summed);
        let mut sum = vec![f32::NAN; ELEMENTS];
        self.sums.take(&mut sum).expect("the sum");
        sum
    }
}

/// Members of one epoch that have met.
fn group(device: &SumDevice, members: &[u16], mode: SumMode) -> Vec<Part> {
    group_with(device, members, mode, None)
}

fn group_with(device: &SumDevice, members: &[u16], mode: SumMode, handover: Option<&Handover>) -> Vec<Part> {
    let parts: Vec<Part> = members
        .iter()
        .map(|&own| {
            let mut shape = shape(members, own, mode);
            shape.handover = handover.cloned();
            Part::begin(device, shape)
        })
        .collect();
    if members.len() > 1 {
        let SumWord::Id(id) = parts[0].hear() else {
            panic!("the first member tells the id")
        };
        for part in &parts[1..] {
            part.sums.meet(id);
            // Once more does no harm.
            part.sums.meet(id);
        }
    }
    for part in &parts {
        assert_eq!(part.hear(), SumWord::Met);
    }
    parts
}

/// Two steps of a group, each member on a thread of its own; the sums of the members.
fn steps(parts: &mut [Part], lanes: &[(u16, u16)]) -> Vec<Vec<f32>> {
    std::thread::scope(|scope| {
        let running: Vec<_> = parts
            .iter_mut()
            .enumerate()
            .map(|(place, part)| {
                scope.spawn(move || {
                    let first = part.step(lanes, place % 3);
                    let again = part.step(lanes, (place + 1) % 3);
                    assert_eq!(bits(&first), bits(&again), "a step repeats its bits");
                    first
                })
            })
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a member"))
            .collect()
    })
}

fn end(parts: Vec<Part>) {
    for part in parts {
        part.sums.end(LONG).expect("an end");
    }
}

/// Members, and lanes with their owners.
type Membership = (&'static [u16], &'static [(u16, u16)]);

/// One, two and three members, some without a lane.
const CASES: &[Membership] = &[
    (&[0], &[(0, 0), (1, 0), (2, 0), (5, 0)]),
    (&[3], &[(0, 3), (1, 3), (2, 3), (5, 3)]),
    (&[0, 1], &[(0, 0), (1, 1), (2, 0), (5, 1)]),
    (&[0, 1], &[(0, 1), (1, 1), (2, 1), (5, 0)]),
    (&[2, 7], &[(0, 7), (1, 7), (2, 7), (5, 7)]),
    (&[0, 1, 2], &[(0, 2), (1, 0), (2, 1), (5, 0)]),
    (&[0, 4, 9], &[(0, 9), (1, 9), (2, 0), (5, 9)]),
    (&[0, 1, 2], &[(0, 1), (1, 1), (2, 1), (5, 1)]),
];

/// SUMS-1
#[test]
fn exact_sums_have_the_bits_of_seats_whatever_the_membership() {
    let Some(device) = device() else { return };
    let wanted = bits(&reference(&[0, 1, 2, 5]));
    for (members, lanes) in CASES {
        let mut parts = group(&device, members, SumMode::Exact);
        for sum in steps(&mut parts, lanes) {
            assert_eq!(bits(&sum), wanted, "{members:?}, {lanes:?}");
        }
        end(parts);
    }
}

#[test]
fn fast_sums_are_the_same_at_all_members_and_close_to_exact_ones() {
    let Some(device) = device() else { return };
    let wanted = reference(&[0, 1, 2, 5]);
    let all = [0, 1, 2, 5].map(lane);
    let magnitude = |i: usize| all.iter().map(|lane| lane[i].abs()).sum::<f32>();
    let mut has_other_bits = false;
    for (members, lanes) in CASES {
        let mut parts = group(&device, members, SumMode::Fast);
        let sums = steps(&mut parts, lanes);
        for sum in &sums {
            assert_eq!(bits(sum), bits(&sums[0]), "{members:?}, {lanes:?}");
            for (i, (value, wanted)) in sum.iter().zip(&wanted).enumerate() {
                let allowed = 2.0 * f32::EPSILON * magnitude(i);
                assert!((value - wanted).abs() <= allowed, "{value} for {wanted}");
            }
        }
        has_other_bits |= bits(&sums[0]) != bits(&wanted);
        if members.len() == 1 {
            assert_eq!(
                bits(&sums[0]),
                bits(&wanted),
                "a lone member adds in the order of lanes"
            );
        }
        end(parts);
    }
    assert!(has_other_bits, "these lanes would not show a wrong order");
}

/// Gradients that lie on the device take the same way without the host.
#[test]
fn gradients_on_the_device_have_the_same_bits() {
    let Some(device) = device() else { return };
    let Some(stack) = Stack::open() else { return };
    let lanes = [(0, 0), (3, 0)];
    let mut parts = group(&device, &[0], SumMode::Exact);
    let part = &mut parts[0];
    let computing = Stream::new(&stack.context).expect("a stream");
    part.sums
        .begin(lanes.to_vec(), Instant::now() + LONG)
        .expect("a step");
    let mut gradient = stack.upload(&vec![0.0_f32; ELEMENTS]);
    for (number, _) in lanes {
        // The same buffer again: what was brought in is the stretch as it was then.
        computing
            .upload(&lane(number), gradient.view_mut())
            .expect("sent");
        for stretch in [500..ELEMENTS, 0..500] {
            let from = Gradient::Device(gradient.view(), &computing);
            part.sums.bring(number, stretch, from).expect("a stretch");
        }
    }
    assert_eq!(part.hear(), SumWord::Summed);
    part.sums.take_device(gradient.view_mut()).expect("the sum");
    assert_eq!(bits(&stack.download(&gradient)), bits(&reference(&[0, 3])));
    end(parts);
}

/// SUMS-2
#[test]
fn who_waits_for_a_slow_lane_holds_a_sum_a_bucket_and_its_own_lanes() {
    let text = device().map(|_| stack::child("sums::memory_while_waiting", &[]));
    if let Some(text) = text {
        assert!(text.contains("bounded"), "{text}");
    }
}

/// The child of the test above: nobody else's memory is counted in its process.
#[test]
fn memory_while_waiting() {
    if !stack::is_child() {
        return;
    }
    let (Some(device), Some(stack)) = (device(), Stack::open()) else {
        return;
    };
    let used = || {
        let (free, total) = stack.context.memory().expect("asked");
        total - free
    };
    let before = used();
    let lanes: Vec<(u16, u16)> = (0..9).map(|lane| (lane, if lane == 4 { 1 } else { 0 })).collect();
    let mut parts = group(&device, &[0, 1, 2], SumMode::Exact);
    for part in &mut parts {
        part.sums
            .begin(lanes.clone(), Instant::now() + LONG)
            .expect("a step");
    }
    // All lanes but the first are there long before it.
    parts[1].bring(4, 0);
    for lane in 0..9 {
        if lane != 4 {
            parts[0].bring(lane, 0);
        }
    }
    for part in &parts {
        assert_eq!(part.hear(), SumWord::Summed);
    }
    let buckets = plan().buckets();
    let own_lanes = 8 * buckets + buckets;
    let bound = own_lanes + 3 * (buckets + 1);
    let held = (used() - before).div_ceil(BUCKET * size_of::<f32>());
    assert!(held <= bound, "{held} buckets for {bound}");
    end(parts);
    println!("bounded");
}

#[test]
fn what_has_no_place_in_a_sum_is_refused() {
    let Some(device) = device() else { return };
    let wrong = GradientSums::begin_epoch(&device, shape(&[1, 0], 0, SumMode::Exact), |_| {});
    assert!(matches!(wrong.map(|_| ()), Err(SumError::Shape { .. })));
    let mut parts = group(&device, &[0], SumMode::Exact);
    let part = &mut parts[0];
    let later = Instant::now() + LONG;
    for lanes in [vec![], vec![(1, 0), (0, 0)], vec![(0, 0), (1, 9)]] {
        let refused = part.sums.begin(lanes.clone(), later);
        assert!(matches!(refused, Err(SumError::Lanes { .. })), "{lanes:?}");
    }
    part.sums.begin(vec![(0, 0), (1, 0)], later).expect("a step");
    let values = lane(0);
    let mut bring = |lane, part_of| part.sums.bring(lane, part_of, Gradient::Host(&values));
    bring(0, 10..20).expect("a stretch");
    for (lane, stretch) in [(1, 0..10), (2, 0..10), (0, 19..30), (0, 0..ELEMENTS + 1)] {
        assert!(
            matches!(bring(lane, stretch), Err(SumError::Lane { .. })),
            "{lane}"
        );
    }
    let short = part.sums.bring(0, 0..10, Gradient::Host(&values[1..]));
    assert!(matches!(short, Err(SumError::Gradient { .. })));
    let again = part.sums.begin(vec![(0, 0)], later);
    assert!(matches!(again, Err(SumError::NotDone)));
    let early = part.sums.take(&mut vec![0.0; ELEMENTS]);
    assert!(matches!(early, Err(SumError::NotDone)));
    end(parts);
}

/// SUMS-3
#[test]
fn a_member_that_never_comes_is_told_and_the_next_meeting_succeeds() {
    let Some(device) = device() else { return };
    for own in [0, 1] {
        // The first member waits for the second, and the second for its id.
        let mut alone = shape(&[0, 1], own, SumMode::Exact);
        alone.meeting_patience = SHORT;
        let part = Part::begin(&device, alone);
        if own == 0 {
            assert!(matches!(part.hear(), SumWord::Id(_)));
        }
        let SumWord::Broken(reason) = part.hear() else {
            panic!("nobody comes")
        };
        assert!(reason.contains("meeting"), "{reason}");
        part.sums.end(LONG).expect("an end");
    }
    let mut parts = group(&device, &[0, 1], SumMode::Exact);
    let sums = steps(&mut parts, &[(0, 0), (1, 1)]);
    assert_eq!(bits(&sums[1]), bits(&reference(&[0, 1])));
    end(parts);
}

fn hex(id: UniqueId) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A member in a process of its own that dies in the middle of a step, with a part of its lane sent.
#[test]
fn member_that_dies() {
    let Some(text) = std::env::var(ID).ok().filter(|_| stack::is_child()) else {
        return;
    };
    let Some(device) = device() else { return };
    let bytes: Vec<u8> = (0..128)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hexadecimal"))
        .collect();
    let id = UniqueId(bytes.try_into().expect("128 bytes"));
    let mut part = Part::begin(&device, shape(&[0, 1, 2], 2, SumMode::Exact));
    part.sums.meet(id);
    assert_eq!(part.hear(), SumWord::Met);
    part.step(&LANES, 1);
    part.sums
        .begin(LANES.to_vec(), Instant::now() + LONG)
        .expect("a step");
    let values = lane(1);
    part.sums
        .bring(1, 600..990, Gradient::Host(&values))
        .expect("a stretch");
    std::process::exit(0);
}

const LANES: [(u16, u16); 3] = [(0, 0), (1, 2), (2, 1)];

/// Two members beside one that dies in the second step. `deadline` is that of the second step.
fn beside_a_dead_member(device: &SumDevice, deadline: Duration, then: impl FnOnce(Vec<Part>)) {
    let members = [0, 1, 2];
    let mut parts: Vec<Part> = [0, 1]
        .iter()
        .map(|&own| Part::begin(device, shape(&members, own, SumMode::Exact)))
        .collect();
    let SumWord::Id(id) = parts[0].hear() else {
        panic!("the first member tells the id")
    };
    parts[1].sums.meet(id);
    std::thread::scope(|scope| {
        scope.spawn(|| stack::child("sums::member_that_dies", &[(ID, &hex(id))]));
        let wanted = bits(&reference(&[0, 1, 2]));
        std::thread::scope(|members| {
            for part in &mut parts {
                members.spawn(|| {
                    assert_eq!(part.hear(), SumWord::Met);
                    assert_eq!(bits(&part.step(&LANES, 2)), wanted);
                    part.sums
                        .begin(LANES.to_vec(), Instant::now() + deadline)
                        .expect("a step");
                    part.bring(if part.own == 0 { 0 } else { 2 }, 0);
                });
            }
        });
        then(parts);
    });
}

fn meet_again(device: &SumDevice) {
    let mut parts = group(device, &[0, 1], SumMode::Exact);
    let lanes = [(0, 0), (1, 1), (2, 1)];
    for sum in steps(&mut parts, &lanes) {
        assert_eq!(bits(&sum), bits(&reference(&[0, 1, 2])));
    }
    end(parts);
}

/// SUMS-3: NCCL's survivors spin; the deadline tells, the abort frees them, and the next epoch has the same bits.
#[test]
fn a_member_that_dies_in_a_step_is_told_and_the_survivors_meet_again() {
    let Some(device) = device() else { return };
    beside_a_dead_member(&device, Duration::from_secs(2), |parts| {
        for part in &parts {
            let SumWord::Broken(reason) = part.hear() else {
                panic!("a member is dead")
            };
            assert!(reason.contains("a peer is gone or late"), "{reason}");
        }
        end(parts);
    });
    meet_again(&device);
}

/// The coordinator knows of a death before any deadline: its word ends the epoch at once, while others hang in calls.
#[test]
fn an_abort_from_another_thread_ends_what_hangs_and_is_no_fault() {
    let Some(device) = device() else { return };
    beside_a_dead_member(&device, LONG, |parts| {
        for part in parts {
            // It hangs: nothing is told.
            assert_eq!(part.words.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
            let aborter = part.sums.aborter();
            std::thread::scope(|scope| {
                scope.spawn(move || aborter.abort(LONG).expect("aborted"));
            });
            part.sums.end(LONG).expect("an end");
            assert_eq!(part.words.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
        }
    });
    meet_again(&device);
}

#[test]
fn an_error_of_nccl_is_told_long_before_the_deadline() {
    if device().is_some() {
        stack::child("sums::told_error", &[("EAGLET_STANDIN_NCCL", "error")]);
    }
}

/// The child of the test above.
#[test]
fn told_error() {
    if !stack::is_child() || std::env::var_os("EAGLET_STANDIN_NCCL").is_none_or(|mode| mode != "error") {
        return;
    }
    let Some(device) = device() else { return };
    beside_a_dead_member(&device, 20 * LONG, |parts| {
        for part in &parts {
            let SumWord::Broken(reason) = part.hear() else {
                panic!("a member is dead")
            };
            assert!(reason.contains("remote error"), "{reason}");
        }
        end(parts);
    });
}

#[test]
fn an_abort_that_hangs_says_that_the_process_has_to_end() {
    if device().is_some() {
        let text = stack::child("sums::stuck_abort", &[("EAGLET_STANDIN_NCCL", "stuck")]);
        assert!(text.contains("the process has to end"), "{text}");
    }
}

/// The child of the test above.
#[test]
fn stuck_abort() {
    if !stack::is_child() || std::env::var_os("EAGLET_STANDIN_NCCL").is_none_or(|mode| mode != "stuck") {
        return;
    }
    let Some(device) = device() else { return };
    for part in group(&device, &[0, 1], SumMode::Exact) {
        let error = part.sums.end(SHORT).expect_err("the abort hangs");
        assert!(matches!(error, NcclError::AbortStuck { .. }));
        println!("{error}");
    }
    std::process::exit(0);
}
