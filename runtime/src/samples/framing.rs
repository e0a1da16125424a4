//! Cuts a file into rows without understanding them.
//!
//! Two framings: one row per line, and the elements of one JSON array. Both hold at most one row of at most the limit's
//! bytes, and both find the next row again after a broken one: a line always ends at its newline; an element ends at the
//! comma on its own level, or at a raw newline within a string, which JSON forbids and so means a torn string. (An element
//! whose brackets never close swallows the rest of the file: lines are the safer framing.)

use std::io::{self, BufRead};

/// How the rows of a file are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Framing {
    /// One row per line.
    Lines,
    /// One row per element of the array that is the file.
    Array,
}

/// What a framer found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// The line the row starts on, from 1.
    pub(crate) line: u64,
    /// Whether the row was longer than the limit; then only its first bytes were kept.
    pub(crate) overlong: bool,
    /// Whether the row was ended by its separator and not by the end of the file.
    pub(crate) terminated: bool,
    /// Bytes consumed from the last row's end to this one's, separators included.
    pub(crate) consumed_bytes: u64,
    /// Newlines within those bytes.
    pub(crate) newlines: u64,
}

/// Reads the next row into `row`; `None` at the end of the file. `lines_before` newlines precede the reader's place.
pub(crate) fn next_frame(
    reader: &mut impl BufRead,
    framing: Framing,
    lines_before: u64,
    limit_bytes: usize,
    row: &mut Vec<u8>,
) -> io::Result<Option<Frame>> {
    row.clear();
    let mut scan = Scan {
        frame: Frame {
            line: lines_before + 1,
            overlong: false,
            terminated: false,
            consumed_bytes: 0,
            newlines: 0,
        },
        started: false,
        depth: 0,
        in_string: false,
        escaped: false,
    };
    loop {
        let chunk = match reader.fill_buf() {
            Ok(chunk) => chunk,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        if chunk.is_empty() {
            return Ok(scan.started.then_some(scan.frame));
        }
        let (used, from) = match framing {
            Framing::Lines => scan.line(chunk),
            Framing::Array => scan.element(chunk, lines_before),
        };
        let kept = &chunk[from..used - usize::from(scan.frame.terminated)];
        let room = limit_bytes.saturating_sub(row.len());
        scan.frame.overlong |= kept.len() > room;
        row.extend_from_slice(&kept[..kept.len().min(room)]);
        scan.frame.consumed_bytes += used as u64;
        reader.consume(used);
        if scan.frame.terminated {
            return Ok(Some(scan.frame));
        }
    }
}

/// State of one row's scan across the reader's buffers.
struct Scan {
    frame: Frame,
    started: bool,
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Scan {
    /// Scans for the newline; gives the bytes used and where the row's own bytes begin in them.
    fn line(&mut self, chunk: &[u8]) -> (usize, usize) {
        self.started = true;
        match chunk.iter().position(|&byte| byte == b'\n') {
            Some(newline) => {
                self.frame.newlines += 1;
                self.frame.terminated = true;
                (newline + 1, 0)
            }
            None => (chunk.len(), 0),
        }
    }

    /// Scans for the end of an element; gives the bytes used and where the element's own bytes begin in them.
    fn element(&mut self, chunk: &[u8], lines_before: u64) -> (usize, usize) {
        let mut from = if self.started { 0 } else { chunk.len() };
        for (index, &byte) in chunk.iter().enumerate() {
            if byte == b'\n' {
                self.frame.newlines += 1;
            }
            if !self.started {
                // Brackets of the array itself, commas and blanks lie between elements.
                if byte.is_ascii_whitespace() || matches!(byte, b',' | b']') {
                    continue;
                }
                self.started = true;
                self.frame.line = lines_before + self.frame.newlines + 1;
                from = index;
            }
            if self.in_string {
                match byte {
                    b'\n' => self.frame.terminated = true,
                    _ if self.escaped => self.escaped = false,
                    b'\\' => self.escaped = true,
                    b'"' => self.in_string = false,
                    _ => {}
                }
            } else {
                match byte {
                    b'"' => self.in_string = true,
                    b'{' | b'[' => self.depth = self.depth.saturating_add(1),
                    b'}' | b']' if self.depth > 0 => self.depth -= 1,
                    b',' | b']' if self.depth == 0 => self.frame.terminated = true,
                    _ => {}
                }
            }
            if self.frame.terminated {
                return (index + 1, from);
            }
        }
        (chunk.len(), from)
    }
}

#[cfg(test)]
mod tests {
    use std::io::BufReader;

    use proptest::prelude::*;

    use super::*;

    /// All rows of `text`, read through a buffer of `buffer` bytes.
    fn rows(text: &[u8], framing: Framing, buffer: usize, limit: usize) -> Vec<(u64, Vec<u8>, bool)> {
        let mut reader = BufReader::with_capacity(buffer, text);
        let (mut lines, mut bytes, mut row, mut found) = (0, 0, Vec::new(), Vec::new());
        while let Some(frame) =
            next_frame(&mut reader, framing, lines, limit, &mut row).expect("a slice can be read")
        {
            lines += frame.newlines;
            bytes += frame.consumed_bytes;
            assert!(bytes <= text.len() as u64);
            found.push((frame.line, row.clone(), frame.overlong));
        }
        found
    }

    #[test]
    fn lines_end_at_newlines_and_long_ones_are_cut() {
        for buffer in [1, 3, 64] {
            let found = rows(b"ab\n\nabcdefgh\nx", Framing::Lines, buffer, 4);
            let expected: Vec<(u64, Vec<u8>, bool)> = vec![
                (1, b"ab".to_vec(), false),
                (2, b"".to_vec(), false),
                (3, b"abcd".to_vec(), true),
                (4, b"x".to_vec(), false),
            ];
            assert_eq!(found, expected, "buffer of {buffer}");
        }
    }

    #[test]
    fn elements_end_at_commas_of_their_level() {
        // The leading bracket is consumed by the caller, which is how a resumed reader starts too.
        let text = br#" {"a": "],\"}", "b": [1, {}]} ,
            {"c": 2},
            3]  "#;
        for buffer in [1, 2, 7, 256] {
            let found = rows(text, Framing::Array, buffer, 1000);
            let texts: Vec<_> = found
                .iter()
                .map(|row| String::from_utf8_lossy(&row.1).trim().to_owned())
                .collect();
            assert_eq!(
                texts,
                [r#"{"a": "],\"}", "b": [1, {}]}"#, r#"{"c": 2}"#, "3"],
                "buffer of {buffer}"
            );
            assert_eq!(found.iter().map(|row| row.0).collect::<Vec<_>>(), [1, 2, 3]);
        }
    }

    #[test]
    fn a_torn_string_ends_at_its_newline() {
        let found = rows(
            b"{\"a\": \"cut\n{\"b\": 1},\n{\"c\": 2}]",
            Framing::Array,
            16,
            1000,
        );
        let texts: Vec<_> = found
            .iter()
            .map(|row| String::from_utf8_lossy(&row.1).into_owned())
            .collect();
        assert_eq!(texts, ["{\"a\": \"cut", "{\"b\": 1}", "{\"c\": 2}"]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_framed_alike_through_any_buffer(
            text in proptest::collection::vec(prop::sample::select(b"{}[],\"\\\n ab".to_vec()), 0..200),
            buffer in 1_usize..40,
            limit in 0_usize..30,
        ) {
            for framing in [Framing::Lines, Framing::Array] {
                let whole = rows(&text, framing, 4096, limit);
                prop_assert_eq!(&rows(&text, framing, buffer, limit), &whole);
                prop_assert!(whole.iter().all(|row| row.1.len() <= limit));
            }
        }
    }
}
