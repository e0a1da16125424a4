//! AdamW, and what is asked of whole buffers.
#![allow(unsafe_code)]

use super::{Kernels, THREADS};
use crate::cuda::driver::CudaError;
use crate::cuda::matrix::count;
use crate::cuda::memory::{View, ViewMut};
use crate::cuda::module::Shape;
use crate::cuda::programs::Program;
use crate::cuda::stream::Stream;
use crate::device::AdamWUpdate;

/// Elements that one block sums, as in the kernels' text.
const ELEMENTS_PER_BLOCK: usize = 16 * 1024;

const ONE_BLOCK: Shape = Shape {
    grid: [1, 1, 1],
    threads: THREADS,
    shared_bytes: 0,
};

impl Kernels {
    /// One fused AdamW update of `parameters` and their moments.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn adamw(
        &self,
        stream: &Stream,
        update: &AdamWUpdate,
        parameters: ViewMut<'_, f32>,
        m: ViewMut<'_, f32>,
        v: ViewMut<'_, f32>,
        gradient: View<'_, f32>,
    ) -> Result<(), CudaError> {
        let n = parameters.len();
        assert_eq!(
            (m.len(), v.len(), gradient.len()),
            (n, n, n),
            "shapes of an update"
        );
        let correction1 = 1.0 - update.beta1.powf(update.number as f64);
        let correction2 = 1.0 - update.beta2.powf(update.number as f64);
        let (new1, beta2, new2) = (
            (1.0 - update.beta1) as f32,
            update.beta2 as f32,
            (1.0 - update.beta2) as f32,
        );
        let keep = (1.0 - update.learning_rate * update.weight_decay) as f32;
        let step = (update.learning_rate / correction1) as f32;
        let (root, epsilon) = (correction2.sqrt() as f32, update.epsilon as f32);
        // SAFETY: all four have n elements.
        unsafe {
            self.launch(
                stream,
                (Program::Optimizer, "adamw"),
                self.flat(n),
                &[
                    &parameters,
                    &m,
                    &v,
                    &gradient,
                    &update.gradient_scale,
                    &new1,
                    &beta2,
                    &new2,
                    &keep,
                    &step,
                    &root,
                    &epsilon,
                    &n,
                ],
            )
        }
    }

    /// Elements of the scratch that [`Kernels::sum_of_squares`] and [`Kernels::checksum`] need for `n` elements.
    pub fn sum_parts(n: usize) -> usize {
        n.div_ceil(ELEMENTS_PER_BLOCK) + 1
    }

    /// Σ x², in f64 and in an order that depends on the length only. Waits for it.
    ///
    /// # Errors
    /// If a launch is refused, or something asked for before failed.
    ///
    /// # Panics
    /// If the scratch is too short.
    pub fn sum_of_squares(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        parts: ViewMut<'_, f64>,
    ) -> Result<f64, CudaError> {
        let kernels = ["sum_of_squares_parts", "sum_parts"];
        // SAFETY: the kernels read f32 and write f64.
        unsafe { self.sum(stream, kernels, x, parts) }
    }

    /// A 64-bit checksum of the bits of `x` and their places, equal to [`checksum`](crate::device::checksum)'s. Waits for it.
    ///
    /// # Errors
    /// If a launch is refused, or something asked for before failed.
    ///
    /// # Panics
    /// If the scratch is too short.
    pub fn checksum(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        parts: ViewMut<'_, u64>,
    ) -> Result<u64, CudaError> {
        let kernels = ["checksum_parts", "sum_words"];
        // SAFETY: the kernels read 32 bits and write 64.
        unsafe { self.sum(stream, kernels, x, parts) }
    }

    /// # Safety
    /// The kernels must have these element types.
    unsafe fn sum<T: bytemuck::Pod + Default>(
        &self,
        stream: &Stream,
        [first, second]: [&'static str; 2],
        x: View<'_, f32>,
        parts: ViewMut<'_, T>,
    ) -> Result<T, CudaError> {
        let n = x.len();
        let blocks = n.div_ceil(ELEMENTS_PER_BLOCK);
        assert!(parts.len() > blocks, "scratch of a sum");
        let mut result = [T::default()];
        if blocks == 0 {
            return Ok(result[0]);
        }
        let sum = parts.view().part(blocks..blocks + 1);
        let shape = Shape {
            grid: [count(blocks), 1, 1],
            ..ONE_BLOCK
        };
        // SAFETY: a part per block, and one more for their sum.
        unsafe {
            self.launch(stream, (Program::Optimizer, first), shape, &[&x, &n, &parts])?;
            self.launch(
                stream,
                (Program::Optimizer, second),
                ONE_BLOCK,
                &[&parts, &blocks, &sum],
            )?;
        }
        stream.download(sum, &mut result)?;
        Ok(result[0])
    }

    /// Whether every element is a finite number. Waits for it.
    ///
    /// # Errors
    /// If the launch is refused, or something asked for before failed.
    ///
    /// # Panics
    /// If `found` is not one element.
    pub fn is_finite(
        &self,
        stream: &Stream,
        x: View<'_, f32>,
        mut found: ViewMut<'_, u32>,
    ) -> Result<bool, CudaError> {
        assert_eq!(found.len(), 1, "the answer is one element");
        stream.zero(found.reborrow())?;
        let n = x.len();
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Optimizer, "find_not_finite"),
                self.flat(n),
                &[&x, &n, &found],
            )?;
        }
        let mut answer = [0];
        stream.download(found.view(), &mut answer)?;
        Ok(answer == [0])
    }
}
