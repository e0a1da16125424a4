//! A verifier rank: loads its shard of the model, turns rows into hidden states together with the other shards, and sends
//! those that it has captured to the draft seat they belong to.
//!
//! All shards of a verifier compute the same rows in the same order (`Turn`), so what they tell each other pairs up.
//!
//! Files: `team` the other shards, `nccl` sums over slices from GPU to GPU, `couriers` the links to draft replicas.

mod couriers;
mod nccl;
mod stored;
mod team;

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use eaglet_runtime::collective::ShardPeers;
use eaglet_runtime::control::{
    Activity, CollectiveId, CoordinatorCommand, Extraction, HeldOutRequest, Member, RankEvent, Turn,
};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, RowId, Step, Unit};
use eaglet_runtime::link::{BulkEvent, HeapBuffer};
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{Interrupted, Peers, Shard, Verifier, VerifierError};

use self::couriers::{Captured, Couriers};
use self::nccl::{Nccl, TeamPeers};
pub(super) use self::stored::StoredWorker;
use self::team::{Talk, Team};
use super::nccl::Word;
use super::{Context, Inbox, Input, Progress, RankDevice, RankFault, Worker, shard_link_options};
use crate::config::Collective;
use crate::faults::{self, Point};
use crate::recipe;

/// The worker of a verifier seat.
pub(super) struct VerifierWorker<D: RankDevice> {
    context: Context,
    shard: Shard,
    loaded: Option<Loaded<D>>,
    team: Team,
    /// If slices are summed over NCCL.
    nccl: Option<Nccl>,
    /// The newest epoch in which it linked up, or tried to.
    tried: Option<Epoch>,
    /// Work of the present epoch, by its turn.
    jobs: BTreeMap<Turn, Job>,
    /// Number of the turn that is next.
    next: u64,
    couriers: Couriers,
}

struct Loaded<D: RankDevice> {
    verifier: Verifier<D>,
    contract: Digest,
    stop_ids: Vec<u32>,
}

/// The verifier, its other shards as this one sees them for one row, and where answers end.
type Together<'a, D> = (&'a mut Verifier<D>, TeamPeers<'a, Talk<'a>>, &'a [u32]);

/// Something to compute.
enum Job {
    Check,
    Row(Extraction),
    HeldOut(HeldOutRequest),
}

impl<D: RankDevice> VerifierWorker<D> {
    pub(super) fn new(context: Context) -> Self {
        let shard = context.config.shard_of(context.seat);
        Self {
            context,
            shard,
            loaded: None,
            team: Team::new(shard),
            nccl: None,
            tried: None,
            jobs: BTreeMap::new(),
            next: 0,
            couriers: Couriers::default(),
        }
    }

    fn load(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Loading);
        faults::reach(Point::Load, None)?;
        let config = &self.context.config.verifier;
        let device = D::open(self.context.threads, config.products)?;
        let verifier = Verifier::load_on(device, &config.path, config.aux_layers.clone(), self.shard)
            .map_err(RankFault::permanent)?;
        let contract = recipe::contract(&self.context.config).map_err(RankFault::permanent)?;
        if config.collective == Collective::Nccl && self.shard.slices > 1 {
            self.nccl = Some(Nccl::open(config.sums)?);
        }
        self.loaded = Some(Loaded {
            stop_ids: verifier.config().eos_token_ids.clone(),
            verifier,
            contract: contract.digest(),
        });
        self.context.say(RankEvent::VerifierReady { contract });
        Ok(())
    }

    /// FENCE: what was given in an older epoch than this is void.
    fn abandon(&mut self, epoch: Epoch) {
        if epoch > self.team.epoch() {
            self.leave(epoch);
            self.jobs.retain(|turn, _| turn.epoch >= epoch);
            self.next = 0;
        }
    }

    fn leave(&mut self, epoch: Epoch) {
        self.team.leave(epoch);
        if let Some(Err(fault)) = self.nccl.as_mut().map(Nccl::end) {
            // What hangs inside NCCL would hang in the end of anything else on this GPU, too.
            self.context.end_process(&fault);
        }
    }

    fn form(&mut self, epoch: Epoch, members: Vec<Member>) -> Result<(), RankFault> {
        // FENCE: told twice, or late.
        if epoch < self.team.epoch() || self.tried == Some(epoch) {
            return Ok(());
        }
        self.abandon(epoch);
        self.tried = Some(epoch);
        faults::reach(Point::Form, None)?;
        match self
            .team
            .join(&self.context.here, epoch, members, shard_link_options)
        {
            Ok(()) => {}
            Err(unreached) if unreached.is_of_peer() => {
                // Most often it has just died: no reason to lose this shard too.
                self.context
                    .say_broken(unreached.peer, epoch, unreached.to_string());
                return Ok(());
            }
            Err(unreached) => return Err(RankFault::passing(unreached)),
        }
        match &mut self.nccl {
            Some(nccl) => {
                nccl.begin(&self.context, epoch, self.team.slices())?;
                faults::reach(Point::Meet, None)?;
                Ok(())
            }
            None => self.say_formed(),
        }
    }

    /// NCCL-2
    fn say_formed(&self) -> Result<(), RankFault> {
        let epoch = self.team.epoch();
        self.context.say(RankEvent::GroupReady { epoch });
        faults::reach(Point::Formed, None)?;
        Ok(())
    }

    /// Something came of what is done over NCCL.
    fn take_word(&mut self, epoch: Epoch, word: Word) -> Result<(), RankFault> {
        // FENCE
        let Some(nccl) = self.nccl.as_mut().filter(|_| epoch == self.team.epoch()) else {
            return Ok(());
        };
        match word {
            Word::Id(id) => {
                let id = CollectiveId::new(&id.0);
                self.context.say(RankEvent::CollectiveId { epoch, id });
            }
            Word::Met => {
                if nccl.set_met() {
                    self.say_formed()?;
                }
            }
            // The coordinator was told.
            Word::Broken(_) => {}
            // Of gradients.
            Word::Room | Word::Arrived | Word::HandedOver | Word::Summed => {}
        }
        Ok(())
    }

    /// What it is busy with between two inputs.
    fn resting(&self) -> Activity {
        match self.nccl.as_ref().is_some_and(Nccl::is_meeting) {
            true => Activity::Meeting,
            false => Activity::Idle,
        }
    }

    fn enqueue(&mut self, turn: Turn, job: Job) {
        let present = Turn {
            epoch: self.team.epoch(),
            number: self.next,
        };
        // FENCE: of an older epoch, told twice, or given up.
        let is_over = turn < present || turn.epoch == present.epoch && !self.team.is_together();
        if !is_over {
            self.jobs.insert(turn, job);
        }
    }

    /// What is next, if it is here.
    fn next_job(&mut self) -> Option<(u64, Job)> {
        let turn = Turn {
            epoch: self.team.epoch(),
            number: self.next,
        };
        let job = self.jobs.remove(&turn)?;
        self.next += 1;
        Some((turn.number, job))
    }

    /// The other shards are not there any more: this epoch comes to nothing.
    fn give_up(&mut self, interrupted: &Interrupted) -> Result<(), RankFault> {
        tracing::info!(reason = interrupted.reason, "what was under way is void");
        if let Some(broken) = self.team.take_broken() {
            self.context.say_broken(broken.from, broken.epoch, broken.reason);
        }
        let epoch = self.team.epoch();
        self.leave(epoch);
        self.jobs.retain(|turn, _| turn.epoch > epoch);
        match self.team.take_fault() {
            Some(fault) => Err(fault),
            None => Ok(()),
        }
    }

    fn work_on(&mut self, number: u64, job: Job, inbox: &mut Inbox) -> Result<(), RankFault> {
        let done = match job {
            Job::Check => self.check(number, inbox),
            Job::Row(extraction) => self.extract(number, extraction, inbox),
            Job::HeldOut(request) => self.answer(number, request, inbox),
        };
        match done {
            Ok(()) => Ok(()),
            Err(Stopped::Interrupted(interrupted)) => self.give_up(&interrupted),
            Err(Stopped::Fault(fault)) => Err(fault),
        }
    }

    /// Compares a few hidden states with the verifier's own logits, before anything is trained on them.
    fn check(&mut self, number: u64, inbox: &mut Inbox) -> Result<(), Stopped> {
        // The first pass is the one that reads the weights.
        self.context.activity.restart(Activity::Loading);
        let dtype = self.context.config.verifier.hidden_dtype;
        let (verifier, mut peers, _) = self.together(number, None, Activity::Loading, inbox)?;
        let checked = verifier.self_check(dtype, &mut peers);
        peers.settle()?;
        let checked = match checked {
            Err(VerifierError::Interrupted(interrupted)) => return Err(interrupted.into()),
            checked => checked.map_err(RankFault::permanent)?,
        };
        tracing::info!(
            tokens = checked.tokens,
            logits = checked.logits,
            difference = checked.difference,
            tolerance = checked.tolerance,
            "hidden states give the verifier's own logits"
        );
        Ok(())
    }

    fn refuse(&self, row: RowId, lease: u64, unit: Option<Unit>, reason: String) {
        self.context.say(RankEvent::BadSample {
            row,
            lease,
            unit,
            reason,
        });
    }

    fn extract(&mut self, number: u64, extraction: Extraction, inbox: &mut Inbox) -> Result<(), Stopped> {
        let Extraction {
            row,
            lease,
            units,
            content,
            destination,
            ..
        } = extraction;
        let _row = tracing::info_span!("row", %row).entered();
        // Each row has the whole time limit.
        self.context.activity.restart(Activity::Extracting);
        faults::reach(Point::Extract, row.step()).map_err(RankFault::from)?;
        let dtype = self.context.config.verifier.hidden_dtype;
        let mut memory = self.memory(lease, content.len(), &destination)?;
        let (verifier, mut peers, _) = self.together(number, row.step(), Activity::Extracting, inbox)?;
        let out = memory.as_mut().map(Memory::as_mut);
        let extracted = verifier.extract_into(&content, dtype, &mut peers, out);
        peers.settle()?;
        match extracted {
            Ok(()) => self.hand_over((row, lease), content, memory, &destination)?,
            Err(VerifierError::NonFinite { document, layer }) => {
                let reason = format!("its hidden states are not finite from layer {layer} on");
                self.refuse(row, lease, units.get(document).copied(), reason);
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Answers held-out prompts and extracts them; a prompt with states that are not finite is left out.
    fn answer(&mut self, number: u64, request: HeldOutRequest, inbox: &mut Inbox) -> Result<(), Stopped> {
        let HeldOutRequest {
            row,
            lease,
            mut prompts,
            max_new_tokens,
            destination,
            ..
        } = request;
        let _row = tracing::info_span!("row", %row).entered();
        self.context.activity.restart(Activity::Generating);
        faults::reach(Point::Extract, row.step()).map_err(RankFault::from)?;
        let (dtype, shard) = (self.context.config.verifier.hidden_dtype, self.shard);
        while !prompts.is_empty() {
            let (verifier, mut peers, stop_ids) =
                self.together(number, row.step(), Activity::Generating, inbox)?;
            let extracted = verifier
                .generate(&prompts, max_new_tokens, stop_ids, &mut peers)
                .and_then(|answers| {
                    let content = packed(&prompts, answers);
                    let mut memory = Memory::Own(vec![0; verifier.captured_bytes(content.len(), dtype)]);
                    verifier.extract_into(&content, dtype, &mut peers, Some(memory.as_mut()))?;
                    Ok((content, memory))
                });
            peers.settle()?;
            let (found, extracted) = match extracted {
                Ok(extracted) => (None, Some(extracted)),
                Err(VerifierError::NonFinite { document, .. }) => (Some(document), None),
                Err(error) => return Err(error.into()),
            };
            // What one stage has found the others may not have seen; all leave the same prompt out.
            match (agree(shard, found, &mut peers)?, extracted) {
                (None, Some((content, memory))) => {
                    return Ok(self.hand_over((row, lease), content, Some(memory), &destination)?);
                }
                (Some(prompt), _) if prompt < prompts.len() => {
                    tracing::warn!(%row, prompt, "a held-out prompt has states that are not finite");
                    prompts.remove(prompt);
                }
                (found, _) => {
                    return Err(RankFault::passing(format!(
                        "the shards of this verifier disagree about the prompts of the {row}: {found:?}"
                    ))
                    .into());
                }
            }
        }
        self.refuse(
            row,
            lease,
            None,
            "no held-out prompt has finite hidden states".to_owned(),
        );
        Ok(())
    }

    /// What one row needs.
    fn together<'a>(
        &'a mut self,
        turn: u64,
        step: Option<Step>,
        activity: Activity,
        inbox: &'a mut Inbox,
    ) -> Result<Together<'a, D>, RankFault> {
        let Self {
            context,
            shard,
            loaded,
            team,
            nccl,
            ..
        } = self;
        let Loaded {
            verifier, stop_ids, ..
        } = loaded.as_mut().ok_or_else(not_loaded)?;
        let talk = Talk {
            gauge: &context.activity,
            team,
            inbox,
            activity,
            turn,
            step,
        };
        let supervision = &context.config.supervision;
        let limit = Duration::from_secs(match activity {
            Activity::Loading => supervision.load_timeout_s,
            _ => supervision.step_timeout_s,
        });
        let peers = TeamPeers {
            links: ShardPeers::new(*shard, talk),
            sums: nccl.as_mut().and_then(|nccl| nccl.sums(limit)),
            step,
        };
        Ok((verifier, peers, stop_ids))
    }

    /// All slices of a stage hold the same states; they take turns to send them.
    fn sends(&self, lease: u64) -> bool {
        lease % u64::from(self.shard.slices) == u64::from(self.shard.slice)
    }

    /// Where the states of a row are captured, if this shard sends them: on the link that they go over, if it has room.
    fn memory(&mut self, lease: u64, tokens: usize, to: &Member) -> Result<Option<Memory>, RankFault> {
        if !self.sends(lease) {
            return Ok(None);
        }
        let dtype = self.context.config.verifier.hidden_dtype;
        let loaded = self.loaded.as_ref().ok_or_else(not_loaded)?;
        let bytes = loaded.verifier.captured_bytes(tokens, dtype);
        let on_link = self.couriers.buffer(&self.context, to, bytes);
        Ok(Some(
            on_link.map_or_else(|| Memory::Own(vec![0; bytes]), Memory::OnLink),
        ))
    }

    /// Sends the states that this shard has captured, if it is the slice of its stage whose turn that is.
    fn hand_over(
        &mut self,
        (row, lease): (RowId, u64),
        content: PackedRow,
        memory: Option<Memory>,
        destination: &Member,
    ) -> Result<(), RankFault> {
        let tokens = content.len() as u64;
        tracing::debug!(tokens, draft = destination.seat, "hidden states extracted");
        faults::reach(Point::Transfer, row.step())?;
        let loaded = self.loaded.as_ref().ok_or_else(not_loaded)?;
        let states = loaded.verifier.captured();
        if let Some(memory) = memory.filter(|_| self.sends(lease) && !states.is_empty()) {
            let dtype = self.context.config.verifier.hidden_dtype;
            let captured = Captured {
                contract: loaded.contract,
                first_state: states.start,
                content,
                hidden: loaded.verifier.states_in(memory.into(), dtype),
            };
            if !self
                .couriers
                .hand_over(&self.context, (row, lease), captured, destination)?
            {
                return Ok(());
            }
        }
        self.context.say(RankEvent::Extracted { row, lease, tokens });
        faults::reach(Point::Sent, row.step())?;
        Ok(())
    }
}

/// Where states are captured.
enum Memory {
    /// In the memory of the link that they go over: nobody copies them.
    OnLink(HeapBuffer),
    Own(Vec<u8>),
}

impl Memory {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            Self::OnLink(buffer) => buffer,
            Self::Own(bytes) => bytes,
        }
    }
}

impl From<Memory> for Bytes {
    fn from(memory: Memory) -> Self {
        match memory {
            Memory::OnLink(buffer) => buffer.into(),
            Memory::Own(bytes) => bytes.into(),
        }
    }
}

fn not_loaded() -> RankFault {
    RankFault::passing("asked to extract before the verifier was loaded")
}

/// Why a row came to nothing.
enum Stopped {
    Interrupted(Interrupted),
    Fault(RankFault),
}

impl From<RankFault> for Stopped {
    fn from(fault: RankFault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Interrupted> for Stopped {
    fn from(interrupted: Interrupted) -> Self {
        Self::Interrupted(interrupted)
    }
}

impl From<VerifierError> for Stopped {
    fn from(error: VerifierError) -> Self {
        match error {
            VerifierError::Interrupted(interrupted) => Self::Interrupted(interrupted),
            error => Self::Fault(RankFault::passing(error)),
        }
    }
}

/// The first document that some shard has found to be bad: what each stage has found goes down the stages, and comes back
/// from the last one. Slices of a stage find the same.
fn agree(shard: Shard, found: Option<usize>, peers: &mut impl Peers) -> Result<Option<usize>, Interrupted> {
    // Documents are few, and f32 holds such numbers exactly.
    let own = found.map_or(f32::INFINITY, |document| document as f32);
    let mut first = [f32::INFINITY];
    peers.take_over(&mut first)?;
    first[0] = first[0].min(own);
    peers.pass_on(&first)?;
    let mut chosen = [u32::MAX];
    if shard.is_last() && first[0].is_finite() {
        chosen[0] = first[0] as u32;
    }
    peers.announce(&mut chosen)?;
    Ok((chosen[0] != u32::MAX).then_some(chosen[0] as usize))
}

/// Prompts with their answers, one document each; the answers are what is looked at.
fn packed(prompts: &[Vec<u32>], answers: Vec<Vec<u32>>) -> PackedRow {
    let mut row = PackedRow::default();
    for (prompt, answer) in prompts.iter().zip(answers) {
        let mut loss_mask = vec![0; prompt.len()];
        loss_mask.resize(prompt.len() + answer.len(), 1);
        let mut tokens = prompt.clone();
        tokens.extend(answer);
        row.push(&Sample { tokens, loss_mask });
    }
    row
}

impl<D: RankDevice> Worker for VerifierWorker<D> {
    fn take(&mut self, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(CoordinatorCommand::LoadVerifier) => self.load()?,
            Input::Command(CoordinatorCommand::Abandon { epoch }) => self.abandon(epoch),
            Input::Command(CoordinatorCommand::FormTeam { epoch, members }) => self.form(epoch, members)?,
            Input::Command(CoordinatorCommand::CheckVerifier { turn }) => self.enqueue(turn, Job::Check),
            Input::Command(CoordinatorCommand::Extract(extraction)) => {
                self.enqueue(extraction.turn, Job::Row(extraction));
            }
            Input::Command(CoordinatorCommand::ExtractHeldOut(request)) => {
                self.enqueue(request.turn, Job::HeldOut(request));
            }
            Input::Command(CoordinatorCommand::Meet { epoch, id }) => {
                if let Some(nccl) = self.nccl.as_mut().filter(|_| epoch >= self.team.epoch()) {
                    nccl.take_id(epoch, &id)?;
                }
            }
            Input::Command(command) => {
                return Err(RankFault::passing(format!("a verifier was told {command:?}")));
            }
            Input::Sum { epoch, word } => self.take_word(epoch, word)?,
            Input::Bulk(BulkEvent::Message(message)) => self.team.keep(message),
            Input::Bulk(event) => {
                if let Err(interrupted) = self.team.hear_of(&event) {
                    self.give_up(&interrupted)?;
                }
            }
        }
        self.context.enter(self.resting());
        Ok(())
    }

    fn proceed(&mut self, inbox: &mut Inbox) -> Result<Progress, RankFault> {
        if let Some((number, job)) = self.next_job() {
            self.work_on(number, job, inbox)?;
            self.context.enter(self.resting());
            return Ok(Progress::More);
        }
        let empty = self.team.flush()?;
        Ok(if empty { Progress::Waits } else { Progress::Blocked })
    }
}
