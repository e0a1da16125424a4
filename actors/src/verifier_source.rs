//! Fetching a cluster's verifier, where it is a model on the Hub.

use eaglet_runtime::hub::{Hub, HubError, Need, Progress};
use eaglet_runtime::ids::Role;

use crate::config::ClusterConfig;

/// What of the verifier the ranks of this machine need: all of it, unless only drafts run here.
pub fn need(config: &ClusterConfig) -> Need {
    let verifies = |rank: &crate::config::RankConfig| rank.role == Role::Verifier && rank.is_local();
    if config.ranks.iter().any(verifies) {
        Need::Whole
    } else {
        Need::Frozen
    }
}

/// Fetches what is needed of a verifier on the Hub, and makes `verifier.path` the local path of it; `verifier.name`
/// becomes its name there, unless it is set. Nothing happens where the path is local. Blocks until all is there.
///
/// # Errors
/// When the verifier cannot be had, with the remedy.
pub fn fetch(
    config: &mut ClusterConfig,
    need: Need,
    progress: impl FnMut(&Progress),
) -> Result<(), HubError> {
    let verifier = &mut config.verifier;
    let Some(model) = verifier.hub_model() else {
        return Ok(());
    };
    let path = Hub::from_env()?.fetch(&model, need, progress)?;
    tracing::info!(%model, path = %path.display(), "the verifier is here");
    verifier.name.get_or_insert(model.repo);
    verifier.path = path;
    Ok(())
}
