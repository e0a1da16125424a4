//! Tokens per second of a draft training step (gradient and AdamW) at SmolLM2-135M's shapes.
//!
//! `cargo bench --bench draft_step -- [threads] [repetitions]`; all tokens are trained, so nothing is skipped.

use std::sync::Arc;
use std::time::Instant;

use eaglet_runtime::device::Cpu;
use eaglet_runtime::draft::{
    Draft, DraftBatch, DraftSpec, FrozenWeights, LayerKind, TrainingSpec, init_parameters,
};
use eaglet_runtime::optimizer::{AdamW, AdamWSpec};
use eaglet_runtime::rope::Rope;

const TOKENS: usize = 1024;
const HIDDEN: usize = 576;
const VOCABULARY: usize = 49152;

fn wave(n: usize, seed: f32) -> Vec<f32> {
    let mut state = seed.to_bits().wrapping_mul(2_654_435_761).wrapping_add(12345);
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn spec() -> DraftSpec {
    DraftSpec {
        layer: LayerKind::Llama,
        hidden_size: HIDDEN,
        intermediate_size: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab_size: VOCABULARY,
        draft_vocab_size: 8192,
        aux_layers: 3,
        rms_norm_eps: 1e-5,
        rope: Rope::new(100_000.0, 64),
        sliding_window: Some(2048),
        norm_before_residual: true,
        norm_before_fc: true,
        fc_norm: false,
        norm_output: true,
    }
}

fn batch(documents: usize) -> DraftBatch {
    let length = TOKENS / documents;
    DraftBatch {
        tokens: (0..TOKENS as u32).map(|i| i * 7919 % VOCABULARY as u32).collect(),
        hidden: wave(TOKENS * 3 * HIDDEN, 1.0),
        last_hidden: wave(TOKENS * HIDDEN, 2.0),
        loss_mask: vec![1; TOKENS],
        position_ids: (0..TOKENS).map(|i| (i % length) as u32 + 1).collect(),
        documents: (0..documents).map(|d| d * length..(d + 1) * length).collect(),
    }
}

#[expect(clippy::print_stdout, reason = "a benchmark reports on standard output")]
fn main() {
    let mut numbers = std::env::args().filter_map(|argument| argument.parse::<usize>().ok());
    let threads: Vec<usize> = numbers.next().map_or_else(|| vec![1, 2], |n| vec![n]);
    let repetitions = numbers.next().unwrap_or(5);
    let scaled = |n: usize, seed: f32| -> Arc<[f32]> { wave(n, seed).iter().map(|x| x * 0.1).collect() };
    let head = scaled(8192 * HIDDEN, 3.0);
    let frozen = FrozenWeights {
        embed: scaled(VOCABULARY * HIDDEN, 4.0),
        verifier_head: Arc::clone(&head),
        verifier_norm: vec![1.0; HIDDEN].into(),
        verifier_norm_eps: 1e-5,
        lm_head: head,
    };
    for threads in threads {
        for documents in [1, 4] {
            let device = Arc::new(Cpu::new(threads).expect("threads"));
            let training = TrainingSpec {
                ttt_steps: 3,
                step_loss_decay: 1.0,
            };
            let mut draft =
                Draft::new(spec(), training, frozen.clone(), Arc::clone(&device)).expect("a valid draft");
            let mut parameters = init_parameters(draft.layout(), 1);
            let mut gradient = vec![0.0; parameters.len()];
            let mut optimizer = AdamW::new(AdamWSpec::default(), parameters.len());
            let row = batch(documents);
            let mut best = [f64::INFINITY; 2];
            for _ in 0..=repetitions {
                let start = Instant::now();
                let metrics = draft
                    .gradient(&parameters, &row, &mut gradient)
                    .expect("a row that fits");
                let middle = Instant::now();
                optimizer
                    .update(&*device, &mut parameters, &gradient, 1e-4)
                    .expect("lengths fit");
                let end = Instant::now();
                assert!(metrics.loss.is_finite());
                best[0] = best[0].min((middle - start).as_secs_f64());
                best[1] = best[1].min((end - middle).as_secs_f64());
            }
            let [step, update] = best;
            let rate = TOKENS as f64 / (step + update);
            println!(
                "{threads} threads, {documents} documents: {rate:.0} tokens/s, gradient {step:.3} s, update {update:.3} s"
            );
        }
    }
}
