//! GGUF files: blocks against gguf-py, damaged headers, models and tokenizers against those they were converted from.
//!
//! `EAGLET_GOLDEN_DIR/verifiers` adds models, `EAGLET_REAL_DIR` real ones (see `models.rs`).

mod blocks;
mod convert;
mod models;
mod quantise;
mod reader;
mod tokenizers;
mod writer;

use std::path::{Path, PathBuf};

/// A file of the golden ones.
fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden/gguf")
        .join(name)
}

/// A folder with a file of these bytes.
fn written(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("model.gguf");
    std::fs::write(&file, bytes).expect("it is writable");
    (folder, file)
}
