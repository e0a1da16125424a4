//! L-1, L-2: what slow, silent and full ends do.

use rustix::net::{SendFlags, SocketFlags};

use super::*;
use crate::link::memory::frame::{Frame, FrameKind};
use crate::link::memory::socket;

/// L-1, L-2: a receiver that accepts the link and never reads.
#[test]
fn a_receiver_that_never_reads_bounds_the_sender_and_does_not_hold_up_its_close() {
    bounded(|| {
        let name = unique_name();
        let listening = socket::listen(&name).expect("the name is free");
        let accepting = std::thread::spawn(move || {
            let socket = rustix::net::accept_with(&listening, SocketFlags::CLOEXEC).expect("a sender comes");
            let received = socket::receive_hello(&socket, 60_000).expect("a hello");
            let welcome = Frame::new(FrameKind::Welcome).encode();
            rustix::net::send(&socket, &welcome, SendFlags::NOSIGNAL).expect("the sender waits");
            (socket, received)
        });
        let options = SenderOptions {
            queue_messages: 8,
            queue_bytes: 200_000,
            ..small_ring()
        };
        let sender = BulkSender::connect(&name, hello(1), options, |_| {}).expect("accepted");
        let receiver = accepting.join().expect("accepted");
        let mut taken = 0;
        let returned = loop {
            match sender.send(state(&[60_000], 7), Duration::from_millis(20)) {
                Ok(()) => taken += 1,
                Err(SendError::Full(message)) => break message,
                Err(error) => panic!("{error}"),
            }
            assert!(taken <= 8, "the queue has no bound");
        };
        assert_eq!(taken, 3, "200,000 bytes hold three messages");
        assert!(sender.queued_bytes() <= 200_000);
        assert_eq!(returned.parts[0].len(), 60_000);
        assert_eq!(sender.drain(Duration::from_millis(5)), Ok(false));
        let start = Instant::now();
        sender.close();
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "close took {:?}",
            start.elapsed()
        );
        drop(receiver);
    });
}

/// L-1, L-2: a consumer that keeps what it gets.
#[test]
fn a_consumer_that_keeps_messages_holds_up_their_sender() {
    for over in BOTH {
        bounded(move || {
            let bound = bind(ListenerOptions {
                held_bytes_per_connection: 100_000,
                ..ListenerOptions::default()
            });
            let options = SenderOptions {
                queue_messages: 4,
                ..small_ring()
            };
            let sender = bound.connect(over, options);
            bound.opened();
            let kept: Vec<_> = (0..3)
                .map(|seed| {
                    sender.send(state(&[30_000], seed), LIMIT).expect("room comes");
                    bound.message()
                })
                .collect();
            for seed in 3..7 {
                sender
                    .send(state(&[30_000], seed), LIMIT)
                    .expect("four fit the queue");
            }
            let error = sender
                .send(state(&[30_000], 7), Duration::from_millis(50))
                .expect_err("the queue is full");
            assert!(matches!(error, SendError::Full(_)), "{error}");
            assert!(
                bound.events.try_recv().is_err(),
                "100,000 bytes hold three messages"
            );
            drop(kept);
            for seed in 3..7 {
                assert_same(&bound.message(), &state(&[30_000], seed));
            }
            // A message beyond the budget comes through alone.
            sender.send(state(&[1 << 20], 9), LIMIT).expect("room comes");
            sender.send(state(&[4], 10), LIMIT).expect("room comes");
            let large = bound.message();
            assert!(bound.events.recv_timeout(Duration::from_millis(50)).is_err());
            let start = Instant::now();
            bound.listener.close();
            assert!(
                start.elapsed() < Duration::from_secs(1),
                "close took {:?}",
                start.elapsed()
            );
            assert_same(&large, &state(&[1 << 20], 9));
        });
    }
}

/// L-2: the sender learns that the receiver closed, even while it waits for slots.
#[test]
fn a_listener_that_closes_ends_its_senders() {
    for over in BOTH {
        bounded(move || {
            let bound = bind(ListenerOptions {
                held_bytes_per_connection: 1,
                ..ListenerOptions::default()
            });
            let sender = bound.connect(
                over,
                SenderOptions {
                    queue_messages: 2,
                    ..small_ring()
                },
            );
            bound.opened();
            sender.send(state(&[100_000], 1), LIMIT).expect("room");
            let held = bound.message();
            sender.send(state(&[100_000], 2), LIMIT).expect("room");
            sender.send(state(&[100_000], 3), LIMIT).expect("room");
            bound.listener.close();
            let error = sender
                .send(state(&[100_000], 4), LIMIT)
                .expect_err("nobody is there");
            assert!(
                matches!(&error, SendError::Ended(LinkError::Refused { reason }) if reason.contains("closed")),
                "{error}"
            );
            assert!(sender.drain(LIMIT).is_err());
            assert_eq!(sender.queued_bytes(), 0, "the queue was dropped");
            drop(held);
        });
    }
}

#[test]
fn silence_is_no_hello_and_no_welcome() {
    bounded(|| {
        let bound = bind(ListenerOptions {
            handshake_timeout_ms: 30,
            ..ListenerOptions::default()
        });
        let _silent = socket::connect(&bound.name, 1_000).expect("the listener is there");
        assert_eq!(bound.closed(), Some(LinkError::Silent { timeout_ms: 30 }));

        let name = unique_name();
        let _listening = socket::listen(&name).expect("the name is free");
        let options = SenderOptions {
            handshake_timeout_ms: 30,
            ..small_ring()
        };
        let error = BulkSender::connect(&name, hello(1), options, |_| {}).err();
        assert_eq!(error, Some(LinkError::Silent { timeout_ms: 30 }));
    });
}

#[test]
fn connections_are_limited() {
    for over in BOTH {
        bounded(move || {
            let bound = bind(ListenerOptions {
                max_connections: 2,
                ..ListenerOptions::default()
            });
            let _two = [
                bound.connect(over, small_ring()),
                bound.connect(over, small_ring()),
            ];
            bound.opened();
            bound.opened();
            let error = bound.dial(over, hello(1), small_ring(), |_| {}).err();
            assert!(
                matches!(&error, Some(LinkError::Refused { reason }) if reason.contains("2 connections")),
                "{error:?}"
            );
            assert_eq!(bound.closed(), Some(LinkError::TooManyConnections { limit: 2 }));
        });
    }
}
