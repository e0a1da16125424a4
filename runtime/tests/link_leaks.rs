//! L-4: links leave no descriptors, mappings or threads behind. The only test of its process, because it counts them.

use std::net::Ipv4Addr;
use std::sync::mpsc;
use std::time::Duration;

use bytes::Bytes;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkEvent, BulkKind, BulkListener, BulkOutgoing, BulkSender, Endpoint, Hello, ListenerOptions, Network,
    SenderOptions, StateKind,
};

const LIMIT: Duration = Duration::from_secs(60);
const HERE: Endpoint = Endpoint {
    seat: Seat::draft(0),
    generation: Generation(0),
};

fn entries(directory: &str) -> usize {
    std::fs::read_dir(directory).expect("every Linux has it").count()
}

fn mapped_rings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("every Linux has it");
    maps.lines()
        .filter(|line| line.contains("memfd:eaglet-link"))
        .count()
}

/// Descriptors, mapped rings and threads of this process.
fn census() -> [usize; 3] {
    [
        entries("/proc/self/fd"),
        mapped_rings(),
        entries("/proc/self/task"),
    ]
}

fn message(bytes: usize) -> BulkOutgoing {
    let kind = BulkKind::State {
        step: Step(0),
        what: StateKind::Weights,
        digest: Digest::default(),
        elements: bytes as u64 / 4,
        first_element: 0,
    };
    BulkOutgoing {
        epoch: Epoch(0),
        kind,
        parts: vec![Bytes::from(vec![0; bytes])],
    }
}

fn cycle(round: usize, over_network: bool) {
    let name = format!("eaglet-leaks-{}-{round}", std::process::id());
    let (sender, events) = mpsc::channel();
    let inbox = move |event| {
        let _ = sender.send(event);
    };
    let options = ListenerOptions {
        held_bytes_per_connection: 1 << 20,
        ..ListenerOptions::default()
    };
    let listener = BulkListener::bind(&name, HERE, options, over_network.then(|| network(0)), inbox)
        .expect("the name is free");
    let port = listener.network_address().map(|address| address.port());
    let connect = |index, to| {
        let from = Endpoint {
            seat: Seat::verifier(index),
            generation: Generation(0),
        };
        let options = SenderOptions {
            slots: 2,
            slot_bytes: 1 << 16,
            ..SenderOptions::default()
        };
        let hello = Hello {
            from,
            epoch: Epoch(0),
            to,
        };
        match port {
            Some(port) => BulkSender::connect_remote(&network(port), hello, options, |_| {}),
            None => BulkSender::connect(&name, hello, options, |_| {}),
        }
    };
    // One in good order, one in the middle of a message that waits for slots, one idle, one refused.
    let orderly = connect(0, HERE).expect("accepted");
    orderly.send(message(300_000), LIMIT).expect("room");
    assert_eq!(orderly.drain(LIMIT), Ok(true));
    let stuck = connect(1, HERE).expect("accepted");
    stuck.send(message(3 << 20), LIMIT).expect("room");
    stuck.send(message(3 << 20), LIMIT).expect("room");
    let idle = connect(2, HERE).expect("accepted");
    let elsewhere = Endpoint {
        generation: Generation(9),
        ..HERE
    };
    assert!(connect(3, elsewhere).is_err());
    let mut messages = Vec::new();
    while messages.len() < 2 {
        if let BulkEvent::Message(message) = events.recv_timeout(LIMIT).expect("messages come") {
            messages.push(message);
        }
    }
    assert!(
        over_network || mapped_rings() >= 3,
        "the count of rings sees them"
    );
    orderly.close();
    if round.is_multiple_of(2) {
        drop(stuck);
        listener.close();
        drop(idle);
    } else {
        listener.close();
        drop((stuck, idle));
    }
}

fn network(port: u16) -> Network {
    Network {
        address: (Ipv4Addr::LOCALHOST, port).into(),
        token: "the-secret-of-this-test".to_owned(),
    }
}

#[test]
fn nothing_is_left_of_links() {
    for over_network in [false, true] {
        // Whatever the runtime opens once is open after the first round.
        cycle(0, over_network);
        let before = census();
        for round in 1..=20 {
            cycle(round, over_network);
        }
        assert_eq!(census(), before, "descriptors, mapped rings, threads");
        assert_eq!(mapped_rings(), 0);
    }
}
