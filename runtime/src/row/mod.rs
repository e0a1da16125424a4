//! Samples, rows of packed samples, and their hidden states.

mod parts;

use bytes::Bytes;
use half::bf16;
use serde::{Deserialize, Serialize};

use crate::contract::HiddenDtype;

pub use parts::{PartError, RowParts};

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
///
/// Whoever only reads them shares their bytes; whoever makes them writes into a vector, or into the memory of a link.
#[derive(Clone, Debug, PartialEq)]
pub struct HiddenStates<B = Bytes> {
    /// Element type of `bytes`.
    pub dtype: HiddenDtype,
    /// Captured states per token.
    pub states: usize,
    /// Width of one state.
    pub hidden: usize,
    /// Little-endian elements.
    pub bytes: B,
}

impl HiddenStates<Vec<u8>> {
    /// All zeros.
    pub fn zeros(dtype: HiddenDtype, tokens: usize, states: usize, hidden: usize) -> Self {
        Self {
            dtype,
            states,
            hidden,
            bytes: vec![0; tokens * states * hidden * dtype.bytes()],
        }
    }
}

impl<B: Into<Bytes>> HiddenStates<B> {
    /// The same states, to be shared.
    pub fn share(self) -> HiddenStates {
        HiddenStates {
            dtype: self.dtype,
            states: self.states,
            hidden: self.hidden,
            bytes: self.bytes.into(),
        }
    }
}

impl HiddenStates {
    /// The states of some tokens, shared.
    pub fn of_tokens(&self, tokens: std::ops::Range<usize>) -> Self {
        let token_bytes = self.states * self.hidden * self.dtype.bytes();
        Self {
            bytes: self
                .bytes
                .slice(tokens.start * token_bytes..tokens.end * token_bytes),
            ..*self
        }
    }
}

impl<B> HiddenStates<B> {
    fn range(&self, token: usize, state: usize) -> std::ops::Range<usize> {
        let start = (token * self.states + state) * self.hidden * self.dtype.bytes();
        start..start + self.hidden * self.dtype.bytes()
    }
}

impl<B: AsRef<[u8]>> HiddenStates<B> {
    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.bytes.as_ref().len() / (self.states * self.hidden * self.dtype.bytes()).max(1)
    }

    /// Reads one state of one token into `out`, which is `hidden` long.
    pub fn read(&self, token: usize, state: usize, out: &mut [f32]) {
        let bytes = &self.bytes.as_ref()[self.range(token, state)];
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

impl<B: AsMut<[u8]>> HiddenStates<B> {
    /// Writes one state of one token, rounding to the element type.
    pub fn set(&mut self, token: usize, state: usize, values: &[f32]) {
        let range = self.range(token, state);
        self.dtype.write(values, &mut self.bytes.as_mut()[range]);
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

impl HiddenRow {
    /// The same documents in rows of at most `tokens`, in order; a longer document has a row of its own.
    pub fn split(&self, tokens: usize) -> Vec<Self> {
        let mut rows: Vec<(std::ops::Range<usize>, PackedRow)> = Vec::new();
        for range in self.row.documents() {
            if rows
                .last()
                .is_none_or(|(_, row)| row.len() + range.len() > tokens)
            {
                rows.push((range.start..range.start, PackedRow::default()));
            }
            if let Some((covered, row)) = rows.last_mut() {
                covered.end = range.end;
                row.tokens.extend_from_slice(&self.row.tokens[range.clone()]);
                row.loss_mask
                    .extend_from_slice(&self.row.loss_mask[range.clone()]);
                row.document_lengths.push(range.len() as u32);
            }
        }
        rows.into_iter()
            .map(|(range, row)| Self {
                row,
                hidden: self.hidden.of_tokens(range),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_split_row_has_the_same_documents() {
        let mut row = PackedRow::default();
        let mut next = 0;
        for length in [3_usize, 4, 9, 2] {
            let tokens: Vec<u32> = (next..next + length as u32).collect();
            next += length as u32;
            row.push(&Sample {
                loss_mask: vec![1; length],
                tokens,
            });
        }
        let mut hidden = HiddenStates::zeros(HiddenDtype::F32, row.len(), 2, 3);
        for token in 0..row.len() {
            for state in 0..2 {
                hidden.set(token, state, &[token as f32, state as f32, 1.0]);
            }
        }
        let hidden = hidden.share();
        let whole = HiddenRow { row, hidden };
        let parts = whole.split(8);
        let lengths: Vec<_> = parts
            .iter()
            .map(|part| part.row.document_lengths.clone())
            .collect();
        assert_eq!(lengths, [vec![3, 4], vec![9], vec![2]]);
        let mut token = 0;
        for part in &parts {
            assert!(part.row.is_consistent());
            assert_eq!(part.hidden.tokens(), part.row.len());
            for at in 0..part.row.len() {
                let mut state = [0.0; 3];
                part.hidden.read(at, 1, &mut state);
                assert_eq!(state, [token as f32, 1.0, 1.0]);
                assert_eq!(part.row.tokens[at], token);
                token += 1;
            }
        }
        assert_eq!(token as usize, whole.row.len());
    }
}
