//! Links and collectives that broke, and rows that nothing is heard of: nobody is waited for without a limit.

use eaglet_runtime::ids::{Epoch, Generation, Role, RowId, Seat};

use super::Engine;
use super::rows::{Occupant, RowState};
use super::seats::Status;

/// The end of a process is known well before this.
const BROKEN_LINK_PATIENCE_MS: u64 = 300;
/// So many epochs in a row may break over NCCL, without a step in between, before a run is given up.
const COLLECTIVE_FAULTS: u32 = 5;

/// What the members of an epoch cannot do together any more.
#[derive(Clone, Debug)]
pub(super) struct Rift {
    /// Who it shows at, or the other end of a link.
    seat: Seat,
    generation: Generation,
    epoch: Epoch,
    /// When it was heard of.
    since_ms: u64,
    /// What was seen.
    pub(super) what: String,
    is_collective: bool,
}

impl Rift {
    /// A link to somebody broke.
    pub(super) fn of_link(from: Seat, generation: Generation, epoch: Epoch, now_ms: u64) -> Self {
        Self {
            seat: from,
            generation,
            epoch,
            since_ms: now_ms,
            what: format!("a link from {from} broke, and {from} lives"),
            is_collective: false,
        }
    }

    /// What somebody does over NCCL broke.
    pub(super) fn of_collective(
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        reason: &str,
        now_ms: u64,
    ) -> Self {
        Self {
            seat,
            generation,
            epoch,
            since_ms: now_ms,
            what: format!("the collectives of {seat} broke: {reason}"),
            is_collective: true,
        }
    }

    /// Whether nobody's end was heard of in time to explain it.
    pub(super) fn is_due(&self, now_ms: u64) -> bool {
        now_ms >= self.since_ms + BROKEN_LINK_PATIENCE_MS
    }

    /// Counts epochs that broke over NCCL in a row; why the run ends, if there were too many without any work in between.
    pub(super) fn count(&self, faults: &mut u32, work: &str, ranks: &str, key: &str) -> Option<String> {
        if !self.is_collective {
            return None;
        }
        *faults += 1;
        (*faults >= COLLECTIVE_FAULTS).then(|| {
            format!(
                "{}; that is {COLLECTIVE_FAULTS} times in a row without a {work}: look for NCCL's words in the logs of \
                 {ranks} ranks (NCCL_DEBUG=INFO tells more), or set {key} = \"links\"",
                self.what
            )
        })
    }
}

impl Engine {
    pub(super) fn link_broken(
        &mut self,
        draft: Seat,
        from: Seat,
        sender: Generation,
        epoch: Epoch,
        reason: &str,
    ) {
        if !self.seats.is_current(from, sender) {
            return; // its process is gone, and its rows were given back then
        }
        if draft.role == Role::Verifier {
            if from.role == Role::Verifier {
                self.team_link_broken(draft, from, sender, epoch);
            }
            return; // drafts send nothing to verifiers
        }
        if from.role == Role::Draft {
            let mut newcomer = self.seats.get_mut(draft);
            if newcomer.status == Status::Loading && newcomer.donor == Some((from.index, sender)) {
                // The state did not arrive whole: it is asked for again.
                newcomer.donor = None;
                newcomer.status = Status::Attached;
            }
            drop(newcomer);
            // FENCE: links of an older epoch are gone with it. Most often the sender has just died, and its end is on
            // the way: tick waits for it.
            if epoch == self.epoch && !self.members.is_empty() {
                self.rift = Some(Rift::of_link(from, sender, epoch, self.now_ms));
            }
            return;
        }
        self.warn(format!(
            "the link from {from} to {draft} broke: {reason}; its rows are extracted again"
        ));
        let replica = self.replica_of(from);
        self.give_back(|_, state| {
            state.destination().is_some_and(|(seat, _)| seat == draft.index) && state.is_with(replica)
        });
    }

    /// A member's collectives failed. Most often another member has just died, and its end is on the way: tick waits for
    /// it, as for that of a link.
    pub(super) fn collective_broken(
        &mut self,
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        reason: &str,
    ) {
        if seat.role == Role::Verifier {
            self.team_collective_broken(seat, generation, epoch, reason);
            return;
        }
        // FENCE: collectives of an older epoch are aborted.
        if epoch != self.epoch || !self.is_member(seat) {
            return;
        }
        let is_known = self
            .rift
            .as_ref()
            .is_some_and(|rift| rift.is_collective && rift.epoch == epoch);
        // The others see the same a little later.
        if !is_known {
            self.rift = Some(Rift::of_collective(seat, generation, epoch, reason, self.now_ms));
        }
    }

    /// Forms the group again if a link between two replicas, or what they do over NCCL, broke and all are still alive a
    /// while later.
    pub(super) fn mend_group(&mut self) {
        let now_ms = self.now_ms;
        let Some(rift) = self.rift.take_if(|rift| rift.is_due(now_ms)) else {
            return;
        };
        if !self.seats.is_current(rift.seat, rift.generation) || rift.epoch != self.epoch {
            return;
        }
        let key = "training.collective";
        if let Some(report) = rift.count(&mut self.collective_faults, "step", "draft", key) {
            self.fail(report);
            return;
        }
        self.warn(format!("{}; the epoch is formed again", rift.what));
        self.restart_epoch();
    }

    /// A verifier could not hand a row over. If its receiver lives, the two cannot reach each other, and a new occupant
    /// of the seat gets a new chance.
    pub(super) fn row_not_sent(
        &mut self,
        verifier: Seat,
        (row, lease): (RowId, u64),
        destination: Occupant,
        reason: &str,
    ) {
        // FENCE: a lease that is over is not heard of.
        if self.answered(verifier, lease).is_none() {
            return;
        }
        let draft = Seat::draft(destination.0);
        self.give_back(|other, state| other == row && state.lease() == Some(lease));
        if self.seats.is_current(draft, destination.1) && self.seats.get(draft).is_active() {
            self.kill(draft, &format!("{verifier} cannot send it the {row}: {reason}"));
        }
    }

    /// Gives up on rows of which nothing was heard for too long: a message about them was lost.
    pub(super) fn expire_rows(&mut self) {
        let limit_ms = self.settings.step_timeout_ms;
        let now_ms = self.now_ms;
        let overdue: Vec<RowId> = self
            .rows
            .iter()
            .filter(|(_, row)| now_ms > row.since_ms + limit_ms)
            // Those that are in work are their team's matter.
            .filter(|(_, row)| matches!(row.state, RowState::Sent { .. }))
            .map(|(id, _)| id)
            .collect();
        for row in overdue {
            self.warn(format!(
                "the {row} did not arrive within {limit_ms} ms; it is extracted again"
            ));
            self.give_back(|other, _| other == row);
        }
    }
}
