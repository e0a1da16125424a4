//! From names and shapes to the tensors of a shard, and everything that is wrong with them.
//!
//! LOADER-1: what a shard needs is said once, where its parts are made; checking and listing are the same walk as loading.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use safetensors::Dtype;

use super::error::LayoutProblem;
use super::linear::{Linear, Stored};
use super::stored::{Form, MXFP4_GROUP};
use super::{Shard, VerifierConfig};
use crate::device::Buffer;
use crate::weights::{TensorView, Weights, WeightsError};

/// A tensor that a shard needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Need {
    /// Its name.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// Bytes of it that the shard reads, as they are stored.
    pub bytes: u64,
    /// Parameters in these bytes; scales count none.
    pub parameters: u64,
}

/// Hands out the tensors of a shard, and remembers what was asked for and what was wrong.
pub(super) struct Loader<'a> {
    weights: &'a Weights,
    config: &'a VerifierConfig,
    names: &'a Names,
    shard: Shard,
    needs: RefCell<BTreeMap<String, Need>>,
    /// Tensors that belong to the layers of this shard, whichever slice has them.
    known: RefCell<BTreeSet<String>>,
    problems: RefCell<Vec<LayoutProblem>>,
}

/// What comes before the names that all families share.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Names {
    /// Before `embed_tokens`, `layers` and `norm`.
    base: &'static str,
    /// Of the head's weight.
    head: &'static str,
}

/// The spellings there are: a plain model, one inside a model that also sees (of two generations), and a bare decoder.
const SPELLINGS: [Names; 4] = [
    Names {
        base: "model.",
        head: "lm_head.weight",
    },
    Names {
        base: "language_model.model.",
        head: "language_model.lm_head.weight",
    },
    Names {
        base: "model.language_model.",
        head: "lm_head.weight",
    },
    Names {
        base: "",
        head: "lm_head.weight",
    },
];

impl Names {
    /// The spelling of these weights: the one whose embedding is there, else the plain one.
    pub(super) fn of(weights: &Weights) -> Self {
        let found = SPELLINGS
            .iter()
            .find(|names| weights.contains(&names.embedding()));
        found.unwrap_or(&SPELLINGS[0]).clone()
    }

    /// Name of the embedding, `[V, H]`.
    pub(super) fn embedding(&self) -> String {
        format!("{}embed_tokens.weight", self.base)
    }

    /// Name of the final norm's weight, `[H]`.
    pub(super) fn final_norm(&self) -> String {
        format!("{}norm.weight", self.base)
    }

    /// Name of the head, `[V, H]`, where it is not the embedding.
    pub(super) fn head(&self) -> &'static str {
        self.head
    }

    /// Which layer a tensor belongs to.
    pub(super) fn layer_of(&self, tensor: &str) -> Option<usize> {
        let rest = tensor.strip_prefix(self.base)?.strip_prefix("layers.")?;
        rest.split_once('.')?.0.parse().ok()
    }
}

impl<'a> Loader<'a> {
    pub(super) fn new(
        weights: &'a Weights,
        config: &'a VerifierConfig,
        names: &'a Names,
        shard: Shard,
    ) -> Self {
        Self {
            weights,
            config,
            names,
            shard,
            needs: RefCell::default(),
            known: RefCell::default(),
            problems: RefCell::default(),
        }
    }

    /// The configuration.
    pub(super) fn config(&self) -> &'a VerifierConfig {
        self.config
    }

    /// The spelling of names.
    pub(super) fn names(&self) -> &'a Names {
        self.names
    }

    /// The loader of one layer's tensors.
    pub(super) fn layer(&self, index: usize) -> LayerLoader<'_, 'a> {
        LayerLoader {
            loader: self,
            prefix: format!("{}layers.{index}.", self.names.base),
        }
    }

    /// Everything that was asked for, and everything that was wrong.
    pub(super) fn finish(self) -> (Vec<Need>, BTreeSet<String>, Vec<LayoutProblem>) {
        (
            self.needs.into_inner().into_values().collect(),
            self.known.into_inner(),
            self.problems.into_inner(),
        )
    }

    fn note(&self, problem: impl Into<LayoutProblem>) {
        self.problems.borrow_mut().push(problem.into());
    }

    /// Notes that a slice cannot be cut as asked.
    pub(super) fn uncut(&self, reason: String) {
        let problem = LayoutProblem::Slices {
            slices: self.shard.slices,
            reason,
        };
        let mut problems = self.problems.borrow_mut();
        if !problems
            .iter()
            .any(|known| known.to_string() == problem.to_string())
        {
            problems.push(problem);
        }
    }

    fn know(&self, name: &str) {
        self.known.borrow_mut().insert(name.to_owned());
    }

    fn need(&self, view: &TensorView, share: f64, parameters: u64) {
        let bytes = (view.bytes().len() as f64 * share).round() as u64;
        let mut needs = self.needs.borrow_mut();
        let need = needs.entry(view.name().to_owned()).or_insert_with(|| Need {
            name: view.name().to_owned(),
            shape: view.shape().to_vec(),
            bytes: 0,
            parameters: 0,
        });
        // Embedding and head may be one tensor, which is read once.
        need.bytes = need.bytes.max(bytes);
        need.parameters = need.parameters.max(parameters);
    }

    /// A tensor of a shape, or `None` with the problem noted.
    fn view(&self, name: &str, shape: &[usize]) -> Option<TensorView> {
        self.know(name);
        let view = self
            .weights
            .tensor(name)
            .and_then(|view| view.expect_shape(shape));
        view.map_err(|problem| self.note(problem)).ok()
    }

    fn float(&self, name: &str, shape: &[usize]) -> Option<TensorView> {
        let view = self.view(name, shape)?.expect_unpackable();
        view.map_err(|problem| self.note(problem)).ok()
    }

    fn of_dtype(&self, name: &str, shape: &[usize], dtype: Dtype) -> Option<TensorView> {
        let view = self.view(name, shape)?;
        if view.dtype() == Some(dtype) {
            return Some(view);
        }
        self.note(WeightsError::UnsupportedEncoding {
            file: view.file().to_owned(),
            tensor: view.name().to_owned(),
            encoding: view.encoding(),
        });
        None
    }

    /// A vector `[len]` in f32; empty if it is missing, since nothing is computed then.
    pub(super) fn vector(&self, name: &str, len: usize) -> Vec<f32> {
        let read = self.float(name, &[len]).and_then(|view| {
            self.need(&view, 1.0, len as u64);
            let values = view.to_f32().map(|values| values.into_owned());
            values.map_err(|problem| self.note(problem)).ok()
        });
        read.unwrap_or_default()
    }

    /// The effective weight of a norm, `[len]`.
    pub(super) fn norm(&self, name: &str, len: usize) -> Vec<f32> {
        let mut weight = self.vector(name, len);
        for weight in &mut weight {
            *weight += self.config.norm_offset;
        }
        weight
    }

    /// A matrix `[rows, cols]` in any form; `share` of it is what this shard reads.
    pub(super) fn matrix(&self, name: &str, rows: usize, cols: usize, share: f64) -> Stored {
        let form = self.form(name, rows, cols, share);
        Stored::new(form.unwrap_or(Form::Missing), rows, cols)
    }

    fn form(&self, name: &str, rows: usize, cols: usize, share: f64) -> Option<Form> {
        let parameters = (rows as f64 * cols as f64 * share).round() as u64;
        if self.weights.contains(&format!("{name}_packed")) {
            return self.packed_form(name, rows, cols, share, parameters);
        }
        let is_fp8 = |view: TensorView| view.dtype() == Some(Dtype::F8_E4M3);
        if self.weights.tensor(name).is_ok_and(is_fp8) {
            return self.fp8_form(name, rows, cols, share, parameters);
        }
        let view = self.float(name, &[rows, cols])?;
        self.need(&view, share, parameters);
        Some(Form::Plain(view))
    }

    fn packed_form(&self, name: &str, rows: usize, cols: usize, share: f64, parameters: u64) -> Option<Form> {
        let bits = self.config.packed_bits;
        // It says the shape before packing, which the configuration says too.
        self.know(&format!("{name}_shape"));
        let words = (cols * bits).div_ceil(32);
        let packed = self.of_dtype(&format!("{name}_packed"), &[rows, words], Dtype::I32);
        let scale_name = format!("{name}_scale");
        self.know(&scale_name);
        let scales = self.weights.tensor(&scale_name);
        let scales = scales
            .and_then(TensorView::expect_unpackable)
            .map_err(|problem| self.note(problem))
            .ok()?;
        let groups = scales.row_len().max(1);
        let group = cols.div_ceil(groups);
        let scales = scales
            .expect_shape(&[rows, groups])
            .map_err(|problem| self.note(problem))
            .ok()?;
        let packed = packed?;
        self.need(&packed, share, parameters);
        self.need(&scales, share, 0);
        Some(Form::Packed {
            packed,
            scales,
            bits,
            group,
        })
    }

    fn fp8_form(&self, name: &str, rows: usize, cols: usize, share: f64, parameters: u64) -> Option<Form> {
        let bytes = self.view(name, &[rows, cols]);
        let [inverse, plain] = ["_scale_inv", "_scale"].map(|suffix| format!("{name}{suffix}"));
        let scale_name = if self.weights.contains(&plain) {
            plain
        } else {
            inverse
        };
        self.know(&scale_name);
        let scales = self
            .weights
            .tensor(&scale_name)
            .map_err(|problem| self.note(problem))
            .ok()?;
        let [block_rows, block_cols] = self.config.fp8_block.unwrap_or([128, 128]);
        // One scale, one a row, or one a block.
        let (scale_rows, scale_cols, block) = match scales.shape() {
            [] | [1] | [1, 1] => (1, 1, [rows, cols]),
            [n] | [n, 1] if *n == rows && rows > 1 => (rows, 1, [1, cols]),
            _ => (
                rows.div_ceil(block_rows),
                cols.div_ceil(block_cols),
                [block_rows, block_cols],
            ),
        };
        let shape = if scales.shape().len() == 2 || scale_cols > 1 || scale_rows > 1 && block[0] > 1 {
            vec![scale_rows, scale_cols]
        } else {
            scales.shape().to_vec()
        };
        let scales = self.float(&scale_name, &shape)?;
        let values = scales
            .to_f32()
            .map_err(|problem| self.note(problem))
            .ok()?
            .into_owned();
        let bytes = bytes?;
        self.need(&bytes, share, parameters);
        self.need(&scales, share, 0);
        Some(Form::Fp8 {
            bytes,
            scales: values,
            scale_cols,
            block,
        })
    }
}

/// [`Loader`] for the tensors of one layer, by the rest of their names.
pub(super) struct LayerLoader<'l, 'a> {
    loader: &'l Loader<'a>,
    prefix: String,
}

impl LayerLoader<'_, '_> {
    /// The shard that is loaded.
    pub(super) fn shard(&self) -> Shard {
        self.loader.shard
    }

    /// Notes that a slice cannot be cut as asked.
    pub(super) fn uncut(&self, reason: String) {
        self.loader.uncut(reason);
    }

    fn name(&self, part: &str) -> String {
        format!("{}{part}", self.prefix)
    }

    /// The effective weight of a norm, `[len]`.
    pub(super) fn norm(&self, part: &str, len: usize) -> Buffer {
        self.loader
            .norm(&self.name(&format!("{part}.weight")), len)
            .into()
    }

    /// A vector `[len]`.
    pub(super) fn vector(&self, part: &str, len: usize) -> Vec<f32> {
        self.loader.vector(&self.name(part), len)
    }

    /// The bias of a projection, or its part.
    fn bias(&self, part: &str, len: usize, range: Range<usize>) -> Vec<f32> {
        let whole = self.vector(&format!("{part}.bias"), len);
        whole.get(range).unwrap_or_default().to_vec()
    }

    /// A whole projection `[outputs, inputs]`.
    pub(super) fn whole(&self, part: &str, outputs: usize, inputs: usize, bias: bool) -> Linear {
        self.outputs(part, outputs, inputs, 0..outputs, bias)
    }

    /// Some outputs of a projection, with their bias.
    pub(super) fn outputs(
        &self,
        part: &str,
        outputs: usize,
        inputs: usize,
        range: Range<usize>,
        bias: bool,
    ) -> Linear {
        let share = range.len() as f64 / outputs.max(1) as f64;
        let stored = self.matrix(part, outputs, inputs, share);
        let bias = bias.then(|| self.bias(part, outputs, range.clone()));
        stored.part(range, 0..inputs).with_bias(bias)
    }

    /// Some inputs of a projection. The slices' results are summed, so only the first one adds the bias.
    pub(super) fn inputs(
        &self,
        part: &str,
        outputs: usize,
        inputs: usize,
        range: Range<usize>,
        bias: bool,
    ) -> Linear {
        let share = range.len() as f64 / inputs.max(1) as f64;
        let stored = self.matrix(part, outputs, inputs, share);
        let bias = bias.then(|| self.bias(part, outputs, 0..outputs));
        stored
            .part(0..outputs, range)
            .with_bias(bias.filter(|_| self.shard().slice == 0))
    }

    /// A projection of which the caller takes parts; `share` of it is what this shard reads.
    pub(super) fn matrix(&self, part: &str, outputs: usize, inputs: usize, share: f64) -> Stored {
        let name = self.name(&format!("{part}.weight"));
        self.loader.matrix(&name, outputs, inputs, share)
    }

    /// Notes the tensors of a projection that another slice has.
    pub(super) fn elsewhere(&self, part: &str, bias: bool) {
        let name = self.name(part);
        for suffix in ["", "_packed", "_scale", "_scale_inv", "_shape"] {
            self.loader.know(&format!("{name}.weight{suffix}"));
        }
        if bias {
            self.loader.know(&format!("{name}.bias"));
        }
    }

    /// One matrix `[outputs, inputs]` for each of `experts`, of which `range` is taken: a tensor `[experts, inputs,
    /// outputs]`, or MXFP4 blocks `[experts, outputs, groups, 16]`.
    pub(super) fn together(
        &self,
        part: &str,
        experts: usize,
        outputs: usize,
        inputs: usize,
        range: Range<usize>,
    ) -> Vec<Stored> {
        let loader = self.loader;
        let name = self.name(part);
        let share = range.len() as f64 / experts.max(1) as f64;
        let parameters = (range.len() * outputs * inputs) as u64;
        let missing = || {
            range
                .clone()
                .map(|_| Stored::new(Form::Missing, outputs, inputs))
                .collect()
        };
        if !loader.weights.contains(&format!("{name}_blocks")) {
            let Some(view) = loader.float(&name, &[experts, inputs, outputs]) else {
                return missing();
            };
            loader.need(&view, share, parameters);
            let parts: Vec<TensorView> = view.parts().collect();
            return parts[range]
                .iter()
                .map(|part| Stored::new(Form::Transposed(part.clone()), outputs, inputs))
                .collect();
        }
        let groups = inputs.div_ceil(MXFP4_GROUP);
        let blocks = loader.of_dtype(
            &format!("{name}_blocks"),
            &[experts, outputs, groups, MXFP4_GROUP / 2],
            Dtype::U8,
        );
        let scales = loader.of_dtype(&format!("{name}_scales"), &[experts, outputs, groups], Dtype::U8);
        let (Some(blocks), Some(scales)) = (blocks, scales) else {
            return missing();
        };
        if !inputs.is_multiple_of(MXFP4_GROUP) {
            loader.note(WeightsError::WrongShape {
                file: blocks.file().to_owned(),
                tensor: blocks.name().to_owned(),
                expected: vec![experts, outputs, inputs],
                actual: vec![experts, outputs, groups * MXFP4_GROUP],
            });
            return missing();
        }
        loader.need(&blocks, share, parameters);
        loader.need(&scales, share, 0);
        let (blocks, scales): (Vec<_>, Vec<_>) = (blocks.parts().collect(), scales.parts().collect());
        blocks[range.clone()]
            .iter()
            .zip(&scales[range])
            .map(|(blocks, scales)| {
                let form = Form::Mxfp4 {
                    blocks: blocks.clone(),
                    scales: scales.clone(),
                };
                Stored::new(form, outputs, inputs)
            })
            .collect()
    }

    /// One bias `[len]` for each of `experts`, of which `range` is taken.
    pub(super) fn biases_together(
        &self,
        part: &str,
        experts: usize,
        len: usize,
        range: Range<usize>,
    ) -> Vec<Vec<f32>> {
        let read = self
            .loader
            .float(&self.name(part), &[experts, len])
            .and_then(|view| {
                self.loader.need(&view, 1.0, (experts * len) as u64);
                let rows = view.rows_f32(range.clone());
                rows.map_err(|problem| self.loader.note(problem)).ok()
            });
        match read {
            Some(values) => values.chunks_exact(len.max(1)).map(<[f32]>::to_vec).collect(),
            None => vec![Vec::new(); range.len()],
        }
    }
}
