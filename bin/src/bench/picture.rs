//! Where time goes, as an SVG picture: a bar for each stage, and in it what the machine's limits leave as the shortest time.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};

use super::stages::Stage;

const WIDTH: f64 = 860.0;
const LABEL_WIDTH: f64 = 230.0;
const BAR_WIDTH: f64 = 470.0;
const ROW_HEIGHT: f64 = 22.0;
const TOP: f64 = 64.0;
/// Stages below this share of the time are drawn together.
const LEAST_SHARE: f64 = 0.01;

/// Writes the picture of `stages`, which took `total` seconds together with what lies between them.
///
/// # Errors
/// If the file cannot be written.
pub(super) fn write(path: &Path, title: &str, stages: &[Stage], total: f64) -> Result<()> {
    std::fs::write(path, svg(title, stages, total))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn svg(title: &str, stages: &[Stage], total: f64) -> String {
    let mut bars: Vec<(String, f64, f64)> = Vec::new();
    let (mut small, mut small_limit) = (0.0, 0.0);
    for stage in stages {
        if stage.seconds < LEAST_SHARE * total {
            small += stage.seconds;
            small_limit += stage.seconds * stage.of_limit.min(1.0);
        } else {
            let label = format!("{}: {}", stage.stage, stage.kind);
            bars.push((label, stage.seconds, stage.of_limit.min(1.0)));
        }
    }
    bars.sort_by(|a, b| b.1.total_cmp(&a.1));
    if small > 0.0 {
        bars.push(("smaller ones".to_owned(), small, small_limit / small));
    }
    let known: f64 = stages.iter().map(|stage| stage.seconds).sum();
    bars.push(("between operations".to_owned(), (total - known).max(0.0), 0.0));
    let longest = bars.iter().map(|bar| bar.1).fold(1e-12, f64::max);
    let height = TOP + ROW_HEIGHT * bars.len() as f64 + 12.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"14\">{}</text>\n\
         <text x=\"12\" y=\"46\" fill=\"#555555\">dark: what the limits of computing and of memory leave as the shortest \
         time</text>\n",
        escaped(title)
    );
    for (place, (label, seconds, of_limit)) in bars.iter().enumerate() {
        let y = TOP + ROW_HEIGHT * place as f64;
        let width = BAR_WIDTH * seconds / longest;
        let (bar, text) = (ROW_HEIGHT - 6.0, y + ROW_HEIGHT - 10.0);
        // Writing to a string cannot fail.
        let _ = write!(
            svg,
            "<text x=\"{:.0}\" y=\"{text:.1}\" text-anchor=\"end\">{}</text>\n\
             <rect x=\"{LABEL_WIDTH}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{bar}\" fill=\"#9ec5e8\"/>\n\
             <rect x=\"{LABEL_WIDTH}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{bar}\" fill=\"#2b6ca3\"/>\n\
             <text x=\"{:.1}\" y=\"{text:.1}\">{:.1} ms, {:.1} %</text>\n",
            LABEL_WIDTH - 8.0,
            escaped(label),
            width * of_limit,
            LABEL_WIDTH + width + 8.0,
            seconds * 1e3,
            100.0 * seconds / total.max(1e-12),
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_stages_are_drawn_together_and_the_rest_has_a_bar() {
        let stage = |stage, seconds, of_limit| Stage {
            stage,
            kind: "product",
            seconds,
            gflops_per_s: 1.0,
            gb_per_s: 1.0,
            of_limit,
        };
        let stages = [
            stage("a < b", 0.3, 0.5),
            stage("c", 0.6, 2.0),
            stage("d", 0.004, 0.1),
            stage("e", 0.006, 0.2),
        ];
        let svg = svg("one & two", &stages, 1.0);
        let places = [
            "one &amp; two",
            "c: product",
            "a &lt; b: product",
            "smaller ones",
            "between operations",
        ]
        .map(|text| svg.find(text).unwrap_or_else(|| panic!("{text} in {svg}")));
        assert!(places.is_sorted(), "{places:?}");
        for text in ["600.0 ms, 60.0 %", "10.0 ms, 1.0 %", "90.0 ms, 9.0 %"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        assert!(!svg.contains("d: product"));
    }
}
