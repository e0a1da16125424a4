//! One replica of the draft: weights, moments, and what a step does to them. No messages, no threads of its own.

mod incoming;

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use eaglet_runtime::checkpoint::{
    self, CheckpointError, CheckpointFolder, DraftConfig, StateView, TrainingState,
};
use eaglet_runtime::collective::{BucketError, BucketPlan};
use eaglet_runtime::contract::Contract;
use eaglet_runtime::control::{Acceptance, LaneMetrics, StepMetrics};
use eaglet_runtime::cuda::Arrival;
use eaglet_runtime::device::{Buffer, Device, Floats, FloatsMut, Matrix, checksum};
use eaglet_runtime::digest::{Digest, Digester};
use eaglet_runtime::draft::{Draft, DraftBatch, DraftError, FrozenWeights, init_parameters};
use eaglet_runtime::ids::Step;
use eaglet_runtime::link::{BulkKind, StateKind, bytes_of_f32};
use eaglet_runtime::optimizer::{AdamW, LengthError};
use eaglet_runtime::row::HiddenRow;
use eaglet_runtime::samples::{DraftVocabulary, VocabularyError};
use eaglet_runtime::verifier::{FrozenParts, VerifierError};

pub use self::incoming::{IncomingState, WholeState};
use crate::config::ClusterConfig;
use crate::faults::{self, Point};
use crate::recipe::{self, RecipeError};

/// File of a checkpoint that a run resumes from.
pub const STATE_FILE: &str = "training_state.safetensors";
/// Elements of a state that travel in one message.
const PIECE_ELEMENTS: usize = 16 << 20;

/// Rows whose states wait on the device: the one that is computed, and the next.
const ROWS_AHEAD: usize = 2;

// Who holds memory of a device.
const PARAMETERS: &str = "parameters";
const FIRST_MOMENTS: &str = "first moments";
const SECOND_MOMENTS: &str = "second moments";
const GRADIENT: &str = "gradient";

/// Why a replica cannot be built, restored or saved.
#[derive(Debug, thiserror::Error)]
pub enum ReplicaError {
    /// The verifier's embedding, head or norm.
    #[error(transparent)]
    Verifier(#[from] VerifierError),
    /// The configuration.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// A part of the verifier that the draft computes with is no number.
    #[error("{path}: the verifier's {tensor} holds values that are not finite; download or convert it again")]
    NotFinite {
        /// The verifier.
        path: PathBuf,
        /// Which part.
        tensor: &'static str,
    },
    /// The draft itself.
    #[error(transparent)]
    Draft(#[from] DraftError),
    /// The draft vocabulary.
    #[error(transparent)]
    Vocabulary(#[from] VocabularyError),
    /// A checkpoint.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The optimizer.
    #[error(transparent)]
    Optimizer(#[from] LengthError),
    /// What a peer sent is not a state of this draft.
    #[error("the state that a peer sent {what}; both must run the same cluster.toml")]
    ForeignState {
        /// What is wrong with it.
        what: String,
    },
}

/// A replica of the draft on a device.
pub struct Replica<D> {
    draft: Draft<D>,
    device: Arc<D>,
    frozen: FrozenWeights,
    optimizer: AdamW,
    parameters: Buffer,
    /// The gradient of the last row, then the mean of the step.
    gradient: Buffer,
    /// Where gradients are on the host, while nobody has them.
    host_gradient: Vec<f32>,
    /// Rows whose states were sent to the device ahead, the last one first.
    sent: VecDeque<Arrival>,
    step: Step,
    digest: Digest,
    vocabulary: DraftVocabulary,
    contract: Contract,
    export: DraftConfig,
    tokens_per_row: usize,
}

impl<D: Device> Replica<D> {
    /// A replica without a meaningful state: one must be given to it next.
    ///
    /// # Errors
    /// If the verifier's files, the vocabulary or the configuration do not fit each other.
    pub fn build(
        config: &ClusterConfig,
        vocabulary: &[u32],
        contract: &Contract,
        device: D,
    ) -> Result<Self, ReplicaError> {
        let parts = FrozenParts::load(&config.verifier.path, vocabulary)?;
        let spec = recipe::draft_spec(config, &parts.config, contract.aux_layers.len())?;
        let vocabulary = DraftVocabulary::from_ids(vocabulary.to_vec(), spec.vocab_size)?;
        let info = recipe::export_info(config, &parts.config, &contract.aux_layers);
        let export = DraftConfig::new(spec.clone(), info).map_err(|error| RecipeError::Misfit {
            key: "draft",
            what: error.to_string(),
        })?;
        for (tensor, values) in [
            ("embedding", &parts.embedding),
            ("head", &parts.head_rows),
            ("final norm", &parts.final_norm),
        ] {
            if values.iter().any(|value| !value.is_finite()) {
                let path = config.verifier.path.clone();
                return Err(ReplicaError::NotFinite { path, tensor });
            }
        }
        let device = Arc::new(device);
        let head: Arc<[f32]> = parts.head_rows.into();
        let frozen = FrozenWeights {
            embed: parts.embedding.into(),
            verifier_head: Arc::clone(&head),
            verifier_norm: parts.final_norm.into(),
            verifier_norm_eps: parts.config.rms_norm_eps,
            lm_head: head,
        };
        let draft = Draft::new(
            spec,
            recipe::training_spec(config),
            frozen.clone(),
            Arc::clone(&device),
        )?;
        let length = draft.layout().len();
        Ok(Self {
            draft,
            frozen,
            optimizer: AdamW::new(recipe::adamw(config), &*device, length),
            parameters: device.place(vec![0.0; length].into(), PARAMETERS),
            gradient: Buffer::default(),
            host_gradient: Vec::new(),
            sent: VecDeque::new(),
            device,
            step: Step::default(),
            digest: Digest::default(),
            vocabulary,
            contract: contract.clone(),
            export,
            tokens_per_row: config.training.tokens_per_row,
        })
    }

    /// The buckets that its gradient is summed in over NCCL.
    ///
    /// # Errors
    /// If its layout contradicts itself.
    pub fn buckets(&self) -> Result<BucketPlan, BucketError> {
        let (layout, elements) = (self.draft.layout(), self.parameters.len());
        let bucket_elements = BucketPlan::bucket_elements_for(elements);
        BucketPlan::new(elements, &layout.final_order(), bucket_elements)
    }

    /// Takes the initial weights, a function of the seed.
    pub fn initialise(&mut self, seed: u64) {
        let parameters = init_parameters(self.draft.layout(), seed);
        let zeros = vec![0.0; parameters.len()];
        self.take(Step::default(), parameters, zeros.clone(), zeros);
    }

    /// Takes the state of a checkpoint.
    ///
    /// # Errors
    /// If the checkpoint is damaged or belongs to another draft.
    pub fn load(&mut self, folder: &Path) -> Result<(), ReplicaError> {
        let state = TrainingState::load(&folder.join(STATE_FILE), self.layout_digest())?;
        self.take(
            state.step,
            state.parameters,
            state.first_moment,
            state.second_moment,
        );
        Ok(())
    }

    fn take(&mut self, step: Step, parameters: Vec<f32>, first_moment: Vec<f32>, second_moment: Vec<f32>) {
        // One after the other, so that a device needs no room for two of them.
        for (vector, values, name) in [
            (&mut self.parameters, parameters, PARAMETERS),
            (&mut self.optimizer.m, first_moment, FIRST_MOMENTS),
            (&mut self.optimizer.v, second_moment, SECOND_MOMENTS),
        ] {
            *vector = Buffer::default();
            *vector = self.device.place(values.into(), name);
        }
        // Every step is one update.
        self.optimizer.updates = step.0;
        self.step = step;
        self.draft.parameters_changed();
        self.digest = self.compute_digest();
    }

    /// Weights and moments in pieces, to be sent to a peer.
    pub fn pieces(&self) -> Vec<(BulkKind, Bytes)> {
        let mut pieces = Vec::new();
        for (what, vector) in self.vectors() {
            let vector = &*self.on_host(vector);
            let digest = checksum(vector).into();
            let mut first = 0;
            // An empty vector still has one piece, so that its end is seen.
            loop {
                let end = (first + PIECE_ELEMENTS).min(vector.len());
                let kind = BulkKind::State {
                    step: self.step,
                    what,
                    digest,
                    elements: vector.len() as u64,
                    first_element: first as u64,
                };
                pieces.push((kind, bytes_of_f32(vector[first..end].to_vec())));
                first = end;
                if first == vector.len() {
                    break;
                }
            }
        }
        pieces
    }

    /// Takes the state that a peer sent piece by piece.
    ///
    /// # Errors
    /// If it belongs to a draft of another size.
    pub fn adopt(&mut self, state: WholeState) -> Result<(), ReplicaError> {
        let WholeState {
            step,
            weights,
            first_moments,
            second_moments,
        } = state;
        for vector in [&weights, &first_moments, &second_moments] {
            if vector.len() != self.parameters.len() {
                let what = format!(
                    "has {} elements instead of {}",
                    vector.len(),
                    self.parameters.len()
                );
                return Err(ReplicaError::ForeignState { what });
            }
        }
        self.take(step, weights, first_moments, second_moments);
        Ok(())
    }

    /// Weights, first and second moments, `[elements]` each, where they lie.
    pub fn state(&self) -> [Floats<'_>; 3] {
        self.vectors().map(|(_, vector)| vector.floats())
    }

    /// Weights, first and second moments, to be replaced piece by piece. What the replica holds is no state any more, until
    /// [`Self::adopt_written`].
    pub fn state_mut(&mut self) -> [FloatsMut<'_>; 3] {
        self.digest = Digest::default();
        let AdamW { m, v, .. } = &mut self.optimizer;
        [self.parameters.floats_mut(), m.floats_mut(), v.floats_mut()]
    }

    /// Takes what was written into [`Self::state_mut`] for the state of a step.
    ///
    /// # Errors
    /// If it has another digest than that state.
    pub fn adopt_written(&mut self, step: Step, state: Digest) -> Result<(), ReplicaError> {
        let written = self.compute_digest();
        if written != state {
            return Err(ReplicaError::ForeignState {
                what: format!("has the digest {written} instead of {state}"),
            });
        }
        // Every step is one update.
        self.optimizer.updates = step.0;
        self.step = step;
        self.digest = written;
        Ok(())
    }

    fn vectors(&self) -> [(StateKind, &Buffer); 3] {
        [
            (StateKind::Weights, &self.parameters),
            (StateKind::FirstMoments, &self.optimizer.m),
            (StateKind::SecondMoments, &self.optimizer.v),
        ]
    }

    /// A vector as a slice of the host's memory.
    fn on_host<'a>(&self, vector: &'a Buffer) -> Cow<'a, [f32]> {
        match vector.floats().as_host() {
            Some(values) => Cow::Borrowed(values),
            None => Cow::Owned(self.device.read(vector.floats())),
        }
    }

    /// Begins to bring the states of a row to the device, for a gradient that is computed soon. At most the rows that were
    /// sent last are kept; on the host nothing is to be done.
    pub fn send_ahead(&mut self, row: &HiddenRow) {
        if self.sent.iter().any(|arrival| arrival.is_of(&row.hidden)) {
            return;
        }
        if let Some(arrival) = self.device.send_ahead(&row.hidden) {
            self.sent.truncate(ROWS_AHEAD - 1);
            self.sent.push_front(arrival);
        }
    }

    /// A row as the draft trains on it, with its states on their way to the device if that is not the host.
    fn batch(&mut self, row: &HiddenRow) -> Result<DraftBatch, DraftError> {
        self.send_ahead(row);
        let known = self.sent.iter().position(|arrival| arrival.is_of(&row.hidden));
        match known.and_then(|place| self.sent.remove(place)) {
            Some(arrival) => DraftBatch::of_sent(row, arrival),
            None => DraftBatch::from_row(row),
        }
    }

    /// Makes room on the host for gradients that leave it: a vector of any contents; [`Self::stage`] takes it back.
    pub fn take_gradient(&mut self) -> Vec<f32> {
        let mut gradient = std::mem::take(&mut self.host_gradient);
        gradient.resize(self.parameters.len(), 0.0);
        gradient
    }

    /// Computes the gradient of a row; what was measured on the way. `on_final` as in [`Draft::gradient_with`], with the
    /// gradient where `home` says: on the host in that vector from [`Self::take_gradient`], or where the device computes.
    ///
    /// # Errors
    /// If the row does not fit the draft.
    pub fn gradient(
        &mut self,
        row: &HiddenRow,
        home: Option<&mut [f32]>,
        mut on_final: impl FnMut(Range<usize>, Floats<'_>) + Send,
    ) -> Result<LaneMetrics, ReplicaError> {
        let begun = Instant::now();
        let batch = self.batch(row)?;
        let (device, draft, parameters) = (&*self.device, &mut self.draft, &self.parameters);
        let metrics =
            match home {
                Some(home) if device.is_host() => draft.gradient_with(parameters, &batch, home, on_final)?,
                home => {
                    device.fit(&mut self.gradient, GRADIENT, parameters.len());
                    let mut home = home;
                    draft.gradient_with(parameters, &batch, &mut self.gradient, |part, floats| {
                        match &mut home {
                            Some(home) => {
                                let stretch = FloatsMut::from(&mut home[part.clone()]);
                                device.assign(stretch, floats.part(part.clone()));
                                on_final(part, Floats::from(&**home));
                            }
                            None => on_final(part, floats),
                        }
                    })?
                }
            };
        Ok(LaneMetrics {
            lane: 0,
            finite: metrics.loss.is_finite(),
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
        })
    }

    /// Whether a gradient has no infinite element and none that is no number: one on the host, or where the last one was
    /// computed.
    pub fn is_finite(&self, home: Option<&[f32]>) -> bool {
        let gradient = home.map_or_else(|| self.gradient.floats(), Floats::from);
        let len = gradient.len();
        self.device
            .seek_beyond(Matrix::new(gradient, 1, len), f32::MAX)
            .first()
            .is_none()
    }

    /// Damages the last gradient, for tests.
    pub fn damage(&mut self, home: Option<&mut [f32]>) {
        let gradient = home.map_or_else(|| self.gradient.floats_mut(), FloatsMut::from);
        if !gradient.is_empty() {
            self.device.fill(gradient.into_part(0..1), f32::NAN);
        }
    }

    /// Where a mean gradient is written by who forms it on the device; [`Self::stage`] takes it from there.
    pub fn gradient_room(&mut self) -> FloatsMut<'_> {
        self.device
            .fit(&mut self.gradient, GRADIENT, self.parameters.len());
        self.gradient.floats_mut()
    }

    /// Takes the mean gradient of a step: a vector from [`Self::take_gradient`], or what lies in [`Self::gradient_room`]. Its
    /// digest, and whether it is finite.
    pub fn stage(&mut self, mean: Option<Vec<f32>>) -> (Digest, bool) {
        match mean {
            Some(mean) if self.device.is_host() => self.gradient = mean.into(),
            Some(mean) => {
                let device = Arc::clone(&self.device);
                device.assign(self.gradient_room(), Floats::from(&mean));
                self.host_gradient = mean;
            }
            None => {}
        }
        (
            self.device.checksum(self.gradient.floats()).into(),
            self.is_finite(None),
        )
    }

    /// Applies the gradient that was staged: clips it to the global norm, then AdamW. The step is over.
    ///
    /// # Errors
    /// If there is none of the right length; nothing is changed then.
    pub fn apply(&mut self, learning_rate: f64) -> Result<(), ReplicaError> {
        let device = &*self.device;
        self.optimizer
            .update(device, &mut self.parameters, &self.gradient, learning_rate)?;
        if device.is_host() {
            self.host_gradient = std::mem::take(&mut self.gradient).into_vec();
        }
        self.step = self.step.next();
        self.draft.parameters_changed();
        self.digest = self.compute_digest();
        Ok(())
    }

    /// What it computes on.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Acceptance on a row of held-out answers that the verifier wrote itself.
    ///
    /// # Errors
    /// If the row does not fit the draft.
    pub fn evaluate(&mut self, row: &HiddenRow) -> Result<Acceptance, ReplicaError> {
        let mut total = Acceptance::default();
        for part in row.split(self.tokens_per_row) {
            let batch = self.batch(&part)?;
            let counts = self
                .draft
                .evaluate(&self.parameters, &batch, self.vocabulary.ids())?;
            total.add(&Acceptance {
                verifications: counts.verifications,
                accepted: counts.accepted,
                tried: counts.tried_at,
                accepted_at: counts.accepted_at,
            });
        }
        Ok(total)
    }

    /// Writes a checkpoint: what vLLM serves, and what the run resumes from. Of the older ones, `keep` minus one stay, and
    /// the one that is `recorded` in the journal.
    ///
    /// # Errors
    /// If the disk is full or read-only; nothing half-written is left.
    pub fn save(
        &self,
        checkpoints: &CheckpointFolder,
        keep: usize,
        recorded: Option<Step>,
    ) -> Result<PathBuf, ReplicaError> {
        let frozen = &self.frozen;
        let spec = self.draft.spec();
        let (vocab, draft_vocab, hidden) = (spec.vocab_size, spec.draft_vocab_size, spec.hidden_size);
        let embedding_shape = [vocab, hidden];
        let head_shape = [draft_vocab, hidden];
        let folder = checkpoints.write(self.step, |folder| {
            let parameters = self.on_host(&self.parameters);
            let trained = self.draft.layout().tensors().iter().map(|slot| {
                (
                    slot.name.as_str(),
                    slot.shape.as_slice(),
                    &parameters[slot.range.clone()],
                )
            });
            let fixed = [
                ("embed_tokens.weight", &embedding_shape[..], &frozen.embed[..]),
                ("lm_head.weight", &head_shape[..], &frozen.lm_head[..]),
            ];
            let (d2t, t2d) = (self.vocabulary.d2t(), self.vocabulary.t2d());
            checkpoint::export(folder, &self.export, trained.chain(fixed), Some(&d2t), Some(&t2d))?;
            faults::pass(Point::Saving, Some(self.step));
            let state = StateView {
                step: self.step,
                parameters: &parameters,
                first_moment: &self.on_host(&self.optimizer.m),
                second_moment: &self.on_host(&self.optimizer.v),
            };
            state.save(&folder.join(STATE_FILE), self.layout_digest())
        })?;
        // The one before stays in any case: a command that comes late or twice knows of an older record.
        if let Err(error) = checkpoints.prune(keep.max(2), recorded) {
            // The new checkpoint is whole; an old one too many is no reason to stop.
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
        Ok(folder)
    }

    /// Length of parameters and gradients.
    pub fn elements(&self) -> usize {
        self.parameters.len()
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
            self.draft
                .layout()
                .tensors()
                .iter()
                .map(|slot| (slot.name.as_str(), slot.shape.as_slice())),
        )
    }

    fn compute_digest(&self) -> Digest {
        let mut digester = Digester::new();
        for (_, vector) in self.vectors() {
            digester.part(&self.device.checksum(vector.floats()).to_le_bytes());
        }
        digester.finish()
    }
}
