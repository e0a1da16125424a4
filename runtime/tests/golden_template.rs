//! Rendered text, token ids and loss masks against those of speculators 0.9 over a real tokenizer and template.
//!
//! The vectors and the tokenizer are not part of the repository: `EAGLET_GOLDEN_DIR` names the folder of `template.json`,
//! `EAGLET_REAL_DIR` the one that holds `models/smollm2-135m` and, for the second test, `chats.jsonl`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Instant;

use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{
    ChatTokenizer, Conversation, DraftVocabulary, SampleLimits, SampleStore, Source, SourceOptions,
    TokenCounts, explain, samples_of,
};
use serde_json::{Value, json};

/// Says something to the person who runs the tests.
#[allow(clippy::print_stderr)]
fn say(text: &str) {
    eprintln!("{text}");
}

fn folder_of(variable: &str) -> Option<PathBuf> {
    let folder = std::env::var_os(variable).filter(|value| !value.is_empty());
    if folder.is_none() {
        say(&format!("skipped: {variable} is not set"));
    }
    folder.map(PathBuf::from)
}

fn real_tokenizer() -> Option<(PathBuf, ChatTokenizer)> {
    let folder = folder_of("EAGLET_REAL_DIR")?;
    let tokenizer =
        ChatTokenizer::load(&folder.join("models/smollm2-135m")).expect("the real tokenizer loads");
    Some((folder, tokenizer))
}

fn numbers(value: &Value) -> Vec<u32> {
    let list = value.as_array().expect("a list of the golden file");
    list.iter()
        .map(|number| number.as_u64().expect("a number") as u32)
        .collect()
}

fn golden_samples(rows: &Value) -> Vec<Sample> {
    let rows = rows.as_array().expect("a list of rows");
    rows.iter()
        .map(|row| Sample {
            tokens: numbers(&row["input_ids"]),
            loss_mask: numbers(&row["loss_mask"])
                .into_iter()
                .map(|bit| bit as u8)
                .collect(),
        })
        .collect()
}

#[test]
fn template_json_is_reproduced() {
    let (Some(golden), Some((_, tokenizer))) = (folder_of("EAGLET_GOLDEN_DIR"), real_tokenizer()) else {
        return;
    };
    let text = std::fs::read_to_string(golden.join("template.json")).expect("template.json is readable");
    let golden: Value = serde_json::from_str(&text).expect("template.json is JSON");

    let mut rows = 0;
    let cases = golden["cases"].as_object().expect("cases by name");
    for (name, case) in cases {
        let conversation = Conversation::from_json(json!({ "conversations": case["conversation"] }))
            .expect("every case is read");
        let rendering = tokenizer.template().begin(&conversation);
        let all = conversation.messages.len();
        assert_eq!(
            rendering.render(all, false).ok().as_deref(),
            case["text"].as_str(),
            "{name}"
        );
        assert_eq!(
            rendering.render(all, true).ok().as_deref(),
            case["text_with_prompt"].as_str(),
            "{name}"
        );
        for (key, max_tokens) in [("rows", usize::MAX), ("rows_max_12", 12), ("rows_max_24", 24)] {
            let expected = golden_samples(&case[key]);
            let limits = SampleLimits {
                max_tokens,
                min_trained_tokens: 1,
            };
            let found = match samples_of(&conversation, &tokenizer, limits) {
                Ok(masked) => masked.samples,
                Err(reason) => {
                    assert_eq!(reason.kind(), "nothing trained", "{name} {key}: {reason}");
                    Vec::new()
                }
            };
            rows += expected.len();
            assert_eq!(found, expected, "{name} {key}");
        }
    }
    assert!(
        cases.len() >= 8 && rows >= 10,
        "{} cases with {rows} rows",
        cases.len()
    );

    let encoded = golden["encode"].as_array().expect("a list of texts");
    assert!(!encoded.is_empty());
    for case in encoded {
        let text = case["text"].as_str().expect("a text");
        assert_eq!(
            tokenizer.encode(text).expect("encodes"),
            numbers(&case["ids"]),
            "{text:?}"
        );
    }
    say(&format!(
        "{} cases, {rows} rows and {} texts are equal",
        cases.len(),
        encoded.len()
    ));
}

#[test]
fn real_chats_become_samples() {
    let Some((folder, tokenizer)) = real_tokenizer() else {
        return;
    };
    let chats = folder.join("chats.jsonl");
    if !chats.exists() {
        say("skipped: there is no chats.jsonl in EAGLET_REAL_DIR");
        return;
    }
    let limits = SampleLimits {
        max_tokens: 2048,
        min_trained_tokens: 1,
    };
    let run = tempfile::tempdir().expect("temporary folder");
    let mut store = SampleStore::open(&run.path().join("samples.bin")).expect("creates");
    let (mut counts, mut reasons, mut skipped) = (TokenCounts::new(), BTreeMap::new(), 0);
    let (mut conversations, mut cut, mut tokens, mut stored) = (0, 0, 0, Vec::new());
    let begin = Instant::now();
    for row in Source::open(&chats, SourceOptions::default()).expect("opens") {
        let row = row.expect("readable");
        conversations += 1;
        let masked = match row.conversation {
            Ok(conversation) => samples_of(&conversation, &tokenizer, limits),
            Err(quarantine) => Err(quarantine.reason),
        };
        match masked {
            Ok(masked) => {
                skipped += masked.skipped.len();
                cut += masked.cut_samples;
                for sample in masked.samples {
                    tokens += sample.tokens.len();
                    counts.add(&sample);
                    stored.push((store.append(&sample).expect("appends"), sample));
                }
            }
            Err(reason) => *reasons.entry(reason.kind()).or_insert(0) += 1,
        }
    }
    let seconds = begin.elapsed().as_secs_f64();

    let mut trained = 0;
    for (place, sample) in &stored {
        let boundary = sample.loss_mask.iter().filter(|&&bit| bit == 0).count();
        assert!(sample.loss_mask[..boundary].iter().all(|&bit| bit == 0));
        assert!(boundary < sample.tokens.len() && sample.tokens.len() <= limits.max_tokens);
        assert_eq!(&store.read(*place).expect("reads"), sample);
        trained += (sample.tokens.len() - boundary) as u64;
    }
    assert_eq!(counts.total(), trained);
    for (_, sample) in stored.iter().step_by(50) {
        let shown = explain(sample, &tokenizer).expect("decodes");
        assert_eq!(shown.len(), sample.tokens.len());
        // An answer that is cut within a character cannot be shown whole; none of the others may lose anything.
        let text: String = shown.into_iter().map(|(text, _)| text).collect();
        let whole = tokenizer.decode(&sample.tokens).expect("decodes");
        assert!(whole.ends_with('\u{fffd}') || text == whole);
    }
    say(&format!(
        "{conversations} conversations: {} samples ({cut} cut at {}), {tokens} tokens, {trained} trained; \
         {skipped} answers skipped; quarantined {reasons:?}; {:.0} sample tokens/s on one thread; {} bytes stored",
        stored.len(),
        limits.max_tokens,
        tokens as f64 / seconds,
        store.len(),
    ));
    let verifier = tokenizer.vocab_size();
    for size in [8192, 16384, 32000, verifier] {
        let vocabulary = DraftVocabulary::from_counts(&counts, size, verifier).expect("fits");
        let coverage = vocabulary.coverage(&counts).expect("something was counted");
        say(&format!(
            "draft vocabulary of {size} of {verifier}: {:.4} % of trained tokens",
            100.0 * coverage
        ));
        assert_eq!(
            DraftVocabulary::validate(&vocabulary.d2t(), &vocabulary.t2d()).as_ref(),
            Ok(&vocabulary)
        );
        assert!(coverage <= 1.0 && (size < verifier || coverage == 1.0));
    }
    assert!(!stored.is_empty());
}
