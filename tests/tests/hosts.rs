//! Clusters over several hosts, played by addresses of this machine: each has its own `eaglet join`, and what goes from one to
//! another goes through the network.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use eaglet_tests::drill::{losses, lost_only};
use eaglet_tests::traces::{account, completed, same_weights};
use eaglet_tests::{Cluster, PATIENCE, eaglet, is_alive, processes_of, send};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

/// A run of which steps are left when a host has come back.
const SETS: &[&str] = &[
    "training.steps=60",
    "training.tokens_per_row=160",
    "training.evaluate_every_steps=0",
    "training.max_new_tokens=12",
    "checkpoints.every_steps=10",
    "samples.held_out=[]",
    "supervision.dead_after_ms=4000",
    // What a lost host costs.
    "supervision.coordinator_lease_ms=4000",
];

/// The verifier on host b, a draft rank on host c, the other one on the coordinator's.
const PLACES: &[&str] = &["ranks[0].host=b", "ranks[2].host=c"];

const TWO_HOSTS: &str = "hosts=[{name=\"b\", address=\"127.0.0.2\"}, {name=\"c\", address=\"127.0.0.3\"}]";

fn over_hosts(hosts: &str) -> Vec<&str> {
    let mut sets = SETS.to_vec();
    sets.push(hosts);
    sets.extend(PLACES);
    sets
}

/// A host that has joined, or tries to.
struct Host(Child);

impl Host {
    fn join(run: &Path, name: &str) -> Self {
        let mut command = joining(run, name);
        Self(command.spawn().expect("eaglet can be started"))
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Waits until it has left by itself, and says how.
    fn left(mut self) -> Option<i32> {
        let process = pidfd_open(Pid::from_child(&self.0), PidfdFlags::empty()).expect("it is our child");
        let patience = Timespec::try_from(PATIENCE).expect("minutes");
        // A descriptor of a process can be read when it has ended.
        let ended = poll(&mut [PollFd::new(&process, PollFlags::IN)], Some(&patience));
        assert_eq!(ended, Ok(1), "the host does not leave");
        self.0.wait().expect("it is our child").code()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn joining(run: &Path, name: &str) -> Command {
    let mut command = Command::new(eaglet());
    command
        .arg("join")
        .arg(run)
        .args(["--host", name])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    command
}

/// Asks to join with little patience, and waits for the answer.
fn refused(run: &Path, name: &str) -> Output {
    let mut command = joining(run, name);
    let command = command.args(["--patience-s", "1"]).stderr(Stdio::piped());
    command.output().expect("eaglet can be started")
}

fn quiet(folder: &Path, sets: &[&str]) -> PathBuf {
    let directory = folder.join("quiet");
    completed(&Cluster::launch(&directory, &[SETS, sets].concat()).finish());
    directory
}

fn said(lines: &[String], words: &str) -> bool {
    lines.iter().any(|line| line.contains(words))
}

#[test]
fn ranks_and_hosts_that_are_killed_change_nothing_about_the_weights() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let quiet = quiet(folder.path(), &[]);
    let directory = folder.path().join("hosts");
    // Host c is started by the coordinator, as ssh would be; host b by somebody else.
    let hosts = format!(
        "hosts=[{{name=\"b\", address=\"127.0.0.2\"}}, {{name=\"c\", address=\"127.0.0.3\", start=[{:?}]}}]",
        eaglet().display().to_string()
    );
    let sets = over_hosts(&hosts);
    let mut cluster = Cluster::launch(&directory, &sets);
    let b = Host::join(&directory, "b");
    cluster.wait_for_step(3);
    // Joined already, and not expected.
    let twice = refused(&directory, "b");
    let words = String::from_utf8_lossy(&twice.stderr).into_owned();
    assert!(
        twice.status.code() == Some(1) && words.contains("host b has joined already"),
        "{words}"
    );
    let stranger = refused(&directory, "d");
    let words = String::from_utf8_lossy(&stranger.stderr).into_owned();
    assert!(
        stranger.status.code() == Some(1)
            && words.contains("cluster.toml has no host d; its [[hosts]] are: b, c"),
        "{words}"
    );
    // A rank on another host is a rank like any other.
    let draft = cluster.rank("draft", 1);
    send(draft, Signal::KILL);
    cluster.wait("the news of a rank's death", |cluster| {
        (!losses(cluster.directory()).is_empty()).then_some(())
    });
    assert_ne!(cluster.rank("draft", 1), draft);
    cluster.wait_for_step(6);
    // A host that dies takes its ranks along, and another one takes its place.
    let verifier = cluster.rank("verifier", 0);
    send(b.pid(), Signal::KILL);
    cluster.wait("the end of a rank without its host", |_| {
        (!is_alive(verifier)).then_some(())
    });
    let b = Host::join(&directory, "b");
    cluster.wait_for_step(12);
    let finished = cluster.finish();
    completed(&finished);
    assert_eq!(b.left(), Some(0), "the run is over");
    assert!(
        said(&finished.lines, "waiting for host b: run `eaglet join"),
        "{finished:#?}"
    );
    assert!(said(&finished.lines, "lost host b: "), "{finished:#?}");
    lost_only(&directory, &["draft-1", "verifier-0"]);
    assert!(account(&directory).trained > 0);
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    same_weights(&quiet, &directory);
}

#[test]
fn a_host_that_stands_still_and_a_coordinator_that_dies_are_come_back_from() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    // What a lost host's ranks compute until they must have ended is no small part of so short a run.
    let longer = [
        "training.steps=200",
        "supervision.dead_after_ms=2000",
        "supervision.coordinator_lease_ms=2000",
    ];
    let quiet = quiet(folder.path(), &longer);
    let directory = folder.path().join("hosts");
    let mut sets = over_hosts(TWO_HOSTS);
    sets.extend(longer);
    let mut cluster = Cluster::launch(&directory, &sets);
    let (b, c) = (Host::join(&directory, "b"), Host::join(&directory, "c"));
    cluster.wait_for_step(4);
    // Its ranks still answer, but nobody could start or end them there.
    let draft = cluster.rank("draft", 1);
    send(c.pid(), Signal::STOP);
    cluster.wait("the end of a rank of a lost host", |_| {
        (!is_alive(draft)).then_some(())
    });
    send(c.pid(), Signal::CONT);
    cluster.wait_for_step(8);
    let ranks = [
        cluster.rank("verifier", 0),
        cluster.rank("draft", 0),
        cluster.rank("draft", 1),
    ];
    cluster.signal(Signal::KILL);
    cluster.wait_until_gone(&ranks);
    drop(cluster);
    // Hosts wait for it.
    let finished = Cluster::launch(&directory, &sets).finish();
    completed(&finished);
    assert_eq!((b.left(), c.left()), (Some(0), Some(0)));
    assert_eq!(processes_of(&directory), Vec::<u32>::new());
    same_weights(&quiet, &directory);
}

#[test]
fn a_run_goes_on_without_a_host_that_stays_away() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let quiet = quiet(folder.path(), &[]);
    let directory = folder.path().join("hosts");
    let mut sets = SETS.to_vec();
    sets.extend([
        "hosts=[{name=\"c\", address=\"127.0.0.3\"}]",
        "ranks[2].host=c",
        "supervision.host_timeout_s=1",
    ]);
    let finished = Cluster::launch(&directory, &sets).finish();
    completed(&finished);
    let told = "host c has not joined within 1 s (supervision.host_timeout_s), and draft-1 cannot be filled without it";
    assert!(said(&finished.lines, told), "{finished:#?}");
    same_weights(&quiet, &directory);
    // Nobody runs it now.
    let late = refused(&directory, "c");
    let words = String::from_utf8_lossy(&late.stderr).into_owned();
    assert!(
        late.status.code() == Some(1) && words.contains("no coordinator is running on"),
        "{words}"
    );
}
