//! A link of the product with both of its ends in this process.

use std::net::Ipv4Addr;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkEvent, BulkKind, BulkListener, BulkOutgoing, BulkSender, Endpoint, HeapBuffer, Hello,
    ListenerOptions, Network, SendError, SenderOptions, StateKind,
};

/// Longer than any message takes.
const LIMIT: Duration = Duration::from_secs(60);
/// Messages under way at a time, so that both ends have work.
const UNDER_WAY: usize = 4;

/// Which way a link goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// Through memory.
    Memory,
    /// Over the loopback device, as to another host.
    Network,
}

/// Both ends of a link.
pub(super) struct Link {
    sender: BulkSender,
    events: Receiver<BulkEvent>,
    _listener: BulkListener,
}

impl Link {
    pub(super) fn open(way: Way, options: SenderOptions) -> Result<Self> {
        static OPENED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = OPENED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("eaglet-bench-{}-{number}", std::process::id());
        let end = |seat| Endpoint {
            seat,
            generation: Generation(0),
        };
        let (from, to) = (end(Seat::verifier(0)), end(Seat::draft(0)));
        let (inbox, events) = mpsc::channel();
        let network = (way == Way::Network).then(|| Network {
            address: (Ipv4Addr::LOCALHOST, 0).into(),
            token: name.clone(),
        });
        let listener = BulkListener::bind(
            &name,
            to,
            ListenerOptions::default(),
            network.clone(),
            move |event| {
                // A measurement that was interrupted no longer listens.
                let _ = inbox.send(event);
            },
        )
        .context("cannot listen for a link")?;
        let hello = Hello {
            from,
            epoch: Epoch(0),
            to,
        };
        let sender = match (network, listener.network_address()) {
            (Some(network), Some(address)) => {
                BulkSender::connect_remote(&Network { address, ..network }, hello, options, |_| {})
            }
            _ => BulkSender::connect(&name, hello, options, |_| {}),
        }
        .context("cannot make a link")?;
        Ok(Self {
            sender,
            events,
            _listener: listener,
        })
    }

    /// Memory in which a tensor for this link can be made, if it has any.
    pub(super) fn buffer(&self, bytes: usize) -> Option<HeapBuffer> {
        self.sender.buffer(bytes)
    }

    /// Sends `count` tensors and waits until the last of them is there; `make` may be asked again when it has none yet.
    pub(super) fn carry(
        &self,
        count: usize,
        bytes: usize,
        make: &dyn Fn(&Self) -> Option<Bytes>,
    ) -> Result<()> {
        let begun = Instant::now();
        let (mut sent, mut received) = (0, 0);
        while received < count {
            while sent < count && sent < received + UNDER_WAY {
                let Some(part) = make(self) else { break };
                match self.sender.try_send(message(part)) {
                    Ok(()) => sent += 1,
                    Err(SendError::Full(_)) => break,
                    Err(error) => bail!("the link does not take a message: {error}"),
                }
            }
            if received == sent {
                // Memory that was given back is seen in a moment.
                ensure!(begun.elapsed() < LIMIT, "the link has no room for {bytes} bytes");
                std::thread::yield_now();
                continue;
            }
            match self.events.recv_timeout(LIMIT) {
                Ok(BulkEvent::Message(message)) => {
                    ensure!(
                        message.parts.iter().map(|part| part.len()).sum::<usize>() == bytes,
                        "a message has another length than was sent"
                    );
                    received += 1;
                }
                Ok(BulkEvent::Opened { .. }) => {}
                Ok(BulkEvent::Closed { error, .. }) => bail!("the link ended: {error:?}"),
                Err(_) => bail!("a message did not arrive within {} s", LIMIT.as_secs()),
            }
        }
        Ok(())
    }
}

fn message(part: Bytes) -> BulkOutgoing {
    let kind = BulkKind::State {
        step: Step(0),
        what: StateKind::Weights,
        digest: Digest::default(),
        elements: part.len() as u64 / 4,
        first_element: 0,
    };
    BulkOutgoing {
        epoch: Epoch(0),
        kind,
        parts: vec![part],
    }
}
