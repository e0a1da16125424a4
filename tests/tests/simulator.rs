//! Simulated clusters around the real engine: thousands of schedules from seeds, and all places where a coordinator can
//! crash in a few. `eaglet-sim` runs as many more as one likes.

use eaglet_runtime::ids::Seat;
use eaglet_tests::sim::batch::run_many;
use eaglet_tests::sim::fault::Fault;
use eaglet_tests::sim::plan::Plan;
use eaglet_tests::sim::world::{Report, World};

/// Schedules of the fixed part; each takes about a millisecond.
const SCHEDULES: u64 = 4000;

/// LEDGER, ONCE, FENCE, ORDER, SAME, LANES, JOURNAL, MEMBERS, BOUND and LIVENESS, after every event of every schedule.
#[test]
fn invariants_hold_in_every_schedule() {
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let (totals, violations) = run_many(0, SCHEDULES, threads, 1);
    if let Some(violation) = violations.first() {
        panic!("{violation}");
    }
    assert_eq!(totals.schedules, SCHEDULES);
    assert!(totals.completed > SCHEDULES * 9 / 10, "{totals:#?}");
    assert!(totals.compared > SCHEDULES / 2, "{totals:#?}");
    for (fault, count) in totals.faults.iter() {
        // A torn tail in a real file is rare by design.
        let least = if fault == Fault::TailTorn { 1 } else { 10 };
        assert!(count >= least, "{}: only {count}", fault.name());
    }
}

#[test]
fn a_seed_is_a_schedule() {
    for seed in 0..20 {
        let run = || World::new(seed).run().map(|report| format!("{report:?}"));
        let first = run().unwrap_or_else(|violation| panic!("{violation}"));
        let again = run().unwrap_or_else(|violation| panic!("{violation}"));
        assert_eq!(first, again);
    }
}

/// Crashes the coordinator before each of its commands, with each part of the unsynced records left that a torn tail can
/// leave; that is before and after each record, too. Returns how many crashes there were.
fn crash_everywhere(seed: u64, plan: &Plan, check: impl Fn(&Report, &Report)) -> u64 {
    let noting = World::of(seed, plan.clone()).noting_tails().run_noting();
    let (undisturbed, tails) = noting.unwrap_or_else(|violation| panic!("{violation}"));
    assert!(undisturbed.completed);
    let mut crashes = 0;
    for (command, &unsynced) in (0..).zip(&tails) {
        for keep in 0..=unsynced {
            let world = World::of(seed, plan.clone()).crash_before(command, keep);
            let report = world.run().unwrap_or_else(|violation| {
                panic!("crash before command {command}, {keep} records kept: {violation}")
            });
            assert!(report.counts.of(Fault::CoordinatorCrashed) > 0 && report.completed);
            check(&undisturbed, &report);
            crashes += 1;
        }
    }
    crashes
}

fn same_weights(undisturbed: &Report, report: &Report) {
    assert!(report.compared);
    assert_eq!(undisturbed.weights, report.weights);
}

#[test]
fn a_crash_before_any_command_changes_nothing_about_a_quiet_run() {
    let crashes = crash_everywhere(1, &Plan::small(), same_weights);
    assert!(crashes > 200, "only {crashes} crashes");
}

#[test]
fn a_crash_before_any_command_changes_nothing_about_a_run_over_nccl() {
    let crashes = crash_everywhere(1, &Plan::small_over_nccl(), same_weights);
    assert!(crashes > 200, "only {crashes} crashes");
}

/// The same weights, whichever way gradients take.
#[test]
fn sums_over_nccl_and_over_links_give_the_same_weights() {
    let weights = |plan| {
        let report = World::of(1, plan).run();
        report.unwrap_or_else(|violation| panic!("{violation}")).weights
    };
    assert_eq!(weights(Plan::small_over_nccl()), weights(Plan::small()));
}

/// The same weights, whichever way the slices of a verifier take.
#[test]
fn slices_over_nccl_and_over_links_give_the_same_weights() {
    let weights = |plan| {
        let report = World::of(1, plan).run();
        report.unwrap_or_else(|violation| panic!("{violation}")).weights
    };
    let over_nccl = weights(Plan::small_and_sharded_over_nccl());
    assert_eq!(over_nccl, weights(Plan::small_and_sharded()));
    let crashes = crash_everywhere(1, &Plan::small_and_sharded_over_nccl(), same_weights);
    assert!(crashes > 200, "only {crashes} crashes");
}

#[test]
fn a_crash_before_any_command_changes_nothing_about_a_run_with_faults() {
    let mut plan = Plan::small();
    plan.faults.lose_one_in = 40;
    plan.faults.disagree_one_in = 12;
    plan.faults.crash_loops = vec![(Seat::draft(1), 2)];
    plan.faults.timed = vec![(Fault::RankKilled, 60), (Fault::SeatRestarted, 90)];
    let crashes = crash_everywhere(2, &plan, same_weights);
    assert!(crashes > 400, "only {crashes} crashes");
}

/// What a growing run trains in which step depends on when it was read, so its weights are compared with its own journal
/// only. LIVENESS says that all samples are trained.
#[test]
fn a_crash_before_any_command_loses_nothing_of_a_growing_run() {
    let crashes = crash_everywhere(3, &Plan::small_and_growing(), |_, _| {});
    assert!(crashes > 200, "only {crashes} crashes");
}
