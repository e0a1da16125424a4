//! Single rules of the engine; whole schedules against it are simulated in `tests/src/sim`.

mod collective;
mod held_out;
mod hosts;
mod lanes;
mod setup;
mod teams;

use eaglet_runtime::control::RankEvent;
use eaglet_runtime::ids::{Generation, Role, Seat};

use self::setup::settings;
use super::{Command, Engine, Event, Fall, LearningRate, Outcome, Pace, RestartPolicy, WhenExhausted};
use crate::engine::settings::{Length, Turn};

#[test]
fn a_role_that_keeps_dying_is_given_up_with_its_first_cause() {
    let mut settings = settings();
    settings.verifier_restarts.max_restarts = 2;
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
        report.contains("verifier-0 was lost 3 times")
            && report.contains("first cause: cause 0; last cause: cause 2"),
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
        then: WhenExhausted::Continue,
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

fn rate() -> LearningRate {
    LearningRate {
        peak: 1e-3,
        warmup_ratio: 0.1,
        fall: Fall::Linear,
    }
}

/// GROWTH: the rate never jumps when a run becomes longer, neither up nor down, and joins the stretched curve.
#[test]
fn growth_stretches_the_learning_rate_without_a_jump() {
    // (steps at first, steps when it grows): nearly at the end of the fall, and at the top of the warm-up.
    for (first, at) in [(10, 8), (100, 10)] {
        let before = rate().at(at - 1, Length::Whole(first), Pace::default());
        let turned = Some(Turn { at, rate: before });
        let pace = Pace { turned, closed: None };
        let stretched = rate().schedule(1000);
        let slope = 1e-3 / stretched.warmup_steps as f64;
        let mut last = before;
        for step in at..1000 {
            let now = rate().at(step, Length::Whole(1000), pace);
            assert!((now - last).abs() <= slope * 1.000_001, "it jumps at step {step}");
            last = now;
        }
        for step in [300, 999] {
            assert_eq!(
                rate().at(step, Length::Whole(1000), pace),
                stretched.learning_rate(step)
            );
        }
    }
}

/// While nobody knows the end the rate stays; once it is known the rate falls to zero over what is left.
#[test]
fn an_open_run_keeps_its_learning_rate_until_it_is_closed() {
    let open = |step, total| rate().at(step, Length::SoFar(total), Pace::default());
    assert_eq!(
        [0, 1, 10, 99, 5000].map(|step| open(step, 100)),
        [0.0, 1e-4, 1e-3, 1e-3, 1e-3]
    );
    let closed = Some(Turn { at: 600, rate: 1e-3 });
    let pace = Pace { turned: None, closed };
    let after = |step| rate().at(step, Length::Whole(1000), pace);
    assert_eq!([600, 800, 1000].map(after), [1e-3, 5e-4, 0.0]);
}
