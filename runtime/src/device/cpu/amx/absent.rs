//! What stands in for the AMX unit on platforms that have none: nothing can be made of it.

use super::tiles::{BLOCK_SUMS, Line, NoAmx};

/// Never there.
#[derive(Clone, Copy, Debug)]
pub(super) enum Amx {}

impl Amx {
    pub(super) fn request() -> Result<Self, NoAmx> {
        Err(NoAmx::Platform)
    }

    pub(super) fn configure(self) -> Tiles {
        match self {}
    }
}

pub(super) struct Tiles(Amx);

impl Tiles {
    pub(super) fn multiply(&mut self, _: &[Line], _: &[Line], _: &mut [f32; BLOCK_SUMS], _: bool) {
        match self.0 {}
    }
}
