//! Greedy answers, many at once, with cached keys and values.
//!
//! The cache of a layer is one buffer in which every sequence owns a stretch as long as it can get; to the attention it
//! is a packed row whose documents are these stretches. A step is one product over all sequences that still run.
//! Because a row of a product does not depend on the rows beside it, an answer is the same alone and in a batch.

use std::ops::Range;

use super::VerifierError;
use super::decoder::Attending;
use super::extract::{Verifier, check_finite};
use crate::device::{Attention, AttentionInputs, AttentionPlan, Device, Matrix};

/// Prompt tokens that enter the decoder together, at least one prompt; bounds the activations.
const PREFILL_TOKENS: usize = 2048;

/// Keys and values of one layer, `[tokens of all stretches, kv_heads · head_dim]` each.
struct LayerCache {
    k: Vec<f32>,
    v: Vec<f32>,
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
    /// run together; the cache takes `2 · layers · kv_heads · head_dim · 4` bytes per token of prompts and answers.
    ///
    /// # Errors
    /// When a prompt is empty or has a token outside the vocabulary, or a state is not finite (it names the prompt).
    pub fn generate(
        &mut self,
        prompts: &[Vec<u32>],
        max_new_tokens: usize,
        stop_ids: &[u32],
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
        self.reach_position(stretches.iter().map(|stretch| stretch.len()).max().unwrap_or(0));
        let width = self.decoder.attention_shape().key_width();
        let mut cache: Vec<LayerCache> = (0..self.config().layers)
            .map(|_| LayerCache {
                k: vec![0.0; end * width],
                v: vec![0.0; end * width],
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
            let chosen = self.advance(&group, &stretches, &mut cache)?;
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

        let plan = AttentionPlan::new(
            stretches.iter().cloned(),
            &cache_rows,
            self.config().sliding_window,
        );
        let (hidden, vocab) = (self.hidden_size(), self.vocab_size());
        let Self {
            device,
            decoder,
            activations,
            rotary,
            normed,
            logits,
            ..
        } = self;
        let shape = decoder.attention_shape();
        let attention = Attention {
            shape,
            plan: &plan,
            diagonals: 0,
        };
        let width = shape.key_width();
        device.install(|| {
            decoder.forward(
                device,
                activations,
                rotary,
                (&tokens, &positions),
                |layer, Attending { q, k, v, out, lse }| {
                    let cache = &mut cache[layer];
                    for (row, &cache_row) in cache_rows.iter().enumerate() {
                        let (from, to) = (row * width, cache_row as usize * width);
                        cache.k[to..to + width].copy_from_slice(&k[from..from + width]);
                        cache.v[to..to + width].copy_from_slice(&v[from..from + width]);
                    }
                    let inputs = AttentionInputs {
                        q,
                        k: &cache.k,
                        v: &cache.v,
                        k_diagonal: &[],
                        v_diagonal: &[],
                    };
                    device.attention(&attention, &inputs, out, lse);
                },
                |layer, residual| {
                    check_finite(residual, hidden, documents.iter().cloned(), layer, f32::MAX).map_err(
                        |error| match error {
                            VerifierError::NonFinite { document, layer } => VerifierError::NonFinite {
                                document: group[document].sequence,
                                layer,
                            },
                            other => other,
                        },
                    )
                },
            )?;
            decoder.logits(device, activations, &last_rows, normed, logits);
            let mut chosen = vec![0; group.len()];
            device.argmax(
                Matrix::new(&logits[..group.len() * vocab], group.len(), vocab),
                &mut chosen,
            );
            Ok(chosen)
        })
    }
}
