//! A draft rank: holds a replica, computes its seat's gradient, takes part in the sum, applies what was committed.

use std::collections::BTreeMap;
use std::path::Path;

use eaglet_runtime::checkpoint::CheckpointFolder;
use eaglet_runtime::collective::SeatOrderedReduce;
use eaglet_runtime::control::{
    Acceptance, Activity, CoordinatorCommand, DraftOrigin, Member, RankEvent, SeatMetrics,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Role, RowId, Seat, Step};
use eaglet_runtime::link::{BulkEvent, BulkKind, BulkMessage, Endpoint};
use eaglet_runtime::row::{HiddenRow, HiddenStates};

use super::gradient::{self, Group};
use super::{Context, Input, RankFault, Worker};
use crate::faults::{self, Damage, Point};
use crate::replica::{IncomingState, Replica};

/// The worker of a draft seat.
pub(super) struct DraftWorker {
    context: Context,
    checkpoints: CheckpointFolder,
    replica: Option<Replica>,
    epoch: Epoch,
    group: Option<Group>,
    phase: Phase,
    rows: BTreeMap<RowId, HiddenRow>,
    /// Segments of a sum that this replica has not begun yet; none of them is of an older epoch.
    early: Vec<BulkMessage>,
    /// The peer whose state is awaited.
    donor: Option<Member>,
    /// What has arrived of it.
    incoming: IncomingState,
    /// Pieces of states that came before the command to take them.
    early_states: Vec<BulkMessage>,
}

enum Phase {
    Idle,
    Reducing {
        step: Step,
        reduce: SeatOrderedReduce,
        metrics: SeatMetrics,
    },
    Staged {
        step: Step,
        gradient: Vec<f32>,
    },
}

impl DraftWorker {
    pub(super) fn new(context: Context) -> Self {
        Self {
            checkpoints: CheckpointFolder::open(context.run_directory.join("checkpoints")),
            context,
            replica: None,
            epoch: Epoch::default(),
            group: None,
            phase: Phase::Idle,
            rows: BTreeMap::new(),
            early: Vec::new(),
            donor: None,
            incoming: IncomingState::default(),
            early_states: Vec::new(),
        }
    }

    fn command(&mut self, command: CoordinatorCommand) -> Result<(), RankFault> {
        match command {
            CoordinatorCommand::LoadDraft {
                vocabulary,
                contract,
                origin,
            } => {
                self.context.enter(Activity::Loading);
                faults::reach(Point::Load, None)?;
                if self.replica.is_none() {
                    let threads = self.context.threads;
                    let replica = Replica::build(&self.context.config, &vocabulary, &contract, threads)
                        .map_err(RankFault::permanent)?;
                    self.replica = Some(replica);
                }
                self.take_origin(origin)?;
            }
            CoordinatorCommand::Abandon { epoch } => self.abandon(epoch),
            CoordinatorCommand::SendState { to } => self.send_state(&to)?,
            CoordinatorCommand::FormGroup { epoch, members } => self.form(epoch, members)?,
            CoordinatorCommand::Begin {
                epoch,
                step,
                has_row,
                contributors,
            } => {
                if epoch == self.epoch {
                    self.begin(step, has_row, contributors)?;
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
            CoordinatorCommand::Checkpoint => {
                self.context.enter(Activity::Saving);
                faults::reach(Point::Save, self.replica.as_ref().map(Replica::step))?;
                let replica = self.replica.as_ref().ok_or_else(not_loaded)?;
                let keep = self.context.config.checkpoints.keep;
                let folder = replica
                    .save(&self.checkpoints, keep)
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
            | CoordinatorCommand::Extract(_)
            | CoordinatorCommand::ExtractHeldOut(_) => {
                return Err(RankFault::passing("a draft replica was told to be a verifier"));
            }
        }
        Ok(())
    }

    fn take_origin(&mut self, origin: DraftOrigin) -> Result<(), RankFault> {
        self.donor = None;
        self.incoming = IncomingState::default();
        if !matches!(origin, DraftOrigin::Peer(_)) {
            self.early_states.clear();
        }
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        match origin {
            DraftOrigin::Initial => replica.initialise(self.context.config.run.seed),
            DraftOrigin::Checkpoint(folder) => {
                // Relative to the run directory, which may have been moved.
                let folder = self.context.run_directory.join(folder);
                replica.load(&folder).map_err(RankFault::permanent)?;
            }
            DraftOrigin::Peer(donor) => {
                self.donor = Some(donor);
                for message in std::mem::take(&mut self.early_states) {
                    self.take_state(message)?;
                }
                return Ok(());
            }
        }
        self.say_ready();
        Ok(())
    }

    fn say_ready(&mut self) {
        if let Some(replica) = &self.replica {
            self.rows.retain(|row, _| is_ahead(*row, replica.step()));
            self.context.say(RankEvent::DraftReady {
                step: replica.step(),
                state: replica.digest(),
            });
        }
    }

    fn abandon(&mut self, epoch: Epoch) {
        self.epoch = epoch;
        self.phase = Phase::Idle;
        self.group = None;
        // RANK-2
        self.early.retain(|message| message.header.epoch >= epoch);
    }

    fn form(&mut self, epoch: Epoch, members: Vec<Member>) -> Result<(), RankFault> {
        self.abandon(epoch);
        faults::reach(Point::Form, None)?;
        let group = Group::connect(self.context.seat, self.context.generation, epoch, members)
            .map_err(RankFault::passing)?;
        self.group = Some(group);
        self.context.say(RankEvent::GroupReady { epoch });
        faults::reach(Point::Formed, None)?;
        Ok(())
    }

    fn begin(&mut self, step: Step, has_row: bool, contributors: u16) -> Result<(), RankFault> {
        let _step = tracing::info_span!("step", step = step.0, epoch = %self.epoch).entered();
        self.context.enter(Activity::Computing);
        faults::reach(Point::Begin, Some(step))?;
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let group = self
            .group
            .as_ref()
            .ok_or_else(|| RankFault::passing("a step began before the group"))?;
        if replica.step() != step {
            return Err(RankFault::passing(format!(
                "step {step} began at step {}",
                replica.step()
            )));
        }
        let id = RowId::Train {
            step,
            seat: self.context.seat.index,
        };
        let row = match (has_row, self.rows.get(&id)) {
            (false, _) => None,
            (true, Some(row)) => Some(row),
            (true, None) => return Err(RankFault::passing(format!("the {id} is not here"))),
        };
        let (mut gradient, metrics) = replica.gradient(row).map_err(RankFault::passing)?;
        tracing::debug!(
            loss = metrics.loss,
            tokens = metrics.tokens,
            ms = metrics.compute_ms,
            "gradient computed"
        );
        if let (Some(Damage::Nan), Some(value)) = (faults::reach(Point::Computed, Some(step))?, gradient.first_mut()) {
            *value = f32::NAN;
        }
        let shape = group.shape(gradient.len(), 1.0 / f32::from(contributors.max(1)));
        let mut reduce = SeatOrderedReduce::new(shape).map_err(RankFault::passing)?;
        let outgoing = reduce.start(gradient).map_err(RankFault::passing)?;
        group.send_all(step, outgoing).map_err(RankFault::passing)?;
        self.phase = Phase::Reducing {
            step,
            reduce,
            metrics,
        };
        self.context.enter(Activity::Reducing);
        for message in std::mem::take(&mut self.early) {
            self.take_segment(message)?;
        }
        self.stage_if_reduced()
    }

    fn take_segment(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let BulkKind::Gradient {
            step: at,
            phase,
            segment,
        } = message.header.kind
        else {
            return Ok(());
        };
        // RANK-2
        if message.header.epoch < self.epoch {
            return Ok(());
        }
        match &mut self.phase {
            Phase::Reducing { step, reduce, .. } if *step == at && message.header.epoch == self.epoch => {
                let Some(group) = &self.group else { return Ok(()) };
                // The link has checked that there is one part.
                let bytes = message
                    .parts
                    .into_iter()
                    .next()
                    .map(|part| part.into_vec())
                    .unwrap_or_default();
                let outgoing = reduce
                    .receive(message.header.from.index, phase, segment, bytes)
                    .map_err(RankFault::passing)?;
                faults::reach(Point::Reducing, Some(at))?;
                group.send_all(at, outgoing).map_err(RankFault::passing)?;
            }
            _ => self.early.push(message),
        }
        Ok(())
    }

    fn stage_if_reduced(&mut self) -> Result<(), RankFault> {
        if !matches!(&self.phase, Phase::Reducing { reduce, .. } if reduce.is_done()) {
            return Ok(());
        }
        let Phase::Reducing {
            step,
            reduce,
            metrics,
        } = std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            return Ok(());
        };
        let replica = self.replica.as_ref().ok_or_else(not_loaded)?;
        let gradient = reduce.finish().map_err(RankFault::passing)?;
        faults::reach(Point::Staged, Some(step))?;
        let event = RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient: Digest::of_f32(&gradient),
            state: replica.digest(),
            metrics,
        };
        self.phase = Phase::Staged { step, gradient };
        self.context.say(event);
        faults::reach(Point::Voted, Some(step))?;
        Ok(())
    }

    fn commit(&mut self, step: Step, learning_rate: f64) -> Result<(), RankFault> {
        let _step = tracing::info_span!("step", step = step.0, epoch = %self.epoch).entered();
        self.context.enter(Activity::Applying);
        faults::reach(Point::Commit, Some(step))?;
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        match std::mem::replace(&mut self.phase, Phase::Idle) {
            Phase::Staged {
                step: staged,
                gradient,
            } if staged == step => {
                replica
                    .apply(gradient, learning_rate)
                    .map_err(RankFault::passing)?;
            }
            _ => {
                return Err(RankFault::passing(format!(
                    "step {step} is committed and not staged here"
                )));
            }
        }
        let reached = replica.step();
        tracing::debug!(learning_rate, state = %replica.digest(), "step applied");
        self.rows.retain(|row, _| is_ahead(*row, reached));
        self.context.say(RankEvent::Applied {
            step: reached,
            state: replica.digest(),
        });
        faults::reach(Point::Applied, Some(step))?;
        Ok(())
    }

    fn send_state(&mut self, to: &Member) -> Result<(), RankFault> {
        self.context.enter(Activity::Donating);
        let pieces = self.replica.as_ref().ok_or_else(not_loaded)?.pieces();
        let (seat, generation) = (self.context.seat, self.context.generation);
        // If it cannot be reached its process is gone, and the coordinator asks again for the next one.
        if let Err(error) = gradient::send_once(seat, generation, to, self.epoch, pieces) {
            tracing::warn!(to = to.seat, %error, "cannot send the state");
        }
        Ok(())
    }

    fn take_state(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let Some(donor) = self.donor.as_ref() else {
            self.early_states.push(message);
            return Ok(());
        };
        if (message.header.from, message.header.generation) != (Seat::draft(donor.seat), donor.generation) {
            return Ok(()); // the state of a donor that has died since
        }
        let bytes = message.parts.first().map_or(&[][..], |part| &part[..]);
        let whole = self
            .incoming
            .take(&message.header.kind, bytes)
            .map_err(RankFault::passing)?;
        if let Some(state) = whole {
            self.replica
                .as_mut()
                .ok_or_else(not_loaded)?
                .adopt(state)
                .map_err(RankFault::permanent)?;
            self.donor = None;
            self.early_states.clear();
            self.say_ready();
        } else {
            faults::reach(Point::Adopting, None)?;
        }
        Ok(())
    }

    fn take_row(&mut self, message: BulkMessage) -> Result<(), RankFault> {
        let BulkKind::Hidden {
            row,
            contract,
            dtype,
            states,
            hidden,
            packed: content,
            ..
        } = message.header.kind
        else {
            return Ok(());
        };
        let bytes = message
            .parts
            .into_iter()
            .next()
            .map(|part| part.into_vec())
            .unwrap_or_default();
        let hidden = HiddenStates {
            dtype,
            states: usize::from(states),
            hidden: hidden as usize,
            bytes,
        };
        let expected = self.replica.as_ref().map(Replica::contract);
        if let Some(expected) = expected
            && (expected.digest() != contract
                || expected.states_per_token() != hidden.states
                || expected.hidden_size as usize != hidden.hidden
                || expected.dtype != hidden.dtype
                || content.len() * expected.bytes_per_token() != hidden.bytes.len())
        {
            return Err(RankFault::permanent(format!(
                "{} sent the {row} under another contract than this draft is trained for; start all ranks from one \
                 cluster.toml",
                message.header.from
            )));
        }
        let is_old = self
            .replica
            .as_ref()
            .is_some_and(|replica| !is_ahead(row, replica.step()));
        if row.seat() == self.context.seat.index && !is_old {
            self.rows.insert(row, HiddenRow { row: content, hidden });
            self.context.say(RankEvent::Received { row });
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Evaluating);
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let mut acceptance = Acceptance::default();
        if let Some(row) = self.rows.get(&RowId::HeldOut {
            seat: self.context.seat.index,
        }) {
            acceptance = replica.evaluate(row).map_err(RankFault::passing)?;
        }
        self.context.say(RankEvent::Evaluated {
            step: replica.step(),
            acceptance,
        });
        Ok(())
    }

    /// A link that its sender closed in order says nothing; one that broke is the coordinator's business.
    fn closed(&self, from: Endpoint, reason: String) {
        tracing::warn!(%from, reason, "a bulk link broke");
        self.context.say(RankEvent::LinkBroken {
            from: from.seat,
            generation: from.generation,
            reason,
        });
    }
}

/// Whether a row is still to be used by a replica that has reached a step.
fn is_ahead(row: RowId, reached: Step) -> bool {
    match row {
        RowId::Train { step, .. } => step >= reached,
        RowId::HeldOut { .. } => true,
    }
}

fn not_loaded() -> RankFault {
    RankFault::passing("asked to work before a draft was loaded")
}

impl Worker for DraftWorker {
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
                self.closed(hello.from, error.to_string());
            }
            Input::Bulk(BulkEvent::Opened { .. } | BulkEvent::Closed { .. }) => {}
        }
        match self.phase {
            Phase::Reducing { .. } => self.context.enter(Activity::Reducing),
            _ => self.context.enter(Activity::Idle),
        }
        Ok(())
    }
}
