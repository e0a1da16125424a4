//! The rotary tables that a decoder's layers share.

use crate::device::{Device, FloatsMut, Pairing, RotaryTable, Turn};
use crate::rope::Rope;

/// One table per kind of rotation; most models have one kind, some have two.
#[derive(Default)]
pub(super) struct Rotations {
    kinds: Vec<Kind>,
}

struct Kind {
    rope: Rope,
    offset: usize,
    pairing: Pairing,
    table: RotaryTable,
}

impl Kind {
    fn build(rope: &Rope, offset: usize, pairing: Pairing, positions: usize) -> RotaryTable {
        RotaryTable::new(rope, positions).placed(offset, pairing)
    }
}

impl Rotations {
    /// Where the table of a rotation is, from now on.
    pub(super) fn index_of(&mut self, rope: &Rope, offset: usize, pairing: Pairing) -> usize {
        let found = self
            .kinds
            .iter()
            .position(|kind| (&kind.rope, kind.offset, kind.pairing) == (rope, offset, pairing));
        found.unwrap_or_else(|| {
            self.kinds.push(Kind {
                table: Kind::build(rope, offset, pairing, 0),
                rope: rope.clone(),
                offset,
                pairing,
            });
            self.kinds.len() - 1
        })
    }

    /// Makes sure that all tables cover positions below `positions`.
    pub(super) fn reach(&mut self, device: &impl Device, positions: usize) {
        for kind in &mut self.kinds {
            if kind.table.positions() < positions {
                let positions = positions.next_power_of_two();
                let table = Kind::build(&kind.rope, kind.offset, kind.pairing, positions);
                kind.table = table.on(device);
            }
        }
    }

    /// Rotates all heads of `x` `[rows, heads · head_dim]`.
    pub(super) fn rotate(
        &self,
        device: &impl Device,
        index: usize,
        x: FloatsMut<'_>,
        head_dim: usize,
        positions: &[u32],
    ) {
        device.rotate(x, head_dim, &self.kinds[index].table, positions, Turn::Forward);
    }
}
