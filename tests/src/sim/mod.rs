//! A seeded simulation of whole clusters around the real engine.
//!
//! The engine is the one that ships; ranks, links, streams, disk and intake are fake, and all of them live in one thread
//! under a virtual clock. A seed decides the cluster, its samples, the faults and every latency, so a schedule can be
//! replayed. After every event the invariants of [`invariants`] are checked.
//!
//! Files: [`plan`] what a seed decides, [`world`] the schedule, `clock` and `dice` its time and its luck, `network` streams
//! and links, [`collective`] NCCL, `rank`, `verifier` and `draft` the fake processes, `host` and `intake` the coordinator's process, `disk` what
//! outlives it, [`fault`] and `strike` what goes wrong, `corpus` and [`weights`] samples and arithmetic, [`batch`] many
//! schedules at once.

pub mod batch;
pub mod clock;
pub mod collective;
pub mod corpus;
pub mod dice;
pub mod disk;
pub mod draft;
pub mod fault;
mod host;
mod intake;
pub mod invariants;
mod machines;
pub mod network;
pub mod plan;
pub mod rank;
mod strike;
pub mod verifier;
pub mod weights;
pub mod world;
