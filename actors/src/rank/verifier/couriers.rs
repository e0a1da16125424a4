//! Links to draft replicas, and what goes over them: the states that this shard has captured.

use std::collections::HashMap;
use std::time::Duration;

use eaglet_runtime::control::{Member, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, RowId, Seat};
use eaglet_runtime::link::{BulkKind, BulkOutgoing, BulkSender, Endpoint, HeapBuffer, SendError};
use eaglet_runtime::row::{HiddenStates, PackedRow};

use crate::rank::peer_links::dial;
use crate::rank::{Context, RankFault, link_options};

/// Longest wait for room in the queue towards a draft replica; it holds more rows than are ever under way.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// One link per draft seat; a new occupant gets a new one.
#[derive(Default)]
pub(super) struct Couriers(HashMap<u16, (Member, BulkSender)>);

/// The states of a row that a shard has captured.
pub(super) struct Captured {
    pub(super) contract: Digest,
    /// The first of them, in the order of the contract.
    pub(super) first_state: usize,
    pub(super) content: PackedRow,
    pub(super) hidden: HiddenStates,
}

/// Why a row was not handed over.
enum Unsent {
    /// The link failed; another one may not.
    Now(String),
    /// The link had ended before.
    Broken(String),
    /// No link would take it.
    Never(String),
}

impl Couriers {
    /// Sends captured states; whether they are on their way. If not, the coordinator is told.
    ///
    /// # Errors
    /// If they can never be sent.
    pub(super) fn hand_over(
        &mut self,
        context: &Context,
        (row, lease): (RowId, u64),
        captured: Captured,
        destination: &Member,
    ) -> Result<bool, RankFault> {
        let Captured {
            contract,
            first_state,
            content,
            hidden,
        } = captured;
        let message = BulkOutgoing {
            // Rows belong to no group: a row is fenced by its lease and by the destination's generation.
            epoch: Epoch::default(),
            kind: BulkKind::Hidden {
                row,
                lease,
                contract,
                dtype: hidden.dtype,
                first_state: first_state as u16,
                states: hidden.states as u16,
                hidden: hidden.hidden as u32,
                packed: content,
            },
            parts: vec![hidden.bytes],
        };
        let mut sent = self.send(context, destination, message.clone());
        if let Err(Unsent::Broken(reason)) = &sent {
            // It may have broken long ago, by a damaged chunk. Whether the receiver is there shows a new one.
            tracing::warn!(draft = destination.seat, reason, "a link is made again");
            self.0.remove(&destination.seat);
            sent = self.send(context, destination, message);
        }
        match sent {
            Ok(()) => Ok(true),
            Err(Unsent::Now(reason) | Unsent::Broken(reason)) => {
                tracing::warn!(draft = destination.seat, reason, "cannot hand over a row");
                self.0.remove(&destination.seat);
                context.say(RankEvent::NotSent {
                    row,
                    lease,
                    seat: destination.seat,
                    generation: destination.generation,
                    reason,
                });
                Ok(false)
            }
            Err(Unsent::Never(reason)) => Err(RankFault::permanent(format!(
                "the {row} cannot be sent: {reason}; lower training.tokens_per_row or samples.held_out_rows"
            ))),
        }
    }

    /// Memory of `length` bytes on the way to a draft replica, in which states can be captured so that nobody has to copy
    /// them; none if there is no link, or no room.
    pub(super) fn buffer(
        &mut self,
        context: &Context,
        destination: &Member,
        length: usize,
    ) -> Option<HeapBuffer> {
        // Why there is no link is told when the row is sent.
        self.link_to(context, destination).ok()?.buffer(length)
    }

    fn send(&mut self, context: &Context, destination: &Member, message: BulkOutgoing) -> Result<(), Unsent> {
        match self.link_to(context, destination)?.send(message, SEND_TIMEOUT) {
            Ok(()) => Ok(()),
            Err(error @ SendError::Invalid { .. }) => Err(Unsent::Never(error.to_string())),
            Err(error @ SendError::Ended { .. }) => Err(Unsent::Broken(error.to_string())),
            Err(error) => Err(Unsent::Now(error.to_string())),
        }
    }

    fn link_to(&mut self, context: &Context, destination: &Member) -> Result<&BulkSender, Unsent> {
        let known = self
            .0
            .get(&destination.seat)
            .is_some_and(|(member, _)| member == destination);
        if !known {
            self.0.remove(&destination.seat);
            let to = Endpoint {
                seat: Seat::draft(destination.seat),
                generation: destination.generation,
            };
            let link = dial(
                &context.here,
                Epoch::default(),
                to,
                &destination.bulk,
                link_options(),
            )
            .map_err(|error| Unsent::Now(error.to_string()))?;
            self.0.insert(destination.seat, (destination.clone(), link));
        }
        let link = self.0.get(&destination.seat).map(|(_, link)| link);
        link.ok_or_else(|| Unsent::Now("the link is gone".to_owned()))
    }
}
