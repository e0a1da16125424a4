//! The table of numbers that needs no file: a tiny draft filled by formula, run through speculators 0.9.0.

use std::sync::Arc;

use super::*;
use crate::contract::HiddenDtype;
use crate::device::Cpu;
use crate::optimizer::{AdamW, AdamWSpec};
use crate::rope::Rope;
use crate::row::{HiddenRow, HiddenStates, PackedRow, Sample};

const DRAFT_IDS: [u32; 10] = [0, 1, 3, 4, 7, 9, 12, 15, 18, 22];

fn fill(n: usize, seed: f64, scale: f64, base: f64) -> Vec<f32> {
    (0..n)
        .map(|j| (base + scale * (1.7 * j as f64 + seed).sin()) as f32)
        .collect()
}

fn spec() -> DraftSpec {
    DraftSpec {
        layer: LayerKind::Llama,
        hidden_size: 8,
        intermediate_size: 16,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        vocab_size: 24,
        draft_vocab_size: 10,
        aux_layers: 3,
        rms_norm_eps: 1e-6,
        rope: Rope::new(10000.0, 4),
        sliding_window: None,
        norm_before_residual: false,
        norm_before_fc: false,
        fc_norm: false,
        norm_output: false,
    }
}

fn frozen() -> FrozenWeights {
    let rows = fill(24 * 8, 207.0, 0.5, 0.0);
    let head: Vec<f32> = DRAFT_IDS
        .iter()
        .flat_map(|&id| rows[id as usize * 8..][..8].to_vec())
        .collect();
    FrozenWeights {
        embed: fill(24 * 8, 1.0, 0.5, 0.0).into(),
        verifier_head: head.into(),
        verifier_norm: fill(8, 15.0, 0.1, 1.0).into(),
        verifier_norm_eps: 1e-6,
        lm_head: fill(10 * 8, 14.0, 0.5, 0.0).into(),
    }
}

fn draft(spec: DraftSpec, threads: usize) -> Draft<Cpu> {
    let training = TrainingSpec {
        ttt_steps: 3,
        step_loss_decay: 1.0,
    };
    Draft::new(
        spec,
        training,
        frozen(),
        Arc::new(Cpu::new(threads).expect("threads")),
    )
    .expect("a draft")
}

fn parameters(layout: &ParameterLayout) -> Vec<f32> {
    let seeds = [
        ("fc.weight", 2.0),
        ("layers.0.self_attn.q_proj.weight", 3.0),
        ("layers.0.self_attn.k_proj.weight", 4.0),
        ("layers.0.self_attn.v_proj.weight", 5.0),
        ("layers.0.self_attn.o_proj.weight", 6.0),
        ("layers.0.mlp.gate_proj.weight", 7.0),
        ("layers.0.mlp.up_proj.weight", 8.0),
        ("layers.0.mlp.down_proj.weight", 9.0),
        ("layers.0.input_layernorm.weight", 10.0),
        ("layers.0.hidden_norm.weight", 11.0),
        ("layers.0.post_attention_layernorm.weight", 12.0),
        ("norm.weight", 13.0),
        ("input_norm.weight", 17.0),
    ];
    let mut parameters = vec![f32::NAN; layout.len()];
    for slot in layout.tensors() {
        let (_, seed) = seeds
            .iter()
            .find(|(name, _)| *name == slot.name)
            .expect("a known tensor");
        let (scale, base) = if slot.shape.len() == 1 {
            (0.1, 1.0)
        } else {
            (0.3, 0.0)
        };
        parameters[slot.range.clone()].copy_from_slice(&fill(slot.range.len(), *seed, scale, base));
    }
    parameters
}

/// The table's row of 12 tokens; `second_document` cuts the *shifted* row in two without dropping a position.
fn batch(second_document: Option<usize>) -> DraftBatch {
    let tokens: Vec<u32> = (0..12).map(|i| (5 * i + 3) % 24).collect();
    let loss_mask = vec![0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1];
    let mut row = PackedRow::default();
    row.push(&Sample { tokens, loss_mask });
    let mut hidden = HiddenStates::zeros(HiddenDtype::F32, 12, 4, 8);
    for i in 0..12 {
        let g: Vec<f32> = (0..24)
            .map(|j| (0.3 * i as f64 + 0.7 * j as f64).sin() as f32)
            .collect();
        let y: Vec<f32> = (0..8)
            .map(|j| (0.2 * i as f64 + 0.5 * j as f64).cos() as f32)
            .collect();
        for state in 0..3 {
            hidden.set(i, state, &g[state * 8..][..8]);
        }
        hidden.set(i, 3, &y);
    }
    let mut batch = DraftBatch::from_row(&HiddenRow {
        row,
        hidden: hidden.share(),
    })
    .expect("a row");
    if let Some(start) = second_document {
        batch.documents = vec![0..start, start..batch.len()];
        for (id, position) in batch.position_ids[start..].iter_mut().enumerate() {
            *position = id as u32 + 1;
        }
    }
    batch
}

struct Expected {
    total: f64,
    steps: [f64; 3],
    hits: [f64; 3],
    chains: [f64; 3],
    gradient_norm: f64,
    loss_after_update: f64,
}

fn check(spec: DraftSpec, batch: &DraftBatch, expected: &Expected) {
    let mut draft = draft(spec, 1);
    let mut parameters = parameters(draft.layout());
    let mut gradient = vec![f32::NAN; parameters.len()];
    let metrics = draft
        .gradient(&parameters, batch, &mut gradient)
        .expect("a gradient");
    // The table has six digits.
    let close = |ours: f64, theirs: f64| {
        assert!(
            (ours - theirs).abs() < 1.5e-6 * theirs.max(1.0),
            "{ours} for {theirs}"
        )
    };
    close(metrics.loss, expected.total);
    for (k, step) in metrics.steps.iter().enumerate() {
        close(step.loss, expected.steps[k]);
        assert_eq!(step.full_correct, expected.hits[k], "hits of step {k}");
        assert_eq!(step.cond_total, expected.chains[k], "chains of step {k}");
    }
    let device = Cpu::new(1).expect("a thread");
    let mut optimizer = AdamW::new(AdamWSpec::default(), &device, parameters.len());
    let report = optimizer
        .update(&device, &mut parameters, &gradient, 1e-3)
        .expect("lengths fit");
    close(report.gradient_norm, expected.gradient_norm);
    close(
        draft.loss(&parameters, batch).expect("a loss").loss,
        expected.loss_after_update,
    );
}

/// bf16 products, by the AMX unit or its double in software.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn products_in_bf16_lead_to_nearly_the_same_loss_and_gradient() {
    let run = |device: Cpu| {
        let training = TrainingSpec {
            ttt_steps: 3,
            step_loss_decay: 1.0,
        };
        let mut draft = Draft::new(spec(), training, frozen(), Arc::new(device)).expect("a draft");
        let parameters = parameters(draft.layout());
        let mut gradient = vec![f32::NAN; parameters.len()];
        let metrics = draft
            .gradient(&parameters, &batch(None), &mut gradient)
            .expect("a gradient");
        (metrics.loss, gradient)
    };
    let (exact_loss, exact) = run(Cpu::new(1).expect("a thread"));
    let (loss, gradient) = run(Cpu::with_amx(1));
    assert!(
        (loss - exact_loss).abs() < 0.02 * exact_loss,
        "{loss} for {exact_loss}"
    );
    let dot =
        |x: &[f32], y: &[f32]| -> f64 { x.iter().zip(y).map(|(&x, &y)| f64::from(x) * f64::from(y)).sum() };
    let cosine = dot(&gradient, &exact) / (dot(&gradient, &gradient) * dot(&exact, &exact)).sqrt();
    assert!(cosine > 0.999 && gradient != exact, "cosine {cosine}");
    assert!(
        run(Cpu::with_amx(3)) == (loss, gradient),
        "the number of threads changes no bit"
    );
}

/// OPERANDS, with the AMX unit or its double in software.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn weights_are_prepared_again_when_they_change_and_not_before() {
    let new = || {
        let training = TrainingSpec {
            ttt_steps: 3,
            step_loss_decay: 1.0,
        };
        Draft::new(spec(), training, frozen(), Arc::new(Cpu::with_amx(1))).expect("a draft")
    };
    let gradient = |draft: &mut Draft<Cpu>, parameters: &[f32]| {
        let mut gradient = vec![f32::NAN; parameters.len()];
        draft
            .gradient(parameters, &batch(None), &mut gradient)
            .expect("a gradient");
        gradient
    };
    let mut draft = new();
    let first = parameters(draft.layout());
    let second: Vec<f32> = first.iter().map(|x| 0.75 * x).collect();
    // Nobody says when they change.
    let mut untold = new();
    let [of_first, of_second] = [&first, &second].map(|parameters| gradient(&mut new(), parameters));
    assert!(of_first != of_second && gradient(&mut untold, &first) == of_first);
    assert!(gradient(&mut untold, &second) == of_second);
    // Somebody does.
    draft.parameters_changed();
    for _ in 0..2 {
        assert!(gradient(&mut draft, &first) == of_first);
    }
    assert!(
        gradient(&mut draft, &second) != of_second,
        "they are prepared once"
    );
    draft.parameters_changed();
    assert!(gradient(&mut draft, &second) == of_second);
}

#[test]
fn case_a_of_the_table() {
    let spec = DraftSpec {
        norm_before_residual: true,
        ..spec()
    };
    let expected = Expected {
        total: 0.424574,
        steps: [0.132740, 0.127756, 0.164078],
        hits: [2.0, 1.0, 0.0],
        chains: [8.0, 1.0, 0.0],
        gradient_norm: 18.229110,
        loss_after_update: 0.374866,
    };
    check(spec, &batch(None), &expected);
}

#[test]
fn case_b_of_the_table() {
    let expected = Expected {
        total: 0.503739,
        steps: [0.161633, 0.168375, 0.173730],
        hits: [3.0, 1.0, 0.0],
        chains: [8.0, 2.0, 0.0],
        gradient_norm: 4.055754,
        loss_after_update: 0.481608,
    };
    check(spec(), &batch(None), &expected);
}

#[test]
fn case_c_of_the_table() {
    let spec = DraftSpec {
        norm_before_residual: true,
        norm_before_fc: true,
        norm_output: true,
        ..spec()
    };
    let expected = Expected {
        total: 0.444712,
        steps: [0.133519, 0.134896, 0.176296],
        hits: [2.0, 1.0, 0.0],
        chains: [8.0, 1.0, 0.0],
        gradient_norm: 17.914237,
        loss_after_update: 0.366065,
    };
    check(spec, &batch(None), &expected);
}

#[test]
fn case_d_of_the_table() {
    let spec = DraftSpec {
        norm_before_residual: true,
        ..spec()
    };
    let expected = Expected {
        total: 0.408542,
        steps: [0.121919, 0.128777, 0.157845],
        hits: [2.0, 0.0, 0.0],
        chains: [8.0, 1.0, 0.0],
        gradient_norm: 11.922595,
        loss_after_update: 0.351597,
    };
    check(spec, &batch(Some(6)), &expected);
}

#[test]
fn gradient_norms_and_choices_of_case_b() {
    let mut draft = draft(spec(), 2);
    let layout = draft.layout().clone();
    let parameters = parameters(&layout);
    let mut gradient = vec![0.0; parameters.len()];
    draft
        .gradient(&parameters, &batch(None), &mut gradient)
        .expect("a gradient");
    let expected = [
        ("fc.weight", 3.711910),
        ("layers.0.self_attn.q_proj.weight", 0.231644),
        ("layers.0.self_attn.k_proj.weight", 0.156135),
        ("layers.0.self_attn.v_proj.weight", 0.291208),
        ("layers.0.self_attn.o_proj.weight", 1.454666),
        ("layers.0.mlp.gate_proj.weight", 0.171497),
        ("layers.0.mlp.up_proj.weight", 0.145235),
        ("layers.0.mlp.down_proj.weight", 0.043994),
        ("layers.0.input_layernorm.weight", 0.077370),
        ("layers.0.post_attention_layernorm.weight", 0.012834),
        ("layers.0.hidden_norm.weight", 0.097870),
        ("norm.weight", 0.569037),
    ];
    assert_eq!(expected.len(), layout.tensors().len());
    for (name, theirs) in expected {
        let slot = layout.get(name).expect("a tensor");
        let ours = gradient[slot.range.clone()]
            .iter()
            .map(|&g| f64::from(g).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!((ours - theirs).abs() < 2e-6, "{name}: {ours} for {theirs}");
    }
    let trace = draft.trace(&parameters, &batch(None)).expect("a trace");
    let choices: Vec<&[u32]> = trace.steps.iter().map(|step| step.draft_ids.as_slice()).collect();
    let expected: [&[u32]; 3] = [
        &[5, 5, 5, 9, 2, 2, 0, 5, 5, 2, 2],
        &[5, 5, 5, 2, 2, 8, 5, 5, 4, 2, 2],
        &[5, 5, 9, 2, 2, 5, 5, 5, 2, 2, 4],
    ];
    assert_eq!(choices, expected);
}

/// Central differences of the loss in a few directions: covers the switches that no reference case has.
fn directional_derivatives(spec: DraftSpec) {
    let mut draft = draft(spec, 1);
    let layout = draft.layout().clone();
    let mut parameters = init_parameters(&layout, 5);
    // Move norms off 1, so that a forgotten factor shows.
    for (i, parameter) in parameters.iter_mut().enumerate() {
        *parameter += 0.1 * (0.9 * i as f32).sin();
    }
    let mut gradient = vec![0.0; parameters.len()];
    let row = batch(Some(5));
    draft
        .gradient(&parameters, &row, &mut gradient)
        .expect("a gradient");
    for slot in layout.tensors() {
        // Along the tensor's own gradient the change is largest against rounding.
        let part = &gradient[slot.range.clone()];
        let norm = part.iter().map(|&g| f64::from(g).powi(2)).sum::<f64>().sqrt();
        assert!(norm > 1e-6, "{} gets no gradient", slot.name);
        let mut at = |step: f64| {
            let mut moved = parameters.clone();
            for (parameter, &g) in moved[slot.range.clone()].iter_mut().zip(part) {
                *parameter += (step * f64::from(g) / norm) as f32;
            }
            draft.loss(&moved, &row).expect("a loss").loss
        };
        let step = 4e-3;
        let slope = (8.0 * (at(step) - at(-step)) - (at(2.0 * step) - at(-2.0 * step))) / (12.0 * step);
        assert!(
            (slope - norm).abs() < 2e-3 * norm + 2e-4,
            "{}: slope {slope}, gradient {norm}",
            slot.name
        );
    }
}

#[test]
fn gradients_of_every_switch_are_slopes_of_the_loss() {
    directional_derivatives(DraftSpec {
        fc_norm: true,
        ..spec()
    });
    directional_derivatives(DraftSpec {
        layer: LayerKind::Qwen3,
        norm_output: true,
        ..spec()
    });
    let window = Some(2);
    directional_derivatives(DraftSpec {
        norm_before_fc: true,
        norm_before_residual: true,
        sliding_window: window,
        ..spec()
    });
}

/// What is called final is not written again, and all parameters are called final once.
#[test]
fn each_parameter_becomes_final_once() {
    for layer in [LayerKind::Llama, LayerKind::Qwen3] {
        for (norm_before_fc, fc_norm) in [(false, false), (true, false), (false, true)] {
            let mut draft = draft(
                DraftSpec {
                    layer,
                    norm_before_fc,
                    fc_norm,
                    ..spec()
                },
                1,
            );
            let parameters = init_parameters(draft.layout(), 3);
            let mut gradient = vec![f32::NAN; parameters.len()];
            let mut times = vec![0; parameters.len()];
            let mut told = Vec::new();
            draft
                .gradient_with(&parameters, &batch(None), &mut gradient, |range, gradient| {
                    times[range.clone()].iter_mut().for_each(|times| *times += 1);
                    told.push((range.clone(), gradient.part(range).host().to_vec()));
                })
                .expect("a gradient");
            assert!(times.iter().all(|&times| times == 1), "{layer:?}");
            for (range, values) in &told {
                assert_eq!(values[..], gradient[range.clone()], "{layer:?}, {range:?}");
            }
            assert!(told.len() > 10, "not all at the end");
            let order: Vec<_> = told.into_iter().map(|(range, _)| range).collect();
            assert_eq!(order, draft.layout().final_order(), "{layer:?}");
        }
    }
}

#[test]
fn unmasked_rows_have_no_loss_and_no_gradient() {
    let mut row = batch(None);
    row.loss_mask.fill(0);
    let mut draft = draft(spec(), 1);
    let parameters = parameters(draft.layout());
    let mut gradient = vec![1.0; parameters.len()];
    let metrics = draft
        .gradient(&parameters, &row, &mut gradient)
        .expect("a gradient");
    assert_eq!(
        (metrics.loss, metrics.masked_tokens, metrics.steps.len()),
        (0.0, 0, 3)
    );
    assert!(gradient.iter().all(|&g| g == 0.0));
    assert_eq!(
        draft.evaluate(&parameters, &row, &DRAFT_IDS).expect("sums"),
        Acceptance::new(3)
    );
    let empty = DraftBatch::default();
    assert_eq!(
        draft
            .gradient(&parameters, &empty, &mut gradient)
            .expect("a gradient")
            .loss,
        0.0
    );
    assert_eq!(draft.loss(&parameters, &empty).expect("a loss").loss, 0.0);
}

#[test]
fn acceptance_follows_the_traced_choices() {
    let mut draft = draft(spec(), 1);
    let parameters = parameters(draft.layout());
    let mut row = batch(None);
    // Case B, step 0, position 3 chooses draft id 9, which is token 22; make it the text's next token.
    let trace = draft.trace(&parameters, &row).expect("a trace");
    assert_eq!(trace.steps[0].draft_ids[3], 9);
    row.tokens[4] = 22;
    row.loss_mask = vec![0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0];
    let acceptance = draft.evaluate(&parameters, &row, &DRAFT_IDS).expect("sums");
    let expected = Acceptance {
        verifications: 1,
        accepted: 1,
        accepted_at: vec![1, 0, 0],
        tried_at: vec![1, 0, 0],
    };
    assert_eq!(acceptance, expected);
    row.tokens[4] = 21;
    let acceptance = draft.evaluate(&parameters, &row, &DRAFT_IDS).expect("sums");
    assert_eq!((acceptance.verifications, acceptance.accepted), (1, 0));
}

#[test]
fn wrong_sizes_are_errors_with_a_place() {
    let device = Arc::new(Cpu::new(1).expect("a thread"));
    let training = TrainingSpec {
        ttt_steps: 3,
        step_loss_decay: 1.0,
    };
    let build = |spec, training, frozen| {
        Draft::new(spec, training, frozen, Arc::clone(&device))
            .map(|_| ())
            .expect_err("must not fit")
            .to_string()
    };
    let short = FrozenWeights {
        embed: vec![0.0; 8].into(),
        ..frozen()
    };
    assert!(build(spec(), training, short).contains("`embed_tokens.weight` has 8 elements"));
    assert!(
        build(
            DraftSpec {
                kv_heads: 3,
                ..spec()
            },
            training,
            frozen()
        )
        .contains("2 query heads")
    );
    assert!(
        build(
            spec(),
            TrainingSpec {
                ttt_steps: 0,
                ..training
            },
            frozen()
        )
        .contains("ttt_steps is 0")
    );
    let mut draft = draft(spec(), 1);
    let parameters = parameters(draft.layout());
    let mut gradient = vec![0.0; parameters.len()];
    let mut row = batch(None);
    row.tokens[2] = 24;
    let error = draft
        .gradient(&parameters, &row, &mut gradient)
        .expect_err("token out of range");
    assert_eq!(
        error.to_string(),
        "row of hidden states: token 24 is outside the vocabulary of 24"
    );
    assert!(
        draft
            .gradient(&parameters[1..], &batch(None), &mut gradient)
            .is_err()
    );
    assert!(
        draft
            .evaluate(&parameters, &batch(None), &DRAFT_IDS[1..])
            .is_err()
    );
}

#[test]
fn fresh_parameters_depend_on_seed_and_name_alone() {
    let layout = ParameterLayout::new(&spec()).expect("a layout");
    let other = ParameterLayout::new(&DraftSpec {
        norm_before_fc: true,
        layer: LayerKind::Qwen3,
        ..spec()
    })
    .expect("a layout");
    let (a, b) = (init_parameters(&layout, 1), init_parameters(&other, 1));
    for slot in layout.tensors() {
        let there = other.get(&slot.name).expect("the same tensor");
        assert_eq!(a[slot.range.clone()], b[there.range.clone()], "{}", slot.name);
        match slot.shape.as_slice() {
            &[outputs, inputs] => {
                let (part, bound) = (&a[slot.range.clone()], 1.0 / (inputs as f32).sqrt());
                assert!(part.iter().all(|x| x.abs() <= bound), "{}", slot.name);
                let spread = part.iter().map(|x| x * x).sum::<f32>() / (outputs * inputs) as f32;
                assert!(
                    (spread / (bound * bound / 3.0) - 1.0).abs() < 0.35,
                    "{}: {spread}",
                    slot.name
                );
            }
            _ => assert!(a[slot.range.clone()].iter().all(|&x| x == 1.0), "{}", slot.name),
        }
    }
    assert_ne!(a, init_parameters(&layout, 2));
}

/// A row long enough for several blocks of attention, of products and of logits.
fn long_row() -> (DraftSpec, FrozenWeights, DraftBatch) {
    let (h, v, positions) = (32, 700, 400);
    let spec = DraftSpec {
        hidden_size: h,
        intermediate_size: 96,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab_size: v,
        draft_vocab_size: v,
        rope: Rope::new(10000.0, 16),
        sliding_window: Some(100),
        norm_before_fc: true,
        ..spec()
    };
    let head: Arc<[f32]> = fill(v * h, 1.0, 0.4, 0.0).into();
    let frozen = FrozenWeights {
        embed: fill(v * h, 2.0, 0.5, 0.0).into(),
        verifier_head: Arc::clone(&head),
        verifier_norm: fill(h, 3.0, 0.1, 1.0).into(),
        verifier_norm_eps: 1e-5,
        lm_head: head,
    };
    let documents = vec![0..170, 170..positions];
    let batch = DraftBatch {
        sent: None,
        tokens: (0..positions as u32).map(|i| i * 37 % v as u32).collect(),
        hidden: fill(positions * 3 * h, 4.0, 1.0, 0.0),
        last_hidden: fill(positions * h, 5.0, 1.0, 0.0),
        loss_mask: (0..positions).map(|i| u8::from(i % 200 > 60)).collect(),
        position_ids: documents.iter().flat_map(|d| 1..=d.len() as u32).collect(),
        documents,
    };
    (spec, frozen, batch)
}

#[test]
fn a_long_row_has_the_loss_of_its_logits_and_the_same_bits_on_any_number_of_threads() {
    let (spec, frozen, batch) = long_row();
    let training = TrainingSpec {
        ttt_steps: 3,
        step_loss_decay: 0.8,
    };
    let mut results = Vec::new();
    for threads in [1, 2, 5] {
        let device = Arc::new(Cpu::new(threads).expect("threads"));
        let mut draft = Draft::new(spec.clone(), training, frozen.clone(), device).expect("a draft");
        let parameters = init_parameters(draft.layout(), 3);
        let mut gradient = vec![f32::NAN; parameters.len()];
        let metrics = draft
            .gradient(&parameters, &batch, &mut gradient)
            .expect("a gradient");
        let ids: Vec<u32> = (0..spec.vocab_size as u32).collect();
        let acceptance = draft.evaluate(&parameters, &batch, &ids).expect("sums");
        if threads == 1 {
            let trace = draft.trace(&parameters, &batch).expect("a trace");
            let softmax = |logits: &[f32]| -> Vec<f64> {
                let exps: Vec<f64> = logits.iter().map(|&x| f64::from(x).exp()).collect();
                let sum: f64 = exps.iter().sum();
                exps.into_iter().map(|e| e / sum).collect()
            };
            let v = spec.draft_vocab_size;
            for (k, (step, ours)) in trace.steps.iter().zip(&metrics.steps).enumerate() {
                let masked: Vec<usize> = (k..batch.len())
                    .filter(|&target| batch.loss_mask[target] != 0)
                    .collect();
                let kl = masked.iter().map(|&target| {
                    let p = softmax(&trace.targets[target * v..][..v]);
                    let q = softmax(&step.logits[(target - k) * v..][..v]);
                    p.iter().zip(q).map(|(p, q)| p * (p / q).ln()).sum::<f64>()
                });
                let expected = kl.sum::<f64>() / (masked.len() as f64 + 1e-5);
                assert!(
                    (ours.loss - expected).abs() < 1e-5 * expected,
                    "step {k}: {} for {expected}",
                    ours.loss
                );
                assert_eq!(ours.full_total, masked.len() as f64);
            }
        }
        results.push((metrics, gradient, acceptance));
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    assert!(results[0].2.verifications > 100);
}
