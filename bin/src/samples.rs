//! Prints samples with their loss mask.

use std::io::{self, Write};

/// Printed around text that is trained where there is colour.
const TRAINED: (&str, &str) = ("\x1b[1;32m", "\x1b[0m");
/// The same without colour.
const TRAINED_PLAIN: (&str, &str) = ("⟦", "⟧");

/// Writes pieces of a sample's text, each with whether it is trained. Neighbours of a kind are joined, and no colour
/// runs across the end of a line, which pagers would drop.
///
/// # Errors
/// If `out` cannot be written to.
pub(crate) fn write_pieces(out: &mut impl Write, pieces: &[(String, bool)], colour: bool) -> io::Result<()> {
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
