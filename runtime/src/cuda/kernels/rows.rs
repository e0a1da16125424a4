//! Rows by their numbers, and weights that stay packed until they are used.
#![allow(unsafe_code)]

use super::Kernels;
use crate::cuda::driver::CudaError;
use crate::cuda::matrix::{Indices, MatrixView, MatrixViewMut, count};
use crate::cuda::memory::{View, ViewMut};
use crate::cuda::module::Argument;
use crate::cuda::programs::Program;
use crate::cuda::stream::Stream;
use crate::weights::BlockFormat;

/// A weight matrix `[rows, cols]` on a device, as its files hold it.
#[derive(Clone, Copy, Debug)]
pub enum DeviceForm<'a> {
    /// f32.
    F32(MatrixView<'a, f32>),
    /// bf16.
    Bf16(MatrixView<'a, u16>),
    /// f16.
    F16(MatrixView<'a, u16>),
    /// Integers of `bits` bits with an offset of half their range, packed into words from the low end on, and a scale per
    /// `group` columns.
    Packed {
        /// `[rows, ⌈cols · bits / 32⌉]`.
        words: MatrixView<'a, u32>,
        /// `[rows, groups]`.
        scales: Scales<'a>,
        /// 4 or 8.
        bits: u32,
        /// Columns that share a scale.
        group: u32,
        /// Width of the matrix.
        cols: u32,
    },
    /// E4M3 floats with a scale per block.
    Fp8 {
        /// `[rows, cols]`.
        codes: MatrixView<'a, u8>,
        /// `[⌈rows / block⌉, ⌈cols / block⌉]`.
        scales: MatrixView<'a, f32>,
        /// Rows and columns that share a scale.
        block: [u32; 2],
    },
    /// E2M1 floats, low half of a byte first, with a power of two per 32 columns.
    Mxfp4 {
        /// `[rows, cols / 2]`.
        blocks: MatrixView<'a, u8>,
        /// `[rows, cols / 32]`.
        scales: MatrixView<'a, u8>,
    },
    /// ggml's blocks.
    Blocks {
        /// `[rows, cols / elements · bytes]`.
        blocks: MatrixView<'a, u8>,
        /// What a block is.
        format: BlockFormat,
    },
}

/// Scales of integers, as their files hold them.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// f32.
    F32(MatrixView<'a, f32>),
    /// bf16.
    Bf16(MatrixView<'a, u16>),
    /// f16.
    F16(MatrixView<'a, u16>),
}

impl Scales<'_> {
    fn shape(&self) -> (u32, u32) {
        match self {
            Self::F32(scales) => (scales.rows, scales.cols),
            Self::Bf16(scales) | Self::F16(scales) => (scales.rows, scales.cols),
        }
    }

    fn row_stride(&self) -> &u64 {
        match self {
            Self::F32(scales) => &scales.row_stride,
            Self::Bf16(scales) | Self::F16(scales) => &scales.row_stride,
        }
    }

    fn data(&self) -> &dyn Argument {
        match self {
            Self::F32(scales) => &scales.data,
            Self::Bf16(scales) | Self::F16(scales) => &scales.data,
        }
    }

    /// Its number in `rows.cu`.
    fn kind(&self) -> &u32 {
        match self {
            Self::F32(_) => &0,
            Self::Bf16(_) => &1,
            Self::F16(_) => &2,
        }
    }
}

/// The number of a format in `rows.cu`, which is ggml's.
fn number(format: BlockFormat) -> u32 {
    match format {
        BlockFormat::Q4_0 => 2,
        BlockFormat::Q4_1 => 3,
        BlockFormat::Q5_0 => 6,
        BlockFormat::Q5_1 => 7,
        BlockFormat::Q8_0 => 8,
        BlockFormat::Q2_K => 10,
        BlockFormat::Q3_K => 11,
        BlockFormat::Q4_K => 12,
        BlockFormat::Q5_K => 13,
        BlockFormat::Q6_K => 14,
    }
}

impl DeviceForm<'_> {
    fn shape(&self) -> (u32, u32) {
        match self {
            Self::F32(values) => (values.rows, values.cols),
            Self::Bf16(values) | Self::F16(values) => (values.rows, values.cols),
            Self::Packed { words, cols, .. } => (words.rows, *cols),
            Self::Fp8 { codes, .. } => (codes.rows, codes.cols),
            Self::Mxfp4 { blocks, .. } => (blocks.rows, blocks.cols * 2),
            Self::Blocks { blocks, format } => {
                let cols = blocks.cols as usize / format.bytes() * format.elements();
                (blocks.rows, count(cols))
            }
        }
    }

    /// Whether the parts fit together and lie without gaps, as the kernels read them.
    #[track_caller]
    fn check(&self) {
        let (rows, cols) = self.shape();
        let dense = |view_cols: u32, stride: u64| u64::from(view_cols) == stride;
        let fits = match self {
            Self::F32(values) => dense(values.cols, values.row_stride),
            Self::Bf16(values) | Self::F16(values) => dense(values.cols, values.row_stride),
            Self::Packed {
                words,
                scales,
                bits,
                group,
                ..
            } => {
                (*bits == 4 || *bits == 8)
                    && *group > 0
                    && words.cols >= cols.div_ceil(32 / *bits)
                    && scales.shape().0 == rows
                    && scales.shape().1 >= cols.div_ceil(*group)
                    && dense(words.cols, words.row_stride)
                    && dense(scales.shape().1, *scales.row_stride())
            }
            Self::Fp8 {
                codes,
                scales,
                block: [block_rows, block_cols],
            } => {
                *block_rows > 0
                    && *block_cols > 0
                    && scales.rows >= rows.div_ceil(*block_rows)
                    && scales.cols >= cols.div_ceil(*block_cols)
                    && dense(codes.cols, codes.row_stride)
                    && dense(scales.cols, scales.row_stride)
            }
            Self::Mxfp4 { blocks, scales } => {
                cols.is_multiple_of(32)
                    && scales.rows == rows
                    && scales.cols == cols / 32
                    && dense(blocks.cols, blocks.row_stride)
                    && dense(scales.cols, scales.row_stride)
            }
            Self::Blocks { blocks, format } => {
                (blocks.cols as usize).is_multiple_of(format.bytes()) && dense(blocks.cols, blocks.row_stride)
            }
        };
        assert!(fits, "shapes of a packed matrix of {rows} x {cols}: {self:?}");
    }
}

/// Which rows of a packed matrix are unpacked.
#[derive(Clone, Copy, Debug)]
pub enum RowChoice<'a> {
    /// These.
    Listed(Indices<'a>),
    /// `first`, `first + step`, …
    Stepped {
        /// The first one.
        first: u32,
        /// From one to the next.
        step: u32,
    },
}

/// Which target row each source row of a scatter is added to, sorted on the host by target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScatterList {
    touched: Vec<u32>,
    starts: Vec<u32>,
    order: Vec<u32>,
}

impl ScatterList {
    /// Source row `i` goes to target row `rows[i]`; sums keep the order of `i`.
    ///
    /// # Panics
    /// If there are more than 2³² rows.
    pub fn new(rows: &[u32]) -> Self {
        let mut order: Vec<u32> = (0..count(rows.len())).collect();
        order.sort_by_key(|&from| rows[from as usize]); // a stable sort
        let (mut touched, mut starts) = (Vec::new(), Vec::new());
        for (place, &from) in order.iter().enumerate() {
            let target = rows[from as usize];
            if touched.last() != Some(&target) {
                touched.push(target);
                starts.push(count(place));
            }
        }
        starts.push(count(order.len()));
        Self {
            touched,
            starts,
            order,
        }
    }

    /// Words of a device's memory that it takes.
    pub fn words(&self) -> usize {
        self.touched.len() + self.starts.len() + self.order.len()
    }
}

impl Kernels {
    /// `out[i] = table[rows[i]]`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ or a row lies behind the table.
    pub fn gather(
        &self,
        stream: &Stream,
        table: MatrixView<'_>,
        rows: Indices<'_>,
        out: MatrixViewMut<'_>,
    ) -> Result<(), CudaError> {
        assert_eq!(
            (rows.len(), table.cols),
            (out.rows as usize, out.cols),
            "shapes of a gather"
        );
        assert!(rows.end() <= table.rows, "a row behind the table");
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Rows, "gather"),
                Self::spread(out.rows, out.cols),
                &[
                    &table.data,
                    &table.row_stride,
                    &rows.data,
                    &out.data,
                    &out.row_stride,
                    &out.cols,
                ],
            )
        }
    }

    /// `target[rows[i]] += factors[i] · source[i]` in the order of `i`, every factor 1 if there are none. `scratch` takes
    /// [`ScatterList::words`].
    ///
    /// # Errors
    /// If the driver refuses.
    ///
    /// # Panics
    /// If the shapes differ or a row lies behind the target.
    pub fn scatter_add(
        &self,
        stream: &Stream,
        source: MatrixView<'_>,
        list: &ScatterList,
        factors: View<'_, f32>,
        target: MatrixViewMut<'_>,
        mut scratch: ViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        assert_eq!(
            (source.rows as usize, source.cols),
            (list.order.len(), target.cols),
            "shapes of a scatter"
        );
        assert!(
            factors.is_empty() || factors.len() == list.order.len(),
            "factors of a scatter"
        );
        assert!(
            list.touched.last().is_none_or(|&row| row < target.rows) && scratch.len() >= list.words(),
            "rows of a scatter"
        );
        let words: Vec<u32> = [&list.touched[..], &list.starts, &list.order].concat();
        stream.send(&words, scratch.reborrow().part(0..words.len()))?;
        let (touched, starts) = (list.touched.len(), list.starts.len());
        let words = scratch.view();
        let order = words.part(touched + starts..list.words());
        let (touched, starts) = (words.part(0..touched), words.part(touched..touched + starts));
        // SAFETY: checked above; the list's numbers are those of its own construction.
        unsafe {
            self.launch(
                stream,
                (Program::Rows, "scatter_add"),
                Self::spread(count(touched.len()), target.cols),
                &[
                    &source.data,
                    &source.row_stride,
                    &touched,
                    &starts,
                    &order,
                    &factors,
                    &target.data,
                    &target.row_stride,
                    &target.cols,
                ],
            )
        }
    }

    /// Unpacks columns from `first_col` on of some rows; `out` `[rows, cols]`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn unpack(
        &self,
        stream: &Stream,
        form: &DeviceForm<'_>,
        rows: RowChoice<'_>,
        first_col: usize,
        out: MatrixViewMut<'_>,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernels without a suffix write f32.
        unsafe { self.unpack_to(stream, form, rows, first_col, out, false) }
    }

    /// [`Kernels::unpack`] to bf16: operands of a product.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes do not fit.
    pub fn unpack_bf16(
        &self,
        stream: &Stream,
        form: &DeviceForm<'_>,
        rows: RowChoice<'_>,
        first_col: usize,
        out: MatrixViewMut<'_, u16>,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernels with the suffix write 16 bits.
        unsafe { self.unpack_to(stream, form, rows, first_col, out, true) }
    }

    /// # Safety
    /// `T` must be what the kernels write.
    unsafe fn unpack_to<T>(
        &self,
        stream: &Stream,
        form: &DeviceForm<'_>,
        rows: RowChoice<'_>,
        first_col: usize,
        out: MatrixViewMut<'_, T>,
        bf16: bool,
    ) -> Result<(), CudaError> {
        form.check();
        let (all_rows, all_cols) = form.shape();
        let last = match rows {
            RowChoice::Listed(rows) => {
                assert_eq!(rows.len(), out.rows as usize, "shapes of an unpacking");
                u64::from(rows.end())
            }
            RowChoice::Stepped { first, step } => match out.rows.checked_sub(1) {
                Some(steps) => u64::from(first) + u64::from(steps) * u64::from(step) + 1,
                None => 0,
            },
        };
        assert!(
            last <= u64::from(all_rows) && first_col + out.cols as usize <= all_cols as usize,
            "rows to {last} and columns {first_col} to {} of a matrix of {all_rows} x {all_cols}",
            first_col + out.cols as usize
        );
        let nothing = View::<u32>::empty();
        let (listed, first, step) = match rows {
            RowChoice::Listed(rows) => (rows.data, 0u32, 1u32),
            RowChoice::Stepped { first, step } => (nothing, first, step),
        };
        let first_col = count(first_col);
        let (width, name): (u64, [&'static str; 2]) = match form {
            DeviceForm::F32(values) => (values.row_stride, ["unpack_f32", "unpack_f32_bf16"]),
            DeviceForm::Bf16(values) => (values.row_stride, ["unpack_bf16", "unpack_bf16_bf16"]),
            DeviceForm::F16(values) => (values.row_stride, ["unpack_f16", "unpack_f16_bf16"]),
            DeviceForm::Packed { words, .. } => (words.row_stride, ["unpack_packed", "unpack_packed_bf16"]),
            DeviceForm::Fp8 { codes, .. } => (codes.row_stride, ["unpack_fp8", "unpack_fp8_bf16"]),
            DeviceForm::Mxfp4 { .. } => (u64::from(all_cols), ["unpack_mxfp4", "unpack_mxfp4_bf16"]),
            DeviceForm::Blocks { blocks, .. } => (blocks.row_stride, ["unpack_blocks", "unpack_blocks_bf16"]),
        };
        let block = match form {
            DeviceForm::Blocks { format, .. } => {
                [number(*format), count(format.elements()), count(format.bytes())]
            }
            _ => [0; 3],
        };
        let tail: [&dyn Argument; 7] = [
            &listed,
            &first,
            &step,
            &first_col,
            &out.data,
            &out.row_stride,
            &out.cols,
        ];
        let head: Vec<&dyn Argument> = match form {
            DeviceForm::F32(values) => vec![&values.data, &width],
            DeviceForm::Bf16(values) | DeviceForm::F16(values) => vec![&values.data, &width],
            DeviceForm::Packed {
                words,
                scales,
                bits,
                group,
                ..
            } => vec![
                &words.data,
                &width,
                scales.data(),
                scales.row_stride(),
                scales.kind(),
                bits,
                group,
            ],
            DeviceForm::Fp8 {
                codes,
                scales,
                block: [block_rows, block_cols],
            } => vec![
                &codes.data,
                &width,
                &scales.data,
                &scales.row_stride,
                block_rows,
                block_cols,
            ],
            DeviceForm::Mxfp4 { blocks, scales } => vec![&blocks.data, &scales.data, &width],
            DeviceForm::Blocks { blocks, .. } => {
                vec![&blocks.data, &width, &block[0], &block[1], &block[2]]
            }
        };
        let arguments: Vec<&dyn Argument> = head.into_iter().chain(tail).collect();
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Rows, name[usize::from(bf16)]),
                Self::spread(out.rows, out.cols),
                &arguments,
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ScatterList;

    #[test]
    fn a_scatter_keeps_the_order_of_its_sources() {
        let list = ScatterList::new(&[5, 2, 5, 0, 2, 5]);
        assert_eq!(list.touched, [0, 2, 5]);
        assert_eq!(list.starts, [0, 1, 3, 6]);
        assert_eq!(list.order, [3, 1, 4, 0, 2, 5]);
        assert_eq!(ScatterList::new(&[]).starts, [0]);
    }
}
