//! The links of one epoch between draft replicas.

use std::time::Duration;

use bytes::Bytes;
use eaglet_runtime::collective::{Outgoing, ReduceShape};
use eaglet_runtime::control::Member;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{
    BulkKind, BulkOutgoing, BulkSender, Endpoint, Hello, LinkError, SendError, SenderOptions,
};

use crate::faults::{self, Damage, Point};

/// Longest wait for room in the queue towards a peer: the queue holds more than a step ever sends.
const SEND_TIMEOUT: Duration = Duration::from_secs(10);
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

    /// Sends segments on their way. A link that has ended is left to the coordinator: it sees the process end, or the
    /// other side tells it what broke.
    ///
    /// # Errors
    /// If a link lives and does not take a segment.
    pub(super) fn send_all(&self, step: Step, outgoing: Vec<Outgoing>) -> Result<(), SendError> {
        for Outgoing {
            to_seat,
            phase,
            segment,
            bytes,
        } in outgoing
        {
            let kind = BulkKind::Gradient { step, phase, segment };
            let message = BulkOutgoing {
                epoch: self.epoch,
                kind,
                parts: vec![bytes],
            };
            let Some((_, link)) = self.links.iter().find(|(seat, _)| *seat == to_seat) else {
                continue;
            };
            match link.send(message, SEND_TIMEOUT) {
                Err(SendError::Ended { .. }) => {
                    tracing::warn!(to = to_seat, step = step.0, "a peer's link has ended")
                }
                other => other?,
            }
        }
        Ok(())
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

/// Options of every link to a draft replica.
pub(super) fn link_options() -> SenderOptions {
    let corrupt = faults::pass(Point::Link, None) == Some(Damage::Corrupt);
    SenderOptions {
        // The first chunk is a header, the second a tensor.
        corrupt_nth: corrupt.then_some(1),
        ..SenderOptions::default()
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
    BulkSender::connect(&to.bulk_name, hello, link_options(), move |error| {
        tracing::warn!(link = name, %error, "a link ended");
    })
}
