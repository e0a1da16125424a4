//! What the fake cluster is made of, and the dice that decide what happens to it.

use eaglet_runtime::contract::{Contract, HiddenDtype};
use eaglet_runtime::digest::Digest;

use crate::engine::{Fall, LearningRate, RestartPolicy, Settings};

pub(super) const DRAFTS: u16 = 3;
pub(super) const VERIFIERS: u16 = 2;
pub(super) const SAMPLES: u64 = 60;

pub(super) fn settings() -> Settings {
    Settings {
        draft_seats: DRAFTS,
        verifier_seats: VERIFIERS,
        contract: contract(),
        recipe: Digest::of(b"recipe"),
        tokens_per_row: 100,
        passes: 2,
        step_limit: None,
        prefetch_steps: 3,
        evaluate_every_steps: 5,
        max_new_tokens: 8,
        held_out_rows: 4,
        checkpoint_every_steps: 4,
        learning_rate: LearningRate {
            peak: 1e-3,
            warmup_ratio: 0.1,
            fall: Fall::Linear,
        },
        suspect_after_ms: 1_000,
        dead_after_ms: 2_000,
        attach_timeout_ms: 30_000,
        load_timeout_ms: 60_000,
        step_timeout_ms: 60_000,
        leave_timeout_ms: 10_000,
        restarts: RestartPolicy {
            max_restarts: u32::MAX,
            window_ms: 60_000,
            backoff_initial_ms: 10,
            backoff_max_ms: 100,
        },
    }
}

pub(super) fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![2, 3, 5],
        hidden_size: 8,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}

/// SplitMix64: all the randomness of a schedule.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn below(&mut self, n: usize) -> usize {
        (self.roll() % n.max(1) as u64) as usize
    }

    pub(super) fn one_in(&mut self, n: u64) -> bool {
        n > 0 && self.roll().is_multiple_of(n)
    }
}
