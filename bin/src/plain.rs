//! The run as lines, for logs and pipes: events as they happen, and one line of numbers every few seconds.

use std::fmt::Write as _;
use std::io::{self, Write};
use std::time::Duration;

use eaglet_actors::monitor::Snapshot;
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

use crate::cli::LogFormat;
use crate::live::{duration, grouped, short};

/// What has been printed of a run, so that nothing is printed twice.
pub(crate) struct PlainView {
    format: LogFormat,
    events_printed: u64,
    numbers_printed: Option<(u64, usize)>,
}

/// The numbers of a snapshot, as a line of JSON.
#[derive(Serialize)]
struct Numbers<'a> {
    run: &'a str,
    phase: &'a str,
    step: u64,
    total_steps: Option<u64>,
    epoch: u64,
    loss: Option<f32>,
    learning_rate: f64,
    acceptance_length: Option<f32>,
    training_tokens_per_s: f32,
    extraction_tokens_per_s: f32,
    samples: eaglet_actors::monitor::SampleCounts,
    eta_s: Option<u64>,
}

impl PlainView {
    /// Nothing printed yet.
    pub(crate) const fn new(format: LogFormat) -> Self {
        Self {
            format,
            events_printed: 0,
            numbers_printed: None,
        }
    }

    /// Lines for the events that are new; events that fell out of the snapshot meanwhile are counted.
    pub(crate) fn events(&mut self, snapshot: &Snapshot) -> Vec<String> {
        let first = snapshot.events_total.saturating_sub(snapshot.events.len() as u64);
        let mut lines = Vec::new();
        if first > self.events_printed {
            let missed = first - self.events_printed;
            lines.push(self.event_line("", &format!("{missed} events are only in the log files")));
        }
        let printed = self.events_printed.saturating_sub(first) as usize;
        for event in snapshot.events.iter().skip(printed) {
            lines.push(self.event_line(&event.time, &event.text));
        }
        self.events_printed = snapshot.events_total.max(self.events_printed);
        lines
    }

    fn event_line(&self, time: &str, text: &str) -> String {
        match self.format {
            LogFormat::Text => format!("{time} {text}").trim_start().to_owned(),
            LogFormat::Json => serde_json::json!({ "time": time, "event": text }).to_string(),
        }
    }

    /// The line of numbers; `None` if no step and no evaluation has come since the last one.
    pub(crate) fn numbers(&mut self, snapshot: &Snapshot) -> Option<String> {
        let now = (snapshot.step.0, snapshot.acceptance.history.len());
        if self.numbers_printed == Some(now) {
            return None;
        }
        self.numbers_printed = Some(now);
        Some(match self.format {
            LogFormat::Text => text_line(snapshot),
            LogFormat::Json => json_line(snapshot),
        })
    }
}

fn text_line(snapshot: &Snapshot) -> String {
    let mut line = format!("{} step {}", snapshot.phase, grouped(snapshot.step.0));
    // Writing to a text cannot fail.
    if let Some(total) = snapshot.total_steps {
        let _ = write!(line, "/{}", grouped(total.0));
    }
    if let Some(loss) = snapshot.latest_loss() {
        let _ = write!(line, "  loss {loss:.4}  lr {:.2e}", snapshot.learning_rate);
    }
    if let Some(length) = snapshot.acceptance.latest {
        let _ = write!(line, "  acceptance {length:.3}");
    }
    let _ = write!(
        line,
        "  train {} tok/s  extract {} tok/s  trained {}/{} samples",
        short(f64::from(snapshot.training_tokens_per_s)),
        short(f64::from(snapshot.extraction_tokens_per_s)),
        grouped(snapshot.samples.trained),
        grouped(snapshot.samples.intake),
    );
    if snapshot.samples.quarantined > 0 {
        let _ = write!(line, "  quarantined {}", grouped(snapshot.samples.quarantined));
    }
    if let (Some(eta_s), None) = (snapshot.eta_s, &snapshot.finished) {
        let _ = write!(line, "  eta {}", duration(eta_s));
    }
    line
}

fn json_line(snapshot: &Snapshot) -> String {
    let numbers = Numbers {
        run: &snapshot.run,
        phase: &snapshot.phase,
        step: snapshot.step.0,
        total_steps: snapshot.total_steps.map(|total| total.0),
        epoch: snapshot.epoch.0,
        loss: snapshot.latest_loss(),
        learning_rate: snapshot.learning_rate,
        acceptance_length: snapshot.acceptance.latest,
        training_tokens_per_s: snapshot.training_tokens_per_s,
        extraction_tokens_per_s: snapshot.extraction_tokens_per_s,
        samples: snapshot.samples,
        eta_s: snapshot.eta_s,
    };
    serde_json::to_string(&numbers).expect("numbers and texts are always JSON")
}

/// Prints events at once and numbers every `interval`, until the run has finished or the sender is gone.
///
/// # Errors
/// If `out` cannot be written to.
pub(crate) async fn follow(
    mut snapshots: watch::Receiver<Snapshot>,
    format: LogFormat,
    interval: Duration,
    mut out: impl Write,
) -> io::Result<()> {
    let mut view = PlainView::new(format);
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let (is_tick, is_open) = tokio::select! {
            _ = ticks.tick() => (true, true),
            changed = snapshots.changed() => (false, changed.is_ok()),
        };
        let snapshot = snapshots.borrow_and_update().clone();
        let is_last = !is_open || snapshot.finished.is_some();
        for line in view.events(&snapshot) {
            writeln!(out, "{line}")?;
        }
        if (is_tick || is_last)
            && let Some(line) = view.numbers(&snapshot)
        {
            writeln!(out, "{line}")?;
        }
        if let (true, Some(finished)) = (is_last, &snapshot.finished) {
            writeln!(out, "{}", view.event_line("", finished))?;
        }
        out.flush()?;
        if is_last {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Snapshot {
        serde_json::from_str(include_str!("live/example.json")).expect("the example is a snapshot")
    }

    #[test]
    fn numbers_come_once_a_step_as_text_or_json() {
        let mut snapshot = example();
        let mut view = PlainView::new(LogFormat::Text);
        assert_eq!(
            view.numbers(&snapshot).as_deref(),
            Some(
                "training step 240/510  loss 1.2992  lr 5.30e-4  acceptance 2.310  train 3.1k tok/s  \
                 extract 5.2k tok/s  trained 1,128/2,400 samples  quarantined 4  eta 3m 12s"
            )
        );
        assert_eq!(view.numbers(&snapshot), None);
        snapshot.step = snapshot.step.next();
        let mut view = PlainView::new(LogFormat::Json);
        let line = view.numbers(&snapshot).expect("a step has come");
        let json: serde_json::Value = serde_json::from_str(&line).expect("a line of JSON");
        assert_eq!(
            (&json["step"], &json["samples"]["trained"]),
            (&241.into(), &1128.into())
        );
    }

    #[test]
    fn events_come_once_each_and_lost_ones_are_counted() {
        let mut snapshot = example();
        snapshot.events_total = 4;
        let mut view = PlainView::new(LogFormat::Text);
        let lines = view.events(&snapshot);
        assert_eq!(
            (lines.len(), &*lines[1]),
            (4, "14:02:58 checkpoint of step 200 written")
        );
        assert!(view.events(&snapshot).is_empty());
        snapshot.events_total = 10;
        let lines = view.events(&snapshot);
        assert_eq!(
            (lines.len(), &*lines[0]),
            (5, "2 events are only in the log files")
        );
        let mut view = PlainView::new(LogFormat::Json);
        snapshot.events_total = 4;
        assert_eq!(
            view.events(&snapshot)[1],
            r#"{"time":"14:02:58","event":"checkpoint of step 200 written"}"#
        );
    }

    #[tokio::test]
    async fn following_ends_with_the_run_or_with_its_sender() {
        let (sender, receiver) = watch::channel(example());
        let mut out = Vec::new();
        let finished = async {
            let mut snapshot = example();
            snapshot.finished = Some("finished: 510 steps".to_owned());
            sender.send(snapshot).expect("there is a receiver");
        };
        let hour = Duration::from_secs(3600);
        let (followed, ()) = tokio::join!(
            follow(receiver.clone(), LogFormat::Text, hour, &mut out),
            finished
        );
        followed.expect("memory can be written to");
        let text = String::from_utf8(out).expect("texts only");
        assert!(
            text.contains("training step 240/510") && text.ends_with("\nfinished: 510 steps\n"),
            "{text}"
        );
        drop(sender);
        let mut out = Vec::new();
        follow(receiver, LogFormat::Text, hour, &mut out)
            .await
            .expect("memory can be written to");
        assert!(
            String::from_utf8(out)
                .expect("texts only")
                .contains("step 240/510")
        );
    }
}
