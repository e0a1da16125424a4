//! The contents of Hugging Face's `tokenizer.json` and `tokenizer_config.json`, from the metadata.
//!
//! Two kinds of tokenizers are read: byte-level BPE with the merges in the file (`gpt2`), and SentencePiece's BPE with
//! byte fallback (`llama`), whose merges follow from the scores of its tokens.

use std::collections::HashMap;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use super::pre_tokenizer::PreTokenizer;
use super::value::Value;
use super::{Gguf, GgufError};

/// What SentencePiece writes for a blank.
const BLANK: char = '\u{2581}';

/// What a token is for, by its number in `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A piece of text: 1.
    Normal,
    /// Stands for what has no token: 2.
    Unknown,
    /// A mark such as the end of a turn: 3.
    Control,
    /// A piece of text that is found before anything is merged: 4.
    UserDefined,
    /// A row of the embedding without a text: 5.
    Unused,
    /// One byte: 6.
    Byte,
}

impl Kind {
    fn of(number: &Value) -> Option<Self> {
        Some(match number {
            Value::Whole(1) => Self::Normal,
            Value::Whole(2) => Self::Unknown,
            Value::Whole(3) => Self::Control,
            Value::Whole(4) => Self::UserDefined,
            Value::Whole(5) => Self::Unused,
            Value::Whole(6) => Self::Byte,
            _ => return None,
        })
    }
}

/// The tokens of a file, by id.
struct Tokens<'a> {
    texts: Vec<&'a str>,
    kinds: Vec<Kind>,
    ids: HashMap<&'a str, u32>,
}

/// `tokenizer.json`.
#[derive(Serialize)]
struct TokenizerJson<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<Json>,
    normalizer: Json,
    pre_tokenizer: Json,
    post_processor: Option<()>,
    decoder: Json,
    model: BpeModel<'a>,
}

#[derive(Serialize)]
struct BpeModel<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'a str>,
    continuing_subword_prefix: Option<&'a str>,
    end_of_word_suffix: Option<&'a str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    #[serde(serialize_with = "as_map")]
    vocab: Vec<(&'a str, u32)>,
    merges: Vec<(&'a str, &'a str)>,
}

fn as_map<S: Serializer>(entries: &[(&str, u32)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(entries.iter().copied())
}

impl Gguf {
    /// What `tokenizer.json` of the model would say, as bytes.
    ///
    /// # Errors
    /// When there is no tokenizer, it is of an unknown kind, or its lists do not fit each other.
    pub fn tokenizer_json(&self) -> Result<Vec<u8>, GgufError> {
        // Some converters keep the original.
        if let Some(original) = self.text("tokenizer.huggingface.json")? {
            return Ok(original.as_bytes().to_vec());
        }
        let tokenizer = match self.required_text("tokenizer.ggml.model")? {
            "gpt2" => self.byte_level()?,
            "llama" => self.sentence_piece()?,
            model => {
                return Err(GgufError::UnknownTokenizer {
                    file: self.path.clone(),
                    model: model.to_owned(),
                });
            }
        };
        serde_json::to_vec(&tokenizer)
            .map_err(|error| self.key_error("tokenizer.ggml.tokens", error.to_string()))
    }

    /// What `tokenizer_config.json` of the model would say: its chat templates and the special tokens they can see.
    ///
    /// # Errors
    /// When a key is ill-typed or names a token that is not there.
    pub fn tokenizer_config_json(&self) -> Result<Json, GgufError> {
        let mut config = Map::new();
        let texts = self.texts("tokenizer.ggml.tokens")?.unwrap_or_default();
        for (name, key) in [
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        ] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            let Some(id) = self.token_id(&key)? else {
                continue;
            };
            let text = texts.get(id as usize).ok_or_else(|| {
                self.key_error(&key, format!("is {id}, and there are {} tokens", texts.len()))
            })?;
            config.insert(format!("{name}_token"), json!(text));
        }
        if let Some(default) = self.text("tokenizer.chat_template")? {
            let mut templates = vec![json!({ "name": "default", "template": default })];
            for name in self.texts("tokenizer.chat_templates")?.unwrap_or_default() {
                let key = format!("tokenizer.chat_template.{name}");
                let template = self.required_text(&key)?;
                templates.push(json!({ "name": name, "template": template }));
            }
            config.insert("chat_template".to_owned(), Json::Array(templates));
        }
        Ok(Json::Object(config))
    }

    fn tokens(&self) -> Result<Tokens<'_>, GgufError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        const TYPES: &str = "tokenizer.ggml.token_type";
        let texts = self
            .texts(TOKENS)?
            .ok_or_else(|| self.key_error(TOKENS, "is missing"))?;
        let kinds = match self.scalars(TYPES)? {
            None => vec![Kind::Normal; texts.len()],
            Some(numbers) => {
                let kinds: Option<Vec<_>> = numbers.iter().map(Kind::of).collect();
                kinds.filter(|kinds| kinds.len() == texts.len()).ok_or_else(|| {
                    self.key_error(TYPES, format!("is no list of {} types 1 to 6", texts.len()))
                })?
            }
        };
        let mut ids = HashMap::new();
        for (id, (&text, &kind)) in texts.iter().zip(&kinds).enumerate() {
            // Rows that fill the embedding up have names but no texts.
            if kind == Kind::Unused || text.is_empty() {
                continue;
            }
            let id = u32::try_from(id).map_err(|_| self.key_error(TOKENS, "has too many elements"))?;
            if let Some(earlier) = ids.insert(text, id) {
                return Err(self.key_error(TOKENS, format!("has `{text}` at {earlier} and at {id}")));
            }
        }
        Ok(Tokens { texts, kinds, ids })
    }

    fn byte_level(&self) -> Result<TokenizerJson<'_>, GgufError> {
        const MERGES: &str = "tokenizer.ggml.merges";
        let name = self.text("tokenizer.ggml.pre")?.unwrap_or_default();
        let pre_tokenizer = PreTokenizer::named(name).ok_or_else(|| GgufError::UnknownPreTokenizer {
            file: self.path.clone(),
            pre_tokenizer: name.to_owned(),
        })?;
        let tokens = self.tokens()?;
        let merges = self
            .texts(MERGES)?
            .ok_or_else(|| self.key_error(MERGES, "is missing"))?;
        let merges = merges.into_iter().enumerate().map(|(index, merge)| {
            merge
                .split_once(' ')
                .filter(|(one, other)| {
                    tokens.ids.contains_key(one) && tokens.ids.contains_key(other) && {
                        let whole = [*one, *other].concat();
                        tokens.ids.contains_key(whole.as_str())
                    }
                })
                .ok_or_else(|| {
                    self.key_error(
                        MERGES,
                        format!("has an element {index} that merges no tokens to one"),
                    )
                })
        });
        let merges = merges.collect::<Result<Vec<_>, _>>()?;
        let byte_level = json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        });
        Ok(tokens.json(
            if pre_tokenizer.nfc {
                json!({ "type": "NFC" })
            } else {
                Json::Null
            },
            pre_tokenizer.json(),
            byte_level,
            |vocab| BpeModel {
                ignore_merges: pre_tokenizer.ignore_merges,
                ..BpeModel::new(vocab, merges)
            },
        ))
    }

    fn sentence_piece(&self) -> Result<TokenizerJson<'_>, GgufError> {
        const SCORES: &str = "tokenizer.ggml.scores";
        const UNKNOWN: &str = "tokenizer.ggml.unknown_token_id";
        let tokens = self.tokens()?;
        let scores = self
            .scalars(SCORES)?
            .ok_or_else(|| self.key_error(SCORES, "is missing"))?;
        let scores: Option<Vec<f64>> = scores
            .iter()
            .map(|score| match score {
                Value::Float(score) => Some(*score),
                Value::Whole(score) => Some(*score as f64),
                _ => None,
            })
            .collect();
        let scores = scores
            .filter(|scores| scores.len() == tokens.texts.len())
            .ok_or_else(|| self.key_error(SCORES, format!("is no list of {} numbers", tokens.texts.len())))?;
        let unknown = self.token_id(UNKNOWN)?.unwrap_or(0) as usize;
        let unknown = *tokens
            .texts
            .get(unknown)
            .ok_or_else(|| self.key_error(UNKNOWN, format!("is {unknown}, which is no token")))?;
        let prefix = self.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let merges = tokens.merges_by_score(&scores);
        let blank = BLANK.to_string();
        let replace = json!({ "type": "Replace", "pattern": { "String": " " }, "content": blank });
        let restore = json!({ "type": "Replace", "pattern": { "String": blank }, "content": " " });
        let mut decoders = vec![
            restore,
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        let mut normalizers = vec![replace];
        if prefix {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": blank }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        Ok(tokens.json(
            json!({ "type": "Sequence", "normalizers": normalizers }),
            Json::Null,
            json!({ "type": "Sequence", "decoders": decoders }),
            |vocab| BpeModel {
                unk_token: Some(unknown),
                fuse_unk: true,
                byte_fallback: true,
                ..BpeModel::new(vocab, merges)
            },
        ))
    }
}

impl<'a> BpeModel<'a> {
    fn new(vocab: Vec<(&'a str, u32)>, merges: Vec<(&'a str, &'a str)>) -> Self {
        Self {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            ignore_merges: false,
            vocab,
            merges,
        }
    }
}

impl<'a> Tokens<'a> {
    /// Texts and kinds in the order of ids, without those that have none.
    fn known(&self) -> impl Iterator<Item = (&'a str, Kind, u32)> {
        self.texts
            .iter()
            .zip(&self.kinds)
            .zip(0u32..)
            .map(|((&text, &kind), id)| (text, kind, id))
            .filter(|&(text, kind, _)| kind != Kind::Unused && !text.is_empty())
    }

    fn json(
        &self,
        normalizer: Json,
        pre_tokenizer: Json,
        decoder: Json,
        model: impl FnOnce(Vec<(&'a str, u32)>) -> BpeModel<'a>,
    ) -> TokenizerJson<'a> {
        let added = self
            .known()
            .filter(|(_, kind, _)| matches!(kind, Kind::Control | Kind::UserDefined | Kind::Unknown));
        TokenizerJson {
            version: "1.0",
            truncation: None,
            padding: None,
            added_tokens: added
                .map(|(text, kind, id)| {
                    json!({
                        "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                        "normalized": false, "special": kind != Kind::UserDefined,
                    })
                })
                .collect(),
            normalizer,
            pre_tokenizer,
            post_processor: None,
            decoder,
            model: model(self.known().map(|(text, _, id)| (text, id)).collect()),
        }
    }

    /// Every way to put a normal token together from two, the best score first, then the longer left part: the order in
    /// which transformers converts SentencePiece's models.
    fn merges_by_score(&self, scores: &[f64]) -> Vec<(&'a str, &'a str)> {
        let id = |text: &str| self.ids.get(text).copied();
        let normal = |text: &str| id(text).is_some_and(|id| self.kinds[id as usize] == Kind::Normal);
        let mut merges = Vec::new();
        for (text, kind, id) in self.known() {
            if kind != Kind::Normal {
                continue;
            }
            let score = scores[id as usize];
            for (middle, _) in text.char_indices().skip(1) {
                let (left, right) = text.split_at(middle);
                if normal(left) && normal(right) {
                    merges.push((score, left, right));
                }
            }
        }
        merges.sort_by(|one, other| other.0.total_cmp(&one.0).then(other.1.len().cmp(&one.1.len())));
        merges.into_iter().map(|(_, left, right)| (left, right)).collect()
    }
}
