//! Both ends in one process, within a host and between hosts; peers that do not keep to the protocol are in [`hostile`]
//! and [`http`].

mod hostile;
mod http;
mod limits;
mod network;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::Receiver;

use super::*;
use crate::digest::Digest;
use crate::ids::{Epoch, Generation, Seat, Step};

/// Longer than anything here takes on a busy machine; reached only by a hang.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a test body and fails if it does not come back.
fn bounded(body: impl FnOnce() + Send + 'static) {
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        // The test may have given up on this thread.
        let _ = done.send(());
    });
    if let Err(mpsc::RecvTimeoutError::Timeout) = finished.recv_timeout(LIMIT) {
        panic!("hangs");
    }
    if let Err(panic) = thread.join() {
        std::panic::resume_unwind(panic);
    }
}

fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!(
        "eaglet-test-{}-{}",
        std::process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    )
}

const HERE: Endpoint = Endpoint {
    seat: Seat::draft(0),
    generation: Generation(3),
};

fn hello(sender_generation: u32) -> Hello {
    let from = Endpoint {
        seat: Seat::verifier(1),
        generation: Generation(sender_generation),
    };
    Hello {
        from,
        epoch: Epoch(5),
        to: HERE,
    }
}

/// Which way a link goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Memory,
    Network,
}

const BOTH: [Over; 2] = [Over::Memory, Over::Network];

const TOKEN: &str = "the-secret-of-these-tests";

fn any_port(token: &str) -> Network {
    Network {
        address: (std::net::Ipv4Addr::LOCALHOST, 0).into(),
        token: token.to_owned(),
    }
}

/// Listens both ways.
struct Bound {
    name: String,
    listener: BulkListener,
    events: Receiver<BulkEvent>,
}

fn bind(options: ListenerOptions) -> Bound {
    let name = unique_name();
    let (sender, events) = crossbeam_channel::unbounded();
    let inbox = move |event| {
        // A test that ended early no longer listens.
        let _ = sender.send(event);
    };
    let listener = BulkListener::bind(&name, HERE, options, Some(any_port(TOKEN)), inbox)
        .expect("the name and some port are free");
    Bound {
        name,
        listener,
        events,
    }
}

impl Bound {
    fn event(&self) -> BulkEvent {
        self.events.recv_timeout(LIMIT).expect("an event comes")
    }

    fn opened(&self) -> Hello {
        match self.event() {
            BulkEvent::Opened { peer } => peer,
            other => panic!("{other:?} instead of opened"),
        }
    }

    fn message(&self) -> BulkMessage {
        match self.event() {
            BulkEvent::Message(message) => message,
            other => panic!("{other:?} instead of a message"),
        }
    }

    fn closed(&self) -> Option<LinkError> {
        match self.event() {
            BulkEvent::Closed { error, .. } => error,
            other => panic!("{other:?} instead of closed"),
        }
    }

    fn network(&self) -> Network {
        Network {
            address: self.listener.network_address().expect("it has one"),
            token: TOKEN.to_owned(),
        }
    }

    fn dial(
        &self,
        over: Over,
        hello: Hello,
        options: SenderOptions,
        on_end: impl FnOnce(&LinkError) + Send + 'static,
    ) -> Result<BulkSender, LinkError> {
        match over {
            Over::Memory => BulkSender::connect(&self.name, hello, options, on_end),
            Over::Network => BulkSender::connect_remote(&self.network(), hello, options, on_end),
        }
    }

    fn connect(&self, over: Over, options: SenderOptions) -> BulkSender {
        self.dial(over, hello(1), options, |_| {})
            .expect("the listener is there")
    }
}

fn small_ring() -> SenderOptions {
    SenderOptions {
        slots: 4,
        slot_bytes: 4096,
        heap_bytes: 0,
        ..SenderOptions::default()
    }
}

fn with_heap(heap_bytes: u64) -> SenderOptions {
    SenderOptions {
        heap_bytes,
        ..small_ring()
    }
}

fn pattern(length: usize, seed: u64) -> Vec<u8> {
    (0..length as u64)
        .map(|i| ((i + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// A message whose parts are of these lengths, each a multiple of 4.
fn state(lengths: &[usize], seed: u64) -> BulkOutgoing {
    let elements = lengths.iter().sum::<usize>() as u64 / 4;
    let kind = BulkKind::State {
        step: Step(seed),
        what: StateKind::Weights,
        digest: Digest::of(&seed.to_le_bytes()),
        elements,
        first_element: 0,
    };
    let parts = lengths
        .iter()
        .map(|&length| Bytes::from(pattern(length, seed)))
        .collect();
    BulkOutgoing {
        epoch: Epoch(seed),
        kind,
        parts,
    }
}

fn assert_same(message: &BulkMessage, sent: &BulkOutgoing) {
    let header = &message.header;
    assert_eq!(
        (header.from, header.generation),
        (Seat::verifier(1), Generation(1))
    );
    assert_eq!((header.epoch, &header.kind), (sent.epoch, &sent.kind));
    assert_eq!(message.parts.len(), sent.parts.len());
    for ((part, sent), &length) in message.parts.iter().zip(&sent.parts).zip(&header.parts) {
        assert_eq!(part.len() as u64, length);
        assert!(part[..] == sent[..], "a part of {length} bytes differs");
    }
}

/// L-5: sizes around the edges of slots, of the ring and of frames, with and without checksums.
#[test]
fn messages_of_all_sizes_arrive_whole_and_in_order() {
    bounded(|| {
        let ring = 4 * 4096;
        let sizes = [
            0,
            4,
            4092,
            4096,
            4100,
            2 * 4096,
            ring - 4,
            ring,
            ring + 4,
            3 * ring,
            MIN_PLACED_BYTES - 4,
            MIN_PLACED_BYTES,
            200_000,
            (1 << 20) - 4,
            1 << 20,
            (1 << 20) + 4,
            (3 << 20) + 4,
        ];
        // Without a heap, with one that has room for some of them, and with one for all; and without memory in common.
        let ways = [
            (Over::Memory, 0),
            (Over::Memory, 256 << 10),
            (Over::Memory, 16 << 20),
            (Over::Network, 0),
        ];
        for (checksum, (over, heap_bytes)) in ways.iter().flat_map(|&way| [(true, way), (false, way)]) {
            let bound = bind(ListenerOptions::default());
            let sender = bound.connect(
                over,
                SenderOptions {
                    checksum,
                    ..with_heap(heap_bytes)
                },
            );
            assert_eq!(bound.opened(), hello(1));
            let mut sent: Vec<_> = sizes.iter().map(|&size| state(&[size], size as u64)).collect();
            sent.extend([
                state(&[], 1),
                state(&[0, 0, 0], 2),
                state(&[4096, 0, 8, 4100], 3),
                state(&[0, ring, 0], 4),
                state(&[0, 100_000, 0, 0, 120_000, 8, 0], 6),
                state(&[4; MAX_PARTS], 5),
            ]);
            for message in &sent {
                sender.send(message.clone(), LIMIT).expect("room comes");
            }
            for message in &sent {
                assert_same(&bound.message(), message);
            }
            assert_eq!(sender.drain(LIMIT), Ok(true));
            assert_eq!(sender.queued_bytes(), 0);
            sender.close();
            assert_eq!(bound.closed(), None);
            let stats = bound.listener.stats();
            let bytes: usize = sent
                .iter()
                .flat_map(|message| &message.parts)
                .map(Bytes::len)
                .sum();
            assert_eq!((stats.messages, stats.bytes), (sent.len() as u64, bytes as u64));
            assert_eq!(stats.failed_connections, 0);
            bound.listener.close();
        }
    });
}

/// A tensor that is made in the heap is read where it was made, and its memory used again when both have let it go.
#[test]
fn a_tensor_in_the_heap_is_not_copied() {
    bounded(|| {
        let bound = bind(ListenerOptions {
            // What lies in the heap weighs nothing.
            held_bytes_per_connection: 400_000,
            ..ListenerOptions::default()
        });
        let sender = bound.connect(Over::Memory, with_heap(600_000));
        bound.opened();
        assert!(
            sender.buffer(MIN_PLACED_BYTES - 1).is_none(),
            "too small to be worth it"
        );
        assert!(sender.buffer(700_000).is_none(), "no room");
        let mut kept = Vec::new();
        for seed in 0..2 {
            let mut buffer = sender.buffer(250_000).expect("room");
            buffer.copy_from_slice(&pattern(250_000, seed));
            let bytes = Bytes::from(buffer);
            let message = BulkOutgoing {
                parts: vec![bytes.clone()],
                ..state(&[250_000], seed)
            };
            sender.send(message.clone(), LIMIT).expect("room comes");
            let arrived = bound.message();
            assert_same(&arrived, &message);
            let part = arrived.parts.into_iter().next().expect("one part");
            assert!(format!("{part:?}").contains("in_place: true"), "{part:?}");
            kept.push((bytes, part.into_bytes()));
        }
        assert!(sender.buffer(250_000).is_none(), "both are held");
        // What finds no room goes through the slots.
        sender.send(state(&[250_000], 7), LIMIT).expect("room comes");
        let copied = bound.message();
        assert_same(&copied, &state(&[250_000], 7));
        assert!(format!("{:?}", copied.parts[0]).contains("in_place: false"));
        assert_eq!(sender.drain(LIMIT), Ok(true), "held is not under way");
        let (made, read) = kept.swap_remove(0);
        drop(made);
        assert!(sender.buffer(250_000).is_none(), "the receiver reads it");
        drop(read);
        let begun = Instant::now();
        while sender.buffer(250_000).is_none() {
            assert!(begun.elapsed() < LIMIT, "it never comes back");
            std::thread::yield_now();
        }
        // What is held outlives its link.
        sender.close();
        bound.listener.close();
        let (_, read) = &kept[0];
        assert!(read[..] == pattern(250_000, 1)[..]);
    });
}

#[test]
fn senders_do_not_mix() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let senders: Vec<_> = (0..4_u16)
            .map(|index| {
                let from = Endpoint {
                    seat: Seat::draft(index + 1),
                    generation: Generation(0),
                };
                let hello = Hello { from, ..hello(0) };
                bound
                    .dial(BOTH[usize::from(index % 2)], hello, small_ring(), |_| {})
                    .expect("the listener is there")
            })
            .collect();
        for round in 0..20 {
            for (index, sender) in senders.iter().enumerate() {
                let length = 4 * (round * 997 + index * 3001);
                sender
                    .send(state(&[length], index as u64), LIMIT)
                    .expect("room comes");
            }
        }
        let (mut rounds, mut left) = ([0; 4], 80);
        while left > 0 {
            if let BulkEvent::Message(message) = bound.event() {
                let index = usize::from(message.header.from.index) - 1;
                let length = 4 * (rounds[index] * 997 + index * 3001);
                assert!(message.parts[0][..] == pattern(length, index as u64)[..]);
                rounds[index] += 1;
                left -= 1;
            }
        }
        assert_eq!(rounds, [20; 4]);
    });
}

#[test]
fn a_sender_for_another_occupant_is_refused() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let others = [
            Endpoint {
                generation: Generation(2),
                ..HERE
            },
            Endpoint {
                generation: Generation(4),
                ..HERE
            },
            Endpoint {
                seat: Seat::draft(1),
                ..HERE
            },
        ];
        for (to, over) in others.iter().flat_map(|&to| BOTH.map(|over| (to, over))) {
            let error = bound
                .dial(over, Hello { to, ..hello(1) }, small_ring(), |_| {})
                .err();
            assert!(
                matches!(&error, Some(LinkError::Refused { reason }) if reason.contains("the hello is for")),
                "{error:?}"
            );
            assert!(matches!(bound.closed(), Some(LinkError::WrongReceiver { .. })));
        }
        assert_eq!(bound.listener.stats().failed_connections, 6);
    });
}

#[test]
fn a_newer_generation_replaces_an_older_one() {
    let ways = BOTH.iter().flat_map(|&old| BOTH.map(|new| (old, new)));
    for (old_way, new_way) in ways {
        bounded(move || {
            let bound = bind(ListenerOptions::default());
            let (told, ends) = crossbeam_channel::unbounded();
            let on_end = move |error: &LinkError| {
                let _ = told.send(error.clone());
            };
            let old = bound
                .dial(old_way, hello(1), small_ring(), on_end)
                .expect("accepted");
            bound.opened();
            let _new = bound
                .dial(new_way, hello(2), small_ring(), |_| {})
                .expect("accepted");
            let end = ends.recv_timeout(LIMIT).expect("the old one is told");
            assert!(
                matches!(&end, LinkError::Refused { reason } if reason.contains("superseded")),
                "{end}"
            );
            assert_eq!(old.ended(), Some(end));
            assert!(matches!(old.try_send(state(&[4], 1)), Err(SendError::Ended(_))));
            let error = bound.dial(old_way, hello(1), small_ring(), |_| {}).err();
            assert!(matches!(&error, Some(LinkError::Refused { .. })), "{error:?}");
            let closed: Vec<_> = (0..3)
                .filter_map(|_| match bound.event() {
                    BulkEvent::Closed { error, .. } => Some(error),
                    _ => None,
                })
                .collect();
            assert_eq!(closed.len(), 2, "{closed:?}");
            assert!(
                closed
                    .iter()
                    .all(|error| matches!(error, Some(LinkError::Superseded { newest: 2, .. })))
            );
        });
    }
}

#[test]
fn what_cannot_be_sent_is_said_at_once() {
    for over in BOTH {
        bounded(move || {
            let bound = bind(ListenerOptions::default());
            let sender = bound.connect(
                over,
                SenderOptions {
                    max_message_bytes: 10_000,
                    ..small_ring()
                },
            );
            let error = sender.try_send(state(&[12_000], 1)).expect_err("too large");
            assert!(
                matches!(
                    error,
                    SendError::Invalid(LinkError::TooLarge {
                        limit_bytes: 10_000,
                        ..
                    })
                ),
                "{error}"
            );
            let error = sender
                .try_send(state(&[4; MAX_PARTS + 1], 1))
                .expect_err("too many");
            assert!(
                matches!(error, SendError::Invalid(LinkError::TooManyParts { .. })),
                "{error}"
            );
            let mut short = state(&[8], 1);
            short.parts[0].truncate(7);
            let error = sender.try_send(short).expect_err("no f32");
            assert!(
                matches!(error, SendError::Invalid(LinkError::Header { .. })),
                "{error}"
            );
            sender.send(state(&[8], 1), LIMIT).expect("the link is unharmed");
            bound.opened();
            assert_same(&bound.message(), &state(&[8], 1));
        });
    }
}

#[test]
fn names_are_checked_and_exclusive() {
    let inbox = |_| {};
    for name in [String::new(), "x".repeat(108)] {
        let error = BulkListener::bind(&name, HERE, ListenerOptions::default(), None, inbox).err();
        assert!(matches!(error, Some(LinkError::Name { .. })), "{error:?}");
    }
    let bound = bind(ListenerOptions::default());
    let error = BulkListener::bind(&bound.name, HERE, ListenerOptions::default(), None, inbox).err();
    assert_eq!(
        error,
        Some(LinkError::NameTaken {
            name: bound.name.clone()
        })
    );
    let name = bound.name.clone();
    bound.listener.close();
    let error = BulkSender::connect(&name, hello(1), small_ring(), |_| {}).err();
    assert_eq!(
        error,
        Some(LinkError::NoListener { name: name.clone() }),
        "nothing is left of a closed listener"
    );
    BulkListener::bind(&name, HERE, ListenerOptions::default(), None, inbox).expect("the name is free again");
}
