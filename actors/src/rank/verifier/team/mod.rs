//! The shards of one verifier replica, as one of them sees the others.
//!
//! SHARDS-1: what does not belong to the present epoch is dropped, and what is awaited when a newer one comes is given up.
//! SHARDS-2: who waits for a peer goes on taking everything that arrives, and keeps sending what the links have no room
//! for; so members that send to each other cannot hold each other up.
//! SHARDS-3: a member that is told something else than what its own work makes it expect ends, rather than compute with
//! it.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;
use eaglet_runtime::collective::{Exchange, ShardMessage};
use eaglet_runtime::control::{Activity, CoordinatorCommand, Member};
use eaglet_runtime::ids::{Epoch, Role, Step};
use eaglet_runtime::link::{BulkEvent, BulkKind, BulkMessage, BulkOutgoing, Endpoint, Part, SenderOptions};
use eaglet_runtime::verifier::{Interrupted, Shard};

use crate::faults::{self, Point};
use crate::rank::activity::ActivityGauge;
use crate::rank::inbox::{Inbox, Input, Nothing};
use crate::rank::nccl::Word;
use crate::rank::peer_links::{Here, PeerLinks, Unreached};
use crate::rank::{ROOM_INTERVAL, RankFault};

/// What a member has of one epoch.
pub(super) struct Team {
    own: Shard,
    epoch: Epoch,
    /// In the order of their shards; none before the first epoch and between two.
    members: Vec<Member>,
    links: PeerLinks,
    /// Messages sent to each seat.
    sent: BTreeMap<u16, u64>,
    /// What has come of each seat and was not taken.
    arrived: BTreeMap<u16, VecDeque<BulkMessage>>,
    /// Messages taken of each seat.
    taken: BTreeMap<u16, u64>,
    /// A link that broke.
    broken: Option<Broken>,
    /// What makes this member unfit to go on.
    fault: Option<RankFault>,
}

/// A link from another member that broke.
pub(super) struct Broken {
    pub(super) from: Endpoint,
    pub(super) epoch: Epoch,
    pub(super) reason: String,
}

impl Team {
    pub(super) fn new(own: Shard) -> Self {
        Self {
            own,
            epoch: Epoch::default(),
            members: Vec::new(),
            links: PeerLinks::default(),
            sent: BTreeMap::new(),
            arrived: BTreeMap::new(),
            taken: BTreeMap::new(),
            broken: None,
            fault: None,
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Whether this member can work: it is linked up.
    pub(super) fn is_together(&self) -> bool {
        !self.members.is_empty()
    }

    /// SHARDS-1: an epoch begins; what there was of an older one is dropped.
    pub(super) fn leave(&mut self, epoch: Epoch) {
        *self = Self {
            epoch,
            broken: self.broken.take(),
            fault: self.fault.take(),
            ..Self::new(self.own)
        };
    }

    /// Links up with those that this member sends to.
    pub(super) fn join(
        &mut self,
        own: &Here,
        epoch: Epoch,
        members: Vec<Member>,
        options: fn() -> SenderOptions,
    ) -> Result<(), Unreached> {
        self.leave(epoch);
        let to = members
            .iter()
            .zip(0..)
            .filter(|&(_, index)| self.sends_to(self.shard(index)))
            .map(|(member, _)| member);
        self.links = PeerLinks::connect(own, epoch, Role::Verifier, to, options)?;
        self.members = members;
        Ok(())
    }

    fn shard(&self, index: u16) -> Shard {
        Shard::nth(index, self.own.stages, self.own.slices)
    }

    /// Other slices of the own stage get parts and addends; the same slice gets residuals in the next stage, and chosen
    /// tokens, from the last one, in all.
    fn sends_to(&self, to: Shard) -> bool {
        let own = self.own;
        let beside = to.stage == own.stage && to.slice != own.slice;
        let next = to.stage == own.stage + 1 || own.is_last() && to.stage < own.stage;
        beside || next && to.slice == own.slice
    }

    /// Seats of the slices of the own stage, in their order.
    pub(super) fn slices(&self) -> Vec<u16> {
        let slices = usize::from(self.own.slices);
        let first = usize::from(self.own.stage) * slices;
        let of_stage = self.members.iter().skip(first).take(slices);
        of_stage.map(|member| member.seat).collect()
    }

    fn member(&self, shard: Shard) -> Option<&Member> {
        let index = usize::from(shard.stage) * usize::from(shard.slices) + usize::from(shard.slice);
        self.members.get(index)
    }

    /// Sends what has found room; whether nothing is left.
    pub(super) fn flush(&mut self) -> Result<bool, RankFault> {
        self.links.flush().map_err(RankFault::passing)
    }

    /// Keeps what a peer sent until it is asked for.
    pub(super) fn keep(&mut self, message: BulkMessage) {
        let header = &message.header;
        let known = header.epoch == self.epoch
            && header.from.role == Role::Verifier
            && matches!(header.kind, BulkKind::Shard { .. })
            && self
                .members
                .iter()
                .any(|member| (member.seat, member.generation) == (header.from.index, header.generation));
        if known {
            self.arrived
                .entry(header.from.index)
                .or_default()
                .push_back(message);
        } else {
            // SHARDS-1
            tracing::debug!(from = %header.from, epoch = %header.epoch, "a message of another epoch was dropped");
        }
    }

    /// Looks whether the end of a link means that this epoch is over.
    pub(super) fn hear_of(&mut self, event: &BulkEvent) -> Result<(), Interrupted> {
        match event {
            BulkEvent::Closed {
                peer: Some(hello),
                error: Some(error),
            } if hello.from.seat.role == Role::Verifier
                && hello.epoch == self.epoch
                && self.is_together() =>
            {
                let reason = error.to_string();
                let interrupted = over(format!("the link from {} broke: {reason}", hello.from));
                self.broken.get_or_insert(Broken {
                    from: hello.from,
                    epoch: hello.epoch,
                    reason,
                });
                Err(interrupted)
            }
            _ => Ok(()),
        }
    }

    /// A link that broke, after this member was interrupted.
    pub(super) fn take_broken(&mut self) -> Option<Broken> {
        self.broken.take()
    }

    /// What makes this member unfit to go on, after it was interrupted.
    pub(super) fn take_fault(&mut self) -> Option<RankFault> {
        self.fault.take()
    }
}

/// Whether a command ends the epoch of whoever waits.
fn ends(command: &CoordinatorCommand, present: Epoch) -> bool {
    match command {
        CoordinatorCommand::Abandon { epoch } | CoordinatorCommand::FormTeam { epoch, .. } => {
            *epoch > present
        }
        CoordinatorCommand::Quit => true,
        _ => false,
    }
}

fn over(reason: impl Into<String>) -> Interrupted {
    Interrupted {
        reason: reason.into(),
    }
}

/// What carries the bytes of one row.
pub(super) struct Talk<'a> {
    pub(super) gauge: &'a ActivityGauge,
    pub(super) team: &'a mut Team,
    pub(super) inbox: &'a mut Inbox,
    /// What this member does when it does not wait.
    pub(super) activity: Activity,
    /// Number of the row in the work of the team.
    pub(super) turn: u64,
    /// Step of the row, for faults on purpose.
    pub(super) step: Option<Step>,
}

impl Talk<'_> {
    fn unfit(&mut self, fault: RankFault) -> Interrupted {
        let reason = fault.to_string();
        self.team.fault.get_or_insert(fault);
        over(reason)
    }

    fn seat_of(&self, shard: Shard) -> Result<u16, Interrupted> {
        match self.team.member(shard) {
            Some(member) => Ok(member.seat),
            None => Err(over("the shards of this verifier are not together")),
        }
    }

    /// Takes one more input; whether there was one in time.
    fn listen(&mut self, patience: Option<Duration>) -> Result<bool, Interrupted> {
        match self.inbox.arrival(patience) {
            Ok(Input::Bulk(BulkEvent::Message(message))) => self.team.keep(message),
            Ok(Input::Bulk(event)) => self.team.hear_of(&event)?,
            Ok(Input::Sum { epoch, word }) => {
                let is_over = epoch == self.team.epoch && matches!(word, Word::Broken(_));
                self.inbox.put_aside(Input::Sum { epoch, word });
                if is_over {
                    return Err(over("the slices of this stage cannot sum any more"));
                }
            }
            Ok(Input::Command(command)) => {
                let is_over = ends(&command, self.team.epoch);
                self.inbox.put_aside(Input::Command(command));
                if is_over {
                    return Err(over("the team is formed anew"));
                }
            }
            Err(Nothing::Yet) => return Ok(false),
            Err(Nothing::Ever) => return Err(over("this rank ends")),
        }
        Ok(true)
    }

    /// SHARDS-3
    fn check(
        &mut self,
        message: BulkMessage,
        (from, what, bytes): (Shard, ShardMessage, usize),
    ) -> Result<Part, Interrupted> {
        let seat = message.header.from;
        let taken = self.team.taken.entry(seat.index).or_default();
        let expected = BulkKind::Shard {
            turn: self.turn,
            sequence: *taken,
            what,
        };
        *taken += 1;
        let kind = message.header.kind;
        let part = message.parts.into_iter().next();
        match part {
            Some(part) if kind == expected && part.len() == bytes => Ok(part),
            part => {
                let found = part.map_or(0, |part| part.len());
                Err(self.unfit(RankFault::passing(format!(
                    "{seat} ({from}) sent {kind:?} of {found} bytes where {expected:?} of {bytes} bytes was expected: \
                     the shards of this verifier do not compute the same; this is a defect of eaglet"
                ))))
            }
        }
    }
}

impl Exchange for Talk<'_> {
    type Received = Part;

    fn send(&mut self, to: Shard, what: ShardMessage, bytes: Bytes) -> Result<(), Interrupted> {
        let seat = self.seat_of(to)?;
        let point = match what {
            ShardMessage::Residual => Some(Point::Pass),
            ShardMessage::Addend | ShardMessage::Part => Some(Point::Share),
            ShardMessage::Sum | ShardMessage::Tokens => None,
        };
        if let Some(Err(fault)) = point.map(|point| faults::reach(point, self.step)) {
            return Err(self.unfit(fault.into()));
        }
        let sent = self.team.sent.entry(seat).or_default();
        let message = BulkOutgoing {
            epoch: self.team.epoch,
            kind: BulkKind::Shard {
                turn: self.turn,
                sequence: *sent,
                what,
            },
            parts: vec![bytes],
        };
        *sent += 1;
        self.team.links.post(seat, message);
        match self.team.links.flush() {
            Ok(_) => Ok(()),
            Err(error) => Err(self.unfit(RankFault::passing(error))),
        }
    }

    fn receive(&mut self, from: Shard, what: ShardMessage, bytes: usize) -> Result<Part, Interrupted> {
        let seat = self.seat_of(from)?;
        let mut waits = false;
        let message = loop {
            let arrived = self.team.arrived.get_mut(&seat).and_then(VecDeque::pop_front);
            if let Some(message) = arrived {
                break Ok(message);
            }
            // SHARDS-2
            let patience = match (self.team.links.flush(), waits) {
                (Err(error), _) => break Err(self.unfit(RankFault::passing(error))),
                // What has come already is taken in before anybody is said to be waited for.
                (Ok(_), false) => Some(Duration::ZERO),
                (Ok(true), true) => None,
                (Ok(false), true) => Some(ROOM_INTERVAL),
            };
            match self.listen(patience) {
                Ok(true) => {}
                Ok(false) => {
                    waits = true;
                    self.gauge.enter(Activity::AwaitingPeers);
                }
                Err(interrupted) => break Err(interrupted),
            }
        };
        if waits {
            self.gauge.enter(self.activity);
        }
        self.check(message?, (from, what, bytes))
    }
}
