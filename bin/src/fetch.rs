//! Shows how a verifier comes from the Hub: a bar on a terminal, lines elsewhere, and both in the log.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use eaglet_actors::config::ClusterConfig;
use eaglet_actors::verifier_source;
use eaglet_runtime::hub::{HubError, Need, Progress};
use indicatif::{ProgressBar, ProgressStyle};

use crate::live::bytes;

/// Time between lines.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Fetches what is needed of a verifier on the Hub and makes `verifier.path` local; does nothing for a local one.
///
/// # Errors
/// When it cannot be had.
pub(crate) fn verifier(config: &mut ClusterConfig, need: Need) -> Result<(), HubError> {
    let mut shown = Shown::new();
    verifier_source::fetch(config, need, |progress| shown.show(progress))
}

/// What is on the screen.
struct Shown {
    /// Where there is a terminal, from the first news on.
    bar: Option<ProgressBar>,
    last_line: Option<Instant>,
    file: String,
    pause: Option<String>,
}

impl Shown {
    fn new() -> Self {
        Self {
            bar: None,
            last_line: None,
            file: String::new(),
            pause: None,
        }
    }

    fn show(&mut self, progress: &Progress) {
        if progress.file != self.file {
            self.file.clone_from(&progress.file);
            tracing::info!(file = progress.file, "fetching from the hub");
        }
        if progress.pause != self.pause {
            self.pause.clone_from(&progress.pause);
            if let Some(why) = &progress.pause {
                tracing::warn!(file = progress.file, why, "fetching pauses");
            }
        }
        if io::stderr().is_terminal() {
            self.bar(progress);
            return;
        }
        let is_due = self.last_line.is_none_or(|last| last.elapsed() >= LINE_INTERVAL);
        // What is here already is not worth a line.
        if is_due && progress.done_bytes < progress.total_bytes {
            self.last_line = Some(Instant::now());
            let line = line(progress);
            tracing::info!("{line}");
            // If stderr is gone there is nobody left who could be told.
            let _ = writeln!(io::stderr().lock(), "eaglet: {line}");
        }
    }

    fn bar(&mut self, progress: &Progress) {
        let bar = self.bar.get_or_insert_with(|| {
            // The template is a constant that parses; a bar without it is no reason to end.
            let style = ProgressStyle::with_template(
                "{msg:40!} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            );
            let bar = ProgressBar::new(progress.total_bytes);
            bar.set_position(progress.done_bytes);
            bar.reset_eta();
            style.map_or(bar.clone(), |style| bar.with_style(style))
        });
        bar.set_length(progress.total_bytes);
        bar.set_position(progress.done_bytes);
        let message = progress.pause.as_ref().unwrap_or(&progress.file);
        bar.set_message(message.clone());
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn line(progress: &Progress) -> String {
    let Progress {
        file,
        done_bytes,
        total_bytes,
        pause,
    } = progress;
    let (done, total) = (bytes(*done_bytes), bytes(*total_bytes));
    match pause {
        None => format!("fetching {file}: {done} of {total} are here"),
        Some(why) => format!("fetching {file} pauses: {why}; {done} of {total} are here"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_how_far_it_is_and_why_it_waits() {
        let mut progress = Progress {
            file: "model.safetensors".to_owned(),
            done_bytes: 3 << 20,
            total_bytes: 5 << 30,
            pause: None,
        };
        assert_eq!(
            line(&progress),
            "fetching model.safetensors: 3 MiB of 5.0 GiB are here"
        );
        progress.pause = Some("connection reset".to_owned());
        assert_eq!(
            line(&progress),
            "fetching model.safetensors pauses: connection reset; 3 MiB of 5.0 GiB are here"
        );
    }
}
