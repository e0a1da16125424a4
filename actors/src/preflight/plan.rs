//! Puts the plans of a cluster together.

use std::collections::BTreeMap;

use eaglet_runtime::device::ProductRates;
use eaglet_runtime::draft::{DraftSpec, LayerKind};
use eaglet_runtime::ids::Role;
use eaglet_runtime::verifier::ShardCost;

use super::disk::{DiskPlan, Length};
use super::foundation::{Foundation, is_absent};
use super::layers::CapturedLayers;
use super::links::{Cargo, LinkPlan, Per, gradient_bytes_per_step, state_bytes};
use super::machine::{Machine, free_disk_bytes, used_disk_bytes};
use super::memory::{DraftRank, HostMemory, Tenant, VerifierRank, coordinator_bytes};
use super::report::{DraftSummary, RankPlan, VerifierSummary};
use super::samples::SampleSurvey;
use super::shards::{ShardFiles, captured, cut, shard_of};
use super::supply::{DraftSide, Speed, SpeedSource, StepLoad, SupplyPlan, VerifierSide};
use crate::config::{ClusterConfig, RankConfig};
use crate::recipe::PREFETCH_STEPS;

/// Speed of products.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rates {
    /// Of a verifier's thread or rank.
    verifier: f64,
    /// Of a draft's.
    draft: f64,
    source: SpeedSource,
}

impl Rates {
    /// What somebody says that a rank does.
    pub(super) fn given(flops_per_s: f64) -> Self {
        Self {
            verifier: flops_per_s,
            draft: flops_per_s,
            source: SpeedSource::Given,
        }
    }

    /// What a thread of this machine does.
    pub(super) fn measured(rates: ProductRates) -> Self {
        Self {
            verifier: rates.bf16_flops_per_s,
            draft: rates.f32_flops_per_s,
            source: SpeedSource::Measured,
        }
    }
}

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

    fn cost_of(&self, seat: u16) -> Option<&(&'a ShardFiles, ShardCost)> {
        let shard = shard_of(self.config, seat);
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

    fn members(&self) -> u64 {
        self.config.draft_seats().len().max(1) as u64
    }

    /// Bytes of one captured state of one token.
    fn state_bytes(&self) -> Option<u64> {
        let hidden = self.foundation.verifier.as_ref()?.hidden_size as u64;
        Some(hidden * self.config.verifier.hidden_dtype.bytes() as u64)
    }

    /// Tokens of the held-out prompts of a lane with their answers, at most.
    fn held_out_tokens(&self) -> u64 {
        let samples = &self.config.samples;
        if samples.held_out.is_empty() && samples.held_out_every == 0 {
            return 0;
        }
        (samples.held_out_rows * self.config.training.tokens_per_row) as u64
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
        let (spec, parameters) = self.spec()?;
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

    /// All ranks of which enough is known, verifiers first.
    pub(super) fn ranks(&self, machine: Machine) -> Vec<RankPlan> {
        let mut ranks: Vec<&RankConfig> = self.config.ranks.iter().collect();
        ranks.sort_by_key(|rank| (rank.role == Role::Draft, rank.seat));
        ranks
            .into_iter()
            .filter_map(|rank| {
                let threads = self.config.threads(rank, machine.cores);
                match rank.role {
                    Role::Verifier => self.verifier_rank(rank, threads),
                    Role::Draft => self.draft_rank(rank, threads),
                }
            })
            .collect()
    }

    fn verifier_rank(&self, rank: &RankConfig, threads: usize) -> Option<RankPlan> {
        let (files, cost) = self.cost_of(rank.seat)?;
        let held_out_tokens = self.held_out_tokens();
        let memory = VerifierRank {
            weight_bytes: files.bytes,
            activation_bytes_per_token: cost.activation_bytes_per_token,
            cache_bytes_per_token: cost.cache_bytes_per_token,
            logit_bytes_per_prompt: cost.logit_bytes_per_prompt,
            hidden_bytes_per_token: self.captured(files, cost) * self.state_bytes()?,
            tokens_per_row: self.config.training.tokens_per_row as u64,
            held_out_tokens,
            // A prompt has a token at least.
            held_out_prompts: held_out_tokens / (self.config.training.max_new_tokens as u64 + 1),
            drafts: self.members(),
            threads,
        }
        .parts();
        let (stages, slices) = cut(self.config);
        let replica = rank.seat / (stages * slices);
        Some(RankPlan {
            shard: Some(files.plan(cost, replica)),
            parameters: files.parameters,
            tensors: files.tensors,
            missing_tensors: files.problems.iter().filter(|problem| is_absent(problem)).count() as u64,
            memory_bytes: memory.iter().map(|part| part.bytes).sum(),
            memory,
            ..blank(rank, threads)
        })
    }

    fn draft_rank(&self, rank: &RankConfig, threads: usize) -> Option<RankPlan> {
        let (spec, parameters) = self.spec()?;
        let memory = DraftRank {
            spec,
            parameters,
            steps: self.config.training.ttt_steps,
            tokens_per_row: self.config.training.tokens_per_row as u64,
            lanes: u64::from(self.config.rows_per_step()),
            members: self.members(),
            prefetch_steps: PREFETCH_STEPS,
            hidden_bytes_per_token: (spec.aux_layers as u64 + 1) * self.state_bytes()?,
            held_out_tokens: self.held_out_tokens(),
            threads,
        }
        .parts();
        Some(RankPlan {
            parameters,
            // Embedding, head and norm.
            tensors: 3,
            memory_bytes: memory.iter().map(|part| part.bytes).sum(),
            memory,
            ..blank(rank, threads)
        })
    }

    /// Memory of each host, once all of its ranks are known.
    pub(super) fn hosts(&self, machine: Machine) -> Vec<HostMemory> {
        let ranks = self.ranks(machine);
        if ranks.is_empty() || ranks.len() < self.config.ranks.len() {
            return Vec::new();
        }
        let mut hosts: BTreeMap<&str, Vec<Tenant>> = BTreeMap::new();
        for rank in &ranks {
            hosts.entry(&rank.host).or_default().push(Tenant {
                role: if rank.shard.is_some() {
                    Role::Verifier
                } else {
                    Role::Draft
                },
                parts: rank.memory.clone(),
                mapping: rank.shard.map(|shard| (shard.stage, shard.slice)),
            });
        }
        let samples = self.samples.map_or(0, |samples| samples.estimated_samples);
        hosts
            .into_iter()
            .map(|(host, tenants)| {
                let coordinator = if host == "local" {
                    coordinator_bytes(samples)
                } else {
                    0
                };
                HostMemory::new(host, &tenants, coordinator, machine)
            })
            .collect()
    }

    /// What is written; `free_bytes` is the room there is, if it is not to be looked up.
    pub(super) fn disk(&self, free_bytes: Option<u64>) -> Option<DiskPlan> {
        let (spec, parameters) = self.spec()?;
        let directory = &self.config.run.directory;
        let length = self.samples.map_or(Length::default(), |samples| Length {
            steps: samples.steps,
            samples: samples.estimated_samples,
            tokens: samples.estimated_tokens,
        });
        Some(DiskPlan {
            present_bytes: used_disk_bytes(directory),
            free_bytes: free_bytes.or_else(|| free_disk_bytes(directory)),
            ..DiskPlan::new(
                DiskPlan::checkpoint_bytes(spec, parameters),
                self.config.checkpoints.keep,
                length,
            )
        })
    }

    /// Supply against demand. `rates` measures products `[rows, inputs] · [inputs, outputs]`, or knows them.
    pub(super) fn supply(
        &self,
        machine: Machine,
        rates: impl FnOnce(usize, usize, usize) -> Option<Rates>,
    ) -> Option<SupplyPlan> {
        let (spec, _) = self.spec()?;
        let busiest = self
            .shards
            .iter()
            .map(|(_, cost)| cost.flops_per_token)
            .fold(0.0, f64::max);
        let (stages, slices) = cut(self.config);
        let replicas = self.config.verifier_seats().len() as u64 / u64::from(stages * slices);
        if busiest <= 0.0 || replicas == 0 {
            return None;
        }
        let config = &self.config;
        let rows = config.training.tokens_per_row;
        let rates = rates(rows, spec.hidden_size, spec.intermediate_size)?;
        let speed = match rates.source {
            SpeedSource::Given => Speed {
                verifier_flops_per_s: rates.verifier,
                draft_flops_per_s: rates.draft,
                source: rates.source,
            },
            SpeedSource::Measured => {
                let threads: usize = config
                    .ranks
                    .iter()
                    .map(|rank| config.threads(rank, machine.cores))
                    .sum();
                // More threads than cores share them.
                let share = (machine.cores as f64 / threads.max(1) as f64).min(1.0);
                let fewest = |role| {
                    let of_role = config.ranks.iter().filter(|rank| rank.role == role);
                    let threads = of_role.map(|rank| config.threads(rank, machine.cores));
                    share * threads.min().unwrap_or(1) as f64
                };
                Speed {
                    verifier_flops_per_s: fewest(Role::Verifier) * rates.verifier,
                    draft_flops_per_s: fewest(Role::Draft) * rates.draft,
                    source: rates.source,
                }
            }
        };
        let verifier = VerifierSide {
            replicas,
            flops_per_token: busiest,
        };
        let draft = DraftSide {
            members: self.members(),
            spec,
            steps: config.training.ttt_steps,
        };
        let steps = self
            .samples
            .filter(|samples| samples.samples > 0)
            .map(|samples| samples.steps);
        Some(SupplyPlan::new(speed, &self.load(), &verifier, &draft, steps))
    }

    /// What travels between ranks; per second if the speed of the run is known.
    pub(super) fn links(&self, supply: Option<&SupplyPlan>) -> Vec<LinkPlan> {
        let mut links = Vec::new();
        let (stages, slices) = cut(self.config);
        let per_replica = u64::from(stages * slices);
        let seats = self.config.verifier_seats();
        let replicas = (seats.len() as u64 / per_replica.max(1)).max(1);
        let tokens_per_s = supply.map(|supply| supply.tokens_per_s / replicas as f64);
        for seat in &seats {
            links.extend(
                self.verifier_links(seat.index, tokens_per_s)
                    .into_iter()
                    .flatten(),
            );
        }
        let Some((_, parameters)) = self.spec() else {
            return links;
        };
        let members = self.members();
        let own = u64::from(self.config.rows_per_step()).div_ceil(members);
        let bytes = gradient_bytes_per_step(parameters, own, members);
        if bytes > 0 {
            for seat in self.config.draft_seats() {
                links.push(LinkPlan {
                    cargo: Cargo::Gradients,
                    from: seat.to_string(),
                    to: "other draft ranks".to_owned(),
                    per: Per::Step,
                    bytes,
                    bytes_per_s: supply.map(|supply| supply.steps_per_s * bytes as f64),
                });
            }
            links.push(LinkPlan {
                cargo: Cargo::State,
                from: "a draft rank".to_owned(),
                to: "its replaced peer".to_owned(),
                per: Per::Replacement,
                bytes: state_bytes(parameters),
                bytes_per_s: None,
            });
        }
        links
    }

    fn verifier_links(&self, seat: u16, tokens_per_s: Option<f64>) -> Option<Vec<LinkPlan>> {
        let (files, cost) = self.cost_of(seat)?;
        let (shard, captured) = (files.shard, self.captured(files, cost));
        let hidden = self.foundation.verifier.as_ref()?.hidden_size as u64;
        let from = format!("verifier-{seat}");
        let link = |cargo, to: String, bytes: u64| LinkPlan {
            cargo,
            from: from.clone(),
            to,
            per: Per::Token,
            bytes,
            bytes_per_s: tokens_per_s.map(|tokens| tokens * bytes as f64),
        };
        let mut links = Vec::new();
        if captured > 0 {
            let bytes = captured * self.state_bytes()?;
            let mut hidden_states = link(Cargo::HiddenStates, "draft ranks".to_owned(), bytes);
            // All slices of a stage hold the same states; they take turns.
            hidden_states.bytes_per_s = hidden_states
                .bytes_per_s
                .map(|bytes| bytes / f64::from(shard.slices));
            links.push(hidden_states);
        }
        if !shard.is_last() {
            // In f32, so that stages have the bits of the whole.
            let to = format!("verifier-{}", seat + shard.slices);
            links.push(link(Cargo::Residual, to, 4 * hidden));
        }
        if shard.slices > 1 {
            // After the attention and after the MLP of each layer, and after the embedding: the parts that others sum go
            // out, and the part that this one sums.
            let sums = 2 * cost.layers.len() as u64 + u64::from(shard.is_first());
            let others = u64::from(shard.slices - 1);
            let bytes = sums * (2 * others * 4 * hidden).div_ceil(u64::from(shard.slices));
            links.push(link(Cargo::SliceSums, "other slices".to_owned(), bytes));
        }
        Some(links)
    }
}

/// A rank of which nothing is known but what `cluster.toml` says.
fn blank(rank: &RankConfig, threads: usize) -> RankPlan {
    RankPlan {
        seat: rank.seat().to_string(),
        host: rank.host.clone(),
        device: rank.device.clone(),
        threads,
        shard: None,
        parameters: 0,
        tensors: 0,
        missing_tensors: 0,
        memory: Vec::new(),
        memory_bytes: 0,
    }
}
