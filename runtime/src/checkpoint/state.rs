//! What a run resumes from, to the bit: f32 weights and optimizer moments.
//!
//! Three flat vectors in the layout of the draft's parameters. No state of a random generator is needed: none is used
//! between steps. The file is a safetensors file whose metadata carries the step, the digest of the layout and a digest
//! of each vector, so a file that is torn, altered, or of another draft is refused and never trained on.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::CheckpointError;
use super::tensor_file::{self, Entry, TensorFile, Values};
use crate::digest::{Digest, Digester};
use crate::ids::Step;

/// File with the training state in a checkpoint.
pub const STATE_FILE: &str = "training_state.safetensors";

/// Key of our record in the file's metadata. One key: the order of several would change from run to run.
const RECORD_KEY: &str = "eaglet";
/// Version of the record.
const VERSION: u32 = 1;
/// Names of the vectors, in the order of the record's digests.
const VECTORS: [&str; 3] = ["parameters", "first_moment", "second_moment"];

/// The record in the metadata. Digests are written in hexadecimal and compared as such.
#[derive(Serialize, Deserialize)]
struct Record {
    version: u32,
    step: u64,
    layout: String,
    digests: [String; 3],
    /// Digest of the fields above: a flipped bit of the step would otherwise go unnoticed.
    seal: String,
}

impl Record {
    fn new(step: Step, layout: Digest, digests: [Digest; 3]) -> Self {
        let mut record = Self {
            version: VERSION,
            step: step.0,
            layout: layout.to_string(),
            digests: digests.map(|digest| digest.to_string()),
            seal: String::new(),
        };
        record.seal = record.expected_seal();
        record
    }

    fn expected_seal(&self) -> String {
        let mut digester = Digester::new();
        digester
            .part(&self.version.to_le_bytes())
            .part(&self.step.to_le_bytes())
            .part(self.layout.as_bytes());
        for digest in &self.digests {
            digester.part(digest.as_bytes());
        }
        digester.finish().to_string()
    }
}

/// Digest of a flat layout: names and shapes of the parameters in their order.
///
/// States with different digests must not be mixed, even when their lengths agree.
pub fn layout_digest<'a>(parameters: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Digest {
    let mut digester = Digester::new();
    for (name, shape) in parameters {
        let dims: Vec<u8> = shape.iter().flat_map(|&dim| (dim as u64).to_le_bytes()).collect();
        digester.part(name.as_bytes()).part(&dims);
    }
    digester.finish()
}

/// State of a run after `step` optimizer steps.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainingState {
    /// Optimizer steps committed.
    pub step: Step,
    /// Master weights, flat.
    pub parameters: Vec<f32>,
    /// First moment of the optimizer, flat.
    pub first_moment: Vec<f32>,
    /// Second moment of the optimizer, flat.
    pub second_moment: Vec<f32>,
}

/// A training state that somebody else holds, for saving it without a copy.
#[derive(Clone, Copy, Debug)]
pub struct StateView<'a> {
    /// Optimizer steps committed.
    pub step: Step,
    /// Master weights, flat.
    pub parameters: &'a [f32],
    /// First moment of the optimizer, flat.
    pub first_moment: &'a [f32],
    /// Second moment of the optimizer, flat.
    pub second_moment: &'a [f32],
}

impl StateView<'_> {
    /// Writes and syncs the state. `layout` is the [`layout_digest`] of the parameters.
    ///
    /// # Errors
    /// The vectors differ in length, or the file cannot be written.
    pub fn save(&self, path: &Path, layout: Digest) -> Result<(), CheckpointError> {
        let vectors = [self.parameters, self.first_moment, self.second_moment];
        for (name, vector) in VECTORS.into_iter().zip(vectors) {
            if vector.len() != self.parameters.len() {
                let problem = format!(
                    "has {} values where {} are needed",
                    vector.len(),
                    self.parameters.len()
                );
                return Err(CheckpointError::tensor(path, name, problem));
            }
        }
        let record = Record::new(self.step, layout, vectors.map(Digest::of_f32));
        let record =
            serde_json::to_string(&record).map_err(|error| CheckpointError::write(path, error.into()))?;
        let entries = VECTORS.into_iter().zip(vectors).map(|(name, vector)| Entry {
            name: name.to_owned(),
            shape: vec![vector.len()],
            values: Values::F32(vector),
        });
        tensor_file::write(path, entries.collect(), (RECORD_KEY, &record))
    }
}

impl TrainingState {
    /// The state as a view.
    pub fn view(&self) -> StateView<'_> {
        StateView {
            step: self.step,
            parameters: &self.parameters,
            first_moment: &self.first_moment,
            second_moment: &self.second_moment,
        }
    }

    /// Writes and syncs the state. `layout` is the [`layout_digest`] of the parameters.
    ///
    /// # Errors
    /// The vectors differ in length, or the file cannot be written.
    pub fn save(&self, path: &Path, layout: Digest) -> Result<(), CheckpointError> {
        self.view().save(path, layout)
    }

    /// Reads a state and checks every bit of it.
    ///
    /// # Errors
    /// The file cannot be read, is torn or altered, is no training state, or is one of another layout.
    pub fn load(path: &Path, layout: Digest) -> Result<Self, CheckpointError> {
        let foreign = |problem: String| CheckpointError::Foreign {
            path: path.into(),
            problem,
        };
        let damaged = |problem: &str| CheckpointError::damaged(path, problem);
        let file = TensorFile::open(path)?;
        let Some(record) = file.metadata(RECORD_KEY) else {
            return Err(foreign(format!(
                "is no training state; name a {STATE_FILE} of a checkpoint"
            )));
        };
        let record: Record = serde_json::from_str(record)
            .map_err(|error| damaged(&format!("its record is not readable: {error}")))?;
        if record.seal != record.expected_seal() {
            return Err(damaged("its record does not match its seal"));
        }
        if record.version != VERSION {
            let problem = format!(
                "has format version {}; this eaglet reads version {VERSION}",
                record.version
            );
            return Err(foreign(problem));
        }
        if record.layout != layout.to_string() {
            let remedy = "restore the draft section of cluster.toml or start a new run";
            return Err(foreign(format!(
                "belongs to a draft with other parameters; {remedy}"
            )));
        }
        let length = file.length(VECTORS[0])?;
        let mut vectors = Vec::with_capacity(VECTORS.len());
        for (name, digest) in VECTORS.into_iter().zip(&record.digests) {
            let vector = file.floats(name, &[length])?;
            if Digest::of_f32(&vector).to_string() != *digest {
                return Err(damaged(&format!(
                    "the values of `{name}` do not match their digest"
                )));
            }
            vectors.push(vector);
        }
        let [parameters, first_moment, second_moment] =
            <[Vec<f32>; 3]>::try_from(vectors).expect("one vector was pushed for each of the three names");
        Ok(Self {
            step: Step(record.step),
            parameters,
            first_moment,
            second_moment,
        })
    }
}
