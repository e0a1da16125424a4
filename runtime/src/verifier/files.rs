//! The files of a verifier: configuration and weights, and whether they fit each other.
//!
//! Nothing is computed and no tensor data are read here, so a verifier of any size is checked in moments.

use std::collections::HashSet;
use std::path::Path;

use super::error::LayoutProblem;
use super::{ConfigError, VerifierConfig, VerifierError};
use crate::digest::Digest;
use crate::model_files::{ModelFiles, ModelFilesError};
use crate::weights::{TensorView, Weights};

/// Name of the embedding, `[V, H]`.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
/// Name of the final norm's weight, `[H]`.
pub(super) const FINAL_NORM: &str = "model.norm.weight";
/// Name of the head, `[V, H]`, where it is not the embedding.
const HEAD: &str = "lm_head.weight";

/// Name of a tensor of a decoder layer.
pub(super) fn layer_tensor(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.{part}.weight")
}

/// Configuration and weights of a verifier.
#[derive(Clone, Debug)]
pub struct VerifierFiles {
    config: VerifierConfig,
    weights: Weights,
    digest: Digest,
}

impl VerifierFiles {
    /// Opens a folder or GGUF file; use [`Self::check`] before the weights are computed with.
    ///
    /// # Errors
    /// When the configuration is unusable or the weights' files are missing or damaged.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, VerifierError> {
        let files =
            ModelFiles::open(folder).map_err(|error| ConfigError::from(ModelFilesError::from(error)))?;
        let (config, config_bytes) = VerifierConfig::read_with_bytes(&files)?;
        let weights = files.weights()?;
        let digest = weights.digest(&config_bytes);
        Ok(Self {
            config,
            weights,
            digest,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &VerifierConfig {
        &self.config
    }

    /// The weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Digest of config.json and of the names, dtypes and shapes of all tensors.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// Checks that every tensor that the configuration needs is there, of the right shape and of a float dtype, and
    /// that no layer has a tensor that would be ignored.
    ///
    /// # Errors
    /// [`VerifierError::Unusable`] with all problems.
    pub fn check(&self) -> Result<(), VerifierError> {
        let expected = self.expected();
        let mut problems: Vec<LayoutProblem> = expected
            .iter()
            .filter_map(|(name, shape)| self.float(name, shape).err())
            .map(Into::into)
            .collect();
        let expected: HashSet<&str> = expected.iter().map(|(name, _)| name.as_str()).collect();
        for name in self
            .weights
            .names()
            .filter(|name| self.is_in_layer(name) && !expected.contains(name))
        {
            let file = self.weights.tensor(name)?.file().to_owned();
            let model_type = self.config.model_type.clone();
            problems.push(LayoutProblem::Unused {
                file,
                tensor: name.to_owned(),
                model_type,
            });
        }
        if problems.is_empty() {
            return Ok(());
        }
        Err(VerifierError::Unusable {
            folder: self.weights.folder().to_owned(),
            problems,
        })
    }

    /// Whether a tensor belongs to a layer that is computed. Old files carry rotary tables, which are harmless.
    fn is_in_layer(&self, name: &str) -> bool {
        name.strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'))
            .and_then(|(layer, part)| Some((layer.parse::<usize>().ok()?, part)))
            .is_some_and(|(layer, part)| layer < self.config.layers && !part.ends_with("rotary_emb.inv_freq"))
    }

    /// Names and shapes of all tensors that are computed with.
    fn expected(&self) -> Vec<(String, Vec<usize>)> {
        let config = &self.config;
        let hidden = config.hidden_size;
        let (queries, keys) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        let layer: [(&str, Vec<usize>); 9] = [
            ("input_layernorm", vec![hidden]),
            ("self_attn.q_proj", vec![queries, hidden]),
            ("self_attn.k_proj", vec![keys, hidden]),
            ("self_attn.v_proj", vec![keys, hidden]),
            ("self_attn.o_proj", vec![hidden, queries]),
            ("post_attention_layernorm", vec![hidden]),
            ("mlp.gate_proj", vec![config.intermediate_size, hidden]),
            ("mlp.up_proj", vec![config.intermediate_size, hidden]),
            ("mlp.down_proj", vec![hidden, config.intermediate_size]),
        ];
        let mut expected = vec![
            (EMBEDDING.to_owned(), vec![config.vocab_size, hidden]),
            (FINAL_NORM.to_owned(), vec![hidden]),
        ];
        if !config.tied_embeddings {
            expected.push((HEAD.to_owned(), vec![config.vocab_size, hidden]));
        }
        for index in 0..config.layers {
            expected.extend(
                layer
                    .iter()
                    .map(|(part, shape)| (layer_tensor(index, part), shape.clone())),
            );
        }
        expected
    }

    /// A float tensor of a shape.
    pub(super) fn float(
        &self,
        name: &str,
        shape: &[usize],
    ) -> Result<TensorView, crate::weights::WeightsError> {
        self.weights
            .tensor(name)?
            .expect_shape(shape)?
            .expect_unpackable()
    }

    /// The embedding, `[V, H]`.
    pub(super) fn embedding(&self) -> Result<TensorView, crate::weights::WeightsError> {
        self.float(EMBEDDING, &[self.config.vocab_size, self.config.hidden_size])
    }

    /// The head, `[V, H]`: the embedding where they are tied.
    pub(super) fn head(&self) -> Result<TensorView, crate::weights::WeightsError> {
        let name = if self.config.tied_embeddings {
            EMBEDDING
        } else {
            HEAD
        };
        self.float(name, &[self.config.vocab_size, self.config.hidden_size])
    }

    /// The final norm's weight, `[H]` in f32.
    pub(super) fn final_norm(&self) -> Result<Vec<f32>, crate::weights::WeightsError> {
        Ok(self
            .float(FINAL_NORM, &[self.config.hidden_size])?
            .to_f32()?
            .into_owned())
    }
}
