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
use std::sync::{Arc, OnceLock};

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
    /// Tensors that the index places in a file that cannot be used, with that file.
    absent: BTreeMap<String, PathBuf>,
    /// Names with their numbers left out, each with the first such name; made when a name is looked for in vain.
    patterns: Arc<OnceLock<BTreeMap<String, String>>>,
}

impl Weights {
    /// Maps the weights of a folder: `model.safetensors`, else the shards that `model.safetensors.index.json` lists.
    ///
    /// # Errors
    /// When the folder, the index or a shard is missing, or a file is truncated or no safetensors file.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, WeightsError> {
        let (weights, problems) = Self::survey(folder)?;
        problems.into_iter().next().map_or(Ok(weights), Err)
    }

    /// As [`Self::open`], for whoever goes on with what can be used: shards that are missing, damaged or do not hold what
    /// the index says are returned beside the tensors of the others.
    ///
    /// # Errors
    /// When there is nothing to go on with: no folder, no index, or no file of weights that can be read.
    pub fn survey(folder: impl AsRef<Path>) -> Result<(Self, Vec<WeightsError>), WeightsError> {
        let folder = folder.as_ref();
        if !folder.is_dir() {
            return Err(WeightsError::FolderMissing {
                folder: folder.to_owned(),
            });
        }
        let single = folder.join(SINGLE_FILE);
        if single.is_file() {
            return Ok((Self::open_file(&single)?, Vec::new()));
        }
        let index = folder.join(INDEX_FILE);
        if index.is_file() {
            return Self::survey_sharded(folder, &index);
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
        let tensors = safetensors_file::open(path)?.into_iter().collect();
        Ok(Self::of_tensors(folder, tensors))
    }

    /// The tensors of a file or folder, which is named in messages.
    pub(crate) fn of_tensors(folder: PathBuf, tensors: BTreeMap<String, TensorView>) -> Self {
        Self {
            folder,
            tensors,
            absent: BTreeMap::new(),
            patterns: Arc::default(),
        }
    }

    fn survey_sharded(folder: &Path, index: &Path) -> Result<(Self, Vec<WeightsError>), WeightsError> {
        let weight_map = read_index(index)?;
        let shards: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        let (present, missing): (Vec<&str>, Vec<&str>) =
            shards.iter().partition(|name| folder.join(name).is_file());
        let mut problems = Vec::new();
        if !missing.is_empty() {
            problems.push(WeightsError::ShardMissing {
                index: index.to_owned(),
                shards: missing.join("`, `"),
            });
        }
        let mut tensors = BTreeMap::new();
        let mut unusable: BTreeSet<&str> = missing.into_iter().collect();
        for shard in present {
            match safetensors_file::open(&folder.join(shard)) {
                Ok(held) => {
                    let listed = |name: &str| weight_map.get(name).is_some_and(|listed| listed == shard);
                    tensors.extend(held.into_iter().filter(|(name, _)| listed(name)));
                }
                Err(problem) => {
                    unusable.insert(shard);
                    problems.push(problem);
                }
            }
        }
        let mut absent = BTreeMap::new();
        for (tensor, shard) in weight_map.iter().filter(|(name, _)| !tensors.contains_key(*name)) {
            // Of each shard that does not hold what it should one tensor is told.
            if unusable.insert(shard) {
                problems.push(WeightsError::NotInShard {
                    index: index.to_owned(),
                    shard: shard.clone(),
                    tensor: tensor.clone(),
                });
            }
            absent.insert(tensor.clone(), folder.join(shard));
        }
        let weights = Self {
            absent,
            ..Self::of_tensors(folder.to_owned(), tensors)
        };
        Ok((weights, problems))
    }

    /// The folder or GGUF file that the weights were opened from.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All names, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether a tensor of this name is there, or should be.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.absent.contains_key(name)
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`WeightsError::TensorMissing`], which suggests the nearest name, or [`WeightsError::Absent`].
    pub fn tensor(&self, name: &str) -> Result<TensorView, WeightsError> {
        if let Some(tensor) = self.tensors.get(name) {
            return Ok(tensor.clone());
        }
        if let Some(file) = self.absent.get(name) {
            return Err(WeightsError::Absent {
                tensor: name.to_owned(),
                file: file.clone(),
            });
        }
        Err(WeightsError::TensorMissing {
            folder: self.folder.clone(),
            tensor: name.to_owned(),
            nearest: self.nearest(name),
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

    /// The name that is most like `name`, if any is like it at all. Names that differ in numbers only are compared once: a
    /// model of experts has hundreds of thousands.
    fn nearest(&self, name: &str) -> Option<String> {
        let patterns = self.patterns.get_or_init(|| {
            let names = self.tensors.keys().rev();
            names.map(|name| (without_numbers(name), name.clone())).collect()
        });
        let wanted = without_numbers(name);
        let (_, pattern, first) = patterns
            .iter()
            .map(|(pattern, first)| (strsim::normalized_levenshtein(&wanted, pattern), pattern, first))
            .filter(|(likeness, ..)| *likeness >= 0.6)
            .max_by(|a, b| a.0.total_cmp(&b.0))?;
        let numbered = with_numbers(pattern, name);
        Some(if self.tensors.contains_key(&numbered) {
            numbered
        } else {
            first.clone()
        })
    }
}

/// Stands for a number in a pattern of names.
const NUMBER: char = '#';

/// A name with each number replaced.
fn without_numbers(name: &str) -> String {
    let mut pattern = String::new();
    for character in name.chars() {
        if !character.is_ascii_digit() {
            pattern.push(character);
        } else if !pattern.ends_with(NUMBER) {
            pattern.push(NUMBER);
        }
    }
    pattern
}

/// A pattern with the numbers of a name, in their order.
fn with_numbers(pattern: &str, name: &str) -> String {
    let mut numbers = name
        .split(|character: char| !character.is_ascii_digit())
        .filter(|number| !number.is_empty());
    let mut filled = String::new();
    for character in pattern.chars() {
        match (character, numbers.clone().next()) {
            (NUMBER, Some(number)) => {
                filled.push_str(number);
                numbers.next();
            }
            _ => filled.push(character),
        }
    }
    filled
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
