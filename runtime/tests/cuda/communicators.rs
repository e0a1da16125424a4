//! Communicators: they meet, sum, gather and broadcast; ranks are missing, die, and are aborted.

use std::time::{Duration, Instant};

use eaglet_runtime::cuda::{Communicator, Nccl, NcclError, Stream, UniqueId};

use crate::cases::wave;
use crate::stack::{self, Stack};

const ID: &str = "EAGLET_TEST_ID";

/// Long enough for anything that works.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Too short for anything that does not.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(300)
}

struct Ranks {
    stack: Stack,
    nccl: std::sync::Arc<Nccl>,
}

impl Ranks {
    /// Stand-ins only: one GPU is one rank.
    fn open() -> Option<Self> {
        let stack = Stack::open().filter(|stack| !stack.is_real())?;
        let nccl = Nccl::open(&stack::search()?).expect("NCCL");
        Some(Self { stack, nccl })
    }

    fn begin(&self, id: UniqueId, ranks: usize, rank: usize) -> Communicator {
        Communicator::begin(&self.nccl, &self.stack.context, id, ranks, rank).expect("begun")
    }

    /// A group of this process's threads.
    fn group(&self, ranks: usize) -> Vec<Communicator> {
        let id = self.nccl.unique_id().expect("an id");
        let group: Vec<Communicator> = (0..ranks).map(|rank| self.begin(id, ranks, rank)).collect();
        for communicator in &group {
            communicator.wait_until_ready(later()).expect("met");
        }
        group
    }
}

/// Sums, gathers and broadcasts with a group, and checks the results.
fn use_group(ranks: &Ranks, group: &[Communicator]) {
    let n = 1000;
    let stack = &ranks.stack;
    let count = group.len();
    let given: Vec<Vec<f32>> = (0..count).map(|rank| wave(n, rank as f64)).collect();
    std::thread::scope(|scope| {
        for communicator in group {
            let given = &given;
            scope.spawn(move || {
                let rank = communicator.rank();
                let stream = Stream::new(&stack.context).expect("a stream");
                let mut buffer = stack.upload(&given[rank]);
                let mut gathered = stack.upload(&vec![0.0_f32; count * n]);
                let done = communicator.all_gather(&stream, buffer.view(), gathered.view_mut(), later());
                done.expect("asked").wait().expect("gathered");
                assert_eq!(
                    stack.download(&gathered),
                    given.concat(),
                    "gathered in the order of ranks"
                );

                let done = communicator.all_reduce(&stream, buffer.view_mut(), later());
                // Work on the same stream comes after it.
                let scaled = stack.kernels.scale(&stream, buffer.view_mut(), 2.0);
                scaled.expect("launched");
                done.expect("asked").wait().expect("summed");
                stream.synchronize().expect("done");
                let sum: Vec<f32> = (0..n)
                    .map(|i| 2.0 * given.iter().map(|part| part[i]).sum::<f32>())
                    .collect();
                assert_eq!(stack.download(&buffer), sum);

                let mut word = stack.upload(&[rank as u32 + 7]);
                let done = communicator.broadcast(&stream, word.view_mut(), count - 1, later());
                done.expect("asked").wait().expect("sent");
                assert_eq!(stack.download(&word), [count as u32 + 6]);
            });
        }
    });
}

fn abort(group: &[Communicator]) {
    for communicator in group {
        communicator.abort(Duration::from_secs(60)).expect("aborted");
    }
}

#[test]
fn ranks_meet_and_sum_gather_and_broadcast() {
    let Some(ranks) = Ranks::open() else { return };
    assert_eq!(ranks.nccl.version(), (2, 27, 0));
    for count in [1, 3] {
        let group = ranks.group(count);
        use_group(&ranks, &group);
        abort(&group);
    }
}

/// COMMUNICATOR-1
#[test]
fn a_rank_that_never_comes_is_late_and_the_next_meeting_succeeds() {
    let Some(ranks) = Ranks::open() else { return };
    let id = ranks.nccl.unique_id().expect("an id");
    let alone = ranks.begin(id, 2, 0);
    let error = alone.wait_until_ready(soon()).expect_err("nobody comes");
    assert!(
        matches!(
            error,
            NcclError::Late {
                rank: 0,
                ranks: 2,
                ..
            }
        ),
        "{error}"
    );
    alone.abort(Duration::from_secs(60)).expect("aborted");
    // COMMUNICATOR-2
    let error = alone.wait_until_ready(later()).expect_err("aborted");
    assert!(matches!(error, NcclError::Aborted { .. }), "{error}");
    let group = ranks.group(2);
    use_group(&ranks, &group);
    abort(&group);
}

fn hex(id: UniqueId) -> String {
    id.0.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Meets rank 0 in another process, sums once, and dies.
#[test]
fn rank_that_dies() {
    let Some(text) = std::env::var(ID).ok().filter(|_| stack::is_child()) else {
        return;
    };
    let Some(ranks) = Ranks::open() else { return };
    let bytes: Vec<u8> = (0..128)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).expect("hexadecimal"))
        .collect();
    let id = UniqueId(bytes.try_into().expect("128 bytes"));
    let communicator = ranks.begin(id, 2, 1);
    communicator.wait_until_ready(later()).expect("met");
    let mut buffer = ranks.stack.upload(&[1.0_f32; 64]);
    let done = communicator.all_reduce(&ranks.stack.stream, buffer.view_mut(), later());
    done.expect("asked").wait().expect("summed");
    std::process::exit(0);
}

/// Rank 0 beside a process that dies: the error of the second sum.
fn beside_a_dead_rank(ranks: &Ranks, then: impl FnOnce(&Communicator, NcclError)) {
    let id = ranks.nccl.unique_id().expect("an id");
    let communicator = ranks.begin(id, 2, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| stack::child("communicators::rank_that_dies", &[(ID, &hex(id))]));
        communicator.wait_until_ready(later()).expect("met");
        let stack = &ranks.stack;
        let mut buffer = stack.upload(&[2.0_f32; 64]);
        let done = communicator.all_reduce(&stack.stream, buffer.view_mut(), later());
        done.expect("asked").wait().expect("summed");
        assert_eq!(stack.download(&buffer), [3.0; 64]);
        let error = match communicator.all_reduce(&stack.stream, buffer.view_mut(), soon()) {
            Ok(pending) => pending.wait().expect_err("the peer is dead"),
            Err(error) => error,
        };
        then(&communicator, error);
        // The stream goes on, whatever the buffer holds now.
        stack.stream.synchronize().expect("released by the abort");
    });
}

/// COMMUNICATOR-1
#[test]
fn a_dead_rank_shows_as_late_and_an_abort_releases_the_stream() {
    let Some(ranks) = Ranks::open() else { return };
    beside_a_dead_rank(&ranks, |communicator, error| {
        assert!(matches!(error, NcclError::Late { .. }), "{error}");
        assert!(
            !ranks.stack.stream.is_idle().expect("asked"),
            "the sum still spins"
        );
        communicator.abort(Duration::from_secs(60)).expect("aborted");
    });
    let group = ranks.group(2);
    use_group(&ranks, &group);
    abort(&group);
}

#[test]
fn a_remote_error_is_told_with_its_name() {
    if Ranks::open().is_some() {
        stack::child("communicators::remote_error", &[("EAGLET_STANDIN_NCCL", "error")]);
    }
}

/// The child of the test above.
#[test]
fn remote_error() {
    if !stack::is_child() || std::env::var_os("EAGLET_STANDIN_NCCL").is_none_or(|mode| mode != "error") {
        return;
    }
    let Some(ranks) = Ranks::open() else { return };
    beside_a_dead_rank(&ranks, |communicator, error| {
        assert!(
            matches!(
                error,
                NcclError::Call {
                    code: 6,
                    name: "remote error",
                    ..
                } | NcclError::Late { .. }
            ),
            "{error}"
        );
        communicator.abort(Duration::from_secs(60)).expect("aborted");
    });
}

#[test]
fn an_abort_that_hangs_asks_for_the_end_of_the_process() {
    if Ranks::open().is_some() {
        let text = stack::child("communicators::stuck_abort", &[("EAGLET_STANDIN_NCCL", "stuck")]);
        assert!(text.contains("the process has to end"), "{text}");
    }
}

/// The child of the test above.
#[test]
fn stuck_abort() {
    if !stack::is_child() || std::env::var_os("EAGLET_STANDIN_NCCL").is_none_or(|mode| mode != "stuck") {
        return;
    }
    let Some(ranks) = Ranks::open() else { return };
    let group = ranks.group(1);
    let error = group[0]
        .abort(Duration::from_millis(300))
        .expect_err("the abort hangs");
    assert!(matches!(error, NcclError::AbortStuck { rank: 0, .. }));
    println!("{error}");
    std::process::exit(0);
}
