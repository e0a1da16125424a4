//! What a part of a weight matrix is stored as, for a device that keeps it in that form.
//!
//! ENCODED-1: nothing is copied; who keeps it copies the rows of each [`Plane`], and of those the bytes of the part only.
//! Where scales or words span several columns or rows, the part grows to their borders and no further.

use half::bf16;
use std::sync::OnceLock;

use super::PackedMatrix;
use crate::cuda::GpuMatrix;
use crate::weights::{BlockFormat, RowOrder};

/// Some rows of a matrix: `first`, `first + step`, …
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowSteps {
    /// The first one.
    pub first: usize,
    /// From one to the next.
    pub step: usize,
    /// How many.
    pub count: usize,
}

/// Bytes of some rows, where they lie in the host's memory. Rows of a plane are equally long.
#[derive(Clone, Copy, Debug)]
pub struct Plane<'a> {
    bytes: &'a [u8],
    stride: usize,
    order: RowOrder,
    rows: RowSteps,
    start: usize,
    len: usize,
}

impl<'a> Plane<'a> {
    /// The bytes `start..start + len` of some rows of a tensor whose rows are `stride` bytes long, in a file's `order`.
    pub(crate) fn new(
        bytes: &'a [u8],
        stride: usize,
        order: RowOrder,
        rows: RowSteps,
        (start, len): (usize, usize),
    ) -> Self {
        assert!(
            start + len <= stride,
            "{len} bytes from {start} of rows of {stride} bytes"
        );
        Self {
            bytes,
            stride,
            order,
            rows,
            start,
            len,
        }
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.count
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.len
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.rows.count * self.len
    }

    /// One row.
    ///
    /// # Panics
    /// If there is no such row.
    pub fn row(&self, row: usize) -> &'a [u8] {
        assert!(row < self.rows.count, "row {row} of {}", self.rows.count);
        let stored = self.order.stored(self.rows.first + row * self.rows.step);
        &self.bytes[stored * self.stride + self.start..][..self.len]
    }

    /// All rows, if nothing lies between them.
    pub fn whole(&self) -> Option<&'a [u8]> {
        let adjacent = self.rows.step == 1 && self.len == self.stride && self.order == RowOrder::Straight;
        adjacent.then(|| &self.bytes[self.rows.first * self.stride..][..self.bytes()])
    }
}

/// A kind of plain floats, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FloatKind {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
}

impl FloatKind {
    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => size_of::<bf16>(),
        }
    }
}

/// How the elements are stored.
#[derive(Clone, Copy, Debug)]
pub enum EncodedForm<'a> {
    /// Floats.
    Floats {
        /// `[rows, width]`.
        values: Plane<'a>,
        /// What they are.
        kind: FloatKind,
    },
    /// Integers of 4 or 8 bits with an offset of half their range, packed into 32-bit words from the low end on, and a
    /// scale per group of columns.
    Integers {
        /// `[rows, ⌈width · bits / 32⌉]` words.
        words: Plane<'a>,
        /// `[rows, groups]`.
        scales: Plane<'a>,
        /// What the scales are.
        scale_kind: FloatKind,
        /// Bits of an integer.
        bits: usize,
        /// Columns that share a scale.
        group: usize,
    },
    /// E4M3 floats with a scale per block.
    Fp8 {
        /// `[rows, width]` bytes.
        codes: Plane<'a>,
        /// `[⌈rows / block⌉, ⌈width / block⌉]` in f32.
        scales: Plane<'a>,
        /// Rows and columns that share a scale.
        block: [usize; 2],
    },
    /// E2M1 floats, low half of a byte first, with a power of two per 32 columns.
    Mxfp4 {
        /// `[rows, width / 2]` bytes.
        blocks: Plane<'a>,
        /// `[rows, width / 32]` bytes.
        scales: Plane<'a>,
    },
    /// ggml's blocks.
    Blocks {
        /// `[rows, width / elements]` blocks.
        blocks: Plane<'a>,
        /// What a block is.
        format: BlockFormat,
    },
}

/// A part of a stored matrix: its rows are `first_row`, `first_row + step`, … of what `form` holds, its columns those from
/// `first_col` on.
#[derive(Clone, Copy, Debug)]
pub struct Encoded<'a> {
    /// What is to be kept.
    pub form: EncodedForm<'a>,
    /// Columns of what is to be kept.
    pub width: usize,
    /// The part's first row in it.
    pub first_row: usize,
    /// From one row of the part to the next.
    pub step: usize,
    /// The part's first column in it.
    pub first_col: usize,
}

/// A weight matrix as a device keeps it.
#[derive(Debug)]
pub enum Kept {
    /// For the AMX unit, in bf16.
    Amx(PackedMatrix),
    /// In a GPU's memory.
    Cuda(GpuMatrix),
}

/// What a device has prepared of a right operand, if it gains by that.
#[derive(Debug, Default)]
pub struct Prepared(pub(super) Option<PackedMatrix>);

/// A place for what a device keeps, filled once.
pub type Keep = OnceLock<Kept>;
