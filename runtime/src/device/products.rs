//! How products are computed.

use serde::{Deserialize, Serialize};

/// What the operands of products are rounded to. Sums are f32 either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Products {
    /// Nothing: single precision, the same bits on every machine of a kind.
    #[default]
    F32,
    /// bf16 where the machine has a unit for it, which is several times as fast; else single precision.
    Bf16,
}

/// What products really go through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProductKernel {
    /// Vector instructions in single precision.
    F32,
    /// The AMX unit: operands in bf16, sums in single precision.
    AmxBf16,
}
