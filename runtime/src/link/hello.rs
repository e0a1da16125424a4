//! Who is at the ends of a link.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Epoch, Generation, Seat};

/// One occupant of one seat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Endpoint {
    /// The seat.
    pub seat: Seat,
    /// Its occupant.
    pub generation: Generation,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} generation {}", self.seat, self.generation)
    }
}

/// What a sender says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Who sends.
    pub from: Endpoint,
    /// Membership of the group that the link is for.
    pub epoch: Epoch,
    /// Who is to receive; anybody else refuses.
    pub to: Endpoint,
}
