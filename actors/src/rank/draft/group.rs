//! The links of one epoch between draft replicas.

use std::time::Duration;

use bytes::Bytes;
use eaglet_runtime::collective::{Outgoing, ReduceShape};
use eaglet_runtime::control::Member;
use eaglet_runtime::ids::{Epoch, Role, Seat, Step};
use eaglet_runtime::link::{BulkKind, BulkOutgoing, Endpoint, LinkError, SendError};

use super::RankFault;
use super::nccl::Part;
use crate::faults::{self, Point};
use crate::rank::link_options;
use crate::rank::peer_links::{Here, PeerLinks, Unreached, dial};

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
    links: PeerLinks,
    /// Of a group that sums over NCCL, which needs no links.
    part: Option<Part>,
}

impl Group {
    pub(super) fn connect(
        own: &Here,
        epoch: Epoch,
        members: &[Member],
        owners: Vec<u16>,
    ) -> Result<Self, Unreached> {
        let others = members
            .iter()
            .filter(|member| member.seat != own.endpoint.seat.index);
        Ok(Self {
            seat: own.endpoint.seat,
            epoch,
            members: members.iter().map(|member| member.seat).collect(),
            owners,
            links: PeerLinks::connect(own, epoch, Role::Draft, others, link_options)?,
            part: None,
        })
    }

    /// A group that sums over NCCL.
    pub(super) fn over_nccl(
        seat: Seat,
        epoch: Epoch,
        members: Vec<u16>,
        owners: Vec<u16>,
        part: Part,
    ) -> Self {
        Self {
            seat,
            epoch,
            members,
            owners,
            links: PeerLinks::default(),
            part: Some(part),
        }
    }

    /// What is done over NCCL.
    pub(super) fn part(&mut self) -> Option<&mut Part> {
        self.part.as_mut()
    }

    /// Whether its members have still to meet, or a state has to go round.
    pub(super) fn is_meeting(&self) -> bool {
        self.part.as_ref().is_some_and(|part| !part.is_ready())
    }

    /// Ends what is done over NCCL.
    ///
    /// # Errors
    /// As [`Part::end`].
    pub(super) fn end(self) -> Result<(), RankFault> {
        self.part.map_or(Ok(()), Part::end)
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
            self.links.post(to_seat, message);
        }
        self.flush().map(|_| ())
    }

    /// Sends what has found room since; whether nothing is left.
    ///
    /// # Errors
    /// As [`PeerLinks::flush`].
    pub(super) fn flush(&mut self) -> Result<bool, SendError> {
        self.links.flush()
    }
}

/// Sends messages to somebody who is in no group yet, and waits until they are taken.
pub(super) fn send_once(
    from: &Here,
    to: &Member,
    epoch: Epoch,
    messages: impl IntoIterator<Item = (BulkKind, Bytes)>,
) -> Result<(), LinkFailure> {
    let peer = Endpoint {
        seat: Seat::draft(to.seat),
        generation: to.generation,
    };
    let link = dial(from, epoch, peer, &to.bulk, link_options())?;
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
