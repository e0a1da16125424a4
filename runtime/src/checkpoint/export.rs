//! The draft as vLLM serves it: `config.json` and `model.safetensors`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::table::{D2T, EMBEDDING, T2D, check_maps};
use super::tensor_file::{self, Entry, TensorFile, Values};
use super::{CheckpointError, DraftConfig, tensor_table};

/// File with the draft's configuration.
pub const CONFIG_FILE: &str = "config.json";
/// File with the draft's weights.
pub const MODEL_FILE: &str = "model.safetensors";

/// Writes a draft into `folder`, which is made if missing: weights rounded to bf16 (nearest, ties to even), `d2t` as
/// i64, `t2d` as booleans.
///
/// `tensors` are exactly those of [`tensor_table`] in any order, as (name, shape, row-major values). With a full draft
/// vocabulary the maps are checked and left out, as speculators does; with a reduced one both are needed.
///
/// The two files are synced one by one; for a folder that appears at once, call this from
/// [`CheckpointFolder::write`](super::CheckpointFolder::write).
///
/// # Errors
/// A tensor is missing, unknown, given twice or of the wrong shape; a value does not stay finite in bf16; the maps break
/// their invariants; the files cannot be written.
pub fn export<'a>(
    folder: &Path,
    config: &DraftConfig,
    tensors: impl IntoIterator<Item = (&'a str, &'a [usize], &'a [f32])>,
    d2t: Option<&[i64]>,
    t2d: Option<&[bool]>,
) -> Result<(), CheckpointError> {
    let spec = config.spec();
    let path = folder.join(MODEL_FILE);
    let wrong = |tensor: &str, problem: String| CheckpointError::tensor(&path, tensor, problem);
    let mut missing: BTreeMap<String, Vec<usize>> = tensor_table(spec).into_iter().collect();
    let mut entries = Vec::with_capacity(missing.len() + 2);
    for (name, shape, values) in tensors {
        let Some(needed) = missing.remove(name) else {
            return Err(wrong(
                name,
                "does not belong to this draft, or is given twice".to_owned(),
            ));
        };
        if shape != needed {
            return Err(wrong(
                name,
                format!("has shape {shape:?} where {needed:?} is needed"),
            ));
        }
        entries.push(Entry {
            name: name.to_owned(),
            shape: needed,
            values: Values::RoundedToBf16(values),
        });
    }
    if let Some(name) = missing.keys().next() {
        return Err(wrong(name, "is missing".to_owned()));
    }
    check_maps(spec, d2t, t2d).map_err(|(map, problem)| wrong(map, problem))?;
    if spec.draft_vocab_size != spec.vocab_size {
        let (Some(d2t), Some(t2d)) = (d2t, t2d) else {
            return Err(wrong(
                T2D,
                "is missing, but the draft vocabulary is a reduced one".to_owned(),
            ));
        };
        entries.push(Entry {
            name: D2T.to_owned(),
            shape: vec![d2t.len()],
            values: Values::I64(d2t),
        });
        entries.push(Entry {
            name: T2D.to_owned(),
            shape: vec![t2d.len()],
            values: Values::Bool(t2d),
        });
    }
    fs::create_dir_all(folder).map_err(|cause| CheckpointError::write(folder, cause))?;
    tensor_file::write(&path, entries, ("format", "pt"))?;
    config.write(&folder.join(CONFIG_FILE))
}

/// A tensor read from a draft's checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedTensor {
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its values, row-major.
    pub values: Vec<f32>,
}

/// A draft read from its checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadedDraft {
    /// What `config.json` says.
    pub config: DraftConfig,
    /// The tensors of [`tensor_table`] by name. `embed_tokens.weight` may be missing: it is the verifier's.
    pub tensors: BTreeMap<String, LoadedTensor>,
    /// Offset from each draft token to its verifier token, `[draft_vocab_size]`; `None` with a full vocabulary.
    pub d2t: Option<Vec<i64>>,
    /// Which verifier tokens the draft knows, `[vocab_size]`; `None` if the file has none.
    pub t2d: Option<Vec<bool>>,
}

/// Reads a draft from `folder`, whoever wrote it; floats become f32.
///
/// # Errors
/// A file cannot be read; the configuration is none of ours; a tensor is missing (but for the embedding), unknown, or of
/// the wrong shape or dtype; the vocabulary maps break their invariants.
pub fn load(folder: &Path) -> Result<LoadedDraft, CheckpointError> {
    let config = DraftConfig::read(&folder.join(CONFIG_FILE))?;
    let spec = config.spec();
    let path = folder.join(MODEL_FILE);
    let file = TensorFile::open(&path)?;
    let mut tensors = BTreeMap::new();
    for (name, shape) in tensor_table(spec) {
        if name == EMBEDDING && !file.has(&name) {
            continue;
        }
        let values = file.floats(&name, &shape)?;
        tensors.insert(name, LoadedTensor { shape, values });
    }
    let d2t = if file.has(D2T) {
        Some(file.integers(D2T, &[spec.draft_vocab_size])?)
    } else {
        None
    };
    let t2d = if file.has(T2D) {
        Some(file.booleans(T2D, &[spec.vocab_size])?)
    } else {
        None
    };
    check_maps(spec, d2t.as_deref(), t2d.as_deref())
        .map_err(|(map, problem)| CheckpointError::tensor(&path, map, problem))?;
    // An unknown tensor means another architecture: with it ignored the draft would be served as something it is not.
    let unknown = |name: &&String| !tensors.contains_key(*name) && *name != D2T && *name != T2D;
    if let Some(name) = file.names().iter().find(unknown) {
        let problem = "is none that a draft of this config.json has; remove it or correct config.json";
        return Err(CheckpointError::tensor(&path, name, problem));
    }
    Ok(LoadedDraft {
        config,
        tensors,
        d2t,
        t2d,
    })
}
