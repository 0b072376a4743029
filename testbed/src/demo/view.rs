//! What a person sees while the demo runs: steps and events as lines, and on a terminal a live board below them.
//!
//! Start at [`View`]. Everything here goes to standard error; the summary at the end goes to standard output.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::board::{Board, Picture};

/// Shows the progress of a run.
pub(crate) trait View {
    /// Something takes a while.
    fn step(&mut self, what: &str);
    /// Something is done.
    fn done(&mut self, what: &str);
    /// Something happened in the story, at this time of the app's clock in ms.
    fn event(&mut self, at_ms: f64, what: &str);
    /// How things stand.
    fn show(&mut self, picture: &Picture);
    /// Nothing more will come.
    fn end(&mut self);
}

/// A live view on a terminal, plain lines elsewhere.
pub(crate) fn for_this_terminal(headless: bool) -> Box<dyn View> {
    if !headless && std::io::stderr().is_terminal() {
        Box::new(Live::new())
    } else {
        Box::new(Plain::new())
    }
}

/// Lines only.
struct Plain {
    started: Instant,
    shown: Instant,
}

/// Without a terminal the state is told this often.
const PLAIN_EVERY: Duration = Duration::from_secs(5);

impl Plain {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            shown: Instant::now(),
        }
    }
}

impl View for Plain {
    fn step(&mut self, _what: &str) {}

    fn done(&mut self, what: &str) {
        eprintln!("[{:6.1} s] {what}", self.started.elapsed().as_secs_f64());
    }

    fn event(&mut self, at_ms: f64, what: &str) {
        let now = self.started.elapsed().as_secs_f64();
        eprintln!("[{now:6.1} s] at {:.1} s: {what}", at_ms / 1e3);
    }

    fn show(&mut self, picture: &Picture) {
        if self.shown.elapsed() >= PLAIN_EVERY {
            self.shown = Instant::now();
            let now = self.started.elapsed().as_secs_f64();
            eprintln!("[{now:6.1} s] {}", picture.line());
        }
    }

    fn end(&mut self) {}
}

/// A board that is drawn in place, with steps and events above it.
struct Live {
    started: Instant,
    screen: MultiProgress,
    spinner: Option<ProgressBar>,
    lines: Vec<ProgressBar>,
    board: Board,
}

impl Live {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            screen: MultiProgress::new(),
            spinner: None,
            lines: Vec::new(),
            board: Board::new(std::env::var_os("NO_COLOR").is_none()),
        }
    }

    fn print(&self, line: &str) {
        // A terminal that is gone needs no lines.
        let _gone = self.screen.println(line);
    }

    fn stop_spinner(&mut self) {
        if let Some(spinner) = self.spinner.take() {
            spinner.finish_and_clear();
            self.screen.remove(&spinner);
        }
    }
}

impl View for Live {
    fn step(&mut self, what: &str) {
        self.stop_spinner();
        let spinner = self.screen.add(ProgressBar::new_spinner());
        spinner.set_style(
            ProgressStyle::with_template("{spinner} {wide_msg}").expect("a constant template"),
        );
        spinner.set_message(format!("{what} …"));
        spinner.enable_steady_tick(Duration::from_millis(120));
        self.spinner = Some(spinner);
    }

    fn done(&mut self, what: &str) {
        self.stop_spinner();
        let now = self.started.elapsed().as_secs_f64();
        self.print(&self.board.done(now, what));
    }

    fn event(&mut self, at_ms: f64, what: &str) {
        if self.lines.is_empty() {
            self.stop_spinner();
            self.print(&self.board.event(at_ms, what));
        } else {
            self.board.remember(at_ms, what);
        }
    }

    fn show(&mut self, picture: &Picture) {
        self.stop_spinner();
        let texts = self.board.lines(picture);
        while self.lines.len() < texts.len() {
            let line = self.screen.add(ProgressBar::new(0));
            line.set_style(
                ProgressStyle::with_template("{wide_msg}").expect("a constant template"),
            );
            self.lines.push(line);
        }
        for (line, text) in self.lines.iter().zip(&texts) {
            line.set_message(text.clone());
            line.tick();
        }
        for line in self.lines.iter().skip(texts.len()) {
            line.set_message(String::new());
        }
    }

    fn end(&mut self) {
        self.stop_spinner();
        for line in self.lines.drain(..) {
            line.abandon();
        }
    }
}
