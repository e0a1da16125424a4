//! Matrix products by cuBLASLt.
//!
//! cuBLASLt is column-major and every matrix of eaglet's is row-major, so a product is asked for as its transpose:
//! `cᵀ = bᵀ·aᵀ`. A row-major matrix read by columns *is* its transpose, so nothing is moved; only the operation of each
//! factor says whether its elements lie along rows or along columns.
//!
//! PRODUCT-1: an algorithm is chosen once per width, depth, types and strides, for a fixed number of rows, and without
//! split sums; so a row of a product has the same bits whatever other rows share the call. The products of a transposed
//! first factor, which are weight gradients, are chosen for their own number of rows. A product of some outputs of a wider
//! one goes through the wider one's algorithm, so its bits are the same.
//! PRODUCT-2: where cuBLASLt does not take that algorithm for fewer rows or outputs, the product gets one of its own, which is
//! remembered and warned of once: the same call has the same bits, and others may differ in the last ones.

mod layout;

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use bytemuck::Pod;
use cudarc::cublaslt::sys::{
    cublasComputeType_t, cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t,
    cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, cublasLtMatrixLayout_t, cudaDataType,
};
use cudarc::driver::sys::CUstream;

use super::driver::{Context, CudaError};
use super::library::{SearchPath, functions};
use super::matrix::{MatrixView, MatrixViewMut};
use super::memory::Buffer;
use super::stream::Stream;
use layout::{Columns, Key, Place, alignment, columns};

pub use layout::ProductKind;

functions! {
    /// cuBLASLt's functions.
    BlasTable of CublasLt {
        fn create as "cublasLtCreate" (handle: *mut cublasLtHandle_t);
        fn destroy as "cublasLtDestroy" (handle: cublasLtHandle_t);
        fn layout_create as "cublasLtMatrixLayoutCreate" (layout: *mut cublasLtMatrixLayout_t, kind: cudaDataType, rows: u64, cols: u64, stride: i64);
        fn layout_destroy as "cublasLtMatrixLayoutDestroy" (layout: cublasLtMatrixLayout_t);
        fn desc_create as "cublasLtMatmulDescCreate" (desc: *mut cublasLtMatmulDesc_t, compute: cublasComputeType_t, scale: cudaDataType);
        fn desc_destroy as "cublasLtMatmulDescDestroy" (desc: cublasLtMatmulDesc_t);
        fn desc_set as "cublasLtMatmulDescSetAttribute" (desc: cublasLtMatmulDesc_t, attribute: cublasLtMatmulDescAttributes_t, value: *const c_void, bytes: usize);
        fn preference_create as "cublasLtMatmulPreferenceCreate" (preference: *mut cublasLtMatmulPreference_t);
        fn preference_destroy as "cublasLtMatmulPreferenceDestroy" (preference: cublasLtMatmulPreference_t);
        fn preference_set as "cublasLtMatmulPreferenceSetAttribute" (preference: cublasLtMatmulPreference_t, attribute: cublasLtMatmulPreferenceAttributes_t, value: *const c_void, bytes: usize);
        fn heuristic as "cublasLtMatmulAlgoGetHeuristic" (
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t,
            a: cublasLtMatrixLayout_t, b: cublasLtMatrixLayout_t, c: cublasLtMatrixLayout_t, d: cublasLtMatrixLayout_t,
            preference: cublasLtMatmulPreference_t, wanted: c_int, results: *mut Heuristic, found: *mut c_int,
        );
        fn matmul as "cublasLtMatmul" (
            handle: cublasLtHandle_t, desc: cublasLtMatmulDesc_t, alpha: *const c_void,
            a: u64, a_layout: cublasLtMatrixLayout_t, b: u64, b_layout: cublasLtMatrixLayout_t, beta: *const c_void,
            c: u64, c_layout: cublasLtMatrixLayout_t, d: u64, d_layout: cublasLtMatrixLayout_t,
            algorithm: *const [u64; 8], workspace: u64, workspace_bytes: usize, stream: CUstream,
        );
    }
}

/// `cublasLtMatmulHeuristicResult_t`, with its status as a plain integer.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Heuristic {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: i32,
    waves: f32,
    reserved: [i32; 4],
}

/// NVIDIA's advice for Hopper; smaller GPUs use less of it.
const WORKSPACE_BYTES: usize = 32 << 20;
/// `CUBLAS_STATUS_NOT_SUPPORTED` of cublas_api.h.
const NOT_SUPPORTED: i32 = 15;
/// Rows of the product for which algorithms are chosen.
const CHOSEN_FOR_ROWS: u64 = 2048;

/// Elements of the factors of a product.
pub trait Element: Pod {
    /// What they are.
    const KIND: ProductKind;
}

impl Element for f32 {
    const KIND: ProductKind = ProductKind::F32;
}

/// Bits of bf16.
impl Element for u16 {
    const KIND: ProductKind = ProductKind::Bf16;
}

impl ProductKind {
    fn factor(self) -> cudaDataType {
        match self {
            Self::F32 => cudaDataType::CUDA_R_32F,
            Self::Bf16 => cudaDataType::CUDA_R_16BF,
        }
    }
}

/// A factor of a product, `[rows, cols]`.
#[derive(Debug)]
pub struct Factor<'a, T> {
    stored: MatrixView<'a, T>,
    transposed: bool,
}

impl<T> Clone for Factor<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Factor<'_, T> {}

impl<'a, T> Factor<'a, T> {
    /// The matrix as it lies.
    pub fn new(stored: MatrixView<'a, T>) -> Self {
        Self {
            stored,
            transposed: false,
        }
    }

    /// The transpose of the matrix as it lies.
    pub fn transpose_of(stored: MatrixView<'a, T>) -> Self {
        Self {
            stored,
            transposed: true,
        }
    }

    fn shape(&self) -> (u64, u64) {
        let (rows, cols) = (u64::from(self.stored.rows), u64::from(self.stored.cols));
        if self.transposed {
            (cols, rows)
        } else {
            (rows, cols)
        }
    }

    fn place(&self) -> Place {
        Place {
            transposed: self.transposed,
            stride: self.stored.row_stride.max(1),
            alignment: alignment(self.stored.data.address()),
        }
    }
}

/// cuBLASLt on one device.
#[derive(Debug)]
pub struct Blas {
    context: Arc<Context>,
    table: BlasTable,
    handle: cublasLtHandle_t,
    workspace: Buffer<u8>,
    algorithms: Mutex<HashMap<Key, [u64; 8]>>,
}

#[allow(unsafe_code)]
// SAFETY: cuBLASLt's functions may be called from any thread (its documentation, "Thread Safety").
unsafe impl Send for Blas {}
#[allow(unsafe_code)]
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// A description that is destroyed in the end.
struct Made<T: Copy> {
    raw: T,
    destroy: unsafe extern "C" fn(T) -> i32,
}

impl<T: Copy> Drop for Made<T> {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: made once, destroyed once.
        unsafe { (self.destroy)(self.raw) };
    }
}

fn check(call: &'static str, code: i32) -> Result<(), CudaError> {
    if code == 0 {
        return Ok(());
    }
    // cublasStatus_t of cublas_api.h.
    let name = match code {
        1 => "not initialised",
        3 => "allocation failed",
        7 => "invalid value",
        8 => "architecture mismatch",
        13 => "execution failed",
        14 => "internal error",
        NOT_SUPPORTED => "not supported",
        _ => "unknown",
    };
    Err(CudaError::Call {
        call,
        code,
        name: format!("cublas status {code}"),
        text: name.to_owned(),
    })
}

#[allow(unsafe_code)]
impl Blas {
    /// Opens cuBLASLt for a device, with a workspace for one stream of products.
    ///
    /// # Errors
    /// If the library is missing, does not start, or the device has no room.
    pub fn new(context: &Arc<Context>, search: &SearchPath) -> Result<Self, CudaError> {
        let table = BlasTable::open(search)?;
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtCreate", unsafe { (table.create)(&raw mut handle) })?;
        Ok(Self {
            context: context.clone(),
            table,
            handle,
            workspace: Buffer::new(context, WORKSPACE_BYTES)?,
            algorithms: Mutex::default(),
        })
    }

    /// `c = alpha · a·b`, or `c += alpha · a·b` with `accumulate`, of f32; sums are f32, without TF32.
    ///
    /// # Errors
    /// If cuBLASLt refuses.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn product(
        &self,
        stream: &Stream,
        c: MatrixViewMut<'_>,
        a: Factor<'_, f32>,
        b: Factor<'_, f32>,
        alpha: f32,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let width = u64::from(c.cols);
        self.run(stream, (c, width), a, b, alpha, accumulate)
    }

    /// [`Blas::product`] of bf16 factors; the result and the sums are f32.
    ///
    /// # Errors
    /// If cuBLASLt refuses.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn product_bf16(
        &self,
        stream: &Stream,
        c: MatrixViewMut<'_>,
        a: Factor<'_, u16>,
        b: Factor<'_, u16>,
        alpha: f32,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let width = u64::from(c.cols);
        self.run(stream, (c, width), a, b, alpha, accumulate)
    }

    /// Some columns of a product of `width` columns, `c = a·b` or `c += a·b` with `accumulate`; same bits as in the whole.
    ///
    /// # Errors
    /// If cuBLASLt refuses.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn outputs<T: Element>(
        &self,
        stream: &Stream,
        c: MatrixViewMut<'_>,
        a: Factor<'_, T>,
        b: Factor<'_, T>,
        width: usize,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        self.run(stream, (c, width as u64), a, b, 1.0, accumulate)
    }

    fn run<T: Element>(
        &self,
        stream: &Stream,
        (c, width): (MatrixViewMut<'_>, u64),
        a: Factor<'_, T>,
        b: Factor<'_, T>,
        alpha: f32,
        accumulate: bool,
    ) -> Result<(), CudaError> {
        let (rows, cols) = (u64::from(c.rows), u64::from(c.cols));
        let ((a_rows, depth), (b_rows, b_cols)) = (a.shape(), b.shape());
        assert_eq!(
            (a_rows, b_rows, b_cols),
            (rows, depth, cols),
            "shapes of a product"
        );
        assert!(cols <= width, "{cols} columns of {width}");
        assert!(depth > 0 || rows * cols == 0, "a product without depth");
        if rows * cols == 0 {
            return Ok(());
        }
        self.context.bind()?;
        let key = Key {
            kind: T::KIND,
            rows: if a.transposed { rows } else { CHOSEN_FOR_ROWS },
            cols: width,
            depth,
            a: a.place(),
            b: b.place(),
            c: Place {
                transposed: false,
                stride: c.row_stride.max(1),
                alignment: alignment(c.data.address()),
            },
            accumulate,
        };
        let own = Key { rows, cols, ..key };
        let desc = self.desc(&key)?;
        let [first, second, result] = self.layouts(&own, rows)?;
        let beta: f32 = if accumulate { 1.0 } else { 0.0 };
        let target = c.data.address();
        // SAFETY: the views hold what the layouts describe, which the shapes above were checked for; both scalars are
        // read before the call returns.
        let multiply = |algorithm: &[u64; 8]| unsafe {
            (self.table.matmul)(
                self.handle,
                desc.raw,
                (&raw const alpha).cast(),
                b.stored.data.address(),
                first.raw,
                a.stored.data.address(),
                second.raw,
                (&raw const beta).cast(),
                target,
                result.raw,
                target,
                result.raw,
                std::ptr::from_ref(algorithm),
                self.workspace.view().address(),
                self.workspace.len(),
                stream.raw(),
            )
        };
        // PRODUCT-2: its own comes first, where it has one.
        let chosen = match self.known([&own, &key]) {
            Some(algorithm) => algorithm,
            None => self.choose(&key, &desc)?,
        };
        let code = multiply(&chosen);
        if code != NOT_SUPPORTED || own == key {
            return check("cublasLtMatmul", code);
        }
        let algorithm = self.choose(&own, &desc)?;
        tracing::warn!(?own, chosen_for = ?key, "a product gets an algorithm of its own: its last bits may differ");
        check("cublasLtMatmul", multiply(&algorithm))
    }

    /// The algorithm that was chosen for the first of these that has one.
    fn known(&self, keys: [&Key; 2]) -> Option<[u64; 8]> {
        let algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        keys.into_iter().find_map(|key| algorithms.get(key)).copied()
    }

    fn desc(&self, key: &Key) -> Result<Made<cublasLtMatmulDesc_t>, CudaError> {
        let mut raw = std::ptr::null_mut();
        let (compute, scale) = (cublasComputeType_t::CUBLAS_COMPUTE_32F, cudaDataType::CUDA_R_32F);
        // SAFETY: writes one handle.
        check("cublasLtMatmulDescCreate", unsafe {
            (self.table.desc_create)(&raw mut raw, compute, scale)
        })?;
        let made = Made {
            raw,
            destroy: self.table.desc_destroy,
        };
        let [first, second, _] = columns(key, 1);
        for (attribute, transposed) in [
            (
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                first.transposed,
            ),
            (
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSB,
                second.transposed,
            ),
        ] {
            let operation = i32::from(transposed);
            // SAFETY: the attribute is a 32-bit integer.
            check("cublasLtMatmulDescSetAttribute", unsafe {
                (self.table.desc_set)(
                    made.raw,
                    attribute,
                    (&raw const operation).cast(),
                    size_of::<i32>(),
                )
            })?;
        }
        Ok(made)
    }

    fn layouts(&self, key: &Key, rows: u64) -> Result<[Made<cublasLtMatrixLayout_t>; 3], CudaError> {
        let [first, second, result] = columns(key, rows);
        let factor = key.kind.factor();
        Ok([
            self.layout(first, factor)?,
            self.layout(second, factor)?,
            self.layout(result, cudaDataType::CUDA_R_32F)?,
        ])
    }

    fn layout(
        &self,
        columns: Columns,
        kind: cudaDataType,
    ) -> Result<Made<cublasLtMatrixLayout_t>, CudaError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatrixLayoutCreate", unsafe {
            (self.table.layout_create)(
                &raw mut raw,
                kind,
                columns.rows,
                columns.cols,
                columns.stride.cast_signed(),
            )
        })?;
        Ok(Made {
            raw,
            destroy: self.table.layout_destroy,
        })
    }

    /// Chooses the algorithm of a kind of products, for good; PRODUCT-1.
    fn choose(&self, key: &Key, desc: &Made<cublasLtMatmulDesc_t>) -> Result<[u64; 8], CudaError> {
        let mut algorithms = self.algorithms.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(algorithm) = algorithms.get(key) {
            return Ok(*algorithm); // another thread was quicker
        }
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("cublasLtMatmulPreferenceCreate", unsafe {
            (self.table.preference_create)(&raw mut raw)
        })?;
        let preference = Made {
            raw,
            destroy: self.table.preference_destroy,
        };
        type Attribute = cublasLtMatmulPreferenceAttributes_t;
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the value has the attribute's size and outlives the call.
            let code = unsafe { (self.table.preference_set)(preference.raw, attribute, value, bytes) };
            check("cublasLtMatmulPreferenceSetAttribute", code)
        };
        let workspace = self.workspace.len() as u64;
        set(
            Attribute::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
            (&raw const workspace).cast(),
            size_of::<u64>(),
        )?;
        // No split sums: their parts would be added in an order of their own.
        let whole_sums = 0_u32;
        set(
            Attribute::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            (&raw const whole_sums).cast(),
            size_of::<u32>(),
        )?;
        for (attribute, place) in [
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.b),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.a),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.c),
            (Attribute::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.c),
        ] {
            let bytes = place.alignment as u32;
            set(attribute, (&raw const bytes).cast(), size_of::<u32>())?;
        }
        let [first, second, result] = self.layouts(key, key.rows)?;
        let (mut best, mut found) = (Heuristic::default(), 0);
        // SAFETY: writes one result and their number.
        check("cublasLtMatmulAlgoGetHeuristic", unsafe {
            (self.table.heuristic)(
                self.handle,
                desc.raw,
                first.raw,
                second.raw,
                result.raw,
                result.raw,
                preference.raw,
                1,
                &raw mut best,
                &raw mut found,
            )
        })?;
        if found < 1 {
            return check("cublasLtMatmulAlgoGetHeuristic", NOT_SUPPORTED).map(|()| best.algorithm);
        }
        check("cublasLtMatmulAlgoGetHeuristic", best.state)?;
        tracing::debug!(
            ?key,
            workspace = best.workspace_bytes,
            waves = best.waves,
            "algorithm"
        );
        algorithms.insert(*key, best.algorithm);
        Ok(best.algorithm)
    }
}

impl Drop for Blas {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made once, destroyed once.
            unsafe { (self.table.destroy)(self.handle) };
        }
    }
}
