//! What an eaglet rank computes: models, data, collectives, transports, checkpoints.
//!
//! Nothing here decides *when* something happens: that is `eaglet-actors`. The crate has no actors, no supervision
//! and no knowledge of `cluster.toml`.

// Helpers of the integration tests are used inside, too.
#[cfg(test)]
extern crate self as eaglet_runtime;

mod cache_files;
pub mod checkpoint;
pub mod collective;
pub mod contract;
pub mod control;
pub mod cuda;
pub mod device;
pub mod digest;
pub mod draft;
pub mod gguf;
pub mod hidden_files;
pub mod hub;
pub mod ids;
pub mod link;
pub mod model_files;
pub mod optimizer;
pub mod rope;
pub mod row;
pub mod samples;
pub mod verifier;
pub mod weights;
pub mod wire;
