//! Draft vocabularies against those that speculators 0.9 made of the same token counts.
//!
//! The cases are looked for in the repository's `tests/golden/eagle3` and in `$EAGLET_GOLDEN_DIR/eagle3`.

use std::path::{Path, PathBuf};

use eaglet_runtime::samples::{DraftVocabulary, TokenCounts};
use safetensors::SafeTensors;
use serde_json::Value;

/// Says something to the person who runs the tests.
#[allow(clippy::print_stderr)]
fn say(text: &str) {
    eprintln!("{text}");
}

fn cases() -> Vec<PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/eagle3");
    let given = std::env::var_os("EAGLET_GOLDEN_DIR").map(|folder| PathBuf::from(folder).join("eagle3"));
    let mut found: Vec<PathBuf> = [Some(own), given]
        .into_iter()
        .flatten()
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|case| case.join("case.json").exists() && case.join("init_full.safetensors").exists())
        .collect();
    found.sort();
    found
}

#[test]
fn vocabularies_are_reproduced() {
    let cases = cases();
    if cases.is_empty() {
        say("skipped: no cases in tests/golden/eagle3, and EAGLET_GOLDEN_DIR names none");
    }
    for folder in &cases {
        let text = std::fs::read_to_string(folder.join("case.json")).expect("case.json is readable");
        // Python writes accuracies of nothing as NaN, which is no JSON.
        let case: Value = serde_json::from_str(&text.replace(": NaN", ": null")).expect("case.json is JSON");
        let mut counts = TokenCounts::new();
        for (token, count) in case["token_freq"].as_object().expect("counts by token") {
            counts.add_token(
                token.parse().expect("a token id"),
                count.as_u64().expect("a count"),
            );
        }
        let bytes = std::fs::read(folder.join("init_full.safetensors")).expect("the tensors are readable");
        let tensors = SafeTensors::deserialize(&bytes).expect("the tensors parse");
        let (Ok(d2t), Ok(t2d)) = (tensors.tensor("d2t"), tensors.tensor("t2d")) else {
            // Without pruning the draft has the whole vocabulary and no tensors that say so.
            say(&format!("{} has no d2t", folder.display()));
            continue;
        };
        let (words, _) = d2t.data().as_chunks::<8>();
        let d2t: Vec<i64> = words.iter().map(|word| i64::from_le_bytes(*word)).collect();
        let t2d: Vec<bool> = t2d.data().iter().map(|&byte| byte == 1).collect();
        let ours = DraftVocabulary::from_counts(&counts, d2t.len(), t2d.len()).expect("the sizes fit");
        assert_eq!(ours.d2t(), d2t, "{}", folder.display());
        assert_eq!(ours.t2d(), t2d, "{}", folder.display());
        assert_eq!(
            DraftVocabulary::validate(&d2t, &t2d),
            Ok(ours),
            "{}",
            folder.display()
        );
    }
    say(&format!("{} cases", cases.len()));
}
