//! Settings of a small cluster.

use std::collections::BTreeMap;

use eaglet_runtime::collective::SumMode;
use eaglet_runtime::contract::{Contract, HiddenDtype};
use eaglet_runtime::digest::Digest;
use eaglet_runtime::ids::Seat;

use crate::engine::{Fall, LearningRate, RestartPolicy, Settings, WhenExhausted};

pub(super) fn settings() -> Settings {
    let restarts = RestartPolicy {
        max_restarts: u32::MAX,
        window_ms: 60_000,
        backoff_initial_ms: 10,
        backoff_max_ms: 100,
        then: WhenExhausted::Continue,
    };
    Settings {
        lanes: 3,
        pipeline: 1,
        tensor: 1,
        seats: (0..3).map(Seat::draft).chain([Seat::verifier(0)]).collect(),
        open: false,
        contract: contract(),
        recipe: Digest::of(b"recipe"),
        sums: SumMode::Exact,
        slice_sums: SumMode::Exact,
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
        hosts: BTreeMap::new(),
        host_timeout_ms: 60_000,
        load_timeout_ms: 60_000,
        step_timeout_ms: 60_000,
        leave_timeout_ms: 10_000,
        form_timeout_ms: 30_000,
        team_timeout_ms: 30_000,
        broadcasts_state: false,
        verifier_restarts: restarts,
        draft_restarts: restarts,
    }
}

fn contract() -> Contract {
    Contract {
        verifier: Digest::of(b"verifier"),
        aux_layers: vec![2, 3, 5],
        hidden_size: 8,
        dtype: HiddenDtype::Bf16,
        tokenizer: Digest::of(b"tokenizer"),
        template: Digest::of(b"template"),
    }
}
