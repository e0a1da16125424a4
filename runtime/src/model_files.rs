//! The files of a model: a folder in Hugging Face's layout, or a GGUF file that is read as one.
//!
//! Whoever reads a model asks here for `config.json`, `tokenizer.json` and the like by name, and for the weights.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::gguf::{Gguf, GgufError};
use crate::weights::{Weights, WeightsError};

/// Configuration of the model.
pub const CONFIG: &str = "config.json";
/// Defaults of its generation.
pub const GENERATION_CONFIG: &str = "generation_config.json";
/// Its fast tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// Its special tokens and, in older models, chat templates.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Its chat template.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";

/// Why a file of a model cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ModelFilesError {
    /// The operating system refused.
    #[error("cannot read `{file}`: {source}; check its permissions")]
    Read {
        /// The file.
        file: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The GGUF file cannot be used.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

/// Where the files of a model are.
#[derive(Clone, Debug)]
pub struct ModelFiles {
    path: PathBuf,
    /// `None` for a folder.
    gguf: Option<Arc<Gguf>>,
}

impl ModelFiles {
    /// The files at a path: a GGUF file if its name ends so and it is no folder, else a folder, which need not be there.
    ///
    /// # Errors
    /// When a GGUF file cannot be used.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let gguf = Self::is_gguf(path).then(|| Gguf::open(path)).transpose()?;
        Ok(Self {
            path: path.to_owned(),
            gguf: gguf.map(Arc::new),
        })
    }

    /// Whether a path names a GGUF file.
    pub fn is_gguf(path: &Path) -> bool {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
            && !path.is_dir()
    }

    /// The folder or the GGUF file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What to call a file in a message: the GGUF file itself stands for all that is in it.
    pub fn place(&self, name: &str) -> PathBuf {
        match self.gguf {
            Some(_) => self.path.clone(),
            None => self.path.join(name),
        }
    }

    /// The GGUF file, if it is one.
    pub fn gguf(&self) -> Option<&Gguf> {
        self.gguf.as_deref()
    }

    /// Content of a file by its name in a folder; `None` if there is none.
    ///
    /// # Errors
    /// When it is there and cannot be read, or the GGUF file does not hold what it follows from.
    pub fn read(&self, name: &str) -> Result<Option<Vec<u8>>, ModelFilesError> {
        if let Some(gguf) = &self.gguf {
            let content = match name {
                CONFIG => Some(gguf.config_json()?.to_string().into_bytes()),
                TOKENIZER => Some(gguf.tokenizer_json()?),
                TOKENIZER_CONFIG => Some(gguf.tokenizer_config_json()?.to_string().into_bytes()),
                _ => None,
            };
            return Ok(content);
        }
        let file = self.path.join(name);
        match std::fs::read(&file) {
            Ok(content) => Ok(Some(content)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(ModelFilesError::Read { file, source }),
        }
    }

    /// The weights.
    ///
    /// # Errors
    /// As [`Weights::open`] and [`Gguf::weights`].
    pub fn weights(&self) -> Result<Weights, WeightsError> {
        let (weights, problems) = self.survey_weights()?;
        problems.into_iter().next().map_or(Ok(weights), Err)
    }

    /// As much of the weights as can be used, and what is wrong with the rest.
    ///
    /// # Errors
    /// As [`Weights::survey`] and [`Gguf::weights`].
    pub fn survey_weights(&self) -> Result<(Weights, Vec<WeightsError>), WeightsError> {
        match &self.gguf {
            Some(gguf) => Ok((gguf.weights()?, Vec::new())),
            None => Weights::survey(&self.path),
        }
    }
}
