//! Tensors from one process's link to another's listener. Both ends are threads of this process: what a link does is the
//! same.

use std::hint::black_box;
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkEvent, BulkKind, BulkListener, BulkOutgoing, BulkSender, Endpoint, Hello, ListenerOptions, SendError,
    SenderOptions, StateKind,
};
use serde::Serialize;

use super::Plan;
use crate::bench::facts::Spread;

/// Longer than any message takes.
const LIMIT: Duration = Duration::from_secs(60);
/// Messages under way at a time, so that both ends have work.
const UNDER_WAY: usize = 4;

/// Rates at one size of tensors, in GB/s.
#[derive(Debug, Serialize)]
pub(super) struct SameHost {
    pub(super) bytes: usize,
    /// From one vector into another.
    pub(super) memcpy_gb_s: Spread,
    pub(super) crc32c_gb_s: Spread,
    /// Copied into the heap of the link and read there, with checksums.
    pub(super) copied_gb_s: Spread,
    /// The same without checksums.
    pub(super) unchecked_gb_s: Spread,
    /// Made in the heap of the link, with checksums.
    pub(super) in_place_gb_s: Spread,
    /// Copied into slots and out of them, as what finds no room in the heap is, with checksums.
    pub(super) slots_gb_s: Spread,
}

pub(super) fn measure(bytes: usize, plan: &Plan<'_>) -> Result<SameHost> {
    // A tensor of a message is f32.
    let bytes = bytes.next_multiple_of(4);
    let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 7) as u8).collect();
    let mut target = vec![1; bytes];
    let part = Bytes::from(source.clone());
    let with_heap = SenderOptions::default();
    let checked = Link::open(with_heap)?;
    let unchecked = Link::open(SenderOptions {
        checksum: false,
        ..with_heap
    })?;
    let without_heap = Link::open(SenderOptions {
        heap_bytes: 0,
        ..with_heap
    })?;
    let copied = |_: &Link| Some(part.clone());
    let in_place = |link: &Link| {
        // Too small a tensor has no place of its own: it is copied.
        let made = || link.sender.buffer(bytes).map(Bytes::from);
        if bytes < eaglet_runtime::link::MIN_PLACED_BYTES {
            Some(part.clone())
        } else {
            made()
        }
    };
    let [
        memcpy_gb_s,
        crc32c_gb_s,
        copied_gb_s,
        unchecked_gb_s,
        in_place_gb_s,
        slots_gb_s,
    ] = plan.rates(
        bytes,
        &mut [
            &mut |count| {
                for _ in 0..count {
                    target.copy_from_slice(black_box(&source));
                    black_box(&mut target);
                }
                Ok(())
            },
            &mut |count| {
                for _ in 0..count {
                    black_box(crc32c::crc32c(black_box(&source)));
                }
                Ok(())
            },
            &mut |count| checked.carry(count, bytes, &copied),
            &mut |count| unchecked.carry(count, bytes, &copied),
            &mut |count| checked.carry(count, bytes, &in_place),
            &mut |count| without_heap.carry(count, bytes, &copied),
        ],
    )?;
    Ok(SameHost {
        bytes,
        memcpy_gb_s,
        crc32c_gb_s,
        copied_gb_s,
        unchecked_gb_s,
        in_place_gb_s,
        slots_gb_s,
    })
}

/// Both ends of a link.
pub(super) struct Link {
    sender: BulkSender,
    events: Receiver<BulkEvent>,
    _listener: BulkListener,
}

impl Link {
    pub(super) fn open(options: SenderOptions) -> Result<Self> {
        static OPENED: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = OPENED.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("eaglet-bench-{}-{number}", std::process::id());
        let end = |seat| Endpoint {
            seat,
            generation: Generation(0),
        };
        let (from, to) = (end(Seat::verifier(0)), end(Seat::draft(0)));
        let (inbox, events) = mpsc::channel();
        let listener = BulkListener::bind(&name, to, ListenerOptions::default(), None, move |event| {
            // A measurement that was interrupted no longer listens.
            let _ = inbox.send(event);
        })
        .context("cannot listen for a link")?;
        let hello = Hello {
            from,
            epoch: Epoch(0),
            to,
        };
        let sender = BulkSender::connect(&name, hello, options, |_| {}).context("cannot make a link")?;
        Ok(Self {
            sender,
            events,
            _listener: listener,
        })
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
