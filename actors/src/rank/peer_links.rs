//! The links of one epoch to other members of a group, and what they have no room for yet.
//!
//! Nothing here waits for room: a rank that waited would not take in what its peers send, and two of them could hold each
//! other up.

use std::collections::VecDeque;

use eaglet_runtime::control::{BulkAddress, Member};
use eaglet_runtime::ids::{Epoch, Role, Seat};
use eaglet_runtime::link::{
    BulkOutgoing, BulkSender, Endpoint, Hello, LinkError, Network, SendError, SenderOptions,
};

/// A rank, as its links start from it.
#[derive(Clone)]
pub(super) struct Here {
    pub(super) endpoint: Endpoint,
    /// Its machine, as `cluster.toml` calls it.
    pub(super) host: String,
    /// Secret of the launch, which opens links to other machines.
    pub(super) token: String,
}

/// Links to other members, by their seats.
#[derive(Default)]
pub(super) struct PeerLinks {
    links: Vec<(u16, BulkSender)>,
    /// What the links have no room for yet, each with its receiver.
    outbox: VecDeque<(u16, BulkOutgoing)>,
}

impl PeerLinks {
    /// Makes a link to each of some members of a role.
    ///
    /// # Errors
    /// If one of them cannot be reached.
    pub(super) fn connect<'a>(
        from: &Here,
        epoch: Epoch,
        role: Role,
        members: impl IntoIterator<Item = &'a Member>,
        options: fn() -> SenderOptions,
    ) -> Result<Self, Unreached> {
        let links = members
            .into_iter()
            .map(|member| {
                let peer = Endpoint {
                    seat: Seat {
                        role,
                        index: member.seat,
                    },
                    generation: member.generation,
                };
                match dial(from, epoch, peer, &member.bulk, options()) {
                    Ok(link) => Ok((member.seat, link)),
                    Err(error) => Err(Unreached { peer, error }),
                }
            })
            .collect::<Result<_, Unreached>>()?;
        Ok(Self {
            links,
            outbox: VecDeque::new(),
        })
    }

    /// Puts a message for a seat behind those that wait; [`Self::flush`] sends it.
    pub(super) fn post(&mut self, to_seat: u16, message: BulkOutgoing) {
        self.outbox.push_back((to_seat, message));
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

/// Makes a link to a rank: through shared memory on the same machine, else through the network.
pub(super) fn dial(
    from: &Here,
    epoch: Epoch,
    to: Endpoint,
    at: &BulkAddress,
    options: SenderOptions,
) -> Result<BulkSender, LinkError> {
    let name = format!("{} to {}", from.endpoint.seat, to.seat);
    let told = move |error: &LinkError| tracing::warn!(link = name, %error, "a link ended");
    let hello = Hello {
        from: from.endpoint,
        epoch,
        to,
    };
    if at.host == from.host {
        return BulkSender::connect(&at.name, hello, options, told);
    }
    let Some(address) = at.network else {
        let name = format!("{} on host {}", at.name, at.host);
        return Err(LinkError::NoListener { name });
    };
    let network = Network {
        address,
        token: from.token.clone(),
    };
    BulkSender::connect_remote(&network, hello, options, told)
}
