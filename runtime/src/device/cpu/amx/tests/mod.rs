//! AMX products, natively where the machine has the unit, else through its double in software.

mod emulator;
mod emulator_tests;
mod pack_tests;
mod product_case;
mod product_tests;

use super::hardware::Amx;
use super::{Engine, Workspace, self_check};

/// The unit, and whether it is real.
fn unit() -> (Amx, bool) {
    match super::amx() {
        Ok(amx) => (amx, true),
        Err(_) => {
            emulator::install();
            (Amx::emulated(), false)
        }
    }
}

/// An engine on this machine's unit or on its double.
pub(in crate::device::cpu) fn engine() -> Engine {
    Engine::on(unit().0)
}

/// [`engine`] that packs little at a time.
fn engine_with_slabs(slab_bytes: usize) -> Engine {
    Engine {
        workspace: Workspace::new(slab_bytes),
        ..engine()
    }
}

#[test]
fn the_unit_multiplies_as_it_should() {
    let (amx, is_real) = unit();
    let which = if is_real {
        "on this machine's AMX unit"
    } else {
        "in software: this machine has no AMX"
    };
    tell(&format!("AMX instructions run {which}"));
    self_check::check(amx).expect("the known product");
}

#[expect(
    clippy::print_stderr,
    reason = "people who read the tests' output are to know what was tested"
)]
fn tell(text: &str) {
    eprintln!("{text}");
}
