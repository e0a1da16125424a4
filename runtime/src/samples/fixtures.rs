//! A verifier's tokenizer folder that is made by code: bytes as tokens, ChatML as template. For tests.

use std::path::Path;

use serde_json::{Map, Value, json};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::tokenizer::ChatTokenizer;

/// The template: every message between `<|im_start|>` and `<|im_end|>`.
pub(crate) const CHATML: &str = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}\
                                 {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Id of `<|im_start|>`, the first after the bytes and the one merge.
pub(crate) const IM_START: u32 = 257;
/// Id of `<|im_end|>`.
pub(crate) const IM_END: u32 = 258;

/// Writes `tokenizer.json` and `chat_template.jinja`. Ids 0 to 255 are bytes, 256 is two newlines, then the two marks.
pub(crate) fn write_tokenizer(folder: &Path, template: &str) {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut vocab: Map<String, Value> = alphabet
        .iter()
        .zip(0..)
        .map(|(byte, id)| (byte.to_string(), json!(id)))
        .collect();
    vocab.insert("ĊĊ".to_owned(), json!(256));
    let mark = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let tokenizer = json!({
        "version": "1.0",
        // A limit in the file must not cut what is encoded.
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [mark(IM_START, "<|im_start|>"), mark(IM_END, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": byte_level,
        "post_processor": null,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocab, "merges": ["Ċ Ċ"]},
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string())
        .expect("the test's folder is writable");
    std::fs::write(folder.join("chat_template.jinja"), template).expect("the test's folder is writable");
}

/// The tokenizer with a template.
pub(crate) fn tokenizer(template: &str) -> ChatTokenizer {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_tokenizer(folder.path(), template);
    ChatTokenizer::load(folder.path()).expect("the test's own tokenizer loads")
}
