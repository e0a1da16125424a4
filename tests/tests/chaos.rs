//! Real faults on real processes, in every phase of their work: whatever dies, stops, hangs or lies, the run ends with
//! the weights of the undisturbed run, to the bit, and leaves nothing behind.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

use eaglet_runtime::collective::Phase;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkKind, BulkOutgoing, BulkSender, Endpoint, Hello, LinkError, SenderOptions, bytes_of_f32,
};
use eaglet_tests::disk::Disk;
use eaglet_tests::drill::{self, Effect, Line, Quiet, is_stopped, losses, print, token};
use eaglet_tests::traces::{completed, nothing_is_left, only_its_address_is_left, sockets};
use eaglet_tests::{Cluster, PATIENCE, PATIENT, QUICK_RESTARTS, processes_of, send};
use rustix::process::Signal;

/// Twelve small steps, a checkpoint after every fourth; replacements start at once.
const SETS: &[&str] = &[
    "training.steps=12",
    "training.passes=1",
    "training.tokens_per_row=128",
    "training.ttt_steps=2",
    "training.evaluate_every_steps=0",
    "draft.intermediate_size=64",
    "checkpoints.every_steps=4",
    "samples.held_out=[]",
];
/// Silence is noticed as in a run without settings.
const PROMPT: &[&str] = &[
    "supervision.dead_after_ms=2000",
    "supervision.coordinator_lease_ms=30000",
];
/// So are ranks that beat and do nothing else, after a second.
const HASTY: &[&str] = &[
    "supervision.dead_after_ms=15000",
    "supervision.coordinator_lease_ms=30000",
    "supervision.step_timeout_s=1",
    "supervision.load_timeout_s=3",
];

/// Ranks leave a coordinator that is silent for so long.
const SHORT_LEASE: &[&str] = &[
    "supervision.dead_after_ms=1500",
    "supervision.coordinator_lease_ms=1500",
];

fn quiet() -> &'static Quiet {
    static QUIET: OnceLock<Quiet> = OnceLock::new();
    QUIET.get_or_init(|| Quiet::run(&sets(PATIENT)))
}

fn sets(more: &[&'static str]) -> Vec<&'static str> {
    [SETS, QUICK_RESTARTS, more].concat()
}

/// Faults of one seat, each of the next occupant; `PLACE@` is a point with a step, which grows from entry to entry.
fn chain(seat: &str, action: &str, first_step: u64, places: &[&str]) -> String {
    let mut step = first_step;
    let entries: Vec<String> = places
        .iter()
        .enumerate()
        .map(|(generation, place)| {
            let mut place = (*place).to_owned();
            if place.ends_with('@') {
                place.push_str(&step.to_string());
                step += 1;
            }
            format!("{seat}/{generation}:{place}={action}")
        })
        .collect();
    entries.join(";")
}

/// Each phase of a draft replica that is no checkpoint's writer, one occupant after the other; in the end the donor
/// is struck while it gives its state to a replacement, and all replicas are lost.
fn replica(action: &str) -> String {
    let places = [
        "load",
        "form",
        "formed",
        "begin@",
        "computed@",
        "reducing@",
        "staged@",
        "voted@",
        "commit@",
        "applied@",
        "adopting",
    ];
    let struck = chain("draft-1", action, 1, &places);
    if action == "error" {
        // A donor reports no drill while it sends.
        return struck;
    }
    let next = places.len();
    format!("{struck};draft-0/0:begin@9=kill;draft-1/{next}:donating={action}")
}

/// The same of the replica that writes the checkpoints.
fn writer(action: &str) -> String {
    let mut places = vec![
        "form",
        "begin@1",
        "computed@2",
        "reducing@3",
        "save@4",
        "staged@5",
        "commit@7",
    ];
    if action != "error" {
        places.push("saving@8");
    }
    places.extend(["voted@9", "adopting", "applied@10"]);
    chain("draft-0", action, 0, &places)
}

fn verifier(action: &str) -> String {
    let places = ["load", "link", "extract@", "transfer@", "sent@"];
    let places: Vec<_> = places
        .into_iter()
        .filter(|&place| action != "error" || place != "link")
        .collect();
    chain("verifier-0", action, 1, &places)
}

/// Strikes both draft replicas and the verifier, in all phases, in three runs.
fn all_phases(action: &str, more: &[&'static str]) {
    let mut lines = Vec::new();
    for (role, faults) in [
        ("replica", replica(action)),
        ("writer", writer(action)),
        ("verifier", verifier(action)),
    ] {
        lines.extend(quiet().drill(&format!("{action}-{role}"), &sets(more), &faults));
    }
    print(&format!("{action} in every phase"), &lines);
}

#[test]
fn ranks_killed_in_every_phase() {
    all_phases("kill", PATIENT);
}

#[test]
fn ranks_that_crash_in_every_phase() {
    all_phases("segv", PATIENT);
}

#[test]
fn ranks_that_exit_in_every_phase() {
    all_phases("exit", PATIENT);
}

#[test]
fn ranks_that_report_a_fault_in_every_phase() {
    all_phases("error", PATIENT);
}

#[test]
fn ranks_stopped_for_good_in_every_phase() {
    all_phases("stop", PROMPT);
}

/// Waits for a rank that is stopped.
fn stopped(cluster: &mut Cluster) -> u32 {
    cluster.wait("a stopped rank", |cluster| {
        processes_of(cluster.directory())
            .into_iter()
            .find(|&pid| is_stopped(pid))
    })
}

/// A stop that ends in time costs nothing but the time.
#[test]
fn ranks_stopped_for_a_while_are_not_lost() {
    let faults = [
        "draft-1:computed@2=stop",
        "draft-0:reducing@3=stop",
        "draft-1:voted@5=stop",
        "draft-0:commit@7=stop",
        "verifier-0:extract@4=stop",
        "verifier-0:transfer@8=stop",
    ];
    let lines = quiet().drill_with(
        "continued",
        &sets(PATIENT),
        &faults.join(";"),
        Effect::Delay,
        |cluster| {
            for _ in &faults {
                let pid = stopped(cluster);
                send(pid, Signal::CONT);
                cluster.wait("rank that goes on", |_| (!is_stopped(pid)).then_some(()));
            }
        },
    );
    print("stopped and continued", &lines);
}

/// Beats go on while the compute thread of a rank does nothing: with the row and the segments that are sent to it.
#[test]
fn ranks_that_hang_and_beat() {
    let mut lines = Vec::new();
    for (role, faults) in [
        (
            "replica",
            chain(
                "draft-1",
                "hang",
                1,
                &["load", "begin@", "computed@", "commit@", "adopting"],
            ),
        ),
        (
            "verifier",
            chain("verifier-0", "hang", 1, &["load", "extract@", "transfer@"]),
        ),
    ] {
        lines.extend(quiet().drill(&format!("hang-{role}"), &sets(HASTY), &faults));
    }
    print("a hung compute thread", &lines);
}

#[test]
fn donor_and_replacement_die_together_and_a_seat_dies_again_and_again() {
    let together = "draft-1/0:staged@5=kill;draft-0/0:donating=kill;draft-1/1:adopting=kill";
    let mut lines = quiet().drill("together", &sets(PATIENT), together);
    let again = "draft-1/0:begin@2=kill;draft-1/1:load=segv;draft-1/2:adopting=exit;draft-1/3:form=kill;\
                 draft-0/0:begin@5=kill;draft-1/4:begin@5=kill;verifier-0/0:extract@5=kill;verifier-0/1:load=kill";
    lines.extend(quiet().drill("again", &sets(PATIENT), again));
    print("together, and again and again", &lines);
}

/// A bit that flips on the way, in a row, in a gradient and in a state: the checksum of the link catches it.
#[test]
fn corrupt_frames_are_caught() {
    let mut lines = Vec::new();
    for (name, faults) in [
        ("row", "verifier-0:link=corrupt"),
        ("gradient", "draft-1:link=corrupt"),
        // The donor's first link is that of its group, the second that to the replacement.
        ("state", "draft-1:begin@3=kill;draft-0:link#2=corrupt"),
    ] {
        let name = format!("corrupt-{name}");
        lines.extend(quiet().drill(&name, &sets(PATIENT), faults));
        let said = logs(&quiet().beside(&name));
        assert!(said.contains("checksum is"), "{said}");
    }
    print("corrupt frames", &lines);
}

/// One replica computes NaN once: nobody applies it, and the step is done again.
#[test]
fn a_gradient_that_is_no_number_is_not_applied() {
    let lines = quiet().drill("nan", &sets(PATIENT), "draft-1:computed@4=nan");
    let said = logs(&quiet().beside("nan"));
    let told = "the gradient that draft-1 computed for step 4 is not finite; it is done again";
    assert!(said.contains(told), "{said}");
    print("NaN", &lines);
}

/// All that processes of a run logged.
fn logs(directory: &Path) -> String {
    let logs = std::fs::read_dir(directory.join("logs")).expect("a folder of logs");
    logs.map(|log| std::fs::read_to_string(log.expect("an entry").path()).expect("a log"))
        .collect()
}

/// An outsider that speaks for a replica, in an epoch that is over and as an occupant that was replaced.
#[test]
fn what_an_older_epoch_says_is_dropped() {
    let faults = "draft-1/0:begin@2=kill;draft-1/1:begin@5=stop";
    let directory = quiet().beside("old-epoch");
    let mut cluster = Cluster::launch_with_faults(&directory, &sets(PATIENT), faults);
    let tokens = BTreeSet::from([token(&mut cluster)]);
    let pid = stopped(&mut cluster);
    let names = sockets(&tokens);
    let name = names
        .iter()
        .find(|name| name.ends_with("-draft-0-0"))
        .expect("its listener");
    let hello = |generation, epoch| Hello {
        from: Endpoint {
            seat: Seat::draft(1),
            generation: Generation(generation),
        },
        epoch,
        to: Endpoint {
            seat: Seat::draft(0),
            generation: Generation(0),
        },
    };
    // Both replicas are at step 5; the present epoch is a later one of the first launch.
    let old = Epoch::first_of(1);
    let refused = BulkSender::connect(name, hello(0, old), SenderOptions::default(), |_| {}).err();
    let superseded = matches!(&refused, Some(LinkError::Refused { reason }) if reason.contains("generation"));
    assert!(superseded, "{refused:?}");
    let link =
        BulkSender::connect(name, hello(1, old), SenderOptions::default(), |_| {}).expect("it is let in");
    for (phase, segment) in [
        (Phase::Contribution { lane: 1 }, 0),
        (Phase::Contribution { lane: 1 }, 1),
        (Phase::Finished, 0),
    ] {
        let kind = BulkKind::Gradient {
            step: Step(5),
            phase,
            segment,
        };
        let parts = vec![bytes_of_f32(vec![1e6_f32; 1000])];
        let message = BulkOutgoing {
            epoch: old,
            kind,
            parts,
        };
        link.send(message, PATIENCE).expect("there is room");
    }
    assert_eq!(link.drain(PATIENCE), Ok(true), "it was taken in");
    link.close();
    send(pid, Signal::CONT);
    let finished = cluster.finish();
    completed(&finished);
    assert_eq!(losses(&directory).len(), 1, "{finished:#?}");
    quiet().is_like(&directory, &tokens);
}

/// The coordinator dies between the votes, or between the record and the commit; its ranks die with it.
#[test]
fn a_coordinator_killed_in_a_step_goes_on() {
    let mut lines = Vec::new();
    for fault in [
        "coordinator:voted@6=kill",
        "coordinator:journaled@6=kill",
        "coordinator:voted@5=segv",
        "coordinator:journaled@0=exit",
    ] {
        let directory = quiet().beside(&fault.replace([':', '@', '='], "-"));
        let mut cluster = Cluster::launch_with_faults(&directory, &sets(PATIENT), fault);
        let mut tokens = BTreeSet::from([token(&mut cluster)]);
        let finished = cluster.finish();
        assert!(!finished.status.success(), "{finished:#?}");
        only_its_address_is_left(&directory, &tokens);
        let struck = drill::strikes(&directory);
        assert_eq!(struck.len(), 1, "{struck:?}");
        let mut cluster = Cluster::launch(&directory, &sets(PATIENT));
        tokens.insert(token(&mut cluster));
        completed(&cluster.finish());
        quiet().is_like(&directory, &tokens);
        let next = drill::commit_after(&directory, struck[0].1);
        lines.push(Line {
            fault: fault.to_owned(),
            detect_ms: None,
            recover_ms: next.map(|next| next - struck[0].1),
        });
    }
    print("the coordinator, launched again", &lines);
}

/// A coordinator that is stopped for longer than its lease finds its ranks gone, and starts others.
#[test]
fn a_coordinator_stopped_for_longer_than_its_lease_starts_over() {
    let directory = quiet().beside("stopped-coordinator");
    let mut cluster =
        Cluster::launch_with_faults(&directory, &sets(SHORT_LEASE), "coordinator:journaled@5=stop");
    let tokens = BTreeSet::from([token(&mut cluster)]);
    let coordinator = cluster.pid();
    cluster.wait("a stopped coordinator whose ranks are gone", |cluster| {
        let alone = processes_of(cluster.directory()) == [coordinator];
        (alone && is_stopped(coordinator)).then_some(())
    });
    cluster.signal(Signal::CONT);
    let finished = cluster.finish();
    completed(&finished);
    let lost = losses(&directory);
    assert_eq!(lost.len(), 3, "{lost:#?}");
    assert!(
        lost.iter().all(|loss| loss.cause.contains("exited with code 75")),
        "{lost:#?}"
    );
    quiet().is_like(&directory, &tokens);
}

/// A coordinator that hangs cannot notice it; its ranks do, and end. Killed and launched again it goes on.
#[test]
fn a_coordinator_that_hangs_is_left_by_its_ranks() {
    let directory = quiet().beside("hung-coordinator");
    let mut cluster = Cluster::launch_with_faults(&directory, &sets(SHORT_LEASE), "coordinator:voted@5=hang");
    let mut tokens = BTreeSet::from([token(&mut cluster)]);
    let coordinator = cluster.pid();
    cluster.wait("a coordinator whose ranks are gone", |cluster| {
        let alone = processes_of(cluster.directory()) == [coordinator];
        (alone && !drill::strikes(cluster.directory()).is_empty()).then_some(())
    });
    cluster.signal(Signal::KILL);
    assert!(!cluster.finish().status.success());
    only_its_address_is_left(&directory, &tokens);
    let mut cluster = Cluster::launch(&directory, &sets(PATIENT));
    tokens.insert(token(&mut cluster));
    completed(&cluster.finish());
    quiet().is_like(&directory, &tokens);
}

/// A disk that is full when a step is committed, and when a checkpoint is half written.
#[test]
fn a_full_disk_ends_the_run_with_one_line_and_room_lets_it_go_on() {
    let Some(disk) = Disk::mount("64m") else {
        print(
            "a full disk: skipped, this machine allows no mounts in a namespace of one's own",
            &[],
        );
        return;
    };
    for (name, fault) in [
        ("commit", "draft-1:begin@6=stop"),
        ("checkpoint", "draft-0:saving@8=stop"),
    ] {
        let directory = disk.folder().join(name);
        let mut cluster = Cluster::launch_with_faults(&directory, &sets(PATIENT), fault);
        let mut tokens = BTreeSet::from([token(&mut cluster)]);
        let pid = stopped(&mut cluster);
        disk.fill();
        send(pid, Signal::CONT);
        let finished = cluster.finish();
        assert_eq!(finished.status.code(), Some(1), "{finished:#?}");
        assert_eq!(finished.errors.lines().count(), 1, "{finished:#?}");
        assert!(
            finished.errors.contains("No space left on device"),
            "{finished:#?}"
        );
        disk.make_room();
        nothing_is_left(&directory, &tokens);
        let mut cluster = Cluster::launch(&directory, &sets(PATIENT));
        tokens.insert(token(&mut cluster));
        completed(&cluster.finish());
        quiet().is_like(&directory, &tokens);
    }
}

#[test]
fn a_wrong_list_of_faults_ends_the_launch_with_its_entry() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().join("run");
    let finished =
        Cluster::launch_with_faults(&directory, &sets(&[]), "draft-0:load=kill;draft-1:stagd=kill").finish();
    assert_eq!(finished.status.code(), Some(2), "{finished:#?}");
    assert_eq!(finished.errors.lines().count(), 1, "{finished:#?}");
    for words in [
        "EAGLET_FAULTS: `draft-1:stagd=kill`",
        "there are load, form",
        "draft-1:staged@5=kill",
    ] {
        assert!(finished.errors.contains(words), "{finished:#?}");
    }
    assert!(!directory.join("journal").exists());
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
}
