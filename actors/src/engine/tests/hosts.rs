//! HOSTS-1, HOSTS-2: seats on machines that come and go.

use eaglet_runtime::ids::{Generation, Seat};

use super::lanes::Group;
use super::setup::settings;
use crate::engine::{Event, Outcome, Settings, WhenExhausted};

const B: Seat = Seat::draft(2);

/// Three draft ranks, the last of them on host b.
fn two_hosts() -> Settings {
    let mut settings = settings();
    settings.hosts.insert(B, "b".to_owned());
    settings
}

fn joined() -> Event {
    Event::HostJoined { host: "b".to_owned() }
}

fn lost() -> Event {
    Event::HostLost {
        host: "b".to_owned(),
        cause: "its link ended".to_owned(),
    }
}

fn wait(group: &mut Group, ms: u64) {
    // In steps that do not look like a coordinator that was held up.
    for _ in 0..ms / 100 {
        group.now_ms += 90;
        group.feed(Event::Tick);
    }
}

#[test]
fn nobody_is_started_on_a_host_that_is_not_there() {
    let mut group = Group::with(two_hosts());
    wait(&mut group, 5000);
    assert_eq!(
        group.spawned,
        [(Seat::draft(0), Generation(0)), (Seat::draft(1), Generation(0))]
    );
    assert!(
        group.members.is_empty(),
        "lanes of a host that will come wait for it"
    );
    group.feed(joined());
    assert_eq!(group.spawned.last(), Some(&(B, Generation(0))));
    assert_eq!(group.members, [0, 1, 2]);
    // A host that joins again without having been lost, and one that nobody knows, change nothing.
    let before = group.spawned.len();
    group.feed(joined());
    group.feed(Event::HostJoined { host: "c".to_owned() });
    assert_eq!(group.spawned.len(), before);

    group.feed(lost());
    group.lose(B, Generation(0));
    wait(&mut group, 5000);
    assert_eq!(group.spawned.len(), before, "its seat waits for its host");
    let told = group
        .notices
        .iter()
        .filter(|notice| notice.contains("lost host b: its link ended"));
    assert_eq!(told.count(), 1);
    group.feed(joined());
    wait(&mut group, 1000);
    assert_eq!(group.spawned.last(), Some(&(B, Generation(1))));
    assert_eq!(group.members, [0, 1, 2]);
    assert_eq!(group.outcome, None);
}

#[test]
fn a_host_that_stays_away_loses_its_seats_until_it_joins() {
    let mut group = Group::with(two_hosts());
    wait(&mut group, 61_000);
    assert_eq!(group.members, [0, 1], "the run goes on without it");
    assert!(group.owners.iter().all(|&owner| owner < 2), "{:?}", group.owners);
    let told = "host b has not joined within 60 s (supervision.host_timeout_s), and draft-2 cannot be filled without it; the run \
                goes on with the others, and takes it in when it joins";
    assert_eq!(group.notices.iter().filter(|notice| *notice == told).count(), 1);
    group.feed(joined());
    wait(&mut group, 1000);
    assert_eq!(group.spawned.last().map(|(seat, _)| *seat), Some(B));
    assert_eq!(group.members, [0, 1, 2]);
    // The same once more, with a rank that ran.
    group.feed(lost());
    group.lose(B, group.spawned.last().expect("it was started").1);
    wait(&mut group, 61_000);
    assert_eq!(group.members, [0, 1]);
}

#[test]
fn a_run_that_cannot_do_without_a_host_ends_with_the_remedy() {
    let mut all = settings();
    all.hosts
        .extend((0..3).map(|seat| (Seat::draft(seat), "b".to_owned())));
    let mut strict = two_hosts();
    strict.draft_restarts.then = WhenExhausted::Stop;
    for settings in [all, strict] {
        let mut group = Group::with(settings);
        wait(&mut group, 61_000);
        group.lose(Seat::verifier(0), Generation(0));
        wait(&mut group, 1000);
        let Some(Outcome::Failed { report }) = &group.outcome else {
            panic!("{:?}", group.outcome)
        };
        assert!(
            report.contains("host b has not joined within 60 s")
                && report.contains("run `eaglet join` there, on this run's directory, and launch again"),
            "{report}"
        );
    }
}
