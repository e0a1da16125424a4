//! What each rank holds, and the memory of ranks and hosts.

use std::collections::BTreeMap;

use eaglet_runtime::cuda::SliceSums;
use eaglet_runtime::device::{Cpu, ProductKernel, Products};
use eaglet_runtime::ids::Role;

use super::Plan;
use crate::config::{Collective, LOCAL, RankConfig};
use crate::preflight::foundation::is_absent;
use crate::preflight::machine::Machine;
use crate::preflight::memory::{
    DraftRank, HostMemory, MemoryPart, Tenant, VerifierRank, coordinator_bytes, file_rank,
    shard_exchange_bytes_per_token,
};
use crate::preflight::report::RankPlan;
use crate::preflight::shards::ShardFiles;
use crate::recipe;

impl Plan<'_> {
    /// All ranks of which enough is known, verifiers first.
    pub(in crate::preflight) fn ranks(&self, machine: Machine) -> Vec<RankPlan> {
        let mut ranks: Vec<&RankConfig> = self.config.ranks.iter().collect();
        ranks.sort_by_key(|rank| (rank.role == Role::Draft, rank.seat));
        ranks
            .into_iter()
            .filter_map(|rank| {
                let threads = self.config.threads(rank, machine.cores);
                match rank.role {
                    Role::Verifier if self.reads_files() => self.reader(rank),
                    Role::Verifier => self.verifier_rank(rank, threads),
                    Role::Draft if self.writes_files() => self.writer(rank),
                    Role::Draft => self.draft_rank(rank, threads),
                }
            })
            .collect()
    }

    fn verifier_rank(&self, rank: &RankConfig, threads: usize) -> Option<RankPlan> {
        let (files, cost) = self.cost_of(rank.seat)?;
        let shard = files.shard;
        let hidden = self.foundation.verifier.as_ref()?.hidden_size as u64;
        // The same slice of the next stage, or of all stages before the last one; and the other slices.
        let stages = if shard.is_last() { shard.stages - 1 } else { 1 };
        let held_out_tokens = self.held_out_tokens();
        let is_on_gpu = self.config.gpu_of(rank).is_some();
        let longest = self.tokens_per_row().max(held_out_tokens);
        let slice_sum_bytes = match self.config.verifier.collective {
            Collective::Links => 0,
            Collective::Nccl => {
                let (mode, slices) = (self.config.verifier.sums, usize::from(shard.slices));
                SliceSums::scratch_bytes(mode, slices, (longest * hidden) as usize) as u64
            }
        };
        let memory = VerifierRank {
            weight_bytes: files.bytes,
            gpu_weight_bytes: if is_on_gpu {
                self.gpu_weight_bytes(files)
            } else {
                0
            },
            packed_bytes: if !is_on_gpu && Self::packs(self.config.verifier.products) {
                files.packable_bytes
            } else {
                0
            },
            activation_bytes_per_token: cost.activation_bytes_per_token,
            cache_bytes_per_token: cost.cache_bytes_per_token,
            logit_bytes_per_prompt: cost.logit_bytes_per_prompt,
            hidden_bytes_per_token: self.captured(files, cost) * self.state_bytes()?,
            exchange_bytes_per_token: shard_exchange_bytes_per_token(shard, hidden),
            slice_sum_bytes,
            tokens_per_row: self.tokens_per_row(),
            held_out_tokens,
            // A prompt has a token at least.
            held_out_prompts: held_out_tokens / (self.config.training.max_new_tokens as u64 + 1),
            links: self.members() + u64::from(stages + shard.slices - 1),
            threads,
        };
        let plan = RankPlan {
            shard: Some(files.plan(cost, rank.seat / self.config.verifier.shards().max(1))),
            parameters: files.parameters,
            tensors: files.tensors,
            missing_tensors: files.problems.iter().filter(|problem| is_absent(problem)).count() as u64,
            gpu_memory: if is_on_gpu { memory.gpu_parts() } else { Vec::new() },
            ..blank(rank, threads)
        };
        Some(with_memory(plan, memory.parts()))
    }

    /// What a part of the verifier takes on a GPU for as long as it is loaded.
    fn gpu_weight_bytes(&self, files: &ShardFiles) -> u64 {
        let products = self.config.verifier.products;
        let known = self.foundation.files.as_ref();
        known.map_or(files.bytes, |known| {
            known.gpu_bytes(files.shard, products).total()
        })
    }

    /// Whether ranks with such products pack weights for AMX, if their machines are like this one.
    fn packs(products: Products) -> bool {
        Cpu::kernel_for(products) == Ok(ProductKernel::AmxBf16)
    }

    fn draft_rank(&self, rank: &RankConfig, threads: usize) -> Option<RankPlan> {
        let (spec, parameters) = self.spec()?;
        let memory = DraftRank {
            spec,
            parameters,
            steps: self.config.training.ttt_steps,
            tokens_per_row: self.tokens_per_row(),
            lanes: u64::from(self.config.rows_per_step()),
            members: self.members(),
            prefetch_steps: recipe::prefetch_steps(self.config),
            hidden_bytes_per_token: self.hidden_bytes_per_token()?,
            held_out_tokens: self.held_out_tokens(),
            threads,
            over_nccl: self.config.training.collective == Collective::Nccl,
            packs: self.config.gpu_of(rank).is_none() && Self::packs(self.config.draft.products),
            rounds: self.config.draft.products == Products::Bf16,
        };
        let plan = RankPlan {
            parameters,
            // Embedding, head and norm.
            tensors: 3,
            gpu_memory: match self.config.gpu_of(rank) {
                Some(_) => memory.gpu_parts(),
                None => Vec::new(),
            },
            ..blank(rank, threads)
        };
        Some(with_memory(plan, memory.parts()))
    }

    /// A rank in a verifier's place that reads hidden states.
    fn reader(&self, rank: &RankConfig) -> Option<RankPlan> {
        let bytes = self.hidden_bytes_per_token()?;
        let memory = file_rank(2 * self.tokens_per_row(), bytes, self.members());
        Some(with_memory(blank(rank, 1), memory))
    }

    /// A rank in a draft's place that writes hidden states.
    fn writer(&self, rank: &RankConfig) -> Option<RankPlan> {
        let rows = recipe::prefetch_steps(self.config) * u64::from(self.config.rows_per_step());
        let memory = file_rank(rows * self.tokens_per_row(), self.hidden_bytes_per_token()?, 0);
        Some(with_memory(blank(rank, 1), memory))
    }

    fn tokens_per_row(&self) -> u64 {
        self.config.training.tokens_per_row as u64
    }

    /// Tokens of the held-out prompts of a lane with their answers, at most.
    fn held_out_tokens(&self) -> u64 {
        let samples = &self.config.samples;
        if samples.held_out.is_empty() && samples.held_out_every == 0 {
            return 0;
        }
        samples.held_out_rows as u64 * self.tokens_per_row()
    }

    /// Memory of each host, once all of its ranks are known.
    pub(in crate::preflight) fn hosts(&self, machine: Machine) -> Vec<HostMemory> {
        let ranks = self.ranks(machine);
        if ranks.is_empty() || ranks.len() < self.config.ranks.len() {
            return Vec::new();
        }
        let mut hosts: BTreeMap<&str, Vec<Tenant>> = BTreeMap::new();
        for rank in &ranks {
            hosts.entry(&rank.host).or_default().push(Tenant {
                role: rank.role,
                parts: rank.memory.clone(),
                mapping: rank.shard.map(|shard| (shard.stage, shard.slice)),
            });
        }
        let samples = self.samples.map_or(0, |samples| samples.estimated_samples);
        hosts
            .into_iter()
            .map(|(host, tenants)| {
                let coordinator = if host == LOCAL {
                    coordinator_bytes(samples)
                } else {
                    0
                };
                HostMemory::new(host, &tenants, coordinator, machine)
            })
            .collect()
    }
}

fn with_memory(plan: RankPlan, memory: Vec<MemoryPart>) -> RankPlan {
    RankPlan {
        memory_bytes: memory.iter().map(|part| part.bytes).sum(),
        memory,
        ..plan
    }
}

/// A rank of which nothing is known but what `cluster.toml` says.
fn blank(rank: &RankConfig, threads: usize) -> RankPlan {
    RankPlan {
        seat: rank.seat().to_string(),
        role: rank.role,
        host: rank.host.clone(),
        device: rank.device.clone(),
        threads,
        shard: None,
        parameters: 0,
        tensors: 0,
        missing_tensors: 0,
        memory: Vec::new(),
        memory_bytes: 0,
        gpu_memory: Vec::new(),
    }
}
