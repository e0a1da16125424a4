//! The command line: what can be asked for, and what the exit code says.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use eaglet_runtime::ids::Seat;

/// Trains EAGLE-3 draft models on a supervised cluster of ranks.
#[derive(Debug, Parser)]
#[command(version, arg_required_else_help = true)]
pub(crate) struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What the command can do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Start a cluster, or go on with a run that was stopped, and show its progress.
    Launch(LaunchArgs),
    /// Look at samples.
    #[command(subcommand)]
    Samples(SamplesCommand),
    /// Measure what this machine does.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Be the occupant of a seat; started by the coordinator.
    #[command(hide = true)]
    Rank(RankArgs),
    /// Draw a snapshot of the live view as an SVG picture.
    #[command(hide = true)]
    LivePicture(PictureArgs),
}

/// Format of log files, and of progress lines where there is no terminal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl LogFormat {
    /// The word that stands for it on the command line.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
        }
    }
}

/// `eaglet launch`.
#[derive(Debug, Args)]
pub(crate) struct LaunchArgs {
    /// The cluster file.
    #[arg(value_name = "CLUSTER_TOML")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// Format of log files, and of progress lines where there is no terminal.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
    /// Print lines even if stdout is a terminal.
    #[arg(long)]
    pub(crate) plain: bool,
}

/// `eaglet rank`.
#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// Where the coordinator listens.
    #[arg(long)]
    pub(crate) coordinator: String,
    /// The seat to occupy.
    #[arg(long)]
    pub(crate) seat: Seat,
    /// Which occupant of the seat this is.
    #[arg(long)]
    pub(crate) generation: u32,
    /// Directory of the run.
    #[arg(long)]
    pub(crate) run_directory: PathBuf,
    /// The process that started this one; the rank ends with it.
    #[arg(long)]
    pub(crate) parent: u32,
    /// Format of the log file.
    #[arg(long, value_enum, default_value_t)]
    pub(crate) log_format: LogFormat,
}

/// `eaglet samples`.
#[derive(Debug, Subcommand)]
pub(crate) enum SamplesCommand {
    /// Print samples as they are trained; what the draft learns is highlighted.
    Show(ShowArgs),
}

/// `eaglet samples show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A JSONL file of conversations.
    pub(crate) file: PathBuf,
    /// The cluster file that names the verifier, whose tokenizer and template are used.
    #[arg(long, default_value = "cluster.toml")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// How many samples to print.
    #[arg(short = 'n', long, default_value_t = 3)]
    pub(crate) count: usize,
}

/// `eaglet bench`.
#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// Hurt a small cluster again and again: how long until a fault is noticed, and until training goes on.
    Recovery(RecoveryArgs),
}

/// `eaglet bench recovery`.
#[derive(Debug, Args)]
pub(crate) struct RecoveryArgs {
    /// The cluster file that names verifier and samples; its ranks and its training are replaced.
    #[arg(long, default_value = "cluster.toml")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// How many draft ranks.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) drafts: u16,
    /// Weights and moments of a draft rank, in MB.
    #[arg(long, default_value_t = 100)]
    pub(crate) state_mb: usize,
    /// How often each fault strikes each role.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) repeats: u32,
    /// Print one JSON object with all samples instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// `eaglet live-picture`.
#[derive(Debug, Args)]
pub(crate) struct PictureArgs {
    /// A snapshot, as JSON.
    pub(crate) snapshot: PathBuf,
    /// The picture to write.
    pub(crate) out: PathBuf,
    /// Width, in cells.
    #[arg(long, default_value_t = 100)]
    pub(crate) columns: u16,
    /// Height, in cells.
    #[arg(long, default_value_t = 30)]
    pub(crate) rows: u16,
}

/// How a command ended. Usage errors are 2, by clap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It did all that was asked.
    Done,
    /// It failed while it worked.
    Failed,
    /// The cluster file or an input was wrong; nothing was started.
    BadInput,
    /// Somebody stopped it; what was committed is safe, the same command goes on with it.
    Interrupted,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(match exit {
            Exit::Done => 0,
            Exit::Failed => 1,
            Exit::BadInput => 2,
            // As a shell reports a process that SIGINT ended.
            Exit::Interrupted => 130,
        })
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent_and_hides_what_only_the_coordinator_calls() {
        Cli::command().debug_assert();
        let help = Cli::command().render_long_help().to_string();
        assert!(help.contains("launch") && help.contains("samples"), "{help}");
        assert!(
            !help.contains("live-picture") && !help.contains("occupant"),
            "{help}"
        );
    }

    #[test]
    fn launch_and_rank_are_read() {
        let cli = Cli::try_parse_from([
            "eaglet",
            "launch",
            "c.toml",
            "--set",
            "run.seed=1",
            "--set",
            "run.name=a",
            "--plain",
        ])
        .expect("it is right");
        let Command::Launch(launch) = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(
            (launch.sets, launch.plain),
            (vec!["run.seed=1".to_owned(), "run.name=a".to_owned()], true)
        );
        assert_eq!(launch.log_format, LogFormat::Text);
        let words = [
            "eaglet",
            "rank",
            "--coordinator",
            "127.0.0.1:9",
            "--seat",
            "draft-1",
            "--generation",
            "2",
        ];
        let rest = [
            "--run-directory",
            "runs/a",
            "--parent",
            "1",
            "--log-format",
            LogFormat::Json.word(),
        ];
        let cli = Cli::try_parse_from(words.into_iter().chain(rest)).expect("it is right");
        let Command::Rank(rank) = cli.command else {
            panic!("{cli:?}")
        };
        assert_eq!(
            (rank.seat, rank.generation, rank.log_format),
            (Seat::draft(1), 2, LogFormat::Json)
        );
        let error = Cli::try_parse_from(["eaglet", "rank", "--seat", "draft1"]).expect_err("it is wrong");
        assert!(
            error
                .to_string()
                .contains("`draft1` is no seat; seats are written like draft-0"),
            "{error}"
        );
    }

    #[test]
    fn exit_codes_are_told_apart() {
        let codes = [Exit::Done, Exit::Failed, Exit::BadInput, Exit::Interrupted].map(ExitCode::from);
        assert_eq!(codes, [0, 1, 2, 130].map(ExitCode::from));
    }
}
