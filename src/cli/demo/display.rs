//! What is seen while it runs: a table that is drawn anew where it stands, or a line now and
//! then where nobody looks.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::processes::{DemoProcess, ProcessReport, Role, WINDOW};
use super::scenario::{DemoTopic, TOPICS};
use crate::cli::exit::Failure;
use crate::cli::stages::{Stage, TOTAL};
use crate::cli::statistics::Latency;
use crate::cli::{size, text};

/// Between two drawings of the table, and two lines.
const REDRAW: Duration = Duration::from_millis(500);
const LINE: Duration = Duration::from_secs(3);

/// How it is shown.
pub(super) struct LiveDisplay {
    is_terminal: bool,
    started_at: Instant,
    next: Instant,
    /// Lines of the table that stand there.
    lines: usize,
}

impl LiveDisplay {
    pub(super) fn begin() -> Self {
        let is_terminal = std::io::stdout().is_terminal();
        let started_at = Instant::now();
        let next = started_at + if is_terminal { Duration::ZERO } else { LINE };
        Self { is_terminal, started_at, next, lines: 0 }
    }

    /// Shows how it is, if it is time.
    pub(super) fn look(&mut self, members: &[DemoProcess]) -> Result<(), Failure> {
        if Instant::now() < self.next {
            return Ok(());
        }
        let readers = readers(members);
        if !self.is_terminal {
            self.next = Instant::now() + LINE;
            return text::print(&self.line(&readers));
        }
        self.next = Instant::now() + REDRAW;
        let window = WINDOW.as_secs();
        let heading = format!("Rates of the last {window} s, medians of all messages so far:\n");
        let table = heading + &table(&readers, false);
        self.clear()?;
        self.lines = table.lines().count();
        // What is wider than the terminal is cut off: lines that wrap would be more than were counted.
        text::print(&format!("\x1b[?7l{table}\x1b[?7h"))
    }

    /// Removes the table, so that something else can stand there.
    pub(super) fn clear(&mut self) -> Result<(), Failure> {
        if self.lines == 0 {
            return Ok(());
        }
        let up = format!("\x1b[{}A\x1b[J", self.lines);
        self.lines = 0;
        let mut out = std::io::stdout().lock();
        let written = out.write_all(up.as_bytes());
        written.map_err(|error| Failure::failed(format!("writing the output: {error}")))
    }

    fn line(&self, readers: &[SubscriberRow]) -> String {
        let sum = |of: fn(&ProcessReport) -> u64| {
            readers.iter().map(|it| of(&it.last_report)).sum::<u64>()
        };
        let rate: f64 = readers.iter().map(SubscriberRow::bytes_per_s).sum();
        format!(
            "{:4.0} s: {} read and compared, {}; now {}/s; {} altered, {} missed\n",
            self.started_at.elapsed().as_secs_f64(),
            text::count_of(sum(|last_report| last_report.messages), "message"),
            size::amount(sum(|last_report| last_report.bytes) as f64),
            size::amount(rate),
            sum(|last_report| last_report.corrupted),
            sum(|last_report| last_report.missed.unwrap_or(0)),
        )
    }
}

/// What is told of a subscriber: what it said, with the stages that only its publisher knows.
#[derive(Debug, Serialize)]
pub(super) struct SubscriberRow {
    pub(super) topic: &'static str,
    pub(super) message_bytes: u64,
    pub(super) name: String,
    /// Is it at the node that publishes the topic?
    #[serde(skip)]
    pub(super) is_local: bool,
    /// Messages a second lately.
    #[serde(skip)]
    pub(super) rate: f64,
    #[serde(flatten)]
    pub(super) last_report: ProcessReport,
}

impl SubscriberRow {
    /// Lately.
    fn bytes_per_s(&self) -> f64 {
        self.rate * self.message_bytes as f64
    }
}

/// The stages of a message's way, in order, and all of it together.
fn stages() -> impl Iterator<Item = &'static str> {
    Stage::ALL.into_iter().map(Stage::name).chain([TOTAL])
}

/// Those that read.
pub(super) fn readers(members: &[DemoProcess]) -> Vec<SubscriberRow> {
    let one = |member: &DemoProcess| {
        let Role::Subscribe(topic) = member.part else { return None };
        let publisher = members.iter().find(|it| it.part == Role::Publish(topic));
        let known = publisher.into_iter().chain([member]).flat_map(|it| &it.last_report.stages);
        let known: Vec<&Latency> = known.collect();
        let latency = |name| known.iter().find(|one| one.stage == name).copied().cloned();
        let latencies = stages().filter_map(latency).collect();
        let DemoTopic { name, size, from, .. } = TOPICS[topic];
        Some(SubscriberRow {
            topic: name,
            message_bytes: size,
            name: member.label.clone(),
            is_local: member.node == from,
            rate: member.rate(),
            last_report: ProcessReport { stages: latencies, ..member.last_report.clone() },
        })
    };
    members.iter().filter_map(one).collect()
}

/// A time, to three digits at most: there are many of them in a line.
pub(super) fn time(microseconds: f64) -> String {
    let (value, unit) = match microseconds {
        ..1e3 => (microseconds, "µs"),
        1e3..1e6 => (microseconds / 1e3, "ms"),
        _ => (microseconds / 1e6, "s"),
    };
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// A line for each subscriber; at the end with all that was read.
pub(super) fn table(readers: &[SubscriberRow], is_over: bool) -> String {
    let mut head = vec!["topic", "size", "subscriber", "messages"];
    if !is_over {
        head.extend(["per s", "GiB/s"]);
    }
    // One that nobody's messages have is left out: without devices nothing is copied out.
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
        row.push(
            match (last_report.messages, last_report.corrupted, last_report.missed.unwrap_or(0)) {
                (0, 0, 0) => String::new(),
                (_, 0, 0) => "right".to_owned(),
                (_, corrupted, missed) => format!("{corrupted} CORRUPTED, {missed} MISSED"),
            },
        );
        rows.push(row);
    }
    text::table(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_short() {
        for (microseconds, shown) in [(1.5, "1.5 µs"), (578_840.0, "579 ms"), (3e6, "3.0 s")] {
            assert_eq!(time(microseconds), shown);
        }
    }
}
