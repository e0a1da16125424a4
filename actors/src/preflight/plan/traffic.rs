//! What travels between ranks.

use super::Plan;
use crate::preflight::links::{Cargo, LinkPlan, Per, gradient_bytes_per_step, state_bytes};
use crate::preflight::supply::SupplyPlan;

impl Plan<'_> {
    /// What travels between ranks; per second if the speed of the run is known.
    pub(in crate::preflight) fn links(&self, supply: Option<&SupplyPlan>) -> Vec<LinkPlan> {
        let mut links = Vec::new();
        let tokens_per_s = supply.map(|supply| supply.tokens_per_s / self.replicas().max(1) as f64);
        for seat in self.config.verifier_seats() {
            let of_seat = if self.reads_files() {
                self.reader_links(seat.index, tokens_per_s)
            } else {
                self.verifier_links(seat.index, tokens_per_s)
            };
            links.extend(of_seat.into_iter().flatten());
        }
        if !self.writes_files() {
            links.extend(self.draft_links(supply));
        }
        links
    }

    fn draft_links(&self, supply: Option<&SupplyPlan>) -> Vec<LinkPlan> {
        let Some((_, parameters)) = self.spec() else {
            return Vec::new();
        };
        let members = self.members();
        let own = u64::from(self.config.rows_per_step()).div_ceil(members);
        let bytes = gradient_bytes_per_step(parameters, own, members);
        if bytes == 0 {
            return Vec::new();
        }
        let mut links = Vec::new();
        for seat in self.config.draft_seats() {
            links.push(LinkPlan {
                cargo: Cargo::Gradients,
                from: seat.to_string(),
                to: "other draft ranks".to_owned(),
                per: Per::Step,
                bytes,
                bytes_per_s: supply.map(|supply| supply.steps_per_s * bytes as f64),
            });
        }
        links.push(LinkPlan {
            cargo: Cargo::State,
            from: "a draft rank".to_owned(),
            to: "its replaced peer".to_owned(),
            per: Per::Replacement,
            bytes: state_bytes(parameters),
            bytes_per_s: None,
        });
        links
    }

    /// What a rank sends that reads hidden states from files.
    fn reader_links(&self, seat: u16, tokens_per_s: Option<f64>) -> Option<Vec<LinkPlan>> {
        let bytes = self.hidden_bytes_per_token()?;
        Some(vec![link(
            Cargo::HiddenStates,
            seat,
            DRAFTS.to_owned(),
            bytes,
            tokens_per_s,
        )])
    }

    fn verifier_links(&self, seat: u16, tokens_per_s: Option<f64>) -> Option<Vec<LinkPlan>> {
        let (files, cost) = self.cost_of(seat)?;
        let (shard, captured) = (files.shard, self.captured(files, cost));
        let hidden = self.foundation.verifier.as_ref()?.hidden_size as u64;
        let mut links = Vec::new();
        if captured > 0 {
            // All slices of a stage hold the same states; they take turns.
            let own = tokens_per_s.map(|tokens| tokens / f64::from(shard.slices));
            let bytes = captured * self.state_bytes()?;
            links.push(link(Cargo::HiddenStates, seat, DRAFTS.to_owned(), bytes, own));
        }
        if !shard.is_last() {
            // In f32, so that stages have the bits of the whole.
            let to = format!("verifier-{}", seat + shard.slices);
            links.push(link(Cargo::Residual, seat, to, 4 * hidden, tokens_per_s));
        }
        if shard.slices > 1 {
            // After the attention and after the MLP of each layer, and after the embedding: the parts that others sum go
            // out, and the part that this one sums.
            let sums = 2 * cost.layers.len() as u64 + u64::from(shard.is_first());
            let others = u64::from(shard.slices - 1);
            let bytes = sums * (2 * others * 4 * hidden).div_ceil(u64::from(shard.slices));
            let to = "other slices".to_owned();
            links.push(link(Cargo::SliceSums, seat, to, bytes, tokens_per_s));
        }
        Some(links)
    }
}

/// Who takes hidden states.
const DRAFTS: &str = "draft ranks";

/// What a verifier rank sends for each token.
fn link(cargo: Cargo, seat: u16, to: String, bytes: u64, tokens_per_s: Option<f64>) -> LinkPlan {
    LinkPlan {
        cargo,
        from: format!("verifier-{seat}"),
        to,
        per: Per::Token,
        bytes,
        bytes_per_s: tokens_per_s.map(|tokens| tokens * bytes as f64),
    }
}
