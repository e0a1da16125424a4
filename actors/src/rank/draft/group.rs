//! The links of one epoch between draft replicas.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use eaglet_runtime::collective::{Outgoing, ReduceShape};
use eaglet_runtime::control::Member;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{BulkKind, BulkOutgoing, BulkSender, Endpoint, Hello, LinkError, SendError};

use crate::faults::{self, Point};

/// Longest wait for a replacement to take a state.
const STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// All members of an epoch, and a link to each other one.
pub(super) struct Group {
    seat: Seat,
    epoch: Epoch,
    /// Seats of the members, ascending.
    members: Vec<u16>,
    /// The draft seat that computes each lane, `[lanes]`.
    owners: Vec<u16>,
    links: Vec<(u16, BulkSender)>,
    /// What the links have no room for yet, each with its receiver.
    outbox: VecDeque<(u16, BulkOutgoing)>,
}

impl Group {
    pub(super) fn connect(
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        members: &[Member],
        owners: Vec<u16>,
    ) -> Result<Self, Unreached> {
        let links = members
            .iter()
            .filter(|member| member.seat != seat.index)
            .map(|member| match dial(seat, generation, epoch, member) {
                Ok(link) => Ok((member.seat, link)),
                Err(error) => Err(Unreached {
                    peer: Endpoint {
                        seat: Seat::draft(member.seat),
                        generation: member.generation,
                    },
                    error,
                }),
            })
            .collect::<Result<_, Unreached>>()?;
        Ok(Self {
            seat,
            epoch,
            members: members.iter().map(|member| member.seat).collect(),
            owners,
            links,
            outbox: VecDeque::new(),
        })
    }

    /// The draft seat that computes a lane.
    pub(super) fn owner(&self, lane: u16) -> Option<u16> {
        self.owners.get(usize::from(lane)).copied()
    }

    /// What all members agree on before they sum the gradients of some lanes.
    pub(super) fn shape(&self, elements: usize, lanes: &[u16]) -> ReduceShape {
        ReduceShape {
            elements,
            members: self.members.clone(),
            own: self.seat.index,
            lanes: lanes
                .iter()
                // A lane without an owner belongs to nobody, and the reduction refuses it.
                .map(|&lane| (lane, self.owner(lane).unwrap_or(u16::MAX)))
                .collect(),
        }
    }

    /// Puts segments on their way, as far as there is room.
    ///
    /// # Errors
    /// As [`Self::flush`].
    pub(super) fn post(&mut self, step: Step, outgoing: Vec<Outgoing>) -> Result<(), SendError> {
        for Outgoing {
            to_seat,
            phase,
            segment,
            bytes,
        } in outgoing
        {
            let message = BulkOutgoing {
                epoch: self.epoch,
                kind: BulkKind::Gradient { step, phase, segment },
                parts: vec![bytes],
            };
            self.outbox.push_back((to_seat, message));
        }
        self.flush().map(|_| ())
    }

    /// Sends what has found room since; whether nothing is left. A link that has ended is left to the coordinator: it
    /// sees the process end, or the other side tells it what broke.
    ///
    /// # Errors
    /// If a message can never be sent.
    pub(super) fn flush(&mut self) -> Result<bool, SendError> {
        let mut full = Vec::new();
        for (to_seat, message) in std::mem::take(&mut self.outbox) {
            let Some((_, link)) = self.links.iter().find(|(seat, _)| *seat == to_seat) else {
                continue;
            };
            // The order on a link is kept.
            if full.contains(&to_seat) {
                self.outbox.push_back((to_seat, message));
                continue;
            }
            match link.try_send(message) {
                Err(SendError::Full(message)) => {
                    full.push(to_seat);
                    self.outbox.push_back((to_seat, *message));
                }
                Err(SendError::Ended { .. }) => tracing::warn!(to = to_seat, "a peer's link has ended"),
                other => other?,
            }
        }
        Ok(self.outbox.is_empty())
    }
}

/// A member that no link could be made to.
#[derive(Debug, thiserror::Error)]
#[error("{peer} cannot be reached: {error}")]
pub(super) struct Unreached {
    pub(super) peer: Endpoint,
    pub(super) error: LinkError,
}

impl Unreached {
    /// Whether this is the doing of the other side, which may be dead or dying.
    pub(super) fn is_of_peer(&self) -> bool {
        matches!(
            self.error,
            LinkError::NoListener { .. }
                | LinkError::PeerLost { .. }
                | LinkError::Refused { .. }
                | LinkError::Silent { .. }
        )
    }
}

/// Sends messages to somebody who is in no group yet, and waits until they are taken.
pub(super) fn send_once(
    seat: Seat,
    generation: Generation,
    to: &Member,
    epoch: Epoch,
    messages: impl IntoIterator<Item = (BulkKind, Bytes)>,
) -> Result<(), LinkFailure> {
    let link = dial(seat, generation, epoch, to)?;
    for (index, (kind, bytes)) in messages.into_iter().enumerate() {
        link.send(
            BulkOutgoing {
                epoch,
                kind,
                parts: vec![bytes],
            },
            STATE_TIMEOUT,
        )?;
        if index == 0 && faults::are_armed() {
            // A fault on purpose comes when the peer has a part of the state.
            link.drain(STATE_TIMEOUT)?;
            faults::pass(Point::Donating, None);
        }
    }
    if link.drain(STATE_TIMEOUT)? {
        Ok(())
    } else {
        Err(LinkFailure::Slow)
    }
}

/// Why something could not be sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum LinkFailure {
    /// The link could not be made, or ended.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The message could not be queued.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The receiver did not take it.
    #[error("the receiver did not take the state within {} s", STATE_TIMEOUT.as_secs())]
    Slow,
}

fn dial(seat: Seat, generation: Generation, epoch: Epoch, to: &Member) -> Result<BulkSender, LinkError> {
    let hello = Hello {
        from: Endpoint { seat, generation },
        epoch,
        to: Endpoint {
            seat: Seat::draft(to.seat),
            generation: to.generation,
        },
    };
    let name = format!("{seat} to draft-{}", to.seat);
    BulkSender::connect(&to.bulk_name, hello, super::super::link_options(), move |error| {
        tracing::warn!(link = name, %error, "a link ended");
    })
}
