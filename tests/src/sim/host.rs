//! The coordinator's process around the real engine: what `actors/src/coordinator` does, without processes.

use std::collections::BTreeMap;

use eaglet_actors::engine::{Command, Engine, Event, Outcome};
use eaglet_runtime::control::{BulkAddress, CoordinatorCommand, Extraction, RankEvent};
use eaglet_runtime::ids::{Generation, Seat};
use eaglet_runtime::row::PackedRow;

use super::disk::Keep;
use super::fault::Fault;
use super::intake::Intake;
use super::invariants::liveness::AfterFailure;
use super::invariants::{Checked, bound, broken, counted, fence, journal, ledger, liveness, members};
use super::rank::{Life, Rank, RankId};
use super::world::{What, World};

/// Time between two looks at the clock.
const TICK_MS: u64 = 100;
/// How long the last messages of a dead process may take to arrive.
const LAST_WORDS_MS: u64 = 500;
/// More looks at the clock than an engine ever needs to do all that time has made possible.
const TICKS_BEFORE_UNHEARD: u32 = 6;

/// A coordinator.
pub(super) struct Coordinator {
    pub(super) engine: Engine,
    launch: u32,
    started_ms: u64,
    /// It does nothing until then.
    pub(super) stalled_until_ms: u64,
    /// The last process that was started for each seat, and whether it was declared lost.
    pub(super) occupants: BTreeMap<Seat, Occupant>,
    /// Starts that are still to fail.
    failing: Vec<(Seat, u32)>,
}

/// Who sits on a seat.
#[derive(Clone, Copy, Debug)]
pub(super) struct Occupant {
    pub(super) id: RankId,
    generation: Generation,
    lost: bool,
}

impl Coordinator {
    fn occupant(&self, seat: Seat, generation: Generation) -> Option<Occupant> {
        self.occupants
            .get(&seat)
            .copied()
            .filter(|occupant| occupant.generation == generation && !occupant.lost)
    }
}

impl World {
    /// The present launch.
    pub(super) fn launch(&self) -> Option<u32> {
        self.coordinator.as_ref().map(|coordinator| coordinator.launch)
    }

    pub(super) fn stalled_until(&self) -> Option<u64> {
        let until_ms = self.coordinator.as_ref()?.stalled_until_ms;
        (until_ms > self.clock.now_ms()).then_some(until_ms)
    }

    /// The coordinator's process starts.
    pub(super) fn launch_coordinator(&mut self) -> Checked {
        if self.coordinator.is_some() {
            return Ok(());
        }
        if !self.calm && self.disk.has_checkpoints() && self.dice.one_in(self.plan.faults.vanish_one_in) {
            self.counts.note(Fault::CheckpointVanished);
            self.disk.lose_checkpoint(&mut self.dice);
        }
        self.disk.cut_store();
        let settings = self.plan.settings.clone();
        let mut engine = match Engine::new(settings, self.disk.records(), 0) {
            Ok(engine) => engine,
            Err(error) => return broken("JOURNAL", format!("the journal cannot be replayed: {error}")),
        };
        let disk = &self.disk;
        engine.keep_checkpoints(|known| disk.load(&known.folder).is_some());
        let commands = engine.launch();
        let launch = self.checks.book.launches + 1;
        self.checks.launched();
        self.intake = Intake::resume(self.disk.records(), &self.plan.corpus);
        self.note(|_| format!("launch {launch}"));
        self.coordinator = Some(Coordinator {
            engine,
            launch,
            started_ms: self.clock.now_ms(),
            stalled_until_ms: 0,
            occupants: BTreeMap::new(),
            failing: if self.calm {
                Vec::new()
            } else {
                self.plan.faults.crash_loops.clone()
            },
        });
        self.clock.after(TICK_MS, What::Tick(launch));
        self.clock.after(1, What::Intake(launch));
        self.await_host(launch);
        self.carry_out(commands)
    }

    pub(super) fn tick(&mut self, launch: u32) -> Checked {
        if self.launch() != Some(launch) {
            return Ok(());
        }
        self.clock.after(TICK_MS, What::Tick(launch));
        self.feed(Event::Tick)
    }

    /// The gate: ranks of this launch whose seat is still theirs are admitted.
    pub(super) fn attach(&mut self, id: RankId) -> Checked {
        let rank = &mut self.ranks[id];
        let (seat, generation) = (rank.seat, rank.generation);
        let admitted = self.coordinator.as_ref().is_some_and(|coordinator| {
            coordinator.launch == rank.launch && coordinator.occupant(seat, generation).is_some()
        });
        if !admitted || !rank.is_alive() {
            self.die(id, "the coordinator refused it");
            return Ok(());
        }
        rank.attached = true;
        self.send_down(
            id,
            CoordinatorCommand::Welcome {
                config: String::new(),
            },
        )?;
        self.feed(Event::Attached {
            seat,
            generation,
            pid: 1,
            bulk: BulkAddress {
                name: id.to_string(),
                ..BulkAddress::default()
            },
        })
    }

    /// A message of a rank arrives. Those of earlier launches have no stream to come over.
    pub(super) fn heard(&mut self, id: RankId, event: RankEvent) -> Checked {
        let rank = &self.ranks[id];
        if Some(rank.launch) != self.launch() {
            return Ok(());
        }
        let (seat, generation) = (rank.seat, rank.generation);
        self.feed(Event::Rank {
            seat,
            generation,
            event,
        })
    }

    /// A process is gone; its last words may still be on their way.
    pub(super) fn exited(&mut self, id: RankId) {
        let now_ms = self.clock.now_ms();
        let rank = &mut self.ranks[id];
        if rank.given_up {
            return;
        }
        rank.given_up = true;
        let at_ms = rank.up.last_ms.clamp(now_ms, now_ms + LAST_WORDS_MS);
        self.clock.at(at_ms, What::Lost(id));
    }

    pub(super) fn lost(&mut self, id: RankId) -> Checked {
        let rank = &self.ranks[id];
        let (seat, generation) = (rank.seat, rank.generation);
        let now_ms = self.clock.now_ms();
        if Some(rank.launch) != self.launch() {
            return Ok(());
        }
        self.checks.liveness.lost(seat, now_ms);
        self.feed(Event::Lost {
            seat,
            generation,
            cause: "killed".to_owned(),
            log_tail: String::new(),
        })
    }

    /// A control stream breaks: each side notices, and ends the process.
    pub(super) fn break_stream(&mut self, id: RankId) {
        if self.ranks[id].is_alive() {
            self.counts.note(Fault::StreamBroken);
            self.die(id, "its control stream broke");
        }
    }

    /// Gives the engine an event and does what it says.
    pub(super) fn feed(&mut self, event: Event) -> Checked {
        if self.is_unheard(&event) {
            // What time alone makes possible is done first, so that whatever follows comes from the event.
            for _ in 0..TICKS_BEFORE_UNHEARD {
                let before = self.commands;
                self.take_event(Event::Tick)?;
                if self.commands == before {
                    break;
                }
            }
        }
        self.take_event(event)
    }

    /// Whether an event is about somebody who was declared lost, or was never there.
    fn is_unheard(&self, event: &Event) -> bool {
        let Some(coordinator) = &self.coordinator else {
            return false;
        };
        match event {
            Event::Rank { seat, generation, .. }
            | Event::Attached { seat, generation, .. }
            | Event::Lost { seat, generation, .. } => coordinator.occupant(*seat, *generation).is_none(),
            _ => false,
        }
    }

    fn take_event(&mut self, event: Event) -> Checked {
        self.note(|_| format!("the engine takes {event:?}"));
        let unheard = self.is_unheard(&event);
        let now_ms = self.clock.now_ms();
        let Some(coordinator) = &mut self.coordinator else {
            return Ok(());
        };
        let launch = coordinator.launch;
        let mut ticket = None;
        match &event {
            Event::Rank {
                seat,
                generation,
                event,
            } => {
                if !unheard {
                    self.checks.fence.heard(*seat, *generation, event);
                    self.checks.team.heard(*seat, *generation, event);
                } else if self
                    .ranks
                    .iter()
                    .any(|rank| rank.zombie && (rank.seat, rank.generation) == (*seat, *generation))
                {
                    self.counts.note(Fault::RankZombie);
                }
            }
            Event::Lost { seat, .. } if !unheard => {
                self.checks.team.lost(*seat);
                if let Some(occupant) = coordinator.occupants.get_mut(seat) {
                    occupant.lost = true;
                }
            }
            Event::ChangeSeat { ticket: number, .. } => ticket = Some(*number),
            _ => {}
        }
        let commands = coordinator.engine.handle(now_ms - coordinator.started_ms, event);
        self.events += 1;
        ledger::adds_up(coordinator.engine.ledger())?;
        bound::engine(&coordinator.engine, &self.plan.settings, &commands)?;
        counted::as_walked(&coordinator.engine)?;
        if unheard {
            fence::unheard(&commands)?;
        }
        members::answers(ticket, &commands)?;
        self.carry_out(commands)?;
        match &self.coordinator {
            Some(coordinator) if coordinator.launch == launch => {
                ledger::agrees(coordinator.engine.ledger(), &self.checks.book)
            }
            _ => Ok(()),
        }
    }

    fn carry_out(&mut self, commands: Vec<Command>) -> Checked {
        for command in commands {
            if let Some(tails) = &mut self.tails {
                tails.push(self.disk.unsynced());
            }
            match &mut self.crash_in {
                Some(0) => {
                    self.crash_in = None;
                    return self.crash();
                }
                Some(left) => *left -= 1,
                None => {}
            }
            self.commands += 1;
            self.note(|_| format!("  -> {command:?}"));
            self.do_one(command)?;
        }
        Ok(())
    }

    fn do_one(&mut self, command: Command) -> Checked {
        match command {
            Command::Append { record, sync } => {
                self.checks.appended(&record)?;
                self.disk.append(record, sync);
            }
            Command::Spawn { seat, generation } => self.spawn(seat, generation)?,
            Command::Kill { seat, generation, .. } => self.kill(seat, generation),
            Command::Send {
                seat,
                generation,
                command,
            } => {
                if let CoordinatorCommand::Commit { step, .. } = &command {
                    journal::commit(&self.disk, *step)?;
                }
                self.checks.told(seat, generation, &command)?;
                self.tell_rank(seat, generation, command)?;
            }
            Command::Lease {
                members,
                row,
                lease,
                turn,
                documents,
                destination,
            } => {
                journal::lease(&self.checks.book, &self.disk, row, &documents)?;
                let extraction = Extraction {
                    row,
                    lease,
                    turn,
                    units: documents.into_iter().map(|(unit, _)| unit).collect(),
                    content: PackedRow::default(),
                    destination,
                };
                for (seat, generation) in members {
                    let command = CoordinatorCommand::Extract(extraction.clone());
                    self.checks.told(seat, generation, &command)?;
                    self.tell_rank(seat, generation, command)?;
                }
            }
            Command::Finish(outcome) => self.finish(&outcome)?,
            Command::Notice(_)
            | Command::Lost { .. }
            | Command::Committed(_)
            | Command::Evaluated { .. }
            | Command::SeatAdded { .. }
            | Command::Answer { .. } => {}
        }
        Ok(())
    }

    fn tell_rank(&mut self, seat: Seat, generation: Generation, command: CoordinatorCommand) -> Checked {
        let occupant = self
            .coordinator
            .as_ref()
            .and_then(|coordinator| coordinator.occupant(seat, generation));
        match occupant {
            Some(occupant) => self.send_down(occupant.id, command),
            None => Ok(()),
        }
    }

    fn spawn(&mut self, seat: Seat, generation: Generation) -> Checked {
        members::spawn(&self.checks.book, seat)?;
        self.check_host_of(seat)?;
        let now_ms = self.clock.now_ms();
        let id = self.ranks.len();
        let Some(coordinator) = &mut self.coordinator else {
            return Ok(());
        };
        self.ranks
            .push(Rank::new(seat, generation, coordinator.launch, now_ms));
        let before = coordinator.occupants.insert(
            seat,
            Occupant {
                id,
                generation,
                lost: false,
            },
        );
        if before.is_some_and(|before| !before.lost || before.generation >= generation) {
            return broken(
                "FENCE",
                format!("generation {generation} of {seat} is started beside {before:?}"),
            );
        }
        let fails = coordinator
            .failing
            .iter_mut()
            .find(|(failing, left)| *failing == seat && *left > 0);
        if let Some((_, left)) = fails.filter(|_| !self.calm) {
            *left -= 1;
            self.counts.note(Fault::StartFailed);
            let wait_ms = self.dice.between(0, 80);
            self.clock.after(wait_ms, What::End(id, "it fails at its start"));
        }
        let wait_ms = self.dice.between(3, 25);
        self.clock.after(wait_ms, What::Dial(id));
        Ok(())
    }

    fn kill(&mut self, seat: Seat, generation: Generation) {
        let occupant = self
            .coordinator
            .as_ref()
            .and_then(|coordinator| coordinator.occupant(seat, generation));
        let Some(Occupant { id, .. }) = occupant else {
            return;
        };
        let now_ms = self.clock.now_ms();
        let hung = self.ranks[id].stopped_until_ms > now_ms && self.ranks[id].life == Life::Up;
        if hung && !self.calm && self.dice.one_in(self.plan.faults.zombie_one_in) {
            self.ranks[id].zombie = true;
            self.clock.after(1, What::Exited(id));
        } else {
            self.die(id, "killed by the coordinator");
        }
    }

    /// All processes of the present launch are killed.
    pub(super) fn kill_all(&mut self) {
        let launch = self.launch();
        for id in 0..self.ranks.len() {
            if Some(self.ranks[id].launch) == launch {
                self.die(id, "the run is over");
            }
        }
    }

    /// The coordinator crashes, with the machine's unwritten blocks; its ranks die with it, or a while later.
    pub(super) fn crash(&mut self) -> Checked {
        self.note(|_| "the coordinator crashes".to_owned());
        self.counts.note(Fault::CoordinatorCrashed);
        let launch = self.launch();
        self.coordinator = None;
        let lingers = !self.calm && self.dice.one_in(self.plan.faults.linger_one_in);
        for id in 0..self.ranks.len() {
            if Some(self.ranks[id].launch) != launch || !self.ranks[id].is_alive() {
                continue;
            }
            if lingers && self.dice.one_in(2) {
                self.counts.note(Fault::RankLingered);
                let wait_ms = self.dice.between(5, 1500);
                self.clock
                    .after(wait_ms, What::End(id, "its coordinator is gone"));
            } else {
                self.die(id, "its coordinator died");
            }
        }
        let keeps = std::mem::replace(&mut self.crash_keeps, Keep::Any);
        match self.disk.crash(&mut self.dice, keeps) {
            Ok(real) => {
                if real {
                    self.counts.note(Fault::TailTorn);
                }
            }
            Err(what) => return broken("JOURNAL", what),
        }
        self.checks.cut(&self.plan.settings, self.disk.records())?;
        let wait_ms = self.dice.between(10, 300);
        self.clock.after(wait_ms, What::Launch);
        Ok(())
    }

    fn finish(&mut self, outcome: &Outcome) -> Checked {
        self.kill_all();
        self.coordinator = None;
        self.disk.close();
        match outcome {
            Outcome::Completed { .. } if std::mem::take(&mut self.late_request) => {
                self.clock.after(100, What::Launch);
            }
            Outcome::Completed { .. } => {
                liveness::completed(
                    outcome,
                    &self.checks.book,
                    &self.disk,
                    &self.plan.settings,
                    &self.counts,
                )?;
                self.all_is_read()?;
                self.like_the_quiet_run()?;
                self.ended = Some(true);
            }
            Outcome::Drained { .. } | Outcome::Stopped => {
                let wait_ms = self.dice.between(10, 200);
                self.clock.after(wait_ms, What::Launch);
            }
            Outcome::Failed { report } => {
                self.failures += 1;
                let after = self.checks.liveness.failed(
                    report,
                    &self.checks.book,
                    &self.plan.settings,
                    &self.plan.faults,
                    &self.counts,
                )?;
                if after == AfterFailure::Over {
                    self.ended = Some(false);
                } else {
                    // Somebody looks after it before it is launched again.
                    self.calm = true;
                    self.calm_since_ms = self.clock.now_ms();
                    self.clock.after(100, What::Launch);
                }
            }
        }
        Ok(())
    }
}
