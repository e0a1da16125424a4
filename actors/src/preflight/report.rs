//! What `eaglet check` has found, as data. The names of fields are stable; fields may be added.

use std::path::PathBuf;

use eaglet_runtime::ids::Role;
use serde::Serialize;

use super::collective::NcclSummary;
use super::disk::DiskPlan;
use super::finding::{Finding, Severity};
use super::gpus::GpuPlan;
use super::layers::CapturedLayers;
use super::links::LinkPlan;
use super::memory::{HostMemory, MemoryPart};
use super::samples::SampleSurvey;
use super::supply::SupplyPlan;
use super::vocabulary::VocabularySurvey;

/// Version of the report.
pub const REPORT_FORMAT: u32 = 1;

/// The verifier, as its files describe it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct VerifierSummary {
    /// Where it is.
    pub path: PathBuf,
    /// Its family.
    pub model_type: String,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Tokens of its vocabulary.
    pub vocab_size: usize,
    /// Parameters that are computed with.
    pub parameters: u64,
    /// Their bytes as they are stored, scales included.
    pub bytes: u64,
    /// Tensors that are computed with.
    pub tensors: u64,
}

/// The draft, as it will be trained.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DraftSummary {
    /// Decoder layer: `llama` or `qwen3`.
    pub arch: String,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Tokens that it can propose.
    pub vocab_size: usize,
    /// Parameters that are trained.
    pub parameters: u64,
}

/// The part of a verifier that a rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ShardPlan {
    /// Which verifier, from 0.
    pub replica: u16,
    /// Which stage of its layers, from 0.
    pub stage: u16,
    /// Stages.
    pub stages: u16,
    /// Which slice of each layer, from 0.
    pub slice: u16,
    /// Slices.
    pub slices: u16,
    /// The first layer.
    pub first_layer: usize,
    /// The layer behind the last.
    pub end_layer: usize,
}

/// A rank: what it holds and what memory it needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankPlan {
    /// Its seat.
    pub seat: String,
    /// What it does.
    pub role: Role,
    /// Machine.
    pub host: String,
    /// Device.
    pub device: String,
    /// CPU threads.
    pub threads: usize,
    /// Part of the verifier; absent for draft ranks, and for those that read hidden states from files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shard: Option<ShardPlan>,
    /// Parameters: those of the verifier's part, or those that are trained.
    pub parameters: u64,
    /// Tensors of the verifier that it reads.
    pub tensors: u64,
    /// Tensors that it would read and that lie in files which are missing or damaged; they count nowhere.
    pub missing_tensors: u64,
    /// Memory in parts.
    pub memory: Vec<MemoryPart>,
    /// All of it.
    pub memory_bytes: u64,
    /// Memory of its GPU in parts, if it computes on one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gpu_memory: Vec<MemoryPart>,
}

/// Everything that is known before anything is started.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Version of this report.
    pub format: u32,
    /// The cluster file.
    pub cluster: String,
    /// Name of the run.
    pub run: String,
    /// Its directory.
    pub directory: PathBuf,
    /// Whether a launch would go well.
    pub ok: bool,
    /// What keeps it from that.
    pub problems: Vec<Finding>,
    /// What may give something else than was wanted.
    pub warnings: Vec<Finding>,
    /// The verifier.
    pub verifier: Option<VerifierSummary>,
    /// The draft.
    pub draft: Option<DraftSummary>,
    /// Captured layers.
    pub layers: Option<CapturedLayers>,
    /// Ranks, verifiers first.
    pub ranks: Vec<RankPlan>,
    /// Memory of hosts.
    pub hosts: Vec<HostMemory>,
    /// GPUs that ranks compute on.
    pub gpus: Vec<GpuPlan>,
    /// The NCCL that is summed with, if one is.
    pub nccl: Option<NcclSummary>,
    /// What is written.
    pub disk: Option<DiskPlan>,
    /// What travels.
    pub links: Vec<LinkPlan>,
    /// What the first samples are.
    pub samples: Option<SampleSurvey>,
    /// What the draft's vocabulary covers.
    pub vocabulary: Option<VocabularySurvey>,
    /// Supply against demand.
    pub supply: Option<SupplyPlan>,
}

impl Report {
    /// Sorts findings into problems and warnings; fatal ones first.
    pub(crate) fn settle(&mut self, mut findings: Vec<Finding>) {
        findings.sort_by_key(|finding| finding.severity);
        (self.warnings, self.problems) = findings
            .into_iter()
            .partition(|finding| finding.severity == Severity::Warning);
        self.ok = self.problems.is_empty();
    }
}
