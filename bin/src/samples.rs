//! `eaglet samples show`: prints samples with their loss mask.

use std::io::{self, Write};

use anyhow::{Context, Result};
use eaglet_actors::config::{ClusterConfig, TooLong};
use eaglet_runtime::row::Sample;
use eaglet_runtime::samples::{ChatTokenizer, SampleLimits, Source, SourceOptions, explain, samples_of};

use crate::cli::ShowArgs;

/// Printed around text that is trained where there is colour.
const TRAINED: (&str, &str) = ("\x1b[1;32m", "\x1b[0m");
/// The same without colour.
const TRAINED_PLAIN: (&str, &str) = ("⟦", "⟧");

/// Prints the first samples of a file as the cluster's verifier reads them, and why others are no samples.
///
/// # Errors
/// If the tokenizer or the file cannot be read, or `out` cannot be written to.
pub(crate) fn show(
    arguments: &ShowArgs,
    config: &ClusterConfig,
    out: &mut impl Write,
    colour: bool,
) -> Result<()> {
    let tokenizer = ChatTokenizer::load(&config.verifier.path)?;
    let options = SourceOptions {
        row_limit_bytes: config.samples.max_line_bytes,
        ..SourceOptions::default()
    };
    let limits = SampleLimits {
        max_tokens: match config.samples.too_long {
            TooLong::Truncate => config.training.tokens_per_row,
            TooLong::Quarantine => usize::MAX,
        },
        min_trained_tokens: config.samples.min_trained_tokens,
    };
    let mut source = Source::open(&arguments.file, options)?;
    let mut left = arguments.count;
    while left > 0 {
        let Some(row) = source.next_row()? else { break };
        let place = format!("{}:{}", arguments.file.display(), row.line);
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

fn write_sample(
    out: &mut impl Write,
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
fn write_pieces(out: &mut impl Write, pieces: &[(String, bool)], colour: bool) -> io::Result<()> {
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

/// Control characters as symbols, so that a sample cannot steer the terminal.
fn visible(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '\n' | '\t' => c,
            '\0'..='\x1f' => char::from_u32(0x2400 + u32::from(c)).unwrap_or('␀'),
            c if c.is_control() => '␡',
            c => c,
        })
        .collect()
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
