//! What the live view is put together from: bars, lines, cells and their colours.

use eaglet_actors::monitor::{Point, RankState, RankView, SampleCounts};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Paragraph, Sparkline, Widget};

use super::format;

/// The `y`-th row of an area; empty below its end.
pub(super) fn row(area: Rect, y: u16) -> Rect {
    Rect {
        y: area.y.saturating_add(y),
        height: u16::from(y < area.height),
        ..area
    }
}

/// Draws a border with a title; the area inside.
pub(super) fn panel(title: &str, area: Rect, buffer: &mut Buffer) -> Rect {
    let block = Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(Style::from(Color::DarkGray))
        .title(Span::styled(format!(" {title} "), (Color::Reset, Modifier::BOLD)));
    let inner = block.inner(area);
    block.render(area, buffer);
    inner
}

pub(super) fn waiting(text: &str, area: Rect, buffer: &mut Buffer) {
    Paragraph::new(text)
        .style(Style::from(Color::DarkGray))
        .render(area, buffer);
}

pub(super) fn finite(points: &[Point]) -> impl Iterator<Item = (u64, f32)> + '_ {
    points
        .iter()
        .filter(|point| point.value.is_finite())
        .map(|point| (point.step.0, point.value))
}

pub(super) fn sparkline(values: &[f32], colour: Color, area: Rect, buffer: &mut Buffer) {
    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = (high - low).max(1e-6);
    // The lowest value keeps one eighth, so that it can be told from none.
    let bars: Vec<u64> = values
        .iter()
        .map(|value| 1 + ((value - low) / span * 7.0).round() as u64)
        .collect();
    Sparkline::default()
        .data(bars)
        .max(8)
        .style(Style::from(colour))
        .render(area, buffer);
}

pub(super) const fn is_down(state: RankState) -> bool {
    matches!(
        state,
        RankState::Gone | RankState::Restarting | RankState::HostAbsent
    )
}

pub(super) fn state_style(state: RankState) -> Style {
    match state {
        RankState::Starting | RankState::Loading | RankState::Leaving => Style::from(Color::Yellow),
        RankState::Idle => Style::from(Color::DarkGray),
        RankState::Extracting => Style::from(Color::Cyan),
        RankState::Training => Style::from(Color::Green),
        RankState::Gone => Style::from((Color::Red, Modifier::BOLD)),
        RankState::Restarting | RankState::HostAbsent => Style::from(Color::Magenta),
    }
}

pub(super) fn restarts_style(restarts: u32) -> Style {
    if restarts == 0 {
        Style::from(Color::DarkGray)
    } else {
        Style::from(Color::Magenta)
    }
}

pub(super) fn memory(rank: &RankView) -> String {
    if rank.rss_bytes == 0 {
        String::new()
    } else {
        format::bytes(rank.rss_bytes)
    }
}

pub(super) fn beat(rank: &RankView) -> String {
    rank.beat_age_ms
        .map(|age_ms| format!("{age_ms} ms"))
        .unwrap_or_default()
}

pub(super) fn rank_line(rank: &RankView) -> Line<'_> {
    let mut spans = vec![
        format!("{:<12}", rank.seat.to_string()).bold(),
        Span::styled(format!("{:<11}", rank.state), state_style(rank.state)),
    ];
    if rank.restarts > 0 {
        spans.push(format!("{} restarts  ", rank.restarts).magenta());
    }
    spans.push(Span::from(&*rank.detail).dark_gray());
    Line::from(spans)
}

/// States of a sample in the order of its life, with their colours; together they are `intake`.
pub(super) fn sample_states(samples: &SampleCounts) -> [(&'static str, u64, Color); 5] {
    [
        ("trained", samples.trained, Color::Green),
        ("extracted", samples.extracted, Color::Cyan),
        ("leased", samples.leased, Color::Yellow),
        ("pending", samples.pending, Color::DarkGray),
        ("quarantined", samples.quarantined, Color::Red),
    ]
}

/// A bar of `intake` with one colour per state; its cells are shared out by cumulative rounding.
pub(super) fn samples_bar(samples: &SampleCounts, area: Rect, buffer: &mut Buffer) {
    let states = sample_states(samples);
    let total: u64 = states.iter().map(|(_, count, _)| count).sum();
    if total == 0 || area.is_empty() {
        return;
    }
    let cell =
        |count: u64| (u128::from(count) * u128::from(area.width) + u128::from(total) / 2) / u128::from(total);
    let (mut sum, mut x) = (0, 0);
    for (_, count, colour) in states {
        sum += count;
        // At most the area's width, as `sum` is at most `total`.
        let end = cell(sum) as u16;
        buffer.set_string(
            area.x + x,
            area.y,
            "█".repeat(usize::from(end - x)),
            Style::from(colour),
        );
        x = end;
    }
}

/// One coloured mark and number per state.
pub(super) fn samples_legend(samples: &SampleCounts) -> Line<'static> {
    let mut spans = Vec::new();
    for (name, count, colour) in sample_states(samples) {
        spans.push(Span::styled("■ ", colour));
        spans.push(format!("{name} {}   ", format::grouped(count)).into());
    }
    Line::from(spans)
}

/// The same for a narrow terminal.
pub(super) fn samples_summary(samples: &SampleCounts) -> Line<'static> {
    let done = format!(
        "{}/{}",
        format::grouped(samples.trained),
        format::grouped(samples.intake)
    );
    let mut spans = vec!["trained ".green(), done.into()];
    spans.extend(["  extracted ".cyan(), format::grouped(samples.extracted).into()]);
    spans.extend(["  leased ".yellow(), format::grouped(samples.leased).into()]);
    if samples.quarantined > 0 {
        spans.extend([
            "  quarantined ".red(),
            format::grouped(samples.quarantined).into(),
        ]);
    }
    Line::from(spans)
}
