//! GPUs: whether those that `cluster.toml` names are there, and whether what ranks need fits on them.

use std::collections::BTreeMap;

use eaglet_runtime::cuda::SearchPath;
use eaglet_runtime::ids::Role;
use serde::Serialize;

use super::finding::{Findings, Severity, Topic};
use super::memory::{Use, parts_in_words};
use super::report::RankPlan;
use super::units::size;
use crate::config::{ClusterConfig, LOCAL};
use crate::gpus::{GpuMachine, PlacedGpu};

/// What a rank needs of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuTenant {
    /// Its seat.
    pub seat: String,
    /// Bytes.
    pub bytes: u64,
}

/// A GPU with what its ranks need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GpuPlan {
    /// Its name in `cluster.toml`.
    pub device: String,
    /// What the driver calls it.
    pub name: String,
    /// What its ranks get as `CUDA_VISIBLE_DEVICES`.
    pub visible: String,
    /// Its memory; absent if the driver does not say.
    pub memory_bytes: Option<u64>,
    /// What of it is free now.
    pub free_bytes: Option<u64>,
    /// The NUMA node that its ranks are bound to.
    pub numa_node: Option<u32>,
    /// Its ranks.
    pub ranks: Vec<GpuTenant>,
    /// What they need together.
    pub needed_bytes: u64,
    /// GPUs of its group whose memory it cannot read: what goes between them passes through the host.
    pub unread_peers: Vec<String>,
}

/// Looks for the GPUs that ranks are to compute on; nothing is looked for where there are no such ranks.
pub(super) fn look(findings: &mut Findings<'_>) -> BTreeMap<u16, PlacedGpu> {
    let config = &findings.survey().config;
    let wanted = wanted(config);
    let Some((first, _)) = wanted.first() else {
        return BTreeMap::new();
    };
    let mut refuse = |index: usize, what: String| {
        let key = format!("ranks[{index}].device");
        let text = format!("{key} = \"{}\": {what}", config.ranks[index].device);
        findings.add(Severity::Fatal, Topic::Device, &key, text);
    };
    let machine = match GpuMachine::open(&SearchPath::here()) {
        Ok(machine) => machine,
        Err(what) => {
            // What is missing is missing for all of them.
            refuse(*first, what);
            return BTreeMap::new();
        }
    };
    let mut gpus = BTreeMap::new();
    for &(index, number) in &wanted {
        match machine.gpu(number) {
            Ok(gpu) => {
                gpus.insert(number, gpu);
            }
            Err(error) => refuse(index, error.to_string()),
        }
    }
    warn_of_sharing(config, &wanted, findings);
    warn_of_mixture(config, &gpus, findings);
    gpus
}

/// Ranks that compute on a GPU: their places in the list and the numbers of their GPUs.
fn wanted(config: &ClusterConfig) -> Vec<(usize, u16)> {
    // What other hosts have they look at themselves, when they join.
    let ranks = config
        .ranks
        .iter()
        .enumerate()
        .filter(|(_, rank)| rank.is_local());
    ranks
        .filter_map(|(index, rank)| Some((index, config.gpu_of(rank)?)))
        .collect()
}

fn warn_of_sharing(config: &ClusterConfig, wanted: &[(usize, u16)], findings: &mut Findings<'_>) {
    for (place, &(index, number)) in wanted.iter().enumerate() {
        let earlier = wanted[..place].iter().find(|(_, other)| *other == number);
        if let Some(&(other, _)) = earlier {
            let seat = |index: usize| config.ranks[index].seat();
            let text = format!(
                "{} and {} share cuda:{number}: they take turns on it, or run side by side where MPS is on; give each rank \
                 a GPU of its own if there are enough",
                seat(other),
                seat(index)
            );
            let key = format!("ranks[{index}].device");
            findings.add(Severity::Warning, Topic::Device, &key, text);
        }
    }
}

/// Replicas on different GPUs need not round alike.
fn warn_of_mixture(config: &ClusterConfig, gpus: &BTreeMap<u16, PlacedGpu>, findings: &mut Findings<'_>) {
    let drafts = (0..).zip(&config.ranks).filter_map(|(index, rank)| {
        let gpu = gpus.get(&config.gpu_of(rank).filter(|_| rank.role == Role::Draft)?)?;
        Some((index, rank, gpu.name()))
    });
    let drafts: Vec<(usize, _, String)> = drafts.collect();
    let Some((_, first, name)) = drafts.first() else {
        return;
    };
    if let Some((index, other, another)) = drafts.iter().find(|(_, _, another)| another != name) {
        let key = format!("ranks[{index}].device");
        let text = format!(
            "{} computes on {another} and {} on {name}: GPUs of different kinds may round differently, and then the run \
             stops with a state that differs between replicas; use GPUs of one kind for draft ranks",
            other.seat(),
            first.seat()
        );
        findings.add(Severity::Warning, Topic::Device, &key, text);
    }
}

/// What ranks need of each GPU.
pub(super) fn plan(
    config: &ClusterConfig,
    gpus: &BTreeMap<u16, PlacedGpu>,
    ranks: &[RankPlan],
) -> Vec<GpuPlan> {
    let plan = |(&number, gpu): (&u16, &PlacedGpu)| {
        let device = format!("cuda:{number}");
        let here = ranks
            .iter()
            .filter(|rank| rank.device == device && rank.host == LOCAL);
        let tenants: Vec<GpuTenant> = here
            .filter(|rank| !rank.gpu_memory.is_empty())
            .map(|rank| GpuTenant {
                seat: rank.seat.clone(),
                bytes: rank.gpu_memory.iter().map(|part| part.bytes).sum(),
            })
            .collect();
        let (free_bytes, memory_bytes) = gpu.memory().unzip();
        let unread = peers(config, number)
            .filter(|peer| gpus.get(peer).and_then(|peer| gpu.reads(peer)) == Some(false));
        GpuPlan {
            device,
            name: gpu.name(),
            visible: gpu.place.visible.clone(),
            memory_bytes,
            free_bytes,
            numa_node: gpu.numa_node,
            needed_bytes: tenants.iter().map(|tenant| tenant.bytes).sum(),
            ranks: tenants,
            unread_peers: unread.map(|peer| format!("cuda:{peer}")).collect(),
        }
    };
    gpus.iter().map(plan).collect()
}

/// Other GPUs that ranks on this one exchange tensors with: those of all drafts, and those of one verifier.
fn peers(config: &ClusterConfig, number: u16) -> impl Iterator<Item = u16> {
    let shards = config.verifier.shards().max(1);
    let groups = config.ranks.iter().filter_map(|rank| {
        let group = match rank.role {
            Role::Draft => None,
            Role::Verifier => Some(rank.seat / shards),
        };
        Some((group, config.gpu_of(rank)?))
    });
    let groups: Vec<(Option<u16>, u16)> = groups.collect();
    let own = groups.iter().filter(|(_, gpu)| *gpu == number);
    let peers: std::collections::BTreeSet<u16> = own
        .flat_map(|(own, _)| groups.iter().filter(move |(group, _)| group == own))
        .map(|(_, gpu)| *gpu)
        .filter(|gpu| *gpu != number)
        .collect();
    peers.into_iter()
}

/// Tells of GPUs whose ranks do not fit.
pub(super) fn look_at_memory(plans: &[GpuPlan], ranks: &[RankPlan], findings: &mut Findings<'_>) {
    let config = &findings.survey().config;
    for plan in plans {
        let (Some(free), Some(memory)) = (plan.free_bytes, plan.memory_bytes) else {
            continue;
        };
        if plan.needed_bytes <= free {
            continue;
        }
        let needs = plan.ranks.iter().map(|tenant| {
            let rank = ranks.iter().find(|rank| rank.seat == tenant.seat);
            let parts = rank.map_or(String::new(), |rank| parts_in_words(&rank.gpu_memory));
            format!("{} {} ({parts})", tenant.seat, size(tenant.bytes))
        });
        let needs: Vec<String> = needs.collect();
        let largest = ranks
            .iter()
            .filter(|rank| plan.ranks.iter().any(|tenant| tenant.seat == rank.seat))
            .flat_map(|rank| {
                rank.gpu_memory
                    .iter()
                    .map(|part| (part.bytes, part.r#use, rank.role))
            })
            .max_by_key(|(bytes, _, _)| *bytes);
        let remedy = match largest {
            Some((_, Use::Weights, _)) => {
                "take a larger GPU, a verifier with quantised weights, or more stages or slices on more GPUs"
            }
            Some((_, part, role)) => part.remedy(role),
            None => "use another GPU",
        };
        let index = config.ranks.iter().position(|rank| rank.device == plan.device);
        let key = format!("ranks[{}].device", index.unwrap_or_default());
        let text = format!(
            "{} ({}) has {} free of {}, and its ranks need {}: {}; {remedy}",
            plan.device,
            plan.name,
            size(free),
            size(memory),
            size(plan.needed_bytes),
            needs.join(", ")
        );
        findings.add(Severity::Problem, Topic::Memory, &key, text);
    }
}
