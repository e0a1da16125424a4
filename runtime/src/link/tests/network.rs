//! Links between hosts, with both ends ours: what memory links have no like of.

use std::io::{Read, Write};
use std::net::{Ipv6Addr, Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;

use super::*;

/// L-3: who does not know the token is told so, and heard no further.
#[test]
fn another_token_is_refused() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        for token in ["another-secret-of-the-same-size", "the-secret-of-these-test", "x"] {
            let network = Network {
                token: token.to_owned(),
                ..bound.network()
            };
            let error = BulkSender::connect_remote(&network, hello(1), small_ring(), |_| {}).err();
            assert!(
                matches!(&error, Some(LinkError::Refused { reason }) if reason.contains("token")),
                "{error:?}"
            );
            assert_eq!(bound.closed(), Some(LinkError::Token));
        }
        for token in [
            String::new(),
            "with space".to_owned(),
            "é".to_owned(),
            "x".repeat(MAX_TOKEN_BYTES + 1),
        ] {
            let network = Network {
                token,
                ..bound.network()
            };
            let error = BulkSender::connect_remote(&network, hello(1), small_ring(), |_| {}).err();
            assert_eq!(error, Some(LinkError::BadToken));
        }
        assert!(!format!("{:?}", bound.network()).contains(TOKEN));
        let _good = bound.connect(Over::Network, small_ring());
        bound.opened();
    });
}

#[test]
fn addresses_are_checked_and_exclusive() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let taken = bound.network();
        let bind_again = |network: &Network| {
            BulkListener::bind(
                &unique_name(),
                HERE,
                ListenerOptions::default(),
                Some(network.clone()),
                |_| {},
            )
        };
        let name = taken.address.to_string();
        assert_eq!(
            bind_again(&taken).err(),
            Some(LinkError::NameTaken { name: name.clone() })
        );
        assert_eq!(
            bind_again(&any_port("")).err(),
            Some(LinkError::BadToken),
            "nobody listens without a secret"
        );
        bound.listener.close();
        let error = BulkSender::connect_remote(&taken, hello(1), small_ring(), |_| {}).err();
        assert_eq!(error, Some(LinkError::NoListener { name }));
        bind_again(&taken).expect("the address is free again");
    });
}

#[test]
fn links_go_over_ipv6_where_there_is_one() {
    let address = (Ipv6Addr::LOCALHOST, 0).into();
    if TcpListener::bind(address).is_err() {
        return;
    }
    bounded(move || {
        let network = Network {
            address,
            token: TOKEN.to_owned(),
        };
        let (inbox, events) = crossbeam_channel::unbounded();
        let listener = BulkListener::bind(
            &unique_name(),
            HERE,
            ListenerOptions::default(),
            Some(network.clone()),
            move |event| drop(inbox.send(event)),
        )
        .expect("some port is free");
        let address = listener.network_address().expect("it has one");
        assert!(address.is_ipv6() && address.port() != 0, "{address}");
        let network = Network { address, ..network };
        let sender =
            BulkSender::connect_remote(&network, hello(1), small_ring(), |_| {}).expect("it listens");
        sender.send(state(&[100_000], 1), LIMIT).expect("room");
        assert!(matches!(events.recv_timeout(LIMIT), Ok(BulkEvent::Opened { .. })));
        match events.recv_timeout(LIMIT) {
            Ok(BulkEvent::Message(message)) => assert_same(&message, &state(&[100_000], 1)),
            other => panic!("{other:?} instead of a message"),
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// L-1, L-5: messages of any sizes, kept for a while by a consumer whose budget holds a few of them.
    #[test]
    fn any_messages_arrive_whole_and_in_order(
        messages in prop::collection::vec(prop::collection::vec(0_usize..80_000, 0..5), 1..30),
        checksum in any::<bool>(),
        held_bytes in 1_u64..400_000,
        kept in 0_usize..3,
    ) {
        bounded(move || {
            let bound = bind(ListenerOptions { held_bytes_per_connection: held_bytes, ..ListenerOptions::default() });
            let sender = bound.connect(Over::Network, SenderOptions { checksum, ..small_ring() });
            bound.opened();
            let sent: Vec<_> = (0..)
                .zip(&messages)
                .map(|(seed, parts)| state(&parts.iter().map(|words| words / 4 * 4).collect::<Vec<_>>(), seed))
                .collect();
            for message in &sent {
                sender.send(message.clone(), LIMIT).expect("room comes");
            }
            let mut holds = std::collections::VecDeque::new();
            for message in &sent {
                // What is kept may be all that there is room for.
                let arrived = loop {
                    match bound.events.recv_timeout(Duration::from_millis(20)) {
                        Ok(BulkEvent::Message(arrived)) => break arrived,
                        Ok(other) => panic!("{other:?} instead of a message"),
                        Err(_) => drop(holds.pop_front()),
                    }
                };
                assert_same(&arrived, message);
                holds.push_back(arrived);
                if holds.len() > kept {
                    holds.pop_front();
                }
            }
            assert_eq!(sender.drain(LIMIT), Ok(true));
            sender.close();
            assert_eq!(bound.closed(), None);
        });
    }
}

/// L-2, L-5: a sender that closes while messages are under way and held up; and a budget that is never given back.
#[test]
fn a_sender_that_closes_in_the_middle_is_a_loss() {
    bounded(|| {
        let bound = bind(ListenerOptions {
            held_bytes_per_connection: 1,
            ..ListenerOptions::default()
        });
        let sender = bound.connect(Over::Network, small_ring());
        bound.opened();
        for seed in 0..6 {
            sender.send(state(&[20 << 20], seed), LIMIT).expect("room");
        }
        let first = bound.message();
        let start = Instant::now();
        sender.close();
        assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
        let error = bound.closed();
        assert!(matches!(error, Some(LinkError::PeerLost { .. })), "{error:?}");
        assert_same(&first, &state(&[20 << 20], 0));
    });
}

/// L-1: what a receiver has no room for stays with its sender, but for the windows.
#[test]
fn flow_control_holds_the_sender() {
    bounded(|| {
        let bound = bind(ListenerOptions {
            held_bytes_per_connection: 1,
            ..ListenerOptions::default()
        });
        let options = SenderOptions {
            queue_messages: 2,
            queue_bytes: 1 << 30,
            ..small_ring()
        };
        let sender = bound.connect(Over::Network, options);
        bound.opened();
        sender.send(state(&[64 << 20], 0), LIMIT).expect("room");
        let first = bound.message();
        let held = state(&[64 << 20], 1);
        for _ in 0..2 {
            sender.send(held.clone(), LIMIT).expect("room comes");
        }
        let full = sender.send(held.clone(), Duration::from_millis(300));
        assert!(matches!(full, Err(SendError::Full(_))), "{full:?}");
        assert_eq!(sender.drain(Duration::from_millis(10)), Ok(false));
        drop(first);
        assert_same(&bound.message(), &held);
    });
}

/// L-3: a bit that flips on the way, in a header or in a part; the message is not delivered.
#[test]
fn a_piece_that_changes_on_the_way_ends_its_link() {
    bounded(|| {
        // Each message has a header and two parts that are sent.
        for nth in [0, 1, 2, 3, 5] {
            let bound = bind(ListenerOptions::default());
            let sender = bound.connect(
                Over::Network,
                SenderOptions {
                    corrupt_nth: Some(nth),
                    ..small_ring()
                },
            );
            bound.opened();
            for seed in 0..2 {
                // The link may have ended by then.
                let _ = sender.send(state(&[20_000, 0, (2 << 20) + 4], seed), LIMIT);
            }
            if nth >= 3 {
                assert_same(&bound.message(), &state(&[20_000, 0, (2 << 20) + 4], 0));
            }
            let error = bound.closed();
            assert!(
                matches!(&error, Some(LinkError::Checksum { sequence, .. }) if *sequence == nth),
                "{error:?}"
            );
            let told = sender.drain(LIMIT).expect_err("the link has ended").to_string();
            assert!(told.contains("checksum"), "{told}");
        }
    });
}

/// L-2: an idle link ends at both ends at once when its receiver closes, and the sender hears why.
#[test]
fn an_idle_sender_hears_of_the_end() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let (told, ends) = crossbeam_channel::unbounded();
        let sender = bound
            .dial(Over::Network, hello(1), small_ring(), move |error| {
                let _ = told.send(error.clone());
            })
            .expect("it listens");
        bound.opened();
        let start = Instant::now();
        bound.listener.close();
        let error = ends.recv_timeout(LIMIT).expect("it is told");
        assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
        assert!(
            matches!(&error, LinkError::Refused { reason } if reason.contains("closed")),
            "{error}"
        );
        assert_eq!(sender.ended(), Some(error));
    });
}

/// L-2: dropping is allowed anywhere: in a callback of the links, or where another runtime waits.
#[test]
fn links_can_be_dropped_on_any_thread() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let sender = bound.connect(Over::Network, small_ring());
        bound.opened();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .expect("threads are left");
        runtime.block_on(async move {
            drop(sender);
            let error = bound.closed();
            assert_eq!(error, None, "it said goodbye");
            drop(bound);
        });

        let bound = bind(ListenerOptions::default());
        let other = std::sync::Mutex::new(Some(bound.connect(Over::Network, small_ring())));
        bound.opened();
        let (told, ends) = crossbeam_channel::unbounded();
        let _ended = bound
            .dial(
                Over::Network,
                Hello {
                    from: HERE,
                    ..hello(1)
                },
                small_ring(),
                move |_| {
                    let other = other.lock().ok().and_then(|mut other| other.take());
                    drop(other);
                    let _ = told.send(());
                },
            )
            .expect("it listens");
        bound.opened();
        bound.listener.close();
        ends.recv_timeout(LIMIT).expect("it comes back");
    });
}

/// What stands between two ends and can stop passing anything on, as a cable that is cut.
struct Wire {
    address: std::net::SocketAddr,
    cut: Arc<AtomicBool>,
}

impl Wire {
    fn to(target: std::net::SocketAddr) -> Self {
        let listener = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).expect("some port is free");
        let address = listener.local_addr().expect("it has one");
        let cut = Arc::new(AtomicBool::new(false));
        let is_cut = Arc::clone(&cut);
        std::thread::spawn(move || {
            let (near, _) = listener.accept().expect("a sender comes");
            let far = TcpStream::connect(target).expect("the listener is there");
            let ends = [(near.try_clone(), far.try_clone()), (Ok(far), Ok(near))];
            for (from, to) in ends {
                let (mut from, mut to) = (from.expect("descriptors"), to.expect("descriptors"));
                let is_cut = Arc::clone(&is_cut);
                std::thread::spawn(move || {
                    let mut bytes = vec![0; 1 << 16];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if is_cut.load(Ordering::Acquire) {
                            // Both sockets stay open and say nothing.
                            std::thread::sleep(LIMIT);
                        }
                        if to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    // One of them may be gone.
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
            }
        });
        Self { address, cut }
    }
}

/// L-2: neither end hangs when nothing comes any more, whether it is idle or has much to send.
#[test]
fn both_ends_notice_a_cut_wire() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        for busy in [false, true] {
            let wire = Wire::to(bound.network().address);
            let network = Network {
                address: wire.address,
                ..bound.network()
            };
            let sender =
                BulkSender::connect_remote(&network, hello(1), small_ring(), |_| {}).expect("it listens");
            bound.opened();
            sender.send(state(&[100_000], 1), LIMIT).expect("room");
            assert_same(&bound.message(), &state(&[100_000], 1));
            assert_eq!(sender.drain(LIMIT), Ok(true));
            wire.cut.store(true, Ordering::Release);
            let start = Instant::now();
            if busy {
                for seed in 0..4 {
                    sender.send(state(&[40 << 20], seed), LIMIT).expect("room");
                }
            }
            assert_eq!(bound.closed(), Some(LinkError::Silent { timeout_ms: 5_000 }));
            let end = loop {
                if let Some(end) = sender.ended() {
                    break end;
                }
                assert!(start.elapsed() < LIMIT, "the sender hangs");
                std::thread::sleep(Duration::from_millis(5));
            };
            assert_eq!(end, LinkError::Silent { timeout_ms: 5_000 });
            let elapsed = start.elapsed();
            assert!(elapsed < Duration::from_secs(20), "noticed after {elapsed:?}");
        }
    });
}

/// L-2: a peer that accepts and says nothing, and one that sends nothing.
#[test]
fn silence_is_no_hello_and_no_welcome() {
    bounded(|| {
        let bound = bind(ListenerOptions {
            handshake_timeout_ms: 30,
            ..ListenerOptions::default()
        });
        let _silent = TcpStream::connect(bound.network().address).expect("it listens");
        assert_eq!(bound.closed(), Some(LinkError::Silent { timeout_ms: 30 }));

        let silent = TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).expect("some port is free");
        let network = Network {
            address: silent.local_addr().expect("it has one"),
            token: TOKEN.to_owned(),
        };
        let options = SenderOptions {
            handshake_timeout_ms: 30,
            ..small_ring()
        };
        let error = BulkSender::connect_remote(&network, hello(1), options, |_| {}).err();
        assert_eq!(error, Some(LinkError::Silent { timeout_ms: 30 }));
    });
}
