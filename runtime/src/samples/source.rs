//! Conversations out of a `.jsonl` or `.json` file, one after the other.
//!
//! Invariants: the reader holds one row of at most [`SourceOptions::row_limit_bytes`]; a bad row is a [`Quarantine`] and
//! the next one is read as if nothing had happened; [`Source::position`] always lies between two rows, and a reader that
//! resumes there yields exactly the rows that were not yielded before. Blank lines hold no row and are passed over.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::conversation::Conversation;
use super::framing::{Framing, next_frame};
use super::quarantine::{Quarantine, Reason};

/// Largest row that is read if nothing else is said, in bytes.
pub const DEFAULT_ROW_LIMIT_BYTES: usize = 16 << 20;

const BUFFER_BYTES: usize = 256 << 10;

/// Whether the file is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// It is: a last row without its newline is a row.
    Final,
    /// Somebody may still be writing: a last row without its newline is left for later.
    MayGrow,
}

/// How to read a file.
#[derive(Clone, Copy, Debug)]
pub struct SourceOptions {
    /// Larger rows are quarantined.
    pub row_limit_bytes: usize,
    /// Whether the file is finished.
    pub tail: Tail,
}

impl Default for SourceOptions {
    fn default() -> Self {
        Self {
            row_limit_bytes: DEFAULT_ROW_LIMIT_BYTES,
            tail: Tail::Final,
        }
    }
}

/// A place between two rows of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Position {
    /// Bytes before it.
    pub offset_bytes: u64,
    /// Newlines before it.
    pub lines: u64,
}

/// A row of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The line it starts on, from 1.
    pub line: u64,
    /// What it holds, or why it cannot be trained.
    pub conversation: Result<Conversation, Quarantine>,
}

/// Why a file cannot be read at all.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// It cannot be opened.
    #[error("cannot open {}: {source}; check the path and its permissions", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is a folder, a pipe or a device.
    #[error("{} is no regular file; name the .jsonl or .json file itself", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Reading failed.
    #[error("cannot read {} at byte {offset_bytes}: {source}; check the disk, then run again", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where.
        offset_bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// It is shorter than what was already read from it.
    #[error(
        "{} has {length_bytes} bytes, but {offset_bytes} were already read from it: \
         it was replaced; restore it, or give the new one another name",
        path.display()
    )]
    Shrunk {
        /// The file.
        path: PathBuf,
        /// Its length now.
        length_bytes: u64,
        /// Where reading was to go on.
        offset_bytes: u64,
    },
}

/// A reader of conversations.
///
/// As an iterator it ends at the end of the file; with [`Tail::MayGrow`] it can be asked again when the file has grown.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    reader: BufReader<File>,
    framing: Framing,
    options: SourceOptions,
    position: Position,
    row: Vec<u8>,
    failed: bool,
}

impl Source {
    /// Opens a file at its start.
    ///
    /// # Errors
    /// If it is missing, unreadable or no regular file.
    pub fn open(path: &Path, options: SourceOptions) -> Result<Self, SourceError> {
        Self::resume(path, Position::default(), options)
    }

    /// Opens a file at a place where an earlier reader of it stood.
    ///
    /// A `.json` file whose first character is `[` is read as one array; any other file as lines.
    ///
    /// # Errors
    /// If it is missing, unreadable, no regular file, or shorter than `position`.
    pub fn resume(path: &Path, position: Position, options: SourceOptions) -> Result<Self, SourceError> {
        let open_error = |source| SourceError::Open {
            path: path.to_owned(),
            source,
        };
        // Looking before opening keeps a pipe without a writer from blocking.
        let metadata = std::fs::metadata(path).map_err(open_error)?;
        if !metadata.is_file() {
            return Err(SourceError::NotAFile {
                path: path.to_owned(),
            });
        }
        if metadata.len() < position.offset_bytes {
            return Err(SourceError::Shrunk {
                path: path.to_owned(),
                length_bytes: metadata.len(),
                offset_bytes: position.offset_bytes,
            });
        }
        let file = File::open(path).map_err(open_error)?;
        let mut source = Self {
            path: path.to_owned(),
            reader: BufReader::with_capacity(BUFFER_BYTES, file),
            framing: Framing::Lines,
            options,
            position: Position::default(),
            row: Vec::new(),
            failed: false,
        };
        source.find_start().map_err(|error| source.read_error(error))?;
        if position.offset_bytes > source.position.offset_bytes {
            source.position = position;
        }
        source.rewind().map_err(|error| source.read_error(error))?;
        Ok(source)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The place after the last row that was yielded.
    pub fn position(&self) -> Position {
        self.position
    }

    /// The next row, or `None` at the end of the file.
    ///
    /// # Errors
    /// If the file can no longer be read; bad rows are no errors.
    pub fn next_row(&mut self) -> Result<Option<Row>, SourceError> {
        loop {
            let limit = self.options.row_limit_bytes;
            let lines = self.position.lines;
            let frame = next_frame(&mut self.reader, self.framing, lines, limit, &mut self.row)
                .map_err(|error| self.read_error(error))?;
            let Some(frame) = frame else {
                self.rewind().map_err(|error| self.read_error(error))?;
                return Ok(None);
            };
            if !frame.terminated && self.options.tail == Tail::MayGrow {
                self.rewind().map_err(|error| self.read_error(error))?;
                return Ok(None);
            }
            self.position.offset_bytes += frame.consumed_bytes;
            self.position.lines += frame.newlines;
            if !frame.overlong && self.row.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            let conversation = self.parse(frame.overlong).map_err(|(id, reason)| Quarantine {
                file: self.path.clone(),
                line: frame.line,
                id,
                reason,
            });
            return Ok(Some(Row {
                line: frame.line,
                conversation,
            }));
        }
    }

    /// Passes over rows that begin before a line, without looking into them. Ends at the end of the file, too.
    ///
    /// # Errors
    /// If the file can no longer be read.
    pub fn pass_over(&mut self, line: u64) -> Result<(), SourceError> {
        let limit = self.options.row_limit_bytes;
        while self.position.lines + 1 < line {
            let lines = self.position.lines;
            let frame = next_frame(&mut self.reader, self.framing, lines, limit, &mut self.row)
                .map_err(|error| self.read_error(error))?;
            match frame {
                Some(frame)
                    if frame.line < line && (frame.terminated || self.options.tail == Tail::Final) =>
                {
                    self.position.offset_bytes += frame.consumed_bytes;
                    self.position.lines += frame.newlines;
                }
                _ => return self.rewind().map_err(|error| self.read_error(error)),
            }
        }
        Ok(())
    }

    fn parse(&mut self, overlong: bool) -> Result<Conversation, (Option<String>, Reason)> {
        if overlong {
            // A lone huge row must not keep its memory for the rest of the file.
            self.row = Vec::new();
            return Err((
                None,
                Reason::RowTooLong {
                    limit_bytes: self.options.row_limit_bytes as u64,
                },
            ));
        }
        let text = std::str::from_utf8(&self.row).map_err(|error| {
            (
                None,
                Reason::NotUtf8 {
                    byte: error.valid_up_to() as u64,
                },
            )
        })?;
        let row: Value = serde_json::from_str(text).map_err(|error| {
            (
                None,
                Reason::NotJson {
                    detail: error.to_string(),
                },
            )
        })?;
        let id = Conversation::id_of(&row);
        Conversation::from_json(row).map_err(|reason| (id, reason))
    }

    /// Passes over a byte order mark and tells the framing by the first character.
    fn find_start(&mut self) -> io::Result<()> {
        if self.reader.fill_buf()?.starts_with(b"\xef\xbb\xbf") {
            self.reader.consume(3);
            self.position.offset_bytes = 3;
        }
        let json = self
            .path
            .extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("json"));
        if !json {
            return Ok(());
        }
        let mut ahead = self.position;
        loop {
            let chunk = self.reader.fill_buf()?;
            let blanks = chunk.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            ahead.offset_bytes += blanks as u64;
            ahead.lines += chunk[..blanks].iter().filter(|&&byte| byte == b'\n').count() as u64;
            match chunk.get(blanks) {
                Some(b'[') => {
                    self.framing = Framing::Array;
                    ahead.offset_bytes += 1;
                    self.position = ahead;
                    return Ok(());
                }
                None if blanks > 0 => self.reader.consume(blanks),
                _ => return Ok(()),
            }
        }
    }

    /// Puts the reader back to the last row's end, so that a row cut by the end of the file can be read again.
    fn rewind(&mut self) -> io::Result<()> {
        self.reader
            .seek(SeekFrom::Start(self.position.offset_bytes))
            .map(drop)
    }

    fn read_error(&mut self, source: io::Error) -> SourceError {
        self.failed = true;
        SourceError::Read {
            path: self.path.clone(),
            offset_bytes: self.position.offset_bytes,
            source,
        }
    }
}

impl Iterator for Source {
    type Item = Result<Row, SourceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        self.next_row().transpose()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn row(id: usize) -> String {
        format!(
            r#"{{"id":"c{id}","messages":[{{"role":"user","content":"q{id}"}},{{"role":"assistant","content":"a"}}]}}"#
        )
    }

    struct TestFile(tempfile::TempDir, PathBuf);

    impl TestFile {
        fn new(name: &str, bytes: &[u8]) -> Self {
            let folder = tempfile::tempdir().expect("temporary folder");
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).expect("writable");
            Self(folder, path)
        }

        fn append(&self, bytes: &[u8]) {
            let mut file = std::fs::OpenOptions::new()
                .append(true)
                .open(&self.1)
                .expect("exists");
            file.write_all(bytes).expect("writable");
        }
    }

    /// Each row as its line with its id, or with the kind of its quarantine.
    fn summary(source: &mut Source) -> Vec<(u64, String)> {
        source
            .map(|row| row.expect("readable"))
            .map(|row| match row.conversation {
                Ok(conversation) => (row.line, conversation.id.unwrap_or_default()),
                Err(quarantine) => {
                    assert_eq!(quarantine.line, row.line);
                    assert!(!quarantine.to_string().contains('\n'), "{quarantine}");
                    (row.line, quarantine.reason.kind().to_owned())
                }
            })
            .collect()
    }

    fn expect(found: &[(u64, String)], expected: &[(u64, &str)]) {
        let found: Vec<_> = found.iter().map(|(line, text)| (*line, text.as_str())).collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn bad_rows_are_quarantined_and_the_rest_is_read() {
        let mut text = Vec::new();
        let huge = format!(r#"{{"text": "{}"}}"#, "x".repeat(5000));
        let deep = "[".repeat(500);
        for line in [
            row(1).as_bytes(),
            b"",
            b"  \r",
            b"{\"id\": \"torn\", \"messages\": [",
            b"{\"id\": \"\xff\xfe\"}",
            b"\"lone surrogate \\ud800\"",
            huge.as_bytes(),
            br#"{"id": "u", "messages": [{"role": "owl", "content": "x"}]}"#,
            br#"{"id": "e", "messages": []}"#,
            br#"{"id": "n", "messages": [{"role": "user", "content": "x"}]}"#,
            br#"{"text": "x"}"#,
            deep.as_bytes(),
            b"\0\0\0",
            row(2).as_bytes(),
        ] {
            text.extend_from_slice(line);
            text.push(b'\n');
        }
        text.extend_from_slice(row(3).as_bytes());
        let file = TestFile::new("chats.jsonl", &text);
        let options = SourceOptions {
            row_limit_bytes: 1000,
            tail: Tail::Final,
        };
        let mut source = Source::open(&file.1, options).expect("opens");
        expect(
            &summary(&mut source),
            &[
                (1, "c1"),
                (4, "not JSON"),
                (5, "not UTF-8"),
                (6, "not JSON"),
                (7, "row too long"),
                (8, "unknown role"),
                (9, "empty"),
                (10, "no answer"),
                (11, "unknown shape"),
                (12, "not JSON"),
                (13, "not JSON"),
                (14, "c2"),
                (15, "c3"),
            ],
        );
        assert_eq!(
            source.position(),
            Position {
                offset_bytes: text.len() as u64,
                lines: 14
            }
        );
    }

    #[test]
    fn a_quarantine_names_file_line_and_id() {
        let file = TestFile::new("chats.jsonl", b"\n{\"id\": 9, \"messages\": []}\n");
        let mut source = Source::open(&file.1, SourceOptions::default()).expect("opens");
        let row = source.next_row().expect("readable").expect("one row");
        let quarantine = row.conversation.expect_err("empty");
        assert_eq!(
            quarantine.to_string(),
            format!(
                "{}:2 (conversation 9): the conversation has no messages",
                file.1.display()
            )
        );
    }

    #[test]
    fn a_reader_that_resumes_anywhere_yields_the_rest() {
        let lines = format!("\u{feff}{}\r\n\n{{torn\n{}\n{}", row(1), row(2), row(3));
        let array = format!(
            "\u{feff} [ {},\n\n {{\"id\": 4}} , {}\n,{}]\n",
            row(1),
            row(2),
            row(3)
        );
        for (name, text) in [
            ("chats.jsonl", lines.clone()),
            ("lines.json", lines),
            ("array.json", array),
        ] {
            let file = TestFile::new(name, text.as_bytes());
            let mut source = Source::open(&file.1, SourceOptions::default()).expect("opens");
            let mut places = vec![source.position()];
            let mut rows = Vec::new();
            while let Some(row) = source.next_row().expect("readable") {
                rows.push(row);
                places.push(source.position());
            }
            assert_eq!(rows.len(), 4, "{name}");
            assert_eq!(
                rows.iter().filter(|row| row.conversation.is_ok()).count(),
                3,
                "{name}"
            );
            for (index, place) in places.into_iter().enumerate() {
                let resumed = Source::resume(&file.1, place, SourceOptions::default()).expect("opens");
                let rest: Vec<_> = resumed.map(|row| row.expect("readable")).collect();
                assert_eq!(rest, rows[index..], "{name} from row {index}");
            }
        }
    }

    #[test]
    fn rows_before_a_line_can_be_passed_over() {
        let lines = format!("\u{feff}{}\n\n{{torn\n{}\n{}", row(1), row(2), row(3));
        let array = format!("[{}, {},\n\n{},\n{}]", row(1), row(2), row(3), row(4));
        for (name, text) in [("chats.jsonl", lines), ("array.json", array)] {
            let file = TestFile::new(name, text.as_bytes());
            let read = |options| Source::open(&file.1, options).expect("opens");
            let all: Vec<Row> = read(SourceOptions::default())
                .map(|row| row.expect("readable"))
                .collect();
            for line in 0..9 {
                let mut source = read(SourceOptions::default());
                source.pass_over(line).expect("readable");
                let rest: Vec<Row> = source.map(|row| row.expect("readable")).collect();
                let expected: Vec<Row> = all.iter().filter(|row| row.line >= line).cloned().collect();
                assert_eq!(rest, expected, "{name} from line {line}");
            }
        }
        let file = TestFile::new("growing.jsonl", format!("{}\n{}", row(1), row(2)).as_bytes());
        let options = SourceOptions {
            tail: Tail::MayGrow,
            ..SourceOptions::default()
        };
        let mut source = Source::open(&file.1, options).expect("opens");
        source.pass_over(9).expect("readable");
        file.append(b"\n");
        expect(&summary(&mut source), &[(2, "c2")]);
    }

    #[test]
    fn a_growing_file_gives_each_row_once_it_is_whole() {
        let options = SourceOptions {
            tail: Tail::MayGrow,
            ..SourceOptions::default()
        };
        for (name, start, between) in [("g.jsonl", "", "\n"), ("g.json", "[", ",\n")] {
            let file = TestFile::new(name, start.as_bytes());
            let mut source = Source::open(&file.1, options).expect("opens");
            expect(&summary(&mut source), &[]);
            let (first, second) = (row(1), row(2));
            file.append(&first.as_bytes()[..20]);
            expect(&summary(&mut source), &[]);
            file.append(&first.as_bytes()[20..]);
            expect(&summary(&mut source), &[]);
            file.append(format!("{between}{}", &second[..30]).as_bytes());
            expect(&summary(&mut source), &[(1, "c1")]);
            let place = source.position();
            file.append(format!("{}{between}", &second[30..]).as_bytes());
            expect(&summary(&mut source), &[(2, "c2")]);
            // Another process that resumes where the first stood sees the same.
            let mut resumed = Source::resume(&file.1, place, options).expect("opens");
            expect(&summary(&mut resumed), &[(2, "c2")]);
            assert_eq!(resumed.position(), source.position());
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_one_line_with_a_remedy() {
        let file = TestFile::new("chats.jsonl", b"{}\n");
        let open = |path: &Path| {
            Source::open(path, SourceOptions::default())
                .expect_err("unreadable")
                .to_string()
        };
        let missing = open(&file.0.path().join("absent.jsonl"));
        assert!(
            missing.starts_with("cannot open ") && missing.ends_with("check the path and its permissions")
        );
        assert!(missing.contains("absent.jsonl"), "{missing}");
        let folder = open(file.0.path());
        assert!(
            folder.ends_with("is no regular file; name the .jsonl or .json file itself"),
            "{folder}"
        );
        let place = Position {
            offset_bytes: 4,
            lines: 1,
        };
        let shrunk = Source::resume(&file.1, place, SourceOptions::default()).expect_err("shorter");
        assert!(
            matches!(
                shrunk,
                SourceError::Shrunk {
                    length_bytes: 3,
                    offset_bytes: 4,
                    ..
                }
            ),
            "{shrunk}"
        );
    }
}
