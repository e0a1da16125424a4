//! What the control plane carries and hears of NCCL between the slices of a verifier.

use eaglet_runtime::control::{Beat, CollectiveId};

use super::*;
use crate::engine::Outcome;

fn id(byte: u8) -> CollectiveId {
    CollectiveId::new(&[byte; CollectiveId::BYTES])
}

fn offer(cluster: &mut Cluster, seat: u16, epoch: Epoch, byte: u8) {
    cluster.say(seat, 0, RankEvent::CollectiveId { epoch, id: id(byte) });
}

fn meets(cluster: &mut Cluster) -> Vec<(u16, Epoch, CollectiveId)> {
    std::mem::take(&mut cluster.told)
        .into_iter()
        .filter_map(|(seat, command)| match command {
            CoordinatorCommand::Meet { epoch, id } => Some((seat.index, epoch, id)),
            _ => None,
        })
        .collect()
}

/// FENCE: two stages of two slices.
#[test]
fn an_id_is_passed_on_once_an_epoch_from_the_first_slice_of_a_stage_to_the_others_of_it() {
    let mut cluster = Cluster::new(1);
    let epoch = Epoch::first_of(1);
    offer(&mut cluster, 0, Epoch(epoch.0 - 1), 1);
    offer(&mut cluster, 1, epoch, 2);
    assert_eq!(meets(&mut cluster), []);
    offer(&mut cluster, 2, epoch, 3);
    assert_eq!(meets(&mut cluster), [(3, epoch, id(3))]);
    offer(&mut cluster, 0, epoch, 4);
    offer(&mut cluster, 0, epoch, 5);
    offer(&mut cluster, 2, epoch, 3);
    assert_eq!(meets(&mut cluster), [(1, epoch, id(4))]);
    // The next epoch has ids of its own.
    break_off(&mut cluster, epoch);
    wait(&mut cluster);
    let next = epoch.next();
    offer(&mut cluster, 0, epoch, 4);
    assert_eq!(meets(&mut cluster), []);
    offer(&mut cluster, 0, next, 6);
    assert_eq!(meets(&mut cluster), [(1, next, id(6))]);
}

fn break_off(cluster: &mut Cluster, epoch: Epoch) {
    for seat in [0, 1] {
        let reason = "a peer is gone or late".to_owned();
        cluster.say(seat, 0, RankEvent::CollectiveBroken { epoch, reason });
    }
}

fn wait(cluster: &mut Cluster) {
    for _ in 0..40 {
        cluster.feed(Event::Tick);
    }
}

#[test]
fn a_team_whose_collectives_broke_is_formed_again_unless_that_goes_on_without_a_row() {
    let mut cluster = Cluster::new(1);
    let mut epoch = Epoch::first_of(1);
    let mut broken_since_a_row = 0;
    for round in 0..6 {
        cluster.join(&ALL, epoch);
        if round == 1 {
            let Given { row, lease, .. } = cluster.given[cluster.given.len() - 1].clone();
            for (seat, generation) in ALL {
                let tokens = 9;
                cluster.say(seat, generation, RankEvent::Extracted { row, lease, tokens });
            }
            broken_since_a_row = 0;
        }
        break_off(&mut cluster, epoch);
        broken_since_a_row += 1;
        assert!(cluster.outcome.is_none(), "{broken_since_a_row} of 5");
        if broken_since_a_row == 5 {
            break;
        }
        wait(&mut cluster);
        epoch = epoch.next();
        assert_eq!(cluster.invited(epoch).len(), 4, "round {round}");
    }
    while cluster.outcome.is_none() && cluster.now_ms < 60_000 {
        cluster.feed(Event::Tick);
    }
    let Some(Outcome::Failed { report }) = &cluster.outcome else {
        panic!("{:?}", cluster.outcome)
    };
    assert!(
        report.contains("5 times in a row without a row")
            && report.contains("set verifier.collective = \"links\""),
        "{report}"
    );
    assert_eq!(broken_since_a_row, 5);
}

#[test]
fn who_waits_for_the_other_slices_to_meet_is_not_blamed_for_those_who_do_not_come() {
    let mut cluster = Cluster::new(1);
    let killed = |cluster: &Cluster| -> Vec<Seat> {
        let verifiers = cluster.killed.iter().filter(|seat| seat.role == Role::Verifier);
        verifiers.copied().collect()
    };
    cluster.join(&ALL[2..], Epoch::first_of(1));
    while killed(&cluster).is_empty() && cluster.now_ms < 120_000 {
        for (seat, generation) in ALL {
            let activity = if seat == 0 {
                Activity::Meeting
            } else {
                Activity::Idle
            };
            let beat = Beat {
                activity,
                ..Beat::default()
            };
            cluster.say(seat, generation, RankEvent::Beat(beat));
        }
        cluster.feed(Event::Tick);
    }
    assert_eq!(killed(&cluster), [Seat::verifier(1)]);
}

#[test]
fn a_slice_that_never_comes_is_replaced_before_nccl_is_blamed() {
    let mut cluster = Cluster::new(1);
    let epoch = Epoch::first_of(1);
    cluster.join(&ALL[2..], epoch);
    let activities = [Activity::Meeting, Activity::Extracting, Activity::Idle, Activity::Idle];
    for ((seat, generation), activity) in ALL.into_iter().zip(activities) {
        let beat = Beat {
            activity,
            ..Beat::default()
        };
        cluster.say(seat, generation, RankEvent::Beat(beat));
    }
    // Who waited gives up, long before the team has had its time.
    let reason = "the others did not come".to_owned();
    cluster.say(0, 0, RankEvent::CollectiveBroken { epoch, reason });
    wait(&mut cluster);
    assert_eq!(cluster.killed, [Seat::verifier(1)]);
    assert!(cluster.outcome.is_none());
}
