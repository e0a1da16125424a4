//! MEMBERS: a seat is filled only while the journal, and the configuration before it, hold it; each request for a change of
//! the ranks is answered exactly once.

use eaglet_actors::engine::Command;
use eaglet_runtime::ids::Seat;

use super::book::Book;
use super::{Checked, broken};

/// A process is about to be started.
pub fn spawn(book: &Book, seat: Seat) -> Checked {
    if book.seats.contains(&seat) {
        Ok(())
    } else {
        broken(
            "MEMBERS",
            format!("{seat} is filled, and the journal does not hold it"),
        )
    }
}

/// The answers to a request, if the event was one.
pub fn answers(ticket: Option<u64>, commands: &[Command]) -> Checked {
    let mut answers = commands.iter().filter_map(|command| match command {
        Command::Answer { ticket, .. } => Some(*ticket),
        _ => None,
    });
    if answers.next() == ticket && answers.next().is_none() {
        Ok(())
    } else {
        broken(
            "MEMBERS",
            format!("request {ticket:?} was not answered once: {commands:?}"),
        )
    }
}
