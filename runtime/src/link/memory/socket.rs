//! The sockets of a link and what comes with the hello.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use super::frame::{FRAME_BYTES, Frame, FrameKind};
use super::heap::Heap;
use super::ring::RingShape;
use crate::link::error::LinkError;
use crate::link::hello::Hello;
use crate::wire;

/// Largest encoded hello, in bytes. It holds a few numbers.
const HELLO_LIMIT_BYTES: usize = 256;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 128;

#[derive(Serialize, Deserialize)]
struct Opening {
    hello: Hello,
    slots: u32,
    slot_bytes: u32,
    /// 0 if there is no heap.
    heap_bytes: u64,
}

/// What comes with a hello.
pub(in crate::link) struct Opened {
    pub(in crate::link) hello: Hello,
    pub(in crate::link) shape: RingShape,
    pub(in crate::link) ring: OwnedFd,
    /// A heap and its size.
    pub(in crate::link) heap: Option<(OwnedFd, u64)>,
}

fn address(name: &str) -> Result<SocketAddrUnix, LinkError> {
    let wrong = || LinkError::Name {
        name: name.to_owned(),
    };
    if name.is_empty() {
        return Err(wrong());
    }
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|_| wrong())
}

fn stream_socket() -> Result<OwnedFd, LinkError> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(LinkError::system("make a socket"))
}

/// A listening socket.
pub(in crate::link) fn listen(name: &str) -> Result<OwnedFd, LinkError> {
    let (address, socket) = (address(name)?, stream_socket()?);
    rustix::net::bind(&socket, &address).map_err(|error| match error {
        Errno::ADDRINUSE => LinkError::NameTaken {
            name: name.to_owned(),
        },
        source => LinkError::System {
            what: "bind a link name",
            source,
        },
    })?;
    rustix::net::listen(&socket, BACKLOG).map_err(LinkError::system("listen on a link name"))?;
    Ok(socket)
}

/// A connected socket whose peer is of the same user. Every call on it gives up after `timeout_ms`.
pub(in crate::link) fn connect(name: &str, timeout_ms: u64) -> Result<OwnedFd, LinkError> {
    let (address, socket) = (address(name)?, stream_socket()?);
    limit_waits(&socket, Some(timeout_ms))?;
    rustix::net::connect(&socket, &address).map_err(|error| match error {
        Errno::CONNREFUSED => LinkError::NoListener {
            name: name.to_owned(),
        },
        Errno::AGAIN => LinkError::Silent { timeout_ms },
        source => LinkError::System {
            what: "connect to a link name",
            source,
        },
    })?;
    check_user(&socket)?;
    Ok(socket)
}

/// Makes blocking calls give up with `AGAIN` after so long, or never.
pub(in crate::link) fn limit_waits(socket: impl AsFd, timeout_ms: Option<u64>) -> Result<(), LinkError> {
    // The system takes zero for "never".
    let timeout = timeout_ms.map(|timeout_ms| Duration::from_millis(timeout_ms.max(1)));
    for direction in [Timeout::Recv, Timeout::Send] {
        sockopt::set_socket_timeout(&socket, direction, timeout)
            .map_err(LinkError::system("set a time limit on a socket"))?;
    }
    Ok(())
}

/// Names in the abstract namespace have no permissions, so the peer's user is checked instead.
pub(in crate::link) fn check_user(socket: impl AsFd) -> Result<(), LinkError> {
    let peer = sockopt::socket_peercred(socket).map_err(LinkError::system("ask who the peer is"))?;
    let own = rustix::process::geteuid();
    if peer.uid == own {
        Ok(())
    } else {
        Err(LinkError::OtherUser {
            peer_uid: peer.uid.as_raw(),
            own_uid: own.as_raw(),
        })
    }
}

/// Sends the hello and the descriptors of the ring and of the heap, if there is one.
pub(in crate::link) fn send_hello(
    socket: impl AsFd,
    hello: &Hello,
    (shape, ring): (RingShape, BorrowedFd<'_>),
    heap: Option<&Heap>,
) -> Result<(), LinkError> {
    let opening = Opening {
        hello: *hello,
        slots: shape.slots(),
        slot_bytes: shape.slot_bytes() as u32,
        heap_bytes: heap.map_or(0, Heap::bytes),
    };
    let body = wire::encode(&opening).map_err(|error| LinkError::Header {
        reason: error.to_string(),
    })?;
    let frame = Frame {
        length: body.len() as u32,
        ..Frame::new(FrameKind::Hello)
    }
    .encode();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors: Vec<BorrowedFd<'_>> = std::iter::once(ring).chain(heap.map(Heap::fd)).collect();
    let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
    debug_assert!(fits, "the space is made for two descriptors");
    let slices = [IoSlice::new(&frame), IoSlice::new(&body)];
    let sent = loop {
        match rustix::net::sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => {
                return Err(LinkError::PeerLost {
                    place: "before it answered the hello",
                });
            }
            result => break result.map_err(LinkError::system("send a hello"))?,
        }
    };
    if sent != frame.len() + body.len() {
        return Err(LinkError::System {
            what: "send a hello in one piece",
            source: Errno::MSGSIZE,
        });
    }
    Ok(())
}

/// Receives a hello and the descriptors that must come with it.
pub(in crate::link) fn receive_hello(socket: impl AsFd, timeout_ms: u64) -> Result<Opened, LinkError> {
    let mut bytes = [0; FRAME_BYTES];
    let (count, descriptors) = receive_with_descriptors(&socket, &mut bytes, timeout_ms)?;
    receive_exactly(&socket, &mut bytes[count..], timeout_ms)?;
    let frame = Frame::decode(&bytes)?;
    if frame.kind != FrameKind::Hello {
        return Err(LinkError::frame(format!(
            "{:?} where a hello was expected",
            frame.kind
        )));
    }
    let length = frame.length as usize;
    if length > HELLO_LIMIT_BYTES {
        return Err(LinkError::frame(format!(
            "a hello of {length} bytes exceeds {HELLO_LIMIT_BYTES}"
        )));
    }
    let mut body = [0; HELLO_LIMIT_BYTES];
    receive_exactly(&socket, &mut body[..length], timeout_ms)?;
    let opening: Opening = wire::decode(&body[..length]).map_err(|error| LinkError::Header {
        reason: error.to_string(),
    })?;
    let wanted = 1 + usize::from(opening.heap_bytes > 0);
    let found = descriptors.len();
    let mut descriptors = descriptors.into_iter().take(wanted);
    match descriptors.next().filter(|_| found == wanted) {
        Some(ring) => Ok(Opened {
            hello: opening.hello,
            shape: RingShape::new(opening.slots, opening.slot_bytes)?,
            ring,
            heap: descriptors.next().map(|heap| (heap, opening.heap_bytes)),
        }),
        None => Err(LinkError::Ring {
            reason: format!("{found} descriptors came with the hello instead of {wanted}"),
        }),
    }
}

fn receive_with_descriptors(
    socket: impl AsFd,
    bytes: &mut [u8],
    timeout_ms: u64,
) -> Result<(usize, Vec<OwnedFd>), LinkError> {
    // Room for one too many, to notice it; the system closes what does not fit.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut slices = [IoSliceMut::new(bytes)];
        match rustix::net::recvmsg(&socket, &mut slices, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            Err(error) => return Err(silence(error, timeout_ms)),
            Ok(received) => break received.bytes,
        }
    };
    let descriptors = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        })
        .flatten()
        .collect();
    if received == 0 {
        return Err(LinkError::PeerLost {
            place: "before its hello",
        });
    }
    Ok((received, descriptors))
}

fn receive_exactly(socket: impl AsFd, mut bytes: &mut [u8], timeout_ms: u64) -> Result<(), LinkError> {
    while !bytes.is_empty() {
        match rustix::net::recv(&socket, &mut *bytes, RecvFlags::empty()) {
            Ok((0, _)) => {
                return Err(LinkError::PeerLost {
                    place: "in the middle of its hello",
                });
            }
            Ok((count, _)) => bytes = &mut bytes[count..],
            Err(Errno::INTR) => {}
            Err(error) => return Err(silence(error, timeout_ms)),
        }
    }
    Ok(())
}

fn silence(error: Errno, timeout_ms: u64) -> LinkError {
    match error {
        Errno::AGAIN => LinkError::Silent { timeout_ms },
        Errno::CONNRESET => LinkError::PeerLost {
            place: "before its hello",
        },
        source => LinkError::System {
            what: "receive a hello",
            source,
        },
    }
}

/// The receiver's side of a socket: what it says comes from the thread that reads and from whoever drops a tensor.
pub(in crate::link) struct Speech {
    socket: Arc<OwnedFd>,
    /// Held while a frame is written, so that frames do not mix.
    turn: Mutex<()>,
}

impl Speech {
    pub(in crate::link) fn new(socket: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self {
            socket,
            turn: Mutex::new(()),
        })
    }

    /// Says something of a slot or of an extent.
    ///
    /// # Errors
    /// If the socket fails; that the peer is gone is no error here.
    pub(in crate::link) fn say(&self, kind: FrameKind, slot: u32) -> Result<(), Errno> {
        let frame = Frame {
            slot,
            ..Frame::new(kind)
        }
        .encode();
        let mut bytes = &frame[..];
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        while !bytes.is_empty() {
            match rustix::net::send(&*self.socket, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                // Its last messages may still lie in the ring; the end of the frames will tell.
                Err(Errno::PIPE | Errno::CONNRESET) => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Tells the peer why the link ends, if it still listens. Never waits.
pub(in crate::link) fn send_refusal(socket: impl AsFd, error: &LinkError) {
    let text = error.told();
    let mut bytes = Frame {
        length: text.len() as u32,
        ..Frame::new(FrameKind::Refuse)
    }
    .encode()
    .to_vec();
    bytes.extend_from_slice(text.as_bytes());
    // The peer may be gone or flooded; the end of the link tells it enough.
    let _ = rustix::net::send(socket, &bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}
