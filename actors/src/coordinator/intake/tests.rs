use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use eaglet_runtime::ids::SampleSeq;
use eaglet_runtime::samples::{ChatTokenizer, Location};
use tempfile::TempDir;
use tokio::sync::oneshot;

use super::*;
use crate::engine::StoredSample;
use crate::journal::{self, Journal, Record};

/// Longest that a test waits for anything.
const PATIENCE: Duration = Duration::from_secs(60);
const VERIFIER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../bin/demo/verifier");
const VERIFIER_VOCAB_SIZE: usize = 2048;

/// What a coordinator would have done with what the intake tells.
struct Log {
    journal: Journal,
    taken_in: u64,
    events: Vec<String>,
    notices: Vec<Notice>,
    /// Samples until the coordinator is killed.
    left: usize,
}

#[derive(Clone)]
struct Recorder(Arc<(Mutex<Log>, Condvar)>);

impl Recorder {
    fn with<T>(&self, look: impl FnOnce(&mut Log) -> T) -> T {
        let looked = look(&mut self.0.0.lock().expect("no test panics while it looks"));
        self.0.1.notify_all();
        looked
    }

    /// Waits until something can be seen.
    fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut Log) -> Option<T>) -> T {
        let mut log = self.0.0.lock().expect("no test panics while it looks");
        loop {
            if let Some(found) = look(&mut log) {
                return found;
            }
            let (again, timeout) = self.0.1.wait_timeout(log, PATIENCE).expect("as above");
            log = again;
            assert!(
                !timeout.timed_out(),
                "no {what}: {:?} {:?}",
                log.events,
                log.notices
            );
        }
    }
}

impl Outlet for Recorder {
    fn hand_over(&mut self, items: Vec<IntakeItem>) -> Result<(), Stop> {
        self.with(|log| {
            for item in items {
                log.left = log.left.checked_sub(1).ok_or(Stop::Gone)?;
                let stored = |tokens: usize| StoredSample {
                    location: Location { offset: 8, len: 8 },
                    tokens: tokens as u32,
                    trained_tokens: 1,
                };
                let sample = SampleSeq(log.taken_in);
                let record = match item {
                    IntakeItem::Arrived {
                        source,
                        verdict: Ok(taken),
                    } => Record::Accepted {
                        sample,
                        source,
                        location: stored(0).location,
                        tokens: taken.tokens.len() as u32,
                        trained_tokens: 1,
                    },
                    IntakeItem::Arrived {
                        source,
                        verdict: Err(reason),
                    } => Record::Refused {
                        sample,
                        source,
                        reason,
                    },
                    IntakeItem::Retried { sample, mended } => Record::Retried {
                        sample,
                        stored: mended.map(|mended| stored(mended.tokens.len())),
                    },
                };
                log.taken_in += u64::from(!matches!(record, Record::Retried { .. }));
                log.journal.append(&record, false).expect("a writable journal");
            }
            Ok(())
        })
    }

    fn tell(&mut self, event: Event) -> Result<(), Stop> {
        self.with(|log| {
            let (name, record) = match event {
                Event::Prepared {
                    vocabulary, held_out, ..
                } => {
                    let record = Record::Prepared {
                        vocabulary,
                        held_out,
                        total_steps: 1,
                    };
                    ("prepared".to_owned(), record)
                }
                Event::Grown => ("grown".to_owned(), Record::Grown { total_steps: 1 }),
                Event::SourceAdded { file } => {
                    let name = file.file_name().expect("a file").to_string_lossy().into_owned();
                    (name, Record::SourceAdded { file })
                }
                Event::IntakeClosed => ("closed".to_owned(), Record::Closed),
                other => panic!("the intake told {other:?}"),
            };
            log.events.push(name);
            log.journal.append(&record, false).expect("a writable journal");
            Ok(())
        })
    }

    fn notice(&mut self, notice: Notice) {
        self.with(|log| log.notices.push(notice));
    }
}

/// A run directory with a journal, and a folder for chats.
struct World {
    folder: TempDir,
    config: ClusterConfig,
    tokenizer: Arc<ChatTokenizer>,
}

/// A launch of the intake.
struct Launched {
    recorder: Recorder,
    requests: Sender<IntakeRequest>,
    thread: JoinHandle<Stop>,
}

impl Launched {
    /// Asks something and waits for the answer.
    fn ask(&self, request: impl FnOnce(Reply) -> IntakeRequest) -> OperatorReply {
        let (reply, answer) = oneshot::channel();
        self.requests.send(request(reply)).expect("it lives");
        answer.blocking_recv().expect("an answer")
    }

    fn add(&self, files: &[&Path]) -> OperatorReply {
        let files = files.iter().map(|file| file.to_path_buf()).collect();
        self.ask(|reply| IntakeRequest::Add { files, reply })
    }

    fn retry(&self, samples: &[u64]) -> OperatorReply {
        let samples = samples.iter().copied().map(SampleSeq).collect();
        self.ask(|reply| IntakeRequest::Retry { samples, reply })
    }

    fn close(&self) -> OperatorReply {
        self.ask(|reply| IntakeRequest::Close { reply })
    }

    fn wait_for_event(&self, name: &str) {
        self.recorder.wait(name, |log| {
            log.events.iter().any(|event| event == name).then_some(())
        });
    }

    fn wait_for_samples(&self, count: u64) {
        self.recorder.wait(&format!("{count} samples"), |log| {
            assert!(log.taken_in <= count, "{} samples", log.taken_in);
            (log.taken_in == count && log.events.last().is_some_and(|event| event == "grown")).then_some(())
        });
    }

    fn warnings(&self) -> Vec<String> {
        self.recorder.with(|log| {
            let warnings = log.notices.iter().filter(|notice| notice.warning);
            warnings.map(|notice| notice.text.clone()).collect()
        })
    }

    /// Ends it as the end of the run does.
    fn end(self) -> Stop {
        drop(self.requests);
        self.thread.join().expect("it does not panic")
    }
}

impl World {
    fn new() -> Self {
        let mut config = ClusterConfig::default();
        config.training.tokens_per_row = 96;
        config.training.max_new_tokens = 8;
        config.training.rows_per_step = Some(1);
        config.samples.poll_interval_ms = 2;
        Self {
            folder: TempDir::new().expect("a temporary folder"),
            config,
            tokenizer: Arc::new(ChatTokenizer::load(Path::new(VERIFIER)).expect("the demo verifier's")),
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, lines: &[String]) -> PathBuf {
        let path = self.path(name);
        fs::write(
            &path,
            lines.iter().map(|line| format!("{line}\n")).collect::<String>(),
        )
        .expect("writable");
        path
    }

    fn append(&self, name: &str, text: &str) {
        let mut file = fs::OpenOptions::new()
            .append(true)
            .open(self.path(name))
            .expect("it is there");
        file.write_all(text.as_bytes()).expect("writable");
    }

    fn launch(&self) -> Launched {
        self.launch_for(usize::MAX)
    }

    /// Launches the intake of a coordinator that is killed after so many samples.
    fn launch_for(&self, left: usize) -> Launched {
        let path = self.path("journal");
        let (journal, replay) = Journal::open(&path).expect("a journal");
        let taken_in = |record: &&Record| matches!(record, Record::Accepted { .. } | Record::Refused { .. });
        let recorder = Recorder(Arc::new((
            Mutex::new(Log {
                journal,
                taken_in: replay.records.iter().filter(taken_in).count() as u64,
                events: Vec::new(),
                notices: Vec::new(),
                left,
            }),
            Condvar::new(),
        )));
        let (requests, receiver) = channel();
        let reader = Reader::new(
            self.config.clone(),
            self.tokenizer.clone(),
            VERIFIER_VOCAB_SIZE,
            &SampleBook::of(&replay.records),
            path,
            receiver,
            recorder.clone(),
        );
        Launched {
            recorder,
            requests,
            thread: std::thread::spawn(move || reader.run()),
        }
    }

    fn book(&self) -> SampleBook {
        SampleBook::of(&journal::read(&self.path("journal")).expect("a journal").records)
    }

    /// All samples as file, line, number within the line, and whether they are good; sorted.
    fn samples(&self) -> Vec<(String, u64, u32, bool)> {
        let mut samples: Vec<_> = self
            .book()
            .samples()
            .map(|(_, known)| {
                let name = Path::new(&known.source.file).file_name().expect("a file");
                let is_good = known.quarantine().is_none();
                (
                    name.to_string_lossy().into_owned(),
                    known.source.line,
                    known.ordinal,
                    is_good,
                )
            })
            .collect();
        samples.sort();
        samples
    }
}

fn chat(number: usize) -> String {
    format!(
        r#"{{"id": "c{number}", "messages": [{{"role": "user", "content": "Is it {number}?"}}, {{"role": "assistant", "content": "yes, {number}"}}]}}"#
    )
}

fn two_answers(number: usize) -> String {
    format!(
        r#"{{"messages": [{{"role": "user", "content": "{number}?"}}, {{"role": "assistant", "content": "yes"}}, {{"role": "user", "content": "and?"}}, {{"role": "assistant", "content": "no"}}]}}"#
    )
}

fn torn() -> String {
    r#"{"messages": [{"role": "us"#.to_owned()
}

fn said(reply: &OperatorReply) -> &str {
    match reply {
        OperatorReply::Done(text) | OperatorReply::Refused(text) => text,
        OperatorReply::Ranks(_) => panic!("nobody asked for ranks"),
    }
}

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
    // Another launch finds nothing new, and does not count again.
    let launched = world.launch();
    launched.close();
    launched.end();
    assert_eq!(world.samples().len(), 6);
    assert_eq!(world.book().uncounted_samples(), 0);
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
    assert!(
        said(&named).starts_with("1 samples are pending again"),
        "{named:?}"
    );
    assert!(
        said(&named).contains("sample 0") && said(&named).contains("no such sample"),
        "{named:?}"
    );
    let rest = launched.retry(&[]);
    assert!(said(&rest).contains("1 samples more were found"), "{rest:?}");
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
    assert!(
        said(&reply).starts_with("1 samples are pending again"),
        "{reply:?}"
    );
    launched.end();
    let last = journal::read(&world.path("journal")).expect("a journal").records;
    let retried = Record::Retried {
        sample: SampleSeq(1),
        stored: None,
    };
    assert!(last.contains(&retried), "{last:?}");
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
