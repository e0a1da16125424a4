//! Who does what and when in an eaglet cluster: supervision, ledger, routing, steps. No tensor arithmetic.

pub mod config;
pub mod monitor;
