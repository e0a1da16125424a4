//! A machine that is busy with other things is no reason to give up a rank.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use eaglet_tests::Cluster;
use eaglet_tests::drill::{losses, print};
use rustix::process::Signal;

/// Processes that compute for nothing, besides the cluster.
const BUSY_PROCESSES: usize = 4;
/// How long.
const MINUTES: u64 = 10;

/// A process that takes all the time it gets.
struct Busy(Child);

impl Busy {
    fn start() -> Self {
        let child = Command::new("sh")
            .args(["-c", "while :; do :; done"])
            .stdin(Stdio::null())
            .spawn()
            .expect("every Linux has a shell");
        Self(child)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It never ends by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "takes ten minutes; run it with `cargo test --release --workspace --test no_false_death -- --ignored`"]
fn ten_busy_minutes_cost_no_rank() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("run");
    let _busy: Vec<Busy> = (0..BUSY_PROCESSES).map(|_| Busy::start()).collect();
    // The supervision of the default cluster, and more passes than fit into the time.
    let sets = [
        "training.passes=1000",
        "training.evaluate_every_steps=0",
        "samples.held_out=[]",
    ];
    let mut cluster = Cluster::launch(&directory, &sets);
    let begun = Instant::now();
    for minute in 1..=MINUTES {
        cluster.wait("minute in which the cluster works", |_| {
            (begun.elapsed() >= Duration::from_secs(60 * minute)).then_some(())
        });
        assert!(
            losses(&directory).is_empty(),
            "after {minute} minutes: {:#?}",
            losses(&directory)
        );
    }
    let steps = cluster.steps();
    assert!(steps > MINUTES, "only {steps} steps in {MINUTES} minutes");
    cluster.signal(Signal::INT);
    let finished = cluster.finish();
    assert_eq!(finished.status.code(), Some(130), "{finished:#?}");
    assert!(losses(&directory).is_empty(), "{:#?}", losses(&directory));
    print(
        &format!(
            "{steps} steps in {MINUTES} minutes beside {BUSY_PROCESSES} busy processes: no rank was lost"
        ),
        &[],
    );
}
