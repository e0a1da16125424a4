//! The rank that `eaglet extract` puts in the draft's place: it writes hidden states to files instead of training.
//!
//! To the engine it is a draft replica whose steps cost nothing: a step's rows are written when the step is committed. So
//! leases, restarts and the ledger are those of a training run, and every sample has its file exactly once.
//!
//! SINK-1: files are numbered in the order of steps, lanes and documents, which the journal decides: a step that is done
//! again writes the same files again.
//! SINK-2: line n of `samples.jsonl` is the sample of file n; what an unfinished step has left there is cut off.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use eaglet_runtime::checkpoint::{CheckpointError, CheckpointFolder};
use eaglet_runtime::contract::Contract;
use eaglet_runtime::control::{
    Acceptance, Activity, CoordinatorCommand, DraftOrigin, LaneMetrics, Member, RankEvent,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::hidden_files::HiddenWriter;
use eaglet_runtime::ids::{Epoch, Role, RowId, Step};
use eaglet_runtime::link::{BulkEvent, BulkKind};
use eaglet_runtime::row::{HiddenRow, HiddenStates};
use serde::{Deserialize, Serialize};

use super::draft::{Rows, is_ahead};
use super::{Context, Inbox, Input, Progress, RankFault, Worker};

/// Tokens and masks of all samples, in the order of their files.
pub(crate) const SAMPLES_FILE: &str = "samples.jsonl";
/// Where the files are, in the folder that was asked for: speculators looks for them there, beside its dataset.
pub(crate) const STATES_FOLDER: &str = "hidden_states";
/// What a checkpoint of a sink holds.
const STATE_FILE: &str = "extracted.json";

/// How far the files are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Reached {
    step: u64,
    /// Files that are written.
    samples: u64,
    /// Length of `samples.jsonl`.
    bytes: u64,
}

impl Reached {
    fn digest(&self) -> Digest {
        Digest::of(format!("{self:?}").as_bytes())
    }
}

/// The worker of a draft seat in an extraction.
pub(super) struct SinkWorker {
    context: Context,
    folder: PathBuf,
    checkpoints: CheckpointFolder,
    contract: Option<Contract>,
    writer: Option<HiddenWriter>,
    reached: Reached,
    epoch: Epoch,
    rows: Rows,
    /// The step that is voted for, and its lanes.
    staged: Option<(Step, Vec<u16>)>,
}

impl SinkWorker {
    pub(super) fn new(context: Context, folder: PathBuf) -> Self {
        Self {
            checkpoints: CheckpointFolder::open(context.run_directory.join("checkpoints")),
            context,
            folder,
            contract: None,
            writer: None,
            reached: Reached::default(),
            epoch: Epoch::default(),
            rows: Rows::default(),
            staged: None,
        }
    }

    fn command(&mut self, command: CoordinatorCommand) -> Result<(), RankFault> {
        match command {
            CoordinatorCommand::LoadDraft {
                load,
                contract,
                origin,
                ..
            } => self.load(load, contract, &origin)?,
            CoordinatorCommand::Abandon { epoch } => self.abandon(epoch),
            CoordinatorCommand::FormGroup { epoch, members, .. } => self.form(epoch, &members)?,
            CoordinatorCommand::Begin { epoch, step, lanes } => {
                // RANK-2
                if epoch == self.epoch {
                    self.begin(step, lanes)?;
                }
            }
            CoordinatorCommand::Commit { epoch, step, .. } => {
                if epoch == self.epoch {
                    self.commit(step)?;
                }
            }
            CoordinatorCommand::Checkpoint { recorded } => self.save(recorded)?,
            CoordinatorCommand::Evaluate => self.context.say(RankEvent::Evaluated {
                step: self.step(),
                acceptance: Acceptance::default(),
            }),
            CoordinatorCommand::Welcome { .. }
            | CoordinatorCommand::BeatAck { .. }
            | CoordinatorCommand::Quit => {}
            command => {
                return Err(RankFault::passing(format!(
                    "an extraction's sink was told {command:?}"
                )));
            }
        }
        Ok(())
    }

    fn step(&self) -> Step {
        Step(self.reached.step)
    }

    fn load(&mut self, load: u32, contract: Contract, origin: &DraftOrigin) -> Result<(), RankFault> {
        self.context.enter(Activity::Loading);
        if self.writer.is_none() {
            let writer = HiddenWriter::create(&self.folder.join(STATES_FOLDER), &contract)
                .map_err(RankFault::permanent)?;
            self.writer = Some(writer);
        }
        self.reached = match origin {
            DraftOrigin::Initial | DraftOrigin::Later => Reached::default(),
            DraftOrigin::Checkpoint(folder) => {
                let file = self.context.run_directory.join(folder).join(STATE_FILE);
                read_state(&file).map_err(RankFault::permanent)?
            }
            // There is one sink, so there is nobody else to ask.
            DraftOrigin::Peer(_) => return Err(RankFault::passing("an extraction has one sink")),
        };
        for (row, lease) in self.rows.complete(&contract)? {
            self.context.say(RankEvent::Received { row, lease });
        }
        self.contract = Some(contract);
        let reached = self.step();
        self.rows.retain(|row| is_ahead(row, reached));
        self.context.say(RankEvent::DraftReady {
            load,
            step: reached,
            state: self.reached.digest(),
        });
        Ok(())
    }

    fn abandon(&mut self, epoch: Epoch) {
        // RANK-2
        if epoch >= self.epoch {
            self.epoch = epoch;
            self.staged = None;
        }
    }

    fn form(&mut self, epoch: Epoch, members: &[Member]) -> Result<(), RankFault> {
        if epoch < self.epoch {
            return Ok(());
        }
        if members.len() != 1 {
            return Err(RankFault::permanent(format!(
                "an extraction has one sink, not {}",
                members.len()
            )));
        }
        self.abandon(epoch);
        self.context.say(RankEvent::GroupReady { epoch });
        Ok(())
    }

    fn begin(&mut self, step: Step, lanes: Vec<u16>) -> Result<(), RankFault> {
        if step != self.step() {
            return Err(RankFault::passing(format!(
                "step {step} began at step {}",
                self.step()
            )));
        }
        let mut metrics = Vec::new();
        for &lane in &lanes {
            let id = RowId::Train { step, lane };
            let row = self
                .rows
                .get(id)
                .ok_or_else(|| RankFault::passing(format!("the {id} is not here")))?;
            metrics.push(LaneMetrics {
                lane,
                finite: true,
                tokens: row.row.len() as u64,
                trained_tokens: row.row.loss_mask.iter().map(|&mask| u64::from(mask)).sum(),
                ..LaneMetrics::default()
            });
        }
        self.staged = Some((step, lanes));
        self.context.say(RankEvent::Staged {
            epoch: self.epoch,
            step,
            gradient: Digest::default(),
            finite: true,
            state: self.reached.digest(),
            lanes: metrics,
        });
        Ok(())
    }

    /// Writes the samples of a step's rows.
    fn commit(&mut self, step: Step) -> Result<(), RankFault> {
        self.context.enter(Activity::Applying);
        let lanes = match self.staged.take() {
            Some((staged, lanes)) if staged == step => lanes,
            _ => {
                return Err(RankFault::passing(format!(
                    "step {step} is committed and not staged here"
                )));
            }
        };
        let writer = self
            .writer
            .as_ref()
            .ok_or_else(|| RankFault::passing("a step was committed before the sink was loaded"))?;
        let mut number = self.reached.samples;
        let mut lines = Vec::new();
        for lane in lanes {
            let id = RowId::Train { step, lane };
            let row = self
                .rows
                .get(id)
                .ok_or_else(|| RankFault::passing(format!("the {id} is gone")))?;
            for (tokens, mask, states) in documents(row) {
                writer
                    .write(number, tokens, &states)
                    .map_err(RankFault::permanent)?;
                let line =
                    serde_json::json!({ "input_ids": tokens, "loss_mask": mask, "seq_len": tokens.len() });
                lines.extend_from_slice(line.to_string().as_bytes());
                lines.push(b'\n');
                number += 1;
            }
        }
        let file = self.folder.join(SAMPLES_FILE);
        append_at(&file, self.reached.bytes, &lines).map_err(|error| {
            RankFault::permanent(format!(
                "cannot write {}: {error}; make room and launch again",
                file.display()
            ))
        })?;
        self.reached = Reached {
            step: step.next().0,
            samples: number,
            bytes: self.reached.bytes + lines.len() as u64,
        };
        let reached = self.step();
        self.rows.retain(|row| is_ahead(row, reached));
        self.context.say(RankEvent::Applied {
            step: reached,
            state: self.reached.digest(),
        });
        Ok(())
    }

    fn save(&mut self, recorded: Option<Step>) -> Result<(), RankFault> {
        self.context.enter(Activity::Saving);
        let text = serde_json::to_vec(&self.reached).map_err(RankFault::permanent)?;
        let folder = self
            .checkpoints
            .write(self.step(), |folder| {
                let file = folder.join(STATE_FILE);
                std::fs::write(&file, &text).map_err(|error| CheckpointError::write(&file, error))
            })
            .map_err(RankFault::permanent)?;
        if let Err(error) = self
            .checkpoints
            .prune(self.context.config.checkpoints.keep.max(2), recorded)
        {
            tracing::warn!(%error, "an old checkpoint cannot be removed");
        }
        let folder = folder
            .strip_prefix(&self.context.run_directory)
            .map(Path::to_owned)
            .unwrap_or(folder);
        self.context.say(RankEvent::Checkpointed {
            step: self.step(),
            folder,
        });
        Ok(())
    }
}

/// Tokens, masks and states of each document of a row.
fn documents(row: &HiddenRow) -> impl Iterator<Item = (&[u32], &[u8], HiddenStates)> {
    row.row.documents().map(move |range| {
        let states = row.hidden.of_tokens(range.clone());
        (&row.row.tokens[range.clone()], &row.row.loss_mask[range], states)
    })
}

fn read_state(file: &Path) -> Result<Reached, String> {
    let bytes = std::fs::read(file).map_err(|error| {
        format!(
            "cannot read {}: {error}; extract into another folder",
            file.display()
        )
    })?;
    serde_json::from_slice(&bytes).map_err(|error| {
        format!(
            "{} is damaged: {error}; extract into another folder",
            file.display()
        )
    })
}

/// Writes `lines` at `offset` and cuts off what was behind it.
fn append_at(file: &Path, offset: u64, lines: &[u8]) -> std::io::Result<()> {
    let mut file: File = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(file)?;
    file.set_len(offset)?;
    file.seek(SeekFrom::Start(offset))?;
    file.write_all(lines)?;
    file.sync_data()
}

impl Worker for SinkWorker {
    fn take(&mut self, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(command) => self.command(command)?,
            Input::Bulk(BulkEvent::Message(message)) => {
                if let (BulkKind::Hidden { .. }, Role::Verifier) =
                    (&message.header.kind, message.header.from.role)
                {
                    let reached = self.contract.as_ref().map(|_| self.step());
                    if let Some((row, lease)) = self.rows.take(message, self.contract.as_ref(), reached)? {
                        self.context.say(RankEvent::Received { row, lease });
                    }
                }
            }
            Input::Bulk(BulkEvent::Closed {
                peer: Some(hello),
                error: Some(error),
            }) => self
                .context
                .say_broken(hello.from, hello.epoch, error.to_string()),
            Input::Bulk(BulkEvent::Opened { .. } | BulkEvent::Closed { .. }) | Input::Sum { .. } => {}
        }
        self.context.enter(Activity::Idle);
        Ok(())
    }

    fn proceed(&mut self, _: &mut Inbox) -> Result<Progress, RankFault> {
        Ok(Progress::Waits)
    }
}
