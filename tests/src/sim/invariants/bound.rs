//! BOUND: rows under way, commands of one event, and messages on the way to one rank stay few.

use eaglet_actors::engine::{Command, Engine, Settings};

use super::{Checked, broken};

/// Most messages that are on their way to one rank: more than a healthy or a freshly silent one ever has.
const MESSAGES: u32 = 200;

/// After an event.
pub fn engine(engine: &Engine, settings: &Settings, commands: &[Command]) -> Checked {
    let lanes = usize::from(settings.lanes);
    let rows = engine.rows_under_way();
    // Twice what is asked for, and a step more: replicas do not apply a step at once, and when the foremost one is lost, the
    // rows that others hold for the steps ahead are kept while those of earlier steps are extracted again.
    let most = (2 * settings.prefetch_steps as usize + 1) * lanes + lanes;
    if rows > most {
        return broken("BOUND", format!("{rows} rows are under way, and {most} may be"));
    }
    // A handful for each seat, and a few for each row that is planned or leased.
    let most = 40 + 6 * settings.seats.len().max(8) + 4 * most;
    if commands.len() > most {
        return broken(
            "BOUND",
            format!("one event makes {} commands, and {most} are much", commands.len()),
        );
    }
    Ok(())
}

/// A message goes out to a rank that has so many on their way.
pub fn on_the_way(messages: u32) -> Checked {
    if messages > MESSAGES {
        broken(
            "BOUND",
            format!("{messages} messages are on their way to one rank"),
        )
    } else {
        Ok(())
    }
}
