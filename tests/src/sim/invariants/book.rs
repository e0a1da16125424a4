//! The journal as the invariants read it: from the records alone, without the engine's code.

use std::collections::BTreeSet;

use eaglet_actors::engine::Settings;
use eaglet_actors::journal::Record;
use eaglet_runtime::ids::{Role, SampleSeq, Seat, Step, Unit};
use eaglet_runtime::samples::Location;

use super::{Checked, broken};
use crate::sim::weights::{Weights, mean, row_content};

/// Where a unit stands according to the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// To be trained.
    Open,
    /// In a committed step.
    Trained,
    /// Refused.
    Quarantined,
}

/// What is known of a sample.
#[derive(Clone, Copy, Debug)]
pub struct Fact {
    /// Its length.
    pub tokens: u32,
    /// Where it lies; `None` if it was refused on arrival.
    pub location: Option<Location>,
    /// What lies there. Accepted records carry it as the number of their trained tokens.
    pub content: u32,
}

/// The journal, read.
#[derive(Clone, Debug)]
pub struct Book {
    passes: u32,
    /// Rows of each step.
    pub lanes: u16,
    /// Ranks of one verifier.
    pub shards: u16,
    /// Capacity of a row.
    pub tokens_per_row: u32,
    configured: Vec<Seat>,
    /// Launches so far.
    pub launches: u32,
    /// Samples by their number.
    pub facts: Vec<Fact>,
    standings: Vec<Standing>,
    /// Units that are in no row, in the order in which they will be planned.
    pub unplanned: BTreeSet<Unit>,
    /// Rows of each step, without what was refused since.
    pub plans: Vec<Vec<Vec<Unit>>>,
    /// Weights before each step; the last are those of all that is committed.
    pub chain: Vec<Weights>,
    trained: u64,
    quarantined: u64,
    /// Whether intake is complete.
    pub prepared: bool,
    /// Whether nothing more is read.
    pub closed: bool,
    /// Steps of the whole run.
    pub total_steps: u64,
    /// Whether the run is longer or otherwise than it was prepared: more samples, refusals, retries.
    pub changed: bool,
    /// Seats that may be filled.
    pub seats: BTreeSet<Seat>,
}

impl Book {
    /// An empty journal.
    pub fn new(settings: &Settings) -> Self {
        Self {
            passes: settings.passes,
            lanes: settings.lanes,
            shards: settings.shards(),
            tokens_per_row: settings.tokens_per_row,
            configured: settings.seats.clone(),
            launches: 0,
            facts: Vec::new(),
            standings: Vec::new(),
            unplanned: BTreeSet::new(),
            plans: Vec::new(),
            chain: vec![Weights::INITIAL],
            trained: 0,
            quarantined: 0,
            prepared: false,
            closed: false,
            total_steps: 0,
            changed: false,
            seats: settings.seats.iter().copied().collect(),
        }
    }

    /// Steps committed.
    pub fn committed(&self) -> Step {
        Step(self.chain.len() as u64 - 1)
    }

    /// Units taken in.
    pub fn intake(&self) -> u64 {
        self.standings.len() as u64
    }

    /// Units in committed steps.
    pub fn trained(&self) -> u64 {
        self.trained
    }

    /// Units that are refused.
    pub fn quarantined(&self) -> u64 {
        self.quarantined
    }

    /// Where a unit stands.
    pub fn standing(&self, unit: Unit) -> Option<Standing> {
        self.standings.get(self.place(unit)).copied()
    }

    fn place(&self, unit: Unit) -> usize {
        unit.sample.0 as usize * self.passes as usize + unit.pass as usize
    }

    fn stand(&mut self, unit: Unit, standing: Standing) {
        let place = self.place(unit);
        let counts = |standing| match standing {
            Standing::Open => (0, 0),
            Standing::Trained => (1, 0),
            Standing::Quarantined => (0, 1),
        };
        let (before, after) = (counts(self.standings[place]), counts(standing));
        self.trained = self.trained + after.0 - before.0;
        self.quarantined = self.quarantined + after.1 - before.1;
        self.standings[place] = standing;
    }

    /// Lanes of a step that have a row.
    pub fn lanes_with_rows(&self, step: Step) -> Option<impl Iterator<Item = u16>> {
        let rows = self.plans.get(step.0 as usize)?;
        Some(
            (0..)
                .zip(rows)
                .filter(|(_, row)| !row.is_empty())
                .map(|(lane, _)| lane),
        )
    }

    /// The reduced gradient of a step.
    pub fn gradient(&self, step: Step) -> Option<[f32; crate::sim::weights::ELEMENTS]> {
        let rows = self.plans.get(step.0 as usize)?;
        let contents: Vec<u64> = (0..)
            .zip(rows)
            .filter(|(_, units)| !units.is_empty())
            .map(|(lane, units)| row_content(step, lane, units))
            .collect();
        (!contents.is_empty()).then(|| mean(&contents))
    }

    /// Verifiers that are not whole are given back; roles whose seats were all given back get those of the configuration
    /// again.
    pub fn refill_seats(&mut self) {
        let (seats, shards) = (self.seats.clone(), self.shards);
        self.seats.retain(|seat| {
            let first = seat.index / shards * shards;
            seat.role == Role::Draft
                || (first..first + shards).all(|index| seats.contains(&Seat::verifier(index)))
        });
        for role in [Role::Verifier, Role::Draft] {
            if !self.seats.iter().any(|seat| seat.role == role) {
                self.seats
                    .extend(self.configured.iter().copied().filter(|seat| seat.role == role));
            }
        }
    }

    fn take_in(&mut self, sample: SampleSeq, fact: Fact) -> Checked {
        if sample.0 != self.facts.len() as u64 {
            return broken("JOURNAL", format!("sample {sample} follows {}", self.facts.len()));
        }
        self.facts.push(fact);
        for pass in 0..self.passes {
            self.standings.push(Standing::Open);
            let unit = Unit { pass, sample };
            if fact.location.is_some() {
                self.unplanned.insert(unit);
            } else {
                self.stand(unit, Standing::Quarantined);
            }
        }
        self.changed |= self.prepared;
        Ok(())
    }

    /// Takes the next record.
    pub fn read(&mut self, record: &Record) -> Checked {
        match record {
            Record::Launched { launch, .. } => {
                if *launch != self.launches + 1 {
                    return broken("JOURNAL", format!("launch {launch} follows {}", self.launches));
                }
                self.launches = *launch;
            }
            Record::Accepted {
                sample,
                location,
                tokens,
                trained_tokens,
                ..
            } => {
                let fact = Fact {
                    tokens: *tokens,
                    location: Some(*location),
                    content: *trained_tokens,
                };
                self.take_in(*sample, fact)?;
            }
            Record::Refused { sample, .. } => {
                let fact = Fact {
                    tokens: 0,
                    location: None,
                    content: 0,
                };
                self.take_in(*sample, fact)?;
            }
            Record::Prepared { total_steps, .. } => {
                self.prepared = true;
                self.total_steps = *total_steps;
            }
            Record::Grown { total_steps } => {
                self.total_steps = *total_steps;
                self.changed = true;
            }
            Record::Planned { step, rows } => {
                for unit in rows.iter().flatten() {
                    self.unplanned.remove(unit);
                }
                let at = step.0 as usize;
                if at >= self.plans.len() {
                    self.plans.push(rows.clone());
                } else {
                    // All samples of the step were refused, and it gets those of the last one.
                    if self.plans.len() - 1 > at && self.plans.last() == Some(rows) {
                        self.plans.pop();
                    }
                    self.plans[at].clone_from(rows);
                }
            }
            Record::Quarantined { step, unit, .. } => {
                self.changed = true;
                self.stand(*unit, Standing::Quarantined);
                if let Some(rows) = self.plans.get_mut(step.0 as usize) {
                    rows.iter_mut().for_each(|row| row.retain(|other| other != unit));
                }
            }
            Record::Retried { sample, stored } => {
                self.changed = true;
                let place = sample.0 as usize;
                if let (Some(stored), Some(fact)) = (stored, self.facts.get_mut(place)) {
                    *fact = Fact {
                        tokens: stored.tokens,
                        location: Some(stored.location),
                        content: stored.trained_tokens,
                    };
                }
                for pass in 0..self.passes {
                    let unit = Unit {
                        pass,
                        sample: *sample,
                    };
                    if self.standing(unit) == Some(Standing::Quarantined) {
                        self.stand(unit, Standing::Open);
                        self.unplanned.insert(unit);
                    }
                }
            }
            Record::Committed { step, report, .. } => {
                let Some(gradient) = self.gradient(*step) else {
                    return broken("ORDER", format!("step {step} is committed and has no rows"));
                };
                let units: Vec<Unit> = self.plans[step.0 as usize].iter().flatten().copied().collect();
                for unit in units {
                    self.stand(unit, Standing::Trained);
                }
                let weights = self.chain[self.chain.len() - 1];
                self.chain.push(weights.after(&gradient, report.learning_rate));
            }
            Record::SeatAdded { seat, .. } => {
                self.seats.insert(*seat);
            }
            Record::SeatRemoved { seat } => {
                self.seats.remove(seat);
            }
            Record::Closed => self.closed = true,
            Record::SourceAdded { .. } | Record::Checkpointed { .. } | Record::Sums { .. } => {}
        }
        Ok(())
    }
}
