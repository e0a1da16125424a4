//! Models in llama.cpp's GGUF format (versions 2 and 3, little-endian; `docs/gguf.md` of ggml), read as the Hugging Face
//! folders they were converted from.
//!
//! A file holds metadata, a tokenizer and tensors. From the metadata comes the content of `config.json`, from the
//! tokenizer that of `tokenizer.json` and `tokenizer_config.json`; tensors get Hugging Face's names, and what the
//! converter did to them is undone in their views. The data stay in the mapped file, in the form they are stored.
//!
//! Invariants:
//! - GGUF-1: nothing that a file claims (counts, lengths, offsets) is believed before it is compared with the file's
//!   length; no file makes this module panic, or allocate more than a small multiple of the header.
//! - GGUF-2: a tensor that is handed out lies inside its file, aligned, and over no other.
//! - GGUF-3: what is not known (architecture, tokenizer, pre-tokenizer) is an error and never a guess.

mod architecture;
mod config;
mod error;
mod header;
mod pre_tokenizer;
mod rope;
mod tensor_type;
mod tokenizer;
mod value;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

pub use error::GgufError;

use crate::weights::{TensorView, Weights};
use architecture::{Architecture, Heads};
use header::Header;
use value::{Array, Value, ValueType, scalar};

/// A model in a GGUF file, or in several (`NAME-00001-of-00003.gguf`).
#[derive(Debug)]
pub struct Gguf {
    path: PathBuf,
    /// The files; the first has the metadata.
    headers: Vec<Header>,
}

impl Gguf {
    /// Maps a file and checks its header; for the first of several files, all of them.
    ///
    /// # Errors
    /// When a file is missing, cut, damaged, or of another format or version.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let mut gguf = Self {
            path: path.to_owned(),
            headers: vec![Header::open(path)?],
        };
        gguf.open_rest()?;
        Ok(gguf)
    }

    /// Opens the other files of a model in several, as `split.no` (from 0) and `split.count` tell.
    fn open_rest(&mut self) -> Result<(), GgufError> {
        let count = self.whole("split.count")?.unwrap_or(1);
        if count <= 1 {
            return Ok(());
        }
        let split = |file: &Path, reason: String| GgufError::Split {
            file: file.to_owned(),
            reason,
        };
        let suffix = |index: i128| format!("-{:05}-of-{count:05}.gguf", index + 1);
        let number = self.whole("split.no")?.unwrap_or(0);
        if number != 0 {
            let reason = format!("its first file is NAME{}; give that one", suffix(0));
            return Err(split(&self.path, reason));
        }
        let name = self
            .path
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        let Some(stem) = name.strip_suffix(&suffix(0)) else {
            let reason = format!(
                "the first of {count}; name it NAME{}, and the others likewise",
                suffix(0)
            );
            return Err(split(&self.path, reason));
        };
        // One missing file is told before a claimed million of names is made.
        for index in 1..count {
            let other = self.path.with_file_name(format!("{stem}{}", suffix(index)));
            if !other.is_file() {
                let reason = format!(
                    "`{}` is not beside it; download it into the same folder",
                    other.display()
                );
                return Err(split(&self.path, reason));
            }
            let header = Header::open(&other)?;
            if header.metadata.get("split.no") != Some(&Value::Whole(index))
                || header.metadata.get("split.count") != Some(&Value::Whole(count))
            {
                let reason =
                    format!("it does not say that it is number {index} of {count}; download it again");
                return Err(split(&other, reason));
            }
            self.headers.push(header);
        }
        let held = self.tensors().count() as i128;
        match self.whole("split.tensors.count")? {
            Some(needed) if needed != held => {
                let reason = format!("all hold {held} tensors and should hold {needed}; download them again");
                Err(split(&self.path, reason))
            }
            _ => Ok(()),
        }
    }

    /// The file, the first one of several.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All tensors, as they are named and stored, in the files' order; shapes are outermost first.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorView> {
        self.headers.iter().flat_map(|header| &header.tensors)
    }

    /// The tensors under Hugging Face's names and in its order of rows; experts are one tensor each.
    ///
    /// # Errors
    /// When the architecture is not known, or a tensor does not fit it or is there twice.
    pub fn weights(&self) -> Result<Weights, GgufError> {
        let architecture = self.architecture()?;
        let heads = Heads {
            queries: self.required_count("attention.head_count")?,
            keys: self.head_count_kv()?,
        };
        let mut tensors = BTreeMap::new();
        for stored in self.tensors() {
            let damaged = |reason: String| GgufError::Damaged {
                file: stored.file().to_owned(),
                place: format!("tensor `{}`", stored.name()),
                reason,
            };
            for view in architecture.tensors(stored, heads).map_err(damaged)? {
                let name = view.name().to_owned();
                if tensors.insert(name.clone(), view).is_some() {
                    return Err(damaged(format!("is `{name}`, which is there already")));
                }
            }
        }
        Ok(Weights::of_tensors(self.path.clone(), tensors))
    }

    /// What the architecture is.
    fn architecture(&self) -> Result<&'static Architecture, GgufError> {
        let name = self.required_text("general.architecture")?;
        Architecture::named(name).ok_or_else(|| GgufError::UnknownArchitecture {
            file: self.path.clone(),
            architecture: name.to_owned(),
        })
    }

    fn stored_tensor(&self, name: &str) -> Option<&TensorView> {
        self.tensors().find(|tensor| tensor.name() == name)
    }

    fn key_error(&self, key: &str, reason: impl Into<String>) -> GgufError {
        GgufError::Key {
            file: self.path.clone(),
            key: key.to_owned(),
            reason: reason.into(),
        }
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.headers[0].metadata.get(key)
    }

    fn bytes(&self) -> &[u8] {
        self.headers[0].file.bytes()
    }

    fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Text(range)) => std::str::from_utf8(&self.bytes()[range.clone()])
                .map(Some)
                .map_err(|_| self.key_error(key, "is no UTF-8")),
            Some(_) => Err(self.key_error(key, "is no text")),
        }
    }

    fn required_text(&self, key: &str) -> Result<&str, GgufError> {
        self.text(key)?.ok_or_else(|| self.key_error(key, "is missing"))
    }

    fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(&Value::Flag(flag)) => Ok(Some(flag)),
            Some(_) => Err(self.key_error(key, "is neither true nor false")),
        }
    }

    fn whole(&self, key: &str) -> Result<Option<i128>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(&Value::Whole(value)) => Ok(Some(value)),
            Some(_) => Err(self.key_error(key, "is no whole number")),
        }
    }

    /// A token id.
    fn token_id(&self, key: &str) -> Result<Option<u32>, GgufError> {
        let id =
            |value| u32::try_from(value).map_err(|_| self.key_error(key, format!("is {value}, no token id")));
        self.whole(key)?.map(id).transpose()
    }

    /// The elements of an array.
    fn array(&self, key: &str) -> Result<Option<&Array>, GgufError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(array)) => Ok(Some(array)),
            Some(_) => Err(self.key_error(key, "is no array")),
        }
    }

    /// The elements of an array of numbers or flags.
    fn scalars(&self, key: &str) -> Result<Option<Vec<Value>>, GgufError> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        let bytes = array
            .element
            .bytes()
            .ok_or_else(|| self.key_error(key, "is no array of numbers"))?;
        let elements = self.bytes()[array.range.clone()].chunks_exact(bytes);
        let values: Option<Vec<_>> = elements.map(|element| scalar(array.element, element)).collect();
        let values =
            values.ok_or_else(|| self.key_error(key, "has a flag that is neither true nor false"))?;
        Ok(Some(values))
    }

    /// The elements of an array of texts.
    fn texts(&self, key: &str) -> Result<Option<Vec<&str>>, GgufError> {
        let Some(array) = self.array(key)? else {
            return Ok(None);
        };
        if array.element != ValueType::Text {
            return Err(self.key_error(key, "is no array of texts"));
        }
        let mut rest = &self.bytes()[array.range.clone()];
        let mut texts = Vec::new();
        while let Some((len, behind)) = rest.split_first_chunk::<8>() {
            // The header's reader went the same way and found all of it inside the file.
            let (text, behind) = behind.split_at(u64::from_le_bytes(*len) as usize);
            let index = texts.len();
            let text = std::str::from_utf8(text)
                .map_err(|_| self.key_error(key, format!("has an element {index} that is no UTF-8")))?;
            texts.push(text);
            rest = behind;
        }
        Ok(Some(texts))
    }
}
