//! Sums over the slices of a verifier's stage: bits, members that die, hang or never come, and what is told then.

use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::cuda::{NcclError, SliceShape, SliceSums, SumDevice, SumError, SumWord};

use crate::cases::wave;
use crate::stack::{self, Stack};

/// Longer than anything that works takes.
const LONG: Duration = Duration::from_secs(60);
/// Too short for anything that hangs.
const SHORT: Duration = Duration::from_millis(400);

/// What a slice has computed: values of all sizes, zeros of both signs.
fn values(slice: u16, elements: usize) -> Vec<f32> {
    let mut values = wave(elements, f64::from(slice) + 0.25);
    for (i, value) in values.iter_mut().enumerate() {
        match i % 5 {
            0 => *value = -0.0,
            1 => *value *= 1e6 * f32::from(slice + 1),
            _ => {}
        }
    }
    values
}

/// `((v0 + v1) + v2) + …`
fn reference(slices: usize, elements: usize) -> Vec<f32> {
    let mut sum = values(0, elements);
    for slice in 1..slices {
        let more = values(slice as u16, elements);
        sum.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
    sum
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn device() -> Option<SumDevice> {
    // One GPU is one rank.
    let _stack = Stack::open().filter(|stack| !stack.is_real())?;
    let search = stack::search()?;
    Some(SumDevice::open(&search, 0, stack::cache()?).expect("a device to sum on"))
}

struct Part {
    sums: SliceSums,
    words: Receiver<SumWord>,
    slice: u16,
    stack: Stack,
}

impl Part {
    fn begin(device: &SumDevice, members: &[u16], own: u16, mode: SumMode, patience: Duration) -> Self {
        let (tell, words) = channel();
        let shape = SliceShape {
            members: members.to_vec(),
            own,
            mode,
            meeting_patience: patience,
        };
        let sums = SliceSums::begin_epoch(device, shape, move |word| {
            // Nobody may listen any more.
            let _ = tell.send(word);
        });
        let slice = members
            .iter()
            .position(|&member| member == own)
            .expect("a member");
        Self {
            sums: sums.expect("an epoch"),
            words,
            slice: slice as u16,
            stack: Stack::open().expect("as before"),
        }
    }

    fn hear(&self) -> SumWord {
        self.words.recv_timeout(LONG).expect("a word in time")
    }

    fn sum(&mut self, elements: usize) -> Result<Vec<f32>, NcclError> {
        let mut buffer = self.stack.upload(&values(self.slice, elements));
        self.sums.sum(buffer.view_mut(), &self.stack.stream)?;
        let sum = self.stack.download(&buffer);
        // SLICES-2
        self.sums.settle()?;
        Ok(sum)
    }
}

/// Slices of a stage that have met.
fn stage(device: &SumDevice, members: &[u16], mode: SumMode) -> Vec<Part> {
    let parts: Vec<Part> = members
        .iter()
        .map(|&own| Part::begin(device, members, own, mode, LONG))
        .collect();
    if members.len() > 1 {
        let SumWord::Id(id) = parts[0].hear() else {
            panic!("the first slice tells the id")
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

fn all<R: Send>(parts: &mut [Part], work: impl Fn(&mut Part) -> R + Sync) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let running: Vec<_> = parts
            .iter_mut()
            .map(|part| scope.spawn(move || work(part)))
            .collect();
        running
            .into_iter()
            .map(|thread| thread.join().expect("a slice"))
            .collect()
    })
}

fn end(parts: Vec<Part>) {
    for part in parts {
        part.sums.end(LONG).expect("an end");
    }
}

/// SLICES-1: small and large, again and again, and longer than a piece.
#[test]
fn exact_sums_have_the_bits_of_slices_that_are_added_in_their_order() {
    let Some(device) = device() else { return };
    for (members, lengths) in [
        (&[4][..], &[9][..]),
        (&[0, 1], &[1, 640, 640, 7, (4 << 20) + 3]),
        (&[8, 9, 10, 11], &[1000, 3, 4000]),
    ] {
        let mut parts = stage(&device, members, SumMode::Exact);
        for &elements in lengths {
            let wanted = bits(&reference(members.len(), elements));
            for sum in all(&mut parts, |part| part.sum(elements).expect("a sum")) {
                assert!(bits(&sum) == wanted, "{elements} elements of {members:?}");
            }
        }
        end(parts);
    }
}

#[test]
fn fast_sums_are_the_same_at_all_slices_and_close_to_exact_ones() {
    let Some(device) = device() else { return };
    let mut parts = stage(&device, &[0, 1, 2], SumMode::Fast);
    let wanted = reference(3, 500);
    let sums = all(&mut parts, |part| part.sum(500).expect("a sum"));
    for sum in &sums {
        assert_eq!(bits(sum), bits(&sums[0]));
        for (i, (value, wanted)) in sum.iter().zip(&wanted).enumerate() {
            let magnitude: f32 = (0..3).map(|slice| values(slice, 500)[i].abs()).sum();
            assert!(
                (value - wanted).abs() <= 2.0 * f32::EPSILON * magnitude,
                "{value} for {wanted}"
            );
        }
    }
    end(parts);
}

/// MEETING-2
#[test]
fn a_slice_that_never_comes_is_told_and_the_next_meeting_succeeds() {
    let Some(device) = device() else { return };
    for own in [0, 1] {
        let part = Part::begin(&device, &[0, 1], own, SumMode::Exact, SHORT);
        if own == 0 {
            assert!(matches!(part.hear(), SumWord::Id(_)));
        }
        let SumWord::Broken(reason) = part.hear() else {
            panic!("nobody comes")
        };
        assert!(reason.contains("meeting"), "{reason}");
        part.sums.end(LONG).expect("an end");
    }
    let mut parts = stage(&device, &[0, 1], SumMode::Exact);
    for sum in all(&mut parts, |part| part.sum(50).expect("a sum")) {
        assert_eq!(bits(&sum), bits(&reference(2, 50)));
    }
    end(parts);
}

/// MEETING-2: a slice that hangs somewhere else is not waited for beyond the deadline.
#[test]
fn a_sum_that_is_late_is_told_and_what_it_leaves_is_no_result() {
    let Some(device) = device() else { return };
    let mut parts = stage(&device, &[0, 1], SumMode::Exact);
    let waits = &mut parts[0];
    waits.sums.set_deadline(Instant::now() + SHORT);
    let aborter = waits.sums.aborter();
    std::thread::scope(|scope| {
        let summing = scope.spawn(|| waits.sum(50));
        // What the coordinator's word does once it was told.
        std::thread::sleep(4 * SHORT);
        aborter.abort(LONG).expect("aborted");
        let result = summing.join().expect("it is let go");
        assert!(matches!(result, Err(NcclError::Aborted { .. })), "{result:?}");
    });
    let SumWord::Broken(reason) = waits.hear() else {
        panic!("it was late")
    };
    assert!(reason.contains("a sum of slices of rank 0 of 2"), "{reason}");
    end(parts);
}

/// The coordinator knows of a death before any deadline: its word ends the epoch, while the device waits.
#[test]
fn an_abort_from_another_thread_lets_the_device_go_and_is_no_fault() {
    let Some(device) = device() else { return };
    let mut parts = stage(&device, &[0, 1], SumMode::Exact);
    let waits = &mut parts[0];
    waits.sums.set_deadline(Instant::now() + LONG);
    let aborter = waits.sums.aborter();
    std::thread::scope(|scope| {
        let summing = scope.spawn(|| waits.sum(50));
        std::thread::sleep(SHORT);
        assert!(!summing.is_finished(), "the other slice has not come");
        aborter.abort(LONG).expect("aborted");
        let result = summing.join().expect("it is let go");
        assert!(matches!(result, Err(NcclError::Aborted { .. })), "{result:?}");
    });
    assert_eq!(waits.words.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
    let again = waits.sum(3);
    assert!(matches!(again, Err(NcclError::Aborted { .. })), "{again:?}");
    end(parts);
}

#[test]
fn members_that_contradict_themselves_are_refused() {
    let Some(device) = device() else { return };
    for (members, own) in [(vec![1, 0], 0), (vec![0, 1], 2)] {
        let shape = SliceShape {
            members,
            own,
            mode: SumMode::Exact,
            meeting_patience: LONG,
        };
        let refused = SliceSums::begin_epoch(&device, shape, |_| {});
        assert!(matches!(refused.map(|_| ()), Err(SumError::Shape { .. })));
    }
}
