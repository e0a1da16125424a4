//! Samples, rows of packed samples, and their hidden states.

use half::bf16;
use serde::{Deserialize, Serialize};

use crate::contract::HiddenDtype;

/// One tokenised training sample. Both fields have the same length.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sample {
    /// Token ids, `[tokens]`.
    pub tokens: Vec<u32>,
    /// 1 where the token is part of an answer that is trained, else 0; `[tokens]`.
    pub loss_mask: Vec<u8>,
}

/// Whole samples, one after the other. Nothing is shifted or padded.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackedRow {
    /// Token ids of all documents, `[tokens]`.
    pub tokens: Vec<u32>,
    /// Loss mask of all documents, `[tokens]`.
    pub loss_mask: Vec<u8>,
    /// Tokens of each document; they add up to `tokens`.
    pub document_lengths: Vec<u32>,
}

impl PackedRow {
    /// Appends a sample as the next document.
    pub fn push(&mut self, sample: &Sample) {
        self.tokens.extend_from_slice(&sample.tokens);
        self.loss_mask.extend_from_slice(&sample.loss_mask);
        self.document_lengths.push(sample.tokens.len() as u32);
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no sample was put in.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Token range of each document.
    pub fn documents(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        self.document_lengths.iter().scan(0, |start, &length| {
            let range = *start..*start + length as usize;
            *start = range.end;
            Some(range)
        })
    }

    /// Whether mask and document lengths agree with the tokens.
    pub fn is_consistent(&self) -> bool {
        self.loss_mask.len() == self.tokens.len()
            && self.document_lengths.iter().map(|&n| n as usize).sum::<usize>() == self.tokens.len()
    }
}

/// Captured hidden states of a row, `[tokens, states, hidden]` row-major: the aux layers' inputs in ascending order,
/// then the last hidden state before the final norm (the layout of speculators' `hidden_states`).
#[derive(Clone, Debug, PartialEq)]
pub struct HiddenStates {
    /// Element type of `bytes`.
    pub dtype: HiddenDtype,
    /// Captured states per token.
    pub states: usize,
    /// Width of one state.
    pub hidden: usize,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

impl HiddenStates {
    /// All zeros.
    pub fn zeros(dtype: HiddenDtype, tokens: usize, states: usize, hidden: usize) -> Self {
        Self { dtype, states, hidden, bytes: vec![0; tokens * states * hidden * dtype.bytes()] }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.bytes.len() / (self.states * self.hidden * self.dtype.bytes()).max(1)
    }

    fn range(&self, token: usize, state: usize) -> std::ops::Range<usize> {
        let start = (token * self.states + state) * self.hidden * self.dtype.bytes();
        start..start + self.hidden * self.dtype.bytes()
    }

    /// Writes one state of one token, rounding to the element type.
    pub fn set(&mut self, token: usize, state: usize, values: &[f32]) {
        let range = self.range(token, state);
        let bytes = &mut self.bytes[range];
        match self.dtype {
            HiddenDtype::F32 => bytes.copy_from_slice(bytemuck::cast_slice(values)),
            HiddenDtype::Bf16 => {
                for (out, &value) in bytes.chunks_exact_mut(2).zip(values) {
                    out.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
                }
            }
        }
    }

    /// Reads one state of one token into `out`, which is `hidden` long.
    pub fn read(&self, token: usize, state: usize, out: &mut [f32]) {
        let bytes = &self.bytes[self.range(token, state)];
        match self.dtype {
            HiddenDtype::F32 => {
                for (out, chunk) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                    *out = f32::from_le_bytes([chunk[0], chunk[1], chunk[2], chunk[3]]);
                }
            }
            HiddenDtype::Bf16 => {
                for (out, chunk) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *out = bf16::from_le_bytes([chunk[0], chunk[1]]).to_f32();
                }
            }
        }
    }
}

/// A row with the hidden states that the verifier computed for it.
#[derive(Clone, Debug, PartialEq)]
pub struct HiddenRow {
    /// Tokens, masks and document boundaries.
    pub row: PackedRow,
    /// Their hidden states.
    pub hidden: HiddenStates,
}
