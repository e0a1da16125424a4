//! FENCE: nothing that an older epoch, generation or launch says has an effect.
//!
//! - Whoever was declared lost is not heard: such an event makes no command.
//! - Epochs only go up, over launches, too, and all members of one are told the same: also the id that they meet by.
//! - A step is applied only after all members of the present epoch voted for it, in this epoch, with one voice; so two
//!   epochs' members never both commit a step.

use eaglet_actors::engine::Command;
use eaglet_actors::journal::Record;
use eaglet_runtime::control::{CollectiveId, CoordinatorCommand, Handover, LaneMetrics, Member, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, Generation, Role, Seat, Step};

use super::book::Book;
use super::{Checked, broken, lanes, same};

const NAME: &str = "FENCE";

/// A replica's vote for a step.
#[derive(Clone, Debug)]
struct Vote {
    gradient: Digest,
    finite: bool,
    state: Digest,
    lanes: Vec<LaneMetrics>,
}

/// A member of the present epoch, and what it was told and has said.
#[derive(Clone, Debug)]
struct Participant {
    seat: u16,
    generation: Generation,
    invited: bool,
    ready: bool,
    /// It is ready once it has the state of its epoch.
    takes_state: bool,
    met: bool,
    begun: Option<Step>,
    vote: Option<Vote>,
    committed: Option<Step>,
}

/// The present epoch of a launch, as the messages tell it.
#[derive(Clone, Debug, Default)]
pub struct Fence {
    epoch: Epoch,
    participants: Vec<Participant>,
    owners: Vec<u16>,
    /// What the first of them has made for the others to meet it.
    id: Option<CollectiveId>,
    step: Step,
    lanes: Vec<u16>,
}

/// What a lost rank said made commands.
pub fn unheard(commands: &[Command]) -> Checked {
    match commands {
        [] => Ok(()),
        [command, ..] => broken(NAME, format!("a lost rank was heard: {command:?}")),
    }
}

/// A step is about to be committed by a record.
pub fn committed(fence: &Fence, record: &Record) -> Checked {
    let Record::Committed { step, epoch, .. } = record else {
        return Ok(());
    };
    fence.decided(*epoch, *step)
}

impl Fence {
    /// Somebody who is present said something.
    pub fn heard(&mut self, seat: Seat, generation: Generation, event: &RankEvent) {
        let first = self.participants.first().map(|member| member.seat);
        let participant = self
            .participants
            .iter_mut()
            .find(|member| Seat::draft(member.seat) == seat && member.generation == generation);
        match event {
            RankEvent::CollectiveId { epoch, id }
                if *epoch == self.epoch
                    && participant
                        .as_ref()
                        .is_some_and(|member| Some(member.seat) == first) =>
            {
                self.id.get_or_insert_with(|| id.clone());
            }
            RankEvent::GroupReady { epoch } if *epoch == self.epoch => {
                if let Some(participant) = participant.filter(|member| !member.takes_state) {
                    participant.ready = true;
                }
            }
            RankEvent::StateTaken { epoch, .. } if *epoch == self.epoch => {
                if let Some(participant) = participant.filter(|member| member.takes_state) {
                    participant.ready = true;
                }
            }
            RankEvent::Staged {
                epoch,
                step,
                gradient,
                finite,
                state,
                lanes,
            } if (*epoch, *step) == (self.epoch, self.step) => {
                if let Some(participant) = participant.filter(|member| member.begun == Some(*step)) {
                    participant.vote = Some(Vote {
                        gradient: *gradient,
                        finite: *finite,
                        state: *state,
                        lanes: lanes.clone(),
                    });
                }
            }
            _ => {}
        }
    }

    /// A command is about to go out to a rank.
    pub fn told(
        &mut self,
        book: &Book,
        seat: Seat,
        generation: Generation,
        command: &CoordinatorCommand,
    ) -> Checked {
        match command {
            CoordinatorCommand::FormGroup {
                epoch,
                members,
                owners,
                handover,
            } => self.invited(
                book,
                (seat, generation),
                *epoch,
                (members, owners),
                handover.as_ref(),
            ),
            // Shards of verifiers meet in the epochs of their teams.
            CoordinatorCommand::Meet { epoch, id } if seat.role == Role::Draft => {
                self.met(seat, generation, *epoch, id)
            }
            CoordinatorCommand::Begin { epoch, step, lanes } => {
                self.begun(book, seat, generation, *epoch, *step, lanes)
            }
            CoordinatorCommand::Commit { epoch, step, .. } => {
                self.decided(*epoch, *step)?;
                let participant = self.participant(seat, generation)?;
                if participant.committed.replace(*step) == Some(*step) {
                    return broken(NAME, format!("{seat} is told to apply step {step} twice"));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn participant(&mut self, seat: Seat, generation: Generation) -> Result<&mut Participant, super::Broken> {
        self.participants
            .iter_mut()
            .find(|member| Seat::draft(member.seat) == seat && member.generation == generation)
            .ok_or(super::Broken {
                invariant: NAME,
                what: format!("{seat} of generation {generation} is no member of the present epoch"),
            })
    }

    fn invited(
        &mut self,
        book: &Book,
        (seat, generation): (Seat, Generation),
        epoch: Epoch,
        (members, owners): (&[Member], &[u16]),
        handover: Option<&Handover>,
    ) -> Checked {
        if epoch < Epoch::first_of(book.launches) || epoch < self.epoch {
            return broken(NAME, format!("epoch {epoch} is formed after {}", self.epoch));
        }
        let is_new = epoch > self.epoch || self.participants.is_empty();
        if is_new {
            lanes::owners(book.lanes, members.iter().map(|member| member.seat), owners)?;
            if let Some(handover) = handover {
                handed(book, members, handover)?;
            }
            self.epoch = epoch;
            self.owners = owners.to_vec();
            self.id = None;
            self.step = Step(u64::MAX);
            self.participants = members
                .iter()
                .map(|member| Participant {
                    seat: member.seat,
                    generation: member.generation,
                    invited: false,
                    ready: false,
                    takes_state: handover.is_some_and(|handover| handover.receivers.contains(&member.seat)),
                    met: false,
                    begun: None,
                    vote: None,
                    committed: None,
                })
                .collect();
        } else {
            let same = self.owners == owners
                && self
                    .participants
                    .iter()
                    .map(|member| (member.seat, member.generation))
                    .eq(members.iter().map(|member| (member.seat, member.generation)));
            if !same {
                return broken(NAME, format!("epoch {epoch} is formed in two ways"));
            }
        }
        let participant = self.participant(seat, generation)?;
        if std::mem::replace(&mut participant.invited, true) {
            return broken(NAME, format!("{seat} is invited to epoch {epoch} twice"));
        }
        Ok(())
    }

    /// A member is told how to meet the first one: once, in the present epoch, and as the first one said.
    fn met(&mut self, seat: Seat, generation: Generation, epoch: Epoch, id: &CollectiveId) -> Checked {
        let is_told = self.id.as_ref() == Some(id);
        let is_first = self
            .participants
            .first()
            .is_some_and(|first| first.seat == seat.index);
        let present = self.epoch;
        let participant = self.participant(seat, generation)?;
        if epoch != present || !is_told || is_first || std::mem::replace(&mut participant.met, true) {
            return broken(
                NAME,
                format!(
                    "{seat} is told to meet in epoch {epoch} of {present}, by an id that nobody made for it"
                ),
            );
        }
        Ok(())
    }

    fn begun(
        &mut self,
        book: &Book,
        seat: Seat,
        generation: Generation,
        epoch: Epoch,
        step: Step,
        lanes: &[u16],
    ) -> Checked {
        if epoch != self.epoch || !self.participants.iter().all(|member| member.ready) {
            return broken(
                NAME,
                format!("step {step} begins in epoch {epoch}, which is not formed"),
            );
        }
        lanes::begin(book, step, lanes)?;
        if step != self.step {
            self.step = step;
            self.lanes = lanes.to_vec();
            self.participants.iter_mut().for_each(|member| member.vote = None);
        }
        let participant = self.participant(seat, generation)?;
        if participant.begun.replace(step) == Some(step) {
            return broken(
                NAME,
                format!("{seat} is told to begin step {step} twice in epoch {epoch}"),
            );
        }
        Ok(())
    }

    /// Whether all members of the present epoch voted for a step, in one voice.
    fn decided(&self, epoch: Epoch, step: Step) -> Checked {
        if (epoch, step) != (self.epoch, self.step) {
            return broken(
                NAME,
                format!(
                    "step {step} is decided in epoch {epoch}, and step {} was begun in epoch {}",
                    self.step, self.epoch
                ),
            );
        }
        let mut first: Option<&Vote> = None;
        for member in &self.participants {
            let Some(vote) = &member.vote else {
                return broken(
                    NAME,
                    format!("step {step} is decided without draft-{}", member.seat),
                );
            };
            let other = first.get_or_insert(vote);
            if (vote.gradient, vote.state) != (other.gradient, other.state) {
                return broken(NAME, format!("step {step} is decided, and its votes differ"));
            }
            if !vote.finite || vote.lanes.iter().any(|lane| !lane.finite) {
                return broken(
                    NAME,
                    format!("step {step} is decided with a gradient that is not finite"),
                );
            }
        }
        let votes = self
            .participants
            .iter()
            .filter_map(|member| Some((member.seat, member.vote.as_ref()?.lanes.as_slice())));
        lanes::computed(&self.lanes, &self.owners, votes)
    }
}

/// HANDOVER: a member gives the state of a committed step to others.
fn handed(book: &Book, members: &[Member], handover: &Handover) -> Checked {
    same::holds(book, handover.step, handover.state, "a handover")?;
    let is_member = |seat: u16| members.iter().any(|member| member.seat == seat);
    let Handover { donor, receivers, .. } = handover;
    let is_sound = is_member(*donor)
        && !receivers.is_empty()
        && receivers.iter().all(|&seat| seat != *donor && is_member(seat));
    if is_sound {
        return Ok(());
    }
    broken(
        NAME,
        format!("{donor} gives its state to {receivers:?} among {members:?}"),
    )
}
