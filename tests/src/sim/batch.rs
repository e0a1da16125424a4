//! Many schedules, over some threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::fault::FaultCounts;
use super::invariants::Broken;
use super::world::{Report, Violation, World};

/// Seeds that a thread takes at once.
const SHARE: u64 = 64;

/// What some schedules were like, all together.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// Schedules.
    pub schedules: u64,
    /// Those that completed; the others failed for a reason that they were given.
    pub completed: u64,
    /// Failures on the way that were followed by a launch that completed.
    pub failures: u64,
    /// Those whose final weights were compared with the undisturbed run's.
    pub compared: u64,
    /// Launches.
    pub launches: u64,
    /// Steps committed.
    pub steps: u64,
    /// Things that happened.
    pub happened: u64,
    /// Events that engines took.
    pub events: u64,
    /// Commands that they gave.
    pub commands: u64,
    /// Virtual time.
    pub virtual_ms: u64,
    /// Faults by kind.
    pub faults: FaultCounts,
}

impl Totals {
    fn note(&mut self, report: &Report) {
        self.schedules += 1;
        self.completed += u64::from(report.completed);
        self.failures += u64::from(report.failures);
        self.compared += u64::from(report.compared);
        self.launches += u64::from(report.launches);
        self.steps += report.steps;
        self.happened += report.happened;
        self.events += report.events;
        self.commands += report.commands;
        self.virtual_ms += report.virtual_ms;
        self.faults.add(&report.counts);
    }

    fn add(&mut self, other: &Self) {
        self.schedules += other.schedules;
        self.completed += other.completed;
        self.failures += other.failures;
        self.compared += other.compared;
        self.launches += other.launches;
        self.steps += other.steps;
        self.happened += other.happened;
        self.events += other.events;
        self.commands += other.commands;
        self.virtual_ms += other.virtual_ms;
        self.faults.add(&other.faults);
    }
}

/// Runs one schedule; a panic of the engine is a violation, too.
///
/// # Errors
/// The violation, with the events before it.
pub fn run_one(seed: u64) -> Result<Report, Box<Violation>> {
    match catch(seed, || World::new(seed).run()) {
        Ok(report) => Ok(report),
        // The same schedule again, this time remembering what happens.
        Err(first) => match catch(seed, || World::new(seed).run_remembering()) {
            Err(again) => Err(again),
            Ok(_) => Err(first),
        },
    }
}

fn catch(seed: u64, run: impl FnOnce() -> Result<Report, Violation>) -> Result<Report, Box<Violation>> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(Box::new),
        Err(panic) => {
            let what = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                .unwrap_or_default();
            Err(Box::new(Violation {
                seed,
                at_ms: 0,
                broken: Broken {
                    invariant: "PANIC",
                    what,
                },
                last_events: Vec::new(),
            }))
        }
    }
}

/// Runs the schedules of `count` seeds from `first` on, on some threads, up to the given number of violations.
pub fn run_many(first: u64, count: u64, threads: usize, most_violations: usize) -> (Totals, Vec<Violation>) {
    let next = AtomicU64::new(first);
    let stop = AtomicBool::new(false);
    let totals = Mutex::new(Totals::default());
    let violations = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                let mut ours = Totals::default();
                while !stop.load(Ordering::Relaxed) {
                    let from = next.fetch_add(SHARE, Ordering::Relaxed);
                    if from >= first + count {
                        break;
                    }
                    for seed in from..(from + SHARE).min(first + count) {
                        match run_one(seed) {
                            Ok(report) => ours.note(&report),
                            Err(violation) => {
                                let mut violations =
                                    violations.lock().unwrap_or_else(PoisonError::into_inner);
                                violations.push(*violation);
                                if violations.len() >= most_violations {
                                    stop.store(true, Ordering::Relaxed);
                                }
                            }
                        }
                    }
                }
                totals.lock().unwrap_or_else(PoisonError::into_inner).add(&ours);
            });
        }
    });
    let mut violations = violations.into_inner().unwrap_or_else(PoisonError::into_inner);
    violations.sort_by_key(|violation| violation.seed);
    (
        totals.into_inner().unwrap_or_else(PoisonError::into_inner),
        violations,
    )
}
