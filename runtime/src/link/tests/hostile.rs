//! L-3: peers within a host whose frames are written by hand.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags};

use super::*;
use crate::link::checksum::checksum;
use crate::link::memory::frame::{Frame, FrameKind, FrameReader, Read};
use crate::link::memory::ring::{RingShape, WriteRing};
use crate::link::memory::socket;
use crate::link::message::Encoded;

/// A sender whose frames are written by hand.
struct RawSender {
    socket: OwnedFd,
    ring: WriteRing,
    header: Vec<u8>,
    message_bytes: u64,
}

impl RawSender {
    /// Says hello and prepares the first chunk: a header in slot 0, for a message with one part of 8 bytes.
    fn open(bound: &Bound) -> Self {
        let shape = RingShape::new(4, 4096).expect("allowed");
        let socket = socket::connect(&bound.name, 60_000).expect("the listener is there");
        let mut ring = WriteRing::create(shape).expect("memory is left");
        socket::send_hello(&socket, &hello(1), (shape, ring.fd()), None).expect("the listener waits");
        assert!(matches!(
            FrameReader::new().next(&socket),
            Ok(Read::Got(Frame {
                kind: FrameKind::Welcome,
                ..
            }))
        ));
        let encoded =
            Encoded::new(&state(&[8], 1), Seat::verifier(1), Generation(1), 1 << 20).expect("small");
        ring.write(0, &encoded.header);
        Self {
            socket,
            ring,
            header: encoded.header,
            message_bytes: encoded.message_bytes,
        }
    }

    fn first_chunk(&self) -> Frame {
        Frame {
            length: self.header.len() as u32,
            message_bytes: self.message_bytes,
            header_bytes: self.header.len() as u32,
            checksum: Some(checksum(&self.header)),
            ..Frame::new(FrameKind::Chunk)
        }
    }

    fn second_chunk(&self) -> Frame {
        Frame {
            slot: 1,
            length: 8,
            sequence: 1,
            checksum: None,
            ..self.first_chunk()
        }
    }

    fn send(&self, bytes: &[u8]) {
        rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL).expect("the listener reads");
    }
}

/// L-3: whatever a sender does wrong ends its connection, says why, and harms nobody else.
#[test]
fn a_sender_that_breaks_the_protocol_is_put_out() {
    type Misdeed = fn(&mut RawSender);
    let misdeeds: [(&str, Misdeed); 23] = [
        ("before the header", |raw| {
            raw.send(
                &Frame {
                    kind: FrameKind::Placed,
                    ..raw.first_chunk()
                }
                .encode(),
            );
        }),
        ("a heap that the link does not have", |raw| {
            raw.send(&raw.first_chunk().encode());
            raw.send(
                &Frame {
                    kind: FrameKind::Placed,
                    ..raw.second_chunk()
                }
                .encode(),
            );
        }),
        ("Taken where a chunk", |raw| {
            raw.send(&Frame::new(FrameKind::Taken).encode())
        }),
        ("it starts with", |raw| raw.send(&[0x55; 480])),
        ("its crc32c is", |raw| {
            let mut bytes = raw.first_chunk().encode();
            bytes[13] ^= 1;
            raw.send(&bytes);
        }),
        ("version", |raw| {
            let mut bytes = raw.first_chunk().encode();
            bytes[4] = 99;
            raw.send(&bytes);
        }),
        ("slot 4 of 4", |raw| {
            raw.send(
                &Frame {
                    slot: 4,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("slot 4294967295 of 4", |raw| {
            raw.send(
                &Frame {
                    slot: u32::MAX,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("a chunk of 4294967295 bytes", |raw| {
            raw.send(
                &Frame {
                    length: u32::MAX,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("a chunk of 0 bytes", |raw| {
            raw.send(
                &Frame {
                    length: 0,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("chunk 1 where 0", |raw| {
            raw.send(
                &Frame {
                    sequence: 1,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("exceeds the limit", |raw| {
            raw.send(
                &Frame {
                    message_bytes: u64::MAX,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("a header of 0 bytes", |raw| {
            raw.send(
                &Frame {
                    header_bytes: 0,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("a header of 4294967295 bytes", |raw| {
            raw.send(
                &Frame {
                    header_bytes: u32::MAX,
                    message_bytes: 1 << 29,
                    ..raw.first_chunk()
                }
                .encode(),
            );
        }),
        ("a header of 100 bytes in a message of 99", |raw| {
            raw.send(
                &Frame {
                    header_bytes: 100,
                    message_bytes: 99,
                    ..raw.first_chunk()
                }
                .encode(),
            );
        }),
        ("do not add up", |raw| {
            raw.send(
                &Frame {
                    message_bytes: 1 << 29,
                    ..raw.first_chunk()
                }
                .encode(),
            )
        }),
        ("is damaged", |raw| {
            raw.ring.write(0, &[0xee]);
            raw.send(&raw.first_chunk().encode());
        }),
        ("cannot decode", |raw| {
            raw.ring.write(0, &vec![0xff; raw.header.len()]);
            raw.send(
                &Frame {
                    checksum: None,
                    ..raw.first_chunk()
                }
                .encode(),
            );
        }),
        ("other lengths", |raw| {
            raw.send(&raw.first_chunk().encode());
            raw.send(
                &Frame {
                    message_bytes: 1,
                    ..raw.second_chunk()
                }
                .encode(),
            );
        }),
        ("a chunk of 9 bytes where 8", |raw| {
            raw.send(&raw.first_chunk().encode());
            raw.send(
                &Frame {
                    length: 9,
                    ..raw.second_chunk()
                }
                .encode(),
            );
        }),
        ("Release where a chunk", |raw| {
            raw.send(&Frame::new(FrameKind::Release).encode())
        }),
        ("Bye where a chunk", |raw| {
            raw.send(&raw.first_chunk().encode());
            raw.send(&Frame::new(FrameKind::Bye).encode());
        }),
        ("in the middle of a frame", |raw| {
            raw.send(&raw.first_chunk().encode()[..20]);
            rustix::net::shutdown(&raw.socket, Shutdown::Write).expect("connected");
        }),
    ];
    bounded(move || {
        let bound = bind(ListenerOptions::default());
        let good = bound.connect(Over::Memory, small_ring());
        bound.opened();
        for (seed, (words, misdeed)) in (0..).zip(misdeeds) {
            let mut raw = RawSender::open(&bound);
            bound.opened();
            misdeed(&mut raw);
            let error = bound.closed().expect("no goodbye was said").to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
            let mut reader = FrameReader::new();
            let told = loop {
                match reader.next(&raw.socket) {
                    Ok(Read::Got(Frame {
                        kind: FrameKind::Release,
                        ..
                    })) => {}
                    Ok(Read::Got(Frame {
                        kind: FrameKind::Refuse,
                        length,
                        ..
                    })) => {
                        break reader.text(&raw.socket, length);
                    }
                    _ => panic!("the sender was not told of `{words}`"),
                }
            };
            assert_eq!(told, error);
            good.send(state(&[9_000], seed), LIMIT).expect("room comes");
            assert_same(&bound.message(), &state(&[9_000], seed));
        }
    });
}

/// The raw sender's frames are right when nothing is done wrong, so the test above tests what it says.
#[test]
fn a_raw_sender_that_keeps_the_protocol_is_heard() {
    bounded(|| {
        let bound = bind(ListenerOptions::default());
        let mut raw = RawSender::open(&bound);
        bound.opened();
        raw.ring.write(1, &pattern(8, 1));
        raw.send(&raw.first_chunk().encode());
        raw.send(&raw.second_chunk().encode());
        assert_same(&bound.message(), &state(&[8], 1));
        let mut reader = FrameReader::new();
        for slot in 0..2 {
            let Ok(Read::Got(release)) = reader.next(&raw.socket) else {
                panic!("slot {slot} does not come back")
            };
            assert_eq!(
                release,
                Frame {
                    slot,
                    ..Frame::new(FrameKind::Release)
                }
            );
        }
        drop(raw);
        assert_eq!(
            bound.closed(),
            Some(LinkError::PeerLost {
                place: "between two messages"
            })
        );
    });
}

#[test]
fn a_hello_needs_exactly_one_sealed_ring() {
    fn send_with(socket: &OwnedFd, frame: &Frame, body: &[u8], descriptors: &[BorrowedFd<'_>]) {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
        }
        let frame = frame.encode();
        let slices = [std::io::IoSlice::new(&frame), std::io::IoSlice::new(body)];
        rustix::net::sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL).expect("the listener waits");
    }
    bounded(|| {
        let bound = bind(ListenerOptions {
            max_ring_bytes: 1 << 20,
            ..ListenerOptions::default()
        });
        let shape = RingShape::new(4, 4096).expect("allowed");
        let ring = WriteRing::create(shape).expect("memory is left");
        let body = |slots: u32, slot_bytes: u32| {
            crate::wire::encode(&(hello(1), slots, slot_bytes, 0_u64)).expect("small")
        };
        let with_heap =
            |heap_bytes: u64| crate::wire::encode(&(hello(1), 4_u32, 4096_u32, heap_bytes)).expect("small");
        let unsealed = rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC).expect("memory is left");
        let null = std::fs::File::open("/dev/null").expect("every Linux has it");
        let right = body(4, 4096);
        let cases: [(&str, Vec<u8>, Vec<BorrowedFd<'_>>); 12] = [
            (
                "0 descriptors came with the hello instead of 1",
                right.clone(),
                vec![],
            ),
            ("2 descriptors came", right.clone(), vec![ring.fd(), ring.fd()]),
            (
                "3 descriptors came",
                right.clone(),
                vec![ring.fd(), ring.fd(), ring.fd()],
            ),
            (
                "1 descriptors came with the hello instead of 2",
                with_heap(1 << 20),
                vec![ring.fd()],
            ),
            ("bytes instead of", with_heap(1 << 20), vec![ring.fd(), ring.fd()]),
            (
                "a heap of 18446744073709551615 bytes",
                with_heap(u64::MAX),
                vec![ring.fd(), ring.fd()],
            ),
            ("no memfd", right.clone(), vec![null.as_fd()]),
            ("not sealed", right, vec![unsealed.as_fd()]),
            ("bytes instead of", body(8, 4096), vec![ring.fd()]),
            ("is not allowed", body(u32::MAX, u32::MAX), vec![ring.fd()]),
            ("is not allowed", body(128, 1 << 20), vec![ring.fd()]),
            ("cannot decode", vec![0xff; 40], vec![ring.fd()]),
        ];
        for (words, body, descriptors) in cases {
            let socket = socket::connect(&bound.name, 60_000).expect("the listener is there");
            let frame = Frame {
                length: body.len() as u32,
                ..Frame::new(FrameKind::Hello)
            };
            send_with(&socket, &frame, &body, &descriptors);
            let error = bound.closed().expect("refused").to_string();
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
        let socket = socket::connect(&bound.name, 60_000).expect("the listener is there");
        send_with(
            &socket,
            &Frame {
                length: u32::MAX,
                ..Frame::new(FrameKind::Hello)
            },
            &[],
            &[ring.fd()],
        );
        assert!(
            bound
                .closed()
                .expect("refused")
                .to_string()
                .contains("exceeds 256")
        );
    });
}

/// L-3 in the other direction.
#[test]
fn a_receiver_that_breaks_the_protocol_ends_the_link() {
    let garbage = vec![0xaa; 48];
    let cases: [(&str, Vec<u8>); 6] = [
        (
            "a tensor is taken that was not sent",
            Frame::new(FrameKind::Taken).encode().to_vec(),
        ),
        (
            "extent 5 comes back but was not given",
            Frame {
                slot: 5,
                ..Frame::new(FrameKind::Returned)
            }
            .encode()
            .to_vec(),
        ),
        (
            "comes back but was not given",
            Frame {
                slot: 3,
                ..Frame::new(FrameKind::Release)
            }
            .encode()
            .to_vec(),
        ),
        (
            "slot 77 comes back",
            Frame {
                slot: 77,
                ..Frame::new(FrameKind::Release)
            }
            .encode()
            .to_vec(),
        ),
        (
            "where a slot was expected",
            Frame::new(FrameKind::Welcome).encode().to_vec(),
        ),
        ("bad frame", garbage),
    ];
    bounded(move || {
        for (words, bytes) in cases {
            let name = unique_name();
            let listening = socket::listen(&name).expect("the name is free");
            let accepting = std::thread::spawn(move || {
                let socket =
                    rustix::net::accept_with(&listening, SocketFlags::CLOEXEC).expect("a sender comes");
                socket::receive_hello(&socket, 60_000).expect("a hello");
                let mut answer = Frame::new(FrameKind::Welcome).encode().to_vec();
                answer.extend(bytes);
                rustix::net::send(&socket, &answer, SendFlags::NOSIGNAL).expect("the sender waits");
                socket
            });
            let (told, ends) = crossbeam_channel::unbounded();
            let on_end = move |error: &LinkError| {
                let _ = told.send(error.to_string());
            };
            let sender = BulkSender::connect(&name, hello(1), with_heap(1 << 20), on_end).expect("welcome");
            let _socket = accepting.join().expect("accepted");
            let sent = sender.send(state(&[8], 1), LIMIT);
            assert!(matches!(sent, Ok(()) | Err(SendError::Ended(_))));
            let error = ends.recv_timeout(LIMIT).expect("the link ends");
            assert!(error.contains(words), "`{error}` instead of `{words}`");
        }
    });
}

/// L-3: a bit that flips between the two copies, in a header or in a tensor; the message is not delivered.
#[test]
fn a_chunk_that_changes_on_the_way_ends_its_link() {
    bounded(|| {
        for (nth, bytes) in [(0, 20_000), (1, 20_000), (3, 20_000), (1, 100_000)] {
            let bound = bind(ListenerOptions::default());
            let sender = bound.connect(
                Over::Memory,
                SenderOptions {
                    corrupt_nth: Some(nth),
                    ..with_heap(1 << 20)
                },
            );
            bound.opened();
            sender.send(state(&[bytes], 1), LIMIT).expect("room");
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
