//! A snapshot as an SVG picture, cell by cell as a terminal would show it.
//!
//! Bars, braille dots and borders are drawn as shapes, not as letters: fonts disagree about them.

use std::fmt::Write as _;

use eaglet_actors::monitor::Snapshot;
use ratatui::buffer::{Buffer, Cell};
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier};
use ratatui::widgets::Widget;

use super::view::View;

/// Width of a cell, in SVG units; 0.6 of the font size, as monospaced fonts have it.
const CELL_WIDTH: f64 = 8.4;
/// Height of a cell, in SVG units.
const CELL_HEIGHT: f64 = 17.0;
/// Size of letters, in SVG units.
const FONT_SIZE: f64 = 14.0;
/// Distance of the letters' base line from the top of a cell, in SVG units.
const BASELINE: f64 = 13.0;
/// Free space around the cells, in SVG units.
const MARGIN: f64 = 12.0;

/// Draws a snapshot as a terminal of `columns` by `rows` cells would show it.
pub(crate) fn svg(snapshot: &Snapshot, columns: u16, rows: u16) -> String {
    let area = Rect::new(0, 0, columns, rows);
    let mut buffer = Buffer::empty(area);
    View(snapshot).render(area, &mut buffer);

    let width = f64::from(columns) * CELL_WIDTH + 2.0 * MARGIN;
    let height = f64::from(rows) * CELL_HEIGHT + 2.0 * MARGIN;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.1} {height:.1}\" \
         font-family=\"ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace\" font-size=\"{FONT_SIZE}\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#16181d\"/>\n"
    );
    for y in 0..rows {
        let mut x = 0;
        while x < columns {
            x += draw_run(&buffer, x, y, columns, &mut out);
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Draws the cell at `x`, together with the letters of the same style that follow it; how many cells that were.
fn draw_run(buffer: &Buffer, x: u16, y: u16, columns: u16, out: &mut String) -> u16 {
    let cell = &buffer[(x, y)];
    let (left, top) = (
        MARGIN + f64::from(x) * CELL_WIDTH,
        MARGIN + f64::from(y) * CELL_HEIGHT,
    );
    let fill = hex(cell.fg);
    let symbol = cell.symbol().chars().next().unwrap_or(' ');
    if symbol == ' ' {
        return 1;
    }
    if let Some(shape) = shape(symbol, left, top, fill) {
        out.push_str(&shape);
        return 1;
    }
    let same = |other: &Cell| {
        let symbol = other.symbol().chars().next().unwrap_or(' ');
        other.fg == cell.fg
            && other.modifier == cell.modifier
            && symbol != ' '
            && shape(symbol, 0.0, 0.0, fill).is_none()
    };
    let length = (x..columns).take_while(|&x| same(&buffer[(x, y)])).count() as u16;
    let text: String = (x..x + length).map(|x| escape(buffer[(x, y)].symbol())).collect();
    let weight = if cell.modifier.contains(Modifier::BOLD) {
        " font-weight=\"bold\""
    } else {
        ""
    };
    // The length is given, so that a font of another width keeps the columns.
    let _ = writeln!(
        out,
        "<text x=\"{left:.1}\" y=\"{:.1}\" textLength=\"{:.1}\" fill=\"{fill}\"{weight}>{text}</text>",
        top + BASELINE,
        f64::from(length) * CELL_WIDTH,
    );
    length
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// The shape of a symbol that is no letter.
fn shape(symbol: char, left: f64, top: f64, fill: &str) -> Option<String> {
    let code = u32::from(symbol);
    let rect = |x: f64, y: f64, width: f64, height: f64| {
        format!(
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{fill}\" \
             shape-rendering=\"crispEdges\"/>\n"
        )
    };
    match code {
        // Lower blocks, one to eight eighths high.
        0x2581..=0x2588 => {
            let height = f64::from(code - 0x2580) / 8.0 * CELL_HEIGHT;
            Some(rect(left, top + CELL_HEIGHT - height, CELL_WIDTH, height))
        }
        // Left blocks, seven to one eighths wide.
        0x2589..=0x258f => Some(rect(
            left,
            top,
            f64::from(0x2590 - code) / 8.0 * CELL_WIDTH,
            CELL_HEIGHT,
        )),
        0x2501 => Some(rect(left, top + CELL_HEIGHT / 2.0 - 1.5, CELL_WIDTH, 3.0)),
        0x25a0 => Some(rect(left, top + 5.0, CELL_WIDTH - 1.0, CELL_WIDTH - 1.0)),
        0x2800..=0x28ff => Some(braille(code - 0x2800, left, top, fill)),
        _ => arms(symbol).map(|arms| lines(arms, left, top, fill)),
    }
}

/// Dots of a braille pattern: bits 0 to 2 go down the left column, 3 to 5 down the right one, 6 and 7 lie below.
fn braille(bits: u32, left: f64, top: f64, fill: &str) -> String {
    const PLACES: [(f64, f64); 8] = [
        (0.0, 0.0),
        (0.0, 1.0),
        (0.0, 2.0),
        (1.0, 0.0),
        (1.0, 1.0),
        (1.0, 2.0),
        (0.0, 3.0),
        (1.0, 3.0),
    ];
    let mut out = String::new();
    for (bit, (column, line)) in PLACES.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1) {
        debug_assert!(bit < 8, "a pattern has eight dots");
        let x = left + (column + 0.5) * CELL_WIDTH / 2.0;
        let y = top + (line + 0.5) * CELL_HEIGHT / 4.0;
        let _ = writeln!(
            out,
            "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"1.4\" fill=\"{fill}\"/>"
        );
    }
    out
}

/// Directions (up, down, left, right) in which a border symbol reaches from its middle.
fn arms(symbol: char) -> Option<[bool; 4]> {
    let arms = match symbol {
        '─' => [false, false, true, true],
        '│' => [true, true, false, false],
        '╭' | '┌' => [false, true, false, true],
        '╮' | '┐' => [false, true, true, false],
        '╰' | '└' => [true, false, false, true],
        '╯' | '┘' => [true, false, true, false],
        _ => return None,
    };
    Some(arms)
}

fn lines(arms: [bool; 4], left: f64, top: f64, stroke: &str) -> String {
    let (x, y) = (left + CELL_WIDTH / 2.0, top + CELL_HEIGHT / 2.0);
    let ends = [
        (x, top),
        (x, top + CELL_HEIGHT),
        (left, y),
        (left + CELL_WIDTH, y),
    ];
    let path: String = ends
        .iter()
        .zip(arms)
        .filter(|(_, reaches)| *reaches)
        .map(|((end_x, end_y), _)| format!("M{x:.1} {y:.1}L{end_x:.1} {end_y:.1}"))
        .collect();
    format!("<path d=\"{path}\" stroke=\"{stroke}\" stroke-linecap=\"round\"/>\n")
}

/// The colour that the picture gives to a terminal colour.
const fn hex(colour: Color) -> &'static str {
    match colour {
        Color::Red => "#f2777a",
        Color::Green => "#8fc98f",
        Color::Yellow => "#f0c674",
        Color::Magenta => "#c8a2e0",
        Color::Cyan => "#6cc7d4",
        Color::DarkGray => "#767d8a",
        _ => "#d7dae0",
    }
}
