use super::*;

#[test]
fn intake_2_a_kill_at_any_sample_loses_and_doubles_nothing() {
    let run = |kill: Option<usize>| {
        let mut world = World::new();
        let mut lines: Vec<String> = (0..6).map(chat).collect();
        lines.insert(2, torn());
        lines.insert(4, two_answers(1));
        lines.push(two_answers(2));
        world.config.samples.files = vec![world.write("a.jsonl", &lines)];
        world.config.samples.held_out_every = 4;
        let b = world.write(
            "b.jsonl",
            &[
                chat(7),
                two_answers(8),
                chat(9),
                torn(),
                two_answers(10),
                chat(11),
            ],
        );
        if let Some(kill) = kill {
            let launched = world.launch_for(kill);
            // A coordinator that is gone answers nothing.
            let (reply, _) = oneshot::channel();
            let files = vec![b.clone()];
            let _ = launched.requests.send(IntakeRequest::Add { files, reply });
            assert_eq!(
                launched.thread.join().expect("no panic"),
                Stop::Gone,
                "killed at {kill}"
            );
        }
        let launched = world.launch();
        if world.book().added_sources().is_empty() {
            assert!(matches!(launched.add(&[&b]), OperatorReply::Done(_)));
        }
        // Answered when both files are read.
        launched.close();
        assert_eq!(launched.end(), Stop::Gone);
        let held_out = world.book().prepared().expect("it was prepared").held_out.clone();
        (world.samples(), held_out)
    };
    let quiet = run(None);
    assert!(quiet.0.len() > 12 && quiet.1.len() == 2, "{quiet:?}");
    for kill in 0..quiet.0.len() {
        assert_eq!(run(Some(kill)), quiet, "killed at {kill}");
    }
}

#[test]
fn intake_1_a_file_is_in_the_journal_before_its_samples_and_counted_once() {
    let mut world = World::new();
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1)])];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    let (b, c) = (
        world.write("b.jsonl", &[chat(2), torn()]),
        world.write("c.jsonl", &[]),
    );
    let reply = launched.add(&[&b, &c]);
    assert!(
        matches!(reply, OperatorReply::Done(_)) && said(&reply).lines().count() == 2,
        "{reply:?}"
    );
    launched.wait_for_samples(3);
    // A second time only what was appended is read, also into the line that had no newline.
    world.append("b.jsonl", &format!("{}\n{}", chat(3), chat(4)));
    assert!(said(&launched.add(&[&b])).contains("what was appended"));
    launched.wait_for_samples(5);
    world.append("b.jsonl", &format!("\n{}\n", chat(5)));
    launched.add(&[&b]);
    launched.wait_for_samples(6);
    launched.end();
    let records = journal::read(&world.path("journal")).expect("a journal").records;
    let kinds: Vec<&str> = records
        .iter()
        .map(|record| match record {
            Record::Accepted { .. } => "accepted",
            Record::Refused { .. } => "refused",
            Record::Prepared { .. } => "prepared",
            Record::SourceAdded { .. } => "added",
            Record::Grown { .. } => "grown",
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        kinds.join(" "),
        "accepted prepared added added accepted refused grown grown added accepted accepted grown added accepted grown"
    );
    // Another launch finds nothing new.
    let launched = world.launch();
    launched.close();
    launched.end();
    assert_eq!(world.samples().len(), 6);
}

#[test]
fn files_that_cannot_be_added_are_refused_with_the_reason_and_none_of_them_is_read() {
    let mut world = World::new();
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1)])];
    world.config.samples.held_out = vec![world.write("held_out.jsonl", &[chat(2)])];
    let launched = world.launch();
    let good = world.write("good.jsonl", &[chat(3)]);
    for (second, reason) in [
        (world.path("nowhere.jsonl"), "cannot open"),
        (world.folder.path().to_owned(), "no regular file"),
        (world.path("held_out.jsonl"), "is held out"),
        (good.clone(), "named twice"),
    ] {
        let reply = launched.add(&[&good, &second]);
        assert!(matches!(reply, OperatorReply::Refused(_)), "{reply:?}");
        assert!(said(&reply).contains(reason), "{reply:?}");
    }
    assert!(matches!(launched.close(), OperatorReply::Done(_)));
    let late = launched.add(&[&good]);
    assert!(matches!(late, OperatorReply::Refused(_)) && said(&late).contains("closed"));
    launched.end();
    assert_eq!(world.samples().len(), 1);
    // A closed run stays closed.
    let launched = world.launch();
    assert!(matches!(launched.add(&[&good]), OperatorReply::Refused(_)));
    launched.end();
}

#[test]
fn a_growing_file_gives_each_line_once_when_it_is_whole_and_its_last_one_at_the_end() {
    let mut world = World::new();
    world.config.samples.follow = true;
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1)])];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    let (second, third) = (chat(2), chat(3));
    world.append("a.jsonl", &second[..20]);
    world.append("a.jsonl", &format!("{}\n{}", &second[20..], &third[..10]));
    launched.wait_for_samples(2);
    world.append("a.jsonl", &format!("{}\n", &third[10..]));
    launched.wait_for_samples(3);
    // Somebody mends an early line: what comes after it is not read again.
    let text = fs::read_to_string(world.path("a.jsonl")).expect("readable");
    let mended = text.replacen("yes, 1", "yes, and this answer is longer than it was before", 1);
    fs::write(world.path("mended.jsonl"), format!("{mended}{}\n", chat(4))).expect("writable");
    fs::rename(world.path("mended.jsonl"), world.path("a.jsonl")).expect("replaceable");
    launched.wait_for_samples(4);
    world.append("a.jsonl", &chat(5));
    assert!(matches!(launched.close(), OperatorReply::Done(_)));
    let events = launched.recorder.with(|log| log.events.clone());
    assert_eq!(events.last().map(String::as_str), Some("closed"));
    assert_eq!(launched.warnings(), Vec::<String>::new());
    launched.end();
    let lines: Vec<u64> = world.samples().iter().map(|sample| sample.1).collect();
    assert_eq!(lines, [1, 2, 3, 4, 5]);
}

#[test]
fn a_watched_folder_gives_its_chats_by_name_and_what_is_no_chat_is_left() {
    let mut world = World::new();
    let folder = world.path("inbox");
    fs::create_dir_all(folder.join("sub.jsonl")).expect("writable");
    for name in [
        "b.jsonl",
        "a.JSON",
        ".hidden.jsonl",
        "notes.txt",
        "sub.jsonl/c.jsonl",
    ] {
        fs::write(folder.join(name), format!("{}\n", chat(1))).expect("writable");
    }
    world.config.samples.watch = vec![folder.clone()];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    let events = launched.recorder.with(|log| log.events.clone());
    assert_eq!(events, ["a.JSON", "b.jsonl", "prepared"]);
    fs::write(folder.join("d.jsonl"), format!("[{}]", chat(2))).expect("writable");
    launched.wait_for_samples(3);
    fs::write(folder.join("e.jsonl"), format!("{}\n{}", chat(3), chat(4))).expect("writable");
    launched.wait_for_samples(5);
    // A folder that vanishes is told once.
    let moved = world.path("moved");
    fs::rename(&folder, &moved).expect("movable");
    launched.recorder.wait("a warning", |log| {
        let told = log
            .notices
            .iter()
            .any(|notice| notice.warning && notice.text.contains("inbox"));
        told.then_some(())
    });
    fs::rename(&moved, &folder).expect("movable");
    fs::write(folder.join("f.jsonl"), chat(5)).expect("writable");
    launched.wait_for_samples(6);
    assert_eq!(launched.warnings().len(), 1, "{:?}", launched.warnings());
    launched.end();
    // A later launch goes on with the files that the first has found.
    world.config.samples.watch.clear();
    let launched = world.launch();
    launched.close();
    launched.end();
    assert_eq!(world.samples().iter().filter(|sample| sample.3).count(), 5);
}

#[test]
fn a_followed_file_that_shrinks_or_vanishes_is_a_warning_with_its_name() {
    let mut world = World::new();
    world.config.samples.follow = true;
    let lines: Vec<String> = (0..4).map(chat).collect();
    world.config.samples.files = vec![world.write("a.jsonl", &lines), world.write("b.jsonl", &lines)];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    fs::write(world.path("a.jsonl"), format!("{}\n", chat(9))).expect("writable");
    fs::remove_file(world.path("b.jsonl")).expect("removable");
    launched.recorder.wait("two warnings", |log| {
        let told = |name: &str| log.notices.iter().any(|n| n.warning && n.text.contains(name));
        (told("a.jsonl") && told("b.jsonl")).then_some(())
    });
    // The others go on.
    world.write("c.jsonl", &[chat(5)]);
    assert!(matches!(
        launched.add(&[&world.path("c.jsonl")]),
        OperatorReply::Done(_)
    ));
    launched.wait_for_samples(9);
    assert_eq!(launched.warnings().len(), 2, "{:?}", launched.warnings());
    assert_eq!(launched.end(), Stop::Gone);
}

#[test]
fn later_samples_that_the_draft_vocabulary_does_not_cover_are_a_warning_with_the_remedy() {
    let mut world = World::new();
    world.config.draft.vocab_size = 12;
    world.config.samples.files = vec![world.write("a.jsonl", &[chat(1)])];
    let launched = world.launch();
    launched.wait_for_event("prepared");
    let same = world.write("same.jsonl", &[chat(1)]);
    launched.add(&[&same]);
    launched.wait_for_samples(2);
    assert_eq!(launched.warnings(), Vec::<String>::new());
    let other = chat(2).replace(
        "yes, 2",
        "The quick brown fox jumps over the lazy dog, and wonders why.",
    );
    let other = world.write("other.jsonl", &[other]);
    launched.add(&[&other]);
    launched.wait_for_samples(3);
    launched.close();
    let warnings = launched.warnings();
    assert!(
        warnings.len() == 1 && warnings[0].contains("draft.vocab_size"),
        "{warnings:?}"
    );
    launched.end();
}

#[test]
fn an_open_run_waits_for_its_first_sample_and_another_one_ends_without() {
    let mut world = World::new();
    world.config.samples.files = vec![world.write("a.jsonl", &[torn()])];
    let Stop::Broken(report) = world.launch().thread.join().expect("no panic") else {
        panic!("it waits for ever")
    };
    assert!(
        report.contains("a.jsonl") && report.contains("samples.files"),
        "{report}"
    );
    world.config.samples.open = true;
    let launched = world.launch();
    let b = world.write("b.jsonl", &[chat(1)]);
    launched.add(&[&b]);
    launched.wait_for_event("prepared");
    launched.end();
    assert_eq!(world.samples().len(), 2);
}
