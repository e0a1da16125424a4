//! Accepts senders of this host.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags};

use super::connection::Connection;
use super::frame::{Frame, FrameKind};
use super::heap::HeapView;
use super::ring::ReadRing;
use super::socket::{self, Opened, Speech};
use crate::link::bell::Bell;
use crate::link::error::LinkError;
use crate::link::hello::Hello;
use crate::link::listener::{Hub, Place};
use crate::link::pool::Budget;

/// How long the acceptor rests when the process has no descriptors left; the connection stays in the backlog.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// The thread that accepts, and those that read.
pub(in crate::link) struct Acceptor {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    hub: Arc<Hub>,
    socket: OwnedFd,
    readers: Mutex<Vec<JoinHandle<()>>>,
}

/// Listens under a name.
pub(in crate::link) fn listen(name: &str, hub: &Arc<Hub>) -> Result<Acceptor, LinkError> {
    let shared = Arc::new(Shared {
        hub: Arc::clone(hub),
        socket: socket::listen(name)?,
        readers: Mutex::default(),
    });
    let accepting = Arc::clone(&shared);
    let thread = Some(spawn("link-accept", move || accept(&accepting))?);
    Ok(Acceptor { shared, thread })
}

impl Acceptor {
    /// Waits for all threads. The hub was closed before, so that nobody comes any more.
    pub(in crate::link) fn stop(&mut self) {
        // Wakes the acceptor. Fails only if it was done before.
        let _ = rustix::net::shutdown(&self.shared.socket, Shutdown::Both);
        // Panics were reported by their threads; here only their end counts.
        let _ = self.thread.take().map(JoinHandle::join);
        for reader in std::mem::take(&mut *self.shared.readers()) {
            let _ = reader.join();
        }
    }
}

impl Shared {
    fn readers(&self) -> std::sync::MutexGuard<'_, Vec<JoinHandle<()>>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, LinkError> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(body)
        .map_err(|error| LinkError::System {
            what: "start a link thread",
            source: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
        })
}

fn accept(shared: &Arc<Shared>) {
    while !shared.hub.is_closed() {
        match rustix::net::accept_with(&shared.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if let Err((socket, error)) = admit(shared, Arc::new(socket)) {
                    socket::send_refusal(&*socket, &error);
                    shared.hub.report_end(None, Err(error));
                }
            }
            Err(Errno::INTR | Errno::CONNABORTED) => {}
            // The socket was shut down, or the loop ends above.
            Err(Errno::INVAL) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a link; trying again");
                std::thread::sleep(EXHAUSTED_PAUSE);
            }
        }
    }
}

/// Takes a place for a connection and starts its reader.
fn admit(shared: &Arc<Shared>, socket: Arc<OwnedFd>) -> Result<(), (Arc<OwnedFd>, LinkError)> {
    let peer = Arc::clone(&socket);
    let hang_up = move |error: &LinkError| {
        socket::send_refusal(&*peer, error);
        // Fails only if the peer is gone already.
        let _ = rustix::net::shutdown(&*peer, Shutdown::Both);
    };
    let place = match shared.hub.enter(Box::new(hang_up)) {
        Ok(place) => place,
        Err(error) => return Err((socket, error)),
    };
    let (hub, reading) = (Arc::clone(&shared.hub), Arc::clone(&socket));
    let mut readers = shared.readers();
    // Dropping the handle of a thread that has ended frees what is left of it.
    readers.retain(|reader| !reader.is_finished());
    match spawn("link-read", move || serve(&hub, place, reading)) {
        Ok(reader) => readers.push(reader),
        Err(error) => return Err((socket, error)),
    }
    Ok(())
}

/// The reader thread of one connection.
fn serve(hub: &Hub, place: Place, socket: Arc<OwnedFd>) {
    let (peer, result) = match open(hub, &place, &socket) {
        Err((peer, error)) => (peer, Err(error)),
        Ok(connection) => {
            hub.opened(connection.peer);
            (
                Some(connection.peer),
                connection.run(&|message| hub.deliver(message)),
            )
        }
    };
    if let Err(error) = &result {
        // One that was ended from outside has been told, and its socket is shut.
        socket::send_refusal(&*socket, error);
    }
    let result = place.leave(result);
    // The event comes after the descriptor is gone, so that whoever hears it finds nothing left of the connection.
    drop(socket);
    hub.report_end(peer, result);
}

/// Takes the hello and accepts or refuses it.
fn open(hub: &Hub, place: &Place, socket: &Arc<OwnedFd>) -> Result<Connection, (Option<Hello>, LinkError)> {
    let early = |error| (None, error);
    let options = &hub.options;
    socket::check_user(&**socket).map_err(early)?;
    socket::limit_waits(&**socket, Some(options.handshake_timeout_ms)).map_err(early)?;
    let Opened {
        hello: peer,
        shape,
        ring,
        heap,
    } = socket::receive_hello(&**socket, options.handshake_timeout_ms).map_err(early)?;
    let late = |error| (Some(peer), error);
    hub.check_receiver(&peer).map_err(late)?;
    if shape.bytes() > options.max_ring_bytes {
        let (slots, slot_bytes) = (shape.slots(), shape.slot_bytes() as u32);
        return Err(late(LinkError::RingShape { slots, slot_bytes }));
    }
    if let Some(&(_, bytes)) = heap.as_ref().filter(|(_, bytes)| *bytes > options.max_heap_bytes) {
        let limit_bytes = options.max_heap_bytes;
        return Err(late(LinkError::HeapSize { bytes, limit_bytes }));
    }
    let ring = ReadRing::map(ring, shape).map_err(late)?;
    let heap = heap
        .map(|(fd, bytes)| HeapView::map(&fd, bytes))
        .transpose()
        .map_err(late)?;
    let bell = Bell::new().map_err(late)?;
    hub.fence(place, peer.from).map_err(late)?;
    socket::limit_waits(&**socket, None).map_err(late)?;
    let welcome = Frame::new(FrameKind::Welcome).encode();
    rustix::net::send(&**socket, &welcome, SendFlags::NOSIGNAL)
        .map_err(LinkError::system("welcome a sender"))
        .map_err(late)?;
    Ok(Connection {
        socket: Arc::clone(socket),
        speech: Speech::new(Arc::clone(socket)),
        ring,
        heap,
        peer,
        pool: hub.pool.clone(),
        budget: Budget::new(options.held_bytes_per_connection, bell.wake()),
        bell,
        max_message_bytes: options.max_message_bytes,
    })
}
