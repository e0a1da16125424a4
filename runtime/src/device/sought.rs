//! What a device was told to look for.

use crate::cuda::InFlight;

/// The place of a row that is looked for: known, or on its way from a device that goes on computing.
#[derive(Debug)]
#[must_use]
pub enum Sought<'d> {
    /// The row, if there is one.
    Known(Option<usize>),
    /// A word of each row; that of a row which was looked for is not zero.
    UnderWay(InFlight<'d>),
}

impl Sought<'_> {
    /// The first such row; waits for it.
    ///
    /// # Panics
    /// With its [`CudaError`](crate::cuda::CudaError) if the device failed.
    pub fn first(self) -> Option<usize> {
        match self {
            Self::Known(row) => row,
            Self::UnderWay(words) => words.wait().position(|word| word.iter().any(|&byte| byte != 0)),
        }
    }
}
