//! The verifier's tokenizer together with its chat template.
//!
//! Rendered text is encoded without adding special tokens: a template writes those it wants. Truncation and padding that a
//! `tokenizer.json` may ask for are switched off, because lengths are the mask's business.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::template::{ChatTemplate, TemplateError};
use crate::digest::Digest;
use crate::model_files::{self, ModelFiles, ModelFilesError};
use crate::row::Sample;

/// Most tokens that are looked at together to complete a character when a sample is explained.
const CHARACTER_TOKENS: usize = 8;

/// Why a tokenizer cannot be loaded or used.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A file of the model cannot be read.
    #[error(transparent)]
    Files(#[from] ModelFilesError),
    /// There is no tokenizer.
    #[error("there is no {}; the verifier's folder needs its fast tokenizer, {}", file.display(), model_files::TOKENIZER)]
    Missing {
        /// The file.
        file: PathBuf,
    },
    /// The file is no tokenizer.
    #[error("{} is no tokenizer: {detail}; take the file from the verifier's repository again", file.display())]
    Invalid {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// The chat template is missing or broken.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A text cannot be encoded, or tokens cannot be decoded.
    #[error("{detail}")]
    Encode {
        /// What the tokenizer says.
        detail: String,
    },
    /// The tokenizer has ids beyond the embedding.
    #[error(
        "the tokenizer's id {id} (`{token}`) has no row in the embedding, which has {rows}; \
         the tokenizer and the weights are not of the same verifier"
    )]
    BeyondEmbedding {
        /// The highest id.
        id: u32,
        /// Its text.
        token: String,
        /// Rows of the embedding.
        rows: usize,
    },
}

/// A verifier's tokenizer and chat template.
#[derive(Debug)]
pub struct ChatTokenizer {
    tokenizer: Tokenizer,
    template: ChatTemplate,
    digest: Digest,
    highest_id: u32,
}

impl ChatTokenizer {
    /// Loads `tokenizer.json` and the chat template of a model's folder, or what a GGUF file has for them.
    ///
    /// # Errors
    /// If either is missing, unreadable or broken.
    pub fn load(folder: &Path) -> Result<Self, TokenizerError> {
        let files = ModelFiles::open(folder).map_err(ModelFilesError::from)?;
        let file = files.place(model_files::TOKENIZER);
        let bytes = files
            .read(model_files::TOKENIZER)?
            .ok_or_else(|| TokenizerError::Missing { file: file.clone() })?;
        let invalid = |detail: String| TokenizerError::Invalid {
            file: file.clone(),
            detail,
        };
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| invalid(error.to_string()))?;
        tokenizer
            .with_truncation(None)
            .map_err(|error| invalid(error.to_string()))?;
        tokenizer.with_padding(None);
        let highest_id = tokenizer
            .get_vocab(true)
            .into_values()
            .max()
            .ok_or_else(|| invalid("its vocabulary is empty".to_owned()))?;
        Ok(Self {
            tokenizer,
            template: ChatTemplate::of_files(&files)?,
            digest: Digest::of(&bytes),
            highest_id,
        })
    }

    /// The chat template.
    pub fn template(&self) -> &ChatTemplate {
        &self.template
    }

    /// Digest of the bytes of `tokenizer.json`.
    pub fn tokenizer_digest(&self) -> Digest {
        self.digest
    }

    /// Digest of the chat template.
    pub fn template_digest(&self) -> Digest {
        self.template.digest()
    }

    /// One more than the highest token id.
    pub fn vocab_size(&self) -> usize {
        self.highest_id as usize + 1
    }

    /// Checks that every token id has a row in an embedding of `rows` rows. Embeddings may have more rows than ids.
    ///
    /// # Errors
    /// If the highest id has none.
    pub fn fits_embedding(&self, rows: usize) -> Result<(), TokenizerError> {
        if self.vocab_size() <= rows {
            return Ok(());
        }
        let token = self.tokenizer.id_to_token(self.highest_id).unwrap_or_default();
        Err(TokenizerError::BeyondEmbedding {
            id: self.highest_id,
            token,
            rows,
        })
    }

    /// The token of an id, as the vocabulary spells it.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// Token ids of a text; marks of special tokens within it become those tokens.
    ///
    /// # Errors
    /// If the tokenizer has no token for a part of the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.tokenizer.encode_fast(text, false).map_err(encode_error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Text of token ids, special tokens included; incomplete characters are `\u{fffd}`.
    ///
    /// # Errors
    /// If the tokenizer's decoder refuses them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.tokenizer.decode(tokens, false).map_err(encode_error)
    }
}

fn encode_error(error: tokenizers::Error) -> TokenizerError {
    TokenizerError::Encode {
        detail: error.to_string(),
    }
}

/// The text of each token of a sample, and whether it is trained; for showing a sample to a person.
///
/// A character that is spread over several tokens is shown at the last of them, the others are empty. Tokens that do not
/// make up characters are shown by their name in the vocabulary.
///
/// # Errors
/// If the tokenizer's decoder refuses the tokens.
pub fn explain(sample: &Sample, tokenizer: &ChatTokenizer) -> Result<Vec<(String, bool)>, TokenizerError> {
    let tokens = &sample.tokens;
    let mut shown: Vec<(String, bool)> = tokens
        .iter()
        .zip(&sample.loss_mask)
        .map(|(_, &trained)| (String::new(), trained == 1))
        .collect();
    // Decoders may drop the blank before the first token, so each piece is decoded behind the one before it.
    let (mut context, mut start) = (0, 0);
    while start < tokens.len() {
        let before = tokenizer.decode(&tokens[context..start])?;
        let longest = (start + CHARACTER_TOKENS).min(tokens.len());
        let mut whole = None;
        for end in start + 1..=longest {
            let both = tokenizer.decode(&tokens[context..end])?;
            if let Some(text) = both.strip_prefix(&before)
                && !text.ends_with('\u{fffd}')
            {
                whole = Some((end, text.to_owned()));
                break;
            }
        }
        let (end, text) = whole.unwrap_or_else(|| {
            (
                start + 1,
                tokenizer.tokenizer.id_to_token(tokens[start]).unwrap_or_default(),
            )
        });
        if let Some(last) = shown.get_mut(end - 1) {
            last.0 = text;
        }
        (context, start) = (start, end);
    }
    Ok(shown)
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{CHATML, IM_END, IM_START, tokenizer, write_tokenizer};
    use super::*;

    #[test]
    fn text_is_encoded_whole_and_without_additions() {
        let tokenizer = tokenizer(CHATML);
        let tokens = tokenizer
            .encode("<|im_start|>ab\n\n<|im_end|>")
            .expect("bytes always encode");
        assert_eq!(tokens.len(), 5);
        assert_eq!((tokens[0], tokens[3], tokens[4]), (IM_START, 256, IM_END));
        assert_eq!(
            tokenizer.decode(&tokens).expect("decodes"),
            "<|im_start|>ab\n\n<|im_end|>"
        );
        assert_eq!(tokenizer.encode("").expect("encodes"), Vec::<u32>::new());
    }

    #[test]
    fn ids_must_fit_the_embedding() {
        let tokenizer = tokenizer(CHATML);
        assert_eq!(tokenizer.vocab_size(), 259);
        assert!(tokenizer.fits_embedding(259).is_ok());
        assert!(tokenizer.fits_embedding(320).is_ok());
        assert_eq!(
            tokenizer.fits_embedding(258).expect_err("too small").to_string(),
            "the tokenizer's id 258 (`<|im_end|>`) has no row in the embedding, which has 258; \
             the tokenizer and the weights are not of the same verifier"
        );
    }

    #[test]
    fn digests_follow_the_files() {
        let folder = tempfile::tempdir().expect("temporary folder");
        write_tokenizer(folder.path(), CHATML);
        let one = ChatTokenizer::load(folder.path()).expect("loads");
        std::fs::write(folder.path().join("chat_template.jinja"), "{{ 1 }}").expect("writable");
        let two = ChatTokenizer::load(folder.path()).expect("loads");
        assert_eq!(one.tokenizer_digest(), two.tokenizer_digest());
        assert_ne!(one.template_digest(), two.template_digest());
    }

    #[test]
    fn a_missing_or_broken_file_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let error = ChatTokenizer::load(folder.path())
            .expect_err("missing")
            .to_string();
        assert!(
            error.contains("tokenizer.json") && error.contains("needs its fast tokenizer"),
            "{error}"
        );
        std::fs::write(folder.path().join("tokenizer.json"), "{\"model\": 3}").expect("writable");
        let error = ChatTokenizer::load(folder.path())
            .expect_err("broken")
            .to_string();
        assert!(error.contains("is no tokenizer: "), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }

    #[test]
    fn characters_of_several_tokens_are_shown_at_their_last() {
        let tokenizer = tokenizer(CHATML);
        let tokens = tokenizer.encode("a 🙂é<|im_end|>").expect("encodes");
        let count = tokens.len();
        let mut sample = Sample {
            tokens,
            loss_mask: vec![0; count],
        };
        sample.loss_mask[count - 1] = 1;
        let shown = explain(&sample, &tokenizer).expect("decodes");
        let texts: Vec<_> = shown.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(texts, ["a", " ", "", "", "", "🙂", "", "é", "<|im_end|>"]);
        assert_eq!(shown.iter().filter(|(_, trained)| *trained).count(), 1);
        // Half a character, then text: the half is shown by its name and nothing after it is lost.
        sample.tokens.truncate(4);
        sample.tokens.extend(tokenizer.encode("xy").expect("encodes"));
        sample.loss_mask = vec![0; sample.tokens.len()];
        let shown: String = explain(&sample, &tokenizer)
            .expect("decodes")
            .into_iter()
            .map(|piece| piece.0)
            .collect();
        assert!(shown.starts_with("a ") && shown.ends_with("xy"), "{shown}");
    }
}
