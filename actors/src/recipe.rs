//! From `cluster.toml` and the verifier's files to everything that decides a run's weights.

use eaglet_runtime::checkpoint::ExportInfo;
use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::Contract;
use eaglet_runtime::device::Products;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::draft::{DraftSpec, TrainingSpec};
use eaglet_runtime::optimizer::AdamWSpec;
use eaglet_runtime::samples::{ChatTokenizer, TokenizerError};
use eaglet_runtime::verifier::{VerifierConfig, VerifierError, VerifierFiles};

use serde_json::Value;

use crate::config::{ClusterConfig, Collective, RankConfig, RestartsConfig, SamplesConfig, Schedule};
use crate::engine::{Fall, LearningRate, RestartPolicy, Settings};

/// Rows are extracted for at least so many steps, counting the one that is trained.
const PREFETCH_STEPS: u64 = 3;
/// A process that has not attached by then never will.
const ATTACH_TIMEOUT_MS: u64 = 30_000;
/// Linking up takes milliseconds.
const FORM_TIMEOUT_MS: u64 = 30_000;

/// NCCL looks at the machine and loads its kernels, which has been seen to take most of a minute.
pub(crate) const MEETING_TIMEOUT_MS: u64 = 120_000;
/// A state of tens of gigabytes over the slowest way between two GPUs.
pub(crate) const STATE_TIMEOUT_MS: u64 = 60_000;

/// Why a run cannot be made of a configuration.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// The verifier's files.
    #[error(transparent)]
    Verifier(#[from] VerifierError),
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// A value of `cluster.toml` does not fit the verifier.
    #[error("{key}: {what}")]
    Misfit {
        /// The key.
        key: &'static str,
        /// What is wrong and what to do.
        what: String,
    },
}

fn misfit(key: &'static str, what: impl Into<String>) -> RecipeError {
    RecipeError::Misfit {
        key,
        what: what.into(),
    }
}

/// What the hidden states of this cluster promise. Reads headers only.
///
/// # Errors
/// If the verifier or its tokenizer is unusable, or an aux layer does not exist.
pub fn contract(config: &ClusterConfig) -> Result<Contract, RecipeError> {
    let files = VerifierFiles::open(&config.verifier.path)?;
    let tokenizer = ChatTokenizer::load(&config.verifier.path)?;
    contract_of(config, &files, &tokenizer)
}

/// As [`contract`], for files that are open already.
///
/// # Errors
/// If an aux layer does not exist.
pub fn contract_of(
    config: &ClusterConfig,
    files: &VerifierFiles,
    tokenizer: &ChatTokenizer,
) -> Result<Contract, RecipeError> {
    let verifier = files.config();
    let aux_layers = aux_layers(config, verifier)?;
    Ok(Contract {
        verifier: files.digest(),
        aux_layers,
        hidden_size: verifier.hidden_size as u32,
        dtype: config.verifier.hidden_dtype,
        tokenizer: tokenizer.tokenizer_digest(),
        template: tokenizer.template_digest(),
    })
}

/// The layers whose input is captured.
///
/// # Errors
/// If one of them does not exist.
pub fn aux_layers(config: &ClusterConfig, verifier: &VerifierConfig) -> Result<Vec<u32>, RecipeError> {
    let ids = config
        .verifier
        .aux_layers
        .clone()
        .unwrap_or_else(|| verifier.default_aux_layers());
    if ids.iter().any(|&id| id == 0 || id as usize > verifier.layers) {
        let mut what = format!("{ids:?} names layers that are not among 1 to {}", verifier.layers);
        if ids.contains(&0) {
            what.push_str(
                "; an id names the layer whose input is captured: lists of SGLang and SpecForge, which begin at 0, are one less",
            );
        }
        return Err(misfit("verifier.aux_layers", what));
    }
    Ok(ids)
}

/// The draft's shape.
///
/// # Errors
/// If a size of the `draft` section does not fit the verifier.
pub fn draft_spec(
    config: &ClusterConfig,
    verifier: &VerifierConfig,
    aux_layers: usize,
) -> Result<DraftSpec, RecipeError> {
    let draft = &config.draft;
    let heads = draft.heads.unwrap_or(verifier.heads);
    let kv_heads = draft.kv_heads.unwrap_or(if draft.heads.is_some() {
        heads
    } else {
        verifier.kv_heads
    });
    let head_dim = draft.head_dim.unwrap_or(verifier.head_dim);
    let draft_vocab_size = draft.draft_vocab_size(verifier.vocab_size);
    if draft_vocab_size > verifier.vocab_size {
        return Err(misfit(
            "draft.vocab_size",
            format!(
                "{draft_vocab_size} exceeds the verifier's vocabulary of {}",
                verifier.vocab_size
            ),
        ));
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        return Err(misfit(
            "draft.kv_heads",
            format!("{kv_heads} does not divide the {heads} query heads"),
        ));
    }
    let mut rope = verifier.rope.clone();
    rope.dim = head_dim;
    Ok(DraftSpec {
        layer: draft.arch,
        hidden_size: verifier.hidden_size,
        intermediate_size: draft.intermediate_size.unwrap_or(verifier.intermediate_size),
        heads,
        kv_heads,
        head_dim,
        vocab_size: verifier.vocab_size,
        draft_vocab_size,
        aux_layers,
        rms_norm_eps: verifier.rms_norm_eps,
        rope,
        sliding_window: draft.window(),
        norm_before_residual: draft.norm_before_residual,
        norm_before_fc: draft.norm_before_fc,
        fc_norm: draft.fc_norm,
        norm_output: draft.norm_output,
    })
}

/// The objective.
pub fn training_spec(config: &ClusterConfig) -> TrainingSpec {
    TrainingSpec {
        ttt_steps: config.training.ttt_steps,
        step_loss_decay: config.training.step_loss_decay,
    }
}

/// The optimizer.
pub fn adamw(config: &ClusterConfig) -> AdamWSpec {
    let training = &config.training;
    AdamWSpec {
        beta1: training.beta1,
        beta2: training.beta2,
        epsilon: training.eps,
        weight_decay: training.weight_decay,
        clip_norm: (training.clip_norm > 0.0).then_some(training.clip_norm),
    }
}

/// The learning rate of each step.
pub fn learning_rate(config: &ClusterConfig) -> LearningRate {
    let training = &config.training;
    LearningRate {
        peak: training.learning_rate,
        warmup_ratio: training.warmup_ratio,
        fall: match training.schedule {
            Schedule::Linear => Fall::Linear,
            Schedule::Cosine => Fall::Cosine,
            Schedule::Constant => Fall::Constant {
                decay_ratio: training.decay_ratio,
            },
        },
    }
}

/// What a served draft's `config.json` says beyond its shape.
pub fn export_info(config: &ClusterConfig, verifier: &VerifierConfig, aux_layers: &[u32]) -> ExportInfo {
    ExportInfo {
        verifier_name_or_path: config.verifier.served_name(),
        verifier_architectures: vec![verifier.architecture.clone()],
        aux_layer_ids: aux_layers.to_vec(),
        ttt_steps: config.training.ttt_steps,
        max_position_embeddings: verifier
            .max_position_embeddings
            .unwrap_or(config.training.tokens_per_row),
        initializer_range: 0.02,
        bos_token_id: None,
        eos_token_ids: verifier.eos_token_ids.clone(),
        pad_token_id: None,
    }
}

/// The parts of a configuration that decide the weights: a run may go on under another name, on other devices or with
/// other deadlines or evaluations, but not with other mathematics or data.
fn decisive(config: &ClusterConfig) -> Result<Value, serde_json::Error> {
    // What only measures decides nothing.
    let mut training = config.training.clone();
    (training.evaluate_every_steps, training.max_new_tokens) = (0, 0);
    let mut training = serde_json::to_value(training)?;
    if let Some(training) = training.as_object_mut() {
        // Gradients have the same bits whichever way they take. Exact sums go without saying, as they always have.
        training.shift_remove("collective");
        if config.training.sums == SumMode::Exact {
            training.shift_remove("sums");
        }
    }
    let mut samples = config.samples.clone();
    samples.held_out_rows = 0;
    // How samples arrive decides nothing: which ones have come, and in which order, stands in the journal.
    let unset = SamplesConfig::default();
    (samples.watch, samples.follow, samples.open) = (unset.watch, unset.follow, unset.open);
    samples.poll_interval_ms = unset.poll_interval_ms;
    let mut verifier = serde_json::json!({ "aux_layers": config.verifier.aux_layers });
    if config.verifier.tensor > 1 {
        // Sums over slices have other bits. Stages have not, and whole layers go without saying, as they always have.
        verifier["tensor"] = config.verifier.tensor.into();
    }
    if config.verifier.sums != SumMode::Exact {
        verifier["sums"] = serde_json::to_value(config.verifier.sums)?;
    }
    // Products in f32 go without saying, too.
    let mut draft = serde_json::to_value(&config.draft)?;
    if let (Products::F32, Some(draft)) = (config.draft.products, draft.as_object_mut()) {
        draft.shift_remove("products");
    }
    if config.verifier.products != Products::F32 {
        verifier["products"] = serde_json::to_value(config.verifier.products)?;
    }
    Ok(serde_json::json!({
        "run": { "seed": config.run.seed },
        "verifier": verifier,
        "draft": draft,
        "training": training,
        "samples": serde_json::to_value(samples)?,
    }))
}

/// Digest of the parts of a configuration that decide the weights.
pub fn digest(config: &ClusterConfig) -> Digest {
    // Plain structs of numbers and texts; a path that is no UTF-8 has no digest and no second launch.
    let decisive = decisive(config)
        .map(|value| value.to_string())
        .unwrap_or_default();
    Digest::of(decisive.as_bytes())
}

/// Keys that decide the weights and differ between two configurations, as `section.key`.
pub fn differing_keys(one: &ClusterConfig, other: &ClusterConfig) -> Vec<String> {
    let (Ok(Value::Object(one)), Ok(other)) = (decisive(one), decisive(other)) else {
        return Vec::new();
    };
    let mut keys = Vec::new();
    for (section, values) in &one {
        let others = &other[section];
        let names = values.as_object().into_iter().chain(others.as_object());
        for key in names.flat_map(serde_json::Map::keys) {
            let name = format!("{section}.{key}");
            if values.get(key) != others.get(key) && !keys.contains(&name) {
                keys.push(name);
            }
        }
    }
    keys
}

/// What the engine must know.
pub fn settings(config: &ClusterConfig, contract: Contract) -> Settings {
    let supervision = &config.supervision;
    Settings {
        lanes: config.rows_per_step(),
        pipeline: config.verifier.pipeline,
        tensor: config.verifier.tensor,
        seats: config.ranks.iter().map(RankConfig::seat).collect(),
        open: config.samples.is_open(),
        contract,
        recipe: digest(config),
        sums: config.training.sums,
        slice_sums: config.verifier.sums,
        tokens_per_row: config.training.tokens_per_row as u32,
        passes: config.training.passes,
        step_limit: config.training.steps,
        prefetch_steps: prefetch_steps(config),
        evaluate_every_steps: config.training.evaluate_every_steps,
        held_out_rows: config.samples.held_out_rows,
        max_new_tokens: config.training.max_new_tokens,
        checkpoint_every_steps: config.checkpoints.every_steps,
        learning_rate: learning_rate(config),
        suspect_after_ms: supervision.suspect_after_ms,
        dead_after_ms: supervision.dead_after_ms,
        attach_timeout_ms: ATTACH_TIMEOUT_MS,
        load_timeout_ms: supervision.load_timeout_s * 1000,
        step_timeout_ms: supervision.step_timeout_s * 1000,
        leave_timeout_ms: supervision.drain_timeout_s * 1000,
        form_timeout_ms: match config.training.collective {
            Collective::Links => FORM_TIMEOUT_MS,
            Collective::Nccl => FORM_TIMEOUT_MS + MEETING_TIMEOUT_MS + STATE_TIMEOUT_MS,
        },
        team_timeout_ms: match config.verifier.collective {
            Collective::Links => FORM_TIMEOUT_MS,
            Collective::Nccl => FORM_TIMEOUT_MS + MEETING_TIMEOUT_MS,
        },
        hosts: config
            .ranks
            .iter()
            .filter(|rank| !rank.is_local())
            .map(|rank| (rank.seat(), rank.host.clone()))
            .collect(),
        host_timeout_ms: supervision.host_timeout_s * 1000,
        // The sink of an extraction has no state that a device could give.
        broadcasts_state: config.training.collective == Collective::Nccl && config.run.extract_to.is_none(),
        verifier_restarts: restarts(&config.verifier_restarts),
        draft_restarts: restarts(&config.draft_restarts),
    }
}

/// Far enough ahead that every stage of every verifier has a row, and one waits behind them.
pub(crate) fn prefetch_steps(config: &ClusterConfig) -> u64 {
    let replicas = config.verifier_seats().len() as u64 / u64::from(config.verifier.shards().max(1));
    let rows = replicas * (u64::from(config.verifier.pipeline) + 1);
    // The rows of the step that is trained are at the draft already.
    (1 + rows.div_ceil(u64::from(config.rows_per_step().max(1)))).max(PREFETCH_STEPS)
}

fn restarts(config: &RestartsConfig) -> RestartPolicy {
    RestartPolicy {
        max_restarts: config.max,
        window_ms: config.window_s * 1000,
        backoff_initial_ms: config.backoff_initial_ms,
        backoff_max_ms: config.backoff_max_ms,
        then: config.then,
    }
}
