//! Files that are not what they should be: one line that says where and what to do, and never a panic (GGUF-1, GGUF-2).

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use eaglet_runtime::gguf::{Gguf, GgufError};
use eaglet_runtime::samples::ChatTokenizer;
use eaglet_runtime::verifier::{Verifier, VerifierFiles, VerifierOptions};

use super::quantise::Storage;
use super::writer::Writer;
use super::{golden, written};

/// A small file that has something of everything.
fn small() -> Writer {
    let mut writer = Writer::new("llama");
    for (key, value) in [
        ("block_count", 1),
        ("context_length", 16),
        ("embedding_length", 4),
        ("feed_forward_length", 4),
        ("attention.head_count", 1),
        ("attention.head_count_kv", 1),
    ] {
        writer.u32(&format!("llama.{key}"), value);
    }
    writer.f32("llama.attention.layer_norm_rms_epsilon", 1e-6);
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "llama-bpe");
    writer.texts("tokenizer.ggml.tokens", &["a", "b", "ab", "<s>"]);
    writer.i32s("tokenizer.ggml.token_type", &[1, 1, 1, 3]);
    writer.texts("tokenizer.ggml.merges", &["a b"]);
    writer.u32("tokenizer.ggml.bos_token_id", 3);
    writer.flag("tokenizer.ggml.add_bos_token", true);
    writer.text("tokenizer.chat_template", "{{ messages }}");
    writer.tensor("token_embd.weight", &[4, 4], &[0.5; 16], Storage::F32);
    writer.tensor("output_norm.weight", &[4], &[1.0; 4], Storage::F32);
    for part in [
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ] {
        writer.tensor(
            &format!("blk.0.{part}.weight"),
            &[4, 4],
            &[0.25; 16],
            Storage::F16,
        );
    }
    for part in ["attn_norm", "ffn_norm"] {
        writer.tensor(&format!("blk.0.{part}.weight"), &[4], &[1.0; 4], Storage::F32);
    }
    writer
}

fn open(bytes: &[u8]) -> Result<Gguf, GgufError> {
    let (_folder, file) = written(bytes);
    Gguf::open(file)
}

/// The message, which must be one line.
fn message(error: &impl ToString) -> String {
    let message = error.to_string();
    assert!(!message.contains('\n'), "{message}");
    message
}

fn refused(bytes: &[u8], words: &[&str]) {
    let message = message(&open(bytes).expect_err(words[0]));
    for word in words.iter().chain(&["model.gguf"]) {
        assert!(message.contains(word), "no `{word}` in {message}");
    }
}

/// Does everything with a file that a run does, and returns what came of it.
fn use_all(file: &Path) -> Result<(), String> {
    let text = |error: &dyn ToString| message(&error.to_string());
    let tokenizer = ChatTokenizer::load(file).map_err(|error| text(&error))?;
    tokenizer.encode("abab a").map_err(|error| text(&error))?;
    let files = VerifierFiles::open(file).map_err(|error| text(&error))?;
    files.check().map_err(|error| text(&error))?;
    let options = VerifierOptions {
        threads: 1,
        aux_layers: Some(vec![1]),
        ..VerifierOptions::default()
    };
    Verifier::load(file, options)
        .map(drop)
        .map_err(|error| text(&error))
}

#[test]
fn the_whole_file_is_usable() {
    let (_folder, file) = written(&small().bytes());
    use_all(&file).expect("it is");
}

#[test]
fn every_cut_is_reported() {
    let whole = small().bytes();
    for len in 0..whole.len() {
        let error = open(&whole[..len]).expect_err("it is cut");
        assert!(
            matches!(error, GgufError::Truncated { .. }),
            "{len} bytes: {error}"
        );
        message(&error);
    }
}

#[test]
fn no_changed_byte_of_the_header_panics() {
    let whole = small().bytes();
    // The data come last; what is before them is header.
    let header = whole.len() - 1000;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("model.gguf");
    let (mut fine, mut refused) = (0, 0);
    for at in 0..header {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            std::fs::write(&file, bytes).expect("it is writable");
            let outcome = catch_unwind(AssertUnwindSafe(|| use_all(&file)));
            match outcome.unwrap_or_else(|_| panic!("byte {at} changed by {change:#x}")) {
                Ok(()) => fine += 1,
                Err(_) => refused += 1,
            }
        }
    }
    // Names that nobody asks for and numbers that only tell may be anything.
    assert!(refused > fine && fine > 0, "{refused} refused, {fine} fine");
}

#[test]
fn other_formats_and_versions_are_told_apart() {
    let whole = small().bytes();
    let changed = |at: usize, bytes: &[u8]| {
        let mut changed = whole.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    refused(
        &changed(0, b"ggml"),
        &["does not begin with GGUF", "convert the model again"],
    );
    refused(b"PK\x03\x04", &["does not begin with GGUF"]);
    refused(
        &changed(4, &1u32.to_le_bytes()),
        &["it has version 1", "version 2 or 3"],
    );
    refused(&changed(4, &3u32.to_be_bytes()), &["big-endian"]);
    refused(&changed(4, &9u32.to_le_bytes()), &["it has version 9"]);
    assert!(open(&changed(4, &2u32.to_le_bytes())).is_ok());
    let gone = Gguf::open("nowhere/model.gguf").expect_err("it is not there");
    assert!(message(&gone).contains("cannot read `nowhere/model.gguf`"));
}

#[test]
fn claims_are_compared_with_what_is_there() {
    let whole = small().bytes();
    let huge = |at: usize| {
        let mut changed = whole.clone();
        changed[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        changed
    };
    refused(&huge(8), &["the description of tensor"]);
    refused(&huge(16), &["metadata entry"]);
    refused(
        &huge(24),
        &["truncated: it ends within the key of metadata entry 0"],
    );

    let with = |key: &str, number: u32, value: &[u8]| {
        let mut writer = small();
        writer.entry(key, number, value);
        writer.bytes()
    };
    refused(
        &with("x", 8, &u64::MAX.to_le_bytes()),
        &["truncated", "the value of metadata key `x`"],
    );
    let array = |element: u32, count: u64| [&element.to_le_bytes()[..], &count.to_le_bytes()].concat();
    let place = "the array of metadata key `x`";
    for element in [0, 6, 8, 10] {
        refused(&with("x", 9, &array(element, u64::MAX)), &["truncated", place]);
        refused(&with("x", 9, &array(element, 1 << 61)), &["truncated", place]);
    }
    refused(&with("x", 9, &array(9, 1)), &[place, "has arrays as elements"]);
    refused(
        &with("x", 9, &array(13, 1)),
        &["the type of metadata key `x`", "is 13"],
    );
    refused(
        &with("x", 77, &[]),
        &["the type of metadata key `x`", "is 77, which is none"],
    );
    refused(
        &with("x", 7, &[2]),
        &["metadata key `x`", "neither true nor false"],
    );
    refused(
        &with("general.alignment", 4, &33u32.to_le_bytes()),
        &["`general.alignment` is 33, no power of two"],
    );
    refused(
        &with("general.alignment", 4, &0u32.to_le_bytes()),
        &["no power of two"],
    );
    refused(
        &with("llama.block_count", 4, &1u32.to_le_bytes()),
        &["metadata key `llama.block_count` is there twice"],
    );
    let mut writer = small();
    writer.entry("x", 4, &[1; 4]);
    let mut bytes = writer.bytes();
    let at = bytes
        .windows(9)
        .position(|window| window == b"\x01\0\0\0\0\0\0\0x")
        .expect("the key");
    bytes[at + 8] = 0xff;
    refused(&bytes, &["the key of metadata entry 17 is no UTF-8"]);
}

#[test]
fn tensors_lie_inside_the_file_and_over_no_other() {
    let tensors = |change: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new("x");
        writer.tensor("a", &[4, 4], &[0.0; 16], Storage::F32);
        change(&mut writer);
        writer
    };
    let two = tensors(&|writer| writer.tensor("b", &[4, 4], &[0.0; 16], Storage::F32));
    assert!(open(&two.bytes()).is_ok());
    refused(
        &two.bytes_with_offsets(&[0, 32]),
        &["tensor `a` overlaps tensor `b`"],
    );
    refused(&two.bytes_with_offsets(&[0, 0]), &["overlaps tensor"]);
    refused(
        &two.bytes_with_offsets(&[0, 65]),
        &["tensor `b` is not aligned to 32 bytes"],
    );
    refused(&two.bytes_with_offsets(&[0, 96]), &["truncated", "tensor `b`"]);
    refused(
        &two.bytes_with_offsets(&[0, u64::MAX - 31]),
        &["truncated", "tensor `b`"],
    );
    refused(
        &two.bytes_with_offsets(&[0, 1 << 63]),
        &["truncated", "tensor `b`"],
    );

    let with = |shape: &[usize], number: u32| {
        tensors(&|writer| writer.stored("b", shape, number, vec![0; 64])).bytes()
    };
    refused(&with(&[usize::MAX, usize::MAX], 0), &["truncated", "tensor `b`"]);
    refused(&with(&[1 << 40, 1 << 24], 0), &["truncated", "tensor `b`"]);
    refused(&with(&[0, 4], 0), &["tensor `b` has an impossible dimension"]);
    refused(&with(&[1; 5], 0), &["tensor `b` has 5 dimensions"]);
    refused(&with(&[4], 4), &["tensor `b` has type 4, which is unknown"]);
    refused(&with(&[4], 4_000_000_000), &["which is unknown"]);
    refused(
        &with(&[2, 16], 2),
        &["tensor `b` has rows that are no multiple of the 32 elements"],
    );
    refused(&with(&[], 2), &["no multiple of the 32 elements"]);
    let twice = tensors(&|writer| writer.tensor("a", &[1], &[0.0], Storage::F32));
    refused(&twice.bytes(), &["tensor `a` is there twice"]);
}

#[test]
fn a_model_in_several_files_is_opened_by_its_first() {
    let gguf = Gguf::open(golden("split-00001-of-00002.gguf")).expect("it opens");
    let names: Vec<_> = gguf.tensors().map(|tensor| tensor.name()).collect();
    assert_eq!(
        names,
        ["token_embd.weight", "blk.0.attn_q.weight", "output_norm.weight"]
    );
    assert_eq!(gguf.weights().expect("they are named").names().count(), 3);

    let says = |path: &Path, words: &[&str]| {
        let message = message(&Gguf::open(path).expect_err(words[0]));
        for word in words {
            assert!(message.contains(word), "no `{word}` in {message}");
        }
    };
    says(
        &golden("split-00002-of-00002.gguf"),
        &["its first file is NAME-00001-of-00002.gguf"],
    );
    let folder = tempfile::tempdir().expect("a temporary folder");
    let place = |name: &str| folder.path().join(name);
    let first = place("m-00001-of-00002.gguf");
    std::fs::copy(golden("split-00001-of-00002.gguf"), &first).expect("copied");
    says(&first, &["m-00002-of-00002.gguf` is not beside it; download it"]);
    std::fs::copy(
        golden("split-00001-of-00002.gguf"),
        place("m-00002-of-00002.gguf"),
    )
    .expect("copied");
    says(
        &first,
        &["m-00002-of-00002.gguf", "does not say that it is number 1 of 2"],
    );
    let renamed = place("renamed.gguf");
    std::fs::copy(golden("split-00001-of-00002.gguf"), &renamed).expect("copied");
    says(&renamed, &["renamed.gguf", "name it NAME-00001-of-00002.gguf"]);

    let mut writer = small();
    writer.u32("split.count", 65535);
    let (_folder, file) = written(&writer.bytes());
    says(&file, &["name it NAME-00001-of-65535.gguf"]);
}

#[test]
fn metadata_that_cannot_be_used_are_named() {
    let says = |change: &dyn Fn(&mut Writer), words: &[&str]| {
        let mut writer = Writer::new("llama");
        change(&mut writer);
        let (_folder, file) = written(&writer.bytes());
        let message = use_all(&file).expect_err(words[0]);
        for word in words {
            assert!(message.contains(word), "no `{word}` in {message}");
        }
    };
    says(&|_| {}, &["`tokenizer.ggml.model` is missing"]);
    says(
        &|writer| writer.text("tokenizer.ggml.model", "bert"),
        &["tokenizer.ggml.model `bert` is not read", "gpt2, llama"],
    );
    let gpt2 = |writer: &mut Writer| writer.text("tokenizer.ggml.model", "gpt2");
    says(&gpt2, &["tokenizer.ggml.pre `` is not known; known are: gpt-2, "]);
    says(
        &|writer| {
            gpt2(writer);
            writer.text("tokenizer.ggml.pre", "next-year");
        },
        &["`next-year` is not known", "use the model's safetensors files"],
    );
    let tokens = |writer: &mut Writer, tokens: &[&str]| {
        gpt2(writer);
        writer.text("tokenizer.ggml.pre", "qwen2");
        writer.texts("tokenizer.ggml.tokens", tokens);
    };
    says(
        &|writer| tokens(writer, &["a", "a"]),
        &["`tokenizer.ggml.tokens` has `a` at 0 and at 1"],
    );
    says(
        &|writer| tokens(writer, &["a"]),
        &["`tokenizer.ggml.merges` is missing"],
    );
    for merge in ["a b", "ab", "", " ", "a a"] {
        let change = |writer: &mut Writer| {
            tokens(writer, &["a", "c"]);
            writer.texts("tokenizer.ggml.merges", &[merge]);
        };
        says(
            &change,
            &["`tokenizer.ggml.merges` has an element 0 that merges no tokens"],
        );
    }
    says(
        &|writer| {
            tokens(writer, &["a", "c"]);
            writer.i32s("tokenizer.ggml.token_type", &[1]);
        },
        &["`tokenizer.ggml.token_type` is no list of 2 types"],
    );
    says(
        &|writer| writer.u32("tokenizer.ggml.model", 1),
        &["`tokenizer.ggml.model` is no text"],
    );

    let config = |change: &dyn Fn(&mut Writer)| {
        let mut writer = Writer::new("llama");
        change(&mut writer);
        let gguf = open(&writer.bytes()).expect("it opens");
        message(&gguf.config_json().expect_err("it has no configuration"))
    };
    assert!(config(&|_| {}).contains("`llama.embedding_length` is missing or 0"));
    let error = config(&|writer| {
        writer.u32("llama.embedding_length", 4);
        writer.i32s("llama.attention.head_count", &[1, 2]);
    });
    assert!(
        error.contains("`llama.attention.head_count` differs from layer to layer"),
        "{error}"
    );
    let gguf = open(&Writer::new("mamba").bytes()).expect("it opens");
    let error = message(&gguf.config_json().expect_err("it is not known"));
    assert!(
        error.contains("architecture `mamba` is not read from GGUF; read are: llama, qwen2, qwen3, "),
        "{error}"
    );
    assert!(matches!(
        gguf.weights(),
        Err(GgufError::UnknownArchitecture { .. })
    ));
}

#[test]
fn a_file_without_a_template_says_so() {
    let mut writer = Writer::new("llama");
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "qwen2");
    writer.texts("tokenizer.ggml.tokens", &["a"]);
    writer.texts("tokenizer.ggml.merges", &[""; 0]);
    let (_folder, file) = written(&writer.bytes());
    let error = message(&ChatTokenizer::load(&file).expect_err("it has none"));
    assert!(
        error.contains("model.gguf has no chat template: no metadata key `tokenizer.chat_template`"),
        "{error}"
    );
}
