//! One row as the draft trains on it: tokens shifted against hidden states.
//!
//! Within each document of n tokens there are n − 1 positions. Position i pairs the verifier's aux states g_i with the
//! token x_{i+1} that the verifier chose after them; the target is the verifier's own distribution over x_{i+2}, which
//! its last hidden state y_{i+1} gives. The loss mask is that of the *input* token x_{i+1}, and position ids start at 1:
//! the shift of speculators 0.9.

use std::ops::Range;

use super::error::DraftError;
use crate::cuda::Arrival;
use crate::device::{Device, FloatsMut, MatrixMut};
use crate::row::{HiddenRow, PackedRow};

/// A shifted row; `positions` counts all documents together.
#[derive(Clone, Debug, Default)]
pub struct DraftBatch {
    /// Input token x_{i+1} of each position, `[positions]`.
    pub tokens: Vec<u32>,
    /// Aux states g_i, `[positions, aux_layers · hidden]`.
    pub hidden: Vec<f32>,
    /// Verifier's last hidden state y_{i+1} before its final norm, `[positions, hidden]`.
    pub last_hidden: Vec<f32>,
    /// Loss mask l_{i+1}, `[positions]`.
    pub loss_mask: Vec<u8>,
    /// Position id of each position, from 1 within its document; 0 in padding.
    pub position_ids: Vec<u32>,
    /// Positions of each document, in order; they cover everything but the padding.
    pub documents: Vec<Range<usize>>,
    /// States that were sent ahead to the device; `hidden` and `last_hidden` are empty then.
    pub sent: Option<SentStates>,
}

/// States of a row on a device, and which of them the positions read.
#[derive(Clone, Debug)]
pub struct SentStates {
    arrival: Arrival,
    /// Token whose aux states each position reads, `[positions]`; its last state is that of the next token.
    sources: Vec<u32>,
}

impl SentStates {
    /// Aux states per token, and their width.
    pub(super) fn shape(&self) -> (usize, usize) {
        let states = self.arrival.source();
        (states.states.saturating_sub(1), states.hidden)
    }

    /// Writes the aux states `[positions, aux_layers · hidden]` and the last hidden states `[positions, hidden]`, as f32.
    pub(super) fn widen(&self, device: &impl Device, hidden: FloatsMut<'_>, last_hidden: FloatsMut<'_>) {
        let (aux, h) = self.shape();
        let (n, all) = (self.sources.len(), aux as u32 + 1);
        let first = |&token: &u32| token * all;
        let of_aux: Vec<u32> = self
            .sources
            .iter()
            .flat_map(|token| first(token)..first(token) + all - 1)
            .collect();
        let last: Vec<u32> = self
            .sources
            .iter()
            .map(|token| first(token) + 2 * all - 1)
            .collect();
        device.widen(&self.arrival, &of_aux, MatrixMut::new(hidden, n * aux, h));
        device.widen(&self.arrival, &last, MatrixMut::new(last_hidden, n, h));
    }
}

impl DraftBatch {
    /// Shifts every document of a row. Documents of fewer than two tokens have no position.
    ///
    /// # Errors
    /// If tokens, mask, documents and hidden states do not fit each other.
    pub fn from_row(row: &HiddenRow) -> Result<Self, DraftError> {
        let (aux, h) = Self::shape_of(row)?;
        let total = row
            .row
            .documents()
            .map(|document| document.len().saturating_sub(1))
            .sum::<usize>();
        let (mut hidden, mut last_hidden) = (vec![0.0; total * aux * h], vec![0.0; total * h]);
        let batch = Self::shift(&row.row, total, |place, i| {
            for state in 0..aux {
                row.hidden
                    .read(i, state, &mut hidden[(place * aux + state) * h..][..h]);
            }
            row.hidden.read(i + 1, aux, &mut last_hidden[place * h..][..h]);
        });
        Ok(Self {
            hidden,
            last_hidden,
            ..batch
        })
    }

    /// The same of a row whose states were sent ahead.
    ///
    /// # Errors
    /// As [`Self::from_row`].
    ///
    /// # Panics
    /// If they are not the states of this row.
    pub fn of_sent(row: &HiddenRow, arrival: Arrival) -> Result<Self, DraftError> {
        assert!(
            arrival.is_of(&row.hidden),
            "states of another row were sent ahead"
        );
        Self::shape_of(row)?;
        let mut sources = Vec::new();
        let batch = Self::shift(&row.row, 0, |_, i| sources.push(i as u32));
        Ok(Self {
            sent: Some(SentStates { arrival, sources }),
            ..batch
        })
    }

    /// Aux layers and width of a row whose parts fit each other.
    fn shape_of(row: &HiddenRow) -> Result<(usize, usize), DraftError> {
        let wrong = |text: String| Err(DraftError::Batch(text));
        if !row.row.is_consistent() {
            return wrong("tokens, loss mask and document lengths disagree".to_owned());
        }
        if row.hidden.tokens() != row.row.len() {
            return wrong(format!(
                "{} tokens but hidden states of {}",
                row.row.len(),
                row.hidden.tokens()
            ));
        }
        let Some(aux) = row.hidden.states.checked_sub(1).filter(|&aux| aux > 0) else {
            return wrong(format!(
                "{} captured states; at least one aux layer and the last are needed",
                row.hidden.states
            ));
        };
        Ok((aux, row.hidden.hidden))
    }

    /// A batch without states. `read` is told of each position, and of the token whose aux states it reads.
    fn shift(row: &PackedRow, total: usize, mut read: impl FnMut(usize, usize)) -> Self {
        let mut batch = Self {
            tokens: Vec::with_capacity(total),
            ..Self::default()
        };
        for document in row.documents().filter(|document| document.len() > 1) {
            let first = batch.tokens.len();
            for i in document.start..document.end - 1 {
                read(batch.tokens.len(), i);
                batch.tokens.push(row.tokens[i + 1]);
                batch.loss_mask.push(row.loss_mask[i + 1]);
                batch.position_ids.push((i - document.start) as u32 + 1);
            }
            batch.documents.push(first..batch.tokens.len());
        }
        batch
    }

    /// Cuts or zero-pads the row to `total` positions, as a collator with a fixed length does.
    ///
    /// Training needs no padding; comparisons with other trainers do. Padding belongs to no document. States that were sent
    /// ahead cannot be padded.
    pub fn pad_to(&mut self, total: usize) {
        let (aux_width, h) = match self.len() {
            0 => (0, 0),
            n => (self.hidden.len() / n, self.last_hidden.len() / n),
        };
        self.tokens.resize(total, 0);
        self.loss_mask.resize(total, 0);
        self.position_ids.resize(total, 0);
        self.hidden.resize(total * aux_width, 0.0);
        self.last_hidden.resize(total * h, 0.0);
        self.documents.retain(|document| document.start < total);
        if let Some(last) = self.documents.last_mut() {
            last.end = last.end.min(total);
        }
    }

    /// Number of positions, padding included.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether there is no position.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Document id of each position, −1 in padding.
    pub fn document_ids(&self) -> Vec<i64> {
        let mut ids = vec![-1; self.len()];
        for (id, document) in self.documents.iter().enumerate() {
            ids[document.clone()].fill(id as i64);
        }
        ids
    }

    /// The documents, and each position of the padding as one more: it sees only itself.
    pub(super) fn segments(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let end = self.documents.last().map_or(0, |document| document.end);
        self.documents
            .iter()
            .cloned()
            .chain((end..self.len()).map(|position| position..position + 1))
    }
}
