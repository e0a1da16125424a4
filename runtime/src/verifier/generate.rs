//! Greedy answers, many at once, with cached keys and values.
//!
//! The cache of a layer is one buffer in which every sequence owns a stretch as long as it can get; to the attention it
//! is a packed row whose documents are these stretches. A step is one product over all sequences that still run.
//! Because a row of a product does not depend on the rows beside it, an answer is the same alone and in a batch.

use std::ops::Range;

use super::VerifierError;
use super::decoder::Attending;
use super::extract::{FiniteChecks, Plans, Verifier};
use super::shard::Peers;
use crate::device::{AttentionInputs, AttentionPlan, Buffer, Device, Floats, Matrix, MatrixMut};

/// Prompt tokens that enter the decoder together, at least one prompt; bounds the activations.
const PREFILL_TOKENS: usize = 2048;

/// Stands for a next token where the states are not finite, so that all shards learn of it.
const NOT_FINITE: u32 = u32::MAX;

/// Keys `[tokens of all stretches, kv_heads · head_dim]` and values `[tokens, kv_heads · value_dim]` of one layer.
struct LayerCache {
    k: Buffer,
    v: Buffer,
}

/// The part of a sequence that enters the decoder next.
struct Advance {
    /// Which sequence.
    sequence: usize,
    /// Its tokens.
    tokens: Vec<u32>,
    /// Position of the first of them.
    position: usize,
}

impl<D: Device> Verifier<D> {
    /// The most likely continuation of each prompt, token by token, until a stop id or `max_new_tokens`.
    ///
    /// A stop id ends the answer and is its last token. The first of several equally likely tokens is taken. All prompts
    /// run together; the cache takes `layers · kv_heads · (head_dim + value_dim) · 4` bytes per token of prompts and answers.
    /// All shards of a verifier return the same.
    ///
    /// # Errors
    /// When a prompt is empty or has a token outside the vocabulary, a state is not finite (it names the prompt), or the other
    /// shards do not answer.
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_ids: &[u32],
        peers: &mut impl Peers,
    ) -> Result<Vec<Vec<u32>>, VerifierError> {
        for (prompt, tokens) in prompts.iter().enumerate() {
            if tokens.is_empty() {
                return Err(VerifierError::EmptyPrompt { prompt });
            }
            self.check_tokens(prompt, tokens)?;
        }
        let mut answers = vec![Vec::new(); prompts.len()];
        if prompts.is_empty() || max_new_tokens == 0 {
            return Ok(answers);
        }
        // The last token of an answer is never fed back.
        let mut end = 0;
        let stretches: Vec<Range<usize>> = prompts
            .iter()
            .map(|prompt| {
                let start = end;
                end += prompt.len() + max_new_tokens - 1;
                start..end
            })
            .collect();
        let longest = stretches.iter().map(|stretch| stretch.len()).max().unwrap_or(0);
        self.decoder.reach_position(&self.device, longest);
        let device = &self.device;
        let zeros = |len| {
            let mut buffer = Buffer::default();
            device.fit(&mut buffer, "cached keys and values", len);
            device.fill(buffer.floats_mut(), 0.0);
            buffer
        };
        let shapes = self.decoder.attentions().map(|block| block.shape());
        let mut cache: Vec<LayerCache> = shapes
            .map(|shape| LayerCache {
                k: zeros(end * shape.key_width()),
                v: zeros(end * shape.value_width()),
            })
            .collect();

        let mut running: Vec<Advance> = Vec::new();
        let prompts = prompts.iter().enumerate();
        let mut waiting = prompts.map(|(sequence, prompt)| Advance {
            sequence,
            tokens: prompt.clone(),
            position: 0,
        });
        let mut next = waiting.next();
        while next.is_some() || !running.is_empty() {
            // Prompts first, in groups; then all sequences step together.
            let mut group: Vec<Advance> = Vec::new();
            let mut tokens = 0;
            while let Some(advance) =
                next.take_if(|next| group.is_empty() || tokens + next.tokens.len() <= PREFILL_TOKENS)
            {
                tokens += advance.tokens.len();
                group.push(advance);
                next = waiting.next();
            }
            let group = if group.is_empty() {
                std::mem::take(&mut running)
            } else {
                group
            };
            let chosen = self.advance(&group, &stretches, &mut cache, peers)?;
            for (advance, token) in group.into_iter().zip(chosen) {
                let answer = &mut answers[advance.sequence];
                answer.push(token);
                if answer.len() < max_new_tokens && !stop_ids.contains(&token) {
                    let position = advance.position + advance.tokens.len();
                    running.push(Advance {
                        sequence: advance.sequence,
                        tokens: vec![token],
                        position,
                    });
                }
            }
        }
        Ok(answers)
    }

    /// Feeds the tokens of some sequences (ascending) and returns the most likely next token of each.
    fn advance(
        &mut self,
        group: &[Advance],
        stretches: &[Range<usize>],
        cache: &mut [LayerCache],
        peers: &mut impl Peers,
    ) -> Result<Vec<u32>, VerifierError> {
        let tokens: Vec<u32> = group
            .iter()
            .flat_map(|advance| advance.tokens.iter().copied())
            .collect();
        let span =
            |advance: &Advance| advance.position as u32..(advance.position + advance.tokens.len()) as u32;
        let positions: Vec<u32> = group.iter().flat_map(span).collect();
        let cache_row =
            |advance: &Advance, position: u32| stretches[advance.sequence].start as u32 + position;
        let cache_rows: Vec<u32> = group
            .iter()
            .flat_map(|advance| span(advance).map(move |position| cache_row(advance, position)))
            .collect();
        let documents: Vec<Range<usize>> = group
            .iter()
            .scan(0, |start, advance| {
                let range = *start..*start + advance.tokens.len();
                *start = range.end;
                Some(range)
            })
            .collect();
        let last_rows: Vec<u32> = documents.iter().map(|range| range.end as u32 - 1).collect();

        let plans = Plans::new(&self.decoder, |window| {
            AttentionPlan::new(stretches.iter().cloned(), &cache_rows, window)
        });
        let Self {
            device,
            decoder,
            activations,
            ..
        } = self;
        let mut checks = FiniteChecks::default();
        device.install(|| {
            decoder.forward(
                device,
                activations,
                (&tokens, &positions),
                peers,
                |layer,
                 Attending {
                     block,
                     q,
                     k,
                     v,
                     out,
                     lse,
                 }| {
                    let cache = &mut cache[layer];
                    // Every row of the cache is zero until it is added to, once.
                    for (cached, new, width) in [
                        (&mut cache.k, k, block.shape().key_width()),
                        (&mut cache.v, v, block.shape().value_width()),
                    ] {
                        let rows = cached.len().checked_div(width).unwrap_or(0);
                        let new = Matrix::new(new, cache_rows.len(), width);
                        device.scatter_add(new, &cache_rows, MatrixMut::new(cached, rows, width));
                    }
                    let inputs = AttentionInputs {
                        q,
                        k: cache.k.floats(),
                        v: cache.v.floats(),
                        k_diagonal: Floats::empty(),
                        v_diagonal: Floats::empty(),
                    };
                    device.attention(&block.call(plans.of(block.window())), &inputs, out, lse);
                },
                |layer, residual| checks.begin(device, layer, residual, f32::MAX),
            )
        })?;
        let fault = checks.fault(documents.into_iter());
        let mut chosen = vec![0; group.len()];
        if self.shard().is_last() {
            self.choose(&last_rows, &mut chosen, peers)?;
            // What is not finite once stays so, so the last stage knows of every prompt that went wrong anywhere.
            for (document, chosen) in chosen.iter_mut().enumerate() {
                if fault.is_some_and(|(first, _)| first == document) {
                    *chosen = NOT_FINITE;
                }
            }
        }
        peers.announce(&mut chosen)?;
        match chosen.iter().position(|&token| token == NOT_FINITE) {
            None => Ok(chosen),
            Some(document) => Err(VerifierError::NonFinite {
                document: group[document].sequence,
                layer: match fault {
                    Some((found, layer)) if found == document => layer,
                    _ => self.config().layers as u32,
                },
            }),
        }
    }

    /// The most likely next token after each of these rows of the last pass, whichever slice has it.
    fn choose(
        &mut self,
        rows: &[u32],
        chosen: &mut [u32],
        peers: &mut impl Peers,
    ) -> Result<(), VerifierError> {
        let slices = self.shard().slices;
        let Self {
            device,
            decoder,
            activations,
            normed,
            logits,
            ..
        } = self;
        let ids = device.install(|| {
            let ids = decoder.logits(device, activations, rows, normed, logits);
            let own = logits.part(0..rows.len() * ids.len());
            device.argmax(Matrix::new(own, rows.len(), ids.len()), chosen);
            ids
        });
        if slices == 1 {
            return Ok(());
        }
        let logits = device.read(logits.part(0..rows.len() * ids.len()));
        // A pair each: the largest logit and, exact in f32 up to 16 million, its place in this slice.
        let best = chosen
            .iter()
            .enumerate()
            .flat_map(|(row, &id)| [logits[row * ids.len() + id as usize], id as f32]);
        let best: Vec<f32> = best.collect();
        let mut all = Vec::new();
        peers.gather(&best, &mut all)?;
        let vocab = self.vocab_size();
        for (row, chosen) in chosen.iter_mut().enumerate() {
            let mut largest = f32::NEG_INFINITY;
            for slice in 0..slices {
                let shard = super::Shard {
                    slice,
                    ..self.shard()
                };
                let pair = &all[usize::from(slice) * best.len() + 2 * row..][..2];
                // The first of several equally likely tokens is taken, as in a verifier that is not cut.
                if slice == 0 || pair[0] > largest {
                    (largest, *chosen) = (pair[0], shard.slice_of(vocab, 1).start as u32 + pair[1] as u32);
                }
            }
        }
        Ok(())
    }
}
