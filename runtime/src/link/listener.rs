//! The receiving end of links: accepts senders and delivers what they send.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::error::LinkError;
use super::hello::{Endpoint, Hello};
use super::message::BulkMessage;
use super::pool::BufferPool;
use super::{DEFAULT_HEAP_BYTES, DEFAULT_MAX_MESSAGE_BYTES, Network, memory, network};
use crate::ids::{Generation, Seat};

/// Limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerOptions {
    /// Largest message that is accepted, header and parts.
    pub max_message_bytes: u64,
    /// In memory: largest ring that a sender may bring.
    pub max_ring_bytes: u64,
    /// In memory: largest heap that a sender may bring.
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

/// Listens under a name, and at an address if it has one, and delivers the messages of all senders.
///
/// Dropping it is [`BulkListener::close`].
pub struct BulkListener {
    hub: Arc<Hub>,
    memory: memory::Acceptor,
    network: Option<network::Acceptor>,
}

impl BulkListener {
    /// Listens for senders of this host under `name`, and for those of any host where `network` says, as the occupant
    /// `here`; senders that want another one are refused.
    ///
    /// `inbox` is called from threads of the links, for one connection at a time in order. It must not block and must not
    /// close the listener; an unbounded channel is right, since undropped messages are bounded per connection.
    ///
    /// # Errors
    /// If the name or the address is taken or wrong, or the system lacks descriptors or threads.
    pub fn bind(
        name: &str,
        here: Endpoint,
        options: ListenerOptions,
        network: Option<Network>,
        inbox: impl Fn(BulkEvent) + Send + Sync + 'static,
    ) -> Result<Self, LinkError> {
        let hub = Arc::new(Hub {
            here,
            options,
            pool: BufferPool::new(options.pool_bytes),
            inbox: Box::new(inbox),
            registry: Mutex::default(),
            messages: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            failed_connections: AtomicU64::new(0),
        });
        // The address first: a listener that is not made after all has then said nothing under the name.
        let network = network
            .map(|network| network::listen(&network, &hub))
            .transpose()?;
        Ok(Self {
            memory: memory::listen(name, &hub)?,
            network,
            hub,
        })
    }

    /// Where senders of other hosts find it, with the port that the system chose if none was asked for.
    pub fn network_address(&self) -> Option<SocketAddr> {
        self.network.as_ref().map(network::Acceptor::address)
    }

    /// Counters so far.
    pub fn stats(&self) -> ListenerStats {
        ListenerStats {
            messages: self.hub.messages.load(Ordering::Relaxed),
            bytes: self.hub.bytes.load(Ordering::Relaxed),
            failed_connections: self.hub.failed_connections.load(Ordering::Relaxed),
        }
    }

    /// Ends all connections and waits for their threads. Messages that were delivered stay valid.
    pub fn close(self) {
        // Dropping it does so.
    }
}

impl Drop for BulkListener {
    fn drop(&mut self) {
        self.hub.close();
        self.memory.stop();
        if let Some(network) = &mut self.network {
            network.stop();
        }
    }
}

/// What the connections of a listener share, whichever way they come.
pub(super) struct Hub {
    here: Endpoint,
    pub(super) options: ListenerOptions,
    pub(super) pool: BufferPool,
    inbox: Box<dyn Fn(BulkEvent) + Send + Sync>,
    registry: Mutex<Registry>,
    messages: AtomicU64,
    bytes: AtomicU64,
    failed_connections: AtomicU64,
}

#[derive(Default)]
struct Registry {
    closed: bool,
    next_id: u64,
    open: BTreeMap<u64, Open>,
    /// Newest occupant of each seat that has said hello.
    newest: HashMap<Seat, Generation>,
}

struct Open {
    from: Option<Endpoint>,
    verdict: Verdict,
    hang_up: HangUp,
}

/// Why this side ended a connection, if it did.
type Verdict = Arc<OnceLock<LinkError>>;

/// Tells the peer of a connection why it ends, and ends it. Never waits.
pub(super) type HangUp = Box<dyn Fn(&LinkError) + Send + Sync>;

impl Open {
    fn end(&self, error: &LinkError) {
        // The verdict comes first: once the peer hears it and leaves, the reader must find it. The first one counts.
        let _ = self.verdict.set(error.clone());
        (self.hang_up)(error);
    }
}

/// A connection's place among those of its listener. Dropping it gives it free.
pub(super) struct Place {
    hub: Arc<Hub>,
    id: u64,
    verdict: Verdict,
}

impl Place {
    /// Gives the place free; says why this side ended the connection, if it did, and otherwise how it ended by itself.
    pub(super) fn leave(self, result: Result<(), LinkError>) -> Result<(), LinkError> {
        match (self.verdict.get(), result) {
            (Some(verdict), Err(_)) => Err(verdict.clone()),
            (_, result) => result,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hub.registry().open.remove(&self.id);
    }
}

impl Hub {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connection, if there is one.
    pub(super) fn enter(self: &Arc<Self>, hang_up: HangUp) -> Result<Place, LinkError> {
        let mut registry = self.registry();
        let limit = self.options.max_connections;
        if registry.closed {
            return Err(LinkError::Closed);
        }
        if registry.open.len() >= limit {
            return Err(LinkError::TooManyConnections { limit });
        }
        let id = registry.next_id;
        registry.next_id += 1;
        let verdict = Verdict::default();
        let open = Open {
            from: None,
            verdict: Arc::clone(&verdict),
            hang_up,
        };
        registry.open.insert(id, open);
        Ok(Place {
            hub: Arc::clone(self),
            id,
            verdict,
        })
    }

    /// Refuses a hello for somebody else.
    pub(super) fn check_receiver(&self, hello: &Hello) -> Result<(), LinkError> {
        if hello.to == self.here {
            return Ok(());
        }
        let (wanted, here) = (hello.to.to_string(), self.here.to_string());
        Err(LinkError::WrongReceiver { wanted, here })
    }

    /// Refuses occupants that were replaced, and ends the connections of those that this one replaces.
    pub(super) fn fence(&self, place: &Place, from: Endpoint) -> Result<(), LinkError> {
        let mut registry = self.registry();
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
                open.end(&LinkError::Superseded {
                    sender: old.to_string(),
                    newest: from.generation.0,
                });
            }
        }
        if let Some(open) = registry.open.get_mut(&place.id) {
            open.from = Some(from);
        }
        Ok(())
    }

    pub(super) fn opened(&self, peer: Hello) {
        (self.inbox)(BulkEvent::Opened { peer });
    }

    pub(super) fn deliver(&self, message: BulkMessage) {
        self.messages.fetch_add(1, Ordering::Relaxed);
        self.bytes
            .fetch_add(message.header.parts.iter().sum(), Ordering::Relaxed);
        (self.inbox)(BulkEvent::Message(message));
    }

    /// Tells how a connection ended.
    pub(super) fn report_end(&self, peer: Option<Hello>, result: Result<(), LinkError>) {
        if result.is_err() {
            self.failed_connections.fetch_add(1, Ordering::Relaxed);
        }
        (self.inbox)(BulkEvent::Closed {
            peer,
            error: result.err(),
        });
    }

    /// Lets nobody in any more and ends all connections.
    fn close(&self) {
        let mut registry = self.registry();
        registry.closed = true;
        for open in registry.open.values() {
            open.end(&LinkError::Closed);
        }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.registry().closed
    }
}
