//! Checkpoints: what vLLM serves, and what a run resumes from.
//!
//! A checkpoint is a folder with up to four files:
//!
//! | file | what | for whom |
//! | --- | --- | --- |
//! | `config.json`, `model.safetensors` | the draft in bf16, as speculators 0.9 writes it | vLLM, warm starts |
//! | `training_state.safetensors` | f32 weights and optimizer moments | a resumed run |
//! | `manifest.json` | length and digest of the others | [`CheckpointFolder::latest_valid`] |
//!
//! Invariants:
//!
//! - A folder under its final name is complete: it was written beside, synced, and renamed in.
//! - Nothing is taken from a file before its length, its names, shapes and dtypes were checked; the training state also
//!   checks digests of its content, because a flipped bit there would be trained on.
//! - The same inputs give the same bytes.

mod config_json;
mod config_section;
mod error;
mod export;
mod folder;
mod manifest;
mod rope_json;
mod state;
mod table;
mod tensor_file;

pub use config_json::{ConfigError, DraftConfig, ExportInfo};
pub use error::CheckpointError;
pub use export::{CONFIG_FILE, LoadedDraft, LoadedTensor, MODEL_FILE, export, load};
pub use folder::{Checkpoint, CheckpointFolder, Latest};
pub use manifest::{MANIFEST_FILE, verify};
pub use state::{STATE_FILE, StateView, TrainingState, layout_digest};
pub use table::tensor_table;
