//! One replica of the draft: weights, moments, and what a step does to them. No messages, no threads of its own.

use std::path::{Path, PathBuf};
use std::time::Instant;

use bytes::Bytes;
use eaglet_runtime::checkpoint::{self, CheckpointError, CheckpointFolder, DraftConfig, StateView, TrainingState};
use eaglet_runtime::contract::Contract;
use eaglet_runtime::control::{Acceptance, SeatMetrics, StepMetrics};
use eaglet_runtime::device::Cpu;
use eaglet_runtime::digest::{Digest, Digester};
use eaglet_runtime::draft::{Draft, DraftBatch, DraftError, FrozenWeights, ParameterLayout, init_parameters};
use eaglet_runtime::ids::Step;
use eaglet_runtime::link::PooledBuffer;
use eaglet_runtime::optimizer::{AdamW, clip_global_norm};
use eaglet_runtime::row::HiddenRow;
use eaglet_runtime::samples::{DraftVocabulary, VocabularyError};
use eaglet_runtime::verifier::{FrozenParts, VerifierError};

use crate::config::ClusterConfig;
use crate::recipe::{self, RecipeError};

/// File of a checkpoint that a run resumes from.
pub const STATE_FILE: &str = "training_state.safetensors";

/// Why a replica cannot be built, restored or saved.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The verifier's embedding, head or norm.
    #[error(transparent)]
    Verifier(#[from] VerifierError),
    /// The configuration.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// The draft itself.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The draft vocabulary.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The device.
    #[error(transparent)]
    Threads(#[from] eaglet_runtime::device::ThreadsError),
    /// What a peer sent is not a state of this draft.
    #[error("the state that a peer sent {what}; both must run the same cluster.toml")]
    ForeignState {
        /// What is wrong with it.
        what: String,
    },
}

/// A replica of the draft.
pub struct Replica {
    draft: Draft<Cpu>,
    device: Cpu,
    layout: ParameterLayout,
    optimizer: AdamW,
    parameters: Vec<f32>,
    gradient: Vec<f32>,
    step: Step,
    digest: Digest,
    vocabulary: DraftVocabulary,
    contract: Contract,
    export: DraftConfig,
    clip_norm: f64,
    tokens_per_row: usize,
}

impl Replica {
    /// A replica without a meaningful state: one must be given to it next.
    ///
    /// # Errors
    /// If the verifier's files, the vocabulary or the configuration do not fit each other.
    pub fn build(
        config: &ClusterConfig,
        vocabulary: &[u32],
        contract: &Contract,
        threads: usize,
    ) -> Result<Self, ReplicaError> {
        let parts = FrozenParts::load(&config.verifier.path, vocabulary)?;
        let spec = recipe::draft_spec(config, &parts.config, contract.aux_layers.len())?;
        let vocabulary = DraftVocabulary::from_ids(vocabulary.to_vec(), spec.vocab_size)?;
        let info = recipe::export_info(config, &parts.config, &contract.aux_layers);
        let export = DraftConfig::new(spec.clone(), info).map_err(|error| RecipeError::Misfit {
            key: "draft",
            what: error.to_string(),
        })?;
        let device = Cpu::new(threads)?;
        let frozen = FrozenWeights::shared_head(
            parts.embedding,
            parts.head_rows,
            parts.final_norm,
            parts.config.rms_norm_eps,
        );
        let layout = ParameterLayout::new(&spec);
        let length = layout.len();
        let draft = Draft::new(spec, recipe::training_spec(config), frozen, device.clone())?;
        Ok(Self {
            draft,
            device,
            optimizer: AdamW::new(recipe::adamw(config), length),
            parameters: vec![0.0; length],
            gradient: vec![0.0; length],
            layout,
            step: Step::default(),
            digest: Digest::default(),
            vocabulary,
            contract: contract.clone(),
            export,
            clip_norm: config.training.clip_norm,
            tokens_per_row: config.training.tokens_per_row,
        })
    }

    /// Takes the initial weights, a function of the seed.
    pub fn initialise(&mut self, seed: u64) {
        self.parameters = init_parameters(self.draft.spec(), &self.layout, seed);
        self.optimizer.reset();
        self.step = Step::default();
        self.digest = self.compute_digest();
    }

    /// Takes the state of a checkpoint.
    ///
    /// # Errors
    /// If the checkpoint is damaged or belongs to another draft.
    pub fn load(&mut self, folder: &Path) -> Result<(), ReplicaError> {
        let state = TrainingState::load(&folder.join(STATE_FILE), self.layout_digest())?;
        self.parameters = state.parameters;
        self.optimizer.restore(state.first_moment, state.second_moment, state.step.0);
        self.step = state.step;
        self.digest = self.compute_digest();
        Ok(())
    }

    /// Weights and moments, to be sent to a peer.
    pub fn state(&self) -> Vec<Bytes> {
        [&self.parameters[..], self.optimizer.first_moment(), self.optimizer.second_moment()]
            .map(|vector| Bytes::copy_from_slice(bytemuck::cast_slice(vector)))
            .to_vec()
    }

    /// Takes the state that a peer sent.
    ///
    /// # Errors
    /// If it has another size, or not the digest that the peer announced.
    pub fn restore(&mut self, step: Step, digest: Digest, parts: &[PooledBuffer]) -> Result<(), ReplicaError> {
        let [parameters, first, second] = parts else {
            return Err(ReplicaError::ForeignState { what: format!("has {} parts instead of 3", parts.len()) });
        };
        let expected = self.parameters.len() * 4;
        for part in [parameters, first, second] {
            if part.len() != expected {
                let what = format!("has a part of {} bytes instead of {expected}", part.len());
                return Err(ReplicaError::ForeignState { what });
            }
        }
        self.parameters = floats(parameters);
        self.optimizer.restore(floats(first), floats(second), step.0);
        self.step = step;
        self.digest = self.compute_digest();
        if self.digest != digest {
            return Err(ReplicaError::ForeignState { what: "has another digest than announced".to_owned() });
        }
        Ok(())
    }

    /// The gradient of a row, or zeros without one, and what was measured on the way.
    ///
    /// # Errors
    /// If the row does not fit the draft.
    pub fn gradient(&mut self, row: Option<&HiddenRow>) -> Result<(Vec<f32>, SeatMetrics), ReplicaError> {
        let begun = Instant::now();
        let mut gradient = std::mem::take(&mut self.gradient);
        gradient.resize(self.parameters.len(), 0.0);
        let Some(row) = row else {
            gradient.fill(0.0);
            return Ok((gradient, SeatMetrics::default()));
        };
        let batch = DraftBatch::from_row(row)?;
        let metrics = self.draft.gradient(&self.parameters, &batch, &mut gradient)?;
        let metrics = SeatMetrics {
            loss: metrics.loss,
            ttt: metrics
                .steps
                .iter()
                .map(|step| StepMetrics {
                    loss: step.loss,
                    full_correct: step.full_correct,
                    full_total: step.full_total,
                    conditional_correct: step.cond_correct,
                    conditional_total: step.cond_total,
                })
                .collect(),
            tokens: row.row.len() as u64,
            trained_tokens: metrics.masked_tokens as u64,
            compute_ms: begun.elapsed().as_millis() as u64,
        };
        Ok((gradient, metrics))
    }

    /// Applies a reduced gradient: clips it to the global norm, then AdamW. The step is over.
    pub fn apply(&mut self, mut gradient: Vec<f32>, learning_rate: f64) {
        clip_global_norm(&self.device, &mut gradient, self.clip_norm);
        self.optimizer.apply(&self.device, &mut self.parameters, &gradient, learning_rate);
        self.gradient = gradient;
        self.step = self.step.next();
        self.digest = self.compute_digest();
    }

    /// Acceptance on a row of held-out answers that the verifier wrote itself.
    ///
    /// # Errors
    /// If the row does not fit the draft.
    pub fn evaluate(&mut self, row: &HiddenRow) -> Result<Acceptance, ReplicaError> {
        let mut total = Acceptance::default();
        for part in row.split(self.tokens_per_row) {
            let batch = DraftBatch::from_row(&part)?;
            let counts = self.draft.evaluate(&self.parameters, &batch, self.vocabulary.ids())?;
            total.add(&Acceptance {
                verifications: counts.verifications,
                accepted: counts.accepted,
                tried: counts.tried,
                accepted_at: counts.accepted_at,
            });
        }
        Ok(total)
    }

    /// Writes a checkpoint: what vLLM serves, and what the run resumes from.
    ///
    /// # Errors
    /// If the disk is full or read-only; nothing half-written is left.
    pub fn save(&self, checkpoints: &CheckpointFolder, keep: usize) -> Result<PathBuf, ReplicaError> {
        let frozen = self.draft.frozen();
        let spec = self.draft.spec();
        let (vocab, draft_vocab, hidden) = (spec.vocab_size, spec.draft_vocab_size, spec.hidden_size);
        let embedding_shape = [vocab, hidden];
        let head_shape = [draft_vocab, hidden];
        let folder = checkpoints.write(self.step, |folder| {
            let trained = self
                .layout
                .entries()
                .iter()
                .map(|entry| (entry.name.as_str(), entry.shape.as_slice(), &self.parameters[entry.range()]));
            let fixed = [
                ("embed_tokens.weight", &embedding_shape[..], frozen.embedding()),
                ("lm_head.weight", &head_shape[..], frozen.lm_head()),
            ];
            let (d2t, t2d) = (self.vocabulary.d2t(), self.vocabulary.t2d());
            checkpoint::export(folder, &self.export, trained.chain(fixed), Some(&d2t), Some(&t2d))?;
            let state = StateView {
                step: self.step,
                parameters: &self.parameters,
                first_moment: self.optimizer.first_moment(),
                second_moment: self.optimizer.second_moment(),
            };
            state.save(&folder.join(STATE_FILE), self.layout_digest())
        })?;
        if let Err(error) = checkpoints.prune(keep) {
            // The new checkpoint is whole; an old one too many is no reason to stop.
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
        Ok(folder)
    }

    /// The step that the state has reached.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Digest of weights and moments.
    pub fn digest(&self) -> Digest {
        self.digest
    }

    /// What hidden states must promise.
    pub fn contract(&self) -> &Contract {
        &self.contract
    }

    fn layout_digest(&self) -> Digest {
        checkpoint::layout_digest(
            self.layout.entries().iter().map(|entry| (entry.name.as_str(), entry.shape.as_slice())),
        )
    }

    fn compute_digest(&self) -> Digest {
        let mut digester = Digester::new();
        for vector in [&self.parameters[..], self.optimizer.first_moment(), self.optimizer.second_moment()] {
            digester.part(bytemuck::cast_slice(vector));
        }
        digester.finish()
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
