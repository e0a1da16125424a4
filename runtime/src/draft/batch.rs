//! One row as the draft trains on it: tokens shifted against hidden states.
//!
//! Within each document of n tokens there are n − 1 positions. Position i pairs the verifier's aux states g_i with the
//! token x_{i+1} that the verifier chose after them; the target is the verifier's own distribution over x_{i+2}, which
//! its last hidden state y_{i+1} gives. The loss mask is that of the *input* token x_{i+1}, and position ids start at 1:
//! the shift of speculators 0.9.

use std::ops::Range;

use super::error::DraftError;
use crate::row::HiddenRow;

/// A shifted row; `positions` counts all documents together.
#[derive(Clone, Debug, Default, PartialEq)]
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
}

impl DraftBatch {
    /// Shifts every document of a row. Documents of fewer than two tokens have no position.
    ///
    /// # Errors
    /// If tokens, mask, documents and hidden states do not fit each other.
    pub fn from_row(row: &HiddenRow) -> Result<Self, DraftError> {
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
        let h = row.hidden.hidden;
        let total = row
            .row
            .documents()
            .map(|document| document.len().saturating_sub(1))
            .sum::<usize>();
        let mut batch = Self {
            tokens: Vec::with_capacity(total),
            hidden: vec![0.0; total * aux * h],
            last_hidden: vec![0.0; total * h],
            ..Self::default()
        };
        for document in row.row.documents().filter(|document| document.len() > 1) {
            let first = batch.tokens.len();
            for i in document.start..document.end - 1 {
                let place = batch.tokens.len();
                for state in 0..aux {
                    row.hidden
                        .read(i, state, &mut batch.hidden[(place * aux + state) * h..][..h]);
                }
                row.hidden
                    .read(i + 1, aux, &mut batch.last_hidden[place * h..][..h]);
                batch.tokens.push(row.row.tokens[i + 1]);
                batch.loss_mask.push(row.row.loss_mask[i + 1]);
                batch.position_ids.push((i - document.start) as u32 + 1);
            }
            batch.documents.push(first..batch.tokens.len());
        }
        Ok(batch)
    }

    /// Cuts or zero-pads the row to `total` positions, as a collator with a fixed length does.
    ///
    /// Training needs no padding; comparisons with other trainers do. Padding belongs to no document.
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
