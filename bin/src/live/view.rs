//! Draws a snapshot: bordered panels where there is room, plain lines where there is not.
//!
//! Drawing depends on the snapshot and the size only, so that a picture or a test shows what a terminal shows.

use eaglet_actors::monitor::Snapshot;
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Cell, Chart, Dataset, GraphType, LineGauge, Row, Table, Widget};

use super::format;
use super::parts::{
    beat, finite, is_down, memory, panel, rank_line, restarts_style, row, samples_bar, samples_legend,
    samples_summary, sparkline, state_style, waiting,
};

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

        let counts = &snapshot.samples;
        let (intake, held_out) = (format::grouped(counts.intake), format::grouped(counts.held_out));
        let inner = panel(
            &format!("samples: {intake} taken in, {held_out} held out"),
            samples,
            buffer,
        );
        samples_bar(&snapshot.samples, row(inner, 0), buffer);
        samples_legend(&snapshot.samples).render(row(inner, 1), buffer);

        let [loss, quality] = Layout::horizontal([Constraint::Fill(1), Constraint::Length(44)]).areas(middle);
        self.loss_panel(loss, buffer);
        let inner = panel("draft", quality, buffer);
        self.quality(inner, buffer);

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
        samples_summary(&snapshot.samples).render(row(area, y + 1), buffer);
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
            right.extend(["  epoch ".dark_gray(), format::epoch(snapshot.epoch).into()]);
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
            .filled_symbol("━")
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

    fn quality(&self, area: Rect, buffer: &mut Buffer) {
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
        // Where there is room, a blank line sets the two tables apart.
        let rows = if area.height >= 8 {
            [2, 3, 5, 6, 7]
        } else {
            [1, 2, 3, 4, 5]
        };
        for (y, (label, cells, colour)) in rows.into_iter().zip(lines) {
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
