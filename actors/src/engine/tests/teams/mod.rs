//! TEAM: replicas of a verifier of two stages and two slices, as their members come and go.

mod cluster;
mod collective;

use eaglet_runtime::control::{Activity, CoordinatorCommand, RankEvent, Turn};
use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat, Unit};

use self::cluster::{Cluster, Given, sharded};
use super::setup::settings;
use crate::engine::{Engine, Event, SeatChange};
use crate::journal::Record;

const ALL: [(u16, u32); 4] = [(0, 0), (1, 0), (2, 0), (3, 0)];

#[test]
fn a_team_gets_rows_once_all_members_are_linked_up_and_one_more_than_it_has_stages() {
    let mut cluster = Cluster::new(1);
    let epoch = Epoch::first_of(1);
    let members = ALL.to_vec();
    assert_eq!(
        cluster.invited(epoch),
        [0, 1, 2, 3].map(|index| (index, members.clone()))
    );
    cluster.join(&ALL[..3], epoch);
    assert_eq!(cluster.given, []);
    cluster.join(&ALL[3..], epoch);
    let given = cluster.given.clone();
    assert_eq!(given.len(), 3, "{given:#?}");
    // The first turn is the check.
    let checked = cluster.told.iter().filter(
        |(_, command)| matches!(command, CoordinatorCommand::CheckVerifier { turn } if *turn == Turn { epoch, number: 0 }),
    );
    assert_eq!(
        checked.map(|(seat, _)| seat.index).collect::<Vec<_>>(),
        [0, 1, 2, 3]
    );
    for (number, given) in (1..).zip(&given) {
        assert_eq!(given.members, [0, 1, 2, 3]);
        assert_eq!(given.turn, Turn { epoch, number });
    }
    // A row is out of the way when all of its shards have said so.
    let Given { row, lease, .. } = given[0];
    let done = RankEvent::Extracted {
        row,
        lease,
        tokens: 9,
    };
    for index in [2, 0, 3, 3] {
        cluster.say(index, 0, done.clone());
        assert_eq!(cluster.given.len(), 3);
    }
    cluster.say(1, 0, done);
    assert_eq!(cluster.given.len(), 4);
    assert_eq!(cluster.given[3].turn, Turn { epoch, number: 4 });
    assert_eq!(cluster.engine.view(cluster.now_ms).extracted_tokens, 9);
}

#[test]
fn a_lost_member_voids_what_its_team_had_and_the_others_wait_for_its_replacement() {
    let mut cluster = Cluster::new(2);
    let first = Epoch::first_of(1);
    cluster.join(&ALL, first);
    let before = cluster.given.clone();
    assert_eq!(before.len(), 3);
    cluster.lose(2, 0);
    let second = first.next();
    assert_eq!(cluster.abandoned(second), [0, 1, 3]);
    assert_eq!(cluster.engine.ledger().leased, 0, "TEAM-2");
    // FENCE: an answer of the epoch that is over is not heard.
    let Given { row, lease, .. } = before[0];
    for index in [0, 1, 3] {
        cluster.say(
            index,
            0,
            RankEvent::Extracted {
                row,
                lease,
                tokens: 9,
            },
        );
        let unit = before[0].units.first().copied();
        let reason = "late".to_owned();
        cluster.say(
            index,
            0,
            RankEvent::BadSample {
                row,
                lease,
                unit,
                reason,
            },
        );
    }
    assert_eq!(cluster.engine.ledger().quarantined, 0);
    assert_eq!(cluster.given.len(), 3, "nobody works meanwhile");
    // The other replica does not wait for this one.
    cluster.join(&[4, 5, 6, 7].map(|index| (index, 0)), first);
    let taken: Vec<(Vec<u16>, RowId)> = cluster.given[3..]
        .iter()
        .map(|given| (given.members.clone(), given.row))
        .collect();
    let rows: Vec<RowId> = before.iter().map(|given| given.row).collect();
    assert_eq!(
        taken,
        rows.iter()
            .map(|&row| (vec![4, 5, 6, 7], row))
            .collect::<Vec<_>>()
    );
    // With the replacement a new epoch is formed, and its turns count from 0.
    cluster.arrive(Seat::verifier(2), Generation(1));
    let members = vec![(0, 0), (1, 0), (2, 1), (3, 0)];
    assert_eq!(
        cluster.invited(second),
        [0, 1, 2, 3].map(|index| (index, members.clone()))
    );
    cluster.join(&members, second);
    let next = &cluster.given[6];
    assert_eq!(
        (next.turn, &next.members[..]),
        (
            Turn {
                epoch: second,
                number: 1
            },
            &[0, 1, 2, 3][..]
        )
    );
}

#[test]
fn each_shard_may_refuse_a_sample_and_it_is_quarantined_once() {
    let mut cluster = Cluster::new(1);
    cluster.join(&ALL, Epoch::first_of(1));
    let Given {
        row, lease, units, ..
    } = cluster.given[0].clone();
    let refused = |unit: Unit| RankEvent::BadSample {
        row,
        lease,
        unit: Some(unit),
        reason: "not finite".to_owned(),
    };
    cluster.say(
        0,
        0,
        RankEvent::Extracted {
            row,
            lease,
            tokens: 9,
        },
    );
    cluster.say(2, 0, refused(units[1]));
    // The others still have to answer for it before their team has room.
    assert_eq!(cluster.given.len(), 3);
    cluster.say(3, 0, refused(units[1]));
    cluster.say(
        1,
        0,
        RankEvent::Extracted {
            row,
            lease,
            tokens: 9,
        },
    );
    assert_eq!(cluster.engine.ledger().quarantined, 1);
    let again = &cluster.given[3];
    assert_eq!((again.row, &again.units[..]), (row, &units[..1]));
}

#[test]
fn who_hangs_is_killed_and_not_those_who_wait_for_it() {
    let mut cluster = Cluster::new(1);
    cluster.join(&ALL, Epoch::first_of(1));
    let limit_ms = settings().step_timeout_ms;
    let waits = (Activity::AwaitingPeers, limit_ms + 5);
    cluster.beat(&[
        (0, Activity::Idle, limit_ms + 5),
        (1, Activity::Extracting, limit_ms + 5),
        (2, waits.0, waits.1),
        (3, waits.0, waits.1),
    ]);
    cluster.feed(Event::Tick);
    assert_eq!(cluster.killed, [Seat::verifier(1)]);
}

#[test]
fn a_team_of_which_nobody_works_is_formed_again_and_a_member_that_does_not_join_is_killed() {
    let mut cluster = Cluster::new(1);
    let first = Epoch::first_of(1);
    cluster.join(&ALL, first);
    let idle = [0, 1, 2, 3].map(|index| (index, Activity::AwaitingPeers, 0));
    let patience = |cluster: &mut Cluster, ms: u64| {
        let until_ms = cluster.now_ms + ms;
        while cluster.now_ms < until_ms {
            // With the beats less than what makes the engine think that it was held up itself.
            cluster.now_ms += 400;
            cluster.beat(&idle);
            cluster.feed(Event::Tick);
        }
    };
    patience(&mut cluster, settings().step_timeout_ms + 2_000);
    let second = first.next();
    assert_eq!(cluster.invited(second).len(), 4);
    assert!(
        cluster
            .notices
            .iter()
            .any(|text| text.contains("nothing was heard of the row of step 0 in lane 0")),
        "{:?}",
        cluster.notices
    );
    cluster.join(&[ALL[0], ALL[1], ALL[3]], second);
    cluster.killed.clear();
    patience(&mut cluster, settings().team_timeout_ms + 2_000);
    // Drafts that never load are killed, too.
    cluster.killed.retain(|seat| seat.role == Role::Verifier);
    cluster.killed.dedup();
    assert_eq!(cluster.killed, [Seat::verifier(2)]);
}

#[test]
fn replicas_come_and_go_as_a_whole() {
    let mut cluster = Cluster::new(1);
    let refused = cluster.answer(SeatChange::Remove {
        seat: Seat::verifier(2),
    });
    assert!(
        refused
            .as_ref()
            .is_err_and(|why| why.contains("verifier-2 is part of the only whole verifier replica")),
        "{refused:?}"
    );
    let added = cluster.answer(SeatChange::Add {
        role: Role::Verifier,
        threads: 1,
    });
    assert_eq!(
        added.as_deref(),
        Ok(
            "verifier-4, verifier-5, verifier-6 and verifier-7 are starting; they take rows once all of them have loaded"
        )
    );
    let removed = cluster.answer(SeatChange::Remove {
        seat: Seat::verifier(2),
    });
    assert_eq!(
        removed.as_deref(),
        Ok("verifier-0, verifier-1, verifier-2 and verifier-3 leave now: they are one verifier")
    );
    for index in 0..4 {
        cluster.lose(index, 0);
    }
    let seats = |engine: &Engine| -> Vec<u16> {
        let view = engine.view(0);
        let here = view
            .seats
            .iter()
            .filter(|seat| seat.seat.role == Role::Verifier && seat.status != "gone");
        here.map(|seat| seat.seat.index).collect()
    };
    assert_eq!(seats(&cluster.engine), [4, 5, 6, 7]);
    let back = cluster.answer(SeatChange::Restart {
        seat: Seat::verifier(1),
    });
    assert_eq!(
        back.as_deref(),
        Ok("verifier-0, verifier-1, verifier-2 and verifier-3 are starting")
    );
    assert_eq!(seats(&cluster.engine), [0, 1, 2, 3, 4, 5, 6, 7]);

    // A later launch has the same seats; if the journal was torn in the middle of a change, whole replicas only.
    let replay = |records: &[Record]| {
        let engine = Engine::new(sharded(1), records, 0).expect("the journal is sound");
        seats(&engine)
    };
    let changes: Vec<usize> = (0..cluster.records.len())
        .filter(|&at| {
            matches!(
                cluster.records[at],
                Record::SeatAdded { .. } | Record::SeatRemoved { .. }
            )
        })
        .collect();
    assert_eq!(changes.len(), 12);
    let whole = [[0, 1, 2, 3].as_slice(), &[0, 1, 2, 3, 4, 5, 6, 7], &[4, 5, 6, 7]];
    let kept = changes
        .iter()
        .map(|&at| replay(&cluster.records[..at]))
        .collect::<Vec<_>>();
    for (number, seats) in kept.iter().enumerate() {
        let expected = match number {
            0..4 => whole[0],
            4 => whole[1],
            _ => whole[2],
        };
        assert_eq!(seats, expected, "{number} records of changes");
    }
    assert_eq!(replay(&cluster.records), whole[1]);
}

#[test]
fn a_replica_of_which_a_seat_is_given_up_is_no_verifier() {
    let mut settings = sharded(2);
    settings.verifier_restarts.max_restarts = 0;
    let mut engine = Engine::new(settings, &[], 0).expect("an empty journal contradicts nothing");
    engine.launch();
    let lose = |engine: &mut Engine, index: u16| {
        engine.handle(10, Event::Tick);
        let commands = engine.handle(
            20,
            Event::Lost {
                seat: Seat::verifier(index),
                generation: Generation(0),
                cause: "killed".to_owned(),
                log_tail: String::new(),
            },
        );
        format!("{commands:?}")
    };
    let said = lose(&mut engine, 1);
    assert!(
        said.contains("the run goes on with 1 whole verifier replica, and"),
        "{said}"
    );
    let said = lose(&mut engine, 6);
    assert!(
        said.contains("Quit") || said.contains("the run is over"),
        "{said}"
    );
    assert!(matches!(
        engine.phase(),
        crate::engine::Phase::Leaving | crate::engine::Phase::Finished
    ));
}
