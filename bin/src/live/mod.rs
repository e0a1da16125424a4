//! The live view of a run in a terminal.
//!
//! It has a thread of its own and only reads snapshots, so that a slow terminal never holds the run up. The terminal is
//! given back on every way out, panics included.

pub(crate) mod format;
mod parts;
mod picture;
#[cfg(test)]
mod tests;
mod view;

use std::io::{self, Write};
use std::thread::JoinHandle;
use std::time::Duration;

use eaglet_actors::monitor::Snapshot;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use tokio::sync::watch;

pub(crate) use format::{bytes, duration, grouped, short};
pub(crate) use picture::svg;
use view::View;

/// Time between looks at the keyboard and at new snapshots.
const FRAME: Duration = Duration::from_millis(100);

/// Takes the terminal and shows snapshots until the run has finished or the sender is gone. `on_quit` is called each
/// time somebody presses q or Ctrl-C; the view stays, to show how the run stops.
///
/// # Errors
/// If there is no thread to be had. What goes wrong with the terminal is the thread's result; the run can go on.
pub(crate) fn show(
    snapshots: watch::Receiver<Snapshot>,
    on_quit: impl FnMut() + Send + 'static,
) -> io::Result<JoinHandle<io::Result<()>>> {
    std::thread::Builder::new()
        .name("live view".to_owned())
        .spawn(move || run(snapshots, on_quit))
}

/// Gives the terminal back when it goes.
struct TerminalGuard;

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        // On the way out there is nobody left who could be told.
        let _ = ratatui::try_restore();
    }
}

fn run(mut snapshots: watch::Receiver<Snapshot>, mut on_quit: impl FnMut()) -> io::Result<()> {
    let guard = TerminalGuard;
    let mut terminal = ratatui::try_init()?;
    let last = loop {
        let snapshot = snapshots.borrow_and_update().clone();
        terminal.draw(|frame| frame.render_widget(View(&snapshot), frame.area()))?;
        if snapshot.finished.is_some() || snapshots.has_changed().is_err() {
            break snapshot;
        }
        if event::poll(FRAME)? && is_quit(&event::read()?) {
            on_quit();
        }
    };
    drop(guard);
    // The alternate screen is gone with all it showed; this line stays.
    let summary = last
        .finished
        .unwrap_or_else(|| format!("{} ended at step {}", last.run, last.step));
    writeln!(io::stdout().lock(), "{summary}")
}

fn is_quit(event: &Event) -> bool {
    let Event::Key(key) = event else { return false };
    let is_control_c = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
    key.kind == KeyEventKind::Press && (key.code == KeyCode::Char('q') || is_control_c)
}
