//! COUNTED: what the engine keeps counted beside seats, teams and rows is what a walk over all of them finds, and every rule
//! that asks the counts decides as it would by such a walk.

use eaglet_actors::engine::Engine;

use super::{Checked, broken};

/// After an event.
pub fn as_walked(engine: &Engine) -> Checked {
    match engine.audit() {
        Ok(()) => Ok(()),
        Err(what) => broken("COUNTED", what),
    }
}
