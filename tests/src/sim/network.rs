//! How messages travel: one control stream a rank, and one-way links between ranks.
//!
//! A stream keeps its order and loses nothing, unless the schedule says otherwise. A partition holds messages up until it
//! heals, or ends with the stream breaking.

use bytes::Bytes;
use eaglet_runtime::collective::Phase;
use eaglet_runtime::control::{CoordinatorCommand, RankEvent};
use eaglet_runtime::ids::{Epoch, RowId, Step};

use super::fault::Fault;
use super::invariants::{Checked, bound};
use super::rank::{Input, RankId};
use super::verifier::Residual;
use super::weights::Weights;
use super::world::{What, World};

/// One direction of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct Direction {
    /// When the last message arrives.
    pub last_ms: u64,
    /// Nothing gets through before.
    pub blocked_until_ms: u64,
}

/// What a link is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Hidden states, from a verifier.
    Rows,
    /// Segments of sums, within an epoch.
    Group,
    /// A state, from a donor.
    State,
    /// What shards of one verifier tell each other, within an epoch of their team.
    Team,
}

/// What shards of one verifier tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// To the next stage.
    Residual,
    /// To the other slices.
    Addend,
    /// From the last stage to all.
    Tokens,
}

/// A one-way link between two ranks.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The receiver.
    pub to: RankId,
    /// What it is for.
    pub kind: LinkKind,
    /// The epoch that it was made for.
    pub epoch: Epoch,
    last_ms: u64,
    broken: bool,
}

/// Two ranks that cannot reach each other for a while.
#[derive(Clone, Copy, Debug)]
pub struct Path {
    /// One of them.
    pub a: RankId,
    /// The other.
    pub b: RankId,
    /// How long.
    pub until_ms: u64,
    /// Whether links that are used meanwhile break.
    pub breaks: bool,
}

/// What travels between ranks.
#[derive(Clone, Debug)]
pub struct Parcel {
    /// Who sent it.
    pub from: RankId,
    /// The epoch of its link.
    pub epoch: Epoch,
    /// What it is.
    pub load: Load,
}

/// The contents of a parcel.
#[derive(Clone, Debug)]
pub enum Load {
    /// Hidden states of a row that one stage has captured.
    Row {
        /// Which.
        row: RowId,
        /// The lease that it was extracted for.
        lease: u64,
        /// The stage.
        stage: u16,
        /// What it is made of.
        content: u64,
    },
    /// A word between shards.
    Shard {
        /// Number of the row in the work of the team, and one more.
        turn: u64,
        /// Words over this link before.
        sequence: u64,
        /// Which.
        word: Word,
        /// What it is about.
        residual: Residual,
    },
    /// A segment of a sum.
    Segment {
        /// Of which step.
        step: Step,
        /// Contribution or finished.
        phase: Phase,
        /// Number of the segment.
        segment: u16,
        /// Its values.
        bytes: Bytes,
    },
    /// Part of a state: weights, then moments.
    Piece {
        /// The state.
        weights: Weights,
        /// Which part, from 0.
        part: usize,
    },
}

/// A link that cannot be made or has ended.
#[derive(Debug)]
pub struct Unreachable;

/// Parts of a state.
pub const PARTS: usize = 2;

/// Whether a rank is proof against a command that comes twice. A stream never delivers one twice; a draft that got these
/// two again, at the worst moment, would take up its first state, or compute once more, between its vote and the commit.
fn may_come_twice(command: &CoordinatorCommand) -> bool {
    !matches!(
        command,
        CoordinatorCommand::LoadDraft { .. } | CoordinatorCommand::Begin { .. }
    )
}

impl World {
    fn latency(&mut self) -> u64 {
        self.dice.below(self.plan.latency_ms + 1)
    }

    /// When a message arrives, if it does, and when it arrives once more.
    fn arrivals(&mut self, id: RankId, up: bool) -> (Option<u64>, Option<u64>) {
        let now_ms = self.clock.now_ms();
        let mut at_ms = now_ms + self.latency();
        let (mut keeps_order, mut again_ms, mut lost) = (true, None, false);
        if !self.calm {
            if self.dice.one_in(self.plan.faults.lose_one_in) {
                self.counts.note(Fault::MessageLost);
                lost = true;
            }
            if self.dice.one_in(self.plan.faults.delay_one_in) {
                self.counts.note(Fault::MessageDelayed);
                at_ms += self.dice.between(5, 400);
            }
            if self.dice.one_in(self.plan.faults.reorder_one_in) {
                self.counts.note(Fault::MessageReordered);
                at_ms += self.dice.between(1, 40);
                keeps_order = false;
            }
            if self.dice.one_in(self.plan.faults.duplicate_one_in) {
                let late_ms = self.dice.pick(&[0, 10, 100, 1500]);
                again_ms = Some(at_ms + self.dice.between(0, late_ms));
            }
        }
        let rank = &mut self.ranks[id];
        let direction = if up { &mut rank.up } else { &mut rank.down };
        at_ms = at_ms.max(direction.blocked_until_ms);
        if lost {
            return (None, None);
        }
        if keeps_order {
            at_ms = at_ms.max(direction.last_ms);
            direction.last_ms = at_ms;
        }
        (Some(at_ms), again_ms.map(|again_ms| again_ms.max(at_ms)))
    }

    /// When a rank's first words arrive: without them there is no stream that could lose anything.
    pub(super) fn arrival_of_attach(&mut self, id: RankId) -> u64 {
        let at_ms = self.clock.now_ms() + self.latency();
        let up = &mut self.ranks[id].up;
        up.last_ms = at_ms.max(up.blocked_until_ms);
        up.last_ms
    }

    /// A rank says something; nobody hears it if its coordinator is gone.
    pub(super) fn send_up(&mut self, id: RankId, event: RankEvent) {
        if Some(self.ranks[id].launch) != self.launch() {
            return;
        }
        let (first, again) = self.arrivals(id, true);
        if let Some(at_ms) = again {
            self.counts.note(Fault::MessageDuplicated);
            self.clock.at(at_ms, What::Up(id, event.clone()));
        }
        if let Some(at_ms) = first {
            self.clock.at(at_ms, What::Up(id, event));
        }
    }

    /// The coordinator says something.
    pub(super) fn send_down(&mut self, id: RankId, command: CoordinatorCommand) -> Checked {
        let rank = &self.ranks[id];
        if !rank.attached || rank.given_up {
            return Ok(());
        }
        let (first, again) = self.arrivals(id, false);
        if let Some(at_ms) = again.filter(|_| may_come_twice(&command)) {
            self.counts.note(Fault::MessageDuplicated);
            self.ranks[id].on_the_way += 1;
            self.clock.at(at_ms, What::Down(id, command.clone()));
        }
        if let Some(at_ms) = first {
            self.ranks[id].on_the_way += 1;
            self.clock.at(at_ms, What::Down(id, command));
        }
        bound::on_the_way(self.ranks[id].on_the_way)
    }

    fn blocked(&mut self, a: RankId, b: RankId) -> Option<Path> {
        let now_ms = self.clock.now_ms();
        self.paths.retain(|path| path.until_ms > now_ms);
        self.paths
            .iter()
            .find(|path| (path.a, path.b) == (a, b) || (path.a, path.b) == (b, a))
            .copied()
    }

    /// Makes a link, unless there is one.
    pub(super) fn connect(
        &mut self,
        from: RankId,
        to: RankId,
        kind: LinkKind,
        epoch: Epoch,
    ) -> Result<(), Unreachable> {
        let same = |link: &Link| link.to == to && link.kind == kind && link.epoch == epoch;
        if self.ranks[from].links.iter().any(same) {
            return Ok(());
        }
        let target = &self.ranks[to];
        if !target.is_alive() || self.blocked(from, to).is_some() {
            return Err(Unreachable);
        }
        self.ranks[from].links.push(Link {
            to,
            kind,
            epoch,
            last_ms: 0,
            broken: false,
        });
        Ok(())
    }

    /// Closes links in order: nothing is lost, and nobody is told.
    pub(super) fn close(&mut self, from: RankId, which: impl Fn(&Link) -> bool) {
        self.ranks[from].links.retain(|link| !which(link));
    }

    /// Sends over a link that was made before.
    pub(super) fn send_over(
        &mut self,
        from: RankId,
        to: RankId,
        kind: LinkKind,
        epoch: Epoch,
        load: Load,
    ) -> Result<(), Unreachable> {
        if !self.has_effect(from) {
            return Ok(());
        }
        let blocked = self.blocked(from, to);
        let at_ms = self.clock.now_ms() + self.latency();
        let alive = self.ranks[to].is_alive();
        let link = self.ranks[from]
            .links
            .iter_mut()
            .find(|link| link.to == to && link.kind == kind && link.epoch == epoch)
            .filter(|link| !link.broken && alive);
        let Some(link) = link else { return Err(Unreachable) };
        let at_ms = at_ms
            .max(link.last_ms)
            .max(blocked.map_or(0, |path| path.until_ms));
        link.last_ms = at_ms;
        if blocked.is_some_and(|path| path.breaks) {
            // The sender learns it with the next message.
            link.broken = true;
            self.closed(from, to, epoch, at_ms);
            return Ok(());
        }
        self.clock.at(at_ms, What::Bulk(to, Parcel { from, epoch, load }));
        Ok(())
    }

    fn closed(&mut self, from: RankId, to: RankId, epoch: Epoch, at_ms: u64) {
        let rank = &self.ranks[from];
        let input = Input::Closed {
            from: rank.seat,
            generation: rank.generation,
            epoch,
        };
        self.clock.at(at_ms, What::Closed(to, Box::new(input)));
    }

    /// All links of a rank that ended break, behind what is on its way.
    pub(super) fn break_links_of(&mut self, from: RankId) {
        let now_ms = self.clock.now_ms();
        for link in std::mem::take(&mut self.ranks[from].links) {
            if !link.broken && self.ranks[link.to].is_alive() {
                self.closed(from, link.to, link.epoch, link.last_ms.max(now_ms) + 1);
            }
        }
    }

    /// One link of a rank breaks; whether there was one.
    pub(super) fn break_a_link(&mut self, from: RankId) -> bool {
        let count = self.ranks[from].links.len();
        if count == 0 {
            return false;
        }
        let place = self.dice.place(count);
        let now_ms = self.clock.now_ms();
        let link = &mut self.ranks[from].links[place];
        if std::mem::replace(&mut link.broken, true) {
            return false;
        }
        let (to, epoch, at_ms) = (link.to, link.epoch, link.last_ms.max(now_ms));
        self.closed(from, to, epoch, at_ms);
        true
    }
}
