//! What every run stands on: the verifier's files, its tokenizer, and a draft that fits it.

use std::collections::BTreeSet;

use eaglet_runtime::checkpoint::DraftConfig;
use eaglet_runtime::contract::Contract;
use eaglet_runtime::draft::DraftSpec;
use eaglet_runtime::samples::{ChatRole, ChatTokenizer, Conversation, Message, SampleLimits, samples_of};
use eaglet_runtime::verifier::{LayoutProblem, VerifierConfig, VerifierError, VerifierFiles};
use eaglet_runtime::weights::WeightsError;

use super::finding::{Findings, Severity, Topic};
use super::layers::CapturedLayers;
use super::shards::ShardFiles;
use crate::config::ClusterConfig;
use crate::recipe::{self, RecipeError};

/// Problems of tensors that are told one by one.
const TOLD_TENSORS: usize = 20;

/// As much of it as could be read.
#[derive(Debug, Default)]
pub(crate) struct Foundation {
    /// The verifier's configuration.
    pub(crate) verifier: Option<VerifierConfig>,
    /// The verifier's files, as far as they can be used.
    pub(crate) files: Option<VerifierFiles>,
    /// What they hold of each part of the verifier.
    pub(crate) shards: Vec<ShardFiles>,
    /// The verifier's tokenizer.
    pub(crate) tokenizer: Option<ChatTokenizer>,
    /// Layers whose input is captured.
    pub(crate) aux_layers: Option<Vec<u32>>,
    /// What hidden states promise; only if nothing is wrong with the files.
    pub(crate) contract: Option<Contract>,
    /// The draft.
    pub(crate) spec: Option<DraftSpec>,
}

impl Foundation {
    /// Reads headers and the tokenizer, and notes everything that is wrong. Weights that are missing are no problem where
    /// they come later.
    pub(crate) fn look(findings: &mut Findings<'_>, weights_come_later: bool) -> Self {
        let survey = findings.survey();
        let config = &survey.config;
        let mut foundation = Self::default();
        if survey.is_rejected("verifier.path") || !config.verifier.path.exists() {
            return foundation; // it has been said
        }
        let is_whole = foundation.open(findings, weights_come_later);
        foundation.tokenizer = match ChatTokenizer::load(&config.verifier.path) {
            Ok(tokenizer) => Some(tokenizer),
            Err(error) => {
                findings.add(
                    Severity::Fatal,
                    Topic::Tokenizer,
                    "verifier.path",
                    error.to_string(),
                );
                None
            }
        };
        let Some(verifier) = &foundation.verifier else {
            return foundation;
        };
        if let Some(tokenizer) = &foundation.tokenizer {
            check_tokenizer(tokenizer, verifier, findings);
        }
        if !survey.is_rejected("verifier.aux_layers") {
            foundation.aux_layers = check_layers(config, verifier, findings);
        }
        if let Some(aux_layers) = &foundation.aux_layers
            && !survey.is_rejected("draft")
        {
            foundation.spec = check_draft(config, verifier, aux_layers, findings);
        }
        if let (Some(files), Some(tokenizer)) = (&foundation.files, &foundation.tokenizer)
            && is_whole
        {
            // What is wrong with the layers has been said.
            foundation.contract = recipe::contract_of(config, files, tokenizer).ok();
        }
        foundation
    }

    /// Opens the verifier's files as far as they can be used; whether nothing is wrong with them.
    fn open(&mut self, findings: &mut Findings<'_>, weights_come_later: bool) -> bool {
        let config = &findings.survey().config;
        let mut wrong: Vec<(Topic, &str, String)> = Vec::new();
        let comes_later = |problem: &WeightsError| {
            let is_missing = matches!(
                problem,
                WeightsError::NoWeights { .. } | WeightsError::ShardMissing { .. }
            );
            is_missing && weights_come_later
        };
        let mut is_here = true;
        match VerifierFiles::survey(&config.verifier.path) {
            Ok((files, problems)) => {
                is_here = !problems.iter().any(comes_later);
                let of_files =
                    |problem: WeightsError| (Topic::Verifier, "verifier.path", problem.to_string());
                wrong.extend(
                    problems
                        .into_iter()
                        .filter(|problem| !comes_later(problem))
                        .map(of_files),
                );
                let (stages, slices) = (config.verifier.pipeline.max(1), config.verifier.tensor.max(1));
                let layers = files.config().layers;
                if usize::from(stages) > layers {
                    let text = format!(
                        "verifier.pipeline = {stages} asks for more stages than the {layers} layers that the verifier \
                         has; take fewer"
                    );
                    wrong.push((Topic::Verifier, "verifier.pipeline", text));
                } else {
                    self.shards = ShardFiles::all(&files, (stages, slices));
                }
                self.verifier = Some(files.config().clone());
                self.files = Some(files);
            }
            Err(error) => {
                // Without weights the configuration still tells what would be needed.
                self.verifier = VerifierConfig::read(&config.verifier.path).ok();
                match &error {
                    VerifierError::Weights(problem) if comes_later(problem) => is_here = false,
                    error => wrong.push((Topic::Verifier, "verifier.path", error.to_string())),
                }
            }
        }
        if let Some(cap) = self.verifier.as_ref().and_then(|verifier| verifier.logit_softcap) {
            let text = format!(
                "the verifier bends its logits below {cap}, which the head of an EAGLE-3 draft does not do: no draft can be \
                 trained for it; choose another verifier"
            );
            wrong.push((Topic::Verifier, "verifier.path", text));
        }
        wrong.extend(self.problems_of_tensors());
        let is_whole = wrong.is_empty() && is_here;
        if !is_here {
            let text = "not all weights of the verifier are here; a launch fetches them first, and checks then what is in \
                        them"
                .to_owned();
            findings.add(Severity::Warning, Topic::Verifier, "verifier.path", text);
        }
        for (topic, key, text) in wrong {
            findings.add(Severity::Fatal, topic, key, text);
        }
        is_whole
    }

    /// What is wrong with single tensors. Parts of a verifier share tensors, and so their problems.
    fn problems_of_tensors(&self) -> Vec<(Topic, &'static str, String)> {
        let is_cut = |problem: &&LayoutProblem| matches!(problem, LayoutProblem::Slices { .. });
        let problems = || self.shards.iter().flat_map(|shard| &shard.problems);
        let cuts: BTreeSet<String> = problems().filter(is_cut).map(ToString::to_string).collect();
        let tensors: BTreeSet<String> = problems()
            .filter(|problem| !is_cut(problem) && !is_absent(problem))
            .map(ToString::to_string)
            .collect();
        let more = tensors.len().saturating_sub(TOLD_TENSORS);
        let cuts = cuts
            .into_iter()
            .map(|text| (Topic::Verifier, "verifier.tensor", text));
        let tensors = tensors.into_iter().take(TOLD_TENSORS);
        let tensors = tensors.map(|text| (Topic::Tensors, "verifier.path", text));
        let rest = (more > 0).then(|| {
            let text =
                format!("{more} more tensors of the verifier are missing or do not fit its config.json");
            (Topic::Tensors, "verifier.path", text)
        });
        cuts.chain(tensors).chain(rest).collect()
    }
}

/// Whether a tensor cannot be looked at because of its file, which has been told.
pub(crate) fn is_absent(problem: &LayoutProblem) -> bool {
    matches!(problem, LayoutProblem::Weights(WeightsError::Absent { .. }))
}

fn check_tokenizer(tokenizer: &ChatTokenizer, verifier: &VerifierConfig, findings: &mut Findings<'_>) {
    let key = "verifier.path";
    if let Err(error) = tokenizer.fits_embedding(verifier.vocab_size) {
        findings.add(Severity::Fatal, Topic::Tokenizer, key, error.to_string());
    }
    let stops = &verifier.eos_token_ids;
    if stops.is_empty() {
        findings.add(
            Severity::Warning,
            Topic::Tokenizer,
            key,
            "the verifier names no token that ends an answer, so held-out answers always have training.max_new_tokens \
             tokens; add eos_token_id to its generation_config.json",
        );
    }
    for &id in stops {
        let problem = if id as usize >= verifier.vocab_size {
            "is beyond its vocabulary"
        } else if tokenizer.token(id).is_none() {
            "is no token of its tokenizer"
        } else {
            continue;
        };
        findings.add(
            Severity::Warning,
            Topic::Tokenizer,
            key,
            format!(
                "token {id}, which is said to end answers, {problem}; correct eos_token_id in the verifier's \
                 generation_config.json"
            ),
        );
    }
    // A template that cannot even do this needs more than the samples may have.
    let conversation = Conversation {
        id: None,
        messages: vec![
            Message::new(ChatRole::User, "Is anybody there?"),
            Message::new(ChatRole::Assistant, "Yes."),
        ],
        tools: None,
    };
    if let Err(reason) = samples_of(&conversation, tokenizer, SampleLimits::default()) {
        findings.add(
            Severity::Warning,
            Topic::Tokenizer,
            key,
            format!(
                "a question and its answer give no sample: {reason}; look at {}",
                tokenizer.template().file().display()
            ),
        );
    }
}

fn check_layers(
    config: &ClusterConfig,
    verifier: &VerifierConfig,
    findings: &mut Findings<'_>,
) -> Option<Vec<u32>> {
    let key = "verifier.aux_layers";
    let ids = match recipe::aux_layers(config, verifier) {
        Ok(ids) => ids,
        Err(error) => {
            findings.add(Severity::Fatal, Topic::Layers, key, error.to_string());
            return None;
        }
    };
    if config.verifier.aux_layers.is_some() {
        for doubt in CapturedLayers::doubts(&ids, verifier.layers as u32, &verifier.default_aux_layers()) {
            findings.add(Severity::Warning, Topic::Layers, key, doubt.to_string());
        }
    }
    Some(ids)
}

fn check_draft(
    config: &ClusterConfig,
    verifier: &VerifierConfig,
    aux_layers: &[u32],
    findings: &mut Findings<'_>,
) -> Option<DraftSpec> {
    let mut fatal = |key: &str, text: String| {
        findings.add(Severity::Fatal, Topic::Draft, key, text);
    };
    let spec = match recipe::draft_spec(config, verifier, aux_layers.len()) {
        Ok(spec) => spec,
        Err(RecipeError::Misfit { key, what }) => {
            fatal(key, format!("{key}: {what}"));
            return None;
        }
        Err(error) => {
            fatal("draft", error.to_string());
            return None;
        }
    };
    if let Err(error) = spec.check() {
        fatal("draft", error.to_string());
        return None;
    }
    if let Err(error) = DraftConfig::new(spec.clone(), recipe::export_info(config, verifier, aux_layers)) {
        fatal("draft", format!("draft: {error}"));
    }
    Some(spec)
}
