use std::fs;

use super::*;

const VERIFIER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bin/demo/verifier");
const BUDGET: SampleBudget = SampleBudget {
    rows: 1000,
    time: Duration::from_secs(60),
};

fn chat(question: &str, answer: &str) -> String {
    serde_json::json!({"messages": [
        {"role": "user", "content": question}, {"role": "assistant", "content": answer}
    ]})
    .to_string()
}

fn survey(lines: &[String], change: impl FnOnce(&mut ClusterConfig)) -> SampleSurvey {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("chats.jsonl");
    fs::write(&file, lines.join("\n")).expect("writable");
    let mut config = ClusterConfig::default();
    config.training.tokens_per_row = 64;
    config.training.rows_per_step = Some(1);
    change(&mut config);
    let tokenizer = ChatTokenizer::load(Path::new(VERIFIER)).expect("the demo verifier's");
    let files = [("samples.files[0]".to_owned(), file.clone())];
    let (mut survey, unreadable) =
        Reader::new(&config, &tokenizer, &[2], BUDGET).read(&files, &[], BUDGET.rows);
    assert_eq!(unreadable, []);
    let shorten = |text: &mut String| *text = text.replace(&format!("{}/", folder.path().display()), "");
    shorten(&mut survey.longest_place);
    survey
        .refused
        .iter_mut()
        .for_each(|refusal| shorten(&mut refusal.first));
    survey
}

#[test]
fn samples_are_read_as_the_intake_reads_them() {
    let lines = [
        chat("What is hail?", "Hail is ice that falls."),
        "{\"messages\": [{\"ro".to_owned(),
        chat("Tell me everything.", &"It rains and it snows. ".repeat(40)),
        "{\"messages\": []}".to_owned(),
        "no".to_owned(),
    ];
    let found = survey(&lines, |_| {});
    assert_eq!(
        (found.rows, found.samples, found.truncated, found.whole),
        (5, 2, 1, true)
    );
    assert_eq!(found.longest_place, "chats.jsonl:3");
    assert!(found.longest_tokens > 64, "{found:?}");
    assert!(found.tokens > 64 && found.trained_tokens < found.tokens);
    let counted: Vec<_> = found
        .refused
        .iter()
        .map(|refusal| (refusal.reason, refusal.count))
        .collect();
    assert_eq!(counted, [("not JSON", 2), ("empty", 1)]);
    assert!(
        found.refused[0]
            .first
            .starts_with("chats.jsonl:2: the row is no whole JSON")
    );
    // The cut sample has lost its end.
    assert_eq!(found.stopped, 1);
    assert_eq!(
        (found.estimated_samples, found.estimated_tokens),
        (2, found.tokens)
    );
    assert_eq!(found.steps, 2);

    let found = survey(&lines, |config| {
        config.samples.too_long = crate::config::TooLong::Quarantine
    });
    assert_eq!((found.samples, found.truncated), (1, 0));
    assert!(
        found
            .refused
            .iter()
            .any(|refusal| refusal.reason == "longer than a row")
    );
}

#[test]
fn what_is_held_out_is_not_trained() {
    let lines: Vec<_> = (0..10)
        .map(|n| chat(&format!("What is {n}?"), "A number."))
        .collect();
    let found = survey(&lines, |config| {
        config.samples.held_out_every = 5;
        config.training.max_new_tokens = 4;
    });
    assert_eq!((found.samples, found.held_out_prompts), (8, 2));
}

#[test]
fn files_that_were_read_in_part_are_extrapolated() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("chats.jsonl");
    let lines: Vec<_> = (0..100)
        .map(|n| chat(&format!("What is {}?", n % 10), "A number."))
        .collect();
    fs::write(&file, lines.join("\n")).expect("writable");
    let config = ClusterConfig::default();
    let tokenizer = ChatTokenizer::load(Path::new(VERIFIER)).expect("the demo verifier's");
    let missing = folder.path().join("none.jsonl");
    let files = [
        ("samples.files[0]".to_owned(), file),
        ("samples.files[1]".to_owned(), missing),
    ];
    let (found, unreadable) = Reader::new(&config, &tokenizer, &[], BUDGET).read(&files, &[], 20);
    // Half of the rows for each file.
    assert_eq!((found.rows, found.whole), (10, false));
    assert_eq!(found.estimated_samples, 100);
    assert_eq!(unreadable.len(), 1);
    assert_eq!(unreadable[0].key, "samples.files[1]");
    assert!(unreadable[0].what.contains("none.jsonl"), "{unreadable:?}");
}

#[test]
fn what_the_draft_unrolls_is_counted_by_hand() {
    let lines = [chat("What is hail?", "Ice.")];
    let found = survey(&lines, |config| config.training.ttt_steps = 3);
    let prompt = found.tokens - found.trained_tokens;
    let positions = found.tokens - 1;
    // Position i reads token i + 1: the first trained one is read at prompt - 1, and two steps before it counts, too.
    let active = positions - (prompt - 1 - 2);
    let share = active as f64 / positions as f64;
    assert!((found.active_share - share).abs() < 1e-12, "{found:?}");
    assert!(
        (found.visible_tokens - (positions + 1) as f64 / 2.0).abs() < 1e-12,
        "{found:?}"
    );
}
