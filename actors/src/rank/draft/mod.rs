//! A draft rank: holds a replica, computes its lanes' gradients, takes part in the sum, applies what was committed.
//!
//! DRAFT-1: it never waits for a peer while something lies in its inbox: what a link has no room for stays in the outbox,
//! and between two lanes everything that arrived is taken in. So replicas that send to each other cannot block each other.
//! DRAFT-2: what it keeps for later is bounded: rows of coming steps, segments of the present and the next step, pieces of
//! one state.
//!
//! Files: `step` from begin to commit, `sum` and `nccl` how gradients are summed, `state` where weights come from and who gets them, `rows` what verifiers send,
//! `group` the links of an epoch.

mod group;
mod nccl;
mod rows;
mod state;
mod step;
mod sum;

use std::path::Path;

use eaglet_runtime::checkpoint::CheckpointFolder;
use eaglet_runtime::control::{
    Acceptance, Activity, CollectiveId, CoordinatorCommand, Handover, Member, RankEvent,
};
use eaglet_runtime::ids::{Epoch, Role, RowId, Step};
use eaglet_runtime::link::{BulkEvent, BulkKind, BulkMessage};

use self::group::Group;
use self::nccl::Nccl;
pub(super) use self::rows::Rows;
use self::step::Phase;
use super::nccl::Word;
use super::{Context, Inbox, Input, Progress, RankDevice, RankFault, Worker};
use crate::config::Collective;
use crate::faults::{self, Point};
use crate::replica::{IncomingState, Replica};

/// The worker of a draft seat.
pub(super) struct DraftWorker<D> {
    context: Context,
    checkpoints: CheckpointFolder,
    replica: Option<Replica<D>>,
    /// Number of the load that is answered next.
    load: u32,
    epoch: Epoch,
    group: Option<Group>,
    /// If gradients are summed over NCCL.
    nccl: Option<Nccl>,
    phase: Phase,
    rows: Rows,
    /// Segments of a sum that this replica has not begun yet; none of them is of an older epoch.
    early: Vec<BulkMessage>,
    /// The peer whose state is awaited.
    donor: Option<Member>,
    /// What has arrived of it.
    incoming: IncomingState,
    /// Pieces of the newest state that came before the command to take it.
    early_states: Vec<BulkMessage>,
}

impl<D: RankDevice> DraftWorker<D> {
    pub(super) fn new(context: Context) -> Self {
        Self {
            checkpoints: CheckpointFolder::open(context.run_directory.join("checkpoints")),
            context,
            replica: None,
            load: 0,
            epoch: Epoch::default(),
            group: None,
            nccl: None,
            phase: Phase::Idle,
            rows: Rows::default(),
            early: Vec::new(),
            donor: None,
            incoming: IncomingState::default(),
            early_states: Vec::new(),
        }
    }

    fn command(&mut self, command: CoordinatorCommand) -> Result<(), RankFault> {
        match command {
            CoordinatorCommand::LoadDraft {
                load,
                vocabulary,
                contract,
                origin,
            } => {
                self.context.enter(Activity::Loading);
                faults::reach(Point::Load, None)?;
                if self.replica.is_none() {
                    let config = &self.context.config;
                    let device = D::open(self.context.threads, config.draft.products)?;
                    let replica = Replica::build(config, &vocabulary, &contract, device)
                        .map_err(RankFault::permanent)?;
                    // Parts may have come before it was known what they must be.
                    for (row, lease) in self.rows.complete(replica.contract())? {
                        self.context.say(RankEvent::Received { row, lease });
                    }
                    let training = &self.context.config.training;
                    if training.collective == Collective::Nccl {
                        self.nccl = Some(Nccl::open(
                            training.sums,
                            replica.buckets().map_err(RankFault::permanent)?,
                        )?);
                    }
                    self.replica = Some(replica);
                }
                self.load = load;
                self.take_origin(origin)?;
            }
            CoordinatorCommand::Abandon { epoch } => self.abandon(epoch)?,
            CoordinatorCommand::SendState { to } => self.send_state(&to)?,
            CoordinatorCommand::FormGroup {
                epoch,
                members,
                owners,
                handover,
            } => self.form(epoch, members, owners, handover)?,
            CoordinatorCommand::Meet { epoch, id } => {
                // RANK-2
                if let Some(nccl) = self.nccl.as_mut().filter(|_| epoch >= self.epoch) {
                    let part = self.group.as_mut().and_then(|group| group.part());
                    nccl.take_id(epoch, &id, part.as_deref())?;
                }
            }
            CoordinatorCommand::Begin { epoch, step, lanes } => {
                // RANK-2
                if epoch == self.epoch {
                    self.begin(step, lanes)?;
                }
            }
            CoordinatorCommand::Commit {
                epoch,
                step,
                learning_rate,
            } => {
                if epoch == self.epoch {
                    self.commit(step, learning_rate)?;
                }
            }
            CoordinatorCommand::Checkpoint { recorded } => {
                self.context.enter(Activity::Saving);
                faults::reach(Point::Save, self.replica.as_ref().map(Replica::<D>::step))?;
                let replica = self.replica.as_ref().ok_or_else(not_loaded)?;
                let keep = self.context.config.checkpoints.keep;
                let folder = replica
                    .save(&self.checkpoints, keep, recorded)
                    .map_err(RankFault::permanent)?;
                let folder = folder
                    .strip_prefix(&self.context.run_directory)
                    .map(Path::to_owned)
                    .unwrap_or(folder);
                self.context.say(RankEvent::Checkpointed {
                    step: replica.step(),
                    folder,
                });
            }
            CoordinatorCommand::Evaluate => self.evaluate()?,
            CoordinatorCommand::Welcome { .. }
            | CoordinatorCommand::BeatAck { .. }
            | CoordinatorCommand::Quit => {}
            CoordinatorCommand::LoadVerifier
            | CoordinatorCommand::FormTeam { .. }
            | CoordinatorCommand::CheckVerifier { .. }
            | CoordinatorCommand::Extract(_)
            | CoordinatorCommand::ExtractHeldOut(_) => {
                return Err(RankFault::passing("a draft replica was told to be a verifier"));
            }
        }
        Ok(())
    }

    fn abandon(&mut self, epoch: Epoch) -> Result<(), RankFault> {
        // RANK-2
        if epoch < self.epoch {
            return Ok(());
        }
        self.epoch = epoch;
        self.phase = Phase::Idle;
        // RANK-2
        self.early.retain(|message| message.header.epoch >= epoch);
        if let Some(Err(fault)) = self.group.take().map(Group::end) {
            // What hangs inside NCCL would hang in the end of anything else on this GPU, too.
            self.context.end_process(&fault);
        }
        Ok(())
    }

    fn form(
        &mut self,
        epoch: Epoch,
        members: Vec<Member>,
        owners: Vec<u16>,
        handover: Option<Handover>,
    ) -> Result<(), RankFault> {
        // RANK-2
        if epoch < self.epoch {
            return Ok(());
        }
        let is_known = epoch == self.epoch && self.group.as_mut().is_some_and(|group| group.part().is_some());
        if is_known {
            // NCCL-1: a second id for one epoch would be nobody else's.
            return Ok(());
        }
        self.abandon(epoch)?;
        faults::reach(Point::Form, None)?;
        let seat = self.context.seat.index;
        // Rows of lanes that are somebody else's now are extracted again for their new owner.
        self.rows
            .retain(|row| owners.get(usize::from(row.lane())) == Some(&seat));
        if let Some(nccl) = &mut self.nccl {
            let members: Vec<u16> = members.iter().map(|member| member.seat).collect();
            let part = nccl.begin(&self.context, epoch, &members, &owners, handover)?;
            self.group = Some(Group::over_nccl(self.context.seat, epoch, members, owners, part));
            faults::reach(Point::Meet, None)?;
            return Ok(());
        }
        if handover.is_some() {
            return Err(RankFault::passing(
                "a state was to come over NCCL, and this rank does not sum over it",
            ));
        }
        match Group::connect(&self.context.here, epoch, &members, owners) {
            Ok(group) => self.group = Some(group),
            Err(unreached) if unreached.is_of_peer() => {
                // Most often it has just died: no reason to lose this replica too.
                self.context
                    .say_broken(unreached.peer, epoch, unreached.to_string());
                return Ok(());
            }
            Err(unreached) => return Err(RankFault::passing(unreached)),
        }
        self.context.say(RankEvent::GroupReady { epoch });
        faults::reach(Point::Formed, None)?;
        Ok(())
    }

    /// Something came of what is done over NCCL.
    fn take_word(&mut self, epoch: Epoch, word: Word) -> Result<(), RankFault> {
        // RANK-2
        let Some(group) = self.group.as_mut().filter(|_| epoch == self.epoch) else {
            return Ok(());
        };
        match word {
            Word::Id(id) => {
                let id = CollectiveId::new(&id.0);
                self.context.say(RankEvent::CollectiveId { epoch, id });
            }
            Word::Met => {
                let passes_state = group.part().is_some_and(|part| part.handover().is_some());
                if passes_state {
                    self.give_state()?;
                } else {
                    self.say_formed()?;
                }
            }
            Word::Room => self.give_state()?,
            Word::Arrived => self.take_arrived()?,
            Word::HandedOver => self.say_formed()?,
            Word::Summed => {
                self.note_summed();
                self.stage_if_reduced()?;
            }
            Word::Broken(reason) => {
                tracing::warn!(%epoch, reason, "the collectives of an epoch broke");
                self.context.say(RankEvent::CollectiveBroken { epoch, reason });
            }
        }
        Ok(())
    }

    /// NCCL-2
    fn say_formed(&mut self) -> Result<(), RankFault> {
        let epoch = self.epoch;
        let taken = self.adopt_arrived()?;
        if let Some(part) = self.group.as_mut().and_then(Group::part) {
            part.set_ready();
        }
        self.context.say(match taken {
            Some((step, state)) => RankEvent::StateTaken { epoch, step, state },
            None => RankEvent::GroupReady { epoch },
        });
        faults::reach(Point::Formed, None)?;
        Ok(())
    }

    fn activity(&self) -> Activity {
        match self.phase.activity() {
            Activity::Idle if self.group.as_ref().is_some_and(Group::is_meeting) => Activity::Meeting,
            activity => activity,
        }
    }

    fn take_row(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let reached = self.replica.as_ref().map(Replica::<D>::step);
        let contract = self.replica.as_ref().map(Replica::<D>::contract);
        if let Some((row, lease)) = self.rows.take(message, contract, reached)? {
            self.context.say(RankEvent::Received { row, lease });
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Evaluating);
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let mut acceptance = Acceptance::default();
        for (_, row) in self
            .rows
            .iter()
            .filter(|(id, _)| matches!(id, RowId::HeldOut { .. }))
        {
            acceptance.add(&replica.evaluate(row).map_err(RankFault::passing)?);
        }
        self.context.say(RankEvent::Evaluated {
            step: replica.step(),
            acceptance,
        });
        Ok(())
    }
}

/// Whether a row is still to be used by a replica that has reached a step.
pub(super) fn is_ahead(row: RowId, reached: Step) -> bool {
    match row {
        RowId::Train { step, .. } => step >= reached,
        RowId::HeldOut { .. } => true,
    }
}

fn not_loaded() -> RankFault {
    RankFault::passing("asked to work before a draft was loaded")
}

impl<D: RankDevice> Worker for DraftWorker<D> {
    fn take(&mut self, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(command) => self.command(command)?,
            Input::Bulk(BulkEvent::Message(message)) => {
                match (&message.header.kind, message.header.from.role) {
                    (BulkKind::Hidden { .. }, Role::Verifier) => self.take_row(message)?,
                    (BulkKind::Gradient { .. }, Role::Draft) => {
                        self.take_segment(message)?;
                        self.stage_if_reduced()?;
                    }
                    (BulkKind::State { .. }, Role::Draft) => self.take_state(message)?,
                    (_, role) => tracing::warn!(%role, "a message that this role does not send was dropped"),
                }
            }
            Input::Bulk(BulkEvent::Closed {
                peer: Some(hello),
                error: Some(error),
            }) => {
                self.context
                    .say_broken(hello.from, hello.epoch, error.to_string());
            }
            Input::Bulk(BulkEvent::Opened { .. } | BulkEvent::Closed { .. }) => {}
            Input::Sum { epoch, word } => self.take_word(epoch, word)?,
        }
        self.context.enter(self.activity());
        Ok(())
    }

    fn proceed(&mut self, _: &mut Inbox) -> Result<Progress, RankFault> {
        let progress = self.proceed_with_step()?;
        self.context.enter(self.activity());
        Ok(progress)
    }
}
