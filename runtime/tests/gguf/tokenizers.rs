//! Tokenizers give the ids of those they were made from.
#![allow(clippy::print_stdout, reason = "says what was skipped")]

use std::collections::BTreeMap;
use std::path::Path;

use eaglet_runtime::samples::ChatTokenizer;
use serde_json::Value;

use super::convert::convert;
use super::quantise::Storage;
use super::writer::Writer;
use super::{golden, written};

/// Texts that tokenizers disagree about.
const TEXTS: &[&str] = &[
    "",
    " ",
    "   ",
    "hello",
    " hello  world ",
    "The quick brown fox\njumps over\r\nthe lazy dog.\n\n\n",
    "don't DON'T I'll I'LL we've 'sup",
    "1234567890 3.14159 2024-05-17 ½ ²",
    "naïve café — Zürich, 北京 и Москва, مرحبا بالعالم, ไม่มีเว้นวรรค, हिन्दी",
    "🙂 👩‍👩‍👧 🇺🇳",
    "e\u{301} \u{e9} \u{fb01} \u{212b}",
    "\u{0} \u{7f} \u{a0}nbsp \u{200b}zero \u{3000}wide",
    "CamelCaseWords HTTPServer snake_case kebab-case",
    "    fn main() {\n\tprintln!(\"{}\", x);\n    }\n",
    "https://example.org/a?b=c&d=%20#e",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_end|> <|im_end|>x<|endoftext|>",
    "\u{2581}under\u{2581}score",
];

fn tokenizer(path: &Path) -> ChatTokenizer {
    ChatTokenizer::load(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn same_ids(one: &ChatTokenizer, other: &ChatTokenizer, texts: &[&str]) {
    assert_eq!(one.vocab_size(), other.vocab_size());
    for text in texts {
        let ids = one.encode(text).expect("it encodes");
        assert_eq!(ids, other.encode(text).expect("it encodes"), "{text:?}");
        assert_eq!(
            one.decode(&ids).expect("it decodes"),
            other.decode(&ids).expect("it decodes")
        );
    }
}

#[test]
fn byte_level_ids_are_those_of_tokenizer_json() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bin/demo/verifier");
    let (_kept, file) = written(&convert(&folder, Storage::Bf16).bytes());
    let (ours, theirs) = (tokenizer(&file), tokenizer(&folder));
    same_ids(&ours, &theirs, TEXTS);
    let chats = std::fs::read_to_string(folder.join("../chats.jsonl")).expect("the demo's chats");
    same_ids(&ours, &theirs, &chats.lines().collect::<Vec<_>>());
    assert_eq!(ours.template_digest(), theirs.template_digest());
}

#[test]
fn real_ids_are_those_of_tokenizer_json() {
    let Some(models) = std::env::var_os("EAGLET_REAL_DIR").map(|folder| Path::new(&folder).join("models"))
    else {
        println!("skipped: EAGLET_REAL_DIR names no folder with models/smollm2-135m");
        return;
    };
    let theirs = tokenizer(&models.join("smollm2-135m"));
    let mut files = 0;
    for entry in std::fs::read_dir(&models).expect("a folder") {
        let file = entry.expect("an entry").path();
        let name = file
            .file_name()
            .and_then(|name| name.to_str())
            .unwrap_or_default();
        if name.starts_with("SmolLM2-135M-Instruct.") && name.ends_with(".gguf") {
            let ours = tokenizer(&file);
            same_ids(&ours, &theirs, TEXTS);
            assert_eq!(ours.template_digest(), theirs.template_digest());
            files += 1;
        }
    }
    println!("{files} GGUF files with the same ids");
}

#[test]
fn sentence_piece_ids_are_those_of_sentence_piece() {
    let tokenizer = tokenizer(&golden("sentencepiece.gguf"));
    let cases = std::fs::read(golden("sentencepiece.json")).expect("the golden ids");
    let cases: Vec<Value> = serde_json::from_slice(&cases).expect("JSON");
    assert!(cases.len() > 15);
    for case in &cases {
        let text = case["text"].as_str().expect("a text");
        let ids: Vec<u32> = serde_json::from_value(case["ids"].clone()).expect("ids");
        assert_eq!(tokenizer.encode(text).expect("it encodes"), ids, "{text:?}");
        let restored = tokenizer.decode(&ids).expect("it decodes");
        // What stood for a blank in the text itself cannot be told from one.
        assert_eq!(restored, text.replace('\u{2581}', " "), "{text:?}");
    }
    // Marks of turns are tokens wherever they stand, and the text behind one begins anew.
    let ids = tokenizer.encode("<s>hello</s>hello").expect("it encodes");
    let hello = tokenizer.encode("hello").expect("it encodes");
    assert_eq!(ids, [&[1][..], &hello, &[2], &hello].concat());
}

#[test]
fn without_a_space_prefix_texts_begin_as_they_are() {
    let mut writer = Writer::new("gemma3");
    writer.text("tokenizer.ggml.model", "llama");
    let tokens = [
        "<unk>",
        "<eos>",
        "\u{2581}",
        "a",
        "b",
        "\u{2581}a",
        "ab",
        "\u{2581}ab",
        "   ",
        "<0x63>",
    ];
    writer.texts("tokenizer.ggml.tokens", &tokens);
    writer.f32s(
        "tokenizer.ggml.scores",
        &[0.0, 0.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, 0.0, 0.0],
    );
    writer.i32s("tokenizer.ggml.token_type", &[2, 3, 1, 1, 1, 1, 1, 1, 4, 6]);
    writer.flag("tokenizer.ggml.add_space_prefix", false);
    writer.text("tokenizer.chat_template", "{{ 1 }}");
    let (_kept, file) = written(&writer.bytes());
    let tokenizer = tokenizer(&file);
    let ids = |text: &str| tokenizer.encode(text).expect("it encodes");
    // The better score is merged first, then what that makes possible.
    assert_eq!(ids("ab ab"), [6, 7]);
    assert_eq!(ids("a a<eos>a"), [3, 5, 1, 3]);
    // A text that is a token by definition is one, whatever else could be made of it.
    assert_eq!(ids("a   a"), [3, 8, 3]);
    assert_eq!(ids("acd"), [3, 9, 0]);
    assert_eq!(tokenizer.decode(&[7, 8, 3]).expect("it decodes"), " ab   a");
}

/// The characters that stand for bytes in a byte-level vocabulary.
fn byte_level(text: &str) -> String {
    let plain = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let moved: BTreeMap<u8, char> = (0..=255u8)
        .filter(|&byte| !plain(byte))
        .zip('\u{100}'..)
        .collect();
    let character = |byte: u8| moved.get(&byte).copied().unwrap_or(byte as char);
    text.bytes().map(character).collect()
}

/// How a pre-tokenizer splits a text: the tokens under a vocabulary in which every part of the text is one.
fn pieces(pre_tokenizer: &str, text: &str) -> Vec<String> {
    let characters: Vec<char> = byte_level(text).chars().collect();
    let part = |from: usize, to: usize| characters[from..to].iter().collect::<String>();
    let mut tokens = Vec::new();
    let mut merges = Vec::new();
    for len in 1..=characters.len() {
        for from in 0..=characters.len() - len {
            let token = part(from, from + len);
            if !tokens.contains(&token) {
                tokens.push(token);
                merges.extend((1..len).map(|middle| {
                    format!(
                        "{} {}",
                        part(from, from + middle),
                        part(from + middle, from + len)
                    )
                }));
            }
        }
    }
    let mut writer = Writer::new("llama");
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", pre_tokenizer);
    writer.texts("tokenizer.ggml.tokens", &tokens);
    writer.texts("tokenizer.ggml.merges", &merges);
    writer.text("tokenizer.chat_template", "{{ 1 }}");
    let (_kept, file) = written(&writer.bytes());
    let tokenizer = tokenizer(&file);
    let ids = tokenizer.encode(text).expect("every byte has a token");
    ids.iter()
        .map(|&id| tokenizer.decode(&[id]).expect("it decodes"))
        .collect()
}

#[test]
fn each_pre_tokenizer_splits_in_its_way() {
    let text = "aB'S 1234\n\n  c";
    for (name, expected) in [
        ("gpt-2", &["aB", "'", "S", " 1234", "\n\n ", " c"][..]),
        (
            "smollm",
            &["aB", "'", "S", " ", "1", "2", "3", "4", "\n\n ", " c"],
        ),
        ("llama-bpe", &["aB", "'S", " ", "123", "4", "\n\n", " ", " c"]),
        ("dbrx", &["aB", "'S", " ", "123", "4", "\n\n", " ", " c"]),
        ("qwen2", &["aB", "'S", " ", "1", "2", "3", "4", "\n\n", " ", " c"]),
        (
            "tekken",
            &["a", "B", "'S", " ", "1", "2", "3", "4", "\n\n", " ", " c"],
        ),
        ("gpt-4o", &["a", "B'S", " ", "123", "4", "\n\n", " ", " c"]),
    ] {
        assert_eq!(pieces(name, text), expected, "{name}");
    }
}

#[test]
fn only_qwen_composes_characters() {
    assert_eq!(pieces("qwen2", "\u{e9}"), ["\u{e9}"]);
    let composed = |name: &str| {
        let mut writer = Writer::new("qwen2");
        writer.text("tokenizer.ggml.model", "gpt2");
        writer.text("tokenizer.ggml.pre", name);
        let (one, two) = (byte_level("\u{e9}"), byte_level("e\u{301}"));
        let letters: Vec<String> = (one + &two).chars().map(String::from).collect();
        writer.texts("tokenizer.ggml.tokens", &letters);
        writer.texts("tokenizer.ggml.merges", &[""; 0]);
        writer.text("tokenizer.chat_template", "{{ 1 }}");
        let (_kept, file) = written(&writer.bytes());
        tokenizer(&file)
            .encode("e\u{301}")
            .expect("every byte has a token")
    };
    assert_eq!(composed("qwen2"), [0, 1]);
    assert_eq!(composed("llama-bpe"), [2, 3, 4]);
}

#[test]
fn rows_that_fill_the_embedding_up_are_no_tokens() {
    let mut writer = Writer::new("llama");
    writer.text("tokenizer.ggml.model", "gpt2");
    writer.text("tokenizer.ggml.pre", "qwen2");
    writer.texts(
        "tokenizer.ggml.tokens",
        &["a", "b", "<|end|>", "two words", "[PAD4]", "[PAD5]"],
    );
    writer.i32s("tokenizer.ggml.token_type", &[1, 1, 3, 4, 5, 5]);
    writer.texts("tokenizer.ggml.merges", &[""; 0]);
    writer.u32("tokenizer.ggml.eos_token_id", 2);
    writer.text("tokenizer.chat_template", "{{ eos_token }}");
    let (_kept, file) = written(&writer.bytes());
    let tokenizer = tokenizer(&file);
    assert_eq!(tokenizer.vocab_size(), 4);
    assert_eq!(
        tokenizer.encode("ab<|end|>two wordsa").expect("it encodes"),
        [0, 1, 2, 3, 0]
    );
}
