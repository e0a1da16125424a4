//! A training step allocates nothing once its buffers have the size of the row.
//!
//! The one exception is named: the crate for f32 products takes its packing buffer from the allocator for each product.

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use eaglet_runtime::device::{Cpu, Device};
use eaglet_runtime::draft::{
    Draft, DraftBatch, DraftSpec, FrozenWeights, LayerKind, TrainingSpec, init_parameters,
};
use eaglet_runtime::optimizer::{AdamW, AdamWSpec};
use eaglet_runtime::rope::Rope;

/// Whose allocations are let pass.
const PRODUCT_CRATES: [&str; 2] = ["gemm_common::", "gemm_f32::"];

static WATCHING: AtomicBool = AtomicBool::new(false);
static PASSED: AtomicUsize = AtomicUsize::new(0);
static SEEN: Mutex<Vec<String>> = Mutex::new(Vec::new());

thread_local! {
    /// Looking at a backtrace allocates itself.
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

struct Watched;

impl Watched {
    fn note(bytes: usize) {
        if !WATCHING.load(Ordering::Relaxed) || LOOKING.replace(true) {
            return;
        }
        let stack = Backtrace::force_capture().to_string();
        if PRODUCT_CRATES.iter().any(|name| stack.contains(name)) {
            PASSED.fetch_add(1, Ordering::Relaxed);
        } else {
            SEEN.lock()
                .expect("no test panics while it holds it")
                .push(format!("{bytes} bytes\n{stack}"));
        }
        LOOKING.set(false);
    }
}

// SAFETY: everything is the system's allocator's; what is added only looks.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::note(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::note(layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::note(size);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// What was allocated on all threads while `work` ran, product crates apart.
fn allocations(work: impl FnOnce()) -> Vec<String> {
    WATCHING.store(true, Ordering::Relaxed);
    work();
    WATCHING.store(false, Ordering::Relaxed);
    std::mem::take(&mut SEEN.lock().expect("no test panics while it holds it"))
}

fn wave(length: usize, seed: f32) -> Vec<f32> {
    (0..length).map(|i| (1.7 * i as f32 + seed).sin() * 0.3).collect()
}

fn spec(layer: LayerKind) -> DraftSpec {
    DraftSpec {
        layer,
        hidden_size: 48,
        intermediate_size: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab_size: 300,
        draft_vocab_size: 200,
        aux_layers: 3,
        rms_norm_eps: 1e-5,
        rope: Rope::new(10_000.0, 16),
        sliding_window: Some(50),
        norm_before_residual: true,
        norm_before_fc: true,
        fc_norm: false,
        norm_output: true,
    }
}

/// A row of documents of these lengths, some of whose tokens are trained.
fn batch(spec: &DraftSpec, lengths: &[usize]) -> DraftBatch {
    let tokens: usize = lengths.iter().sum();
    let mut first = 0;
    let documents: Vec<_> = lengths
        .iter()
        .map(|length| {
            first += length;
            first - length..first
        })
        .collect();
    DraftBatch {
        sent: None,
        tokens: (0..tokens).map(|i| (i * 31 % spec.vocab_size) as u32).collect(),
        hidden: wave(tokens * 3 * spec.hidden_size, 1.0),
        last_hidden: wave(tokens * spec.hidden_size, 2.0),
        loss_mask: (0..tokens).map(|i| u8::from(i % 9 > 2)).collect(),
        position_ids: lengths.iter().flat_map(|&length| 1..=length as u32).collect(),
        documents,
    }
}

/// A draft that trains rows one after the other.
struct Trainer {
    device: Arc<Cpu>,
    draft: Draft<Cpu>,
    parameters: Vec<f32>,
    gradient: Vec<f32>,
    optimizer: AdamW,
}

impl Trainer {
    fn new(spec: DraftSpec, threads: usize) -> Self {
        let device = Arc::new(Cpu::new(threads).expect("threads"));
        let head: Arc<[f32]> = wave(spec.draft_vocab_size * spec.hidden_size, 3.0).into();
        let frozen = FrozenWeights {
            embed: wave(spec.vocab_size * spec.hidden_size, 4.0).into(),
            verifier_head: Arc::clone(&head),
            verifier_norm: vec![1.0; spec.hidden_size].into(),
            verifier_norm_eps: 1e-5,
            lm_head: head,
        };
        let training = TrainingSpec {
            ttt_steps: 3,
            step_loss_decay: 0.8,
        };
        let draft = Draft::new(spec, training, frozen, Arc::clone(&device)).expect("a valid draft");
        let parameters = init_parameters(draft.layout(), 7);
        Self {
            gradient: vec![0.0; parameters.len()],
            optimizer: AdamW::new(AdamWSpec::default(), &*device, parameters.len()),
            parameters,
            draft,
            device,
        }
    }

    fn step(&mut self, row: &DraftBatch) {
        let Self {
            device,
            draft,
            parameters,
            gradient,
            optimizer,
        } = self;
        let metrics = draft
            .gradient(&*parameters, row, &mut *gradient)
            .expect("it fits");
        assert!(metrics.loss.is_finite());
        optimizer
            .update(&**device, &mut *parameters, &*gradient, 1e-3)
            .expect("lengths fit");
    }
}

// One test, for there is one allocator to watch.
#[test]
fn a_step_allocates_nothing_after_the_first() {
    for layer in [LayerKind::Llama, LayerKind::Qwen3] {
        let spec = spec(layer);
        let rows = [[200, 1, 59], [150, 20, 90], [80, 100, 30]].map(|row| batch(&spec, &row));
        let mut trainer = Trainer::new(spec, 1);
        let device = Arc::clone(&trainer.device);
        // Work from outside is queued in blocks that the pool allocates now and then.
        device.install(|| {
            trainer.step(&rows[0]);
            let found = allocations(|| rows.iter().for_each(|row| trainer.step(row)));
            let first = found.first().map_or("", String::as_str);
            assert!(
                found.is_empty(),
                "{layer:?}: {} of them, first {first}",
                found.len()
            );
        });
        assert!(PASSED.swap(0, Ordering::Relaxed) > 0, "the watch is on");
    }
    // Threads that end may allocate meanwhile, too.
    let seen = allocations(|| drop(std::hint::black_box(vec![1_u8; 100])));
    assert!(!seen.is_empty(), "and it sees");

    // Which thread meets a task first is chance; once each has, none allocates.
    let spec = spec(LayerKind::Llama);
    let row = batch(&spec, &[200, 1, 59]);
    let mut trainer = Trainer::new(spec, 3);
    let device = Arc::clone(&trainer.device);
    let quiet = device
        .install(|| (0..100).any(|_| allocations(|| (0..3).for_each(|_| trainer.step(&row))).is_empty()));
    assert!(quiet, "three threads allocate in every one of a hundred steps");
}
