//! Softmax, divergence, arg-max, and the experts of tokens.
#![allow(unsafe_code)]

use super::Kernels;
use crate::cuda::driver::CudaError;
use crate::cuda::matrix::{Indices, MatrixView, MatrixViewMut, count};
use crate::cuda::memory::{View, ViewMut};
use crate::cuda::module::Shape;
use crate::cuda::programs::Program;
use crate::cuda::stream::Stream;
use crate::device::{Routing, Scoring};

impl Kernels {
    /// Turns target logits `[rows, n]` into probabilities in place; `negative_entropy` (Σ p·ln p, in nats) and `argmax`
    /// (the first largest logit) `[rows]`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn softmax_targets(
        &self,
        stream: &Stream,
        logits: MatrixViewMut<'_>,
        negative_entropy: ViewMut<'_, f32>,
        argmax: ViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        let rows = logits.rows as usize;
        assert_eq!(
            (negative_entropy.len(), argmax.len()),
            (rows, rows),
            "shapes of targets"
        );
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Loss, "softmax_targets"),
                Self::by_row(logits.rows),
                &[
                    &logits.data,
                    &logits.row_stride,
                    &logits.cols,
                    &negative_entropy,
                    &argmax,
                ],
            )
        }
    }

    /// Forward KL divergence in nats and its gradient: row `i` of `logits` `[rows, n]` against row `target_of[i]` of
    /// `probabilities`. `logits` becomes `coefficients[i] · (softmax(logits) − p)`.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    #[allow(clippy::too_many_arguments)]
    pub fn kl_divergence(
        &self,
        stream: &Stream,
        logits: MatrixViewMut<'_>,
        probabilities: MatrixView<'_>,
        negative_entropy: View<'_, f32>,
        target_of: Indices<'_>,
        coefficients: View<'_, f32>,
        losses: ViewMut<'_, f32>,
        argmax: ViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        let rows = logits.rows as usize;
        assert_eq!(
            (logits.cols, negative_entropy.len()),
            (probabilities.cols, probabilities.rows as usize),
            "shapes of a loss"
        );
        assert_eq!(
            (target_of.len(), coefficients.len(), losses.len(), argmax.len()),
            (rows, rows, rows, rows),
            "shapes of a loss"
        );
        assert!(
            target_of.end() <= probabilities.rows,
            "a target behind the probabilities"
        );
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Loss, "kl_divergence"),
                Self::by_row(logits.rows),
                &[
                    &logits.data,
                    &logits.row_stride,
                    &logits.cols,
                    &probabilities.data,
                    &probabilities.row_stride,
                    &negative_entropy,
                    &target_of.data,
                    &coefficients,
                    &losses,
                    &argmax,
                ],
            )
        }
    }

    /// Index of each row's largest value, the first one when several are equal.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn argmax(&self, stream: &Stream, x: MatrixView<'_>, out: ViewMut<'_, u32>) -> Result<(), CudaError> {
        assert_eq!(x.rows as usize, out.len(), "shapes of an arg-max");
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Loss, "argmax"),
                Self::by_row(x.rows),
                &[&x.data, &x.row_stride, &x.cols, &out],
            )
        }
    }

    /// 1 for each row with an element that is no number or larger than `largest` in magnitude, else 0.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn beyond(
        &self,
        stream: &Stream,
        x: MatrixView<'_>,
        largest: f32,
        out: ViewMut<'_, u32>,
    ) -> Result<(), CudaError> {
        assert_eq!(x.rows as usize, out.len(), "shapes of a check");
        // SAFETY: checked above.
        unsafe {
            self.launch(
                stream,
                (Program::Loss, "beyond"),
                Self::by_row(x.rows),
                &[&x.data, &x.row_stride, &x.cols, &largest, &out],
            )
        }
    }

    /// Chooses the experts of each token: `logits` `[tokens, experts]`; `chosen` and `weights` `[tokens, top]`.
    ///
    /// `choice_bias` is that of `routing`, on the device.
    ///
    /// # Errors
    /// If the launch is refused.
    ///
    /// # Panics
    /// If the shapes differ.
    pub fn route(
        &self,
        stream: &Stream,
        routing: &Routing<'_>,
        choice_bias: View<'_, f32>,
        logits: MatrixView<'_>,
        chosen: ViewMut<'_, u32>,
        weights: ViewMut<'_, f32>,
    ) -> Result<(), CudaError> {
        let (tokens, experts) = (logits.rows as usize, logits.cols as usize);
        assert_eq!(
            (chosen.len(), weights.len()),
            (tokens * routing.top, tokens * routing.top),
            "shapes of a routing"
        );
        assert!(
            (1..=experts).contains(&routing.top) && (choice_bias.is_empty() || choice_bias.len() == experts),
            "{} of {experts} experts",
            routing.top
        );
        let (groups, groups_chosen) = routing
            .groups
            .map_or((0, 0), |groups| (groups.count, groups.chosen));
        assert!(
            groups_chosen <= groups && groups <= experts,
            "{groups_chosen} of {groups} groups of {experts} experts"
        );
        let scoring: u32 = match routing.scoring {
            Scoring::Softmax => 0,
            Scoring::SoftmaxOfChosen => 1,
            Scoring::Sigmoid => 2,
        };
        let shape = Shape {
            grid: [logits.rows, 1, 1],
            threads: 32,
            shared_bytes: count((2 * experts + 2 * groups) * size_of::<f32>()),
        };
        let (top, groups, groups_chosen) = (count(routing.top), count(groups), count(groups_chosen));
        let normalised = u32::from(routing.normalised);
        // SAFETY: checked above; an empty bias is a null pointer, as the kernel expects.
        unsafe {
            self.launch(
                stream,
                (Program::Route, "route"),
                shape,
                &[
                    &logits.data,
                    &logits.row_stride,
                    &logits.cols,
                    &top,
                    &scoring,
                    &choice_bias,
                    &groups,
                    &groups_chosen,
                    &normalised,
                    &routing.factor,
                    &chosen,
                    &weights,
                ],
            )
        }
    }
}
