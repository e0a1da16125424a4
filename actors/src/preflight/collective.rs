//! NCCL, if gradients are summed over it: which one is there, and whether it takes the draft ranks as they are placed.

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
}

/// Looks for NCCL, if it is wanted.
pub(super) fn look(findings: &mut Findings<'_>) -> Option<NcclSummary> {
    let config = &findings.survey().config;
    if config.training.collective != Collective::Nccl || config.run.extract_to.is_some() {
        return None;
    }
    let nccl = match Nccl::open(&SearchPath::here()) {
        Ok(nccl) => nccl,
        Err(error) => {
            let text = format!("training.collective = \"nccl\": {error}, or take \"links\"");
            findings.add(Severity::Fatal, Topic::Device, "training.collective", text);
            return None;
        }
    };
    let version = nccl.version();
    let may_share = std::env::var(SHARES_VARIABLE).is_ok_and(|value| value == "1");
    if let Some(text) = refusal(config, version, may_share) {
        findings.add(Severity::Fatal, Topic::Device, "training.collective", text);
    }
    let (major, minor, patch) = version;
    Some(NcclSummary {
        version: format!("{major}.{minor}.{patch}"),
        path: nccl.path().to_owned(),
    })
}

/// Why NCCL would not take the draft ranks.
fn refusal(config: &ClusterConfig, version: (u32, u32, u32), may_share: bool) -> Option<String> {
    let (device, seats) = shared(config)?;
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
        "training.collective = \"nccl\": {} share {device}, and NCCL refuses two ranks on one GPU; give each a GPU of its own, \
         or take \"links\"; {remedy}",
        seats.join(" and ")
    ))
}

/// The first GPU that several draft ranks are on, and who they are.
fn shared(config: &ClusterConfig) -> Option<(&str, Vec<Seat>)> {
    let drafts = || {
        config
            .ranks
            .iter()
            .filter(|rank| rank.role == Role::Draft && rank.gpu().is_some())
    };
    drafts().find_map(|rank| {
        let seats: Vec<Seat> = drafts()
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

    fn config(devices: &[&str]) -> ClusterConfig {
        let rank = |(seat, device): (u16, &&str)| RankConfig {
            seat,
            device: (*device).to_owned(),
            ..RankConfig::new(Role::Draft)
        };
        ClusterConfig {
            ranks: (0..).zip(devices).map(rank).collect(),
            ..ClusterConfig::default()
        }
    }

    #[test]
    fn two_ranks_on_one_gpu_need_a_new_nccl_that_is_told_so() {
        let apart = config(&["cuda:0", "cuda:1"]);
        assert_eq!(refusal(&apart, (2, 27, 0), false), None);
        let together = config(&["cuda:0", "cuda:1", "cuda:0"]);
        let old = refusal(&together, (2, 27, 3), true).expect("it is too old");
        assert!(
            old.contains("draft-0 and draft-2 share cuda:0")
                && old.contains("from 2.30 on, and this is 2.27.3"),
            "{old}"
        );
        let untold = refusal(&together, (2, 30, 0), false).expect("it was not told");
        assert!(untold.contains("set NCCL_MULTI_RANK_GPU_ENABLE=1"), "{untold}");
        assert_eq!(refusal(&together, (3, 0, 0), true), None);
    }
}
