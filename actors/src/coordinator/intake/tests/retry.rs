use super::*;

#[test]
fn a_retry_takes_mended_lines_under_their_numbers_and_what_is_beyond_as_new() {
    let mut world = World::new();
    world.config.samples.min_trained_tokens = 8;
    // The second answer of line 2 is too short to be trained; line 3 is torn; line 4 stays bad.
    let long = "yes, and this answer is long enough to be trained";
    let first = chat(1).replace("yes, 1", long);
    let with = |answer: &str| {
        two_answers(1)
            .replace("yes", long)
            .replace("\"no\"", &format!("{answer:?}"))
    };
    let lines = [first.clone(), with("no"), torn(), torn()];
    world.config.samples.files = vec![world.write("a.jsonl", &lines)];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    assert_eq!(
        world.samples().iter().map(|sample| sample.3).collect::<Vec<_>>(),
        [true, true, false, false, false]
    );
    let unchanged = launched.retry(&[]);
    assert!(matches!(unchanged, OperatorReply::Refused(_)), "{unchanged:?}");
    assert!(said(&unchanged).contains("a.jsonl:4"), "{unchanged:?}");
    world.write(
        "a.jsonl",
        &[
            first,
            with("no, and this was not what anybody asked for"),
            with("no, and this was not what anybody wanted either"),
            torn(),
        ],
    );
    let named = launched.retry(&[0, 2, 77]);
    assert!(said(&named).starts_with("pending again: 1"), "{named:?}");
    assert!(
        said(&named).contains("sample 0") && said(&named).contains("no such sample"),
        "{named:?}"
    );
    let rest = launched.retry(&[]);
    assert!(said(&rest).contains("new, from the same lines: 1"), "{rest:?}");
    assert!(said(&rest).contains("a.jsonl:4"), "{rest:?}");
    let name = || "a.jsonl".to_owned();
    let expected = [
        (name(), 1, 0, true),
        (name(), 2, 0, true),
        (name(), 2, 1, true),
        (name(), 3, 0, true),
        (name(), 3, 1, true),
        (name(), 4, 0, false),
    ];
    assert_eq!(world.samples(), expected);
    // What is good is not tried again, and a later launch takes nothing in twice.
    launched.retry(&[]);
    fs::remove_file(world.path("a.jsonl")).expect("removable");
    let gone = launched.retry(&[]);
    assert!(said(&gone).contains("cannot open"), "{gone:?}");
    launched.end();
    world.write("a.jsonl", &lines);
    world.config.samples.follow = true;
    let launched = world.launch();
    launched.close();
    launched.end();
    assert_eq!(world.samples(), expected);
}

#[test]
fn a_sample_that_a_verifier_refused_is_pending_again_as_it_is() {
    let mut world = World::new();
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1), chat(2)])];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    let unit = eaglet_runtime::ids::Unit {
        pass: 0,
        sample: SampleSeq(1),
    };
    let record = Record::Quarantined {
        step: eaglet_runtime::ids::Step(0),
        unit,
        reason: "not finite".to_owned(),
    };
    launched
        .recorder
        .with(|log| log.journal.append(&record, false))
        .expect("a writable journal");
    let reply = launched.retry(&[1]);
    assert!(said(&reply).starts_with("pending again: 1"), "{reply:?}");
    launched.end();
    let last = journal::read(&world.path("journal")).expect("a journal").records;
    let retried = Record::Retried {
        sample: SampleSeq(1),
        stored: None,
    };
    assert!(last.contains(&retried), "{last:?}");
}

#[test]
fn a_last_line_that_was_mended_and_then_ended_is_not_taken_twice() {
    let mut world = World::new();
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1)])];
    world.append("a.jsonl", &torn());
    let launched = world.launch();
    launched.wait_for_event("prepared");
    world.write("a.jsonl", &[chat(1)]);
    world.append("a.jsonl", &two_answers(2));
    let reply = launched.retry(&[]);
    assert!(
        said(&reply).contains("pending again: 1\nnew, from the same lines: 1"),
        "{reply:?}"
    );
    world.append("a.jsonl", &format!("\n{}\n", chat(3)));
    launched.add(&[&world.path("a.jsonl")]);
    launched.close();
    launched.end();
    let places: Vec<(u64, u32)> = world
        .samples()
        .iter()
        .map(|sample| (sample.1, sample.2))
        .collect();
    assert_eq!(places, [(1, 0), (2, 0), (2, 1), (3, 0)]);
}
