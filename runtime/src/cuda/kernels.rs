//! Kernels that are ready to launch, one function per operation.
//!
//! KERNEL-1: every function checks its shapes before it launches, and every row number that a kernel follows comes from
//! [`Indices`], whose largest is known: so no kernel leaves the views that it is given.

mod attention;
mod loss;
mod norm;
mod optimizer;
mod rows;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::cache::{KernelCache, Origin, Source};
use super::driver::{Context, CudaError};
use super::matrix::{Indices, MatrixView, MatrixViewMut, count};
use super::memory::{View, ViewMut};
use super::module::{Argument, Function, Module, Shape};
use super::nvrtc::Nvrtc;
use super::programs::Program;
use super::stream::Stream;
use crate::device::{Gate, Pairing, Turn};

pub use attention::{AttentionOperands, AttentionTables};

pub use rows::{DeviceForm, RowChoice, Scales, ScatterList};

/// Threads of a block that sums or that handles single elements.
const THREADS: u32 = 256;

/// The compiled kernels of one device.
#[derive(Debug)]
pub struct Kernels {
    context: Arc<Context>,
    nvrtc: Nvrtc,
    cache: KernelCache,
    architecture: String,
    multiprocessors: u32,
    modules: Mutex<HashMap<Program, Arc<Module>>>,
    functions: Mutex<HashMap<(Program, &'static str), Function>>,
    compiled: Mutex<Vec<(String, Origin)>>,
}

impl Kernels {
    /// Compiles what every model needs, or takes it from `cache`.
    ///
    /// # Errors
    /// If a program does not compile or the device does not take it.
    pub fn new(context: &Arc<Context>, nvrtc: Nvrtc, cache: KernelCache) -> Result<Self, CudaError> {
        let architecture = nvrtc.architecture(context.gpu().capability()?)?;
        let kernels = Self {
            context: context.clone(),
            nvrtc,
            cache,
            architecture,
            multiprocessors: context.gpu().multiprocessors()?.max(1),
            modules: Mutex::default(),
            functions: Mutex::default(),
            compiled: Mutex::default(),
        };
        for program in Program::GENERAL {
            kernels.module(program)?;
        }
        Ok(kernels)
    }

    /// The programs loaded so far, and where their machine code came from.
    pub fn origins(&self) -> Vec<(String, Origin)> {
        self.compiled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Compiles a program now, so that its first launch does not wait for it.
    ///
    /// # Errors
    /// If it does not compile or the device does not take it.
    pub fn prepare(&self, program: Program) -> Result<(), CudaError> {
        self.module(program).map(|_| ())
    }

    fn module(&self, program: Program) -> Result<Arc<Module>, CudaError> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(&program) {
            return Ok(module.clone());
        }
        let (code, origin) = self.cache.code(
            &self.nvrtc,
            &Source {
                program: &program.name(),
                text: &program.text(),
                options: &program.options(),
                architecture: &self.architecture,
            },
        )?;
        let module = Module::load(&self.context, &code)?;
        modules.insert(program, module.clone());
        self.compiled
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push((program.name(), origin));
        Ok(module)
    }

    /// A kernel by its program and name.
    ///
    /// # Errors
    /// If the program does not compile or does not have it.
    pub fn function(&self, program: Program, name: &'static str) -> Result<Function, CudaError> {
        let key = (program, name);
        let find = || {
            let functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
            functions.get(&key).cloned()
        };
        if let Some(function) = find() {
            return Ok(function);
        }
        let function = self.module(program)?.function(name)?;
        self.functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key, function.clone());
        Ok(function)
    }

    /// Blocks that keep the device busy with `n` single elements.
    fn flat(&self, n: usize) -> Shape {
        let blocks = n
            .div_ceil(THREADS as usize)
            .min(self.multiprocessors as usize * 16);
        Shape {
            grid: [blocks as u32, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    /// A row per block along x, its columns along y.
    fn spread(rows: u32, cols: u32) -> Shape {
        Shape {
            grid: [rows, cols.div_ceil(THREADS).min(64), 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    /// A row per block.
    fn by_row(rows: u32) -> Shape {
        Shape {
            grid: [rows, 1, 1],
            threads: THREADS,
            shared_bytes: 0,
        }
    }

    /// # Safety
    /// As [`Function::launch`].
    #[allow(unsafe_code)]
    unsafe fn launch(
        &self,
        stream: &Stream,
        (program, name): (Program, &'static str),
        shape: Shape,
        arguments: &[&dyn Argument],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller vouches for the arguments.
        unsafe { self.function(program, name)?.launch(stream, shape, arguments) }
    }
}

#[allow(unsafe_code)]
impl Kernels {
    /// `out = silu(gate) · up`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn gated(
        &self,
        stream: &Stream,
        gate: Gate,
        g: View<'_, f32>,
        u: View<'_, f32>,
        out: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let n = out.len();
        assert_eq!((g.len(), u.len()), (n, n), "shapes of a gate");
        let shape = self.flat(n);
        let at = |name| (Program::Elementwise, name);
        // SAFETY: all three have n elements.
        unsafe {
            match gate {
                Gate::Silu => self.launch(stream, at("swiglu"), shape, &[&g, &u, &out, &n]),
                Gate::GeluTanh => self.launch(stream, at("geglu"), shape, &[&g, &u, &out, &n]),
                Gate::Clamped { alpha, limit } => self.launch(
                    stream,
                    at("clamped_glu"),
                    shape,
                    &[&g, &u, &alpha, &limit, &out, &n],
                ),
            }
        }
    }

    /// Replaces `gate` and `up` by their gradients, given that of their [`Gate::Silu`] product.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn swiglu_backward(
        &self,
        stream: &Stream,
        gate: ViewMut<'_, f32>,
        up: ViewMut<'_, f32>,
        dout: View<'_, f32>,
    ) -> Result<(), CudaError> {
        let n = dout.len();
        assert_eq!((gate.len(), up.len()), (n, n), "shapes of swiglu");
        let at = (Program::Elementwise, "swiglu_backward");
        // SAFETY: all three have n elements.
        unsafe { self.launch(stream, at, self.flat(n), &[&gate, &up, &dout, &n]) }
    }

    /// `target += source`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn add(
        &self,
        stream: &Stream,
        target: ViewMut<'_, f32>,
        source: View<'_, f32>,
    ) -> Result<(), CudaError> {
        let n = target.len();
        assert_eq!(source.len(), n, "shapes of a sum");
        // SAFETY: both have n elements.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, "add"),
                self.flat(n),
                &[&target, &source, &n],
            )
        }
    }

    /// `x · factor`.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn scale(&self, stream: &Stream, x: ViewMut<'_, f32>, factor: f32) -> Result<(), CudaError> {
        let n = x.len();
        // SAFETY: x has n elements.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, "scale"),
                self.flat(n),
                &[&x, &factor, &n],
            )
        }
    }

    /// Sets every element to `value`.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn fill(&self, stream: &Stream, x: ViewMut<'_, f32>, value: f32) -> Result<(), CudaError> {
        let n = x.len();
        // SAFETY: x has n elements.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, "fill"),
                self.flat(n),
                &[&x, &value, &n],
            )
        }
    }

    /// `cap · tanh(x / cap)`.
    ///
    /// # Errors
    /// If the launch is refused.
    pub fn softcap(&self, stream: &Stream, x: ViewMut<'_, f32>, cap: f32) -> Result<(), CudaError> {
        let n = x.len();
        // SAFETY: x has n elements.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, "softcap"),
                self.flat(n),
                &[&x, &cap, &n],
            )
        }
    }

    /// Adds `bias` `[n]` to every row of `x` `[rows, n]`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the widths differ.
    pub fn add_bias(
        &self,
        stream: &Stream,
        x: MatrixViewMut<'_>,
        bias: View<'_, f32>,
    ) -> Result<(), CudaError> {
        assert_eq!(x.cols as usize, bias.len(), "shapes of a bias");
        let at = (Program::Elementwise, "add_bias");
        // SAFETY: x is a matrix that was checked, the bias is as wide.
        unsafe {
            self.launch(
                stream,
                at,
                Self::spread(x.rows, x.cols),
                &[&x.data, &x.row_stride, &bias, &x.cols],
            )
        }
    }

    /// `target = source`, with strides of their own.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn copy(
        &self,
        stream: &Stream,
        source: MatrixView<'_>,
        target: MatrixViewMut<'_>,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel copies f32 to f32.
        unsafe { self.row_by_row(stream, "copy_rows", source, target) }
    }

    /// f32 to bf16, to the nearest, ties to even: operands of products.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn narrow(
        &self,
        stream: &Stream,
        source: MatrixView<'_>,
        target: MatrixViewMut<'_, u16>,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel reads f32 and writes 16 bits.
        unsafe { self.row_by_row(stream, "narrow", source, target) }
    }

    /// bf16 to f32.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn widen(
        &self,
        stream: &Stream,
        source: MatrixView<'_, u16>,
        target: MatrixViewMut<'_>,
    ) -> Result<(), CudaError> {
        // SAFETY: the kernel reads 16 bits and writes f32.
        unsafe { self.row_by_row(stream, "widen", source, target) }
    }

    /// # Safety
    /// The kernel must have these element types.
    unsafe fn row_by_row<A, B>(
        &self,
        stream: &Stream,
        name: &'static str,
        source: MatrixView<'_, A>,
        target: MatrixViewMut<'_, B>,
    ) -> Result<(), CudaError> {
        assert_eq!(
            (source.rows, source.cols),
            (target.rows, target.cols),
            "shapes of a copy"
        );
        // SAFETY: both are matrices of one shape that were checked.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, name),
                Self::spread(target.rows, target.cols),
                &[
                    &source.data,
                    &source.row_stride,
                    &target.data,
                    &target.row_stride,
                    &target.cols,
                ],
            )
        }
    }

    /// Rotates every head of `x` `[rows, heads · head_dim]` by its row's position; `cos`, `sin` `[positions, pairs]`, the
    /// pairs of a head lie from `offset` on.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes do not fit, or a position lies behind the table.
    #[allow(clippy::too_many_arguments)]
    pub fn rotate(
        &self,
        stream: &Stream,
        x: ViewMut<'_, f32>,
        head_dim: usize,
        (cos, sin): (MatrixView<'_>, MatrixView<'_>),
        offset: usize,
        pairing: Pairing,
        positions: Indices<'_>,
        turn: Turn,
    ) -> Result<(), CudaError> {
        let (rows, pairs) = (positions.len(), cos.cols as usize);
        if rows == 0 {
            return Ok(());
        }
        let width = x.len() / rows;
        assert!(
            width * rows == x.len() && width.is_multiple_of(head_dim) && offset + 2 * pairs <= head_dim,
            "shapes of a rotation"
        );
        assert_eq!(
            (cos.rows, cos.cols, cos.row_stride, cos.row_stride),
            (sin.rows, sin.cols, sin.row_stride, pairs as u64),
            "shapes of angles"
        );
        assert!(positions.end() <= cos.rows, "a position behind the table");
        let heads = count(width / head_dim);
        let neighbours = u32::from(pairing == Pairing::Neighbours);
        let sign: f32 = if turn == Turn::Forward { 1.0 } else { -1.0 };
        let shape = Self::spread(count(rows), heads * cos.cols);
        let (head_dim, offset) = (count(head_dim), count(offset));
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Elementwise, "rotate"),
                shape,
                &[
                    &x,
                    &heads,
                    &head_dim,
                    &cos.cols,
                    &offset,
                    &neighbours,
                    &cos.data,
                    &sin.data,
                    &positions.data,
                    &sign,
                ],
            )
        }
    }
}
