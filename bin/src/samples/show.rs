//! `eaglet samples show`: prints samples with their loss mask.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use eaglet_actors::config::ClusterConfig;
use eaglet_actors::journal::{self, SampleBook, SampleSource};
use eaglet_runtime::ids::SampleSeq;
use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{ChatTokenizer, SampleStore, Source, SourceOptions, explain, samples_of};

use super::{resolved_config, visible};

/// Bytes of a source line that are printed at most.
const LINE_SHOWN_BYTES: u64 = 4096;

/// Printed around text that is trained where there is colour.
const TRAINED: (&str, &str) = ("\x1b[1;32m", "\x1b[0m");
/// The same without colour.
const TRAINED_PLAIN: (&str, &str) = ("⟦", "⟧");

/// Prints the first samples of a file as the cluster's verifier reads them, and why others are no samples.
///
/// # Errors
/// If the tokenizer or the file cannot be read, or `out` cannot be written to.
pub(super) fn file(
    file: &Path,
    count: usize,
    config: &ClusterConfig,
    out: &mut (impl Write + ?Sized),
    colour: bool,
) -> Result<()> {
    let tokenizer = ChatTokenizer::load(&config.verifier.path)?;
    let options = SourceOptions {
        row_limit_bytes: config.samples.max_line_bytes,
        ..SourceOptions::default()
    };
    let limits = config.sample_limits();
    let mut source = Source::open(file, options)?;
    let mut left = count;
    while left > 0 {
        let Some(row) = source.next_row()? else { break };
        let place = format!("{}:{}", file.display(), row.line);
        let masked = row
            .conversation
            .map_err(|quarantine| quarantine.reason)
            .and_then(|conversation| samples_of(&conversation, &tokenizer, limits));
        match masked {
            Ok(masked) => {
                for skipped in &masked.skipped {
                    writeln!(out, "{place}: no sample of {skipped}")?;
                }
                for sample in masked.samples.iter().take(left) {
                    write_sample(out, &place, sample, &tokenizer, colour)
                        .with_context(|| format!("cannot show {place}"))?;
                    left -= 1;
                }
            }
            Err(reason) => writeln!(out, "{place}: quarantined: {reason}")?,
        }
    }
    Ok(())
}

/// Prints a stored sample of a run, or why there is none, with the line it came from.
///
/// # Errors
/// If the run has no such sample, its files cannot be read, or `out` cannot be written to.
pub(super) fn stored(
    directory: &Path,
    sample: SampleSeq,
    out: &mut (impl Write + ?Sized),
    colour: bool,
) -> Result<()> {
    let records = journal::read(&directory.join("journal"))?.records;
    let book = SampleBook::of(&records);
    let Some(known) = book.sample(sample) else {
        bail!(
            "the run in {} has no sample {sample}; it has {} samples, numbered from 0",
            directory.display(),
            book.samples().count(),
        );
    };
    let source = &known.source;
    let id = source
        .id
        .as_ref()
        .map_or(String::new(), |id| format!(" ({})", visible(id)));
    let place = format!("sample {sample}, {}:{}{id}", visible(&source.file), source.line);
    if let Some(reason) = known.quarantine() {
        writeln!(out, "{place}: quarantined {}", visible(&reason))?;
    }
    match known.location {
        Some(location) => {
            let config = resolved_config(directory)?;
            let tokenizer = ChatTokenizer::load(&config.verifier.path)?;
            let sample = SampleStore::view(&directory.join("samples.bin"))?.read(location)?;
            write_sample(out, &place, &sample, &tokenizer, colour)
        }
        None => write_line(out, source),
    }
}

/// Prints the line that a sample came from, as far as it is there.
fn write_line(out: &mut (impl Write + ?Sized), source: &SampleSource) -> Result<()> {
    let line = match line_of(source) {
        Ok(Some(line)) => line,
        Ok(None) => {
            return Ok(writeln!(out, "its file has no line {} any more", source.line)?);
        }
        Err(error) => return Ok(writeln!(out, "its file cannot be read: {error}")?),
    };
    let cut = if line.len() as u64 == LINE_SHOWN_BYTES {
        " …"
    } else {
        ""
    };
    Ok(writeln!(
        out,
        "{}{cut}",
        visible(String::from_utf8_lossy(&line).trim_end())
    )?)
}

/// The first bytes of a sample's line; `None` if the file is shorter.
fn line_of(source: &SampleSource) -> io::Result<Option<Vec<u8>>> {
    let mut reader = BufReader::new(File::open(&source.file)?);
    for _ in 1..source.line {
        if reader.skip_until(b'\n')? == 0 {
            return Ok(None);
        }
    }
    let mut line = Vec::new();
    reader.take(LINE_SHOWN_BYTES).read_until(b'\n', &mut line)?;
    Ok((!line.is_empty()).then_some(line))
}

fn write_sample(
    out: &mut (impl Write + ?Sized),
    place: &str,
    sample: &Sample,
    tokenizer: &ChatTokenizer,
    colour: bool,
) -> Result<()> {
    let trained = sample.loss_mask.iter().filter(|&&trained| trained != 0).count();
    writeln!(
        out,
        "{place}: {} tokens, {trained} of them trained",
        sample.tokens.len()
    )?;
    write_pieces(out, &explain(sample, tokenizer)?, colour)?;
    Ok(writeln!(out)?)
}

/// Writes pieces of a sample's text, each with whether it is trained. Neighbours of a kind are joined, and no colour
/// runs across the end of a line, which pagers would drop.
///
/// # Errors
/// If `out` cannot be written to.
fn write_pieces(out: &mut (impl Write + ?Sized), pieces: &[(String, bool)], colour: bool) -> io::Result<()> {
    let (open, close) = if colour { TRAINED } else { TRAINED_PLAIN };
    for group in pieces.chunk_by(|left, right| left.1 == right.1) {
        let text: String = group.iter().map(|(text, _)| visible(text)).collect();
        for part in text.split_inclusive('\n') {
            let line = part.strip_suffix('\n');
            match (group[0].1, line.unwrap_or(part)) {
                (true, line) if !line.is_empty() => write!(out, "{open}{line}{close}")?,
                (_, line) => out.write_all(line.as_bytes())?,
            }
            if line.is_some() {
                out.write_all(b"\n")?;
            }
        }
    }
    if pieces.last().is_some_and(|(text, _)| !text.ends_with('\n')) {
        out.write_all(b"\n")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_trained_is_marked_line_by_line_and_escapes_are_disarmed() {
        let pieces = [
            ("Hi\n", false),
            ("one\n", true),
            ("two", true),
            ("", true),
            ("\x1b[2J.", false),
            ("\n", true),
        ]
        .map(|(text, trained)| (text.to_owned(), trained));
        let shown = |colour| {
            let mut out = Vec::new();
            write_pieces(&mut out, &pieces, colour).expect("memory can be written to");
            String::from_utf8(out).expect("texts only")
        };
        assert_eq!(shown(false), "Hi\n⟦one⟧\n⟦two⟧␛[2J.\n");
        assert_eq!(
            shown(true),
            "Hi\n\x1b[1;32mone\x1b[0m\n\x1b[1;32mtwo\x1b[0m␛[2J.\n"
        );
    }
}
