//! What the control plane carries and hears of NCCL.

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::control::{
    Activity, Beat, CollectiveId, CoordinatorCommand, DraftOrigin, Handover, RankEvent,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};

use super::lanes::Group;
use super::setup::settings;
use crate::engine::{Engine, Event, Outcome, ReplayError};
use crate::journal::Record;

fn id(byte: u8) -> CollectiveId {
    CollectiveId::new(&[byte; CollectiveId::BYTES])
}

/// A group whose members are invited and have not met.
fn meeting() -> Group {
    let mut group = Group::new();
    group.meets = false;
    group.lose(Seat::draft(1), Generation(0));
    group.feed(Event::Tick);
    assert_eq!(group.members, [0, 1, 2]);
    group.told.clear();
    group
}

fn offer(group: &mut Group, seat: u16, generation: u32, epoch: Epoch, byte: u8) {
    let event = RankEvent::CollectiveId { epoch, id: id(byte) };
    group.say(Seat::draft(seat), Generation(generation), event);
}

fn meets(group: &mut Group) -> Vec<(Seat, Epoch, CollectiveId)> {
    std::mem::take(&mut group.told)
        .into_iter()
        .filter_map(|(seat, command)| match command {
            CoordinatorCommand::Meet { epoch, id } => Some((seat, epoch, id)),
            _ => None,
        })
        .collect()
}

/// FENCE
#[test]
fn an_id_is_passed_on_once_in_its_epoch_from_the_first_member_to_the_others() {
    let mut group = meeting();
    let (epoch, old) = (group.epoch, Epoch(group.epoch.0 - 1));
    offer(&mut group, 0, 0, old, 1);
    offer(&mut group, 2, 0, epoch, 2);
    assert_eq!(meets(&mut group), []);
    offer(&mut group, 0, 0, epoch, 3);
    let others = [1, 2].map(|seat| (Seat::draft(seat), epoch, id(3)));
    assert_eq!(meets(&mut group), others);
    offer(&mut group, 0, 0, epoch, 3);
    offer(&mut group, 0, 0, epoch, 4);
    assert_eq!(meets(&mut group), []);
    // The next epoch has an id of its own.
    group.lose(Seat::draft(2), Generation(0));
    group.feed(Event::Tick);
    assert!(group.epoch > epoch);
    offer(&mut group, 0, 0, epoch, 3);
    assert_eq!(meets(&mut group), []);
    let epoch = group.epoch;
    offer(&mut group, 0, 0, epoch, 5);
    assert_eq!(meets(&mut group).len(), 2);
}

#[test]
fn who_waits_for_the_others_to_meet_is_not_blamed_for_those_who_do_not_come() {
    let mut group = meeting();
    let beat = |activity| {
        RankEvent::Beat(Beat {
            activity,
            ..Beat::default()
        })
    };
    let seats = [(0, 0), (1, 1), (2, 0)];
    let killed = |group: &Group| -> Vec<Seat> {
        let drafts = group.killed.iter().filter(|seat| seat.role == Role::Draft);
        drafts.copied().collect()
    };
    while killed(&group).is_empty() && group.now_ms < 120_000 {
        for (seat, generation) in seats {
            let activity = if seat == 2 {
                Activity::Idle
            } else {
                Activity::Meeting
            };
            group.say(Seat::draft(seat), Generation(generation), beat(activity));
        }
        group.feed(Event::Tick);
    }
    assert_eq!(killed(&group), [Seat::draft(2)]);
}

fn break_off(group: &mut Group) {
    let epoch = group.epoch;
    for (seat, generation) in [(0, 0), (1, 1)] {
        let reason = "a peer is gone or late".to_owned();
        let event = RankEvent::CollectiveBroken { epoch, reason };
        group.say(Seat::draft(seat), Generation(generation), event);
    }
}

#[test]
fn an_epoch_whose_collectives_broke_is_formed_again_unless_that_goes_on() {
    let mut group = meeting();
    for _ in 0..4 {
        let before = group.epoch;
        break_off(&mut group);
        assert_eq!(group.epoch, before, "most often somebody has just died");
        for _ in 0..40 {
            group.feed(Event::Tick);
        }
        assert_eq!(group.epoch, before.next(), "and it is told once");
        // FENCE: what was said of the last epoch is over with it.
        let reason = "late".to_owned();
        let event = RankEvent::CollectiveBroken {
            epoch: before,
            reason,
        };
        group.say(Seat::draft(2), Generation(0), event);
    }
    break_off(&mut group);
    // Ranks that were told to leave have their time.
    while group.outcome.is_none() && group.now_ms < 60_000 {
        group.feed(Event::Tick);
    }
    let Some(Outcome::Failed { report }) = &group.outcome else {
        panic!("{:?}", group.outcome)
    };
    assert!(
        report.contains("5 times in a row without a step") && report.contains("a peer is gone or late"),
        "{report}"
    );
}

/// Three replicas whose states go over NCCL, of which the second was lost and is there again.
fn healing(meets: bool) -> Group {
    let mut settings = settings();
    settings.broadcasts_state = true;
    let mut group = Group::with(settings);
    assert!(group.engine.formed && group.handover.is_none());
    group.meets = meets;
    group.origins.clear();
    group.lose(Seat::draft(1), Generation(0));
    group.feed(Event::Tick);
    group
}

fn handover(donor: u16, receivers: &[u16]) -> Option<Handover> {
    Some(Handover {
        donor,
        receivers: receivers.to_vec(),
        step: Step(0),
        state: Digest::of(b"initial"),
    })
}

/// HANDOVER
#[test]
fn a_replacement_is_invited_without_a_state_and_takes_it_in_the_epoch() {
    let group = healing(true);
    assert_eq!(group.origins, [(Seat::draft(1), DraftOrigin::Later)]);
    assert_eq!(group.handover, handover(0, &[1]));
    assert_eq!(group.members, [0, 1, 2]);
    assert!(group.engine.formed);
    let sent =
        |(_, command): &(Seat, CoordinatorCommand)| matches!(command, CoordinatorCommand::SendState { .. });
    assert!(!group.told.iter().any(sent), "{:?}", group.told);
}

/// HANDOVER, FENCE
#[test]
fn an_epoch_is_formed_when_its_receivers_hold_the_very_state_that_was_given() {
    let mut group = healing(false);
    let epoch = group.epoch;
    for (seat, generation) in [(0, 0), (1, 1), (2, 0)] {
        let ready = RankEvent::GroupReady { epoch };
        group.say(Seat::draft(seat), Generation(generation), ready);
    }
    assert!(!group.engine.formed, "one of them has no state");
    let taken = |epoch, state: &[u8]| RankEvent::StateTaken {
        epoch,
        step: Step(0),
        state: Digest::of(state),
    };
    group.say(
        Seat::draft(1),
        Generation(1),
        taken(Epoch(epoch.0 - 1), b"initial"),
    );
    // Who was given nothing has taken nothing.
    group.say(Seat::draft(2), Generation(0), taken(epoch, b"initial"));
    assert!(!group.engine.formed);
    group.say(Seat::draft(1), Generation(1), taken(epoch, b"initial"));
    assert!(group.engine.formed);

    let mut group = healing(false);
    let epoch = group.epoch;
    group.say(Seat::draft(1), Generation(1), taken(epoch, b"damaged"));
    assert!(!group.engine.formed);
    assert_eq!(group.killed, [Seat::draft(1)]);
}

/// HANDOVER: a receiver of an epoch that came to nothing holds a part of a state, which is none.
#[test]
fn a_donor_that_dies_is_followed_by_another_one_and_at_last_by_the_initial_weights() {
    let mut group = healing(false);
    group.lose(Seat::draft(0), Generation(0));
    group.feed(Event::Tick);
    assert_eq!(group.handover, handover(2, &[0, 1]));
    group.origins.clear();
    group.lose(Seat::draft(2), Generation(0));
    for _ in 0..40 {
        group.feed(Event::Tick);
    }
    let initial = |seat| (Seat::draft(seat), DraftOrigin::Initial);
    for seat in [0, 1, 2] {
        assert!(group.origins.contains(&initial(seat)), "{:?}", group.origins);
    }
    assert_eq!((group.handover, group.members), (None, vec![0, 1, 2]));
}

/// The mode stands in the journal, and another one is refused.
#[test]
fn a_run_with_fast_sums_is_not_gone_on_with_by_exact_ones() {
    let mut fast = settings();
    fast.sums = SumMode::Fast;
    let record = Record::Sums { mode: SumMode::Fast };
    let engine = Engine::new(fast, std::slice::from_ref(&record), 0);
    engine.expect("the same mode").launch();
    let Err(ReplayError::OtherRun { what }) = Engine::new(settings(), &[record], 0) else {
        panic!("another mode")
    };
    assert!(what.contains("fast sums of gradients (training.sums)"), "{what}");
}
