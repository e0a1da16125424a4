//! What comes after the launch: requests, files in watched folders, lines at the end of files.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use eaglet_runtime::control::OperatorReply;
use eaglet_runtime::samples::{Source, Tail};

use super::files::{KnownFile, Taken, files_in, has_rested};
use super::reader::{Door, Reader, Stop};
use super::{IntakeRequest, Outlet};
use crate::engine::Event;

impl<O: Outlet> Reader<O> {
    /// Whether anything can come that nobody asks for.
    fn polls(&self) -> bool {
        let samples = &self.config.samples;
        matches!(self.door, Door::Open) && (samples.follow || !samples.watch.is_empty())
    }

    /// Waits for a request, or for the next look at files and folders.
    pub(super) fn wait(&mut self) -> Result<(), Stop> {
        if !self.polls() {
            let request = self.requests.recv().map_err(|_| Stop::Gone)?;
            return self.take(request);
        }
        match self.requests.recv_timeout(self.config.samples.poll_interval()) {
            Ok(request) => self.take(request),
            Err(RecvTimeoutError::Disconnected) => Err(Stop::Gone),
            Err(RecvTimeoutError::Timeout) => {
                self.watch(false)?;
                self.follow();
                Ok(())
            }
        }
    }

    /// Deals with the requests that have come, between two batches of a long file.
    pub(super) fn take_waiting(&mut self) -> Result<(), Stop> {
        loop {
            match self.requests.try_recv() {
                Ok(request) => self.take(request)?,
                Err(TryRecvError::Empty) => return Ok(()),
                Err(TryRecvError::Disconnected) => return Err(Stop::Gone),
            }
        }
    }

    fn take(&mut self, request: IntakeRequest) -> Result<(), Stop> {
        // An operator who has gone away needs no answer.
        match request {
            IntakeRequest::Add { files, reply } => {
                let answer = self.add(files)?;
                let _ = reply.send(answer);
            }
            IntakeRequest::Close { reply } => match &mut self.door {
                Door::Open => self.door = Door::Closing(vec![reply]),
                Door::Closing(replies) => replies.push(reply),
                Door::Closed => {
                    let _ = reply.send(OperatorReply::Done("the run was closed already".to_owned()));
                }
            },
            IntakeRequest::Retry { samples, reply } => {
                let answer = self.retry(&samples)?;
                let _ = reply.send(answer);
            }
        }
        Ok(())
    }

    /// Adds files, all or none.
    fn add(&mut self, files: Vec<PathBuf>) -> Result<OperatorReply, Stop> {
        if !matches!(self.door, Door::Open) {
            return Ok(OperatorReply::Refused(
                "the run takes no more samples: it was closed by `eaglet samples close`; start a new run"
                    .to_owned(),
            ));
        }
        for (index, file) in files.iter().enumerate() {
            let fault = if self.config.samples.held_out.contains(file) {
                Some(format!("{} is held out (samples.held_out)", file.display()))
            } else if files[..index].contains(file) {
                Some(format!("{} is named twice", file.display()))
            } else {
                let opened = Source::open(file, self.options(Tail::Final));
                opened.err().map(|error| error.to_string())
            };
            if let Some(fault) = fault {
                return Ok(OperatorReply::Refused(fault));
            }
        }
        let mut lines = Vec::new();
        for file in files {
            let shown = file.display();
            let known = self.files.iter_mut().find(|known| known.path == file);
            lines.push(match &known {
                None => {
                    format!("{shown} is added and will be read, also if the coordinator is started again")
                }
                Some(known) if known.is_due => format!("{shown} is part of the run and being read"),
                Some(_) => format!("{shown} is part of the run; what was appended to it is read"),
            });
            match known {
                Some(known) => {
                    known.is_due = true;
                    self.outlet.tell(Event::SourceAdded { file })?;
                }
                None => self.welcome(file)?,
            }
        }
        Ok(OperatorReply::Done(lines.join("\n")))
    }

    /// Looks for new files in the watched folders. At the launch, files that were written to just now are waited for.
    pub(super) fn watch(&mut self, is_launch: bool) -> Result<(), Stop> {
        if !matches!(self.door, Door::Open) {
            return Ok(());
        }
        let found = self.new_files();
        let rest = self.config.samples.poll_interval();
        let rested = |file: &PathBuf| self.config.samples.follow || has_rested(file, rest);
        if is_launch && !found.iter().all(rested) {
            // What somebody copies into the folder meanwhile comes later.
            self.wait_for_request(rest)?;
        }
        for file in found {
            if self.config.samples.follow || has_rested(&file, rest) {
                self.welcome(file)?;
            }
        }
        Ok(())
    }

    fn wait_for_request(&mut self, time: Duration) -> Result<(), Stop> {
        let until = Instant::now() + time;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.requests.recv_timeout(left) {
                Ok(request) => self.take(request)?,
                Err(RecvTimeoutError::Timeout) => return Ok(()),
                Err(RecvTimeoutError::Disconnected) => return Err(Stop::Gone),
            }
        }
    }

    /// Files in the watched folders that are not known yet.
    fn new_files(&mut self) -> Vec<PathBuf> {
        let mut found = Vec::new();
        for folder in self.config.samples.watch.clone() {
            match files_in(&folder) {
                Ok(files) => {
                    self.folder_complaints.remove(&folder);
                    found.extend(files);
                }
                Err(error) => {
                    let complaint = format!(
                        "samples.watch: {} cannot be read: {error}; it is looked at again",
                        folder.display()
                    );
                    let before = self.folder_complaints.insert(folder, complaint.clone());
                    if before.as_ref() != Some(&complaint) {
                        self.warn(complaint);
                    }
                }
            }
        }
        let held_out = &self.config.samples.held_out;
        found.retain(|file| !self.known.contains(file) && !held_out.contains(file));
        found
    }

    /// Marks files that have grown.
    fn follow(&mut self) {
        if self.config.samples.follow {
            for file in &mut self.files {
                file.is_due |= file.has_changed();
            }
        }
    }

    /// Before the door closes, what lies there counts, and a last line without its newline is a line.
    pub(super) fn look_once_more(&mut self) -> Result<(), Stop> {
        for file in self.new_files() {
            self.welcome(file)?;
        }
        if self.config.samples.follow {
            self.files.iter_mut().for_each(|file| file.is_due = true);
        }
        self.read_due()
    }

    pub(super) fn close(&mut self) -> Result<(), Stop> {
        let Door::Closing(replies) = std::mem::replace(&mut self.door, Door::Closed) else {
            return Ok(());
        };
        self.outlet.tell(Event::IntakeClosed)?;
        for reply in replies {
            let text = "nothing more is read; the run ends when all is trained";
            // An operator who has gone away needs no answer.
            let _ = reply.send(OperatorReply::Done(text.to_owned()));
        }
        Ok(())
    }

    /// INTAKE-1: the journal knows of a file before it is read.
    fn welcome(&mut self, file: PathBuf) -> Result<(), Stop> {
        let mut known = KnownFile::new(file.clone(), false, Taken::default());
        known.is_new = true;
        self.known.insert(file.clone());
        self.files.push(known);
        self.outlet.tell(Event::SourceAdded { file })
    }
}
