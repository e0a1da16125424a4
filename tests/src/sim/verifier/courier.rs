//! What a fake shard hands to a draft replica.

use eaglet_runtime::control::{Member, RankEvent};
use eaglet_runtime::ids::{Epoch, RowId};

use crate::sim::network::{LinkKind, Load};
use crate::sim::rank::RankId;
use crate::sim::world::World;

/// Sends a part of a row; whether it is on its way.
pub(super) fn courier(
    world: &mut World,
    id: RankId,
    (row, lease): (RowId, u64),
    load: Load,
    destination: &Member,
) -> bool {
    let epoch = Epoch::default();
    let Some(to) = world.rank_at(&destination.bulk) else {
        return false;
    };
    // A seat's new occupant gets a new link.
    let others = world.ranks[to].seat;
    let seats: Vec<RankId> = world.ranks[id]
        .links
        .iter()
        .map(|link| link.to)
        .filter(|&other| other != to && world.ranks[other].seat == others)
        .collect();
    world.close(id, |link| seats.contains(&link.to));
    let send = |world: &mut World| {
        world
            .connect(id, to, LinkKind::Rows, epoch)
            .and_then(|()| world.send_over(id, to, LinkKind::Rows, epoch, load.clone()))
    };
    let sent = send(world).or_else(|_| {
        // The link may have broken long ago: whether the receiver is there shows a new one.
        world.close(id, |link| link.to == to);
        send(world)
    });
    if sent.is_err() {
        world.close(id, |link| link.to == to);
        let reason = "the link is gone".to_owned();
        world.say(
            id,
            RankEvent::NotSent {
                row,
                lease,
                seat: destination.seat,
                generation: destination.generation,
                reason,
            },
        );
    }
    sent.is_ok()
}
