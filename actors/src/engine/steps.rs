//! A training step: begin, stage, one journal record, commit, apply. Fenced by the epoch.
//!
//! Nothing of a step touches weights before its record is on disk: [`Command::Append`] with `sync` stands before every
//! [`CoordinatorCommand::Commit`], and commands are carried out in order.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use eaglet_runtime::control::{Acceptance, Activity, CoordinatorCommand, LaneMetrics};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Seat, Step};

use super::ledger::UnitState;
use super::{Command, CommittedStep, Engine, KnownCheckpoint, Outcome, Phase, StepReport};
use crate::journal::Record;

/// Steps may be redone so often in a row because replicas disagree on a gradient.
const GRADIENT_DISPUTES: u32 = 3;

/// What a replica has staged.
#[derive(Clone, Debug)]
pub(super) struct Staged {
    pub(super) gradient: Digest,
    pub(super) finite: bool,
    pub(super) state: Digest,
    pub(super) lanes: Vec<LaneMetrics>,
}

/// What the draft group is doing.
#[derive(Clone, Debug)]
pub(super) enum StepPhase {
    /// Nothing, or the group is broken.
    Idle,
    /// Gradients are computed and reduced.
    Running {
        step: Step,
        since_ms: u64,
        staged: BTreeMap<u16, Staged>,
    },
    /// A committed step is being applied.
    Applying,
    /// Acceptance is being measured.
    Evaluating {
        step: Step,
        since_ms: u64,
        waiting: BTreeSet<u16>,
        total: Acceptance,
    },
    /// A checkpoint is being written by a draft seat.
    Saving { seat: u16, since_ms: u64 },
}

impl StepPhase {
    /// Does not count some time in which the coordinator itself was held up.
    pub(super) fn excuse(&mut self, held_up_ms: u64) {
        match self {
            Self::Idle | Self::Applying => {}
            Self::Running { since_ms, .. }
            | Self::Evaluating { since_ms, .. }
            | Self::Saving { since_ms, .. } => *since_ms += held_up_ms,
        }
    }
}

impl Engine {
    /// Starts what comes next, once the group is formed and idle.
    pub(super) fn advance_step(&mut self) {
        if let Phase::Closing { drained: true } = self.phase
            && !self.prepared
        {
            self.close(true);
            return;
        }
        if !self.formed || !matches!(self.step_phase, StepPhase::Idle) {
            return;
        }
        let Some((at, _)) = self.common_state() else {
            return;
        };
        if self.membership_changes() && matches!(self.phase, Phase::Training) {
            self.restart_epoch();
            self.advance_group();
            self.route();
            return;
        }
        match self.phase {
            Phase::Training if at.0 >= self.total_steps && at >= self.committed => {
                if self.is_open() {
                    // More may come. What there is so far is measured and kept.
                    self.settle(at);
                } else {
                    self.phase = Phase::Closing { drained: false };
                    self.advance_step();
                }
            }
            Phase::Training => {
                if self.checkpoint_is_due(at) {
                    self.save();
                } else if self.evaluation_is_due(at) {
                    self.evaluate(at);
                } else {
                    self.begin(at);
                }
            }
            Phase::Closing { drained: false } if at < self.committed => {
                // All replicas were lost at the very end: they catch up from a checkpoint first.
                self.phase = Phase::Training;
                self.route();
                self.advance_step();
            }
            Phase::Closing { drained } => {
                if self.settle(at) {
                    self.close(drained);
                }
            }
            Phase::Preparing | Phase::Leaving | Phase::Finished => {}
        }
    }

    /// Measures and saves the present state unless that was done; whether nothing is left to do.
    fn settle(&mut self, at: Step) -> bool {
        let drained = matches!(self.phase, Phase::Closing { drained: true });
        let measured = self.evaluated.as_ref().is_some_and(|(step, _)| *step == at);
        if !drained && !measured && self.rows.has_parts() {
            if self.rows.all_parts_held() {
                self.evaluate(at);
            }
            false
        } else if at.0 > 0 && self.latest_checkpoint().is_none_or(|known| known.step != at) {
            self.save();
            false
        } else {
            true
        }
    }

    fn close(&mut self, drained: bool) {
        let checkpoint = self.latest_checkpoint().map(|known| known.folder.clone());
        self.outcome.get_or_insert(if drained {
            Outcome::Drained { checkpoint }
        } else {
            Outcome::Completed {
                checkpoint,
                acceptance: self.evaluated.as_ref().map(|(_, acceptance)| acceptance.clone()),
            }
        });
        self.start_leaving();
    }

    fn checkpoint_is_due(&self, at: Step) -> bool {
        let every = self.settings.checkpoint_every_steps;
        every > 0
            && at.0 > 0
            && at.0.is_multiple_of(every)
            && at == self.committed
            && self.latest_checkpoint().is_none_or(|known| known.step != at)
    }

    fn evaluation_is_due(&self, at: Step) -> bool {
        let every = self.settings.evaluate_every_steps;
        every > 0
            && at.0.is_multiple_of(every)
            && at == self.committed
            && self.evaluated.as_ref().is_none_or(|(step, _)| *step != at)
            && self.rows.has_parts()
            && self.rows.all_parts_held()
    }

    fn save(&mut self) {
        // A formed group has a member.
        let Some(seat) = self.members().next() else { return };
        self.step_phase = StepPhase::Saving {
            seat: seat.index,
            since_ms: self.now_ms,
        };
        let recorded = self.latest_checkpoint().map(|checkpoint| checkpoint.step);
        self.send(seat, CoordinatorCommand::Checkpoint { recorded });
    }

    pub(super) fn checkpointed(&mut self, seat: Seat, step: Step, folder: PathBuf) {
        let Some((_, state)) = self.seats.get(seat).state.filter(|(at, _)| *at == step) else {
            return;
        };
        if matches!(self.step_phase, StepPhase::Saving { seat: saving, .. } if saving == seat.index) {
            self.step_phase = StepPhase::Idle;
        }
        if self.latest_checkpoint().is_some_and(|known| known.step >= step) {
            return;
        }
        self.checkpoints.push(KnownCheckpoint {
            step,
            state,
            folder: folder.clone(),
        });
        // Steps before the last checkpoint but one are never done again.
        if let [.., keep, _] = self.checkpoints.as_slice() {
            let keep = keep.step;
            self.history.retain(|&step, _| step >= keep);
            self.plans.steps = self.plans.steps.split_off(&keep);
            self.rows.unplan_before(keep);
        }
        self.notice(format!("checkpoint of step {step} is written"));
        self.append(Record::Checkpointed { step, state, folder }, true);
    }

    fn evaluate(&mut self, at: Step) {
        let seats: BTreeSet<u16> = self
            .rows
            .parts()
            .filter_map(|(_, lane)| Some(self.owner_of(lane)?.index))
            .collect();
        for &seat in &seats {
            self.send(Seat::draft(seat), CoordinatorCommand::Evaluate);
        }
        self.step_phase = StepPhase::Evaluating {
            step: at,
            since_ms: self.now_ms,
            waiting: seats,
            total: Acceptance::default(),
        };
    }

    pub(super) fn seat_evaluated(&mut self, seat: Seat, at: Step, acceptance: &Acceptance) {
        let StepPhase::Evaluating {
            step, waiting, total, ..
        } = &mut self.step_phase
        else {
            return;
        };
        if *step != at || !waiting.remove(&seat.index) {
            return;
        }
        total.add(acceptance);
        if waiting.is_empty() {
            let total = std::mem::take(total);
            self.step_phase = StepPhase::Idle;
            self.evaluated = Some((at, total.clone()));
            self.commands.push(Command::Evaluated {
                step: at.0,
                acceptance: total,
            });
        }
    }

    fn begin(&mut self, step: Step) {
        if !self.plans.steps.contains_key(&step) || !self.rows.all_held(step) {
            return;
        }
        let lanes: Vec<u16> = self.rows.lanes(step).collect();
        if lanes.is_empty() {
            self.plan_again(step);
            return;
        }
        self.refused_steps = 0;
        let epoch = self.epoch;
        for seat in self.members() {
            let lanes = lanes.clone();
            self.send(seat, CoordinatorCommand::Begin { epoch, step, lanes });
        }
        self.step_phase = StepPhase::Running {
            step,
            since_ms: self.now_ms,
            staged: BTreeMap::new(),
        };
    }

    pub(super) fn staged(&mut self, seat: Seat, epoch: Epoch, at: Step, vote: Staged) {
        // FENCE: a vote counts in its own epoch only.
        if epoch != self.epoch || !self.is_member(seat) {
            return;
        }
        let StepPhase::Running { step, staged, .. } = &mut self.step_phase else {
            return;
        };
        if *step != at {
            return;
        }
        staged.insert(seat.index, vote);
        if staged.len() == self.members.len() {
            let staged = std::mem::take(staged);
            self.decide(at, &staged);
        }
    }

    /// All votes are in: commit, or do the step again.
    fn decide(&mut self, step: Step, staged: &BTreeMap<u16, Staged>) {
        // There is at least one draft seat, so there is a first vote.
        let Some(first) = staged.values().next() else {
            return;
        };
        if staged.values().any(|vote| vote.state != first.state) {
            self.dissolve(&format!(
                "draft replicas started step {step} from different weights"
            ));
            return;
        }
        let broken = staged.iter().find_map(|(seat, vote)| {
            Some((Seat::draft(*seat), vote.lanes.iter().find(|lane| !lane.finite)?))
        });
        let dispute = if let Some((seat, lane)) = broken {
            let loss = if lane.loss.is_finite() {
                String::new()
            } else {
                format!(", its loss is {}", lane.loss)
            };
            Some((
                format!("the gradient that {seat} computed for step {step} is not finite{loss}"),
                "lower training.learning_rate, look at the samples of that step, or test that rank's memory",
            ))
        } else if staged.values().any(|vote| !vote.finite) {
            Some((
                format!("the sum of the gradients of step {step} is not finite, though each of them is"),
                "lower training.learning_rate, or look at the samples of that step",
            ))
        } else if staged.values().any(|vote| vote.gradient != first.gradient) {
            Some((
                format!("draft replicas disagree on the gradient of step {step}"),
                "test the memory and the links of their hosts",
            ))
        } else {
            None
        };
        if let Some((what, remedy)) = dispute {
            self.gradient_disputes += 1;
            if self.gradient_disputes > GRADIENT_DISPUTES {
                self.fail(format!(
                    "{what}, {} times in a row; {remedy}",
                    GRADIENT_DISPUTES + 1
                ));
            } else {
                self.warn(format!("{what}; it is done again"));
                self.restart_epoch();
            }
            return;
        }
        self.gradient_disputes = 0;
        self.collective_faults = 0;
        let replay = step < self.committed;
        let report = self.report(step, staged, replay);
        let digests = CommittedStep {
            gradient: first.gradient,
            state: first.state,
            learning_rate: report.learning_rate,
        };
        if replay {
            let differs = self.history.get(&step).is_some_and(|known| *known != digests);
            if differs && !self.settings.repeats_bits() {
                // Their bits depend on who the members were.
                self.warn_quietly(format!(
                    "step {step} was committed before with other bits, as fast sums may have"
                ));
            } else if differs {
                self.fail(format!(
                    "step {step} was committed before with other digests: this machine does not repeat its own \
                     arithmetic; see docs/semantics.md"
                ));
                return;
            }
        } else {
            for units in self.plans.steps.get(&step).cloned().unwrap_or_default() {
                for unit in units {
                    if let Err(error) = self.ledger.advance(unit, UnitState::Trained) {
                        self.fail(format!(
                            "the ledger does not add up: {error}; this is a defect of eaglet"
                        ));
                        return;
                    }
                }
            }
            self.committed = step.next();
            self.last_rate = report.learning_rate;
            let record = Record::Committed {
                step,
                epoch: self.epoch,
                gradient: digests.gradient,
                state: digests.state,
                report: report.clone(),
            };
            self.append(record, true);
        }
        self.history.insert(step, digests);
        let command = CoordinatorCommand::Commit {
            epoch: self.epoch,
            step,
            learning_rate: report.learning_rate,
        };
        for seat in self.members() {
            self.seats.get_mut(seat).applying_since_ms = Some(self.now_ms);
            self.send(seat, command.clone());
        }
        self.step_phase = StepPhase::Applying;
        self.commands.push(Command::Committed(report));
    }

    fn report(&self, step: Step, staged: &BTreeMap<u16, Staged>, replay: bool) -> StepReport {
        // A step that is done again is applied with the rate that it was committed with.
        let learning_rate = self.history.get(&step).filter(|_| replay).map_or_else(
            || self.settings.learning_rate.at(step.0, self.length(), self.pace),
            |known| known.learning_rate,
        );
        let mut report = StepReport {
            step: step.0 + 1,
            learning_rate,
            replay,
            ..StepReport::default()
        };
        let mut rows: Vec<&LaneMetrics> = staged
            .values()
            .flat_map(|vote| &vote.lanes)
            .filter(|lane| lane.tokens > 0)
            .collect();
        // Whoever owns them: sums are taken in the order of the lanes.
        rows.sort_by_key(|lane| lane.lane);
        let share = 1.0 / rows.len().max(1) as f64;
        for metrics in rows {
            report.loss += metrics.loss * share;
            report.tokens += metrics.tokens;
            report.trained_tokens += metrics.trained_tokens;
            report
                .ttt
                .resize(report.ttt.len().max(metrics.ttt.len()), Default::default());
            for (sum, seat) in report.ttt.iter_mut().zip(&metrics.ttt) {
                sum.loss += seat.loss * share;
                sum.full_correct += seat.full_correct;
                sum.full_total += seat.full_total;
                sum.conditional_correct += seat.conditional_correct;
                sum.conditional_total += seat.conditional_total;
            }
        }
        report
    }

    pub(super) fn applied(&mut self, seat: Seat, step: Step, state: Digest) {
        let mut occupant = self.seats.get_mut(seat);
        // What is said twice, or of an earlier step, changes nothing.
        let expected = occupant.state.map(|(step, _)| step.next()) == Some(step);
        if occupant.applying_since_ms.is_none() || !expected {
            return;
        }
        occupant.applying_since_ms = None;
        occupant.state = Some((step, state));
        drop(occupant);
        if matches!(self.step_phase, StepPhase::Applying) && !self.seats.census().a_member_applies() {
            self.step_phase = StepPhase::Idle;
        }
    }

    /// Seats that keep a step waiting for longer than they may: a limit for each of the lanes that its slowest member has.
    pub(super) fn late_in_step(&self) -> Vec<Seat> {
        let mut lanes: BTreeMap<u16, u64> = BTreeMap::new();
        for owner in self.owners.iter().flatten() {
            *lanes.entry(*owner).or_default() += 1;
        }
        let most = self.members.iter().filter_map(|seat| lanes.get(seat)).max();
        let limit_ms = self.settings.step_timeout_ms * most.copied().unwrap_or(1);
        let late = |since_ms: u64| self.now_ms > since_ms + limit_ms;
        let mut seats: Vec<Seat> = self
            .seats
            .iter()
            .filter(|(_, state)| state.is_live() && state.applying_since_ms.is_some_and(late))
            .map(|(seat, _)| seat)
            .collect();
        match &self.step_phase {
            StepPhase::Running { since_ms, staged, .. } if late(*since_ms) => {
                let missing = || self.members().filter(|seat| !staged.contains_key(&seat.index));
                let waits = |seat: &Seat| {
                    let beat = self.seats.get(*seat).beat;
                    beat.is_some_and(|beat| matches!(beat.activity, Activity::Reducing | Activity::Idle))
                };
                // Whoever waits for another one's gradient is not the cause, as long as there is another one.
                seats.extend(missing().filter(|seat| !waits(seat)));
                if seats.is_empty() {
                    seats.extend(missing());
                }
            }
            StepPhase::Evaluating {
                since_ms, waiting, ..
            } if late(*since_ms) => seats.extend(waiting.iter().map(|&seat| Seat::draft(seat))),
            StepPhase::Saving { seat, since_ms } if late(*since_ms) => seats.push(Seat::draft(*seat)),
            _ => {}
        }
        seats
    }
}
