//! One file of hidden states.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::TensorView as SafeView;

use super::HiddenFileError;
use crate::contract::HiddenDtype;
use crate::row::HiddenStates;
use crate::weights::{TensorView, Weights};

/// Name of the tensor with the states.
const STATES: &str = "hidden_states";
/// Name of the tensor with the tokens.
const TOKENS: &str = "token_ids";

/// File name of the sample of a number.
pub fn file_name(number: u64) -> String {
    format!("hs_{number}.safetensors")
}

/// A file of hidden states that is open: its shapes are checked, its states not yet read.
#[derive(Debug)]
pub struct HiddenFile {
    path: PathBuf,
    states: TensorView,
    tokens: Vec<u32>,
}

impl HiddenFile {
    /// Opens a file.
    ///
    /// # Errors
    /// When it is no safetensors file, or tokens and states are missing, ill-typed or of different lengths.
    pub fn open(path: &Path) -> Result<Self, HiddenFileError> {
        let file = Weights::open_file(path)?;
        let (states, ids) = (file.tensor(STATES)?, file.tensor(TOKENS)?);
        let foreign = |what: String| HiddenFileError::Foreign {
            file: path.to_owned(),
            what,
        };
        if ids.dtype() != Some(Dtype::I64) || ids.shape().len() != 1 {
            return Err(foreign(format!(
                "{ids:?} are no token ids, which are int64 [tokens]"
            )));
        }
        if states.shape().len() != 3 {
            return Err(foreign(format!("{states:?} is not [tokens, states, hidden]")));
        }
        if states.shape()[0] != ids.rows() || ids.rows() == 0 {
            let (states, tokens) = (states.shape()[0], ids.rows());
            return Err(foreign(format!(
                "it has states of {states} tokens and {tokens} token ids"
            )));
        }
        let states = states.expect_unpackable()?;
        let (ids, _) = ids.bytes().as_chunks::<8>();
        let tokens = ids.iter().map(|&id| u32::try_from(i64::from_le_bytes(id)));
        let tokens: Result<Vec<u32>, _> = tokens.collect();
        Ok(Self {
            path: path.to_owned(),
            states,
            tokens: tokens.map_err(|_| foreign("a token id is negative or beyond 32 bits".to_owned()))?,
        })
    }

    /// Token ids, `[tokens]`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The states of the first `tokens` tokens, rounded to `dtype` where they are stored wider.
    ///
    /// # Errors
    /// When there are not `states` of `hidden` each, or one is not finite (FILES-2).
    pub fn read(
        &self,
        tokens: usize,
        (states, hidden): (usize, usize),
        dtype: HiddenDtype,
    ) -> Result<HiddenStates, HiddenFileError> {
        let foreign = |what: String| HiddenFileError::Foreign {
            file: self.path.clone(),
            what,
        };
        if self.states.shape()[1..] != [states, hidden] {
            let [_, found_states, found_hidden] = self.states.shape() else {
                return Err(foreign(format!("{:?} has no three dimensions", self.states)));
            };
            return Err(foreign(format!(
                "it has {found_states} states of width {found_hidden} a token, where {states} of width {hidden} are needed"
            )));
        }
        if tokens > self.tokens.len() {
            return Err(foreign(format!(
                "it has {} tokens, {tokens} are needed",
                self.tokens.len()
            )));
        }
        let mut read = HiddenStates::zeros(dtype, tokens, states, hidden);
        let mut values = vec![0.0; states * hidden];
        for token in 0..tokens {
            self.states.unpack_rows(token..token + 1, &mut values);
            for (state, values) in values.chunks_exact(hidden.max(1)).enumerate() {
                read.set(token, state, values);
                let largest = crate::verifier::largest_magnitude(dtype);
                if !values.iter().all(|value| value.abs() <= largest) {
                    return Err(foreign(format!("state {state} of token {token} is not finite")));
                }
            }
        }
        Ok(read.share())
    }

    /// Writes a file, whole or not at all (FILES-3).
    ///
    /// # Errors
    /// When the disk is full or the folder cannot be written.
    pub fn write(
        folder: &Path,
        number: u64,
        tokens: &[u32],
        states: &HiddenStates,
    ) -> Result<PathBuf, HiddenFileError> {
        let ids: Vec<u8> = tokens
            .iter()
            .flat_map(|&id| i64::from(id).to_le_bytes())
            .collect();
        let dtype = match states.dtype {
            HiddenDtype::Bf16 => Dtype::BF16,
            HiddenDtype::F32 => Dtype::F32,
        };
        let shape = vec![tokens.len(), states.states, states.hidden];
        let views = SafeView::new(dtype, shape, &states.bytes).and_then(|states| {
            Ok([
                (STATES, states),
                (TOKENS, SafeView::new(Dtype::I64, vec![tokens.len()], &ids)?),
            ])
        });
        let bytes = views
            .and_then(|views| safetensors::serialize(views, None))
            .map_err(|error| HiddenFileError::Foreign {
                file: folder.join(file_name(number)),
                what: error.to_string(),
            })?;
        let path = folder.join(file_name(number));
        publish(&path, &bytes)?;
        Ok(path)
    }
}

/// Writes a file beside its place and renames it in.
pub(super) fn publish(path: &Path, bytes: &[u8]) -> Result<(), HiddenFileError> {
    let partial = path.with_extension("partial");
    let written = File::create(&partial).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_data()
    });
    let published = written.and_then(|()| std::fs::rename(&partial, path));
    published.map_err(|error| {
        // Of a full disk every byte counts.
        let _ = std::fs::remove_file(&partial);
        HiddenFileError::io("write", path, error)
    })
}
