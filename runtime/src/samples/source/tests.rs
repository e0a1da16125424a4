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
    assert!(missing.starts_with("cannot open ") && missing.ends_with("check the path and its permissions"));
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
