//! Puts the plans of a cluster together: of what was read, and of what `cluster.toml` asks for.
//!
//! Files: `ranks` memory of ranks and hosts, `traffic` what travels between them, `pace` how fast it goes.

mod pace;
mod ranks;
mod traffic;

use eaglet_runtime::draft::{DraftSpec, LayerKind};
use eaglet_runtime::ids::Seat;
use eaglet_runtime::verifier::ShardCost;

pub(super) use self::pace::Rates;
use super::disk::{DiskPlan, Length};
use super::foundation::Foundation;
use super::layers::CapturedLayers;
use super::machine::{free_disk_bytes, used_disk_bytes};
use super::report::{DraftSummary, VerifierSummary};
use super::samples::SampleSurvey;
use super::shards::{ShardFiles, captured};
use super::supply::StepLoad;
use crate::config::ClusterConfig;

/// A cluster with what is known of it.
pub(super) struct Plan<'a> {
    config: &'a ClusterConfig,
    foundation: &'a Foundation,
    samples: Option<&'a SampleSurvey>,
    /// What each different part of the verifier costs, in the order of the seats.
    shards: Vec<(&'a ShardFiles, ShardCost)>,
    parameters: Option<u64>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(
        config: &'a ClusterConfig,
        foundation: &'a Foundation,
        samples: Option<&'a SampleSurvey>,
    ) -> Self {
        let mut plan = Self {
            config,
            foundation,
            samples,
            shards: Vec::new(),
            parameters: foundation.spec.as_ref().and_then(|spec| spec.parameters().ok()),
        };
        if let Some(verifier) = &foundation.verifier {
            let visible = plan.load().visible.round() as usize;
            let cost = |files: &'a ShardFiles| (files, verifier.shard_cost(files.shard, visible));
            plan.shards = foundation.shards.iter().map(cost).collect();
        }
        plan
    }

    /// What a typical step holds: what samples tell, else full rows of which everything is trained.
    fn load(&self) -> StepLoad {
        let lanes = u64::from(self.config.rows_per_step());
        let room = self.config.training.tokens_per_row as f64;
        match self.samples.filter(|samples| samples.samples > 0) {
            Some(samples) => StepLoad {
                lanes,
                tokens_per_row: samples.tokens_per_row,
                active_share: samples.active_share,
                visible: samples.visible_tokens,
            },
            None => StepLoad {
                lanes,
                tokens_per_row: room,
                active_share: 1.0,
                visible: room / 2.0,
            },
        }
    }

    /// The part of the verifier on a verifier seat, and what it costs.
    fn cost_of(&self, seat: u16) -> Option<&(&'a ShardFiles, ShardCost)> {
        let shard = self.config.shard_of(Seat::verifier(seat));
        self.shards.iter().find(|(files, _)| files.shard == shard)
    }

    /// Captured states per token that a part of the verifier hands out.
    fn captured(&self, files: &ShardFiles, cost: &ShardCost) -> u64 {
        let layers = self
            .foundation
            .verifier
            .as_ref()
            .map_or(0, |verifier| verifier.layers);
        let aux_layers = self.foundation.aux_layers.as_deref().unwrap_or_default();
        captured(files.shard, cost, aux_layers, layers)
    }

    /// The draft and the number of its trained parameters.
    fn spec(&self) -> Option<(&'a DraftSpec, u64)> {
        Some((self.foundation.spec.as_ref()?, self.parameters?))
    }

    /// Draft ranks.
    fn members(&self) -> u64 {
        self.config.draft_seats().len().max(1) as u64
    }

    /// Whole verifiers.
    fn replicas(&self) -> u64 {
        self.config.verifier_seats().len() as u64 / u64::from(self.config.verifier.shards().max(1))
    }

    /// Whether hidden states are read from files.
    fn reads_files(&self) -> bool {
        self.config.samples.hidden_states.is_some()
    }

    /// Whether hidden states are written to files.
    fn writes_files(&self) -> bool {
        self.config.run.extract_to.is_some()
    }

    /// Bytes of all captured states of one token.
    fn hidden_bytes_per_token(&self) -> Option<u64> {
        let states = self.foundation.aux_layers.as_ref()?.len() as u64 + 1;
        Some(states * self.state_bytes()?)
    }

    /// Bytes of one captured state of one token.
    fn state_bytes(&self) -> Option<u64> {
        let hidden = self.foundation.verifier.as_ref()?.hidden_size as u64;
        Some(hidden * self.config.verifier.hidden_dtype.bytes() as u64)
    }

    pub(super) fn verifier(&self) -> Option<VerifierSummary> {
        let config = self.foundation.verifier.as_ref()?;
        let sum = |of: fn(&ShardFiles) -> u64| self.shards.iter().map(|(files, _)| of(files)).sum();
        Some(VerifierSummary {
            path: self.config.verifier.path.clone(),
            model_type: config.model_type.clone(),
            layers: config.layers,
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            parameters: sum(|files| files.parameters),
            bytes: sum(|files| files.bytes),
            tensors: sum(|files| files.tensors),
        })
    }

    pub(super) fn draft(&self) -> Option<DraftSummary> {
        let (spec, parameters) = self.spec().filter(|_| !self.writes_files())?;
        Some(DraftSummary {
            arch: match spec.layer {
                LayerKind::Llama => "llama",
                LayerKind::Qwen3 => "qwen3",
            }
            .to_owned(),
            intermediate_size: spec.intermediate_size,
            heads: spec.heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim,
            vocab_size: spec.draft_vocab_size,
            parameters,
        })
    }

    pub(super) fn layers(&self) -> Option<CapturedLayers> {
        let config = self.foundation.verifier.as_ref()?;
        let ids = self.foundation.aux_layers.as_ref()?;
        Some(CapturedLayers::new(
            ids,
            config.layers as u32,
            &config.default_aux_layers(),
        ))
    }

    /// What is written; `free_bytes` is the room there is, if it is not to be looked up.
    pub(super) fn disk(&self, free_bytes: Option<u64>) -> Option<DiskPlan> {
        let directory = &self.config.run.directory;
        let length = self.samples.map_or(Length::default(), |samples| Length {
            steps: samples.steps,
            samples: samples.estimated_samples,
            tokens: samples.estimated_tokens,
        });
        let (place, checkpoint, hidden) = match &self.config.run.extract_to {
            Some(folder) => (folder, 0, self.hidden_bytes_per_token()?),
            None => {
                let (spec, parameters) = self.spec()?;
                (directory, DiskPlan::checkpoint_bytes(spec, parameters), 0)
            }
        };
        Some(DiskPlan {
            present_bytes: used_disk_bytes(place),
            free_bytes: free_bytes.or_else(|| free_disk_bytes(place)),
            ..DiskPlan::new(checkpoint, self.config.checkpoints.keep, hidden, length)
        })
    }
}
