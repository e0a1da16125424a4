//! Draws a snapshot: bordered panels where there is room, plain lines where there is not.
//!
//! Drawing depends on the snapshot and the size only, so that a picture or a test shows what a terminal shows.

use eaglet_actors::monitor::{RankState, RankView, SampleCounts, Snapshot};
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Block, BorderType, Cell, Chart, Dataset, GraphType, LineGauge, Paragraph, Row, Sparkline, Table,
    Widget,
};

use super::format;

/// Smallest size that gets panels, in cells.
const PANELS: (u16, u16) = (78, 24);

/// A snapshot that can be drawn.
pub(crate) struct View<'a>(pub(crate) &'a Snapshot);

impl Widget for View<'_> {
    fn render(self, area: Rect, buffer: &mut Buffer) {
        if area.is_empty() {
            return;
        }
        if area.width >= PANELS.0 && area.height >= PANELS.1 {
            self.panels(area, buffer);
        } else {
            self.lines(area, buffer);
        }
    }
}

impl View<'_> {
    fn panels(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        // Ranks may take up to a third; what does not fit is counted in the title.
        let ranks_height = (snapshot.ranks.len() as u16 + 3).clamp(4, area.height / 3);
        let [header, gauge, ranks, samples, middle, events, footer] = Layout::vertical([
            Constraint::Length(1),
            Constraint::Length(1),
            Constraint::Length(ranks_height),
            Constraint::Length(4),
            Constraint::Min(7),
            Constraint::Length((area.height / 5).max(4)),
            Constraint::Length(1),
        ])
        .areas(area);
        self.header(header, buffer);
        self.gauge(gauge, buffer);
        self.ranks_panel(ranks, buffer);

        let inner = panel("samples", samples, buffer);
        samples_bar(&snapshot.samples, row(inner, 0), buffer);
        samples_legend(&snapshot.samples).render(row(inner, 1), buffer);

        let [loss, held_out] =
            Layout::horizontal([Constraint::Fill(1), Constraint::Length(44)]).areas(middle);
        self.loss_panel(loss, buffer);
        let inner = panel("held out", held_out, buffer);
        self.held_out(inner, buffer);

        let inner = panel("events", events, buffer);
        self.events(inner, buffer);
        self.footer(footer, buffer);
    }

    /// Everything as plain lines, the most wanted first; the event log takes what is left.
    fn lines(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        self.header(row(area, 0), buffer);
        self.gauge(row(area, 1), buffer);
        let mut y = 2;
        // Five lines below the ranks say more than further ranks would.
        let room = usize::from(area.height.saturating_sub(y + 5)).max(1);
        let shown = if snapshot.ranks.len() > room {
            room - 1
        } else {
            snapshot.ranks.len()
        };
        for rank in &snapshot.ranks[..shown] {
            rank_line(rank).render(row(area, y), buffer);
            y += 1;
        }
        if shown < snapshot.ranks.len() {
            let dead = snapshot.ranks[shown..]
                .iter()
                .filter(|rank| is_down(rank.state))
                .count();
            let text = format!(
                "and {} more ranks, {dead} of them down",
                snapshot.ranks.len() - shown
            );
            Line::from(text.dark_gray()).render(row(area, y), buffer);
            y += 1;
        }
        samples_bar(&snapshot.samples, row(area, y), buffer);
        samples_legend(&snapshot.samples).render(row(area, y + 1), buffer);
        y += 2;
        let title = format!("{:<12}", self.loss_title());
        let width = title.len().min(usize::from(area.width)) as u16;
        let [label, spark] =
            Layout::horizontal([Constraint::Length(width + 1), Constraint::Fill(1)]).areas(row(area, y));
        Line::from(title.bold()).render(label, buffer);
        self.loss_sparkline(spark, buffer);
        self.acceptance_line().render(row(area, y + 1), buffer);
        self.accuracy_line().render(row(area, y + 2), buffer);
        y += 3;
        if y + 1 < area.height {
            let rest = Rect {
                y: area.y + y,
                height: area.height - y - 1,
                ..area
            };
            self.events(rest, buffer);
            self.footer(row(area, area.height - 1), buffer);
        }
    }

    fn header(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        let phase_style = if snapshot.finished.is_some() {
            Color::Green
        } else {
            Color::Yellow
        };
        Line::from(vec![
            "eaglet ".bold().cyan(),
            Span::from(&*snapshot.run).bold(),
            "  ".into(),
            Span::styled(&*snapshot.phase, phase_style),
        ])
        .render(area, buffer);
        let speed = |tokens_per_s: f32| format::short(f64::from(tokens_per_s));
        let mut right = vec![
            "extract ".dark_gray(),
            format!("{} tok/s", speed(snapshot.extraction_tokens_per_s)).into(),
            "  train ".dark_gray(),
            format!("{} tok/s", speed(snapshot.training_tokens_per_s)).into(),
        ];
        if area.width >= PANELS.0 {
            right.extend(["  epoch ".dark_gray(), snapshot.epoch.to_string().into()]);
            right.extend([
                "  lr ".dark_gray(),
                format!("{:.1e}", snapshot.learning_rate).into(),
            ]);
        }
        let right = Line::from(right).alignment(Alignment::Right);
        let left_width = 7 + snapshot.run.chars().count() + 2 + snapshot.phase.chars().count() + 2;
        if left_width + right.width() <= usize::from(area.width) {
            right.render(area, buffer);
        }
    }

    fn gauge(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        let step = format::grouped(snapshot.step.0);
        let mut label = match snapshot.total_steps {
            Some(total) => format!("step {step}/{}", format::grouped(total.0)),
            None => format!("step {step}"),
        };
        if let Some(progress) = snapshot.progress() {
            label.push_str(&format!("  {:.0} %", (progress * 100.0).floor()));
        }
        if let (Some(eta_s), None) = (snapshot.eta_s, &snapshot.finished) {
            label.push_str(&format!("  eta {}", format::duration(eta_s)));
        }
        LineGauge::default()
            .ratio(snapshot.progress().unwrap_or(0.0))
            .label(label)
            .filled_style(Style::from(Color::Green))
            .unfilled_style(Style::from(Color::DarkGray))
            .render(area, buffer);
    }

    fn ranks_panel(&self, area: Rect, buffer: &mut Buffer) {
        let ranks = &self.0.ranks;
        let room = usize::from(area.height.saturating_sub(3));
        let title = if ranks.len() > room {
            format!("ranks ({room} of {})", ranks.len())
        } else {
            "ranks".to_owned()
        };
        let inner = panel(&title, area, buffer);
        let heading = Row::new(["seat", "gen", "pid", "state", "restarts", "memory", "beat", ""]);
        let rows = ranks.iter().take(room).map(|rank| {
            Row::new([
                Cell::from(rank.seat.to_string()).bold(),
                Cell::from(rank.generation.to_string()),
                Cell::from(rank.pid.map(|pid| pid.to_string()).unwrap_or_default()),
                Cell::from(rank.state.to_string()).style(state_style(rank.state)),
                Cell::from(rank.restarts.to_string()).style(restarts_style(rank.restarts)),
                Cell::from(memory(rank)),
                Cell::from(beat(rank)),
                Cell::from(&*rank.detail).dark_gray(),
            ])
        });
        let widths = [12, 4, 8, 11, 9, 9, 8]
            .map(Constraint::Length)
            .into_iter()
            .chain([Constraint::Fill(1)]);
        let table = Table::new(rows, widths)
            .header(heading.style(Style::from(Color::DarkGray)))
            .column_spacing(1);
        Widget::render(table, inner, buffer);
    }

    fn loss_title(&self) -> String {
        self.0
            .latest_loss()
            .map_or_else(|| "loss".to_owned(), |loss| format!("loss {loss:.3}"))
    }

    fn loss_panel(&self, area: Rect, buffer: &mut Buffer) {
        let inner = panel(&self.loss_title(), area, buffer);
        let points: Vec<(f64, f64)> = finite(&self.0.loss)
            .map(|(step, loss)| (step as f64, f64::from(loss)))
            .collect();
        let (Some(first), Some(last)) = (points.first(), points.last()) else {
            return waiting("the first step has not been committed yet", inner, buffer);
        };
        let low = points.iter().map(|point| point.1).fold(f64::INFINITY, f64::min);
        let high = points
            .iter()
            .map(|point| point.1)
            .fold(f64::NEG_INFINITY, f64::max);
        // A flat line still needs an axis with some height.
        let (low, high) = if high - low < 1e-6 {
            (low - 0.5, high + 0.5)
        } else {
            (low, high)
        };
        let label = |text: String| Span::styled(text, Color::DarkGray);
        let axis = |bounds: [f64; 2], labels: [String; 2]| {
            Axis::default()
                .bounds(bounds)
                .labels(labels.map(label))
                .style(Style::from(Color::DarkGray))
        };
        let x_end = if last.0 > first.0 { last.0 } else { first.0 + 1.0 };
        let dataset = Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::from(Color::Cyan))
            .data(&points);
        Chart::new(vec![dataset])
            .x_axis(axis(
                [first.0, x_end],
                [format!("{:.0}", first.0), format!("{:.0}", last.0)],
            ))
            .y_axis(axis([low, high], [format!("{low:.2}"), format!("{high:.2}")]))
            .render(inner, buffer);
    }

    /// The newest losses that fit, as bars from the lowest to the highest of them.
    fn loss_sparkline(&self, area: Rect, buffer: &mut Buffer) {
        let losses: Vec<f32> = finite(&self.0.loss).map(|(_, loss)| loss).collect();
        let shown = &losses[losses.len().saturating_sub(usize::from(area.width))..];
        sparkline(shown, Color::Cyan, area, buffer);
    }

    fn held_out(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        if snapshot.accuracy.is_empty() && snapshot.acceptance.latest.is_none() {
            return waiting("nothing has been evaluated yet", area, buffer);
        }
        let label = "acceptance length ";
        let length = snapshot
            .acceptance
            .latest
            .map_or_else(|| "-".to_owned(), |length| format!("{length:.2}"));
        let head = Line::from(vec![label.into(), length.bold().green(), "  ".into()]);
        let [text, spark] =
            Layout::horizontal([Constraint::Length(head.width() as u16), Constraint::Fill(1)])
                .areas(row(area, 0));
        head.render(text, buffer);
        let history: Vec<f32> = finite(&snapshot.acceptance.history)
            .map(|(_, length)| length)
            .collect();
        sparkline(
            &history[history.len().saturating_sub(usize::from(spark.width))..],
            Color::Green,
            spark,
            buffer,
        );

        let numbered = |count: usize| (1..=count).map(|number| number.to_string()).collect::<Vec<_>>();
        let positions: Vec<_> = snapshot
            .acceptance
            .per_position
            .iter()
            .map(|&part| format::percent(part))
            .collect();
        let full: Vec<_> = snapshot
            .accuracy
            .iter()
            .map(|step| format::percent(step.full))
            .collect();
        let conditional: Vec<_> = snapshot
            .accuracy
            .iter()
            .map(|step| format::percent(step.conditional))
            .collect();
        let lines = [
            ("position", numbered(positions.len()), Color::DarkGray),
            ("accepted", positions, Color::Reset),
            ("TTT step", numbered(full.len()), Color::DarkGray),
            ("full", full, Color::Reset),
            ("conditional", conditional, Color::Reset),
        ];
        for (y, (label, cells, colour)) in (1..).zip(lines) {
            let cells: String = cells.iter().map(|cell| format!("{cell:>6}")).collect();
            let line = Line::from(vec![
                format!("{label:<12}").dark_gray(),
                Span::styled(cells, colour),
            ]);
            line.render(row(area, y), buffer);
        }
    }

    fn acceptance_line(&self) -> Line<'static> {
        let acceptance = &self.0.acceptance;
        let Some(latest) = acceptance.latest else {
            return Line::from("acceptance   not evaluated yet".dark_gray());
        };
        let positions: String = acceptance
            .per_position
            .iter()
            .map(|&part| format!("{:>6}", format::percent(part)))
            .collect();
        Line::from(vec![
            "acceptance   ".into(),
            format!("{latest:.2}").bold().green(),
            positions.into(),
        ])
    }

    fn accuracy_line(&self) -> Line<'static> {
        if self.0.accuracy.is_empty() {
            return Line::from("accuracy     not evaluated yet".dark_gray());
        }
        let steps: String = self
            .0
            .accuracy
            .iter()
            .map(|step| format!("{:>6}", format::percent(step.conditional)))
            .collect();
        Line::from(format!("accuracy         {steps}"))
    }

    fn events(&self, area: Rect, buffer: &mut Buffer) {
        let events = &self.0.events;
        let newest = &events[events.len().saturating_sub(usize::from(area.height))..];
        for (y, event) in (0..).zip(newest) {
            Line::from(vec![
                format!("{} ", event.time).dark_gray(),
                Span::from(&*event.text),
            ])
            .render(row(area, y), buffer);
        }
    }

    fn footer(&self, area: Rect, buffer: &mut Buffer) {
        let snapshot = self.0;
        if let Some(finished) = &snapshot.finished {
            return Line::from(Span::from(&**finished).bold().green()).render(area, buffer);
        }
        let mut spans = vec!["q".bold(), " stops in good order".dark_gray()];
        if let Some(checkpoint) = &snapshot.checkpoint {
            spans.extend(["   newest checkpoint ".dark_gray(), Span::from(&**checkpoint)]);
        }
        Line::from(spans).render(area, buffer);
    }
}

/// The `y`-th row of an area; empty below its end.
fn row(area: Rect, y: u16) -> Rect {
    Rect {
        y: area.y.saturating_add(y),
        height: u16::from(y < area.height),
        ..area
    }
}

/// Draws a border with a title; the area inside.
fn panel(title: &str, area: Rect, buffer: &mut Buffer) -> Rect {
    let block = Block::bordered()
        .border_type(BorderType::Rounded)
        .border_style(Style::from(Color::DarkGray))
        .title(Span::styled(format!(" {title} "), Modifier::BOLD));
    let inner = block.inner(area);
    block.render(area, buffer);
    inner
}

fn waiting(text: &str, area: Rect, buffer: &mut Buffer) {
    Paragraph::new(text)
        .style(Style::from(Color::DarkGray))
        .render(area, buffer);
}

fn finite(points: &[eaglet_actors::monitor::Point]) -> impl Iterator<Item = (u64, f32)> + '_ {
    points
        .iter()
        .filter(|point| point.value.is_finite())
        .map(|point| (point.step.0, point.value))
}

fn sparkline(values: &[f32], colour: Color, area: Rect, buffer: &mut Buffer) {
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

const fn is_down(state: RankState) -> bool {
    matches!(state, RankState::Dead | RankState::Restarting)
}

fn state_style(state: RankState) -> Style {
    match state {
        RankState::Starting | RankState::Loading => Style::from(Color::Yellow),
        RankState::Idle => Style::from(Color::DarkGray),
        RankState::Extracting => Style::from(Color::Cyan),
        RankState::Training => Style::from(Color::Green),
        RankState::Dead => Style::from((Color::Red, Modifier::BOLD)),
        RankState::Restarting => Style::from(Color::Magenta),
    }
}

fn restarts_style(restarts: u32) -> Style {
    if restarts == 0 {
        Style::from(Color::DarkGray)
    } else {
        Style::from(Color::Magenta)
    }
}

fn memory(rank: &RankView) -> String {
    if rank.rss_bytes == 0 {
        String::new()
    } else {
        format::bytes(rank.rss_bytes)
    }
}

fn beat(rank: &RankView) -> String {
    rank.beat_age_ms
        .map(|age_ms| format!("{age_ms} ms"))
        .unwrap_or_default()
}

fn rank_line(rank: &RankView) -> Line<'_> {
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
fn sample_states(samples: &SampleCounts) -> [(&'static str, u64, Color); 5] {
    [
        ("trained", samples.trained, Color::Green),
        ("extracted", samples.extracted, Color::Cyan),
        ("leased", samples.leased, Color::Yellow),
        ("pending", samples.pending, Color::DarkGray),
        ("quarantined", samples.quarantined, Color::Red),
    ]
}

/// A bar of `intake` with one colour per state; its cells are shared out by cumulative rounding.
fn samples_bar(samples: &SampleCounts, area: Rect, buffer: &mut Buffer) {
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

fn samples_legend(samples: &SampleCounts) -> Line<'static> {
    let mut spans = Vec::new();
    for (name, count, colour) in sample_states(samples) {
        spans.push(Span::styled("■ ", colour));
        spans.push(format!("{name} {}  ", format::grouped(count)).into());
    }
    spans.push(format!("of {}", format::grouped(samples.intake)).dark_gray());
    spans.push(format!("  held out {}", format::grouped(samples.held_out)).dark_gray());
    Line::from(spans)
}
