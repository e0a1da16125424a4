//! Values of the metadata.
//!
//! Texts and arrays stay in the mapped file; a value knows where.

use std::ops::Range;

/// Type of a metadata value, by its number in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    /// The type of a number in the file.
    pub(super) fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::U8,
            1 => Self::I8,
            2 => Self::U16,
            3 => Self::I16,
            4 => Self::U32,
            5 => Self::I32,
            6 => Self::F32,
            7 => Self::Bool,
            8 => Self::Text,
            9 => Self::Array,
            10 => Self::U64,
            11 => Self::I64,
            12 => Self::F64,
            _ => return None,
        })
    }

    /// Bytes of a value, if all are equally long.
    pub(super) const fn bytes(self) -> Option<usize> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }
}

/// One value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// A whole number of any width and sign.
    Whole(i128),
    /// A number with a fraction. Single precision is taken at its shortest decimal notation: 1e-6, not 9.99999997e-7.
    Float(f64),
    /// True or false.
    Flag(bool),
    /// Where the text is.
    Text(Range<usize>),
    /// Elements of one type.
    Array(Array),
}

/// Elements of one type.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Array {
    /// Their type; never [`ValueType::Array`].
    pub(super) element: ValueType,
    /// How many there are.
    pub(super) count: usize,
    /// Where they are.
    pub(super) range: Range<usize>,
}

/// A value that is neither text nor array from exactly its little-endian bytes.
pub(super) fn scalar(value_type: ValueType, bytes: &[u8]) -> Option<Value> {
    fn fixed<const N: usize>(bytes: &[u8]) -> Option<[u8; N]> {
        bytes.try_into().ok()
    }
    Some(match value_type {
        ValueType::U8 => Value::Whole(u8::from_le_bytes(fixed(bytes)?).into()),
        ValueType::I8 => Value::Whole(i8::from_le_bytes(fixed(bytes)?).into()),
        ValueType::U16 => Value::Whole(u16::from_le_bytes(fixed(bytes)?).into()),
        ValueType::I16 => Value::Whole(i16::from_le_bytes(fixed(bytes)?).into()),
        ValueType::U32 => Value::Whole(u32::from_le_bytes(fixed(bytes)?).into()),
        ValueType::I32 => Value::Whole(i32::from_le_bytes(fixed(bytes)?).into()),
        ValueType::U64 => Value::Whole(u64::from_le_bytes(fixed(bytes)?).into()),
        ValueType::I64 => Value::Whole(i64::from_le_bytes(fixed(bytes)?).into()),
        ValueType::F32 => Value::Float(shortest(f32::from_le_bytes(fixed(bytes)?))),
        ValueType::F64 => Value::Float(f64::from_le_bytes(fixed(bytes)?)),
        // Two is no bool.
        ValueType::Bool => match bytes {
            [0] => Value::Flag(false),
            [1] => Value::Flag(true),
            _ => return None,
        },
        ValueType::Text | ValueType::Array => return None,
    })
}

/// The double whose decimal notation is the shortest one of a single: what the number was before it was stored.
fn shortest(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
