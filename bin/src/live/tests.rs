use eaglet_actors::monitor::{Point, RankState};
use eaglet_runtime::ids::{Seat, Step};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::Color;

use super::*;

fn example() -> Snapshot {
    serde_json::from_str(include_str!("example.json")).expect("the example is a snapshot")
}

fn terminal(snapshot: &Snapshot, columns: u16, rows: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a buffer in memory");
    terminal
        .draw(|frame| frame.render_widget(View(snapshot), frame.area()))
        .expect("a buffer in memory");
    terminal
}

/// Lines as they are shown, without the blanks at their ends.
fn screen(snapshot: &Snapshot, columns: u16, rows: u16) -> Vec<String> {
    let terminal = terminal(snapshot, columns, rows);
    let buffer = terminal.backend().buffer();
    (0..rows)
        .map(|y| {
            (0..columns)
                .map(|x| buffer[(x, y)].symbol())
                .collect::<String>()
                .trim_end()
                .to_owned()
        })
        .collect()
}

fn assert_screen(snapshot: &Snapshot, columns: u16, rows: u16, expected: &str) {
    let shown = screen(snapshot, columns, rows).join("\n");
    assert!(
        shown == expected.trim_end_matches('\n'),
        "shown:\n{shown}\nexpected:\n{expected}"
    );
}

#[test]
fn a_wide_terminal_gets_panels() {
    assert_screen(&example(), 100, 30, include_str!("expected/100x30.txt"));
}

#[test]
fn a_small_terminal_gets_lines() {
    assert_screen(&example(), 60, 16, include_str!("expected/60x16.txt"));
}

#[test]
fn nothing_known_yet_is_said_so() {
    let snapshot = Snapshot {
        run: "demo".to_owned(),
        phase: "starting".to_owned(),
        ..Snapshot::default()
    };
    let shown = screen(&snapshot, 100, 30).join("\n");
    assert!(
        shown.contains("the first step has not been committed yet"),
        "{shown}"
    );
    assert!(shown.contains("nothing has been evaluated yet"), "{shown}");
    assert!(shown.contains("step 0 ") && !shown.contains("eta"), "{shown}");
}

#[test]
fn every_size_is_drawn() {
    let mut snapshots = vec![Snapshot::default(), example()];
    let mut odd = example();
    odd.loss = vec![
        Point {
            step: Step(7),
            value: 2.0,
        },
        Point {
            step: Step(8),
            value: f32::NAN,
        },
    ];
    odd.acceptance.history.clear();
    odd.samples.trained = u64::MAX / 8;
    odd.total_steps = Some(Step(0));
    odd.run = "ein sehr langer Name für einen Lauf, der nirgends hineinpasst, 長い名前".to_owned();
    snapshots.push(odd);
    for snapshot in &snapshots {
        for columns in [0, 1, 7, 19, 40, 77, 78, 79, 120, 300] {
            for rows in [0, 1, 2, 3, 5, 8, 23, 24, 25, 80] {
                let terminal = terminal(snapshot, columns, rows);
                assert_eq!(terminal.backend().buffer().area.height, rows);
            }
        }
    }
}

#[test]
fn ranks_that_do_not_fit_are_counted() {
    let mut snapshot = example();
    for index in 2..40 {
        let mut rank = snapshot.ranks[1].clone();
        rank.seat = Seat::draft(index);
        rank.state = if index == 39 {
            RankState::Gone
        } else {
            RankState::Training
        };
        snapshot.ranks.push(rank);
    }
    let wide = screen(&snapshot, 100, 30).join("\n");
    assert!(
        wide.contains("ranks (7 of 41)") && wide.contains("acceptance length"),
        "{wide}"
    );
    let small = screen(&snapshot, 60, 16).join("\n");
    assert!(small.contains("and 33 more ranks, 1 of them down"), "{small}");
    assert!(small.contains("acceptance   2.31"), "{small}");
}

#[test]
fn states_have_their_colours_and_the_samples_bar_its_shares() {
    let mut snapshot = example();
    snapshot.ranks[2].state = RankState::Gone;
    let terminal = terminal(&snapshot, 100, 30);
    let buffer = terminal.backend().buffer();
    let colour_of = |word: &str| {
        let place = (0..30).find_map(|y| {
            let line: Vec<_> = (0..100).map(|x| buffer[(x, y)].symbol()).collect();
            line.concat()
                .find(word)
                .map(|at| (line.concat()[..at].chars().count() as u16, y))
        });
        buffer[place.unwrap_or_else(|| panic!("{word} is not shown"))].fg
    };
    assert_eq!(colour_of("extracting"), Color::Cyan);
    assert_eq!(colour_of("training    0"), Color::Green);
    assert_eq!(colour_of("gone"), Color::Red);
    // 98 cells for 2400 samples: 1128 trained are 46.06 of them, 1236 pending 50.47.
    let bar = (0..30)
        .find(|&y| buffer[(1, y)].symbol() == "█")
        .expect("there is a bar");
    let count = |colour| {
        (0..100)
            .filter(|&x| buffer[(x, bar)].symbol() == "█" && buffer[(x, bar)].fg == colour)
            .count()
    };
    assert_eq!(
        [Color::Green, Color::Cyan, Color::DarkGray].map(count),
        [46, 1, 51]
    );
}

#[test]
fn a_finished_run_shows_its_summary() {
    let mut snapshot = example();
    snapshot.finished = Some("finished: 510 steps, acceptance length 2.48".to_owned());
    for (columns, rows) in [(100, 30), (60, 16)] {
        let shown = screen(&snapshot, columns, rows).join("\n");
        assert!(
            shown.ends_with("finished: 510 steps, acceptance length 2.48"),
            "{shown}"
        );
        assert!(!shown.contains("eta"), "{shown}");
    }
}

#[test]
fn the_picture_is_well_formed_repeats_and_shows_the_same_words() {
    let svg = svg(&example(), 100, 30);
    assert_eq!(svg, super::svg(&example(), 100, 30));
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    assert_eq!(svg.matches("<text ").count(), svg.matches("</text>").count());
    let words: Vec<&str> = svg
        .split("</text>")
        .filter_map(|part| part.rsplit('>').next())
        .collect();
    for word in ["demo", "extracting", "verifier-0", "2.31", "conditional"] {
        assert!(words.contains(&word), "{word} is not in {words:?}");
    }
    // Nothing that a font would have to draw as a block, a dot or a border is left as a letter.
    assert!(svg.is_ascii(), "{:?}", svg.chars().find(|c| !c.is_ascii()));
    let mut hostile = example();
    hostile.ranks[0].detail = "<script>&".to_owned();
    assert!(super::svg(&hostile, 100, 30).contains("&lt;script&gt;&amp;"));
}

#[test]
fn q_and_control_c_quit() {
    use ratatui::crossterm::event::KeyEvent;
    let key = |code, modifiers| is_quit(&Event::Key(KeyEvent::new(code, modifiers)));
    assert!(key(KeyCode::Char('q'), KeyModifiers::NONE) && key(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(!key(KeyCode::Char('c'), KeyModifiers::NONE) && !key(KeyCode::Enter, KeyModifiers::NONE));
    assert!(!is_quit(&Event::Resize(1, 1)));
}
