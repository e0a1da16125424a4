//! Who does what and when in an eaglet cluster: supervision, ledger, routing, steps. No tensor arithmetic.

pub mod config;
pub mod coordinator;
pub mod engine;
pub mod faults;
pub mod gpus;
pub mod host;
pub mod journal;
pub mod monitor;
pub mod preflight;
mod processes;
pub mod rank;
pub mod recipe;
pub mod replica;
pub mod verifier_source;

pub use processes::TOKEN_VARIABLE;
