//! Weight matrices in a device's memory, in the form their files hold, and products with them.
//!
//! WEIGHTS-1: what is kept are the bytes of the part that the rank multiplies by, rounded up to the borders of scales and
//! words; they become bf16 or f32 tile by tile, in memory that is bounded by [`UNPACKED_BYTES`], or are used as they lie.
//! WEIGHTS-2: tiles cut a matrix along its outputs, never along a sum, and all of them go through the algorithm that was
//! chosen for the whole matrix: a row of a product has the same bits however many rows share it and however it is tiled.

use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::blas::{Element, Factor};
use super::device::{Cuda, Precision, factor, is_nothing, must};
use super::driver::{Context, CudaError};
use super::kernels::{DeviceForm, Kernels, RowChoice, Scales};
use super::matrix::{Indices, MatrixView, MatrixViewMut, count};
use super::memory::{Buffer, Memory, View};
use super::operands::OutputMatrix;
use super::stream::Stream;
use super::upload::{Upload, Uploads};
use crate::device::{EncodedForm, FloatKind, Kept, Matrix, MatrixMut, Plane, Products, StoredMatrix};
use crate::weights::BlockFormat;

/// Their name in the rank's account of memory.
const WEIGHTS: &str = "weights";
/// Bytes of a tile that is unpacked for a product, at most; one of [`TILE_ROWS`] rows is unpacked whatever it takes.
pub(crate) const UNPACKED_BYTES: usize = 64 << 20;
/// Tiles have a multiple of so many rows, so that all begin as well aligned as the first.
const TILE_ROWS: usize = 64;
/// Where the second part of a matrix may begin.
const ALIGNMENT: usize = 256;
/// Bytes of f32 that the host unpacks at a time, of forms that no kernel knows.
const HOST_BYTES: usize = 32 << 20;

/// A part of a weight matrix in a device's memory.
#[derive(Debug)]
pub struct GpuMatrix {
    /// First the elements, then what scales them.
    memory: Buffer<u8>,
    form: Form,
    scales_start: usize,
    context: Arc<Context>,
    rows: usize,
    cols: usize,
    /// Rows and columns that are kept, and where the part is in them.
    kept_rows: usize,
    width: usize,
    first_row: usize,
    step: usize,
    first_col: usize,
}

/// [`EncodedForm`] without the bytes.
#[derive(Clone, Copy, Debug)]
enum Form {
    Floats(FloatKind),
    Integers {
        words: usize,
        groups: usize,
        scale_kind: FloatKind,
        bits: usize,
        group: usize,
    },
    Fp8 {
        scale_rows: usize,
        scale_cols: usize,
        block: [usize; 2],
    },
    Mxfp4,
    Blocks {
        row_bytes: usize,
        format: BlockFormat,
    },
}

impl Form {
    /// The form, its elements, and what scales them.
    fn of<'a>(encoded: &EncodedForm<'a>) -> (Self, Plane<'a>, Option<Plane<'a>>) {
        match *encoded {
            EncodedForm::Floats { values, kind } => (Self::Floats(kind), values, None),
            EncodedForm::Integers {
                words,
                scales,
                scale_kind,
                bits,
                group,
            } => {
                let form = Self::Integers {
                    words: words.row_bytes() / size_of::<u32>(),
                    groups: scales.row_bytes() / scale_kind.bytes(),
                    scale_kind,
                    bits,
                    group,
                };
                (form, words, Some(scales))
            }
            EncodedForm::Fp8 { codes, scales, block } => {
                let form = Self::Fp8 {
                    scale_rows: scales.rows(),
                    scale_cols: scales.row_bytes() / size_of::<f32>(),
                    block,
                };
                (form, codes, Some(scales))
            }
            EncodedForm::Mxfp4 { blocks, scales } => (Self::Mxfp4, blocks, Some(scales)),
            EncodedForm::Blocks { blocks, format } => {
                let row_bytes = blocks.row_bytes();
                (Self::Blocks { row_bytes, format }, blocks, None)
            }
        }
    }
}

/// What a form that no kernel knows is unpacked to: nothing that the products would see is lost.
fn unpacked_kind(weights: &dyn StoredMatrix, products: Products) -> FloatKind {
    if products == Products::Bf16 || weights.in_place_bf16().is_some() {
        FloatKind::Bf16
    } else {
        FloatKind::F32
    }
}

/// Where the scales of a matrix begin, and where they end.
fn extent(elements: usize, scales: Option<usize>) -> (usize, usize) {
    match scales {
        Some(scales) => {
            let start = elements.next_multiple_of(ALIGNMENT);
            (start, start + scales)
        }
        None => (elements, elements),
    }
}

impl GpuMatrix {
    /// Bytes of a device's memory that weights would take.
    pub(crate) fn bytes_of(weights: &dyn StoredMatrix, products: Products) -> usize {
        match weights.encoded() {
            Some(encoded) => {
                let (_, elements, scales) = Form::of(&encoded.form);
                extent(elements.bytes(), scales.map(|scales| scales.bytes())).1
            }
            None => weights.rows() * weights.cols() * unpacked_kind(weights, products).bytes(),
        }
    }

    /// Takes weights to a device, in the form they are stored in; else unpacked.
    fn new(
        memory: &Memory,
        uploads: &Uploads,
        stream: &Stream,
        weights: &dyn StoredMatrix,
        products: Products,
    ) -> Result<Self, CudaError> {
        let (rows, cols) = (weights.rows(), weights.cols());
        let Some(encoded) = weights.encoded() else {
            let kind = unpacked_kind(weights, products);
            let bytes = rows * cols * kind.bytes();
            let mut memory = memory.take(WEIGHTS, bytes)?;
            uploads.send(stream, memory.view_mut(), |upload| {
                unpack_on_host(weights, kind, upload)
            })?;
            return Ok(Self {
                memory,
                form: Form::Floats(kind),
                scales_start: bytes,
                context: stream.context().clone(),
                rows,
                cols,
                kept_rows: rows,
                width: cols,
                first_row: 0,
                step: 1,
                first_col: 0,
            });
        };
        let (form, elements, scales) = Form::of(&encoded.form);
        let (scales_start, end) = extent(elements.bytes(), scales.map(|scales| scales.bytes()));
        let mut memory = memory.take(WEIGHTS, end)?;
        let mut send = |start: usize, plane: Plane<'_>| {
            let to = memory.view_mut().part(start..start + plane.bytes());
            uploads.send(stream, to, |upload| match plane.whole() {
                Some(bytes) => upload.write(bytes),
                None => (0..plane.rows()).try_for_each(|row| upload.write(plane.row(row))),
            })
        };
        send(0, elements)?;
        if let Some(scales) = scales {
            send(scales_start, scales)?;
        }
        Ok(Self {
            memory,
            form,
            scales_start,
            context: stream.context().clone(),
            rows,
            cols,
            kept_rows: elements.rows(),
            width: encoded.width,
            first_row: encoded.first_row,
            step: encoded.step,
            first_col: encoded.first_col,
        })
    }

    /// Its elements, as `len` of another type.
    fn elements<T: Pod>(&self, len: usize) -> View<'_, T> {
        self.memory.view().typed(len)
    }

    /// `[rows, cols]` of what scales its elements.
    fn scales<T: Pod>(&self, rows: usize, cols: usize) -> MatrixView<'_, T> {
        let all = self.memory.view();
        let scales = all.part(self.scales_start..all.len()).typed(rows * cols);
        MatrixView::new(scales, rows, cols)
    }

    fn device_form(&self) -> DeviceForm<'_> {
        let (rows, width) = (self.kept_rows, self.width);
        match self.form {
            Form::Floats(FloatKind::F32) => {
                DeviceForm::F32(MatrixView::new(self.elements(rows * width), rows, width))
            }
            Form::Floats(FloatKind::Bf16) => {
                DeviceForm::Bf16(MatrixView::new(self.elements(rows * width), rows, width))
            }
            Form::Floats(FloatKind::F16) => {
                DeviceForm::F16(MatrixView::new(self.elements(rows * width), rows, width))
            }
            Form::Integers {
                words,
                groups,
                scale_kind,
                bits,
                group,
            } => DeviceForm::Packed {
                words: MatrixView::new(self.elements(rows * words), rows, words),
                scales: match scale_kind {
                    FloatKind::F32 => Scales::F32(self.scales(rows, groups)),
                    FloatKind::Bf16 => Scales::Bf16(self.scales(rows, groups)),
                    FloatKind::F16 => Scales::F16(self.scales(rows, groups)),
                },
                bits: count(bits),
                group: count(group),
                cols: count(width),
            },
            Form::Fp8 {
                scale_rows,
                scale_cols,
                block,
            } => DeviceForm::Fp8 {
                codes: MatrixView::new(self.elements(rows * width), rows, width),
                scales: self.scales(scale_rows, scale_cols),
                block: block.map(count),
            },
            Form::Mxfp4 => DeviceForm::Mxfp4 {
                blocks: MatrixView::new(self.elements(rows * width / 2), rows, width / 2),
                scales: self.scales(rows, width / 32),
            },
            Form::Blocks { row_bytes, format } => DeviceForm::Blocks {
                blocks: MatrixView::new(self.elements(rows * row_bytes), rows, row_bytes),
                format,
            },
        }
    }

    /// Rows `first`, … of the part, among those that are kept.
    fn rows_from(&self, first: usize) -> RowChoice<'static> {
        RowChoice::Stepped {
            first: count(self.first_row + first * self.step),
            step: count(self.step),
        }
    }

    /// The part as it lies, if that is what a product takes.
    fn as_it_lies<T: Pod>(&self, kind: FloatKind) -> Option<MatrixView<'_, T>> {
        // Floats are kept without a column more than the part has.
        let is_so = matches!(self.form, Form::Floats(own) if own == kind);
        is_so.then(|| MatrixView::new(self.elements(self.rows * self.cols), self.rows, self.cols))
    }
}

/// Unpacks weights on the host, and sends them as floats of a kind.
fn unpack_on_host(
    weights: &dyn StoredMatrix,
    kind: FloatKind,
    upload: &mut Upload<'_>,
) -> Result<(), CudaError> {
    let (rows, cols) = (weights.rows(), weights.cols());
    let some = (HOST_BYTES / (cols * size_of::<f32>()).max(1)).clamp(1, rows.max(1));
    let mut unpacked = vec![0.0; some * cols];
    let mut narrow = match kind {
        FloatKind::Bf16 => vec![bf16::ZERO; some * cols],
        _ => Vec::new(),
    };
    for first in (0..rows).step_by(some) {
        let end = (first + some).min(rows);
        let unpacked = &mut unpacked[..(end - first) * cols];
        weights.unpack(first..end, unpacked);
        if kind == FloatKind::Bf16 {
            let narrow = &mut narrow[..unpacked.len()];
            narrow.convert_from_f32_slice(unpacked);
            upload.write(bytemuck::cast_slice(narrow))?;
        } else {
            upload.write(bytemuck::cast_slice(unpacked))?;
        }
    }
    Ok(())
}

/// Unpacks columns from one on of some rows into a tile `[rows, cols]`.
type UnpackTile<T> = fn(
    &Kernels,
    &Stream,
    &DeviceForm<'_>,
    RowChoice<'_>,
    usize,
    MatrixViewMut<'_, T>,
) -> Result<(), CudaError>;

/// What the elements of products are on this device.
trait Unpack: Element {
    /// Weights that are stored so are multiplied by as they lie.
    const STORED: FloatKind;
    /// What makes them of others.
    const UNPACK: UnpackTile<Self>;
}

impl Unpack for f32 {
    const STORED: FloatKind = FloatKind::F32;
    const UNPACK: UnpackTile<Self> = Kernels::unpack;
}

impl Unpack for u16 {
    const STORED: FloatKind = FloatKind::Bf16;
    const UNPACK: UnpackTile<Self> = Kernels::unpack_bf16;
}

/// Rows of a tile of `limit` bytes, of a matrix with rows of `row_bytes`.
fn tile_rows(limit: usize, rows: usize, row_bytes: usize) -> usize {
    let fitting = limit / row_bytes.max(1) / TILE_ROWS * TILE_ROWS;
    fitting.max(TILE_ROWS).min(rows)
}

impl Cuda {
    fn is_own(&self, weights: &GpuMatrix) -> bool {
        Arc::ptr_eq(&weights.context, &self.context)
    }

    fn take_along(&self, weights: &dyn StoredMatrix) -> GpuMatrix {
        let products = match self.precision {
            Precision::F32 => Products::F32,
            Precision::Bf16 => Products::Bf16,
        };
        must(GpuMatrix::new(
            &self.memory,
            &self.uploads,
            &self.stream,
            weights,
            products,
        ))
    }

    /// Keeps weights that have a place, unless there is one in it.
    pub(super) fn keep_weights(&self, weights: &dyn StoredMatrix) {
        if let Some(place) = weights.kept()
            && place.get().is_none()
        {
            // Two threads at once would both take memory, and one of them give it back.
            let _ = place.set(Kept::Cuda(self.take_along(weights)));
        }
    }

    /// Lends weights on this device: those that are kept, else a copy for this once.
    fn with_weights<R>(&self, weights: &dyn StoredMatrix, work: impl FnOnce(&GpuMatrix) -> R) -> R {
        self.keep_weights(weights);
        match weights.kept().and_then(OnceLock::get) {
            Some(Kept::Cuda(kept)) if self.is_own(kept) => work(kept),
            _ => work(&self.take_along(weights)),
        }
    }

    /// `c = a·wᵀ`, or `c += a·wᵀ` with `accumulate`.
    pub(super) fn stored_product(
        &self,
        c: MatrixMut<'_>,
        a: Matrix<'_>,
        weights: &dyn StoredMatrix,
        accumulate: bool,
    ) {
        if is_nothing(&c, &a, (weights.cols(), weights.rows()), accumulate) {
            return;
        }
        let (rows, cols) = (a.rows, a.cols);
        let (a, turned) = self.input_stored(a);
        let mut target = self.target_matrix(c);
        self.with_weights(weights, |weights| match self.precision {
            Precision::F32 => {
                must(self.tiled(&mut target, factor(a.view(), turned), weights, accumulate));
            }
            Precision::Bf16 => {
                let (rows, cols) = if turned { (cols, rows) } else { (rows, cols) };
                let narrow = self.narrow(a.view(), rows, cols);
                let a = factor(MatrixView::new(narrow.view(), rows, cols), turned);
                must(self.tiled(&mut target, a, weights, accumulate));
            }
        });
        self.settle(target.data);
    }

    /// The product, tile by tile where the weights have to be unpacked.
    fn tiled<T: Unpack>(
        &self,
        c: &mut OutputMatrix<'_, '_>,
        a: Factor<'_, T>,
        weights: &GpuMatrix,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let (stream, outputs) = (&self.stream, weights.rows);
        if let Some(weights) = weights.as_it_lies(T::STORED) {
            let weights = Factor::transpose_of(weights);
            return self
                .blas
                .outputs(stream, c.view_mut(), a, weights, outputs, accumulate);
        }
        let some = tile_rows(self.unpacked_bytes, outputs, weights.cols * size_of::<T>());
        let mut room = self.room(some * weights.cols);
        for first in (0..outputs).step_by(some) {
            let rows = some.min(outputs - first);
            let len = rows * weights.cols;
            let tile = MatrixViewMut::new(room.view_mut().part(0..len), rows, weights.cols);
            let (form, from) = (weights.device_form(), weights.rows_from(first));
            T::UNPACK(&self.kernels, stream, &form, from, weights.first_col, tile)?;
            let tile = MatrixView::new(room.view().part(0..len), rows, weights.cols);
            let c = c.columns_mut(first, rows);
            self.blas
                .outputs(stream, c, a, Factor::transpose_of(tile), outputs, accumulate)?;
        }
        Ok(())
    }

    /// `out[i] = table[rows[i]]`.
    pub(super) fn gather_weights(&self, table: &dyn StoredMatrix, rows: &[u32], out: MatrixMut<'_>) {
        assert_eq!(
            (rows.len(), table.cols()),
            (out.rows, out.cols),
            "shapes of a gather"
        );
        if rows.is_empty() || out.cols == 0 {
            return;
        }
        let end = rows.iter().max().map_or(0, |&row| row as usize + 1);
        assert!(end <= table.rows(), "row {} of {}", end - 1, table.rows());
        let mut out = self.target_matrix(out);
        self.with_weights(table, |table| {
            let kept = |&row: &u32| count(table.first_row + row as usize * table.step);
            let rows: Vec<u32> = rows.iter().map(kept).collect();
            let mut places = self.room(rows.len());
            let places = must(Indices::upload(&self.stream, &rows, places.view_mut()));
            must(self.kernels.unpack(
                &self.stream,
                &table.device_form(),
                RowChoice::Listed(places),
                table.first_col,
                out.view_mut(),
            ));
        });
        self.settle(out.data);
    }
}

#[cfg(test)]
mod tests {
    use super::{TILE_ROWS, UNPACKED_BYTES, extent, tile_rows};

    /// WEIGHTS-1
    #[test]
    fn tiles_are_bounded_and_begin_aligned() {
        for (rows, cols, bytes) in [
            (7, 5, 4),
            (64, 64, 2),
            (152_064, 8192, 2),
            (256, 7168, 4),
            (9, 40_000_000, 4),
        ] {
            let tile = tile_rows(UNPACKED_BYTES, rows, cols * bytes);
            assert!(tile == rows || tile.is_multiple_of(TILE_ROWS), "{tile} of {rows}");
            assert!(
                tile <= TILE_ROWS || tile * cols * bytes <= UNPACKED_BYTES,
                "{tile} rows of {cols}"
            );
        }
        assert_eq!(tile_rows(UNPACKED_BYTES, 152_064, 8192 * 2), 4096);
    }

    #[test]
    fn scales_lie_behind_the_elements() {
        assert_eq!(extent(1000, None), (1000, 1000));
        assert_eq!(extent(1000, Some(8)), (1024, 1032));
        assert_eq!(extent(0, Some(8)), (0, 8));
    }
}
