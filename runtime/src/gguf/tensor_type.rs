//! Types of tensors, by their numbers in ggml's `ggml_type`.

use safetensors::Dtype;

use crate::weights::{BlockFormat, Encoding};

/// How elements of a type are stored and how much room they take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorType {
    /// What can be done with them.
    pub(super) encoding: Encoding,
    /// Elements that are stored together; a row is a multiple of it.
    pub(super) elements: usize,
    /// Bytes of so many elements.
    pub(super) bytes: usize,
}

impl TensorType {
    /// The type of a number in the file.
    pub(super) fn of(number: u32) -> Option<Self> {
        let plain = |dtype: Dtype| {
            let encoding = Encoding::Plain(dtype);
            Some(Self {
                encoding,
                elements: 1,
                bytes: dtype.bitsize() / 8,
            })
        };
        let block = |format: BlockFormat| {
            Some(Self {
                encoding: Encoding::Block(format),
                elements: format.elements(),
                bytes: format.bytes(),
            })
        };
        // Types that are sized, so that a file with such a tensor can be opened, but not unpacked.
        let other = |name, elements, bytes| {
            Some(Self {
                encoding: Encoding::Other(name),
                elements,
                bytes,
            })
        };
        match number {
            0 => plain(Dtype::F32),
            1 => plain(Dtype::F16),
            2 => block(BlockFormat::Q4_0),
            3 => block(BlockFormat::Q4_1),
            6 => block(BlockFormat::Q5_0),
            7 => block(BlockFormat::Q5_1),
            8 => block(BlockFormat::Q8_0),
            9 => other("Q8_1", 32, 40),
            10 => block(BlockFormat::Q2_K),
            11 => block(BlockFormat::Q3_K),
            12 => block(BlockFormat::Q4_K),
            13 => block(BlockFormat::Q5_K),
            14 => block(BlockFormat::Q6_K),
            15 => other("Q8_K", 256, 292),
            16 => other("IQ2_XXS", 256, 66),
            17 => other("IQ2_XS", 256, 74),
            18 => other("IQ3_XXS", 256, 98),
            19 => other("IQ1_S", 256, 50),
            20 => other("IQ4_NL", 32, 18),
            21 => other("IQ3_S", 256, 110),
            22 => other("IQ2_S", 256, 82),
            23 => other("IQ4_XS", 256, 136),
            24 => plain(Dtype::I8),
            25 => plain(Dtype::I16),
            26 => plain(Dtype::I32),
            27 => plain(Dtype::I64),
            28 => plain(Dtype::F64),
            29 => other("IQ1_M", 256, 56),
            30 => plain(Dtype::BF16),
            34 => other("TQ1_0", 256, 54),
            35 => other("TQ2_0", 256, 66),
            39 => other("MXFP4", 32, 17),
            40 => other("NVFP4", 64, 36),
            _ => None,
        }
    }
}
