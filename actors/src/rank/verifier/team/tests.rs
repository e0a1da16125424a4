//! Members of a team over real links, each in a thread of one process.

use crossbeam_channel::{Sender, unbounded};
use eaglet_runtime::collective::ShardPeers;
use eaglet_runtime::ids::{Generation, Seat};
use eaglet_runtime::link::{BulkListener, ListenerOptions};
use eaglet_runtime::verifier::Peers;

use super::*;

/// A ring and queues that hold a fraction of what is sent.
fn narrow() -> SenderOptions {
    SenderOptions {
        slots: 2,
        slot_bytes: 4096,
        queue_messages: 2,
        queue_bytes: 8192,
        ..SenderOptions::default()
    }
}

/// A member of a team in a thread of this process.
struct Rank {
    member: Member,
    inputs: Sender<Input>,
    inbox: Inbox,
    listener: BulkListener,
    team: Team,
}

fn ranks(name: &str, stages: u16, slices: u16) -> Vec<Rank> {
    (0..stages * slices)
        .map(|index| {
            let member = Member {
                seat: index,
                generation: Generation(0),
                bulk_name: format!("eaglet-team-{name}-{}-{index}", std::process::id()),
            };
            let (inputs, arriving) = unbounded();
            let here = inputs.clone();
            let options = ListenerOptions {
                held_bytes_per_connection: 8192,
                ..ListenerOptions::default()
            };
            let listener = BulkListener::bind(
                &member.bulk_name,
                endpoint(&member),
                options,
                None,
                move |event| {
                    // The test may be over.
                    let _ = here.send(Input::Bulk(event));
                },
            );
            Rank {
                member,
                inputs,
                inbox: Inbox::new(arriving),
                listener: listener.expect("the name is free"),
                team: Team::new(Shard::nth(index, stages, slices)),
            }
        })
        .collect()
}

fn endpoint(member: &Member) -> Endpoint {
    Endpoint {
        seat: Seat::verifier(member.seat),
        generation: member.generation,
    }
}

/// Links all of them up, and runs a program on each in a thread of its own.
fn all<T: Send>(
    ranks: Vec<Rank>,
    program: impl Fn(&mut ShardPeers<Talk<'_>>, Shard) -> T + Sync,
) -> Vec<(T, Activity)> {
    let epoch = Epoch::first_of(1);
    let members: Vec<Member> = ranks.iter().map(|rank| rank.member.clone()).collect();
    let (program, members) = (&program, &members);
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut rank| {
                let linked = rank
                    .team
                    .join(endpoint(&rank.member), epoch, members.clone(), narrow);
                linked.expect("all of them listen");
                scope.spawn(move || {
                    let gauge = ActivityGauge::default();
                    gauge.enter(Activity::Extracting);
                    let own = rank.team.own;
                    let talk = Talk {
                        gauge: &gauge,
                        team: &mut rank.team,
                        inbox: &mut rank.inbox,
                        activity: Activity::Extracting,
                        turn: 1,
                        step: None,
                    };
                    let result = program(&mut ShardPeers::new(own, talk), own);
                    while !rank.team.flush().expect("no message is too large") {
                        std::thread::sleep(ROOM_INTERVAL);
                    }
                    // The others may still be taking what this one has sent.
                    (result, gauge.read().activity, rank)
                })
            })
            .collect();
        let ended: Vec<_> = threads
            .into_iter()
            .map(|thread| thread.join().expect("no member panics"))
            .collect();
        ended
            .into_iter()
            .map(|(result, activity, _)| (result, activity))
            .collect()
    })
}

/// SHARDS-2: all send more than rings, queues and budgets hold before anybody receives.
#[test]
fn members_that_send_to_each_other_do_not_hold_each_other_up() {
    const ELEMENTS: usize = 200_000;
    let results = all(ranks("full", 2, 3), |peers, shard| {
        let mut values = vec![f32::from(shard.slice) + 1.0; ELEMENTS];
        if shard.is_first() {
            for _ in 0..3 {
                peers.pass_on(&values)?;
            }
        }
        peers.sum(&mut values)?;
        let mut whole = Vec::new();
        peers.gather(&values[..ELEMENTS / 2], &mut whole)?;
        let mut residual = vec![0.0; ELEMENTS];
        if shard.is_last() {
            for _ in 0..3 {
                peers.take_over(&mut residual)?;
            }
            assert!(
                residual
                    .iter()
                    .all(|value| *value == f32::from(shard.slice) + 1.0)
            );
        }
        Ok::<bool, Interrupted>(whole.len() == 3 * (ELEMENTS / 2) && whole.iter().all(|value| *value == 6.0))
    });
    assert_eq!(results, vec![(Ok(true), Activity::Extracting); 6]);
}

/// SHARDS-1: whoever waits is interrupted by what begins a newer epoch, and by nothing else.
#[test]
fn a_newer_epoch_ends_a_wait_and_an_older_one_does_not() {
    let mut ranks = ranks("newer", 1, 2);
    let first = Epoch::first_of(1);
    let waiting = &ranks[0].inputs;
    for command in [
        CoordinatorCommand::Abandon { epoch: first },
        CoordinatorCommand::LoadVerifier,
        CoordinatorCommand::Abandon { epoch: first.next() },
        CoordinatorCommand::Quit,
    ] {
        waiting.send(Input::Command(command)).expect("the inbox is there");
    }
    let gauge = ActivityGauge::default();
    let mut rank = ranks.remove(0);
    let members = vec![rank.member.clone(), ranks[0].member.clone()];
    let linked = rank.team.join(endpoint(&rank.member), first, members, narrow);
    linked.expect("both listen");
    let talk = Talk {
        gauge: &gauge,
        team: &mut rank.team,
        inbox: &mut rank.inbox,
        activity: Activity::Extracting,
        turn: 0,
        step: None,
    };
    let result = ShardPeers::new(Shard::nth(0, 1, 2), talk).sum(&mut [1.0]);
    assert!(result.is_err_and(|interrupted| interrupted.reason.contains("formed anew")));
    // What was said before and with it comes out again, in order; what came later is still to come.
    let mut heard = Vec::new();
    while let Ok(Input::Command(command)) = rank.inbox.next(Some(Duration::ZERO)) {
        heard.push(format!("{command:?}"));
    }
    assert_eq!(heard.len(), 4, "{heard:?}");
    assert!(heard[1] == "LoadVerifier" && heard[3] == "Quit", "{heard:?}");
    rank.listener.close();
}

/// SHARDS-3: two members that are at different rows do not compute with what the other one says.
#[test]
fn members_that_are_not_at_the_same_place_end() {
    let mut both = ranks("apart", 1, 2);
    let members: Vec<Member> = both.iter().map(|rank| rank.member.clone()).collect();
    for rank in &mut both {
        let linked = rank
            .team
            .join(endpoint(&rank.member), Epoch(7), members.clone(), narrow);
        linked.expect("both listen");
    }
    let faults: Vec<Option<String>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (5..)
            .zip(&mut both)
            .map(|(turn, rank)| {
                scope.spawn(move || {
                    let gauge = ActivityGauge::default();
                    let own = rank.team.own;
                    let talk = Talk {
                        gauge: &gauge,
                        team: &mut rank.team,
                        inbox: &mut rank.inbox,
                        activity: Activity::Extracting,
                        turn,
                        step: None,
                    };
                    let result = ShardPeers::new(own, talk).sum(&mut [1.0]);
                    assert!(result.is_err());
                    rank.team.take_fault().map(|fault| fault.to_string())
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("no member panics"))
            .collect()
    });
    for fault in faults {
        assert!(
            fault
                .as_ref()
                .is_some_and(|fault| fault.contains("do not compute the same")),
            "{fault:?}"
        );
    }
}
