//! A run directory, a coordinator that only keeps a journal, and chats.

mod arrivals;
mod retry;

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
