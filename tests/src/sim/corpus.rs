//! The sample files of a schedule, and when each line of them is there to be read.

use std::path::PathBuf;

use super::dice::Dice;

/// One record of a line.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// Its own number over all files: what lies in the sample store.
    pub content: u32,
    /// Its length.
    pub tokens: u32,
    /// Whether intake refuses it.
    pub refused: bool,
}

/// One line of a file.
#[derive(Clone, Debug)]
pub struct Line {
    /// From when on it can be read.
    pub visible_ms: u64,
    /// What it makes.
    pub entries: Vec<Entry>,
}

/// A file of samples.
#[derive(Clone, Debug)]
pub struct SampleFile {
    /// Its name.
    pub name: String,
    /// Whether it is added to the live run, rather than read from the start.
    pub is_added: bool,
    /// Its lines.
    pub lines: Vec<Line>,
}

impl SampleFile {
    /// Its name as the engine knows it.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(&self.name)
    }
}

/// All files.
#[derive(Clone, Debug, Default)]
pub struct Corpus {
    /// In the order in which they are read.
    pub files: Vec<SampleFile>,
}

/// How large a corpus is to be, and when it grows.
#[derive(Clone, Copy, Debug)]
pub struct CorpusShape {
    /// Tokens that are there at the start, at least.
    pub tokens: u64,
    /// Longest sample.
    pub longest: u32,
    /// One in so many entries is refused by intake; 0 is none.
    pub refused_one_in: u32,
    /// Lines that come while the run goes on.
    pub late_lines: u64,
    /// Files that are added while the run goes on.
    pub added_files: u64,
    /// By when everything is there.
    pub until_ms: u64,
}

impl Corpus {
    /// A corpus of a shape.
    pub fn draw(dice: &mut Dice, shape: CorpusShape) -> Self {
        let mut content = 0;
        let mut entry = |dice: &mut Dice| {
            content += 1;
            Entry {
                content,
                tokens: dice.between(u64::from(shape.longest) / 3, u64::from(shape.longest)) as u32,
                refused: dice.one_in(shape.refused_one_in),
            }
        };
        let mut line = |dice: &mut Dice, visible_ms| Line {
            visible_ms,
            // Most lines make one record; some none, some several.
            entries: (0..dice.pick(&[0, 1, 1, 1, 1, 2, 3]))
                .map(|_| entry(dice))
                .collect(),
        };
        let mut base = Vec::new();
        let mut tokens = 0;
        while tokens < shape.tokens {
            let next = line(dice, 0);
            tokens += next
                .entries
                .iter()
                .filter(|entry| !entry.refused)
                .map(|entry| u64::from(entry.tokens))
                .sum::<u64>();
            base.push(next);
        }
        let mut late: Vec<u64> = (0..shape.late_lines)
            .map(|_| dice.between(1, shape.until_ms))
            .collect();
        late.sort_unstable();
        base.extend(late.into_iter().map(|visible_ms| line(dice, visible_ms)));
        let mut files = vec![SampleFile {
            name: "base.jsonl".to_owned(),
            is_added: false,
            lines: base,
        }];
        for number in 0..shape.added_files {
            files.push(SampleFile {
                name: format!("added-{number}.jsonl"),
                is_added: true,
                lines: (0..dice.between(1, 4)).map(|_| line(dice, 0)).collect(),
            });
        }
        Self { files }
    }
}
