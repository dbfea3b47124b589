//! A progress line on a terminal, removed afterwards.

use std::io::Write;
use std::time::{Duration, Instant};

use super::size::amount;
use super::{connectivity, terminal, text};

const PAUSE: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(crate) struct Progress {
    is_shown: bool,
    /// Columns of the line on the screen.
    drawn: usize,
    next: Instant,
    began: Instant,
}

impl Progress {
    /// Shows progress on standard error, if it is wanted and that is a terminal.
    pub(crate) fn start(is_wanted: bool) -> Self {
        let now = Instant::now();
        let is_shown = is_wanted && terminal::redraws_lines(&std::io::stderr());
        Self { is_shown, drawn: 0, next: now + PAUSE, began: now }
    }

    /// Updates the line if it is due.
    pub(crate) fn show(&mut self, messages: u64, bytes: u64, what: &str) {
        if !self.is_shown {
            return;
        }
        let now = Instant::now();
        if now < self.next {
            return;
        }
        self.next = now + PAUSE;
        let rate = bytes as f64 / (now - self.began).as_secs_f64();
        let line = format!("{}{what}", totals(messages, bytes, Some(rate)));
        // Spaces instead of an escape sequence, which some terminals do not know.
        let drawn = self.drawn;
        let _ = write!(std::io::stderr(), "\r{line:drawn$}");
        self.drawn = line.chars().count();
    }

    /// Prints lines where the progress is, which the next update shows again.
    pub(crate) fn print_lines(&mut self, lines: &[String]) {
        if !lines.is_empty() {
            self.clear();
            connectivity::print_lines(lines);
        }
    }

    /// Removes the line until the next update.
    fn clear(&mut self) {
        let drawn = std::mem::take(&mut self.drawn);
        if drawn > 0 {
            let _ = write!(std::io::stderr(), "\r{:drawn$}\r", "");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A number of messages and bytes, and bytes per second if known.
pub(crate) fn totals(messages: u64, bytes: u64, rate: Option<f64>) -> String {
    let all = format!("{}, {}", text::count_of(messages, "message"), amount(bytes as f64));
    match rate {
        Some(rate) => format!("{all}, {}/s", amount(rate)),
        None => all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_is_shown_if_known() {
        assert_eq!(totals(1, 5, None), "1 message, 5 B");
        assert_eq!(totals(2, 2048, Some(1024.0)), "2 messages, 2.00 KiB, 1.00 KiB/s");
    }
}
