//! Aligned columns for terminals and pipes.

use std::io::{self, Write};

/// Rows of texts under headings. The last column is not padded.
pub(crate) struct Table<const COLUMNS: usize> {
    headings: [&'static str; COLUMNS],
    rows: Vec<[String; COLUMNS]>,
    right: [bool; COLUMNS],
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    pub(crate) const fn new(headings: [&'static str; COLUMNS]) -> Self {
        Self {
            headings,
            rows: Vec::new(),
            right: [false; COLUMNS],
        }
    }

    /// Sets a column of numbers flush right.
    pub(crate) fn align_right(mut self, columns: &[usize]) -> Self {
        for &column in columns {
            self.right[column] = true;
        }
        self
    }

    pub(crate) fn push(&mut self, row: [String; COLUMNS]) {
        self.rows.push(row);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Writes headings and rows, one a line.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub(crate) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let headings = self.headings.map(str::to_owned);
        let lines = || std::iter::once(&headings).chain(&self.rows);
        let mut widths = [0; COLUMNS];
        for line in lines() {
            for (width, text) in widths.iter_mut().zip(line) {
                *width = text.chars().count().max(*width);
            }
        }
        for line in lines() {
            let mut shown = String::new();
            for (column, text) in line.iter().enumerate() {
                let width = widths[column];
                if column > 0 {
                    shown.push_str("  ");
                }
                if self.right[column] {
                    shown.push_str(&format!("{text:>width$}"));
                } else {
                    shown.push_str(&format!("{text:<width$}"));
                }
            }
            writeln!(out, "{}", shown.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_longest_text() {
        let mut table = Table::new(["seat", "n", "detail"]).align_right(&[1]);
        table.push(["draft-0", "12", ""].map(str::to_owned));
        table.push(["é", "3", "a longer text"].map(str::to_owned));
        let mut out = Vec::new();
        table.write(&mut out).expect("memory can be written to");
        assert_eq!(
            String::from_utf8(out).expect("texts only"),
            "seat      n  detail\ndraft-0  12\né         3  a longer text\n"
        );
    }
}
