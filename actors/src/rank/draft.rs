//! A draft rank: holds a replica, computes its lanes' gradients, takes part in the sum, applies what was committed.

use std::collections::BTreeMap;
use std::path::Path;

use eaglet_runtime::checkpoint::CheckpointFolder;
use eaglet_runtime::collective::SeatOrderedReduce;
use eaglet_runtime::control::{
    Acceptance, Activity, CoordinatorCommand, DraftOrigin, LaneMetrics, Member, RankEvent,
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
    /// Number of the load that is answered next.
    load: u32,
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
        lanes: Vec<LaneMetrics>,
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
            load: 0,
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
                load,
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
                self.load = load;
                self.take_origin(origin)?;
            }
            CoordinatorCommand::Abandon { epoch } => self.abandon(epoch),
            CoordinatorCommand::SendState { to } => self.send_state(&to)?,
            CoordinatorCommand::FormGroup {
                epoch,
                members,
                owners,
            } => self.form(epoch, members, owners)?,
            CoordinatorCommand::Begin { epoch, step, lanes } => {
                // RANK-2
                if epoch == self.epoch {
                    self.begin(step, &lanes)?;
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
                load: self.load,
                step: replica.step(),
                state: replica.digest(),
            });
        }
    }

    fn abandon(&mut self, epoch: Epoch) {
        // RANK-2
        if epoch < self.epoch {
            return;
        }
        self.epoch = epoch;
        self.phase = Phase::Idle;
        self.group = None;
        // RANK-2
        self.early.retain(|message| message.header.epoch >= epoch);
    }

    fn form(&mut self, epoch: Epoch, members: Vec<Member>, owners: Vec<u16>) -> Result<(), RankFault> {
        // RANK-2
        if epoch < self.epoch {
            return Ok(());
        }
        self.abandon(epoch);
        faults::reach(Point::Form, None)?;
        let seat = self.context.seat.index;
        // Rows of lanes that are somebody else's now are extracted again for their new owner.
        self.rows
            .retain(|row, _| owners.get(usize::from(row.lane())) == Some(&seat));
        let (seat, generation) = (self.context.seat, self.context.generation);
        match Group::connect(seat, generation, epoch, &members, owners) {
            Ok(group) => self.group = Some(group),
            Err(unreached) if unreached.is_of_peer() => {
                // Most often it has just died: no reason to lose this replica too.
                self.closed(unreached.peer, epoch, unreached.to_string());
                return Ok(());
            }
            Err(unreached) => return Err(RankFault::passing(unreached)),
        }
        self.context.say(RankEvent::GroupReady { epoch });
        faults::reach(Point::Formed, None)?;
        Ok(())
    }

    /// Computes the gradients of this seat's lanes and starts the sum over all `lanes` that have a row.
    fn begin(&mut self, step: Step, lanes: &[u16]) -> Result<(), RankFault> {
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
        let mut gradient = replica.take_gradient();
        let mut reduce =
            SeatOrderedReduce::new(group.shape(gradient.len(), lanes)).map_err(RankFault::passing)?;
        let mut measured = Vec::new();
        for &lane in lanes {
            if group.owner(lane) != Some(self.context.seat.index) {
                continue;
            }
            let id = RowId::Train { step, lane };
            let row = self
                .rows
                .get(&id)
                .ok_or_else(|| RankFault::passing(format!("the {id} is not here")))?;
            let mut metrics = replica.gradient(row, &mut gradient).map_err(RankFault::passing)?;
            if let (Some(Damage::Nan), Some(value)) =
                (faults::reach(Point::Computed, Some(step))?, gradient.first_mut())
            {
                *value = f32::NAN;
            }
            metrics.lane = lane;
            metrics.finite = metrics.loss.is_finite() && is_finite(&gradient);
            tracing::debug!(
                lane,
                loss = metrics.loss,
                tokens = metrics.tokens,
                ms = metrics.compute_ms,
                "gradient computed"
            );
            measured.push(metrics);
            let outgoing = reduce.contribute(lane, &gradient).map_err(RankFault::passing)?;
            group.send_all(step, outgoing).map_err(RankFault::passing)?;
        }
        let outgoing = reduce.start(gradient).map_err(RankFault::passing)?;
        group.send_all(step, outgoing).map_err(RankFault::passing)?;
        self.phase = Phase::Reducing {
            step,
            reduce,
            lanes: measured,
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
            mut lanes,
        } = std::mem::replace(&mut self.phase, Phase::Idle)
        else {
            return Ok(());
        };
        let replica = self.replica.as_ref().ok_or_else(not_loaded)?;
        let gradient = reduce.finish().map_err(RankFault::passing)?;
        faults::reach(Point::Staged, Some(step))?;
        if !is_finite(&gradient) {
            // Finite parts may have a sum that is not; it must not be applied either.
            lanes.iter_mut().for_each(|lane| lane.finite = false);
        }
        let event = RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient: Digest::of_f32(&gradient),
            state: replica.digest(),
            lanes,
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
        if !is_old {
            self.rows.insert(row, HiddenRow { row: content, hidden });
            self.context.say(RankEvent::Received { row });
        }
        Ok(())
    }

    fn evaluate(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Evaluating);
        let replica = self.replica.as_mut().ok_or_else(not_loaded)?;
        let mut acceptance = Acceptance::default();
        for (id, row) in &self.rows {
            if matches!(id, RowId::HeldOut { .. }) {
                acceptance.add(&replica.evaluate(row).map_err(RankFault::passing)?);
            }
        }
        self.context.say(RankEvent::Evaluated {
            step: replica.step(),
            acceptance,
        });
        Ok(())
    }

    /// A link that its sender closed in order says nothing; one that broke is the coordinator's business.
    fn closed(&self, from: Endpoint, epoch: Epoch, reason: String) {
        tracing::warn!(%from, reason, "a bulk link broke");
        self.context.say(RankEvent::LinkBroken {
            from: from.seat,
            generation: from.generation,
            epoch,
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

fn is_finite(values: &[f32]) -> bool {
    values.iter().all(|value| value.is_finite())
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
                self.closed(hello.from, hello.epoch, error.to_string());
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
