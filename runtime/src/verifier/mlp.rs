//! MLP of a decoder layer: one gated MLP, or a mixture of them.

use std::ops::Range;

use super::activations::{MlpBuffers, take, take_host};
use super::family::ExpertLayout;
use super::layer_config::{DenseConfig, ExpertsConfig, MlpConfig};
use super::linear::Linear;
use super::loader::LayerLoader;
use super::residents::Residence;
use crate::device::{Buffer, Device, FloatsMut, Gate, Matrix, MatrixMut, Routing};

/// The MLP of one layer, or a slice of it.
pub(super) enum MlpBlock {
    Dense(Box<Dense>),
    Experts(Box<Experts>),
}

/// A gated MLP.
pub(super) struct Dense {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Gate,
}

/// A mixture of experts, of which this slice has some.
pub(super) struct Experts {
    config: ExpertsConfig,
    router: Linear,
    choice_bias: Vec<f32>,
    own: Range<usize>,
    experts: Vec<Dense>,
    shared: Option<Dense>,
}

impl MlpBlock {
    pub(super) fn new(loader: &LayerLoader<'_, '_>, config: &MlpConfig, hidden: usize) -> Self {
        match config {
            MlpConfig::Dense(config) => Self::Dense(Box::new(Dense::new(loader, config, hidden))),
            MlpConfig::Experts(config) => Self::Experts(Box::new(Experts::new(loader, config, hidden))),
        }
    }

    /// Takes vectors and matrices to where they are to be.
    pub(super) fn place(&mut self, to: &mut impl Residence) {
        match self {
            Self::Dense(dense) => dense.place(to),
            Self::Experts(experts) => {
                experts.router.place(to);
                let all = experts.experts.iter_mut().chain(&mut experts.shared);
                all.for_each(|expert| expert.place(to));
            }
        }
    }

    /// `out = mlp(input)`, or `out += mlp(input)` with `accumulate`; `input`, `out` `[rows, H]`.
    pub(super) fn apply(
        &self,
        device: &impl Device,
        buffers: &mut MlpBuffers,
        input: Matrix<'_>,
        mut out: FloatsMut<'_>,
        accumulate: bool,
    ) {
        match self {
            Self::Dense(dense) => {
                let MlpBuffers { gate, up, gated, .. } = buffers;
                dense.apply(device, [gate, up, gated], input, out, accumulate);
            }
            Self::Experts(experts) => {
                if !accumulate {
                    device.fill(out.reborrow(), 0.0);
                }
                experts.add(device, buffers, input, out);
            }
        }
    }
}

impl Dense {
    fn new(loader: &LayerLoader<'_, '_>, config: &DenseConfig, hidden: usize) -> Self {
        if !config.fused {
            return Self::named(
                loader,
                ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"],
                (config.inner, hidden),
                config.gate,
                config.bias,
            );
        }
        let own = loader.shard().slice_of(config.inner, 1);
        let share = own.len() as f64 / config.inner.max(1) as f64;
        let stored = loader.matrix("mlp.gate_up_proj", 2 * config.inner, hidden, share);
        let up = config.inner + own.start..config.inner + own.end;
        Self {
            gate: stored.part(own.clone(), 0..hidden),
            up: stored.part(up, 0..hidden),
            down: loader.inputs("mlp.down_proj", hidden, config.inner, own, config.bias),
            activation: config.gate,
        }
    }

    /// A gated MLP of width `inner`, cut along it.
    fn named(
        loader: &LayerLoader<'_, '_>,
        [gate, up, down]: [&str; 3],
        (inner, hidden): (usize, usize),
        activation: Gate,
        bias: bool,
    ) -> Self {
        let own = loader.shard().slice_of(inner, 1);
        Self {
            gate: loader.outputs(gate, inner, hidden, own.clone(), bias),
            up: loader.outputs(up, inner, hidden, own.clone(), bias),
            down: loader.inputs(down, hidden, inner, own, bias),
            activation,
        }
    }

    fn place(&mut self, to: &mut impl Residence) {
        for linear in [&mut self.gate, &mut self.up, &mut self.down] {
            linear.place(to);
        }
    }

    fn apply(
        &self,
        device: &impl Device,
        [gate, up, gated]: [&mut Buffer; 3],
        input: Matrix<'_>,
        out: FloatsMut<'_>,
        accumulate: bool,
    ) {
        let (rows, inner) = (input.rows(), self.gate.outputs());
        let mut gate = take(device, gate, "gate", rows * inner);
        let mut up = take(device, up, "up", rows * inner);
        let mut gated = take(device, gated, "gated", rows * inner);
        self.gate.apply(device, input, gate.reborrow(), false);
        self.up.apply(device, input, up.reborrow(), false);
        device.gated(self.activation, gate.floats(), up.floats(), gated.reborrow());
        self.down
            .apply(device, Matrix::new(&gated, rows, inner), out, accumulate);
    }
}

impl Experts {
    fn new(loader: &LayerLoader<'_, '_>, config: &ExpertsConfig, hidden: usize) -> Self {
        let count = config.experts;
        let own = loader.shard().slice_of(count, 1);
        let (module, router, names) = match config.layout {
            ExpertLayout::Each => ("mlp", "gate", ["gate_proj", "up_proj", "down_proj"]),
            ExpertLayout::Mixtral => ("block_sparse_moe", "gate", ["w1", "w3", "w2"]),
            ExpertLayout::Together => ("mlp", "router", ["", "", ""]),
        };
        let experts = match config.layout {
            ExpertLayout::Together => Self::together(loader, config, hidden, own.clone()),
            _ => (0..count)
                .filter_map(|expert| {
                    let parts = names.map(|name| format!("{module}.experts.{expert}.{name}"));
                    if !own.contains(&expert) {
                        parts.iter().for_each(|part| loader.elsewhere(part, false));
                        return None;
                    }
                    let [gate, up, down] = &parts;
                    Some(Dense {
                        gate: loader.whole(gate, config.inner, hidden, false),
                        up: loader.whole(up, config.inner, hidden, false),
                        down: loader.whole(down, hidden, config.inner, false),
                        activation: config.gate,
                    })
                })
                .collect(),
        };
        let has_bias = config.layout == ExpertLayout::Together;
        let shared = (config.shared_inner > 0).then(|| {
            Dense::named(
                loader,
                [
                    "mlp.shared_experts.gate_proj",
                    "mlp.shared_experts.up_proj",
                    "mlp.shared_experts.down_proj",
                ],
                (config.shared_inner, hidden),
                config.gate,
                false,
            )
        });
        let choice_bias = if config.choice_bias {
            loader.vector(&format!("{module}.{router}.e_score_correction_bias"), count)
        } else {
            Vec::new()
        };
        Self {
            router: loader.whole(&format!("{module}.{router}"), count, hidden, has_bias),
            choice_bias,
            own,
            experts,
            shared,
            config: config.clone(),
        }
    }

    /// Experts whose matrices lie in one tensor each for all of them, gate and up in turns.
    fn together(
        loader: &LayerLoader<'_, '_>,
        config: &ExpertsConfig,
        hidden: usize,
        own: Range<usize>,
    ) -> Vec<Dense> {
        let (count, inner) = (config.experts, config.inner);
        let up = loader.together("mlp.experts.gate_up_proj", count, 2 * inner, hidden, own.clone());
        let up_bias = loader.biases_together("mlp.experts.gate_up_proj_bias", count, 2 * inner, own.clone());
        let down = loader.together("mlp.experts.down_proj", count, hidden, inner, own.clone());
        let down_bias = loader.biases_together("mlp.experts.down_proj_bias", count, hidden, own);
        up.into_iter()
            .zip(up_bias)
            .zip(down.into_iter().zip(down_bias))
            .map(|((up, up_bias), (down, down_bias))| {
                let half = |from: usize| {
                    let bias = up_bias.iter().copied().skip(from).step_by(2).collect();
                    up.every_second(0..2 * inner, from).with_bias(Some(bias))
                };
                Dense {
                    gate: half(0),
                    up: half(1),
                    down: down.whole().with_bias(Some(down_bias)),
                    activation: config.gate,
                }
            })
            .collect()
    }

    /// `out += experts(input)`: those of this slice, each for the tokens that chose it, in the order of the experts.
    fn add(&self, device: &impl Device, buffers: &mut MlpBuffers, input: Matrix<'_>, mut out: FloatsMut<'_>) {
        let (rows, hidden) = (input.rows(), input.cols());
        let (count, top) = (self.config.experts, self.config.top);
        let MlpBuffers {
            gate,
            up,
            gated,
            scores,
            chosen,
            weights,
            input: picked,
            output,
        } = buffers;
        let mut scores = take(device, scores, "scores", rows * count);
        self.router.apply(device, input, scores.reborrow(), false);
        let (chosen, weights) = (take_host(chosen, rows * top), take_host(weights, rows * top));
        let routing = Routing {
            top,
            scoring: self.config.scoring,
            choice_bias: &self.choice_bias,
            groups: self.config.groups,
            normalised: self.config.normalised,
            factor: self.config.factor,
        };
        device.route(&routing, Matrix::new(&scores, rows, count), chosen, weights);
        let mut tokens = vec![(Vec::new(), Vec::new()); self.own.len()];
        for (place, (&expert, &weight)) in chosen.iter().zip(&*weights).enumerate() {
            if let Some(index) = (expert as usize)
                .checked_sub(self.own.start)
                .filter(|&index| index < self.own.len())
            {
                let (rows, factors) = &mut tokens[index];
                rows.push((place / top) as u32);
                factors.push(weight);
            }
        }
        for (expert, (own, factors)) in self.experts.iter().zip(&tokens) {
            if own.is_empty() {
                continue;
            }
            let mut picked = take(device, picked, "picked", own.len() * hidden);
            device.gather(input, own, MatrixMut::new(&mut picked, own.len(), hidden));
            let mut result = take(device, output, "output", own.len() * hidden);
            let input = Matrix::new(&picked, own.len(), hidden);
            expert.apply(
                device,
                [&mut *gate, &mut *up, &mut *gated],
                input,
                result.reborrow(),
                false,
            );
            device.scatter_add_scaled(
                Matrix::new(&result, own.len(), hidden),
                own,
                factors,
                MatrixMut::new(&mut out, rows, hidden),
            );
        }
        if let Some(shared) = &self.shared {
            shared.apply(device, [gate, up, gated], input, out, true);
        }
    }
}
