//! A folder of hidden states, its contract, and the way from a sample's tokens to its file.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::HiddenFileError;
use super::file::{HiddenFile, publish};
use crate::contract::{Contract, HiddenDtype};
use crate::digest::Digest;
use crate::row::HiddenStates;

/// File beside the states that says what they are.
pub const CONTRACT_FILE: &str = "contract.json";
/// Folder in which speculators puts its files, beside its dataset.
const SUBFOLDER: &str = "hidden_states";

/// `contract.json`.
#[derive(Serialize, Deserialize)]
struct ContractJson {
    written_by: String,
    /// Digests in hexadecimal, as they are shown everywhere.
    verifier: String,
    aux_layers: Vec<u32>,
    /// `input`: an id names the layer whose input is captured.
    layer_convention: String,
    /// `before the final norm`.
    last_state: String,
    hidden_size: u32,
    dtype: HiddenDtype,
    tokenizer: String,
    template: String,
}

const CONVENTION: &str = "input";
const LAST_STATE: &str = "before the final norm";

impl From<&Contract> for ContractJson {
    fn from(contract: &Contract) -> Self {
        Self {
            written_by: format!("eaglet {}", env!("CARGO_PKG_VERSION")),
            verifier: contract.verifier.to_string(),
            aux_layers: contract.aux_layers.clone(),
            layer_convention: CONVENTION.to_owned(),
            last_state: LAST_STATE.to_owned(),
            hidden_size: contract.hidden_size,
            dtype: contract.dtype,
            tokenizer: contract.tokenizer.to_string(),
            template: contract.template.to_string(),
        }
    }
}

impl ContractJson {
    /// The contract, or what of it is not understood.
    fn contract(&self) -> Result<Contract, String> {
        for (key, found, known) in [
            ("layer_convention", &self.layer_convention, CONVENTION),
            ("last_state", &self.last_state, LAST_STATE),
        ] {
            if found != known {
                return Err(format!("{key} is `{found}`, which is not `{known}`"));
            }
        }
        let digest = |key: &str, text: &str| {
            text.parse::<Digest>()
                .map_err(|error| format!("{key} is `{text}`: {error}"))
        };
        Ok(Contract {
            verifier: digest("verifier", &self.verifier)?,
            aux_layers: self.aux_layers.clone(),
            hidden_size: self.hidden_size,
            dtype: self.dtype,
            tokenizer: digest("tokenizer", &self.tokenizer)?,
            template: digest("template", &self.template)?,
        })
    }
}

fn digest(tokens: &[u32]) -> Digest {
    let bytes: Vec<u8> = tokens.iter().flat_map(|id| id.to_le_bytes()).collect();
    Digest::of(&bytes)
}

/// The files of a folder by their tokens.
#[derive(Debug)]
pub struct HiddenFiles {
    folder: PathBuf,
    contract: Option<Contract>,
    /// Digest of the tokens, cut to the longest row, to file name.
    files: HashMap<Digest, String>,
    longest: usize,
    refused: Vec<HiddenFileError>,
}

impl HiddenFiles {
    /// Opens the files of a folder, or of the `hidden_states` folder in it. Samples are cut to `longest` tokens before they
    /// are looked for.
    ///
    /// A file that cannot be used is passed over and listed by [`Self::refused`].
    ///
    /// # Errors
    /// When the folder cannot be read, has no such file, or its contract cannot be read.
    pub fn open(folder: &Path, longest: usize) -> Result<Self, HiddenFileError> {
        let (mut files, mut names) = Self::list(folder, longest)?;
        let folder = files.folder.clone();
        // Of two files with the same tokens the first by name is taken, whatever order the system lists them in.
        names.sort();
        for name in names {
            match HiddenFile::open(&folder.join(&name)) {
                Ok(file) => {
                    let tokens = &file.tokens()[..file.tokens().len().min(longest)];
                    files.files.entry(digest(tokens)).or_insert(name);
                }
                Err(error) => files.refused.push(error),
            }
        }
        Ok(files)
    }

    /// Checks that a folder has files, and that its contract, if it has one, is what is expected; the files are not opened.
    ///
    /// # Errors
    /// As [`Self::open`] and [`Self::expect`].
    pub fn look(folder: &Path, contract: &Contract) -> Result<(), HiddenFileError> {
        Self::list(folder, 0)?.0.expect(contract)
    }

    /// The folder without its files, and their names.
    fn list(folder: &Path, longest: usize) -> Result<(Self, Vec<String>), HiddenFileError> {
        let inner = folder.join(SUBFOLDER);
        let folder = if inner.is_dir() { &inner } else { folder };
        let files = Self {
            folder: folder.to_owned(),
            contract: read_contract(folder)?,
            files: HashMap::new(),
            longest,
            refused: Vec::new(),
        };
        let mut names = Vec::new();
        let entries =
            std::fs::read_dir(folder).map_err(|error| HiddenFileError::io("read", folder, error))?;
        for entry in entries {
            let entry = entry.map_err(|error| HiddenFileError::io("read", folder, error))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("hs_") && name.ends_with(".safetensors") {
                names.push(name);
            }
        }
        if names.is_empty() {
            return Err(HiddenFileError::Empty {
                folder: folder.to_owned(),
            });
        }
        Ok((files, names))
    }

    /// What the states are, if the folder says so.
    pub fn contract(&self) -> Option<&Contract> {
        self.contract.as_ref()
    }

    /// Checks the folder's contract, if it has one.
    ///
    /// # Errors
    /// [`HiddenFileError::Difference`].
    pub fn expect(&self, contract: &Contract) -> Result<(), HiddenFileError> {
        let found = self.contract.as_ref().map(|found| Contract {
            // States are rounded on their way, whatever they are stored as.
            dtype: contract.dtype,
            ..found.clone()
        });
        match found.and_then(|found| contract.difference(&found)) {
            None => Ok(()),
            Some(difference) => Err(HiddenFileError::Difference {
                folder: self.folder.clone(),
                difference,
            }),
        }
    }

    /// Number of samples.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether no file can be used.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Files that cannot be used.
    pub fn refused(&self) -> &[HiddenFileError] {
        &self.refused
    }

    /// The folder of the files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The states of a sample, by its tokens (FILES-1); `None` if no file has them.
    ///
    /// # Errors
    /// As [`HiddenFile::read`].
    pub fn read(
        &self,
        tokens: &[u32],
        shape: (usize, usize),
        dtype: HiddenDtype,
    ) -> Result<Option<HiddenStates>, HiddenFileError> {
        let cut = &tokens[..tokens.len().min(self.longest)];
        let Some(name) = self.files.get(&digest(cut)) else {
            return Ok(None);
        };
        let file = HiddenFile::open(&self.folder.join(name))?;
        if !file.tokens().starts_with(tokens) {
            // It was replaced since.
            return Ok(None);
        }
        file.read(tokens.len(), shape, dtype).map(Some)
    }

    /// The tokens of the shortest `count` samples, for a look at what the states are.
    ///
    /// # Errors
    /// When a file has vanished since.
    pub fn shortest(&self, count: usize) -> Result<Vec<Vec<u32>>, HiddenFileError> {
        let mut names: Vec<&String> = self.files.values().collect();
        names.sort();
        let mut samples = Vec::new();
        for name in names {
            samples.push(HiddenFile::open(&self.folder.join(name))?.tokens().to_vec());
            samples.sort_by_key(Vec::len);
            samples.truncate(count);
        }
        Ok(samples)
    }
}

/// Writes hidden states into a folder.
#[derive(Debug)]
pub struct HiddenWriter {
    folder: PathBuf,
}

impl HiddenWriter {
    /// Makes the folder, or goes on with one of the same contract.
    ///
    /// # Errors
    /// When the folder cannot be written, or holds states of another contract.
    pub fn create(folder: &Path, contract: &Contract) -> Result<Self, HiddenFileError> {
        std::fs::create_dir_all(folder).map_err(|error| HiddenFileError::io("make", folder, error))?;
        if !Self::look(folder, contract)? {
            let json = ContractJson::from(contract);
            let mut text = serde_json::to_vec_pretty(&json).map_err(|error| HiddenFileError::Contract {
                file: folder.join(CONTRACT_FILE),
                reason: error.to_string(),
            })?;
            text.push(b'\n');
            publish(&folder.join(CONTRACT_FILE), &text)?;
        }
        Ok(Self {
            folder: folder.to_owned(),
        })
    }

    /// Whether a folder, which need not be there, says what its states are; changes nothing.
    ///
    /// # Errors
    /// When it holds states of another contract.
    pub fn look(folder: &Path, contract: &Contract) -> Result<bool, HiddenFileError> {
        let found = read_contract(folder)?;
        match found.as_ref().and_then(|found| contract.difference(found)) {
            None => Ok(found.is_some()),
            Some(difference) => Err(HiddenFileError::Difference {
                folder: folder.to_owned(),
                difference,
            }),
        }
    }

    /// Writes the states of one sample.
    ///
    /// # Errors
    /// As [`HiddenFile::write`].
    pub fn write(
        &self,
        number: u64,
        tokens: &[u32],
        states: &HiddenStates,
    ) -> Result<PathBuf, HiddenFileError> {
        HiddenFile::write(&self.folder, number, tokens, states)
    }
}

fn read_contract(folder: &Path) -> Result<Option<Contract>, HiddenFileError> {
    let file = folder.join(CONTRACT_FILE);
    let bytes = match std::fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(HiddenFileError::io("read", &file, error)),
    };
    let broken = |reason: String| HiddenFileError::Contract {
        file: file.clone(),
        reason,
    };
    let json: ContractJson = serde_json::from_slice(&bytes).map_err(|error| broken(error.to_string()))?;
    json.contract().map(Some).map_err(broken)
}
