//! Hidden states of samples in files, in the layout that speculators reads and writes.
//!
//! One file per sample, `hs_N.safetensors`: `hidden_states` `[tokens, states, hidden]` as in
//! [`HiddenStates`](crate::row::HiddenStates), and `token_ids` `[tokens]` in int64; nothing is shifted. A folder that eaglet
//! wrote also has a `contract.json`, which says what the states are; speculators' folders have none.
//!
//! Invariants, cited by the tests:
//! - FILES-1: a file is found by the tokens in it, never by its number, so no filter of a dataset can pair it with another
//!   sample.
//! - FILES-2: what is read has the shape that its contract says and is finite; anything else is refused by name.
//! - FILES-3: a file is there whole or not at all.

mod error;
mod file;
mod folder;
mod recognise;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests;

pub use error::HiddenFileError;
pub use file::{HiddenFile, file_name};
pub use folder::{CONTRACT_FILE, HiddenFiles, HiddenWriter};
pub use recognise::{Tap, Unrecognised, recognise};
