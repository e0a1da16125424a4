//! How texts are split before their bytes are merged to tokens, by the names of `tokenizer.ggml.pre`.
//!
//! A name stands for what the tokenizer.json of the models says for which llama.cpp gave that name.

use serde_json::{Value as Json, json};

/// One way to split texts.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Values of `tokenizer.ggml.pre` that mean it.
    names: &'static [&'static str],
    /// The rule.
    rule: Rule,
    /// A piece that is a token as a whole is not put together from merges.
    pub(super) ignore_merges: bool,
    /// Texts are brought to Unicode's normal form C first.
    pub(super) nfc: bool,
}

#[derive(Debug)]
enum Rule {
    /// GPT-2's own, which tokenizers has built in.
    Gpt2,
    /// Each digit alone, then as GPT-2.
    DigitsThenGpt2,
    /// What this expression matches and what is between.
    Split(&'static str),
}

/// Llama 3: contractions in any case, up to three digits together, line ends with the blanks before them.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2: the same, but each digit alone.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's Tekken: words break before capitals, each digit alone.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// GPT-4o: words break before capitals and keep contractions, up to three digits together.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer {
        names: &["gpt-2", "phi-2"],
        rule: Rule::Gpt2,
        ignore_merges: false,
        nfc: false,
    },
    PreTokenizer {
        names: &["smollm", "starcoder", "refact"],
        rule: Rule::DigitsThenGpt2,
        ignore_merges: false,
        nfc: false,
    },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        rule: Rule::Split(LLAMA3),
        ignore_merges: true,
        nfc: false,
    },
    // Phi 4's.
    PreTokenizer {
        names: &["dbrx", "smaug-bpe"],
        rule: Rule::Split(LLAMA3),
        ignore_merges: false,
        nfc: false,
    },
    PreTokenizer {
        names: &["qwen2", "deepseek-r1-qwen"],
        rule: Rule::Split(QWEN2),
        ignore_merges: false,
        nfc: true,
    },
    PreTokenizer {
        names: &["tekken"],
        rule: Rule::Split(TEKKEN),
        ignore_merges: true,
        nfc: false,
    },
    // Phi 4 mini's.
    PreTokenizer {
        names: &["gpt-4o"],
        rule: Rule::Split(GPT4O),
        ignore_merges: false,
        nfc: false,
    },
];

impl PreTokenizer {
    /// The pre-tokenizer of this name.
    pub(super) fn named(name: &str) -> Option<&'static Self> {
        PRE_TOKENIZERS.iter().find(|known| known.names.contains(&name))
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        let names: Vec<_> = PRE_TOKENIZERS
            .iter()
            .flat_map(|known| known.names.iter().copied())
            .collect();
        names.join(", ")
    }

    /// The `pre_tokenizer` of tokenizer.json.
    pub(super) fn json(&self) -> Json {
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex,
            })
        };
        let sequence =
            |first: Json, second: Json| json!({ "type": "Sequence", "pretokenizers": [first, second] });
        match self.rule {
            Rule::Gpt2 => byte_level(true),
            Rule::DigitsThenGpt2 => sequence(
                json!({ "type": "Digits", "individual_digits": true }),
                byte_level(true),
            ),
            Rule::Split(expression) => {
                let split = json!({
                    "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false,
                });
                sequence(split, byte_level(false))
            }
        }
    }
}
