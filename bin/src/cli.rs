//! The command line: what can be asked for, and what the exit code says.

use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand, ValueEnum};
use eaglet_runtime::ids::{Role, Seat};

use crate::bench::BenchCommand;

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
    /// Look at all that can be known before a launch: files, memory, disk, links, samples, speed. Loads no weights.
    Check(CheckArgs),
    /// List the CPUs and GPUs of this machine, or say why it has none.
    Devices(DevicesArgs),
    /// Start a cluster, or go on with a run that was stopped, and show its progress.
    Launch(LaunchArgs),
    /// Run ranks of a cluster on this machine, for a coordinator on another one.
    Join(JoinArgs),
    /// Write the hidden states of a cluster's samples to files, in the layout of speculators, instead of training on them.
    Extract(ExtractArgs),
    /// Look at the ranks of a live run, or change them.
    #[command(subcommand)]
    Ranks(RanksCommand),
    /// Look at samples, or give a live run more of them.
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

/// `eaglet check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The cluster file.
    #[arg(value_name = "CLUSTER_TOML")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
    /// Check an `eaglet extract` to this folder instead of a training run.
    #[arg(long, value_name = "DIR")]
    pub(crate) extract: Option<PathBuf>,
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
    /// Warnings count as problems.
    #[arg(long)]
    pub(crate) strict: bool,
    /// Memory of each host, if the run will be on another machine: 512GB, 1.5TB, 64GiB.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) memory: Option<u64>,
    /// Free room on the disk of the run directory, likewise.
    #[arg(long, value_name = "SIZE", value_parser = bytes)]
    pub(crate) disk: Option<u64>,
    /// Floating-point operations per second of each rank, such as 4e13, instead of a short measurement.
    #[arg(long, value_name = "FLOPS", value_parser = rate)]
    pub(crate) flops: Option<f64>,
    /// Rows of the sample files that are read.
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub(crate) samples: usize,
}

/// `eaglet devices`.
#[derive(Debug, Args)]
pub(crate) struct DevicesArgs {
    /// Print one JSON document.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Reads a number of bytes with a unit.
fn bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let end = text
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let wrong = || format!("`{text}` is no size; write for example 512GB, 1.5TB or 64GiB");
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let (base, prefix) = match unit.trim().to_ascii_lowercase().trim_end_matches('b') {
        prefix if prefix.ends_with('i') => (1024_f64, prefix.trim_end_matches('i').to_owned()),
        prefix => (1000_f64, prefix.to_owned()),
    };
    let power = match prefix.as_str() {
        "" => 0,
        "k" => 1,
        "m" => 2,
        "g" => 3,
        "t" => 4,
        _ => return Err(wrong()),
    };
    Ok((number * base.powi(power)) as u64)
}

/// Reads a positive number.
fn rate(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().parse().ok();
    number
        .filter(|number| number.is_finite() && *number > 0.0)
        .ok_or_else(|| format!("`{text}` is no number above 0; write for example 4e13"))
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

/// `eaglet join`.
#[derive(Debug, Args)]
pub(crate) struct JoinArgs {
    /// Directory of the run, on a file system that all hosts share.
    #[arg(value_name = "RUN_DIRECTORY")]
    pub(crate) run: PathBuf,
    /// What `[[hosts]]` of the cluster file calls this machine; default: its host name.
    #[arg(long, value_name = "NAME")]
    pub(crate) host: Option<String>,
    /// How long a coordinator is waited for, in s: at the start, and when one was lost.
    #[arg(long, value_name = "S", default_value_t = 600)]
    pub(crate) patience_s: u64,
    /// Leave when the coordinator is lost, instead of waiting for it to come back.
    #[arg(long)]
    pub(crate) once: bool,
}

/// `eaglet extract`.
#[derive(Debug, Args)]
pub(crate) struct ExtractArgs {
    #[command(flatten)]
    pub(crate) launch: LaunchArgs,
    /// The folder to write to. Called again with the same folder it goes on where it was stopped.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
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
    /// What `cluster.toml` calls this machine.
    #[arg(long)]
    pub(crate) host: String,
    /// Address at which ranks of other machines reach this one.
    #[arg(long)]
    pub(crate) network: Option<IpAddr>,
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

/// Which run is meant.
#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// Directory of the run; default: the one that the cluster file names.
    #[arg(long, value_name = "DIR")]
    pub(crate) run: Option<PathBuf>,
    /// The cluster file.
    #[arg(long, value_name = "CLUSTER_TOML", default_value = "cluster.toml")]
    pub(crate) cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(crate) sets: Vec<String>,
}

/// `eaglet ranks`.
#[derive(Debug, Subcommand)]
pub(crate) enum RanksCommand {
    /// Print the ranks of a live run.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        run: RunArgs,
    },
    /// Start a rank more; the weights do not change by it. Of a verifier that is cut, start a whole replica.
    Add {
        /// What it does.
        #[arg(long)]
        role: RoleArg,
        /// CPU threads it computes with; 0 takes an even share of the machine's cores.
        #[arg(long, default_value_t = 0)]
        threads: u16,
        #[command(flatten)]
        run: RunArgs,
    },
    /// Let a rank leave at the next step boundary; its seat stays empty. Of a verifier that is cut, the whole replica leaves.
    Remove {
        /// Its seat, as in draft-1.
        seat: Seat,
        #[command(flatten)]
        run: RunArgs,
    },
    /// Kill a rank and fill its seat again, or fill a seat that was given up.
    Restart {
        /// Its seat, as in draft-1.
        seat: Seat,
        #[command(flatten)]
        run: RunArgs,
    },
}

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum RoleArg {
    /// Extracts hidden states.
    Verifier,
    /// Trains the draft.
    Draft,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Self {
        match role {
            RoleArg::Verifier => Self::Verifier,
            RoleArg::Draft => Self::Draft,
        }
    }
}

/// `eaglet samples`.
#[derive(Debug, Subcommand)]
pub(crate) enum SamplesCommand {
    /// Have a live run read more files.
    Add {
        /// JSONL files of conversations.
        #[arg(required = true)]
        files: Vec<PathBuf>,
        #[command(flatten)]
        run: RunArgs,
    },
    /// Have an open run read nothing more, so that it ends when all is trained.
    Close {
        #[command(flatten)]
        run: RunArgs,
    },
    /// Print the samples of a run that are quarantined, with their reasons; the run may be live or not.
    List {
        /// Print every sample, with where each of its passes stands.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        run: RunArgs,
    },
    /// Print samples as they are trained; what the draft learns is highlighted.
    Show(ShowArgs),
    /// Have a live run try quarantined samples again, after their lines were mended.
    Retry {
        /// Their numbers; none stands for all that are quarantined.
        samples: Vec<u64>,
        #[command(flatten)]
        run: RunArgs,
    },
}

/// `eaglet samples show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A JSONL file of conversations; the verifier of the cluster file reads it.
    #[arg(required_unless_present = "sample")]
    pub(crate) file: Option<PathBuf>,
    /// A sample of a run instead, by its number in `eaglet samples list`.
    #[arg(long, value_name = "N", conflicts_with_all = ["file", "count"])]
    pub(crate) sample: Option<u64>,
    /// How many samples of the file to print.
    #[arg(short = 'n', long, default_value_t = 3)]
    pub(crate) count: usize,
    #[command(flatten)]
    pub(crate) run: RunArgs,
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
            "--host",
            "local",
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
    fn sizes_and_rates_are_read() {
        let sizes = [
            ("17", 17),
            ("512GB", 512_000_000_000),
            ("1.5 TB", 1_500_000_000_000),
            ("64GiB", 64 << 30),
            ("3m", 3_000_000),
        ];
        for (text, size) in sizes {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for text in ["", "GB", "1.2.3GB", "5 parsecs", "-1GB"] {
            assert!(bytes(text).is_err(), "{text}");
        }
        assert_eq!(rate("4e13"), Ok(4e13));
        assert!(["0", "-1", "inf", "fast"].iter().all(|text| rate(text).is_err()));
    }

    #[test]
    fn commands_to_a_run_are_read() {
        let read = |words: &[&str]| Cli::try_parse_from([&["eaglet"], words].concat()).map(|cli| cli.command);
        let add = read(&[
            "ranks",
            "add",
            "--role",
            "draft",
            "--threads",
            "2",
            "--run",
            "runs/a",
        ]);
        let Ok(Command::Ranks(RanksCommand::Add { role, threads, run })) = add else {
            panic!("{add:?}")
        };
        assert_eq!((Role::from(role), threads), (Role::Draft, 2));
        assert_eq!(run.run, Some(PathBuf::from("runs/a")));
        let remove = read(&["ranks", "remove", "verifier-1"]);
        let Ok(Command::Ranks(RanksCommand::Remove { seat, run })) = remove else {
            panic!("{remove:?}")
        };
        assert_eq!(
            (seat, run.cluster),
            (Seat::verifier(1), PathBuf::from("cluster.toml"))
        );
        let retry = read(&["samples", "retry", "3", "5"]);
        let Ok(Command::Samples(SamplesCommand::Retry { samples, .. })) = retry else {
            panic!("{retry:?}")
        };
        assert_eq!(samples, [3, 5]);
        for wrong in [
            &["samples", "add"][..],
            &["samples", "show"],
            &["samples", "show", "a.jsonl", "--sample", "1"],
            &["ranks", "add", "--role", "drafts"],
            &["ranks", "restart", "draft"],
        ] {
            assert!(read(wrong).is_err(), "{wrong:?}");
        }
        assert!(read(&["samples", "show", "a.jsonl", "-n", "2"]).is_ok());
        assert!(read(&["samples", "show", "--sample", "1", "--run", "runs/a"]).is_ok());
    }

    #[test]
    fn exit_codes_are_told_apart() {
        let codes = [Exit::Done, Exit::Failed, Exit::BadInput, Exit::Interrupted].map(ExitCode::from);
        assert_eq!(codes, [0, 1, 2, 130].map(ExitCode::from));
    }
}
