//! Tensors in safetensors files, mapped and read by name.
//!
//! A folder holds either one `model.safetensors` or shards listed in `model.safetensors.index.json`. Opening reads the
//! headers only; a tensor's pages are read when they are touched, so a rank pays for what it uses.
//!
//! Invariants: every tensor handed out lies wholly inside its file, and its bytes are as many as its shape and dtype
//! say. Files are trusted to stay unchanged while they are mapped.

mod blocks;
mod encoding;
mod error;
mod file;
mod safetensors_file;
mod tensor;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a panic is how a test fails")]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub use blocks::BlockFormat;
pub use encoding::Encoding;
pub use error::WeightsError;
pub(crate) use file::MappedFile;
pub use safetensors::Dtype;
pub(crate) use tensor::RowOrder;
pub use tensor::TensorView;

use crate::digest::{Digest, Digester};

/// File name of unsharded weights.
pub(crate) const SINGLE_FILE: &str = "model.safetensors";
/// File name of the list of shards.
pub(crate) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The tensors of one folder, by name.
#[derive(Clone, Debug)]
pub struct Weights {
    folder: PathBuf,
    tensors: BTreeMap<String, TensorView>,
    /// Shards that are not there, by the names of their tensors.
    absent: BTreeMap<String, String>,
}

impl Weights {
    /// Maps the weights of a folder: `model.safetensors`, else the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// When the folder, the index or a shard is missing, or a file is truncated or no safetensors file.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let weights = Self::open_present(folder)?;
        let shards: BTreeSet<&str> = weights.absent.values().map(String::as_str).collect();
        if shards.is_empty() {
            return Ok(weights);
        }
        Err(WeightsError::ShardMissing {
            index: weights.folder.join(INDEX_FILE),
            shards: shards.into_iter().collect::<Vec<_>>().join("`, `"),
        })
    }

    /// As [`Self::open`], but shards may be missing: their tensors cannot be had.
    ///
    /// # Errors
    /// When the folder or the index is missing, or a file is truncated or no safetensors file.
    pub fn open_present(folder: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let folder = folder.as_ref();
        if !folder.is_dir() {
            return Err(WeightsError::FolderMissing {
                folder: folder.to_owned(),
            });
        }
        let single = folder.join(SINGLE_FILE);
        if single.is_file() {
            return Self::open_file(&single);
        }
        let index = folder.join(INDEX_FILE);
        if index.is_file() {
            return Self::open_sharded(folder, &index);
        }
        Err(WeightsError::NoWeights {
            folder: folder.to_owned(),
        })
    }

    /// Maps one safetensors file of any name.
    ///
    /// # Errors
    /// When the file is missing, truncated or no safetensors file.
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let path = path.as_ref();
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        Ok(Self {
            folder,
            tensors: safetensors_file::open(path)?.into_iter().collect(),
            absent: BTreeMap::new(),
        })
    }

    /// The tensors of a file or folder, which is named in messages.
    pub(crate) fn of_tensors(folder: PathBuf, tensors: BTreeMap<String, TensorView>) -> Self {
        Self {
            folder,
            tensors,
            absent: BTreeMap::new(),
        }
    }

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self, WeightsError> {
        let weight_map = read_index(index)?;
        let (present, absent): (BTreeMap<String, String>, BTreeMap<String, String>) = weight_map
            .into_iter()
            .partition(|(_, shard)| folder.join(shard).is_file());
        let weight_map = present;
        let shards: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        let mut tensors = BTreeMap::new();
        for shard in shards {
            let held = safetensors_file::open(&folder.join(shard))?;
            let listed = |name: &str| weight_map.get(name).is_some_and(|listed| listed == shard);
            tensors.extend(held.into_iter().filter(|(name, _)| listed(name)));
        }
        match weight_map.iter().find(|(name, _)| !tensors.contains_key(*name)) {
            None => Ok(Self {
                folder: folder.to_owned(),
                tensors,
                absent,
            }),
            Some((tensor, shard)) => Err(WeightsError::NotInShard {
                index: index.to_owned(),
                shard: shard.clone(),
                tensor: tensor.clone(),
            }),
        }
    }

    /// The folder or GGUF file that the weights were opened from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether a tensor of this name is there.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`WeightsError::TensorMissing`], which suggests the nearest name, and [`WeightsError::ShardMissing`].
    pub fn tensor(&self, name: &str) -> Result<TensorView, WeightsError> {
        if let Some(shard) = self.absent.get(name) {
            return Err(WeightsError::ShardMissing {
                index: self.folder.join(INDEX_FILE),
                shards: shard.clone(),
            });
        }
        self.tensors
            .get(name)
            .cloned()
            .ok_or_else(|| WeightsError::TensorMissing {
                folder: self.folder.clone(),
                tensor: name.to_owned(),
                nearest: self.nearest(name).map(str::to_owned),
            })
    }

    /// Bytes of all tensors together.
    pub fn bytes(&self) -> u64 {
        self.tensors
            .values()
            .map(|tensor| tensor.bytes().len() as u64)
            .sum()
    }

    /// Digest of the names, dtypes and shapes of all tensors and of `config`, the bytes of the model's config.json.
    ///
    /// The data are left out, so that it costs no more than the headers; it does not depend on how a model is sharded.
    pub fn digest(&self, config: &[u8]) -> Digest {
        let mut digester = Digester::new();
        digester.part(config);
        for (name, tensor) in &self.tensors {
            digester.part(name.as_bytes());
            digester.part(format!("{} {:?}", tensor.encoding(), tensor.shape()).as_bytes());
        }
        digester.finish()
    }

    /// The name that is most like `name`, if any is like it at all.
    fn nearest(&self, name: &str) -> Option<&str> {
        self.names()
            .map(|candidate| (strsim::normalized_levenshtein(name, candidate), candidate))
            .filter(|(likeness, _)| *likeness >= 0.6)
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, candidate)| candidate)
    }
}

/// Reads the `weight_map` of an index: tensor name to shard file name.
fn read_index(path: &Path) -> Result<BTreeMap<String, String>, WeightsError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let broken = |reason: String| WeightsError::Index {
        file: path.to_owned(),
        reason,
    };
    let bytes = std::fs::read(path).map_err(|source| WeightsError::Read {
        file: path.to_owned(),
        source,
    })?;
    let index: Index = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    for shard in index.weight_map.values() {
        // A name with folders in it could reach outside the model's folder.
        if Path::new(shard).file_name() != Some(std::ffi::OsStr::new(shard)) {
            return Err(broken(format!("shard `{shard}` is no plain file name")));
        }
    }
    Ok(index.weight_map)
}
