//! Where log lines go: a file per process in the run's directory, and errors to stderr where nobody draws over it.
//!
//! Lines are written at once and whole, with no thread between: ranks are killed on purpose, and the last line before
//! a death is the one that is wanted. `EAGLET_LOG` takes filters such as `debug` or `eaglet_runtime=trace`.

use std::backtrace::Backtrace;
use std::fs::File;
use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::Subscriber;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

use crate::cli::LogFormat;

/// Variable that filters log lines.
const FILTER_VARIABLE: &str = "EAGLET_LOG";

/// Why logging could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoggingError {
    /// The log file cannot be opened.
    #[error("cannot write the log file {}: {source}; is the run's directory writable?", path.display())]
    File {
        /// The log file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The filter is not understood.
    #[error("{FILTER_VARIABLE} is no filter: {0}; write for example debug or eaglet_runtime=trace")]
    Filter(#[from] tracing_subscriber::filter::FromEnvError),
    /// Something else logs already.
    #[error("cannot start logging: {0}")]
    Twice(#[from] tracing_subscriber::util::TryInitError),
}

/// Starts logging to `<directory>/logs/<process>.log`, which is appended to. With `errors_to_stderr`, errors also go
/// to stderr. Panics are logged as errors, with a backtrace in the file only. Returns the log file's path.
///
/// # Errors
/// If the file cannot be opened, `EAGLET_LOG` is malformed, or logging was started before.
pub(crate) fn start(
    directory: &Path,
    process: &str,
    format: LogFormat,
    errors_to_stderr: bool,
) -> Result<PathBuf, LoggingError> {
    let path = directory.join("logs").join(format!("{process}.log"));
    let open = || {
        std::fs::create_dir_all(directory.join("logs"))?;
        File::options().create(true).append(true).open(&path)
    };
    let file = open().map_err(|source| LoggingError::File {
        path: path.clone(),
        source,
    })?;
    let filter = EnvFilter::builder()
        .with_env_var(FILTER_VARIABLE)
        .with_default_directive(LevelFilter::INFO.into())
        .from_env()?;
    subscriber(file, format, filter, errors_to_stderr).try_init()?;
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        tracing::error!("{panic}");
        tracing::info!("backtrace of the panic:\n{}", Backtrace::force_capture());
        if !errors_to_stderr {
            before(panic);
        }
    }));
    Ok(path)
}

fn subscriber(
    file: File,
    format: LogFormat,
    filter: EnvFilter,
    errors_to_stderr: bool,
) -> impl Subscriber + Send + Sync {
    let file = Arc::new(file);
    let to_file = match format {
        LogFormat::Text => fmt::layer().with_ansi(false).with_writer(file).boxed(),
        LogFormat::Json => fmt::layer().json().flatten_event(true).with_writer(file).boxed(),
    };
    let to_stderr = errors_to_stderr.then(|| {
        let layer = fmt::layer()
            .without_time()
            .with_target(false)
            .with_ansi(io::stderr().is_terminal())
            .with_ansi(io::stderr().is_terminal())
            .with_writer(io::stderr);
        layer.with_filter(LevelFilter::ERROR)
    });
    tracing_subscriber::registry()
        .with(to_file.with_filter(filter))
        .with(to_stderr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(format: LogFormat) -> String {
        let folder = tempfile::TempDir::new().expect("a temporary folder");
        let path = folder.path().join("draft-0.log");
        let file = File::create(&path).expect("writable");
        let subscriber = subscriber(file, format, EnvFilter::new("info"), false);
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(step = 7, "committed");
            tracing::debug!("not wanted");
        });
        std::fs::read_to_string(&path).expect("it was written")
    }

    #[test]
    fn lines_are_text_or_json_and_filtered() {
        let text = logged(LogFormat::Text);
        assert!(
            text.lines().count() == 1 && text.contains("INFO") && text.contains("committed step=7"),
            "{text}"
        );
        let json: serde_json::Value =
            serde_json::from_str(&logged(LogFormat::Json)).expect("one JSON object");
        assert_eq!(
            (&json["message"], &json["step"], &json["level"]),
            (&"committed".into(), &7.into(), &"INFO".into())
        );
    }
}
