//! The sections of `cluster.toml` as values. `keys` holds the same keys with their types and ranges.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::HiddenDtype;
use eaglet_runtime::device::Products;
use eaglet_runtime::draft::LayerKind;
use eaglet_runtime::hub::HubModel;
use eaglet_runtime::ids::{Role, Seat};
use serde::{Deserialize, Serialize};

use super::keys::is_name;
use crate::engine::WhenExhausted;

/// `[run]`: what the run is called and where it lives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// Name of the run: letters, digits, `.`, `_`, `-`. Required.
    pub name: String,
    /// Folder of journal, logs and checkpoints. Default `runs/<name>` beside the cluster file.
    pub directory: PathBuf,
    /// Seed of everything that is drawn at random. Default 0.
    pub seed: u64,
    /// Address on which the coordinator waits for its ranks; port 0 takes a free one. Default `127.0.0.1:0`.
    pub listen: SocketAddr,
    /// Folder that hidden states are written to instead of training on them; `eaglet extract` sets it. Default none.
    pub extract_to: Option<PathBuf>,
}

impl Default for RunConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            directory: PathBuf::new(),
            seed: 0,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            extract_to: None,
        }
    }
}

/// `[verifier]`: the model whose hidden states are learnt from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct VerifierConfig {
    /// Folder in the Hugging Face layout, GGUF file, or where there is neither, a model on the Hub: `OWNER/NAME` or
    /// `OWNER/NAME/FILE.gguf`. Required.
    pub path: PathBuf,
    /// Branch, tag or commit of a model on the Hub. Default `main`.
    pub revision: String,
    /// What checkpoints call the verifier, for those who serve them. Default: its name on the Hub, or its path.
    pub name: Option<String>,
    /// Layers whose *input* is captured, ascending. Default: 2, the middle one and the third from the end.
    pub aux_layers: Option<Vec<u32>>,
    /// Element type of hidden states in transit: `bf16` or `f32`. Default `bf16`.
    pub hidden_dtype: HiddenDtype,
    /// What operands of its products are rounded to: `f32`, nothing; or `bf16`, on GPUs and machines with AMX, and else a
    /// warning and nothing. Default `f32`.
    pub products: Products,
    /// Stages that its layers are cut into, one after the other, each on a rank of its own. The weights of the draft do not
    /// depend on it. Default 1.
    pub pipeline: u16,
    /// Slices that every layer is cut into, side by side, each on a rank of its own. Sums over slices have other bits than
    /// those of a whole layer, so a run directory belongs to one value. Default 1.
    pub tensor: u16,
    /// Which way the parts that slices have computed take to be summed: `links`, or `nccl`, if all verifier ranks are on GPUs.
    /// With exact sums the weights of the draft do not depend on it. Default `links`.
    pub collective: Collective,
    /// In which order slices are added: `exact`, their own; or `fast`, for `nccl`, whatever is fastest there: other bits, so a
    /// run directory belongs to one value. Default `exact`.
    pub sums: SumMode,
}

impl VerifierConfig {
    /// Ranks that hold one verifier.
    pub const fn shards(&self) -> u16 {
        self.pipeline.saturating_mul(self.tensor)
    }
}

impl Default for VerifierConfig {
    fn default() -> Self {
        Self {
            path: PathBuf::new(),
            revision: "main".to_owned(),
            name: None,
            aux_layers: None,
            hidden_dtype: HiddenDtype::Bf16,
            products: Products::F32,
            pipeline: 1,
            tensor: 1,
            collective: Collective::Links,
            sums: SumMode::Exact,
        }
    }
}

impl VerifierConfig {
    /// The model on the Hub that the path names; of a loaded configuration, only if nothing local is there.
    pub fn hub_model(&self) -> Option<HubModel> {
        HubModel::parse(self.path.to_str()?, &self.revision)
    }

    /// What checkpoints call the verifier.
    pub fn served_name(&self) -> String {
        let path = || self.path.display().to_string();
        self.name.clone().unwrap_or_else(path)
    }
}

/// `[draft]`: the shape of the draft. The switches default to what speculators' trainer writes and vLLM serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DraftConfig {
    /// Decoder layer: `llama` or `qwen3`. Default `llama`.
    pub arch: LayerKind,
    /// Tokens of the draft vocabulary; 0 is the verifier's whole vocabulary. Default 0.
    pub vocab_size: usize,
    /// Width of the MLP. Default: the verifier's.
    pub intermediate_size: Option<usize>,
    /// Query heads. Default: the verifier's.
    pub heads: Option<usize>,
    /// Key and value heads; they divide the query heads. Default: the verifier's.
    pub kv_heads: Option<usize>,
    /// Width of a head; even. Default: the verifier's.
    pub head_dim: Option<usize>,
    /// The residual is the normalised hidden state. Default true.
    pub norm_before_residual: bool,
    /// One RMS norm over all captured states before `fc`. Default true.
    pub norm_before_fc: bool,
    /// An RMS norm per captured state before `fc`; excludes `norm_before_fc`. Default false.
    pub fc_norm: bool,
    /// The state fed to the next TTT step is the normed one. Default true.
    pub norm_output: bool,
    /// Tokens that attention looks back; 0 is full attention. Default 2048.
    pub sliding_window: usize,
    /// What operands of its products are rounded to, in training too; as `verifier.products`. Weights, moments and gradients
    /// are f32 either way. Default `f32`.
    pub products: Products,
}

impl Default for DraftConfig {
    fn default() -> Self {
        Self {
            arch: LayerKind::Llama,
            vocab_size: 0,
            intermediate_size: None,
            heads: None,
            kv_heads: None,
            head_dim: None,
            norm_before_residual: true,
            norm_before_fc: true,
            fc_norm: false,
            norm_output: true,
            sliding_window: 2048,
            products: Products::F32,
        }
    }
}

impl DraftConfig {
    /// Tokens of the draft vocabulary for a verifier with `verifier_vocab_size` tokens.
    pub const fn draft_vocab_size(&self, verifier_vocab_size: usize) -> usize {
        if self.vocab_size == 0 {
            verifier_vocab_size
        } else {
            self.vocab_size
        }
    }

    /// Tokens that attention looks back; `None` is full attention.
    pub const fn window(&self) -> Option<usize> {
        if self.sliding_window == 0 {
            None
        } else {
            Some(self.sliding_window)
        }
    }
}

/// How the learning rate moves after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// Falls linearly to 0 at the last step.
    Linear,
    /// Falls along half a cosine to 0 at the last step.
    Cosine,
    /// Stays, and falls linearly to 0 over the last `decay_ratio` of the steps.
    Constant,
}

/// Which way what is to be summed takes from rank to rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Collective {
    /// The links between ranks, from host to host.
    #[default]
    Links,
    /// NCCL, from GPU to GPU.
    Nccl,
}

/// `[training]`: the objective and the optimizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainingConfig {
    /// TTT steps: how many tokens ahead the draft is unrolled in training. Default 3.
    pub ttt_steps: usize,
    /// Weight of TTT step k in the loss is this to the power k. Default 1.0.
    pub step_loss_decay: f64,
    /// Passes over the samples. Default 1.
    pub passes: u32,
    /// Optimizer steps after which training ends even if samples are left. Default: no cap.
    pub steps: Option<u64>,
    /// Tokens of a row. Default 2048.
    pub tokens_per_row: usize,
    /// Rows of each step: the batch is this many rows, however many draft ranks share them. It decides the weights; the
    /// number of draft ranks does not. Default: the number of draft ranks.
    pub rows_per_step: Option<u16>,
    /// Which way gradients take from draft rank to draft rank: `links`, or `nccl`, if all of them are on GPUs. With exact sums
    /// the weights do not depend on it, and a run may go on with the other one. Default `links`.
    pub collective: Collective,
    /// In which order the gradients of rows are added: `exact`, that of the rows, so that ranks may come, go and be replaced
    /// and every bit is the same; or `fast`, for `nccl`, in whatever order is fastest, so that bits depend on who was there.
    /// Default `exact`.
    pub sums: SumMode,
    /// Peak learning rate of AdamW. Default 1e-3: a draft is one layer that starts from random weights and sees
    /// thousands of steps, not millions; recipes that use 1e-4 train it for ten epochs. Clipping and warm-up keep it
    /// stable; take 1e-4 to continue a trained draft.
    pub learning_rate: f64,
    /// Decay of AdamW's first moment. Default 0.9.
    pub beta1: f64,
    /// Decay of AdamW's second moment. Default 0.999.
    pub beta2: f64,
    /// AdamW's epsilon. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay. Default 0.01.
    pub weight_decay: f64,
    /// Largest norm of the whole gradient; 0 does not clip. Default 1.0.
    pub clip_norm: f64,
    /// Course of the learning rate: `linear`, `cosine` or `constant`. Default `linear`.
    pub schedule: Schedule,
    /// Part of the steps over which the learning rate rises from 0. Default 0.01.
    pub warmup_ratio: f64,
    /// Part of the steps, at the end, over which a `constant` schedule falls to 0. Default 0.
    pub decay_ratio: f64,
    /// Steps between evaluations on held-out samples; 0 evaluates only at the end. Default 100.
    pub evaluate_every_steps: u64,
    /// Tokens decoded for each held-out answer when acceptance is measured. Default 128.
    pub max_new_tokens: usize,
}

impl Default for TrainingConfig {
    fn default() -> Self {
        Self {
            ttt_steps: 3,
            step_loss_decay: 1.0,
            passes: 1,
            steps: None,
            tokens_per_row: 2048,
            rows_per_step: None,
            collective: Collective::Links,
            sums: SumMode::Exact,
            learning_rate: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            clip_norm: 1.0,
            schedule: Schedule::Linear,
            warmup_ratio: 0.01,
            decay_ratio: 0.0,
            evaluate_every_steps: 100,
            max_new_tokens: 128,
        }
    }
}

/// What happens to a sample that is longer than a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TooLong {
    /// Its end is cut off.
    Truncate,
    /// It is put aside with a reason.
    Quarantine,
}

/// `[samples]`: what is trained on and what is held out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SamplesConfig {
    /// JSONL files of conversations, in training order. Required, unless `watch` names a folder.
    pub files: Vec<PathBuf>,
    /// Folders whose `.jsonl` and `.json` files are read as they appear, sorted by name; not their subfolders, and no file
    /// whose name begins with a dot. Implies `open`. Default none.
    pub watch: Vec<PathBuf>,
    /// Files may grow while they are read: what is appended to them is read, and a last line without its newline is left
    /// until it has one. Implies `open`. Default false.
    pub follow: bool,
    /// The run waits for more samples when all are trained. It ends by `eaglet samples close`, by `training.steps` or
    /// when it is stopped. Default false.
    pub open: bool,
    /// Time between two looks at watched folders and growing files, in ms. Default 1000.
    pub poll_interval_ms: u64,
    /// Folder with hidden states of the samples, from `eaglet extract` or speculators: they are read instead of computed.
    /// Default none.
    pub hidden_states: Option<PathBuf>,
    /// JSONL files that are only evaluated. Default none.
    pub held_out: Vec<PathBuf>,
    /// Without `held_out` files, every n-th sample is held out; 0 holds none out. Default 0.
    pub held_out_every: u64,
    /// Rows that are evaluated at most for each of `training.rows_per_step`. Default 4.
    pub held_out_rows: usize,
    /// Longest line that is read, in bytes; a longer one is quarantined. Default 16 MiB.
    pub max_line_bytes: usize,
    /// Samples with fewer trained tokens are quarantined. Default 1.
    pub min_trained_tokens: usize,
    /// A sample longer than a row: `truncate` or `quarantine`. Default `truncate`.
    pub too_long: TooLong,
}

impl Default for SamplesConfig {
    fn default() -> Self {
        Self {
            files: Vec::new(),
            watch: Vec::new(),
            follow: false,
            open: false,
            poll_interval_ms: 1000,
            hidden_states: None,
            held_out: Vec::new(),
            held_out_every: 0,
            held_out_rows: 4,
            max_line_bytes: 16 << 20,
            min_trained_tokens: 1,
            too_long: TooLong::Truncate,
        }
    }
}

impl SamplesConfig {
    /// Whether the run waits for more samples when all are trained.
    pub fn is_open(&self) -> bool {
        self.open || self.follow || !self.watch.is_empty()
    }

    /// `poll_interval_ms` as a duration.
    pub const fn poll_interval(&self) -> Duration {
        Duration::from_millis(self.poll_interval_ms)
    }
}

/// `[checkpoints]`: when training state is written.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointsConfig {
    /// Steps between checkpoints; 0 writes only the last one. Default 200.
    pub every_steps: u64,
    /// Checkpoints kept; older ones are removed. Default 2, so that one is whole while the next is written.
    pub keep: usize,
}

impl Default for CheckpointsConfig {
    fn default() -> Self {
        Self {
            every_steps: 200,
            keep: 2,
        }
    }
}

/// `[supervision]`: when a rank is given up and how it comes back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SupervisionConfig {
    /// Time between the beats of a rank, in ms. Default 100.
    pub beat_interval_ms: u64,
    /// Silence after which a rank gets no new work, in ms. Default 1000.
    pub suspect_after_ms: u64,
    /// Silence after which a rank is killed and replaced, in ms. Default 2000: beats have a thread of their own, and
    /// the longest stall seen on an overloaded machine (load 11 on 2 cores) was 1400 ms. A wrong guess costs one restart.
    pub dead_after_ms: u64,
    /// Silence of the coordinator after which a rank stops by itself, in ms. Default 5000.
    pub coordinator_lease_ms: u64,
    /// Time in which a rank has to load its weights, in s. Default 600.
    pub load_timeout_s: u64,
    /// Time in which a row has to be extracted, or a step computed, in s. Default 300.
    pub step_timeout_s: u64,
    /// Time that ranks get to leave in good order when the run is stopped, in s. Default 30.
    pub drain_timeout_s: u64,
    /// Time in which a host of `[[hosts]]` has to join, and to come back when it was lost, in s; then its ranks are given up
    /// until it does. Default 300.
    pub host_timeout_s: u64,
}

impl Default for SupervisionConfig {
    fn default() -> Self {
        Self {
            beat_interval_ms: 100,
            suspect_after_ms: 1000,
            dead_after_ms: 2000,
            coordinator_lease_ms: 5000,
            load_timeout_s: 600,
            step_timeout_s: 300,
            drain_timeout_s: 30,
            host_timeout_s: 300,
        }
    }
}

impl SupervisionConfig {
    /// `beat_interval_ms` as a duration.
    pub const fn beat_interval(&self) -> Duration {
        Duration::from_millis(self.beat_interval_ms)
    }

    /// `coordinator_lease_ms` as a duration.
    pub const fn coordinator_lease(&self) -> Duration {
        Duration::from_millis(self.coordinator_lease_ms)
    }
}

/// `[verifier_restarts]` and `[draft_restarts]`: when a lost rank comes back, and when it is given up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RestartsConfig {
    /// Restarts of one seat within `window_s`; at one more loss it is given up. Default 5.
    pub max: u32,
    /// Window in which restarts are counted, in s. Default 600.
    pub window_s: u64,
    /// Wait before the second restart within the window, doubled for each further one, in ms; the first comes at once,
    /// since most losses are single ones. Default 200.
    pub backoff_initial_ms: u64,
    /// Longest wait before a restart, in ms. Default 10000.
    pub backoff_max_ms: u64,
    /// What happens when a seat is given up: `continue` goes on with the other ranks of its role, if there are any, and
    /// to the same weights; `stop` ends the run with the first cause. Default `continue`.
    pub then: WhenExhausted,
}

impl Default for RestartsConfig {
    fn default() -> Self {
        Self {
            max: 5,
            window_s: 600,
            backoff_initial_ms: 200,
            backoff_max_ms: 10_000,
            then: WhenExhausted::Continue,
        }
    }
}

/// `[[hosts]]`: a further machine that ranks run on. `eaglet join` runs there for as long as the run does.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostConfig {
    /// What `ranks.host` calls it. Required.
    pub name: String,
    /// Address at which its ranks are reached by those of other hosts. Default: the one from which it reaches the
    /// coordinator.
    #[serde(default)]
    pub address: Option<IpAddr>,
    /// Words of a command that runs `eaglet` there, such as `["ssh", "node-b", "eaglet"]`; the coordinator appends
    /// `join …` and runs it. Default none: somebody else, such as Slurm, runs `eaglet join` there.
    #[serde(default)]
    pub start: Vec<String>,
}

impl HostConfig {
    /// Whether a host can have this name.
    pub fn is_name(text: &str) -> bool {
        is_name(text)
    }
}

/// `[[ranks]]`: one process of the cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankConfig {
    /// What it does: `verifier` or `draft`. Required.
    pub role: Role,
    /// Number of its seat within the role. Default: the lowest that no other rank of the role names. With P stages and T
    /// slices, verifier seats 0 to P·T - 1 hold one verifier, in the order of the stages; the next P·T another one.
    #[serde(default)]
    pub seat: u16,
    /// Where it computes: `cpu`, or `cuda:N`, the N-th GPU that the launch sees, from 0. Default `cpu`.
    #[serde(default = "cpu")]
    pub device: String,
    /// Machine it runs on: `local`, that of the coordinator, or the name of one of `[[hosts]]`. Default `local`.
    #[serde(default = "local")]
    pub host: String,
    /// CPU threads it computes with; 0 takes an even share of the machine's cores. Default 0. On a GPU they only help to
    /// load.
    #[serde(default)]
    pub threads: usize,
}

impl RankConfig {
    /// A rank on seat 0 of this machine's CPU.
    pub fn new(role: Role) -> Self {
        Self {
            role,
            seat: 0,
            device: cpu(),
            host: local(),
            threads: 0,
        }
    }

    /// Whether it runs on the coordinator's machine.
    pub fn is_local(&self) -> bool {
        self.host == LOCAL
    }

    /// The GPU that `device` names, if it names one.
    pub fn gpu(&self) -> Option<u16> {
        let number = self.device.strip_prefix("cuda:")?.parse().ok()?;
        // One name for one GPU: not `cuda:01`.
        (self.device == format!("cuda:{number}")).then_some(number)
    }

    /// The seat that the rank occupies.
    pub const fn seat(&self) -> Seat {
        Seat {
            role: self.role,
            index: self.seat,
        }
    }
}

fn cpu() -> String {
    "cpu".to_owned()
}

/// What the coordinator's machine is called.
pub const LOCAL: &str = "local";

fn local() -> String {
    LOCAL.to_owned()
}
