//! The engine's rules, alone and in a fake cluster.

mod setup;
mod world;

use std::collections::BTreeSet;

use eaglet_runtime::control::RankEvent;
use eaglet_runtime::ids::{Generation, Role, Seat, Unit};

use self::setup::{SAMPLES, settings};
use self::world::{Finished, World};
use super::{Command, Engine, Event, Outcome, RestartPolicy};

fn quiet() -> Finished {
    World::new(1, 0, 0).run()
}

#[test]
fn the_quiet_run_trains_every_accepted_sample_in_every_pass() {
    let finished = quiet();
    assert!(matches!(
        finished.outcome,
        Outcome::Completed {
            acceptance: Some(_),
            ..
        }
    ));
    let refused = (0..SAMPLES).filter(|line| line % 13 == 7).count() as u64;
    assert_eq!(finished.trained.len() as u64, 2 * (SAMPLES - refused));
}

fn same_as_quiet(seeds: std::ops::Range<u64>, kill_one_in: u64, crash_one_in: u64) -> (u32, u32) {
    let quiet = quiet();
    let (mut kills, mut crashes) = (0, 0);
    for seed in seeds {
        let finished = World::new(seed, kill_one_in, crash_one_in).run();
        assert!(
            matches!(finished.outcome, Outcome::Completed { .. }),
            "seed {seed}: {:?}",
            finished.outcome
        );
        assert_eq!(finished.weights, quiet.weights, "seed {seed}");
        assert_eq!(finished.trained, quiet.trained, "seed {seed}");
        kills += finished.kills;
        crashes += finished.crashes;
    }
    (kills, crashes)
}

#[test]
fn killed_ranks_change_nothing_about_the_weights() {
    let (kills, _) = same_as_quiet(100..160, 60, 0);
    assert!(kills > 200, "only {kills} kills");
}

#[test]
fn a_killed_coordinator_changes_nothing_about_the_weights() {
    let (_, crashes) = same_as_quiet(200..260, 0, 400);
    assert!(crashes > 60, "only {crashes} crashes");
}

#[test]
fn both_together_change_nothing_about_the_weights() {
    let (kills, crashes) = same_as_quiet(300..360, 120, 900);
    assert!(
        kills > 50 && crashes > 30,
        "only {kills} kills and {crashes} crashes"
    );
}

#[test]
fn a_refused_held_out_row_is_not_waited_for() {
    let mut world = World::new(1, 0, 0);
    world.refuses_held_out = true;
    let finished = world.run();
    assert!(
        matches!(finished.outcome, Outcome::Completed { acceptance: None, .. }),
        "{:?}",
        finished.outcome
    );
    assert_eq!(finished.weights, quiet().weights);
}

#[test]
fn a_refused_sample_is_quarantined_and_everything_else_is_trained() {
    let bad: fn(Unit) -> bool = |unit| unit.sample.0 % 20 == 3 && unit.pass == 1;
    let run = |seed, kill_one_in, crash_one_in| {
        let mut world = World::new(seed, kill_one_in, crash_one_in);
        world.refuses = Some(bad);
        world.run()
    };
    let expected: BTreeSet<Unit> = quiet().trained.into_iter().filter(|&unit| !bad(unit)).collect();
    let calm = run(1, 0, 0);
    assert_eq!(calm.trained, expected);
    for seed in 400..420 {
        let finished = run(seed, 90, 900);
        assert!(
            matches!(finished.outcome, Outcome::Completed { .. }),
            "seed {seed}: {:?}",
            finished.outcome
        );
        assert_eq!(finished.weights, calm.weights, "seed {seed}");
        assert!(finished.trained == expected, "seed {seed}");
    }
}

#[test]
fn a_verifier_that_refuses_everything_ends_the_run() {
    let mut world = World::new(1, 0, 0);
    world.refuses = Some(|_| true);
    world.take_in();
    while world.outcome.is_none() {
        world.step();
    }
    match world.outcome {
        Some(Outcome::Failed { report }) => assert!(report.contains("refused every sample"), "{report}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_keeps_dying_is_given_up_with_its_last_cause() {
    let mut settings = settings();
    settings.restarts.max_restarts = 2;
    let mut engine = Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing");
    let mut commands = engine.handle(0, Event::Tick);
    let seat = Seat::verifier(0);
    for generation in 0..3 {
        let generation = Generation(generation);
        let spawned = |c: &Command| matches!(c, Command::Spawn { seat: s, generation: g } if *s == seat && *g == generation);
        assert!(commands.iter().any(spawned), "{commands:?}");
        let lost = Event::Lost {
            seat,
            generation,
            cause: format!("cause {generation}"),
            log_tail: "oh".to_owned(),
        };
        commands = engine.handle(1000 * u64::from(generation.0 + 1), lost);
        commands.extend(engine.handle(1000 * u64::from(generation.0 + 1) + 500, Event::Tick));
    }
    commands.extend(engine.handle(20_000, Event::Tick));
    let report = commands.iter().find_map(|command| match command {
        Command::Finish(Outcome::Failed { report }) => Some(report.clone()),
        _ => None,
    });
    let report = report.expect("it is given up");
    assert!(
        report.contains("verifier-0 was lost 3 times") && report.contains("cause 2"),
        "{report}"
    );
    assert!(report.contains("oh"), "{report}");
}

#[test]
fn backoff_doubles_up_to_its_limit() {
    let policy = RestartPolicy {
        max_restarts: 9,
        window_ms: 1,
        backoff_initial_ms: 200,
        backoff_max_ms: 1000,
    };
    let waits = [0, 1, 2, 3, 4, 64, 65, u32::MAX].map(|recent| policy.backoff_ms(recent));
    assert_eq!(waits, [0, 200, 400, 800, 1000, 1000, 1000, 1000]);
}

#[test]
fn fence_an_older_generation_is_not_heard() {
    let mut engine = Engine::new(settings(), &[], 0).expect("an empty journal contradicts nothing");
    engine.handle(0, Event::Tick);
    let seat = Seat::verifier(0);
    let lost = Event::Lost {
        seat,
        generation: Generation(0),
        cause: "killed".to_owned(),
        log_tail: String::new(),
    };
    engine.handle(1, lost.clone());
    let from_the_dead = RankEvent::Fault {
        reason: "late".to_owned(),
        permanent: true,
    };
    let commands = engine.handle(
        2,
        Event::Rank {
            seat,
            generation: Generation(0),
            event: from_the_dead,
        },
    );
    assert_eq!(commands, Vec::new());
    assert_eq!(engine.handle(3, lost), Vec::new());
    let view = engine.view(3);
    let state = view
        .seats
        .iter()
        .find(|s| s.seat == seat)
        .expect("it has that seat");
    assert_eq!((state.generation, state.restarts), (Generation(1), 1));
    assert_eq!(state.seat.role, Role::Verifier);
}
