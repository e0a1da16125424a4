//! Everything that can be known of a cluster before it is launched, without weights, without a GPU, in seconds.
//!
//! [`check`] looks at all of it and reports; [`ready`] is its cheap part that a launch begins with, so that what a launch
//! refuses is what a check has told. Nothing here changes a file.
//!
//! Invariants:
//! - CHECK-1: all problems are told at once; what depends on a value that could not be read is left out, not guessed.
//! - CHECK-2: each finding names the place where it can be mended and the remedy.
//! - CHECK-3: a launch refuses nothing that a check of the same moment has passed.
//!
//! Files: `foundation` the verifier's files, tokenizer and draft; `directory` the run directory; `layers`, `shards`,
//! `memory`, `links`, `disk`, `supply` the plans, pure; `collective` NCCL; `gpus` the GPUs of ranks and what fits on them;
//! `samples`, `vocabulary` what the first samples tell; `plan` puts
//! the plans together; `report` the result as data.

mod collective;
mod directory;
mod disk;
mod finding;
mod foundation;
mod gpus;
mod layers;
mod links;
mod machine;
mod memory;
mod plan;
mod report;
mod samples;
mod shards;
mod supply;
mod units;
mod vocabulary;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::Duration;

use eaglet_runtime::contract::Contract;
use eaglet_runtime::control::transport::TransportError;
use eaglet_runtime::device::{Cpu, ProductRates};
use eaglet_runtime::hidden_files::{HiddenFiles, HiddenWriter};
use eaglet_runtime::ids::{Role, Seat};
use eaglet_runtime::samples::ChatTokenizer;
use eaglet_runtime::verifier::VerifierFiles;

pub use self::collective::NcclSummary;
pub use self::directory::DirectoryError;
pub(crate) use self::directory::{engine, refuse_orphans};
pub use self::disk::DiskPlan;
use self::finding::Findings;
pub use self::finding::{Finding, Severity, Topic};
use self::foundation::Foundation;
pub use self::gpus::{GpuPlan, GpuTenant};
pub use self::layers::{CapturedLayers, LayerDoubt};
pub use self::links::{Cargo, LinkPlan, Per};
pub use self::machine::Machine;
use self::memory::Shortage;
pub use self::memory::{HostMemory, MemoryPart, Use};
use self::plan::Plan;
pub use self::report::{DraftSummary, REPORT_FORMAT, RankPlan, Report, ShardPlan, VerifierSummary};
use self::samples::Reader;
pub use self::samples::{Refusal, SampleBudget, SampleSurvey};
pub use self::supply::{SideSpeed, Speed, SpeedSource, SupplyPlan, Waiting};
pub use self::units::{prefixed, size};
pub(crate) use self::vocabulary::ENOUGH_COVERAGE;
pub use self::vocabulary::VocabularySurvey;
use crate::config::{ClusterConfig, Survey};
use crate::gpus::{Place, PlacedGpu};
use crate::rank::STATES_FOLDER;
use crate::{coordinator, recipe};

/// Time in which the speed of products is measured.
const CALIBRATION: Duration = Duration::from_millis(300);
/// Sections whose values decide memory, disk and time: while one of them cannot be read there is nothing to plan.
const PLANNED_SECTIONS: [&str; 5] = ["verifier", "draft", "training", "checkpoints", "ranks"];
/// More refused rows and answers than this share are worth a warning.
const MANY_REFUSED: f64 = 0.1;
/// More cut samples than this share are worth a warning.
const MANY_TRUNCATED: f64 = 0.25;

/// How a cluster is checked.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// The machine that each host of the cluster is.
    pub machine: Machine,
    /// Floating-point operations per second of a rank; measured if it is not given.
    pub flops_per_s: Option<f64>,
    /// Free room on the disk of the run directory; looked up if it is not given.
    pub free_disk_bytes: Option<u64>,
    /// How many samples are read.
    pub samples: SampleBudget,
    /// The verifier's weights are on the Hub and may not be here yet; a launch fetches them.
    pub weights_come_later: bool,
}

impl CheckOptions {
    /// This machine, and enough samples to see what they are.
    pub fn here() -> Self {
        Self {
            machine: Machine::here(),
            flops_per_s: None,
            free_disk_bytes: None,
            samples: SampleBudget {
                rows: 1024,
                time: Duration::from_secs(5),
            },
            weights_come_later: false,
        }
    }
}

/// What a launch needs of what was looked at.
pub struct Ready {
    /// The configuration.
    pub config: ClusterConfig,
    /// The verifier's files, whole and fitting.
    pub files: VerifierFiles,
    /// Its tokenizer.
    pub tokenizer: ChatTokenizer,
    /// What hidden states promise.
    pub contract: Contract,
    /// How ranks on GPUs are started.
    pub places: BTreeMap<Seat, Place>,
    /// What people should be told.
    pub warnings: Vec<Finding>,
}

/// Looks at what is cheap and decides whether a cluster can be launched: configuration, headers, tokenizer, memory, disk,
/// run directory and port.
///
/// # Errors
/// All that a launch refuses, and with it what else was found.
pub fn ready(survey: Survey, machine: Machine) -> Result<Ready, Vec<Finding>> {
    let mut findings = Findings::new(&survey);
    let foundation = Foundation::look(&mut findings, false);
    look_around(&foundation, &mut findings);
    let gpus = gpus::look(&mut findings);
    collective::look(&mut findings);
    if is_planned(&survey) {
        let plan = Plan::new(&survey.config, &foundation, None);
        look_at_memory(&plan.hosts(machine), &mut findings);
        let ranks = plan.ranks(machine);
        gpus::look_at_memory(&gpus::plan(&survey.config, &gpus, &ranks), &ranks, &mut findings);
        if let Some(disk) = plan.disk(None) {
            look_at_disk(&disk, &mut findings);
        }
    }
    let is_refused = findings.has_fatal();
    let findings = findings.into_vec();
    let Foundation {
        files: Some(files),
        tokenizer: Some(tokenizer),
        contract: Some(contract),
        ..
    } = foundation
    else {
        return Err(refusals(findings));
    };
    if is_refused {
        return Err(refusals(findings));
    }
    Ok(Ready {
        places: places(&survey.config, &gpus),
        config: survey.config,
        files,
        tokenizer,
        contract,
        warnings: findings,
    })
}

/// How ranks on GPUs are started.
fn places(config: &ClusterConfig, gpus: &BTreeMap<u16, PlacedGpu>) -> BTreeMap<Seat, Place> {
    let place = |rank| gpus.get(&config.gpu_of(rank)?).map(|gpu| gpu.place.clone());
    config
        .ranks
        .iter()
        .filter(|rank| rank.is_local())
        .filter_map(|rank| Some((rank.seat(), place(rank)?)))
        .collect()
}

/// What a launch refuses.
fn refusals(findings: Vec<Finding>) -> Vec<Finding> {
    findings
        .into_iter()
        .filter(|finding| finding.severity == Severity::Fatal)
        .collect()
}

/// Looks at everything.
pub fn check(survey: &Survey, cluster: &str, options: &CheckOptions) -> Report {
    let config = &survey.config;
    let mut findings = Findings::new(survey);
    let foundation = Foundation::look(&mut findings, options.weights_come_later);
    look_around(&foundation, &mut findings);
    let gpus = gpus::look(&mut findings);
    let nccl = collective::look(&mut findings);
    let samples = look_at_samples(&foundation, options.samples, &mut findings);
    let vocabulary = samples
        .as_ref()
        .and_then(|samples| look_at_vocabulary(&foundation, samples, &mut findings));
    let mut report = Report {
        format: REPORT_FORMAT,
        cluster: cluster.to_owned(),
        run: config.run.name.clone(),
        directory: config.run.directory.clone(),
        ok: true,
        problems: Vec::new(),
        warnings: Vec::new(),
        verifier: None,
        draft: None,
        layers: None,
        ranks: Vec::new(),
        hosts: Vec::new(),
        gpus: Vec::new(),
        nccl,
        disk: None,
        links: Vec::new(),
        samples: None,
        vocabulary,
        supply: None,
    };
    if is_planned(survey) {
        let plan = Plan::new(config, &foundation, samples.as_ref());
        report.verifier = plan.verifier();
        report.draft = plan.draft();
        report.layers = plan.layers();
        report.ranks = plan.ranks(options.machine);
        report.hosts = plan.hosts(options.machine);
        look_at_memory(&report.hosts, &mut findings);
        report.gpus = gpus::plan(config, &gpus, &report.ranks);
        gpus::look_at_memory(&report.gpus, &report.ranks, &mut findings);
        report.disk = plan.disk(options.free_disk_bytes);
        if let Some(disk) = &report.disk {
            look_at_disk(disk, &mut findings);
        }
        report.supply = plan.supply(options.machine, |rows, inputs, outputs| {
            match options.flops_per_s {
                Some(given) => Some(plan::Rates::given(given)),
                // What the CPU does says nothing of them.
                None if config.is_on_gpus(Role::Verifier) || config.is_on_gpus(Role::Draft) => None,
                None => {
                    let products = (config.draft.products, config.verifier.products);
                    ProductRates::measure((rows, inputs, outputs), products, CALIBRATION)
                        .ok()
                        .map(plan::Rates::measured)
                }
            }
        });
        report.links = plan.links(report.supply.as_ref());
    }
    report.samples = samples;
    report.settle(findings.into_vec());
    report
}

/// Whether all values could be read that plans are made of.
fn is_planned(survey: &Survey) -> bool {
    !PLANNED_SECTIONS.iter().any(|section| survey.is_rejected(section))
}

/// Looks at files of hidden states that are to be read, or written, as far as their folder says what they are.
fn look_at_hidden_states(foundation: &Foundation, findings: &mut Findings<'_>) {
    let config = &findings.survey().config;
    let Some(contract) = &foundation.contract else {
        return;
    };
    let read = config
        .samples
        .hidden_states
        .as_ref()
        .filter(|folder| folder.is_dir());
    if let Some(error) = read.and_then(|folder| HiddenFiles::look(folder, contract).err()) {
        let key = "samples.hidden_states";
        findings.add(Severity::Fatal, Topic::HiddenStates, key, error.to_string());
    }
    let written = config
        .run
        .extract_to
        .as_ref()
        .map(|folder| folder.join(STATES_FOLDER));
    if let Some(error) = written.and_then(|folder| HiddenWriter::look(&folder, contract).err()) {
        let key = "run.extract_to";
        findings.add(Severity::Fatal, Topic::HiddenStates, key, error.to_string());
    }
}

/// Looks at the run directory and the port.
fn look_around(foundation: &Foundation, findings: &mut Findings<'_>) {
    let survey = findings.survey();
    let config = &survey.config;
    look_at_hidden_states(foundation, findings);
    look_at_products(findings);
    if !survey.is_rejected("run") && !config.run.name.is_empty() {
        let settings = foundation
            .contract
            .as_ref()
            .filter(|_| is_planned(survey) && !survey.is_rejected("samples") && survey.problems.is_empty())
            .map(|contract| recipe::settings(config, contract.clone()));
        if let Err(error) = directory::look(config, settings) {
            findings.add(
                Severity::Fatal,
                Topic::RunDirectory,
                "run.directory",
                error.to_string(),
            );
        }
    }
    if !survey.is_rejected("run.listen")
        && let Err(source) = TcpListener::bind(config.run.listen)
    {
        let address = config.run.listen.to_string();
        let error = TransportError::Listen { address, source };
        findings.add(Severity::Fatal, Topic::Port, "run.listen", error.to_string());
    }
}

/// Tells what bf16 products come to on this machine.
fn look_at_products(findings: &mut Findings<'_>) {
    let config = &findings.survey().config;
    let wanted = [
        (
            "verifier.products",
            config.verifier.products,
            Topic::Verifier,
            Role::Verifier,
        ),
        ("draft.products", config.draft.products, Topic::Draft, Role::Draft),
    ];
    for (key, products, topic, role) in wanted {
        if config.is_on_gpus(role) {
            continue;
        }
        if let Err(reason) = Cpu::kernel_for(products) {
            let text = format!(
                "{key} = \"bf16\" needs AMX, and {reason}: products are computed in f32 here, which gives other bits than \
                 machines with AMX and takes longer; take \"f32\" to have the same everywhere"
            );
            findings.add(Severity::Warning, topic, key, text);
        }
    }
}

fn look_at_memory(hosts: &[HostMemory], findings: &mut Findings<'_>) {
    for host in hosts {
        let (severity, text) = match host.shortage() {
            None => continue,
            Some(Shortage::Never(text)) => (Severity::Fatal, text),
            Some(Shortage::Now(text)) => (Severity::Problem, text),
        };
        findings.add(severity, Topic::Memory, "ranks", text);
    }
}

fn look_at_disk(disk: &DiskPlan, findings: &mut Findings<'_>) {
    if let Some(text) = disk.shortage() {
        // With less than one checkpoint of room the run ends at the first of them.
        let severity = if disk.free_bytes.is_some_and(|free| free < disk.checkpoint_bytes) {
            Severity::Fatal
        } else {
            Severity::Problem
        };
        findings.add(severity, Topic::Disk, "run.directory", text);
    }
}

/// Files of samples with the keys that name them.
fn named(key: &str, files: &[PathBuf]) -> Vec<(String, PathBuf)> {
    (0..)
        .zip(files)
        .filter(|(_, file)| file.is_file())
        .map(|(index, file): (usize, _)| (format!("{key}[{index}]"), file.clone()))
        .collect()
}

fn look_at_samples(
    foundation: &Foundation,
    budget: SampleBudget,
    findings: &mut Findings<'_>,
) -> Option<SampleSurvey> {
    let survey = findings.survey();
    let config = &survey.config;
    let tokenizer = foundation.tokenizer.as_ref()?;
    if survey.is_rejected("samples") || survey.is_rejected("training") || survey.is_rejected("draft") {
        return None;
    }
    let mut files = named("samples.files", &config.samples.files);
    for (index, folder) in config.samples.watch.iter().enumerate() {
        // A folder that cannot be read has been told of.
        let found = coordinator::files_in(folder).unwrap_or_default();
        files.extend(
            found
                .into_iter()
                .map(|file| (format!("samples.watch[{index}]"), file)),
        );
    }
    let held_out = named("samples.held_out", &config.samples.held_out);
    let stop_ids = foundation
        .verifier
        .as_ref()
        .map_or(&[][..], |verifier| &verifier.eos_token_ids);
    let reader = Reader::new(config, tokenizer, stop_ids, budget);
    let (found, unreadable) = reader.read(&files, &held_out, budget.rows);
    for file in unreadable {
        let topic = if file.key.starts_with("samples.held_out") {
            Topic::HeldOut
        } else {
            Topic::Samples
        };
        findings.add(Severity::Fatal, topic, &file.key, file.what);
    }
    judge_samples(&found, foundation, findings);
    Some(found)
}

fn judge_samples(found: &SampleSurvey, foundation: &Foundation, findings: &mut Findings<'_>) {
    let config = &findings.survey().config;
    let refused: u64 = found.refused.iter().map(|refusal| refusal.count).sum();
    let first = found.refused.first();
    let all = found.samples + refused;
    let waits = config.samples.is_open();
    if found.samples == 0 && (found.rows > 0 || !waits) && found.files > 0 {
        let why = first.map_or("they are empty".to_owned(), |refusal| refusal.first.clone());
        let severity = if found.whole && !waits {
            Severity::Fatal
        } else {
            Severity::Problem
        };
        findings.add(
            severity,
            Topic::Samples,
            "samples.files",
            format!(
                "none of the first {} rows can be trained: {why}; name other files in samples.files",
                found.rows
            ),
        );
    } else if refused as f64 > MANY_REFUSED * all as f64 {
        let why = first.map_or(String::new(), |refusal| {
            format!(", first of all {}", refusal.first)
        });
        findings.add(
            Severity::Warning,
            Topic::Samples,
            "samples.files",
            format!("{refused} of the first {all} rows and answers are put aside{why}"),
        );
    }
    if found.truncated as f64 > MANY_TRUNCATED * found.samples as f64 {
        findings.add(
            Severity::Warning,
            Topic::Samples,
            "training.tokens_per_row",
            format!(
                "{} of {} samples are cut at training.tokens_per_row = {}; the longest has {} tokens ({}): raise it, or \
                 the ends of long answers are never trained",
                found.truncated,
                found.samples,
                config.training.tokens_per_row,
                found.longest_tokens,
                found.longest_place
            ),
        );
    }
    let wants_held_out = !config.samples.held_out.is_empty() || config.samples.held_out_every > 0;
    if wants_held_out && found.whole && found.held_out_prompts == 0 {
        findings.add(
            Severity::Warning,
            Topic::HeldOut,
            "samples.held_out",
            "no held-out prompt can be answered, so acceptance is not measured; look at samples.held_out, \
             samples.held_out_every and training.max_new_tokens",
        );
    }
    let Some(verifier) = &foundation.verifier else {
        return;
    };
    let whole = found.samples - found.truncated.min(found.samples);
    if whole > 0 && found.stopped == 0 && !verifier.eos_token_ids.is_empty() {
        findings.add(
            Severity::Warning,
            Topic::Tokenizer,
            "verifier.path",
            format!(
                "no answer of the first {whole} whole samples has one of the tokens {:?} that end answers: the draft \
                 does not learn to end, or eos_token_id in the verifier's generation_config.json is of another template",
                verifier.eos_token_ids
            ),
        );
    }
    let longest = verifier.max_position_embeddings.unwrap_or(usize::MAX) as u64;
    let used = found.longest_tokens.min(config.training.tokens_per_row as u64);
    if used > longest {
        findings.add(
            Severity::Warning,
            Topic::Samples,
            "training.tokens_per_row",
            format!(
                "samples of up to {used} tokens are read by a verifier that was made for {longest}; lower \
                 training.tokens_per_row to that"
            ),
        );
    }
}

fn look_at_vocabulary(
    foundation: &Foundation,
    samples: &SampleSurvey,
    findings: &mut Findings<'_>,
) -> Option<VocabularySurvey> {
    let spec = foundation.spec.as_ref()?;
    match VocabularySurvey::new(&samples.counts, spec.draft_vocab_size, spec.vocab_size) {
        Ok(found) => {
            if let Some(doubt) = found.as_ref().and_then(VocabularySurvey::doubt) {
                findings.add(Severity::Warning, Topic::Vocabulary, "draft.vocab_size", doubt);
            }
            found
        }
        Err(error) => {
            findings.add(
                Severity::Fatal,
                Topic::Vocabulary,
                "draft.vocab_size",
                format!("draft.vocab_size: {error}"),
            );
            None
        }
    }
}
