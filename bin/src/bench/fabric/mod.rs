//! `eaglet bench fabric`: what moving data costs, next to what the machine can do in the same run.
//!
//! Files: `same_host` tensors through the memory of a link, `between_hosts` tensors over the network, `link` the ends of
//! both, `control` round trips on the control plane, `commit` votes and journal.

mod between_hosts;
mod commit;
mod control;
mod link;
mod same_host;

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use self::between_hosts::BetweenHosts;
use self::commit::Commit;
use self::control::Control;
use self::same_host::SameHost;
use super::facts::{Machine, Spread, load};
use super::interrupt::Interrupt;
use super::print;

/// `eaglet bench fabric`.
#[derive(Debug, Args)]
pub(crate) struct FabricArgs {
    /// Bytes of a tensor; may be repeated.
    #[arg(long, value_name = "N", default_values_t = [1 << 20, 16 << 20, 64 << 20],
          value_parser = clap::value_parser!(u64).range(4..=1 << 30))]
    bytes: Vec<u64>,
    /// Rounds of each measurement.
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: u32,
    /// MiB that are moved in a round.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    round_mib: u32,
    /// Control round trips, quiet and beside bulk.
    #[arg(long, default_value_t = 3000, value_parser = clap::value_parser!(u32).range(1..))]
    round_trips: u32,
    /// Draft ranks that vote; may be repeated.
    #[arg(long, value_name = "N", default_values_t = [2, 8], value_parser = clap::value_parser!(u16).range(1..=4096))]
    draft_ranks: Vec<u16>,
    /// Steps whose votes and records are measured.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(4..))]
    steps: u64,
    /// Where the journal is written, as that of a run is.
    #[arg(long, value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Report {
    bench: &'static str,
    machine: Machine,
    same_host: Vec<SameHost>,
    between_hosts: Vec<BetweenHosts>,
    control: Control,
    commit: Vec<Commit>,
}

/// Measures and prints.
///
/// # Errors
/// If a link cannot be made, the disk fails, or `out` cannot be written to.
pub(crate) fn fabric(arguments: &FabricArgs, out: &mut impl Write) -> Result<()> {
    let (load_before, interrupt) = (load(), Interrupt::listen()?);
    let plan = Plan {
        repeats: arguments.repeats as usize,
        bytes_per_round: (arguments.round_mib as usize) << 20,
        interrupt: &interrupt,
    };
    let sizes = || arguments.bytes.iter().map(|&bytes| bytes as usize);
    let report = Report {
        bench: "fabric",
        same_host: sizes()
            .map(|bytes| same_host::measure(bytes, &plan))
            .collect::<Result<_>>()?,
        between_hosts: sizes()
            .map(|bytes| between_hosts::measure(bytes, &plan))
            .collect::<Result<_>>()?,
        control: control::measure(arguments.round_trips as usize, &plan)?,
        commit: arguments
            .draft_ranks
            .iter()
            .map(|&ranks| commit::measure(ranks, arguments, &plan))
            .collect::<Result<_>>()?,
        machine: Machine::look(load_before),
    };
    print(&report, arguments.json, out, Report::write)
}

/// Most messages of a round.
const MESSAGES_PER_ROUND: usize = 1024;

/// How much is measured.
struct Plan<'a> {
    repeats: usize,
    /// Bytes that are moved in one round.
    bytes_per_round: usize,
    interrupt: &'a Interrupt,
}

impl Plan<'_> {
    /// Messages of a round.
    fn count(&self, bytes: usize) -> usize {
        // Of small ones the time per message counts, and fewer tell it.
        (self.bytes_per_round / bytes).clamp(1, MESSAGES_PER_ROUND)
    }

    /// Times rounds of some things, one of each after the other, so that whatever else the machine does meets all alike;
    /// GB/s (10^9 bytes) of each. The first round of each is not counted.
    fn rates<const N: usize>(
        &self,
        bytes: usize,
        things: &mut [&mut dyn FnMut(usize) -> Result<()>; N],
    ) -> Result<[Spread; N]> {
        let count = self.count(bytes);
        let mut rates = [const { Vec::new() }; N];
        for round in 0..=self.repeats {
            for (thing, rates) in things.iter_mut().zip(&mut rates) {
                self.interrupt.check()?;
                let begun = Instant::now();
                thing(count)?;
                let seconds = begun.elapsed().as_secs_f64().max(1e-9);
                if round > 0 {
                    rates.push((bytes * count) as f64 / seconds / 1e9);
                }
            }
        }
        Ok(rates.map(|rates| Spread::of(&rates)))
    }
}

impl Report {
    fn write(&self, out: &mut impl Write) -> std::io::Result<()> {
        writeln!(out, "{}", self.machine)?;
        let rate = |rate: &Spread| format!("{:>6.2} ({:.2} to {:.2})", rate.median, rate.min, rate.max);
        let line = |out: &mut dyn Write, bytes: usize, what: &str, spread: &Spread| {
            writeln!(
                out,
                "{:>9.2} MiB  {what:<44} {}",
                bytes as f64 / (1 << 20) as f64,
                rate(spread)
            )
        };
        writeln!(out, "\nsame host, GB/s: median (least to most)")?;
        for SameHost {
            bytes,
            memcpy_gb_s,
            crc32c_gb_s,
            copied_gb_s,
            in_place_gb_s,
            unchecked_gb_s,
            slots_gb_s,
        } in &self.same_host
        {
            line(out, *bytes, "limit: memcpy", memcpy_gb_s)?;
            line(out, *bytes, "limit: crc32c", crc32c_gb_s)?;
            line(out, *bytes, "link, one copy, crc32c at both ends", copied_gb_s)?;
            line(out, *bytes, "link, one copy, no checksum", unchecked_gb_s)?;
            line(
                out,
                *bytes,
                "link, made in its memory, crc32c at both ends",
                in_place_gb_s,
            )?;
            line(
                out,
                *bytes,
                "link, two copies (no room in the heap), crc32c",
                slots_gb_s,
            )?;
        }
        writeln!(out, "\nbetween hosts, over the loopback device, GB/s")?;
        for BetweenHosts {
            bytes,
            tcp_gb_s,
            link_gb_s,
            unchecked_gb_s,
        } in &self.between_hosts
        {
            line(out, *bytes, "limit: TCP, one stream", tcp_gb_s)?;
            line(out, *bytes, "link, one HTTP/2 POST per tensor, crc32c", link_gb_s)?;
            line(out, *bytes, "link, one HTTP/2 POST per tensor", unchecked_gb_s)?;
        }
        writeln!(out, "\ncontrol round trip, ms")?;
        let Control { quiet, beside_bulk } = &self.control;
        for (what, trips) in [("quiet", quiet), ("beside bulk", beside_bulk)] {
            writeln!(
                out,
                "{what:<12} p50 {:>8.3}  p99 {:>8.3}  most {:>8.3}  of {}{}",
                trips.p50_ms,
                trips.p99_ms,
                trips.max_ms,
                trips.count,
                match trips.bulk_gb_s {
                    Some(rate) => format!(", beside {rate:.2} GB/s"),
                    None => String::new(),
                }
            )?;
        }
        writeln!(out, "\nvotes and journal, ms a step")?;
        for Commit {
            draft_ranks,
            votes_ms,
            journal_ms,
            total_ms,
            journal_bytes,
        } in &self.commit
        {
            writeln!(
                out,
                "{draft_ranks:>5} draft ranks  votes {:>7.3}  journal {:>7.3}  both {:>7.3} ({:.3} to {:.3}), {journal_bytes} bytes",
                votes_ms.median, journal_ms.median, total_ms.median, total_ms.min, total_ms.max
            )?;
        }
        Ok(())
    }
}
