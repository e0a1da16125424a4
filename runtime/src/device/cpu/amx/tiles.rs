//! The shapes that the AMX unit works with, and why a machine may have none.

/// Rows of a tile.
pub(super) const TILE_ROWS: usize = 16;
/// Rows of the left operand, or columns of the right one, in a panel: two tiles.
pub(super) const PANEL_LANES: usize = 2 * TILE_ROWS;
/// Terms along k that an instruction takes, and so the depth of a step.
pub(super) const STEP_DEPTH: usize = 32;
/// Lines of a step of a panel.
pub(super) const STEP_LINES: usize = PANEL_LANES;
/// Outputs of the micro-kernel, a panel by a panel.
pub(super) const BLOCK_SUMS: usize = PANEL_LANES * PANEL_LANES;

/// A row of a tile: 16 pairs of bf16, the one with the smaller k in the low half; as aligned as a cache line.
///
/// A panel is, for each step of 32 along k, the tile of its lanes 0 to 15 and then that of its lanes 16 to 31. In a left
/// panel a line is a lane (a row of the operand) and its pairs go along k. In a right panel a line is a pair along k and
/// its places are lanes (columns of the operand).
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(super) struct Line(pub(super) [u32; 16]);

impl Line {
    pub(super) const ZERO: Self = Self([0; 16]);
}

/// Why products do not go through AMX.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoAmx {
    /// It is another platform than Linux on x86-64.
    #[error("it exists on x86-64 only, and is used on Linux only")]
    Platform,
    /// The processor, or the virtual machine, has no such unit.
    #[error("the processor has no AMX unit for bf16")]
    Processor,
    /// The operating system does not save its registers.
    #[error("the operating system does not enable AMX; take Linux 5.16 or newer")]
    System,
    /// The operating system does not let this process use it.
    #[error("the operating system refuses AMX to this process: {0}")]
    Permission(String),
    /// The unit fails a product whose result is known.
    #[error("the AMX unit gives wrong results: {0}")]
    Wrong(String),
}
