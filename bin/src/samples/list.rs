//! `eaglet samples list`: prints the samples of a run, from its journal.

use std::io::Write;
use std::path::Path;

use anyhow::Result;
use eaglet_actors::journal::{self, KnownSample, SampleBook, UnitStanding};

use super::{resolved_config, visible};
use crate::table::Table;

/// Prints quarantined samples, or all of them with the state of each pass.
///
/// # Errors
/// If the journal cannot be read, or `out` cannot be written to.
pub(super) fn write(directory: &Path, all: bool, out: &mut dyn Write) -> Result<()> {
    let records = journal::read(&directory.join("journal"))?.records;
    let book = SampleBook::of(&records);
    if all {
        write_all(directory, &book, out)
    } else {
        write_quarantined(&book, out)
    }
}

fn write_all(directory: &Path, book: &SampleBook, out: &mut dyn Write) -> Result<()> {
    // The journal names only the passes that have begun.
    let passes = resolved_config(directory).map_or_else(|_| book.passes(), |config| config.training.passes);
    let mut table = Table::new(["number", "file:line", "id", "tokens", "passes"]).align_right(&[0, 3]);
    for (sample, known) in book.samples() {
        let tokens = known
            .location
            .map_or_else(|| "-".to_owned(), |_| known.tokens.to_string());
        let passes = standings(known, passes);
        table.push([sample.to_string(), place(known), id(known), tokens, passes]);
    }
    if table.is_empty() {
        return Ok(writeln!(out, "the run has no samples yet")?);
    }
    Ok(table.write(out)?)
}

fn write_quarantined(book: &SampleBook, out: &mut dyn Write) -> Result<()> {
    let mut table = Table::new(["number", "file:line", "id", "reason"]).align_right(&[0]);
    for (sample, known) in book.samples() {
        if let Some(reason) = known.quarantine() {
            table.push([sample.to_string(), place(known), id(known), visible(&reason)]);
        }
    }
    if table.is_empty() {
        return Ok(writeln!(out, "no sample is quarantined")?);
    }
    Ok(table.write(out)?)
}

fn place(known: &KnownSample) -> String {
    format!("{}:{}", visible(&known.source.file), known.source.line)
}

fn id(known: &KnownSample) -> String {
    known.source.id.as_deref().map_or_else(|| "-".to_owned(), visible)
}

/// Where each pass, from 0, stands; neighbours that wait for a step are told together.
fn standings(known: &KnownSample, passes: u32) -> String {
    if known.refused.is_some() {
        return "refused on arrival".to_owned();
    }
    let pending = |pass: &u32| known.standing(*pass) == UnitStanding::Pending;
    let mut parts = Vec::new();
    let mut pass = 0;
    while pass < passes {
        let run = (pass..passes).take_while(pending).count() as u32;
        parts.push(match run {
            0 => format!("{pass}: {}", known.standing(pass)),
            1 => format!("{pass}: pending"),
            _ => format!("{pass} to {}: pending", pass + run - 1),
        });
        pass += run.max(1);
    }
    parts.join(", ")
}
