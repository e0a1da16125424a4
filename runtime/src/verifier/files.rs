//! The files of a verifier: configuration and weights, and whether they fit each other.
//!
//! Nothing is computed and no tensor data are read here, so a verifier of any size is checked in moments.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;

use super::decoder::Decoder;
use super::error::LayoutProblem;
use super::loader::{Loader, Names, Need};
use super::{ConfigError, Shard, VerifierConfig, VerifierError};
use crate::digest::Digest;
use crate::model_files::{ModelFiles, ModelFilesError};
use crate::weights::{TensorView, Weights, WeightsError};

/// What files of some trainers carry in a layer and nothing needs: rotary tables, and scales of cached keys and values.
const HARMLESS: [&str; 4] = ["rotary_emb.inv_freq", "k_scale", "v_scale", "input_scale"];

/// Configuration and weights of a verifier.
#[derive(Clone, Debug)]
pub struct VerifierFiles {
    config: VerifierConfig,
    weights: Weights,
    names: Names,
    digest: Digest,
}

impl VerifierFiles {
    /// Opens a folder or GGUF file; nothing is said yet about the tensors in them.
    ///
    /// # Errors
    /// When the configuration is unusable or the weights' files are missing or damaged.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, VerifierError> {
        let (files, problems) = Self::survey(folder)?;
        problems
            .into_iter()
            .next()
            .map_or(Ok(files), |problem| Err(problem.into()))
    }

    /// As [`Self::open`], for whoever goes on with what can be used: what is wrong with single files is returned beside the
    /// rest. The digest is then that of the rest.
    ///
    /// # Errors
    /// When there is nothing to go on with.
    pub fn survey(folder: impl AsRef<Path>) -> Result<(Self, Vec<WeightsError>), VerifierError> {
        let files =
            ModelFiles::open(folder).map_err(|error| ConfigError::from(ModelFilesError::from(error)))?;
        let (config, config_bytes) = VerifierConfig::read_with_bytes(&files)?;
        let (weights, problems) = files.survey_weights()?;
        let digest = weights.digest(&config_bytes);
        let survey = Self {
            config,
            names: Names::of(&weights),
            weights,
            digest,
        };
        Ok((survey, problems))
    }

    /// As [`Self::open`], but shards may be missing, and with them tensors: a draft needs few of them.
    ///
    /// # Errors
    /// When the configuration is unusable, the index of shards is missing, or a file is damaged.
    pub(super) fn open_present(folder: &Path) -> Result<Self, VerifierError> {
        let (files, problems) = Self::survey(folder)?;
        problems
            .into_iter()
            .find(|problem| !matches!(problem, WeightsError::ShardMissing { .. }))
            .map_or(Ok(files), |problem| Err(problem.into()))
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

    /// The spelling of tensors' names.
    pub(super) fn names(&self) -> &Names {
        &self.names
    }

    /// Every tensor that a shard reads, and everything that keeps the shard from being computed: tensors that are missing,
    /// of another shape or in a form that cannot be unpacked, tensors of its layers that would be ignored, and slices that
    /// cannot be cut.
    pub fn inspect(&self, shard: Shard) -> (Vec<Need>, Vec<LayoutProblem>) {
        let built = Decoder::build(self, shard);
        (built.needs, built.problems)
    }

    /// The first half of [`Self::inspect`].
    pub fn needs(&self, shard: Shard) -> Vec<Need> {
        self.inspect(shard).0
    }

    /// The second half of [`Self::inspect`].
    pub fn problems(&self, shard: Shard) -> Vec<LayoutProblem> {
        self.inspect(shard).1
    }

    /// Checks that the whole verifier can be computed.
    ///
    /// # Errors
    /// [`VerifierError::Unusable`] with all of [`Self::problems`].
    pub fn check(&self) -> Result<(), VerifierError> {
        self.decoder(Shard::WHOLE).map(drop)
    }

    /// The decoder of a shard, to be looked at only: it may have problems.
    pub(super) fn any_decoder(&self, shard: Shard) -> Decoder {
        Decoder::build(self, shard).decoder
    }

    /// The decoder of a shard.
    ///
    /// # Errors
    /// [`VerifierError::Unusable`] with all problems.
    pub(super) fn decoder(&self, shard: Shard) -> Result<Decoder, VerifierError> {
        let built = Decoder::build(self, shard);
        if built.problems.is_empty() {
            return Ok(built.decoder);
        }
        Err(VerifierError::Unusable {
            folder: self.weights.folder().to_owned(),
            problems: built.problems,
        })
    }

    /// The tensors of some layers that are not among the `known` ones and would be ignored.
    pub(super) fn unused<'a>(
        &'a self,
        layers: &'a Range<usize>,
        known: &'a BTreeSet<String>,
    ) -> impl Iterator<Item = LayoutProblem> + 'a {
        let of_layers = |name: &str| {
            self.names
                .layer_of(name)
                .is_some_and(|layer| layers.contains(&layer))
        };
        self.weights
            .names()
            .filter(move |name| of_layers(name) && !known.contains(*name))
            .filter(|name| !HARMLESS.iter().any(|suffix| name.ends_with(suffix)))
            .filter_map(|name| {
                Some(LayoutProblem::Unused {
                    file: self.weights.tensor(name).ok()?.file().to_owned(),
                    tensor: name.to_owned(),
                    model_type: self.config.model_type.clone(),
                })
            })
    }

    fn float(&self, name: &str, shape: &[usize]) -> Result<TensorView, WeightsError> {
        self.weights
            .tensor(name)?
            .expect_shape(shape)?
            .expect_unpackable()
    }

    /// The embedding, `[V, H]`, as it is stored: before the factor that some families apply.
    pub(super) fn embedding(&self) -> Result<TensorView, WeightsError> {
        let shape = [self.config.vocab_size, self.config.hidden_size];
        self.float(&self.names.embedding(), &shape)
    }

    /// The head, `[V, H]`: the embedding where they are tied.
    pub(super) fn head(&self) -> Result<TensorView, WeightsError> {
        if self.config.tied_embeddings {
            return self.embedding();
        }
        let shape = [self.config.vocab_size, self.config.hidden_size];
        self.float(self.names.head(), &shape)
    }

    /// What the final norm multiplies by, `[H]` in f32.
    pub(super) fn final_norm(&self) -> Result<Vec<f32>, WeightsError> {
        let name = self.names.final_norm();
        self.float(&name, &[self.config.hidden_size])?;
        let loader = Loader::new(&self.weights, &self.config, &self.names, Shard::WHOLE);
        Ok(loader.norm(&name, self.config.hidden_size))
    }
}
