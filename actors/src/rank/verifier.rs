//! A verifier rank: loads the model, turns rows into hidden states, sends them to the draft seat they belong to.

use std::collections::HashMap;
use std::time::Duration;

use eaglet_runtime::control::{Activity, CoordinatorCommand, Extraction, HeldOutRequest, Member, RankEvent};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{Epoch, RowId, Seat};
use eaglet_runtime::link::{BulkKind, BulkOutgoing, BulkSender, Endpoint, Hello, SendError};
use eaglet_runtime::row::{PackedRow, Sample};
use eaglet_runtime::verifier::{Alone, Verifier, VerifierError, VerifierOptions};

use super::{Context, Input, RankFault, Worker, link_options};
use crate::faults::{self, Point};
use crate::recipe;

/// Longest wait for room in the queue towards a draft replica; it holds more rows than are ever under way.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);

/// The worker of a verifier seat.
pub(super) struct VerifierWorker {
    context: Context,
    loaded: Option<Loaded>,
    /// One link per draft seat; a new occupant gets a new one.
    links: HashMap<u16, (Member, BulkSender)>,
}

/// Why a row was not handed over.
enum Unsent {
    /// The link failed; another one may not.
    Now(String),
    /// The link had ended before.
    Broken(String),
    /// No link would take it.
    Never(String),
}

struct Loaded {
    verifier: Verifier,
    contract: Digest,
    stop_ids: Vec<u32>,
}

impl VerifierWorker {
    pub(super) fn new(context: Context) -> Self {
        Self {
            context,
            loaded: None,
            links: HashMap::new(),
        }
    }

    fn load(&mut self) -> Result<(), RankFault> {
        self.context.enter(Activity::Loading);
        faults::reach(Point::Load, None)?;
        let config = &self.context.config.verifier;
        let options = VerifierOptions {
            threads: self.context.threads,
            aux_layers: config.aux_layers.clone(),
            ..VerifierOptions::default()
        };
        let mut verifier = Verifier::load(&config.path, options).map_err(RankFault::permanent)?;
        let checked = verifier
            .self_check(config.hidden_dtype, &mut Alone)
            .map_err(RankFault::permanent)?;
        tracing::info!(
            tokens = checked.tokens,
            logits = checked.logits,
            difference = checked.difference,
            tolerance = checked.tolerance,
            "hidden states give the verifier's own logits"
        );
        let contract = recipe::contract(&self.context.config).map_err(RankFault::permanent)?;
        let stop_ids = verifier.config().eos_token_ids.clone();
        self.loaded = Some(Loaded {
            verifier,
            contract: contract.digest(),
            stop_ids,
        });
        self.context.say(RankEvent::VerifierReady { contract });
        Ok(())
    }

    fn extract(&mut self, extraction: Extraction) -> Result<(), RankFault> {
        let Extraction {
            row,
            lease,
            units,
            content,
            destination,
        } = extraction;
        let _row = tracing::info_span!("row", %row).entered();
        self.context.enter(Activity::Extracting);
        faults::reach(Point::Extract, row.step())?;
        let dtype = self.context.config.verifier.hidden_dtype;
        let loaded = self.loaded()?;
        match loaded.verifier.extract(&content, dtype, &mut Alone) {
            Ok(hidden) => self.hand_over(row, lease, content, hidden, destination),
            Err(VerifierError::NonFinite { document, layer }) => {
                let reason = format!("its hidden states are not finite from layer {layer} on");
                let unit = units.get(document).copied();
                self.context.say(RankEvent::BadSample { row, unit, reason });
                Ok(())
            }
            Err(error) => Err(RankFault::passing(error)),
        }
    }

    /// Answers held-out prompts and extracts them; a prompt with states that are not finite is left out.
    fn extract_held_out(&mut self, request: HeldOutRequest) -> Result<(), RankFault> {
        let HeldOutRequest {
            row,
            lease,
            mut prompts,
            max_new_tokens,
            destination,
        } = request;
        let _row = tracing::info_span!("row", %row).entered();
        let dtype = self.context.config.verifier.hidden_dtype;
        while !prompts.is_empty() {
            self.context.enter(Activity::Generating);
            let loaded = self.loaded()?;
            let extracted = loaded
                .verifier
                .generate(&prompts, max_new_tokens, &loaded.stop_ids, &mut Alone)
                .and_then(|answers| {
                    let content = packed(&prompts, answers);
                    let hidden = loaded.verifier.extract(&content, dtype, &mut Alone)?;
                    Ok((content, hidden))
                });
            match extracted {
                Ok((content, hidden)) => return self.hand_over(row, lease, content, hidden, destination),
                Err(VerifierError::NonFinite { document, layer }) if document < prompts.len() => {
                    tracing::warn!(%row, prompt = document, layer, "a held-out prompt has states that are not finite");
                    prompts.remove(document);
                }
                Err(error) => return Err(RankFault::passing(error)),
            }
        }
        let reason = "no held-out prompt has finite hidden states".to_owned();
        self.context.say(RankEvent::BadSample {
            row,
            unit: None,
            reason,
        });
        Ok(())
    }

    fn hand_over(
        &mut self,
        row: RowId,
        lease: u64,
        content: PackedRow,
        hidden: eaglet_runtime::row::HiddenStates,
        destination: Member,
    ) -> Result<(), RankFault> {
        let tokens = content.len() as u64;
        tracing::debug!(tokens, draft = destination.seat, "hidden states extracted");
        let contract = self.loaded()?.contract;
        let message = BulkOutgoing {
            // Verifiers are in no draft group; a row is fenced by the destination's generation.
            epoch: Epoch::default(),
            kind: BulkKind::Hidden {
                row,
                lease,
                contract,
                dtype: hidden.dtype,
                first_state: 0,
                states: hidden.states as u16,
                hidden: hidden.hidden as u32,
                packed: content,
            },
            parts: vec![hidden.bytes.into()],
        };
        faults::reach(Point::Transfer, row.step())?;
        let generation = destination.generation;
        let mut sent = self.send(&destination, message.clone());
        if let Err(Unsent::Broken(reason)) = &sent {
            // It may have broken long ago, by a damaged chunk. Whether the receiver is there shows a new one.
            tracing::warn!(draft = destination.seat, reason, "a link is made again");
            self.links.remove(&destination.seat);
            sent = self.send(&destination, message);
        }
        match sent {
            Ok(()) => {
                self.context.say(RankEvent::Extracted {
                    row,
                    seat: destination.seat,
                    generation,
                    tokens,
                });
                faults::reach(Point::Sent, row.step())?;
            }
            Err(Unsent::Now(reason) | Unsent::Broken(reason)) => {
                tracing::warn!(draft = destination.seat, reason, "cannot hand over a row");
                self.links.remove(&destination.seat);
                self.context.say(RankEvent::NotSent {
                    row,
                    seat: destination.seat,
                    generation,
                    reason,
                });
            }
            Err(Unsent::Never(reason)) => {
                return Err(RankFault::permanent(format!(
                    "the {row} cannot be sent: {reason}; lower training.tokens_per_row or samples.held_out_rows"
                )));
            }
        }
        Ok(())
    }

    fn send(&mut self, destination: &Member, message: BulkOutgoing) -> Result<(), Unsent> {
        match self.link_to(destination)?.send(message, SEND_TIMEOUT) {
            Ok(()) => Ok(()),
            Err(error @ SendError::Invalid { .. }) => Err(Unsent::Never(error.to_string())),
            Err(error @ SendError::Ended { .. }) => Err(Unsent::Broken(error.to_string())),
            Err(error) => Err(Unsent::Now(error.to_string())),
        }
    }

    fn link_to(&mut self, destination: &Member) -> Result<&BulkSender, Unsent> {
        let known = self
            .links
            .get(&destination.seat)
            .is_some_and(|(member, _)| member == destination);
        if !known {
            self.links.remove(&destination.seat);
            let hello = Hello {
                from: Endpoint {
                    seat: self.context.seat,
                    generation: self.context.generation,
                },
                epoch: Epoch::default(),
                to: Endpoint {
                    seat: Seat::draft(destination.seat),
                    generation: destination.generation,
                },
            };
            let seat = destination.seat;
            let ended =
                move |error: &_| tracing::warn!(draft = seat, %error, "a link to a draft replica ended");
            match BulkSender::connect(&destination.bulk_name, hello, link_options(), ended) {
                Ok(link) => {
                    self.links.insert(destination.seat, (destination.clone(), link));
                }
                Err(error) => return Err(Unsent::Now(error.to_string())),
            }
        }
        let link = self.links.get(&destination.seat).map(|(_, link)| link);
        link.ok_or_else(|| Unsent::Now("the link is gone".to_owned()))
    }

    fn loaded(&mut self) -> Result<&mut Loaded, RankFault> {
        self.loaded
            .as_mut()
            .ok_or_else(|| RankFault::passing("asked to extract before the verifier was loaded"))
    }
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

impl Worker for VerifierWorker {
    fn take(&mut self, input: Input) -> Result<(), RankFault> {
        match input {
            Input::Command(CoordinatorCommand::LoadVerifier) => self.load()?,
            Input::Command(CoordinatorCommand::Extract(extraction)) => self.extract(extraction)?,
            Input::Command(CoordinatorCommand::ExtractHeldOut(request)) => self.extract_held_out(request)?,
            Input::Command(command) => {
                return Err(RankFault::passing(format!("a verifier was told {command:?}")));
            }
            // Nobody sends tensors to a verifier.
            Input::Bulk(_) => {}
        }
        self.context.enter(Activity::Idle);
        Ok(())
    }
}
