//! `eaglet-sim`: simulated schedules of whole clusters around the real engine.

#![allow(clippy::print_stdout)]

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use eaglet_tests::sim::batch::{Totals, run_many, run_one};
use eaglet_tests::sim::world::World;

/// Runs simulated schedules and checks the engine's invariants in each.
#[derive(Parser)]
struct Arguments {
    /// How many schedules.
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Threads; 0 is one for each core.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Ends after so many violations.
    #[arg(long, default_value_t = 3)]
    violations: usize,
    /// Only this schedule.
    #[arg(long)]
    seed: Option<u64>,
    /// Tell everything that happens in it.
    #[arg(long, requires = "seed")]
    trace: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.seed {
        Some(seed) => one(seed, arguments.trace),
        None => many(&arguments),
    }
}

fn one(seed: u64, trace: bool) -> ExitCode {
    let result = if trace {
        let world = World::new(seed).traced(|line| println!("{line}"));
        world.run().map_err(Box::new)
    } else {
        run_one(seed)
    };
    match result {
        Ok(report) => {
            println!("{report:#?}");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            println!("{violation}");
            ExitCode::FAILURE
        }
    }
}

fn many(arguments: &Arguments) -> ExitCode {
    let threads = match arguments.threads {
        0 => std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
        threads => threads,
    };
    // A violation is told once, at the end; a panic of the engine is one.
    std::panic::set_hook(Box::new(|_| {}));
    let begun = Instant::now();
    let (totals, violations) = run_many(arguments.from, arguments.seeds, threads, arguments.violations);
    tell(&totals, begun.elapsed().as_secs_f64(), threads);
    for violation in &violations {
        println!("\n{violation}");
    }
    if violations.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn tell(totals: &Totals, seconds: f64, threads: usize) {
    println!(
        "{} schedules in {seconds:.1} s on {threads} threads: {:.0} per second",
        totals.schedules,
        totals.schedules as f64 / seconds.max(1e-9),
    );
    println!(
        "{} completed, {} failed for the reason they were given; {} failures on the way; {} compared with the quiet run",
        totals.completed,
        totals.schedules - totals.completed,
        totals.failures,
        totals.compared,
    );
    println!(
        "{} launches, {} steps, {:.1} hours of virtual time; {} things happened, {} events, {} commands",
        totals.launches,
        totals.steps,
        totals.virtual_ms as f64 / 3.6e6,
        totals.happened,
        totals.events,
        totals.commands,
    );
    for (fault, count) in totals.faults.iter() {
        println!("  {count:>12}  {}", fault.name());
    }
}
