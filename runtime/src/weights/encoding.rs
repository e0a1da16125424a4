//! How the elements of a tensor are stored.

use std::fmt;

use safetensors::Dtype;

use super::BlockFormat;

/// How the elements of a tensor are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// One little-endian number each.
    Plain(Dtype),
    /// In blocks of small integers with scales.
    Block(BlockFormat),
    /// In a way that is known by its name only.
    Other(&'static str),
}

impl Encoding {
    /// Whether [`TensorView::unpack_rows`](super::TensorView::unpack_rows) can turn it into f32.
    pub const fn is_unpackable(self) -> bool {
        matches!(
            self,
            Self::Plain(Dtype::F32 | Dtype::BF16 | Dtype::F16) | Self::Block(_)
        )
    }
}

impl fmt::Display for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}"),
            Self::Block(format) => write!(f, "{format:?}"),
            Self::Other(name) => f.write_str(name),
        }
    }
}
