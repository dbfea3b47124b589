//! The live display: a table that is redrawn in place on a terminal, or else a line at intervals.

use std::io::Write;
use std::time::{Duration, Instant};

use super::SubscriberRow;
use crate::cli::exit::{Failure, Result};
use crate::cli::stages::{Stage, TOTAL};
use crate::cli::{output, size, terminal, text};

/// Period of the rates.
pub(super) const WINDOW: Duration = Duration::from_secs(3);
/// Interval of the table, and of the lines.
const REDRAW: Duration = Duration::from_millis(500);
const LINE: Duration = Duration::from_secs(3);

/// The form of the display.
pub(super) struct LiveDisplay {
    is_terminal: bool,
    started_at: Instant,
    next: Instant,
    /// Lines of the table on the screen.
    lines: usize,
}

impl LiveDisplay {
    pub(super) fn begin() -> Self {
        let is_terminal = terminal::takes_escapes(&std::io::stdout());
        let started_at = Instant::now();
        let next = started_at + if is_terminal { Duration::ZERO } else { LINE };
        Self { is_terminal, started_at, next, lines: 0 }
    }

    /// Updates the display if it is due.
    pub(super) fn update(&mut self, readers: impl FnOnce() -> Vec<SubscriberRow>) -> Result<()> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let readers = readers();
        if !self.is_terminal {
            self.next = Instant::now() + LINE;
            return output::print(&self.line(&readers));
        }
        self.next = Instant::now() + REDRAW;
        let window = WINDOW.as_secs();
        let heading = format!("Rates of the last {window} s, medians of all messages so far:\n");
        let table = heading + &table(&readers, false);
        self.clear()?;
        self.lines = table.lines().count();
        // Lines wider than the terminal are cut off: wrapped lines would not be counted.
        output::print(&format!("\x1b[?7l{table}\x1b[?7h"))
    }

    /// Removes the table, so that other output can be printed.
    pub(super) fn clear(&mut self) -> Result<()> {
        if self.lines == 0 {
            return Ok(());
        }
        let up = format!("\x1b[{}A\x1b[J", self.lines);
        self.lines = 0;
        let mut out = std::io::stdout().lock();
        let written = out.write_all(up.as_bytes());
        written.map_err(|error| Failure::failed(format!("write standard output failed: {error}")))
    }

    fn line(&self, readers: &[SubscriberRow]) -> String {
        let rate: f64 = readers.iter().map(SubscriberRow::bytes_per_s).sum();
        let [messages, bytes, corrupted, missed] = totals(readers);
        format!(
            "{:4.0} s: {} read and compared, {}; now {}/s; {corrupted} corrupted, {missed} missed\n",
            self.started_at.elapsed().as_secs_f64(),
            text::count_of(messages, "message"),
            size::amount(bytes as f64),
            size::amount(rate),
        )
    }
}

/// Messages and bytes that were read, and messages that were corrupted and missed.
pub(super) fn totals(readers: &[SubscriberRow]) -> [u64; 4] {
    let reports = readers.iter().map(|reader| &reader.last_report);
    reports.fold([0; 4], |[messages, bytes, corrupted, missed], it| {
        let missed = missed + it.missed.unwrap_or(0);
        [messages + it.messages, bytes + it.bytes, corrupted + it.corrupted, missed]
    })
}

impl SubscriberRow {
    /// Bytes per second in the last window.
    fn bytes_per_s(&self) -> f64 {
        self.rate * self.message_bytes as f64
    }
}

/// Names of the stages in order, and the total.
pub(super) fn stages() -> impl Iterator<Item = &'static str> {
    Stage::ALL.into_iter().map(Stage::name).chain([TOTAL])
}

/// A time, to three digits at most, so that a row fits.
pub(super) fn time(microseconds: f64) -> String {
    let (value, unit) = match microseconds {
        ..1e3 => (microseconds, "µs"),
        1e3..1e6 => (microseconds / 1e3, "ms"),
        _ => (microseconds / 1e6, "s"),
    };
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// A row for each subscriber; at the end with the totals.
pub(super) fn table(readers: &[SubscriberRow], is_over: bool) -> String {
    let mut head = vec!["topic", "size", "subscriber", "messages"];
    if !is_over {
        head.extend(["per s", "GiB/s"]);
    }
    // A stage without values is left out: without devices, nothing is copied out.
    let known = || readers.iter().flat_map(|it| &it.last_report.stages);
    let stages: Vec<_> = stages().filter(|name| known().any(|it| it.stage == *name)).collect();
    head.extend(&stages);
    head.extend(["path", "data"]);
    let mut rows = vec![head.into_iter().map(str::to_owned).collect()];
    for reader in readers {
        let SubscriberRow { topic, message_bytes, name, rate, last_report, .. } = reader;
        let (size, messages) = (size::print(*message_bytes), last_report.messages.to_string());
        let mut row = vec![(*topic).to_owned(), size, name.clone(), messages];
        if !is_over {
            row.push(format!("{rate:.1}"));
            row.push(format!("{:.2}", reader.bytes_per_s() / f64::from(1 << 30)));
        }
        row.extend(stages.iter().map(|name| {
            let one = last_report.stages.iter().find(|one| one.stage == *name);
            one.map_or_else(String::new, |one| time(one.p50_us))
        }));
        row.push(last_report.paths.join(", "));
        let [messages, _, corrupted, missed] = totals(std::slice::from_ref(reader));
        row.push(match (messages, corrupted, missed) {
            (0, 0, 0) => String::new(),
            (_, 0, 0) => "right".to_owned(),
            _ => format!("{corrupted} CORRUPTED, {missed} MISSED"),
        });
        rows.push(row);
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_three_digits_at_most() {
        for (microseconds, shown) in [(1.5, "1.5 µs"), (578_840.0, "579 ms"), (3e6, "3.0 s")] {
            assert_eq!(time(microseconds), shown);
        }
    }
}
