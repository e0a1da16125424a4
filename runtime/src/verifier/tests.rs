use half::bf16;
use safetensors::Dtype;
use serde_json::json;

use super::tiny::{HIDDEN, LAYERS, Tiny, VOCAB};
use super::*;
use crate::contract::HiddenDtype;
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::device::Cpu;
use crate::row::{HiddenStates, PackedRow, Sample};

fn load(tiny: &Tiny) -> Verifier {
    load_with(tiny, VerifierOptions::default())
}

fn load_with(tiny: &Tiny, options: VerifierOptions) -> Verifier {
    // The files stay mapped after the folder is gone.
    Verifier::load(tiny.folder().path(), options).unwrap()
}

/// A document of `length` tokens.
pub(super) fn document(seed: u32, length: u32) -> Vec<u32> {
    (0..length)
        .map(|i| (seed * 17 + i * i * 7 + i * 3) % VOCAB as u32)
        .collect()
}

pub(super) fn pack(documents: &[Vec<u32>]) -> PackedRow {
    let mut row = PackedRow::default();
    for tokens in documents {
        row.push(&Sample {
            tokens: tokens.clone(),
            loss_mask: vec![1; tokens.len()],
        });
    }
    row
}

fn message(error: &VerifierError) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "more than one line: {message}");
    message
}

/// The last logits' arg-max of a full forward pass.
fn most_likely(verifier: &mut Verifier, tokens: &[u32]) -> u32 {
    let (_, logits) = verifier.logits(&pack(&[tokens.to_vec()]), &mut Alone).unwrap();
    let last = &logits[logits.len() - VOCAB..];
    (0..VOCAB)
        .rev()
        .max_by(|&a, &b| last[a].total_cmp(&last[b]))
        .unwrap() as u32
}

#[test]
fn a_packed_row_equals_its_documents_alone() {
    for tiny in [Tiny::llama(), Tiny::mistral(5)] {
        let mut verifier = load(&tiny);
        // Lengths around the blocks of the attention, and documents of one token.
        let documents = [
            document(1, 1),
            document(2, 70),
            document(3, 64),
            document(4, 1),
            document(5, 33),
        ];
        let packed = verifier
            .extract(&pack(&documents), HiddenDtype::F32, &mut Alone)
            .unwrap();
        assert_eq!(packed.states, 4);
        let mut alone = Vec::new();
        for tokens in &documents {
            alone.extend(
                verifier
                    .extract(&pack(std::slice::from_ref(tokens)), HiddenDtype::F32, &mut Alone)
                    .unwrap()
                    .bytes,
            );
        }
        assert!(packed.bytes == alone, "the same bits");
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let row = pack(&[document(1, 90), document(2, 40)]);
    let run = |threads| {
        let mut verifier = load_with(
            &Tiny::llama(),
            VerifierOptions {
                threads,
                aux_layers: None,
                ..VerifierOptions::default()
            },
        );
        let hidden = verifier.extract(&row, HiddenDtype::F32, &mut Alone).unwrap();
        let again = verifier.extract(&row, HiddenDtype::F32, &mut Alone).unwrap();
        assert!(hidden == again, "the same row gives the same bits");
        (hidden, verifier.logits(&row, &mut Alone).unwrap())
    };
    let one = run(1);
    for threads in [2, 3] {
        assert!(one == run(threads), "{threads} threads");
    }
}

#[test]
fn answers_equal_repeated_full_passes() {
    for tiny in [Tiny::llama(), Tiny::mistral(4)] {
        let mut verifier = load(&tiny);
        let prompts = [document(1, 9), document(2, 1), document(3, 30), document(4, 2)];
        let answers = verifier.generate(&prompts, 12, &[], &mut Alone).unwrap();
        for (prompt, answer) in prompts.iter().zip(&answers) {
            assert_eq!(answer.len(), 12);
            let mut tokens = prompt.clone();
            for &token in answer {
                assert_eq!(
                    token,
                    most_likely(&mut verifier, &tokens),
                    "after {} tokens",
                    tokens.len()
                );
                tokens.push(token);
            }
            let alone = verifier
                .generate(std::slice::from_ref(prompt), 12, &[], &mut Alone)
                .unwrap();
            assert_eq!(alone[0], *answer, "alone and in a batch");
        }
        assert!(
            answers.windows(2).any(|pair| pair[0] != pair[1]),
            "the prompts matter"
        );
    }
}

#[test]
fn a_stop_id_ends_one_answer_and_not_the_others() {
    let mut verifier = load(&Tiny::llama());
    let prompts = [document(1, 9), document(2, 5), document(3, 7)];
    let free = verifier.generate(&prompts, 16, &[], &mut Alone).unwrap();
    // A token that one answer has and another lacks.
    let stop = *free[1]
        .iter()
        .find(|token| !free[0].contains(token))
        .expect("the answers differ");
    let stopped = verifier.generate(&prompts, 16, &[stop], &mut Alone).unwrap();
    for (free, stopped) in free.iter().zip(&stopped) {
        let expected = free
            .iter()
            .position(|&token| token == stop)
            .map_or(free.len(), |at| at + 1);
        assert_eq!(stopped[..], free[..expected]);
    }
    assert_eq!(stopped[0].len(), 16);
    assert!(stopped[1].len() < 16);
    assert_eq!(
        verifier.generate(&prompts, 0, &[], &mut Alone).unwrap(),
        vec![Vec::<u32>::new(); 3]
    );
    assert!(verifier.generate(&[], 4, &[], &mut Alone).unwrap().is_empty());
}

#[test]
fn long_prompts_are_fed_in_groups() {
    let mut verifier = load(&Tiny::mistral(16));
    let prompts = [
        document(1, 1500),
        document(2, 1000),
        document(3, 2500),
        document(4, 3),
    ];
    let together = verifier.generate(&prompts, 3, &[], &mut Alone).unwrap();
    for (prompt, answer) in prompts.iter().zip(&together) {
        assert_eq!(
            verifier
                .generate(std::slice::from_ref(prompt), 3, &[], &mut Alone)
                .unwrap()[0],
            *answer
        );
    }
}

#[test]
fn stored_dtypes_give_the_same_bits() {
    let row = pack(&[document(1, 30), document(2, 12)]);
    let run = |dtype| {
        let mut tiny = Tiny::llama();
        tiny.dtype = dtype;
        load(&tiny).logits(&row, &mut Alone).unwrap()
    };
    // The tiny weights are exact in all three.
    let wide = run(Dtype::F32);
    assert!(wide == run(Dtype::BF16), "bf16");
    assert!(wide == run(Dtype::F16), "f16");
}

#[test]
fn shards_give_the_same_verifier() {
    let tiny = Tiny::llama();
    let folder = tempfile::tempdir().unwrap();
    tiny.write(folder.path(), 3);
    let mut sharded = Verifier::load(folder.path(), VerifierOptions::default()).unwrap();
    let mut single = load(&tiny);
    let row = pack(&[document(1, 20)]);
    assert_eq!(sharded.digest(), single.digest());
    assert!(sharded.logits(&row, &mut Alone).unwrap() == single.logits(&row, &mut Alone).unwrap());
}

#[test]
fn captured_states_are_the_inputs_of_the_aux_layers_and_the_last_output() {
    let options = VerifierOptions {
        threads: 1,
        aux_layers: Some(vec![1, 4, 7]),
        ..VerifierOptions::default()
    };
    let mut verifier = load_with(&Tiny::llama(), options);
    let row = pack(&[document(1, 20), document(2, 3)]);
    let residuals = verifier.residuals(&row, &mut Alone).unwrap();
    assert_eq!(residuals.len(), LAYERS + 1);
    let embedding = verifier.embedding().unwrap();
    assert_eq!(
        residuals[0][..HIDDEN],
        embedding[row.tokens[0] as usize * HIDDEN..][..HIDDEN]
    );
    let expected = |dtype| {
        let mut expected = HiddenStates::zeros(dtype, row.len(), 4, HIDDEN);
        for (state, layer) in [1, 4, 7, 7].into_iter().enumerate() {
            for (token, values) in residuals[layer].chunks(HIDDEN).enumerate() {
                expected.set(token, state, values);
            }
        }
        expected.share()
    };
    for dtype in [HiddenDtype::F32, HiddenDtype::Bf16] {
        assert!(
            verifier.extract(&row, dtype, &mut Alone).unwrap() == expected(dtype),
            "{dtype:?}"
        );
    }
}

#[test]
fn a_window_hides_older_tokens() {
    let mut verifier = load(&Tiny::mistral(4));
    let tokens = document(1, 20);
    let mut changed = tokens.clone();
    changed[5] = (changed[5] + 1) % VOCAB as u32;
    let before = verifier.residuals(&pack(&[tokens]), &mut Alone).unwrap();
    let after = verifier.residuals(&pack(&[changed]), &mut Alone).unwrap();
    // One layer carries a token three further, its own place included.
    let differing: Vec<usize> = (0..20)
        .filter(|token| before[1][token * HIDDEN..][..HIDDEN] != after[1][token * HIDDEN..][..HIDDEN])
        .collect();
    assert_eq!(differing, [5, 6, 7, 8]);
}

#[test]
fn states_that_are_not_finite_name_document_and_layer() {
    let row = pack(&[vec![1, 2, 3], vec![4, 5], vec![6]]);
    let mut tiny = Tiny::llama();
    tiny.values("model.embed_tokens.weight")[5 * HIDDEN + 3] = f32::NAN;
    let mut verifier = load(&tiny);
    let error = verifier.extract(&row, HiddenDtype::Bf16, &mut Alone).unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::NonFinite {
                document: 1,
                layer: 0
            }
        ),
        "{}",
        message(&error)
    );
    let error = verifier
        .generate(&[vec![1], vec![5]], 2, &[], &mut Alone)
        .unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::NonFinite {
                document: 1,
                layer: 0
            }
        ),
        "{error}"
    );
    // The verifier is as good as before.
    verifier
        .extract(&pack(&[vec![1, 2, 3]]), HiddenDtype::Bf16, &mut Alone)
        .unwrap();

    let mut tiny = Tiny::llama();
    tiny.values("model.layers.3.mlp.down_proj.weight")
        .fill(f32::INFINITY);
    let error = load(&tiny)
        .extract(&row, HiddenDtype::F32, &mut Alone)
        .unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::NonFinite {
                document: 0,
                layer: 4
            }
        ),
        "{error}"
    );

    // Finite in f32, but infinite once rounded to bf16.
    let mut tiny = Tiny::llama();
    tiny.values("model.embed_tokens.weight")[6 * HIDDEN] = 3.4e38;
    let mut verifier = load(&tiny);
    let error = verifier.extract(&row, HiddenDtype::Bf16, &mut Alone).unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::NonFinite {
                document: 2,
                layer: 0
            }
        ),
        "{error}"
    );
    assert!(bf16::from_f32(3.4e38).is_infinite());
}

#[test]
fn unusable_rows_and_prompts_are_errors() {
    let mut verifier = load(&Tiny::llama());
    let error = verifier
        .extract(&pack(&[vec![1], vec![2, 61]]), HiddenDtype::F32, &mut Alone)
        .unwrap_err();
    assert!(matches!(
        error,
        VerifierError::Token {
            document: 1,
            position: 1,
            token: 61,
            vocab_size: VOCAB
        }
    ));
    let error = message(&error);
    assert!(error.contains("token 1 of document 1 is 61"), "{error}");
    let error = verifier
        .generate(&[vec![1], vec![99]], 1, &[], &mut Alone)
        .unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::Token {
                document: 1,
                position: 0,
                token: 99,
                ..
            }
        ),
        "{error}"
    );
    let error = verifier
        .generate(&[vec![1], vec![]], 1, &[], &mut Alone)
        .unwrap_err();
    assert!(
        matches!(error, VerifierError::EmptyPrompt { prompt: 1 }),
        "{error}"
    );

    let mut row = pack(&[vec![1, 2]]);
    row.document_lengths = vec![3];
    let error = verifier.extract(&row, HiddenDtype::F32, &mut Alone).unwrap_err();
    assert!(
        matches!(
            error,
            VerifierError::Row {
                tokens: 2,
                masked: 2,
                documents: 3
            }
        ),
        "{error}"
    );

    let empty = verifier
        .extract(&PackedRow::default(), HiddenDtype::F32, &mut Alone)
        .unwrap();
    assert_eq!((empty.tokens(), empty.states), (0, 4));
}

#[test]
fn aux_layers_are_checked() {
    let tiny = Tiny::llama();
    assert_eq!(load(&tiny).aux_layers(), [2, 3, 4]);
    for ids in [vec![], vec![0, 2], vec![2, 8], vec![3, 3], vec![4, 2]] {
        let options = VerifierOptions {
            threads: 1,
            aux_layers: Some(ids.clone()),
            ..VerifierOptions::default()
        };
        let Err(error) = Verifier::load(tiny.folder().path(), options) else {
            panic!("{ids:?}")
        };
        assert!(
            matches!(error, VerifierError::AuxLayers { .. }),
            "{}",
            message(&error)
        );
    }
    // Below 7 layers the default is no choice.
    let mut tiny = Tiny::llama();
    tiny.config["num_hidden_layers"] = json!(6);
    let Err(error) = Verifier::load(tiny.folder().path(), VerifierOptions::default()) else {
        panic!()
    };
    assert!(
        matches!(error, VerifierError::AuxLayers { .. }),
        "{}",
        message(&error)
    );
}

#[test]
fn all_problems_of_the_weights_are_reported_at_once() {
    let mut tiny = Tiny::llama();
    tiny.tensors.remove("model.layers.2.mlp.up_proj.weight");
    tiny.tensors.remove("lm_head.weight");
    tiny.add("model.layers.1.self_attn.q_proj.weight", &[7, HIDDEN]);
    tiny.add("model.layers.0.self_attn.q_proj.bias", &[32]);
    tiny.add("model.layers.0.self_attn.rotary_emb.inv_freq", &[4]);
    tiny.add("model.layers.7.input_layernorm.weight", &[HIDDEN]);
    let Err(error) = Verifier::load(tiny.folder().path(), VerifierOptions::default()) else {
        panic!()
    };
    let text = message(&error);
    let VerifierError::Unusable { problems, .. } = error else {
        panic!("{text}")
    };
    assert_eq!(problems.len(), 4, "{text}");
    for part in [
        "no tensor `lm_head.weight`",
        "no tensor `model.layers.2.mlp.up_proj.weight`",
        "`model.layers.1.self_attn.q_proj.weight`",
        "[7, 24] where [32, 24]",
        "tensor `model.layers.0.self_attn.q_proj.bias`",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn another_vocabulary_or_dtype_is_reported_before_anything_runs() {
    let mut tiny = Tiny::llama();
    tiny.config["vocab_size"] = json!(VOCAB + 3);
    let Err(error) = Verifier::load(tiny.folder().path(), VerifierOptions::default()) else {
        panic!()
    };
    assert!(
        message(&error).contains("[61, 24] where [64, 24] is needed"),
        "{error}"
    );

    let mut tiny = Tiny::llama();
    tiny.dtype = Dtype::F64;
    let Err(error) = Verifier::load(tiny.folder().path(), VerifierOptions::default()) else {
        panic!()
    };
    let text = message(&error);
    let VerifierError::Unusable { problems, .. } = error else {
        panic!("{text}")
    };
    assert_eq!(problems.len(), 3 + 9 * LAYERS);
    assert!(
        text.contains("stored as F64") && text.ends_with("and 58 more"),
        "{text}"
    );
}

#[test]
fn frozen_parts_are_those_of_the_verifier() {
    for tied in [false, true] {
        let mut tiny = Tiny::llama();
        tiny.dtype = Dtype::BF16;
        tiny.config["tie_word_embeddings"] = json!(tied);
        if tied {
            tiny.tensors.remove("lm_head.weight");
        }
        let folder = tiny.folder();
        let verifier = Verifier::load(folder.path(), VerifierOptions::default()).unwrap();
        let ids = [3, 60, 0];
        let parts = FrozenParts::load(folder.path(), &ids).unwrap();
        assert_eq!(parts.config, *verifier.config());
        assert_eq!(parts.final_norm, verifier.final_norm().unwrap());
        assert_eq!(parts.embedding, verifier.embedding().unwrap());
        assert_eq!(parts.head_rows, verifier.head_rows(&ids).unwrap());
        let head = if tied {
            "model.embed_tokens.weight"
        } else {
            "lm_head.weight"
        };
        assert_eq!(
            parts.head_rows[HIDDEN..2 * HIDDEN],
            tiny.values(head)[60 * HIDDEN..61 * HIDDEN]
        );
        let error = FrozenParts::load(folder.path(), &[61]).unwrap_err();
        assert!(message(&error).contains("row 61 does not exist"), "{error}");
    }
}

#[test]
fn frozen_parts_need_no_other_shard() {
    let mut tiny = Tiny::llama();
    let folder = tempfile::tempdir().unwrap();
    let shards = tiny.tensors.len();
    tiny.write(folder.path(), shards);
    let names: Vec<&String> = tiny.tensors.keys().collect();
    for (shard, name) in names.iter().enumerate() {
        if name.contains("layers") {
            std::fs::remove_file(folder.path().join(format!("model-{shard:05}.safetensors"))).unwrap();
        }
    }
    let parts = FrozenParts::load(folder.path(), &[1]).unwrap();
    assert_eq!(parts.embedding, *tiny.values("model.embed_tokens.weight"));
    let error = VerifierFiles::open(folder.path()).unwrap_err();
    assert!(
        message(&error).contains("names shards that are not beside it"),
        "{error}"
    );

    let (head, _) = tiny
        .tensors
        .keys()
        .enumerate()
        .find(|(_, name)| *name == "lm_head.weight")
        .unwrap();
    let head = format!("model-{head:05}.safetensors");
    std::fs::remove_file(folder.path().join(&head)).unwrap();
    let error = FrozenParts::load(folder.path(), &[1]).unwrap_err();
    assert!(message(&error).contains(&head), "{error}");
}

#[test]
fn frozen_parts_need_no_other_tensor() {
    let mut tiny = Tiny::llama();
    tiny.tensors.retain(|name, _| !name.contains("layers"));
    FrozenParts::load(tiny.folder().path(), &[1]).unwrap();
    tiny.tensors.remove("model.norm.weight");
    let error = FrozenParts::load(tiny.folder().path(), &[1]).unwrap_err();
    assert!(
        message(&error).contains("no tensor `model.norm.weight`"),
        "{error}"
    );
}

#[test]
fn the_self_check_passes_and_says_how_close_the_states_are() {
    for dtype in [HiddenDtype::F32, HiddenDtype::Bf16] {
        let found = load(&Tiny::llama()).self_check(dtype, &mut Alone).unwrap();
        assert_eq!((found.tokens, found.logits), (15, 15 * VOCAB));
        assert!(
            found.difference > 0.0 && found.difference < found.tolerance / 2.0,
            "{found:?}"
        );
    }
}

#[test]
fn the_self_check_finds_what_trains_without_complaint() {
    let fails = |change: &dyn Fn(&mut Tiny)| {
        // What a draft reads differs from what the verifier computes with.
        let mut other = Tiny::llama();
        change(&mut other);
        let mut verifier = load(&Tiny::llama());
        verifier.files = VerifierFiles::open(other.folder().path()).unwrap();
        message(&verifier.self_check(HiddenDtype::Bf16, &mut Alone).unwrap_err())
    };
    let forgotten_norm = fails(&|tiny| tiny.values("model.norm.weight").fill(1.0));
    assert!(
        forgotten_norm.contains("differs from the verifier's own logits"),
        "{forgotten_norm}"
    );
    fails(&|tiny| tiny.values("lm_head.weight").rotate_left(HIDDEN));
    fails(&|tiny| {
        tiny.values("model.norm.weight")
            .iter_mut()
            .for_each(|weight| *weight += 1.0)
    });
}

#[test]
fn a_head_that_bends_its_logits_is_refused() {
    let mut tiny = Tiny::llama();
    tiny.config["final_logit_softcapping"] = json!(30.0);
    let error = load(&tiny).self_check(HiddenDtype::F32, &mut Alone).unwrap_err();
    assert!(message(&error).contains("bent below 30"), "{error}");
}

/// bf16 products, by the AMX unit or its double in software.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
#[test]
fn products_in_bf16_change_states_a_little_and_nothing_else() {
    let tiny = Tiny::llama();
    let run = |threads, dtype| {
        let folder = Tiny {
            dtype,
            ..Tiny::llama()
        }
        .folder();
        let device = Cpu::with_amx(threads);
        let mut verifier = Verifier::load_on(device, folder.path(), None, Shard::WHOLE).unwrap();
        let documents = [document(1, 40), document(2, 9)];
        let states = verifier
            .extract(&pack(&documents), HiddenDtype::F32, &mut Alone)
            .unwrap();
        // The second time weights are packed already; and rows do not depend on their neighbours.
        let mut alone = Vec::new();
        for tokens in &documents {
            let row = pack(std::slice::from_ref(tokens));
            alone.extend(
                verifier
                    .extract(&row, HiddenDtype::F32, &mut Alone)
                    .unwrap()
                    .bytes,
            );
        }
        assert!(states.bytes == alone, "the same bits");
        for dtype in [HiddenDtype::Bf16, HiddenDtype::F32] {
            let check = verifier.self_check(dtype, &mut Alone).unwrap();
            assert!(check.logits > 0, "{check:?}");
        }
        states
    };
    let states = run(1, Dtype::F32);
    // Where they lie as f32 or bf16, and unpacked from f16: all of them are exact in bf16.
    for (threads, dtype) in [(2, Dtype::F32), (1, Dtype::BF16), (1, Dtype::F16)] {
        assert!(states == run(threads, dtype), "{threads} threads, {dtype:?}");
    }
    let row = pack(&[document(1, 40), document(2, 9)]);
    let exact = load(&tiny).extract(&row, HiddenDtype::F32, &mut Alone).unwrap();
    let values = |states: &HiddenStates| -> Vec<f32> {
        let (elements, _) = states.bytes.as_chunks::<4>();
        elements.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
    };
    let (ours, exact) = (values(&states), values(&exact));
    let top = exact.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
    let off = ours
        .iter()
        .zip(&exact)
        .fold(0.0_f32, |off, (x, y)| off.max((x - y).abs()));
    assert!(off > 0.0 && off < 0.02 * top, "{off} off, of {top}");
}
