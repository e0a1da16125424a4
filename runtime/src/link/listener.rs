//! The receiving end of links: accepts senders and delivers what they send.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, SocketFlags};

use super::connection::Connection;
use super::error::LinkError;
use super::frame::{Frame, FrameKind};
use super::heap::HeapView;
use super::message::BulkMessage;
use super::pool::{Budget, BufferPool};
use super::ring::ReadRing;
use super::socket::{self, Endpoint, Hello, Opened, Speech};
use super::{DEFAULT_HEAP_BYTES, DEFAULT_MAX_MESSAGE_BYTES};
use crate::ids::{Generation, Seat};

/// How long the acceptor rests when the process has no descriptors left; the connection stays in the backlog.
const EXHAUSTED_PAUSE: Duration = Duration::from_millis(20);

/// Limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerOptions {
    /// Largest message that is accepted, header and parts.
    pub max_message_bytes: u64,
    /// Largest ring that a sender may bring.
    pub max_ring_bytes: u64,
    /// Largest heap that a sender may bring.
    pub max_heap_bytes: u64,
    /// Bytes of one connection that may be delivered and not yet dropped. One message is always accepted.
    pub held_bytes_per_connection: u64,
    /// Memory that is kept for buffers to come.
    pub pool_bytes: usize,
    /// Most connections at a time.
    pub max_connections: usize,
    /// How long a sender may take to say hello.
    pub handshake_timeout_ms: u64,
}

impl Default for ListenerOptions {
    fn default() -> Self {
        Self {
            max_message_bytes: DEFAULT_MAX_MESSAGE_BYTES,
            max_ring_bytes: 256 << 20,
            max_heap_bytes: DEFAULT_HEAP_BYTES,
            held_bytes_per_connection: 256 << 20,
            pool_bytes: 512 << 20,
            max_connections: 256,
            handshake_timeout_ms: 5_000,
        }
    }
}

/// What a listener tells.
#[derive(Debug)]
pub enum BulkEvent {
    /// A sender was accepted.
    Opened {
        /// What it said.
        peer: Hello,
    },
    /// A message is whole.
    Message(BulkMessage),
    /// A connection has ended, or was refused.
    Closed {
        /// What the sender said, if it came so far.
        peer: Option<Hello>,
        /// Why, unless the sender said goodbye.
        error: Option<LinkError>,
    },
}

/// Counters since the listener was bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListenerStats {
    /// Messages delivered.
    pub messages: u64,
    /// Bytes of their parts.
    pub bytes: u64,
    /// Connections that ended with an error, refused ones included.
    pub failed_connections: u64,
}

/// Listens under a name and delivers the messages of all senders.
///
/// Dropping it is [`BulkListener::close`].
pub struct BulkListener {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

struct Shared {
    here: Endpoint,
    options: ListenerOptions,
    socket: OwnedFd,
    pool: BufferPool,
    inbox: Box<dyn Fn(BulkEvent) + Send + Sync>,
    closing: AtomicBool,
    registry: Mutex<Registry>,
    messages: AtomicU64,
    bytes: AtomicU64,
    failed_connections: AtomicU64,
}

#[derive(Default)]
struct Registry {
    next_id: u64,
    open: BTreeMap<u64, Open>,
    readers: Vec<JoinHandle<()>>,
    /// Newest occupant of each seat that has said hello.
    newest: HashMap<Seat, Generation>,
}

struct Open {
    socket: Arc<OwnedFd>,
    from: Option<Endpoint>,
    /// Why this side ended the connection, if it did.
    verdict: Arc<OnceLock<LinkError>>,
}

impl Open {
    fn end(&self, error: LinkError) {
        // The verdict comes first: once the peer hears it and leaves, the reader must find it. The first one counts.
        let _ = self.verdict.set(error.clone());
        socket::send_refusal(&*self.socket, &error);
        // Fails only if the peer is gone already.
        let _ = rustix::net::shutdown(&*self.socket, Shutdown::Both);
    }
}

impl BulkListener {
    /// Listens under `name` as the occupant `here`; senders that want another one are refused.
    ///
    /// `inbox` is called from the reader threads, for one connection at a time in order. It must not block and must not
    /// close the listener; an unbounded channel is right, since undropped messages are bounded per connection.
    ///
    /// # Errors
    /// If the name is taken or wrong, or the system lacks descriptors or threads.
    pub fn bind(
        name: &str,
        here: Endpoint,
        options: ListenerOptions,
        inbox: impl Fn(BulkEvent) + Send + Sync + 'static,
    ) -> Result<Self, LinkError> {
        let shared = Arc::new(Shared {
            here,
            options,
            socket: socket::listen(name)?,
            pool: BufferPool::new(options.pool_bytes),
            inbox: Box::new(inbox),
            closing: AtomicBool::new(false),
            registry: Mutex::default(),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failed_connections: AtomicU64::new(0),
        });
        let accepting = Arc::clone(&shared);
        let acceptor = spawn("link-accept", move || accept(&accepting))?;
        Ok(Self {
            shared,
            acceptor: Some(acceptor),
        })
    }

    /// Counters so far.
    pub fn stats(&self) -> ListenerStats {
        ListenerStats {
            messages: self.shared.messages.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            failed_connections: self.shared.failed_connections.load(Ordering::Relaxed),
        }
    }

    /// Ends all connections and waits for their threads. Messages that were delivered stay valid.
    pub fn close(mut self) {
        self.stop();
    }

    fn stop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        // Wakes the acceptor. Fails only if it was done before.
        let _ = rustix::net::shutdown(&self.shared.socket, Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            // Panics were reported by their threads; here only their end counts.
            let _ = acceptor.join();
        }
        let readers = {
            let mut registry = self.shared.registry();
            for open in registry.open.values() {
                open.end(LinkError::Closed);
            }
            std::mem::take(&mut registry.readers)
        };
        for reader in readers {
            let _ = reader.join();
        }
    }
}

impl Drop for BulkListener {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_end(&self, peer: Option<Hello>, result: Result<(), LinkError>) {
        if result.is_err() {
            self.failed_connections.fetch_add(1, Ordering::Relaxed);
        }
        (self.inbox)(BulkEvent::Closed {
            peer,
            error: result.err(),
        });
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
    while !shared.closing.load(Ordering::Acquire) {
        match rustix::net::accept_with(&shared.socket, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                if let Err((socket, error)) = admit(shared, Arc::new(socket)) {
                    socket::send_refusal(&*socket, &error);
                    shared.report_end(None, Err(error));
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

/// Registers a connection and starts its reader.
fn admit(shared: &Arc<Shared>, socket: Arc<OwnedFd>) -> Result<(), (Arc<OwnedFd>, LinkError)> {
    let mut registry = shared.registry();
    let limit = shared.options.max_connections;
    if registry.open.len() >= limit {
        return Err((socket, LinkError::TooManyConnections { limit }));
    }
    // Dropping the handle of a thread that has ended frees what is left of it.
    registry.readers.retain(|reader| !reader.is_finished());
    let id = registry.next_id;
    registry.next_id += 1;
    let verdict = Arc::new(OnceLock::new());
    let reading = (Arc::clone(shared), Arc::clone(&socket), Arc::clone(&verdict));
    let reader = match spawn("link-read", move || serve(&reading.0, id, reading.1, &reading.2)) {
        Ok(reader) => reader,
        Err(error) => return Err((socket, error)),
    };
    registry.open.insert(
        id,
        Open {
            socket,
            from: None,
            verdict,
        },
    );
    registry.readers.push(reader);
    Ok(())
}

/// The reader thread of one connection.
fn serve(shared: &Arc<Shared>, id: u64, socket: Arc<OwnedFd>, verdict: &OnceLock<LinkError>) {
    let (peer, result) = match open(shared, id, &socket) {
        Err((peer, error)) => (peer, Err(error)),
        Ok(connection) => {
            (shared.inbox)(BulkEvent::Opened {
                peer: connection.peer,
            });
            let deliver = |message: BulkMessage| {
                shared.messages.fetch_add(1, Ordering::Relaxed);
                shared
                    .bytes
                    .fetch_add(message.header.parts.iter().sum(), Ordering::Relaxed);
                (shared.inbox)(BulkEvent::Message(message));
            };
            (Some(connection.peer), connection.run(&deliver))
        }
    };
    let result = match (verdict.get(), result) {
        (Some(verdict), Err(_)) => Err(verdict.clone()),
        (None, Err(error)) => {
            socket::send_refusal(&*socket, &error);
            Err(error)
        }
        (_, Ok(())) => Ok(()),
    };
    shared.registry().open.remove(&id);
    // The event comes after the descriptor is gone, so that whoever hears it finds nothing left of the connection.
    drop(socket);
    shared.report_end(peer, result);
}

/// Takes the hello and accepts or refuses it.
fn open(shared: &Shared, id: u64, socket: &Arc<OwnedFd>) -> Result<Connection, (Option<Hello>, LinkError)> {
    let early = |error| (None, error);
    let options = &shared.options;
    socket::check_user(&**socket).map_err(early)?;
    socket::limit_waits(&**socket, Some(options.handshake_timeout_ms)).map_err(early)?;
    let Opened {
        hello: peer,
        shape,
        ring,
        heap,
    } = socket::receive_hello(&**socket, options.handshake_timeout_ms).map_err(early)?;
    let late = |error| (Some(peer), error);
    if peer.to != shared.here {
        let (wanted, here) = (peer.to.to_string(), shared.here.to_string());
        return Err(late(LinkError::WrongReceiver { wanted, here }));
    }
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
    let budget = Budget::new(options.held_bytes_per_connection).map_err(late)?;
    fence(&mut shared.registry(), id, peer.from).map_err(late)?;
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
        pool: shared.pool.clone(),
        budget,
        max_message_bytes: options.max_message_bytes,
    })
}

/// Refuses occupants that were replaced, and ends the connections of those that this one replaces.
fn fence(registry: &mut Registry, id: u64, from: Endpoint) -> Result<(), LinkError> {
    let newest = registry.newest.entry(from.seat).or_insert(from.generation);
    if *newest > from.generation {
        return Err(LinkError::Superseded {
            sender: from.to_string(),
            newest: newest.0,
        });
    }
    *newest = from.generation;
    for open in registry.open.values() {
        if let Some(old) = open.from
            && old.seat == from.seat
            && old.generation < from.generation
        {
            open.end(LinkError::Superseded {
                sender: old.to_string(),
                newest: from.generation.0,
            });
        }
    }
    if let Some(open) = registry.open.get_mut(&id) {
        open.from = Some(from);
    }
    Ok(())
}
