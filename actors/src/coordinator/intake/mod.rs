//! Reads sample files, watched folders and files that grow; cuts conversations into samples; counts the draft vocabulary.
//!
//! It lives as long as the run, on a thread of its own: after the preparation it reads what operators add, what appears
//! in watched folders and what is appended to files. A bad row or answer is told to the engine, which quarantines it; it
//! never stops a run. A file of `samples.files` that cannot be read at the start does; later ones only cause a warning.
//!
//! INTAKE-1: a file that comes after the launch is in the journal before the first sample of it is.
//! INTAKE-2: of each file the journal knows the last line that gave a sample, and how many that line gave. A later launch
//! goes on exactly behind them, so that no sample is lost or taken in twice.
//!
//! Files: `reader` what is read when, `arrivals` what comes later, `files` one file and its place, `convert` from a row to
//! samples, `retry` quarantined samples again.

mod arrivals;
mod convert;
mod files;
mod reader;
mod retry;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc;

use eaglet_runtime::control::OperatorReply;
use eaglet_runtime::ids::SampleSeq;
use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{ChatTokenizer, Row};
use ractor::ActorRef;
use tokio::runtime::Handle;

pub(crate) use self::files::files_in;
use self::reader::{Reader, Stop};
use super::cluster::ClusterMessage;
use super::operator::Reply;
use crate::config::ClusterConfig;
use crate::engine::{Event, Notice};
use crate::journal::{SampleBook, SampleSource};

/// A sample on its way in, or the reason why there is none.
pub(super) type Verdict = Result<Sample, String>;

/// Something to store and to tell the engine.
pub(super) enum IntakeItem {
    /// A row or answer was read.
    Arrived { source: SampleSource, verdict: Verdict },
    /// A quarantined sample is to be tried again; with what it is now, if it had been refused on arrival.
    Retried {
        sample: SampleSeq,
        mended: Option<Sample>,
    },
}

/// What an operator wants read.
pub(super) enum IntakeRequest {
    /// Read these files, too.
    Add { files: Vec<PathBuf>, reply: Reply },
    /// Read nothing more.
    Close { reply: Reply },
    /// Try quarantined samples again; none stands for all.
    Retry { samples: Vec<SampleSeq>, reply: Reply },
}

impl IntakeRequest {
    /// Answers that it is not done.
    pub(super) fn refuse(self, reason: &str) {
        let (Self::Add { reply, .. } | Self::Close { reply } | Self::Retry { reply, .. }) = self;
        // An operator who has gone away needs no answer.
        let _ = reply.send(OperatorReply::Refused(reason.to_owned()));
    }
}

/// Where all goes that was read. An error means that nobody takes it any more.
trait Outlet {
    /// Hands samples over; returns when they are stored and in the journal.
    fn hand_over(&mut self, items: Vec<IntakeItem>) -> Result<(), Stop>;
    /// Tells the engine something; returns when it has been acted upon.
    fn tell(&mut self, event: Event) -> Result<(), Stop>;
    /// Tells people something.
    fn notice(&mut self, notice: Notice);
}

/// The name that a row gives itself.
fn name_of(row: &Row) -> Option<String> {
    match &row.conversation {
        Ok(conversation) => conversation.id.clone(),
        Err(quarantine) => quarantine.id.clone(),
    }
}

/// What the intake is made from.
pub(super) struct IntakeArguments {
    pub(super) config: ClusterConfig,
    pub(super) tokenizer: Arc<ChatTokenizer>,
    pub(super) verifier_vocab_size: usize,
    /// What earlier launches have taken in.
    pub(super) book: SampleBook,
    /// The journal, which is read again when quarantined samples are retried.
    pub(super) journal: PathBuf,
    pub(super) cluster: ActorRef<ClusterMessage>,
    pub(super) requests: mpsc::Receiver<IntakeRequest>,
}

/// Starts the intake. It ends when the cluster does, and ends the cluster if it cannot go on.
pub(super) fn start(arguments: IntakeArguments) {
    let cluster = arguments.cluster.clone();
    let runtime = Handle::current();
    let reading = tokio::task::spawn_blocking(move || {
        let outlet = ClusterOutlet {
            cluster: arguments.cluster,
            runtime,
        };
        let reader = Reader::new(
            arguments.config,
            arguments.tokenizer,
            arguments.verifier_vocab_size,
            &arguments.book,
            arguments.journal,
            arguments.requests,
            outlet,
        );
        // It has a place for each sample, and the reader lives long.
        drop(arguments.book);
        reader.run()
    });
    tokio::spawn(async move {
        let report = match reading.await {
            Ok(Stop::Gone) => return,
            Ok(Stop::Broken(report)) => report,
            Err(error) => format!("the intake ended badly: {error}; see the coordinator's log"),
        };
        // A cluster that is gone has ended already.
        let _ = cluster.cast(ClusterMessage::Event(Event::Broken { report }));
    });
}

/// Calls the root actor and waits for its answer, which is the back-pressure.
struct ClusterOutlet {
    cluster: ActorRef<ClusterMessage>,
    runtime: Handle,
}

impl Outlet for ClusterOutlet {
    fn hand_over(&mut self, items: Vec<IntakeItem>) -> Result<(), Stop> {
        let cluster = &self.cluster;
        self.runtime
            .block_on(async { ractor::call!(cluster, ClusterMessage::Intake, items) })
            .map_err(|_| Stop::Gone)
    }

    fn tell(&mut self, event: Event) -> Result<(), Stop> {
        let cluster = &self.cluster;
        self.runtime
            .block_on(async { ractor::call!(cluster, ClusterMessage::Tell, event) })
            .map_err(|_| Stop::Gone)
    }

    fn notice(&mut self, mut notice: Notice) {
        // Names of files may hold anything: nothing of it may steer a terminal.
        notice.text = notice.text.replace(char::is_control, "\u{fffd}");
        // A cluster that is gone is noticed by the next call.
        let _ = self.cluster.cast(ClusterMessage::Notice(notice));
    }
}
