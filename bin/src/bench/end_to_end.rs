//! `eaglet bench end-to-end`: a whole run, from the launch to the last commit: how long it takes, and how its ranks spend
//! their time.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use eaglet_actors::config::ClusterConfig;
use eaglet_runtime::hub::Need;
use serde::Serialize;

use super::facts::{Machine, Spread, load};
use super::interrupt::Interrupt;
use super::print;
use super::run::{Run, StepLine, unix_ms};
use crate::cli::Exit;
use crate::{fetch, run as cluster_file};

/// `eaglet bench end-to-end`.
#[derive(Debug, Args)]
pub(crate) struct EndToEndArgs {
    /// The cluster file; the arguments below override its keys.
    #[arg(long, default_value = "cluster.toml")]
    cluster: PathBuf,
    /// Override a key of the cluster file; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    sets: Vec<String>,
    /// The verifier: a folder, a GGUF file, or a name on the Hub.
    #[arg(long, value_name = "DIR")]
    verifier: Option<PathBuf>,
    /// A JSONL file of conversations; may be repeated.
    #[arg(long, value_name = "FILE")]
    samples: Vec<PathBuf>,
    /// Hold every n-th conversation out and measure acceptance on it; 0 holds none out.
    #[arg(long, value_name = "N", default_value_t = 0)]
    held_out_every: u64,
    /// Capacity of a row.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    tokens_per_row: Option<u32>,
    /// Optimizer steps.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..), default_value_t = 20)]
    steps: u64,
    /// CPU threads of each rank; 0 takes an even share of the machine's cores.
    #[arg(long, value_name = "N")]
    threads: Option<u16>,
    /// How often the run is made.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    repeats: u32,
    steps: u64,
    /// Tokens of all rows of a run.
    tokens: u64,
    /// From the launch to the last commit.
    wall_seconds: Spread,
    /// From the launch to the first commit: processes, weights, samples, the first step.
    start_seconds: Spread,
    /// From the first commit to the last one.
    steady_seconds: Spread,
    /// Over the whole time.
    tokens_per_s: Spread,
    /// After the first commit.
    steady_tokens_per_s: Spread,
    /// Over all runs, after the first commit.
    ranks: Vec<RankShares>,
}

/// Parts of a rank's time, 0 to 1; loading is in none of them.
#[derive(Debug, PartialEq, Serialize)]
struct RankShares {
    seat: String,
    busy: f64,
    /// For rows: a verifier to extract one, a draft replica to train on it.
    waiting_for_input: f64,
    /// For shards of its verifier, for gradients, votes and the journal.
    waiting_for_peers: f64,
}

/// Measures and prints.
///
/// # Errors
/// If the cluster does not come to its end, or `out` cannot be written to.
pub(super) fn end_to_end(arguments: &EndToEndArgs, out: &mut impl Write) -> Result<Exit> {
    let config = match config(arguments)? {
        Ok(config) => config,
        Err(exit) => return Ok(exit),
    };
    let load_before = load();
    let mut runs = Vec::new();
    for _ in 0..arguments.repeats {
        // Each listens anew, as the one before has ended.
        let mut run = Run::prepare(config.clone(), Interrupt::listen()?)?;
        let launched_ms = unix_ms();
        run.launch()?;
        let steps = run.finish()?;
        ensure!(
            steps.len() as u64 == arguments.steps,
            "the samples are enough for {} steps, not for {}; give more of them, or raise training.passes",
            steps.len(),
            arguments.steps
        );
        runs.push((launched_ms, steps));
    }
    let report = report(arguments, &runs, Machine::look(load_before))?;
    print(&report, arguments.json, out, Report::write)?;
    Ok(Exit::Done)
}

/// The cluster file with all that the arguments override.
fn config(arguments: &EndToEndArgs) -> Result<Result<ClusterConfig, Exit>> {
    let mut sets = arguments.sets.clone();
    let quoted = |path: &Path| -> Result<String> {
        let text = path
            .to_str()
            .with_context(|| format!("{} is no UTF-8", path.display()))?;
        // Of a file that is not there the check tells by the name that was given; a model on the Hub is no file.
        let absolute = std::fs::canonicalize(path).ok();
        let text = absolute.as_deref().and_then(Path::to_str).unwrap_or(text);
        Ok(toml_string(text))
    };
    if let Some(verifier) = &arguments.verifier {
        sets.push(format!("verifier.path={}", quoted(verifier)?));
    }
    if !arguments.samples.is_empty() {
        let files: Vec<String> = arguments
            .samples
            .iter()
            .map(|file| quoted(file))
            .collect::<Result<_>>()?;
        sets.push(format!("samples.files=[{}]", files.join(", ")));
    }
    sets.push("samples.held_out=[]".to_owned());
    sets.push(format!("samples.held_out_every={}", arguments.held_out_every));
    sets.push(format!("training.steps={}", arguments.steps));
    if let Some(tokens) = arguments.tokens_per_row {
        sets.push(format!("training.tokens_per_row={tokens}"));
    }
    let mut config = match cluster_file::load(&arguments.cluster, &sets) {
        Ok(config) => config,
        Err(exit) => return Ok(Err(exit)),
    };
    if let Some(threads) = arguments.threads {
        for rank in &mut config.ranks {
            rank.threads = usize::from(threads);
        }
    }
    fetch::verifier(&mut config, Need::Whole)?;
    Ok(Ok(config))
}

/// A basic string of TOML.
fn toml_string(text: &str) -> String {
    let mut quoted = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => quoted.extend(['\\', character]),
            control if control.is_control() => quoted.push_str(&format!("\\u{:04x}", u32::from(control))),
            other => quoted.push(other),
        }
    }
    quoted.push('"');
    quoted
}

fn report(arguments: &EndToEndArgs, runs: &[(u64, Vec<StepLine>)], machine: Machine) -> Result<Report> {
    let mut series: [Vec<f64>; 5] = Default::default();
    let mut tokens = 0;
    let mut spent: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for (launched_ms, steps) in runs {
        let (first, rest) = steps.split_first().context("no step was committed")?;
        let last = rest.last().context("only one step was committed")?;
        tokens = steps.iter().map(|step| step.tokens).sum();
        let rest_tokens = tokens - first.tokens;
        let seconds = |from: u64, to: u64| (to.saturating_sub(from) as f64 / 1e3).max(1e-3);
        let wall = seconds(*launched_ms, last.unix_ms);
        let (start, steady) = (
            seconds(*launched_ms, first.unix_ms),
            seconds(first.unix_ms, last.unix_ms),
        );
        let rates = [tokens as f64 / wall, rest_tokens as f64 / steady];
        for (series, value) in series.iter_mut().zip([wall, start, steady, rates[0], rates[1]]) {
            series.push(value);
        }
        for (seat, ms) in rest.iter().flat_map(|step| &step.ranks) {
            let sums = spent.entry(seat).or_default();
            for (sum, ms) in sums.iter_mut().zip(ms) {
                *sum += ms;
            }
        }
    }
    let [
        wall_seconds,
        start_seconds,
        steady_seconds,
        tokens_per_s,
        steady_tokens_per_s,
    ] = series.map(|values| Spread::of(&values));
    Ok(Report {
        bench: "end-to-end",
        machine,
        repeats: arguments.repeats,
        steps: arguments.steps,
        tokens,
        wall_seconds,
        start_seconds,
        steady_seconds,
        tokens_per_s,
        steady_tokens_per_s,
        ranks: spent
            .into_iter()
            .map(|(seat, [busy, peers, input])| {
                let whole = (busy + peers + input).max(1) as f64;
                RankShares {
                    seat: seat.to_owned(),
                    busy: busy as f64 / whole,
                    waiting_for_input: input as f64 / whole,
                    waiting_for_peers: peers as f64 / whole,
                }
            })
            .collect(),
    })
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}", self.machine)?;
        writeln!(
            out,
            "{} steps, {} tokens, {} runs\n",
            self.steps, self.tokens, self.repeats
        )?;
        for (what, spread) in [
            ("wall seconds, launch to last commit", &self.wall_seconds),
            ("  of it to the first commit", &self.start_seconds),
            ("  of it after the first commit", &self.steady_seconds),
            ("tokens/s", &self.tokens_per_s),
            ("tokens/s after the first commit", &self.steady_tokens_per_s),
        ] {
            let Spread { median, min, max } = spread;
            writeln!(out, "{what:<38} {median:>9.2} ({min:.2} to {max:.2})")?;
        }
        writeln!(
            out,
            "\n{:<14} {:>6} {:>18} {:>18}",
            "after that", "busy", "waiting for input", "waiting for peers"
        )?;
        for rank in &self.ranks {
            let percent = |share: f64| format!("{:.0} %", 100.0 * share);
            writeln!(
                out,
                "{:<14} {:>6} {:>18} {:>18}",
                rank.seat,
                percent(rank.busy),
                percent(rank.waiting_for_input),
                percent(rank.waiting_for_peers)
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_quoted() {
        assert_eq!(toml_string("/a b/c"), "\"/a b/c\"");
        assert_eq!(toml_string("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }

    #[test]
    fn the_first_step_is_no_part_of_the_steady_state() {
        use clap::Parser;

        #[derive(Parser)]
        struct Words {
            #[command(flatten)]
            arguments: EndToEndArgs,
        }
        let arguments = Words::parse_from(["bench", "--steps", "3"]).arguments;
        let line = |unix_ms, draft: [u64; 3]| StepLine {
            unix_ms,
            tokens: 100,
            ranks: vec![
                ("draft-0".to_owned(), draft),
                ("verifier-0".to_owned(), [50, 0, 150]),
            ],
        };
        let steps = vec![
            line(11_000, [0, 0, 9_000]),
            line(12_000, [600, 100, 300]),
            line(14_000, [1_400, 300, 300]),
        ];
        let report = report(&arguments, &[(1_000, steps)], Machine::look(0.0)).expect("two steps are enough");
        let medians = [
            report.wall_seconds,
            report.start_seconds,
            report.steady_seconds,
            report.steady_tokens_per_s,
        ]
        .map(|spread| spread.median);
        assert_eq!((report.tokens, medians), (300, [13.0, 10.0, 3.0, 200.0 / 3.0]));
        assert_eq!(
            report.ranks[0],
            RankShares {
                seat: "draft-0".to_owned(),
                busy: 2.0 / 3.0,
                waiting_for_input: 0.2,
                waiting_for_peers: 400.0 / 3_000.0,
            }
        );
        assert_eq!(report.ranks[1].waiting_for_input, 0.75);
    }
}
