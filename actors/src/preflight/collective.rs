//! NCCL, if something is summed over it: which one is there, and whether it takes the ranks as they are placed.

use std::path::PathBuf;

use eaglet_runtime::cuda::{Nccl, SearchPath};
use eaglet_runtime::ids::{Role, Seat};
use serde::Serialize;

use super::finding::{Findings, Severity, Topic};
use crate::config::{ClusterConfig, Collective};

/// From this version on NCCL takes several ranks of a group on one GPU, if it is told to.
const SHARES_SINCE: (u32, u32) = (2, 30);
/// With which it is told to.
const SHARES_VARIABLE: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// The NCCL that ranks will use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NcclSummary {
    /// Its version.
    pub version: String,
    /// The file that was opened.
    pub path: PathBuf,
    /// What is summed over it.
    pub sums: Vec<&'static str>,
}

/// Ranks that are to sum over NCCL.
#[derive(Clone, Copy)]
struct Use {
    role: Role,
    key: &'static str,
    what: &'static str,
}

const GRADIENTS: Use = Use {
    role: Role::Draft,
    key: "training.collective",
    what: "gradients",
};
const SLICES: Use = Use {
    role: Role::Verifier,
    key: "verifier.collective",
    what: "slices",
};

/// Looks for NCCL, if it is wanted.
pub(super) fn look(findings: &mut Findings<'_>) -> Option<NcclSummary> {
    let config = &findings.survey().config;
    let trains = config.run.extract_to.is_none();
    let is_cut = config.verifier.tensor > 1;
    let uses: Vec<Use> = [
        (
            GRADIENTS,
            config.training.collective == Collective::Nccl && trains,
        ),
        (SLICES, config.verifier.collective == Collective::Nccl && is_cut),
    ]
    .into_iter()
    .filter_map(|(of, is_wanted)| is_wanted.then_some(of))
    .collect();
    let key = uses.first()?.key;
    let nccl = match Nccl::open(&SearchPath::here()) {
        Ok(nccl) => nccl,
        Err(error) => {
            let text = format!("{key} = \"nccl\": {error}, or take \"links\"");
            findings.add(Severity::Fatal, Topic::Device, key, text);
            return None;
        }
    };
    let version = nccl.version();
    let may_share = std::env::var(SHARES_VARIABLE).is_ok_and(|value| value == "1");
    for of in &uses {
        if let Some(text) = refusal(config, *of, version, may_share) {
            findings.add(Severity::Fatal, Topic::Device, of.key, text);
        }
    }
    let (major, minor, patch) = version;
    Some(NcclSummary {
        version: format!("{major}.{minor}.{patch}"),
        path: nccl.path().to_owned(),
        sums: uses.iter().map(|of| of.what).collect(),
    })
}

/// Why NCCL would not take the ranks of a role.
fn refusal(config: &ClusterConfig, of: Use, version: (u32, u32, u32), may_share: bool) -> Option<String> {
    let (device, seats) = shared(config, of.role)?;
    let (major, minor, patch) = version;
    let knows = (major, minor) >= SHARES_SINCE;
    if knows && may_share {
        return None;
    }
    let remedy = if knows {
        format!("set {SHARES_VARIABLE}=1 in the environment of the launch")
    } else {
        format!(
            "{SHARES_VARIABLE}=1 allows it from {}.{} on, and this is {major}.{minor}.{patch}",
            SHARES_SINCE.0, SHARES_SINCE.1
        )
    };
    let seats: Vec<String> = seats.iter().map(Seat::to_string).collect();
    Some(format!(
        "{} = \"nccl\": {} share {device}, and NCCL refuses two ranks on one GPU; give each a GPU of its own, \
         or take \"links\"; {remedy}",
        of.key,
        seats.join(" and ")
    ))
}

/// The first GPU that several ranks of a role are on, and who they are.
fn shared(config: &ClusterConfig, role: Role) -> Option<(&str, Vec<Seat>)> {
    let ranks = || {
        config
            .ranks
            .iter()
            .filter(|rank| rank.role == role && rank.gpu().is_some())
    };
    ranks().find_map(|rank| {
        let seats: Vec<Seat> = ranks()
            .filter(|other| (&other.device, &other.host) == (&rank.device, &rank.host))
            .map(|other| other.seat())
            .collect();
        (seats.len() > 1).then_some((rank.device.as_str(), seats))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RankConfig;

    fn config(role: Role, devices: &[&str]) -> ClusterConfig {
        let rank = |(seat, device): (u16, &&str)| RankConfig {
            seat,
            device: (*device).to_owned(),
            ..RankConfig::new(role)
        };
        ClusterConfig {
            ranks: (0..).zip(devices).map(rank).collect(),
            ..ClusterConfig::default()
        }
    }

    #[test]
    fn two_ranks_on_one_gpu_need_a_new_nccl_that_is_told_so() {
        let apart = config(Role::Draft, &["cuda:0", "cuda:1"]);
        assert_eq!(refusal(&apart, GRADIENTS, (2, 27, 0), false), None);
        let together = config(Role::Draft, &["cuda:0", "cuda:1", "cuda:0"]);
        let old = refusal(&together, GRADIENTS, (2, 27, 3), true).expect("it is too old");
        assert!(
            old.contains("draft-0 and draft-2 share cuda:0")
                && old.contains("from 2.30 on, and this is 2.27.3"),
            "{old}"
        );
        let untold = refusal(&together, GRADIENTS, (2, 30, 0), false).expect("it was not told");
        assert!(untold.contains("set NCCL_MULTI_RANK_GPU_ENABLE=1"), "{untold}");
        assert_eq!(refusal(&together, GRADIENTS, (3, 0, 0), true), None);
        // Those of the other role are in another communicator.
        assert_eq!(refusal(&together, SLICES, (2, 27, 3), false), None);
        let slices = config(Role::Verifier, &["cuda:0", "cuda:0"]);
        let refused = refusal(&slices, SLICES, (2, 27, 3), false).expect("they share a gpu");
        assert!(
            refused.contains("verifier.collective = \"nccl\": verifier-0 and verifier-1 share cuda:0"),
            "{refused}"
        );
    }
}
