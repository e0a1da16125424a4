//! Links between two processes, one of which dies or stops.
//!
//! The other process is this test binary again, started with the role in its environment.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use bytes::Bytes;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkEvent, BulkKind, BulkListener, BulkMessage, BulkOutgoing, BulkSender, Endpoint, Hello, LinkError,
    ListenerOptions, Network, SendError, SenderOptions, StateKind,
};
use rustix::process::{Pid, Signal};

/// Longer than anything here takes on a busy machine; reached only by a hang.
const LIMIT: Duration = Duration::from_secs(60);

const ROLE: &str = "EAGLET_LINK_TEST_ROLE";
/// Name of the listener, or its address if the link goes over the network.
const PLACE: &str = "EAGLET_LINK_TEST_PLACE";
const GENERATION: &str = "EAGLET_LINK_TEST_GENERATION";
const READY: &str = "eaglet-link-test-ready";
const TOKEN: &str = "the-secret-of-these-tests";

const RECEIVER: Endpoint = Endpoint {
    seat: Seat::draft(0),
    generation: Generation(0),
};

fn sender_hello(generation: u32) -> Hello {
    let from = Endpoint {
        seat: Seat::verifier(0),
        generation: Generation(generation),
    };
    Hello {
        from,
        epoch: Epoch(1),
        to: RECEIVER,
    }
}

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    (0..length as u64)
        .map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

fn message(bytes: Bytes, sequence: u64) -> BulkOutgoing {
    let kind = BulkKind::State {
        step: Step(sequence),
        what: StateKind::Weights,
        digest: Digest::of(&bytes),
        elements: bytes.len() as u64 / 4,
        first_element: 0,
    };
    BulkOutgoing {
        epoch: Epoch(1),
        kind,
        parts: vec![bytes],
    }
}

/// Checks a message against the digest that its sender made; says its number.
fn verify(message: &BulkMessage) -> u64 {
    let BulkKind::State { step, digest, .. } = &message.header.kind else {
        panic!("{:?} was not sent", message.header.kind);
    };
    assert_eq!(Digest::of(&message.parts[0]), *digest);
    step.0
}

/// Runs a test body and fails if it does not come back.
fn bounded(body: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        // The test may have given up on this thread.
        let _ = done.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = finished.recv_timeout(2 * LIMIT) {
        panic!("hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

/// Where a listener is found.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Place {
    Memory(String),
    Network(SocketAddr),
}

impl Place {
    fn text(&self) -> String {
        match self {
            Self::Memory(name) => name.clone(),
            Self::Network(address) => address.to_string(),
        }
    }

    fn parse(text: &str) -> Self {
        text.parse()
            .map_or_else(|_| Self::Memory(text.to_owned()), Self::Network)
    }

    fn dial(
        &self,
        hello: Hello,
        options: SenderOptions,
        on_end: impl FnOnce(&LinkError) + Send + 'static,
    ) -> Result<BulkSender, LinkError> {
        match self {
            Self::Memory(name) => BulkSender::connect(name, hello, options, on_end),
            Self::Network(address) => BulkSender::connect_remote(&network(*address), hello, options, on_end),
        }
    }
}

fn network(address: SocketAddr) -> Network {
    Network {
        address,
        token: TOKEN.to_owned(),
    }
}

/// Another process; it is killed when the test ends, however it ends.
struct Other {
    child: Child,
    /// Where it listens over the network, if it listens.
    address: Option<SocketAddr>,
}

impl Other {
    /// Starts it and waits until it says that it is ready.
    fn start(role: &str, place: &Place, generation: u32) -> Self {
        let binary = std::env::current_exe().expect("this test is a file");
        let mut child = Command::new(binary)
            .args([
                "the_other_process",
                "--exact",
                "--ignored",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ROLE, role)
            .env(PLACE, place.text())
            .env(GENERATION, generation.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the binary can be started again");
        let output = child.stdout.take().expect("it is piped");
        let mut other = Self { child, address: None };
        let ready = BufReader::new(output)
            .lines()
            .map_while(Result::ok)
            .find_map(|line| line.split_once(READY).map(|(_, address)| address.to_owned()))
            .expect("the other process ended early");
        other.address = ready.trim().parse().ok();
        other
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // It may have been killed by the test.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say_ready(address: Option<SocketAddr>) {
    let mut output = std::io::stdout().lock();
    let address = address.map(|address| address.to_string()).unwrap_or_default();
    writeln!(output, "\n{READY} {address}")
        .and_then(|()| output.flush())
        .expect("the parent reads");
}

fn bind(name: &str, options: ListenerOptions) -> (BulkListener, Receiver<BulkEvent>) {
    let (sender, events) = mpsc::channel();
    let inbox = move |event| {
        // A test that ended early no longer listens.
        let _ = sender.send(event);
    };
    (
        BulkListener::bind(
            name,
            RECEIVER,
            options,
            Some(network((Ipv4Addr::LOCALHOST, 0).into())),
            inbox,
        )
        .expect("the name and some port are free"),
        events,
    )
}

/// What the other process does: sends or receives until it is killed or its parent is gone.
#[test]
#[ignore = "started by the other tests"]
fn the_other_process() {
    let role = std::env::var(ROLE).expect("only the other tests start this");
    let place = Place::parse(&std::env::var(PLACE).expect("set with the role"));
    let generation = std::env::var(GENERATION)
        .expect("set with the role")
        .parse()
        .expect("a number");
    // The end of its standard input is the end of its parent.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    match role.as_str() {
        "send" => {
            let options = SenderOptions {
                queue_messages: 4,
                ..SenderOptions::default()
            };
            let sender = place
                .dial(sender_hello(generation), options, |_| {})
                .expect("the parent listens");
            say_ready(None);
            let bytes: Vec<_> = (0..4)
                .map(|seed| Bytes::from(pattern((5 << 20) + 12, seed)))
                .collect();
            for sequence in 0.. {
                let bytes = bytes[sequence as usize % bytes.len()].clone();
                if sender.send(message(bytes, sequence), LIMIT).is_err() {
                    return;
                }
            }
        }
        "receive" => {
            let (listener, events) = bind(&place.text(), ListenerOptions::default());
            say_ready(listener.network_address());
            for event in events {
                match event {
                    BulkEvent::Message(message) => {
                        verify(&message);
                    }
                    BulkEvent::Closed { .. } => return,
                    BulkEvent::Opened { .. } => {}
                }
            }
        }
        role => panic!("no role `{role}`"),
    }
}

fn name(test: &str) -> String {
    format!("eaglet-{test}-{}", std::process::id())
}

/// L-2, L-5: a sender killed in the middle of a message; its successor takes over on the same listener.
#[test]
fn a_killed_sender_is_noticed_and_replaced() {
    bounded(|| {
        let name = name("killed-sender");
        let (listener, events) = bind(&name, ListenerOptions::default());
        let address = listener.network_address().expect("it has one");
        let places = [Place::Memory(name), Place::Network(address)];
        // By turns within the host and over the network.
        for (generation, place) in (0..4).zip(places.iter().cycle()) {
            let mut other = Other::start("send", place, generation);
            let next = || events.recv_timeout(LIMIT).expect("an event comes");
            let opened = next();
            assert!(
                matches!(&opened, BulkEvent::Opened { peer } if *peer == sender_hello(generation)),
                "{opened:?}"
            );
            let mut expected = 0;
            let mut take = |event| match event {
                BulkEvent::Message(message) => {
                    assert_eq!(verify(&message), expected);
                    expected += 1;
                    None
                }
                BulkEvent::Closed { peer, error } => Some((peer, error)),
                BulkEvent::Opened { peer } => panic!("{peer:?} opens a second time"),
            };
            for _ in 0..10 {
                assert!(take(next()).is_none(), "the sender ended by itself");
            }
            other.child.kill().expect("it runs");
            let killed = Instant::now();
            let (peer, error) = loop {
                if let Some(end) = take(next()) {
                    break end;
                }
            };
            assert_eq!(peer, Some(sender_hello(generation)));
            assert!(matches!(error, Some(LinkError::PeerLost { .. })), "{error:?}");
            let elapsed = killed.elapsed();
            assert!(
                elapsed < Duration::from_secs(10),
                "the end was noticed after {elapsed:?}"
            );
        }
        assert_eq!(listener.stats().failed_connections, 4);
    });
}

/// L-2: a receiver killed in the middle of a message.
#[test]
fn a_killed_receiver_is_noticed() {
    for over_network in [false, true] {
        bounded(move || killed_receiver(over_network));
    }
}

fn killed_receiver(over_network: bool) {
    let name = name(&format!("killed-receiver-{over_network}"));
    let memory = Place::Memory(name);
    let mut other = Other::start("receive", &memory, 0);
    let place = match other.address.filter(|_| over_network) {
        Some(address) => Place::Network(address),
        None => memory,
    };
    let (told, ends) = mpsc::channel();
    let on_end = move |error: &LinkError| {
        let _ = told.send(error.clone());
    };
    let options = SenderOptions {
        queue_messages: 2,
        ..SenderOptions::default()
    };
    let sender = place.dial(sender_hello(0), options, on_end).expect("it listens");
    let bytes = Bytes::from(pattern(30 << 20, 1));
    for sequence in 0..4 {
        sender
            .send(message(bytes.clone(), sequence), LIMIT)
            .expect("room comes");
    }
    other.child.kill().expect("it runs");
    let error = loop {
        match sender.send(message(bytes.clone(), 9), LIMIT) {
            Ok(()) => {}
            Err(SendError::Ended(error)) => break error,
            Err(error) => panic!("{error}"),
        }
    };
    assert!(matches!(error, LinkError::PeerLost { .. }), "{error}");
    assert_eq!(ends.recv_timeout(LIMIT), Ok(error.clone()));
    assert_eq!(sender.ended(), Some(error));
    assert_eq!(sender.queued_bytes(), 0);
    // Its descriptors are closed one after the other; only a process that was reaped has none.
    other.child.wait().expect("it is a child");
    let again = place.dial(sender_hello(0), options, |_| {}).err();
    assert_eq!(
        again,
        Some(LinkError::NoListener { name: place.text() }),
        "a dead process listens to nothing"
    );
}

/// L-1, L-2: a receiver that is stopped, as by a debugger or a frozen container.
#[test]
fn a_stopped_receiver_bounds_the_sender_and_loses_nothing_when_it_goes_on() {
    bounded(|| {
        let name = name("stopped-receiver");
        let other = Other::start("receive", &Place::Memory(name.clone()), 0);
        let options = SenderOptions {
            queue_messages: 3,
            ..SenderOptions::default()
        };
        let sender = BulkSender::connect(&name, sender_hello(0), options, |_| {}).expect("it listens");
        sender
            .send(message(Bytes::from(pattern(4 << 20, 0)), 0), LIMIT)
            .expect("room comes");
        assert_eq!(sender.drain(LIMIT), Ok(true));

        rustix::process::kill_process(other.pid(), Signal::STOP).expect("it runs");
        let before_bytes = resident_bytes();
        let mut taken = 0;
        // Fresh memory for each message, so that an unbounded queue would show.
        while sender
            .send(
                message(Bytes::from(pattern(16 << 20, taken)), taken),
                Duration::from_millis(300),
            )
            .is_ok()
        {
            taken += 1;
            assert!(taken <= 4, "the queue has no bound");
        }
        assert!((3..=4).contains(&taken), "{taken} messages were taken");
        assert!(sender.queued_bytes() <= 3 * ((16 << 20) + 1000));
        let growth_bytes = resident_bytes().saturating_sub(before_bytes);
        // Three messages in the queue, the one that was refused, and the ring.
        assert!(
            growth_bytes < 5 * (16 << 20),
            "{growth_bytes} bytes more are in memory"
        );

        rustix::process::kill_process(other.pid(), Signal::CONT).expect("it is there");
        assert_eq!(sender.drain(LIMIT), Ok(true), "what was queued is delivered");

        rustix::process::kill_process(other.pid(), Signal::STOP).expect("it runs");
        for sequence in 0..3 {
            sender
                .send(message(Bytes::from(pattern(16 << 20, 1)), sequence), LIMIT)
                .expect("room comes");
        }
        let start = Instant::now();
        sender.close();
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "close took {:?}",
            start.elapsed()
        );
    });
}

/// L-1, L-2: over the network a short stop is survived, and one that is too long is a loss.
#[test]
fn a_stopped_receiver_over_the_network_is_lost_in_time() {
    bounded(|| {
        let other = Other::start("receive", &Place::Memory(name("stopped-network")), 0);
        let place = Place::Network(other.address.expect("it listens"));
        let options = SenderOptions {
            queue_messages: 3,
            ..SenderOptions::default()
        };
        let sender = place.dial(sender_hello(0), options, |_| {}).expect("it listens");
        let bytes = Bytes::from(pattern(30 << 20, 1));
        let fill = || {
            let mut taken = 0;
            while sender
                .send(message(bytes.clone(), taken), Duration::from_millis(200))
                .is_ok()
            {
                taken += 1;
                assert!(taken <= 6, "the queue has no bound");
            }
        };
        rustix::process::kill_process(other.pid(), Signal::STOP).expect("it runs");
        fill();
        rustix::process::kill_process(other.pid(), Signal::CONT).expect("it is there");
        assert_eq!(sender.drain(LIMIT), Ok(true), "what was queued is delivered");

        rustix::process::kill_process(other.pid(), Signal::STOP).expect("it runs");
        let start = Instant::now();
        fill();
        let error = sender.drain(LIMIT).expect_err("it is lost");
        assert!(matches!(error, LinkError::Silent { .. }), "{error}");
        let elapsed = start.elapsed();
        assert!(elapsed < Duration::from_secs(20), "noticed after {elapsed:?}");
        assert_eq!(sender.queued_bytes(), 0);
    });
}

/// Memory of this process that is in RAM, without what is shared with others such as rings.
fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("every Linux has it");
    let line = status
        .lines()
        .find(|line| line.starts_with("RssAnon:"))
        .expect("every Linux has it");
    let kib: u64 = line
        .split_whitespace()
        .nth(1)
        .and_then(|word| word.parse().ok())
        .expect("a number");
    kib * 1024
}
