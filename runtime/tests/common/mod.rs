//! What the tests over golden verifiers share.

use std::path::{Path, PathBuf};

/// A part of the folder `EAGLET_GOLDEN_DIR`, if it is there.
pub(crate) fn shared_folder(part: &str) -> Option<PathBuf> {
    let folder = Path::new(&std::env::var_os("EAGLET_GOLDEN_DIR")?).join(part);
    folder.is_dir().then_some(folder)
}

/// The folders of all golden verifiers: the project's own and those of `EAGLET_GOLDEN_DIR`, sorted.
///
/// # Panics
/// If a folder cannot be read.
pub(crate) fn model_folders() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/verifiers");
    let mut folders: Vec<PathBuf> = [Some(own), shared_folder("verifiers")]
        .into_iter()
        .flatten()
        .flat_map(|folder| std::fs::read_dir(folder).expect("a readable folder"))
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|folder| folder.join("golden.safetensors").is_file())
        .collect();
    folders.sort_by_key(|folder| folder.file_name().map(ToOwned::to_owned));
    folders
}

/// Largest difference over the largest expected value.
///
/// # Panics
/// If the two are not equally long.
pub(crate) fn difference(actual: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(actual.len(), expected.len());
    let largest = expected
        .iter()
        .fold(0.0f32, |largest, value| largest.max(value.abs()));
    let worst = actual.iter().zip(expected).map(|(a, b)| (a - b).abs());
    // NaN must not be lost in the maximum.
    worst.fold(0.0, |worst, x| if x <= worst { worst } else { x }) / largest
}
