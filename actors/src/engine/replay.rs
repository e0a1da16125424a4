//! The state that a journal implies.

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::ids::{Epoch, Role, Step};

use super::seats::{SeatState, Status};
use super::{Command, CommittedStep, Engine, KnownCheckpoint, Phase};
use crate::journal::Record;

/// Records that contradict each other or the configuration.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The run directory belongs to another configuration.
    #[error(
        "{what}; start a new run directory, or set the configuration back to what this run was started with"
    )]
    OtherRun {
        /// What differs.
        what: String,
    },
    /// A record cannot follow those before it.
    #[error(
        "record {index} of the journal cannot follow those before it: {what}; restore the journal from a copy"
    )]
    Contradiction {
        /// Which, from 0.
        index: usize,
        /// Why.
        what: String,
    },
}

impl Engine {
    pub(super) fn replay(&mut self, records: &[Record]) -> Result<(), ReplayError> {
        for (index, record) in records.iter().enumerate() {
            self.restore(record).map_err(|error| match error {
                Refusal::OtherRun(what) => ReplayError::OtherRun { what },
                Refusal::Contradiction(what) => ReplayError::Contradiction { index, what },
            })?;
        }
        // Quarantines were told when they happened.
        self.commands.clear();
        self.close_torn_replicas();
        for role in [Role::Verifier, Role::Draft] {
            // cluster.toml may have lost the ranks that were left: then all of its own count again.
            if self.seats.active(role).next().is_none() {
                for seat in self
                    .settings
                    .seats
                    .clone()
                    .into_iter()
                    .filter(|seat| seat.role == role)
                {
                    self.seats.open(seat, self.now_ms);
                }
            }
        }
        if self.prepared {
            self.phase = Phase::Training;
        }
        Ok(())
    }

    /// A replica of the verifier of which a seat is missing is of no use: it was added or removed when the journal was
    /// torn, or an earlier launch cut the verifier otherwise.
    fn close_torn_replicas(&mut self) {
        for replica in self.replicas() {
            if self.all_of_replica(replica, SeatState::is_active) {
                continue;
            }
            for seat in self.seats_of_replica(replica) {
                if self.seats.find(seat).is_some() {
                    self.seats.get_mut(seat).status = Status::Empty;
                }
            }
        }
    }

    fn restore(&mut self, record: &Record) -> Result<(), Refusal> {
        match record {
            Record::Launched {
                launch,
                contract,
                recipe,
            } => {
                if *recipe != self.settings.recipe {
                    return Err(Refusal::OtherRun(
                        "the run directory holds a run with another verifier, draft, training, samples or seed \
                         section"
                            .to_owned(),
                    ));
                }
                if let Some(difference) = self.settings.contract.difference(contract) {
                    return Err(Refusal::OtherRun(format!(
                        "the run directory holds a run with other hidden states: {difference}"
                    )));
                }
                self.launch = *launch;
            }
            Record::Accepted {
                sample,
                source,
                location,
                tokens,
                ..
            } => {
                if *sample != self.next_sample {
                    return Err(Refusal::Contradiction(format!(
                        "sample {sample} follows {} samples",
                        self.next_sample
                    )));
                }
                self.admit_sample(*sample, source, *location, *tokens);
            }
            Record::Refused { sample, source, .. } => self.turn_away_sample(*sample, source),
            Record::Prepared {
                vocabulary,
                held_out,
                total_steps,
            } => {
                self.vocabulary.clone_from(vocabulary);
                self.held_out.clone_from(held_out);
                self.rows.ask(self.deal_held_out());
                self.total_steps = *total_steps;
                self.prepared = true;
            }
            Record::Planned { step, rows } => {
                if rows.len() != usize::from(self.settings.lanes) {
                    return Err(Refusal::OtherRun(format!(
                        "the run directory holds a run with training.rows_per_step = {}, and cluster.toml has {}",
                        rows.len(),
                        self.settings.lanes
                    )));
                }
                let again = *step >= self.committed
                    && self
                        .plans
                        .steps
                        .get(step)
                        .is_some_and(|rows| rows.iter().all(Vec::is_empty));
                if *step != self.plans.next && !again {
                    return Err(Refusal::Contradiction(format!(
                        "step {step} is planned out of order"
                    )));
                }
                self.adopt_plan(*step, rows.clone());
            }
            Record::Quarantined { step, unit, .. } => self.quarantine(*step, *unit),
            Record::Committed {
                step,
                gradient,
                state,
                report,
                ..
            } => {
                if *step != self.committed {
                    return Err(Refusal::Contradiction(format!(
                        "step {step} is committed after step {}",
                        self.committed
                    )));
                }
                let Some(rows) = self.plans.steps.get(step).cloned() else {
                    return Err(Refusal::Contradiction(format!("step {step} was never planned")));
                };
                for unit in rows.into_iter().flatten() {
                    self.ledger
                        .restore_trained(unit)
                        .map_err(|error| Refusal::Contradiction(error.to_string()))?;
                }
                self.committed = step.next();
                self.last_rate = report.learning_rate;
                self.history.insert(
                    *step,
                    CommittedStep {
                        gradient: *gradient,
                        state: *state,
                        learning_rate: report.learning_rate,
                    },
                );
            }
            Record::Grown { total_steps } => self.set_total(*total_steps),
            Record::SourceAdded { file } => self.added_sources.push(file.clone()),
            Record::Closed => self.set_closed(),
            Record::Retried { sample, stored } => {
                if !self.readmit(*sample, *stored) {
                    return Err(Refusal::Contradiction(format!(
                        "sample {sample} is tried again and was not quarantined"
                    )));
                }
            }
            Record::SeatAdded { seat, .. } => self.seats.open(*seat, self.now_ms),
            Record::SeatRemoved { seat } => {
                if self.seats.find(*seat).is_some() {
                    self.seats.get_mut(*seat).status = Status::Empty;
                }
            }
            Record::Sums { mode } => {
                if *mode != self.settings.sums {
                    return Err(Refusal::OtherRun(format!(
                        "the run directory holds a run with {mode} sums of gradients (training.sums)"
                    )));
                }
            }
            Record::Checkpointed { step, state, folder } => {
                self.checkpoints.push(KnownCheckpoint {
                    step: *step,
                    state: *state,
                    folder: folder.clone(),
                });
            }
        }
        Ok(())
    }

    /// Begins a launch: what it hands out is fenced from every earlier one.
    pub fn launch(&mut self) -> Vec<Command> {
        self.launch += 1;
        self.epoch = Epoch::first_of(self.launch);
        let record = Record::Launched {
            launch: self.launch,
            contract: self.settings.contract.clone(),
            recipe: self.settings.recipe,
        };
        self.append(record, true);
        let mode = self.settings.sums;
        if mode != SumMode::Exact {
            self.append(Record::Sums { mode }, true);
        }
        // Samples may have come so late in the last launch that nobody counted them; perhaps nobody reads files any more.
        self.grow();
        std::mem::take(&mut self.commands)
    }

    /// Checkpoints that the journal knows, oldest first.
    pub fn checkpoints(&self) -> &[KnownCheckpoint] {
        &self.checkpoints
    }

    /// Forgets checkpoints that are no longer whole on disk. To be called before the first event.
    pub fn keep_checkpoints(&mut self, is_whole: impl FnMut(&KnownCheckpoint) -> bool) {
        self.checkpoints.retain(is_whole);
    }

    /// Steps committed so far.
    pub fn committed(&self) -> Step {
        self.committed
    }
}

enum Refusal {
    OtherRun(String),
    Contradiction(String),
}
