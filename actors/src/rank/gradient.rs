//! The links of one epoch between draft replicas.

use eaglet_runtime::collective::Outgoing;
pub(super) use eaglet_runtime::collective::SegmentKind;
use eaglet_runtime::control::Member;
use eaglet_runtime::ids::{Epoch, Generation, Seat, Step};
use eaglet_runtime::link::{BulkHeader, BulkKind, BulkSender, Hello, LinkError, LinkOptions};

/// All members of an epoch, and a link to each other one.
pub(super) struct Group {
    seat: Seat,
    generation: Generation,
    epoch: Epoch,
    seats: usize,
    links: Vec<(u16, BulkSender)>,
}

impl Group {
    pub(super) fn connect(
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        members: Vec<Member>,
    ) -> Result<Self, LinkError> {
        let seats = members.len();
        let links = members
            .iter()
            .filter(|member| member.seat != seat.index)
            .map(|member| Ok((member.seat, dial(seat, generation, member)?)))
            .collect::<Result<_, LinkError>>()?;
        Ok(Self { seat, generation, epoch, seats, links })
    }

    pub(super) fn seats(&self) -> usize {
        self.seats
    }

    pub(super) fn own_index(&self) -> usize {
        usize::from(self.seat.index)
    }

    /// Sends segments on their way. A link that fails is left to the coordinator, which sees the process end or is told
    /// by the other side what broke.
    pub(super) fn send_all(&self, step: Step, outgoing: Vec<Outgoing>) {
        for Outgoing { to_seat, kind, segment, bytes } in outgoing {
            let header = BulkHeader {
                from: self.seat,
                generation: self.generation,
                epoch: self.epoch,
                kind: BulkKind::Gradient {
                    step,
                    segment: segment as u32,
                    finished: kind == SegmentKind::Finished,
                },
            };
            let link = self.links.iter().find(|(seat, _)| usize::from(*seat) == to_seat);
            if let Some((seat, link)) = link
                && let Err(error) = link.send(header, vec![bytes])
            {
                tracing::warn!(to = seat, %error, "cannot send a gradient segment");
            }
        }
    }

    /// Sends one message to somebody who is in no group yet, and waits until it is written.
    pub(super) fn send_once(
        seat: Seat,
        generation: Generation,
        to: &Member,
        header: BulkHeader,
        parts: Vec<bytes::Bytes>,
    ) -> Result<(), LinkError> {
        let link = dial(seat, generation, to)?;
        link.send(header, parts)?;
        link.finish()
    }
}

fn dial(seat: Seat, generation: Generation, to: &Member) -> Result<BulkSender, LinkError> {
    let hello = Hello {
        from: seat,
        from_generation: generation,
        to: Seat::draft(to.seat),
        to_generation: to.generation,
    };
    BulkSender::connect(&to.bulk_name, hello, LinkOptions::default())
}
