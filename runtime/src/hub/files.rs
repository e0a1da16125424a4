//! Which files of a model are needed.

use std::collections::{BTreeMap, BTreeSet};

use super::{HubModel, Need};
use crate::model_files::{CHAT_TEMPLATE, CONFIG, GENERATION_CONFIG, TOKENIZER, TOKENIZER_CONFIG};
use crate::weights::{INDEX_FILE, SINGLE_FILE};

/// Files that every use needs, where a model has them.
const SMALL: [&str; 5] = [
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
];

/// How the names of embedding, head and final norm end, whatever a model puts before them.
const FROZEN: [&str; 3] = ["embed_tokens.weight", "lm_head.weight", "model.norm.weight"];

/// What a model does not have.
#[derive(Debug)]
pub(super) struct Lacking {
    pub(super) missing: String,
    pub(super) remedy: String,
}

fn lacking(missing: impl Into<String>, remedy: impl Into<String>) -> Lacking {
    Lacking {
        missing: missing.into(),
        remedy: remedy.into(),
    }
}

/// Names of the needed files, those first that are small. `is_there` tells whether the model has a file, `read` gives
/// the content of the index of shards.
pub(super) fn needed(
    model: &HubModel,
    need: Need,
    is_there: impl Fn(&str) -> bool,
    read: impl FnOnce(&str) -> Option<Vec<u8>>,
) -> Result<Vec<String>, Lacking> {
    if let Some(file) = &model.file {
        return gguf(file, is_there);
    }
    if !is_there(CONFIG) {
        return Err(lacking(
            CONFIG,
            "for a GGUF file of it, give OWNER/NAME/FILE.gguf; else take a model in the Hugging Face layout",
        ));
    }
    let mut names: Vec<String> = SMALL
        .iter()
        .filter(|name| is_there(name))
        .map(|&name| name.to_owned())
        .collect();
    if need == Need::Tokenizer {
        return Ok(names);
    }
    if is_there(SINGLE_FILE) {
        names.push(SINGLE_FILE.to_owned());
    } else if is_there(INDEX_FILE) {
        names.push(INDEX_FILE.to_owned());
        let index = read(INDEX_FILE).ok_or_else(|| lacking(INDEX_FILE, "launch again"))?;
        names.extend(shards(&index, need)?);
    } else {
        let missing = format!("{SINGLE_FILE} and no {INDEX_FILE}");
        return Err(lacking(
            missing,
            "take a model whose weights are in safetensors files",
        ));
    }
    Ok(names)
}

/// The file, or all files of a model in several of which it is the first.
fn gguf(file: &str, is_there: impl Fn(&str) -> bool) -> Result<Vec<String>, Lacking> {
    let first = "-00001-of-";
    let parts = file.rsplit_once(first).and_then(|(stem, rest)| {
        let count: u32 = rest.strip_suffix(".gguf")?.parse().ok()?;
        Some((stem, count))
    });
    let names = match parts {
        // More parts than five digits can number there are not.
        Some((stem, count @ 1..=99_999)) => (1..=count)
            .map(|part| format!("{stem}-{part:05}-of-{count:05}.gguf"))
            .collect(),
        _ => vec![file.to_owned()],
    };
    match names.iter().find(|name| !is_there(name)) {
        Some(name) => Err(lacking(name, "check the name of the file on the model's page")),
        None => Ok(names),
    }
}

/// Shards of the needed tensors.
fn shards(index: &[u8], need: Need) -> Result<BTreeSet<String>, Lacking> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let usable = format!("usable {INDEX_FILE}");
    let index: Index =
        serde_json::from_slice(index).map_err(|_| lacking(&usable, "take another revision"))?;
    let is_needed = |tensor: &str| need == Need::Whole || FROZEN.iter().any(|end| tensor.ends_with(end));
    let shards: BTreeSet<String> = index
        .weight_map
        .into_iter()
        .filter(|(tensor, _)| is_needed(tensor))
        .map(|(_, shard)| shard)
        .collect();
    // A name with folders in it could reach outside the cache.
    match shards.iter().find(|shard| !super::is_name(shard)) {
        Some(shard) => Err(lacking(
            usable,
            format!("its shard `{shard}` is no plain file name"),
        )),
        None => Ok(shards),
    }
}
