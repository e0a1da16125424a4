//! Rows of coming steps, put together of the parts that the shards of a verifier send.
//!
//! FENCE: of a row that was leased again the newest lease counts, since it may hold other samples; parts of an older one
//! are dropped. A part that comes twice is dropped, too, and a row whose parts do not all come is never whole.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use eaglet_runtime::contract::Contract;
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::{RowId, Step};
use eaglet_runtime::link::{BulkKind, BulkMessage, Part};
use eaglet_runtime::row::{HiddenRow, HiddenStates, RowParts};

use super::is_ahead;
use crate::rank::RankFault;

/// What has come of the rows of this replica's lanes.
#[derive(Default)]
pub(in crate::rank) struct Rows {
    /// Rows with the lease that they were extracted for.
    whole: BTreeMap<RowId, (u64, HiddenRow)>,
    /// Rows of which something is missing.
    parts: BTreeMap<RowId, Incomplete>,
}

struct Incomplete {
    lease: u64,
    /// Digest of the contract that all of its parts are sent under.
    promised: Digest,
    parts: RowParts,
}

impl Rows {
    /// A whole row.
    pub(in crate::rank) fn get(&self, row: RowId) -> Option<&HiddenRow> {
        self.whole.get(&row).map(|(_, row)| row)
    }

    /// All whole rows.
    pub(in crate::rank) fn iter(&self) -> impl Iterator<Item = (RowId, &HiddenRow)> {
        self.whole.iter().map(|(&id, (_, row))| (id, row))
    }

    /// Forgets what is not wanted any more.
    pub(in crate::rank) fn retain(&mut self, mut is_wanted: impl FnMut(RowId) -> bool) {
        self.whole.retain(|&row, _| is_wanted(row));
        self.parts.retain(|&row, _| is_wanted(row));
    }

    /// Takes what one shard sent; the row and its lease, if that makes it whole. As long as the contract is not known,
    /// none is.
    pub(in crate::rank) fn take(
        &mut self,
        message: BulkMessage,
        contract: Option<&Contract>,
        reached: Option<Step>,
    ) -> Result<Option<(RowId, u64)>, RankFault> {
        let BulkKind::Hidden {
            row,
            lease,
            contract: promised,
            dtype,
            first_state,
            states,
            hidden,
            packed: content,
        } = message.header.kind
        else {
            return Ok(None);
        };
        let bytes = message
            .parts
            .into_iter()
            .next()
            .map(Part::into_bytes)
            .unwrap_or_default();
        let hidden = HiddenStates {
            dtype,
            states: usize::from(states),
            hidden: hidden as usize,
            bytes,
        };
        let from = message.header.from;
        if contract.is_some_and(|contract| {
            contract.digest() != promised
                || contract.states_per_token() < usize::from(first_state) + hidden.states
        }) {
            return Err(other_contract(row));
        }
        let is_old = reached.is_some_and(|reached| !is_ahead(row, reached));
        let known = self.whole.get(&row).map(|(lease, _)| *lease);
        if is_old || known.is_some_and(|known| known >= lease) {
            return Ok(None);
        }
        let incomplete = match self.parts.entry(row) {
            Entry::Occupied(entry) if entry.get().lease > lease => return Ok(None),
            Entry::Occupied(entry) if entry.get().lease == lease && entry.get().promised == promised => {
                entry.into_mut()
            }
            entry => entry
                .insert_entry(Incomplete {
                    lease,
                    promised,
                    parts: RowParts::new(content.clone()),
                })
                .into_mut(),
        };
        incomplete
            .parts
            .add(&content, usize::from(first_state), hidden)
            .map_err(|error| {
                RankFault::permanent(format!(
                    "what {from} sent of the {row} does not go with what other shards sent: {error}; start all ranks \
                     from one cluster.toml"
                ))
            })?;
        contract.map_or(Ok(None), |contract| self.join(row, contract))
    }

    /// Rows that are whole now that it is known what they must be.
    pub(in crate::rank) fn complete(&mut self, contract: &Contract) -> Result<Vec<(RowId, u64)>, RankFault> {
        let rows: Vec<RowId> = self.parts.keys().copied().collect();
        let mut whole = Vec::new();
        for row in rows {
            whole.extend(self.join(row, contract)?);
        }
        Ok(whole)
    }

    fn join(&mut self, row: RowId, contract: &Contract) -> Result<Option<(RowId, u64)>, RankFault> {
        let states = contract.states_per_token();
        let Some(incomplete) = self.parts.get(&row) else {
            return Ok(None);
        };
        if incomplete.promised != contract.digest() {
            return Err(other_contract(row));
        }
        if !incomplete.parts.is_whole(states) {
            return Ok(None);
        }
        let Some(Incomplete { lease, parts, .. }) = self.parts.remove(&row) else {
            return Ok(None);
        };
        match parts.join(states) {
            Ok(whole)
                if whole.hidden.hidden == contract.hidden_size as usize
                    && whole.hidden.dtype == contract.dtype =>
            {
                self.whole.insert(row, (lease, whole));
                Ok(Some((row, lease)))
            }
            _ => Err(other_contract(row)),
        }
    }
}

fn other_contract(row: RowId) -> RankFault {
    RankFault::permanent(format!(
        "the {row} was sent under another contract than this draft is trained for; start all ranks from one \
         cluster.toml"
    ))
}
