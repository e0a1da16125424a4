//! A verifier rank that reads hidden states from files instead of computing them (`samples.hidden_states`).

use eaglet_runtime::contract::Contract;
use eaglet_runtime::control::{Activity, CoordinatorCommand, Extraction, RankEvent};
use eaglet_runtime::hidden_files::{HiddenFileError, HiddenFiles, recognise};
use eaglet_runtime::ids::Epoch;
use eaglet_runtime::row::{HiddenStates, PackedRow};
use eaglet_runtime::verifier::{Verifier, VerifierOptions};

use super::couriers::{Captured, Couriers};
use crate::config::ClusterConfig;
use crate::faults::{self, Point};
use crate::rank::{Context, Inbox, Input, Progress, RankFault, Worker};
use crate::recipe;

/// Samples that are compared with the verifier where a folder does not say what its states are.
const LOOKED_AT: usize = 2;

/// The worker of a verifier seat whose states are there already.
pub(in crate::rank) struct StoredWorker {
    context: Context,
    states: Option<StoredStates>,
    epoch: Epoch,
    couriers: Couriers,
}

impl StoredWorker {
    pub(in crate::rank) fn new(context: Context) -> Self {
        Self {
            context,
            states: None,
            epoch: Epoch::default(),
            couriers: Couriers::default(),
        }
    }

    fn load(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Loading);
        faults::reach(Point::Load, None)?;
        let config = &self.context.config;
        let contract = recipe::contract(config).map_err(RankFault::permanent)?;
        self.states = Some(StoredStates::open(
            config,
            contract.clone(),
            self.context.threads,
        )?);
        self.context.say(RankEvent::VerifierReady { contract });
        Ok(())
    }

    fn extract(&mut self, extraction: Extraction) -> Result<(), RankFault> {
        let Extraction {
            row,
            lease,
            turn,
            units,
            content,
            destination,
        } = extraction;
        // FENCE: what was given in an older epoch is void.
        if turn.epoch < self.epoch {
            return Ok(());
        }
        let _row = tracing::info_span!("row", %row).entered();
        self.context.activity.restart(Activity::Extracting);
        faults::reach(Point::Extract, row.step())?;
        let states = self
            .states
            .as_ref()
            .ok_or_else(|| RankFault::passing("asked for hidden states before they were opened"))?;
        let hidden = match states.read(&content) {
            Ok(hidden) => hidden,
            Err(Missing { document, reason }) => {
                let unit = units.get(document).copied();
                self.context.say(RankEvent::BadSample {
                    row,
                    lease,
                    unit,
                    reason,
                });
                return Ok(());
            }
        };
        let tokens = content.len() as u64;
        faults::reach(Point::Transfer, row.step())?;
        let captured = Captured {
            contract: states.contract.digest(),
            first_state: 0,
            content,
            hidden,
        };
        if self
            .couriers
            .hand_over(&self.context, (row, lease), captured, &destination)?
        {
            self.context.say(RankEvent::Extracted { row, lease, tokens });
            faults::reach(Point::Sent, row.step())?;
        }
        Ok(())
    }
}

impl Worker for StoredWorker {
    fn take(&mut self, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(CoordinatorCommand::LoadVerifier) => self.load()?,
            Input::Command(CoordinatorCommand::Abandon { epoch }) => self.epoch = self.epoch.max(epoch),
            Input::Command(CoordinatorCommand::FormTeam { epoch, .. }) => {
                if epoch >= self.epoch {
                    self.epoch = epoch;
                    self.context.say(RankEvent::GroupReady { epoch });
                }
            }
            // What is to be checked was checked when the files were opened.
            Input::Command(CoordinatorCommand::CheckVerifier { .. }) => {}
            Input::Command(CoordinatorCommand::Extract(extraction)) => self.extract(extraction)?,
            Input::Command(command) => {
                return Err(RankFault::passing(format!(
                    "a rank that reads stored states was told {command:?}"
                )));
            }
            Input::Bulk(_) | Input::Sum { .. } => {}
        }
        self.context.enter(Activity::Idle);
        Ok(())
    }

    fn proceed(&mut self, _: &mut Inbox) -> Result<Progress, RankFault> {
        Ok(Progress::Waits)
    }
}

/// Stored hidden states of this cluster's samples.
struct StoredStates {
    files: HiddenFiles,
    contract: Contract,
}

/// Why a document has no stored states.
struct Missing {
    /// Which document of the row.
    document: usize,
    reason: String,
}

impl StoredStates {
    /// Opens the folder, and makes sure that it holds what `contract` says: by its own contract if it has one, else by
    /// comparing some of its states with the verifier's.
    fn open(config: &ClusterConfig, contract: Contract, threads: usize) -> Result<Self, RankFault> {
        let folder = config
            .samples
            .hidden_states
            .as_deref()
            .ok_or_else(|| RankFault::permanent("samples.hidden_states names no folder"))?;
        let files =
            HiddenFiles::open(folder, config.training.tokens_per_row).map_err(RankFault::permanent)?;
        for error in files.refused() {
            tracing::warn!(%error, "a file of hidden states was passed over");
        }
        files.expect(&contract).map_err(RankFault::permanent)?;
        if files.contract().is_none() {
            look(config, &files, &contract, threads)?;
        }
        tracing::info!(
            samples = files.len(),
            refused = files.refused().len(),
            folder = %files.folder().display(),
            "hidden states are read from files"
        );
        Ok(Self { files, contract })
    }

    /// Hidden states of a row, put together of its documents'.
    fn read(&self, row: &PackedRow) -> Result<HiddenStates, Missing> {
        let (states, hidden) = (
            self.contract.states_per_token(),
            self.contract.hidden_size as usize,
        );
        let mut whole = HiddenStates::zeros(self.contract.dtype, 0, states, hidden);
        for (document, range) in row.documents().enumerate() {
            let tokens = &row.tokens[range];
            let missing = |reason: String| Missing { document, reason };
            match self.files.read(tokens, (states, hidden), self.contract.dtype) {
                Ok(Some(part)) => whole.bytes.extend_from_slice(&part.bytes),
                Ok(None) => {
                    return Err(missing(format!(
                        "no file in {} has its {} tokens; extract it, or leave it out",
                        self.files.folder().display(),
                        tokens.len()
                    )));
                }
                Err(error) => return Err(missing(error.to_string())),
            }
        }
        Ok(whole.share())
    }
}

/// Compares some stored states with the verifier's own.
fn look(
    config: &ClusterConfig,
    files: &HiddenFiles,
    contract: &Contract,
    threads: usize,
) -> Result<(), RankFault> {
    let options = VerifierOptions {
        threads,
        aux_layers: Some(contract.aux_layers.clone()),
        ..VerifierOptions::default()
    };
    let mut verifier = Verifier::load(&config.verifier.path, options).map_err(RankFault::permanent)?;
    let shape = (contract.states_per_token(), contract.hidden_size as usize);
    for mut tokens in files.shortest(LOOKED_AT).map_err(RankFault::permanent)? {
        tokens.truncate(config.training.tokens_per_row);
        let stored: Result<Option<HiddenStates>, HiddenFileError> =
            files.read(&tokens, shape, contract.dtype);
        // One that cannot be read is refused when its turn comes.
        if let Ok(Some(stored)) = stored {
            recognise(&mut verifier, &tokens, &stored)
                .map_err(|error| RankFault::permanent(format!("{}: {error}", files.folder().display())))?;
        }
    }
    Ok(())
}
